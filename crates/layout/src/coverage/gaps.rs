//! The elements that no region has, by cutting the tensor in two at the borders of regions until a cell is empty (a
//! gap), inside one region, or full by volume. Cells that are full by volume are the reason why this is fast: where
//! the regions are disjoint, only the cells that lead to a gap are ever cut.

use std::ops::ControlFlow;

use crate::{Dims, Region};

type Flow = ControlFlow<()>;

/// How many regions are asked where to cut a cell.
const SAMPLE: usize = 256;

/// Which regions share elements with others, so that their volumes do not add up.
pub(super) enum Tangled<'a> {
    /// Exactly those that occur in these pairs.
    Pairs(&'a [(u32, u32)]),
    /// Unknown, so possibly all.
    All,
}

/// Appends the gaps as disjoint boxes, ascending. `missing` is the number of elements in gaps if it is known. Breaks
/// when there are more than `limit` of them, or when regions overlap so wildly that looking on would take more than
/// near-linear time.
pub(super) fn find(
    shape: &[u64],
    regions: &[Region],
    filled: Vec<u32>,
    missing: Option<u64>,
    tangled: &Tangled<'_>,
    limit: usize,
    gaps: &mut Vec<Region>,
) -> Flow {
    let mut is_tangled = vec![matches!(tangled, Tangled::All); regions.len()];
    if let Tangled::Pairs(pairs) = tangled {
        for (first, second) in *pairs {
            (is_tangled[*first as usize], is_tangled[*second as usize]) = (true, true);
        }
    }
    let count = filled.len() as u64;
    let mut search = Search {
        regions,
        is_tangled,
        missing,
        work_left: 1_000_000 + 64 * count * u64::from(64 - count.leading_zeros()),
        limit,
        gaps,
    };
    let whole = Region::from_proven(Dims::from_elem(0, shape.len()), Dims::from_slice(shape));
    let mut stack = vec![(whole, filled)];
    let mut flow = Flow::Continue(());
    while let (Some((cell, inside)), true) =
        (stack.pop(), flow.is_continue() && search.missing != Some(0))
    {
        flow = search.visit(cell, inside, &mut stack);
    }
    join_touching(search.gaps, shape.len());
    flow
}

struct Search<'a> {
    regions: &'a [Region],
    is_tangled: Vec<bool>,
    missing: Option<u64>,
    work_left: u64,
    limit: usize,
    gaps: &'a mut Vec<Region>,
}

impl Search<'_> {
    /// Settles a cell, of which `inside` are the regions that overlap it, or pushes its two halves.
    fn visit(
        &mut self,
        cell: Region,
        inside: Vec<u32>,
        stack: &mut Vec<(Region, Vec<u32>)>,
    ) -> Flow {
        if inside.is_empty() {
            return self.gap(cell);
        }
        self.work_left = match self.work_left.checked_sub(inside.len() as u64) {
            Some(left) => left,
            None => return Flow::Break(()),
        };
        let mut volume = 0u128;
        let mut adds_up = true;
        for index in &inside {
            let region = &self.regions[*index as usize];
            if region.contains(&cell) {
                return Flow::Continue(());
            }
            adds_up &= !self.is_tangled[*index as usize];
            volume += u128::from(region.shared_volume(&cell));
        }
        if adds_up && volume == u128::from(cell.volume()) {
            return Flow::Continue(());
        }
        // A region that does not contain the cell has a border inside it, so there is always a cut.
        let Some((dim, at)) = self.best_cut(&cell, &inside) else {
            return Flow::Continue(());
        };
        let (left, right) = split(&cell, dim, at);
        let touching = |cell: &Region| {
            let (start, end) = (cell.offsets()[dim], cell.end(dim));
            let meets = |index: &&u32| {
                let region = &self.regions[**index as usize];
                region.offsets()[dim] < end && start < region.end(dim)
            };
            inside.iter().filter(meets).copied().collect::<Vec<u32>>()
        };
        let (in_left, in_right) = (touching(&left), touching(&right));
        stack.push((right, in_right));
        stack.push((left, in_left));
        Flow::Continue(())
    }

    fn gap(&mut self, cell: Region) -> Flow {
        if self.gaps.len() == self.limit {
            return Flow::Break(());
        }
        if let Some(missing) = &mut self.missing {
            *missing = missing.saturating_sub(cell.volume());
        }
        self.gaps.push(cell);
        Flow::Continue(())
    }

    /// The cut that leaves the fewest regions in the fuller half, of one near the median border of each dimension.
    /// Any border is a sound cut, so a sample of the regions is asked.
    fn best_cut(&self, cell: &Region, inside: &[u32]) -> Option<(usize, u64)> {
        let sample = || {
            inside
                .iter()
                .step_by(inside.len() / SAMPLE + 1)
                .map(|index| &self.regions[*index as usize])
        };
        let mut best: Option<(usize, usize, u64)> = None;
        let mut borders = Vec::with_capacity(2 * SAMPLE);
        for dim in 0..cell.ndim() {
            let (start, end) = (cell.offsets()[dim], cell.end(dim));
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
}

fn split(cell: &Region, dim: usize, at: u64) -> (Region, Region) {
    let (start, end) = (cell.offsets()[dim], cell.end(dim));
    let part = |from: u64, to: u64| {
        let (mut offsets, mut sizes) = (
            Dims::from_slice(cell.offsets()),
            Dims::from_slice(cell.sizes()),
        );
        (offsets[dim], sizes[dim]) = (from, to - from);
        Region::from_proven(offsets, sizes)
    };
    (part(start, at), part(at, end))
}

/// Joins gaps that make a larger box: the cuts went through them, their names need not.
fn join_touching(gaps: &mut Vec<Region>, ndim: usize) {
    loop {
        let before = gaps.len();
        for dim in (0..ndim).rev() {
            gaps.sort_unstable_by(|a, b| {
                let others = |it: &Region| -> (Dims, Dims) {
                    (without(it.offsets(), dim), without(it.sizes(), dim))
                };
                others(a)
                    .cmp(&others(b))
                    .then(a.offsets()[dim].cmp(&b.offsets()[dim]))
            });
            gaps.dedup_by(|next, kept| {
                let continues = kept.end(dim) == next.offsets()[dim]
                    && without(kept.offsets(), dim) == without(next.offsets(), dim)
                    && without(kept.sizes(), dim) == without(next.sizes(), dim);
                if continues {
                    let mut sizes = Dims::from_slice(kept.sizes());
                    sizes[dim] += next.sizes()[dim];
                    *kept = Region::from_proven(Dims::from_slice(kept.offsets()), sizes);
                }
                continues
            });
        }
        if gaps.len() == before {
            gaps.sort_unstable();
            return;
        }
    }
}

fn without(numbers: &[u64], dim: usize) -> Dims {
    numbers
        .iter()
        .enumerate()
        .filter(|(at, _)| *at != dim)
        .map(|(_, number)| *number)
        .collect()
}
