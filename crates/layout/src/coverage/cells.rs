//! Cells: boxes of the tensor with the regions that reach into them, cut in two at borders of regions. A tiling that
//! is broken somewhere is narrowed down to few and small cells first, so that the exact search for what is wrong
//! looks at those alone.

use super::tiling;
use crate::{Dims, Region};

/// How many regions are asked where to cut a cell.
const SAMPLE: usize = 256;

/// Cells with no more regions than this are not narrowed down further.
const SMALL: usize = 256;

/// A box of the tensor and the regions, none of them empty, that share elements with it.
pub(super) struct Cell {
    pub(super) region: Region,
    pub(super) inside: Vec<u32>,
}

impl Cell {
    pub(super) fn whole(shape: &[u64], filled: Vec<u32>) -> Cell {
        let region = Region::from_proven(Dims::from_elem(0, shape.len()), Dims::from_slice(shape));
        Cell { region, inside: filled }
    }

    /// Cut at a border of one of its regions; `None` if no region has a border inside the cell, so that every one of
    /// them covers all of it.
    pub(super) fn halves(&self, regions: &[Region]) -> Option<(Cell, Cell)> {
        let (dim, at) = self.best_cut(regions)?;
        let part = |from: u64, to: u64| {
            let mut offsets = Dims::from_slice(self.region.offsets());
            let mut sizes = Dims::from_slice(self.region.sizes());
            (offsets[dim], sizes[dim]) = (from, to - from);
            let meets = |index: &&u32| {
                let region = &regions[**index as usize];
                region.offsets()[dim] < to && from < region.end(dim)
            };
            Cell { region: Region::from_proven(offsets, sizes), inside: self.inside.iter().filter(meets).copied().collect() }
        };
        Some((part(self.region.offsets()[dim], at), part(at, self.region.end(dim))))
    }

    /// The cut that leaves the fewest regions in the fuller half, of one near the median border of each dimension.
    /// Any border is a sound cut, so a sample of the regions is asked.
    fn best_cut(&self, regions: &[Region]) -> Option<(usize, u64)> {
        let step = self.inside.len() / SAMPLE + 1;
        let sample = || self.inside.iter().step_by(step).map(|index| &regions[*index as usize]);
        let mut best: Option<(usize, usize, u64)> = None;
        let mut borders = Vec::with_capacity(2 * SAMPLE);
        for dim in 0..self.region.ndim() {
            let (start, end) = (self.region.offsets()[dim], self.region.end(dim));
            borders.clear();
            let ends = sample().flat_map(|region| [region.offsets()[dim], region.end(dim)]);
            borders.extend(ends.filter(|at| start < *at && *at < end));
            if borders.is_empty() {
                continue;
            }
            let half = borders.len() / 2;
            let at = *borders.select_nth_unstable(half).1;
            let left = sample().filter(|region| region.offsets()[dim] < at).count();
            let right = sample().filter(|region| region.end(dim) > at).count();
            let fuller = left.max(right);
            if best.is_none_or(|best| fuller < best.0) {
                best = Some((fuller, dim, at));
            }
        }
        best.map(|(_, dim, at)| (dim, at))
    }

    /// Whether every element of the cell is in exactly one region. Volumes that disagree answer without a sweep.
    pub(super) fn is_tiled(&self, regions: &[Region]) -> bool {
        let volumes = self.inside.iter().map(|index| u128::from(regions[*index as usize].shared_volume(&self.region)));
        volumes.sum::<u128>() == u128::from(self.region.volume())
            && tiling::is_exact(&self.region, regions, &self.inside) == Some(true)
    }
}

/// Disjoint cells outside of which every element is in exactly one region: none at all for an exact tiling. The work
/// is a few times that of checking the whole, so a tensor that is broken all over comes back in large cells.
pub(super) fn broken(whole: Cell, regions: &[Region]) -> Vec<Cell> {
    let mut work_left = 4 * whole.inside.len();
    let mut found = Vec::new();
    let mut stack = vec![whole];
    while let Some(cell) = stack.pop() {
        if cell.is_tiled(regions) {
            continue;
        }
        if cell.inside.len() > SMALL
            && let Some(left) = work_left.checked_sub(cell.inside.len())
            && let Some((one, other)) = cell.halves(regions)
        {
            work_left = left;
            stack.push(other);
            stack.push(one);
        } else {
            found.push(cell);
        }
    }
    found
}
