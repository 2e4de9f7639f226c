//! The regular case: the regions are exactly the cells of a product of disjoint intervals, one list per dimension.
//! One-dimensional shards, two-dimensional meshes and a single whole region are all grids.

use smallvec::SmallVec;

use crate::Region;

#[derive(Clone, Debug)]
pub(super) struct Grid {
    /// Per dimension the intervals of the cells, ascending and disjoint.
    cuts: SmallVec<[Vec<(u64, u64)>; 4]>,
    /// The region of each cell, in row-major order of the cells.
    cells: Vec<u32>,
}

impl Grid {
    /// The grid that the non-empty regions make up, if they make up one, every cell filled once.
    pub(super) fn detect(ndim: usize, regions: &[Region]) -> Option<Grid> {
        let filled = regions.iter().filter(|region| !region.is_empty()).count();
        let mut cuts = SmallVec::with_capacity(ndim);
        let mut cell_count = 1usize;
        for dim in 0..ndim {
            let intervals = distinct_intervals(dim, regions);
            if intervals.windows(2).any(|pair| pair[0].1 > pair[1].0) {
                return None;
            }
            cell_count = cell_count.checked_mul(intervals.len()).filter(|count| *count <= filled)?;
            cuts.push(intervals);
        }
        if cell_count != filled {
            return None;
        }
        let mut cells = vec![u32::MAX; filled];
        for (index, region) in regions.iter().enumerate() {
            if !region.is_empty() {
                let cell = cells.get_mut(cell_of(&cuts, region)?)?;
                if *cell != u32::MAX {
                    return None;
                }
                *cell = u32::try_from(index).ok()?;
            }
        }
        Some(Grid { cuts, cells })
    }

    pub(super) fn for_each(&self, wanted: &Region, visit: &mut impl FnMut(usize)) {
        let mut ranges: SmallVec<[(usize, usize); 4]> = SmallVec::with_capacity(self.cuts.len());
        for (cuts, (start, end)) in self.cuts.iter().zip(wanted.intervals()) {
            let first = cuts.partition_point(|cut| cut.1 <= start);
            let count = starting_before(&cuts[first..], end);
            if count == 0 {
                return;
            }
            ranges.push((first, first + count));
        }
        self.visit_cells(&ranges, 0, 0, visit);
    }

    fn visit_cells(&self, ranges: &[(usize, usize)], dim: usize, cell: usize, visit: &mut impl FnMut(usize)) {
        let Some((first, end)) = ranges.get(dim).copied() else {
            if let Some(region) = self.cells.get(cell) {
                visit(*region as usize);
            }
            return;
        };
        for position in first..end {
            self.visit_cells(ranges, dim + 1, cell * self.cuts[dim].len() + position, visit);
        }
    }
}

/// How many of ascending intervals start before `end`, in time that depends on how many those are.
fn starting_before(cuts: &[(u64, u64)], end: u64) -> usize {
    let mut reach = 1;
    while cuts.get(reach).is_some_and(|cut| cut.0 < end) {
        reach *= 2;
    }
    let near = &cuts[..cuts.len().min(reach)];
    near.partition_point(|cut| cut.0 < end)
}

/// The intervals that the non-empty regions have in a dimension, each once, ascending.
fn distinct_intervals(dim: usize, regions: &[Region]) -> Vec<(u64, u64)> {
    let mut intervals: Vec<(u64, u64)> = Vec::new();
    for region in regions {
        if !region.is_empty() {
            let interval = (region.offsets()[dim], region.end(dim));
            // Neighbours in a list of chunks often share an interval.
            if intervals.last() != Some(&interval) {
                intervals.push(interval);
            }
        }
    }
    if !intervals.is_sorted() {
        intervals.sort_unstable();
    }
    intervals.dedup();
    intervals
}

fn cell_of(cuts: &[Vec<(u64, u64)>], region: &Region) -> Option<usize> {
    let mut cell = 0;
    for (cuts, interval) in cuts.iter().zip(region.intervals()) {
        cell = cell * cuts.len() + cuts.binary_search(&interval).ok()?;
    }
    Some(cell)
}
