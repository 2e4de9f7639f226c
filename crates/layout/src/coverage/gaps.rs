//! The elements that no region has, by cutting the tensor in two at the borders of regions until a cell is empty (a
//! gap), inside one region, or full by volume. Cells that are full by volume are the reason why this is fast: where
//! the regions are disjoint, only the cells that lead to a gap are ever cut.

use std::ops::ControlFlow;

use super::cells::Cell;
use crate::{Dims, Region};

type Flow = ControlFlow<()>;

/// Which regions share elements with others, so that their volumes do not add up.
pub(super) enum Tangled<'a> {
    /// Exactly those that occur in these pairs.
    Pairs(&'a [(u32, u32)]),
    /// Unknown, so possibly all.
    All,
}

/// Appends the gaps inside disjoint cells as disjoint boxes, ascending. `missing` is the number of elements in gaps if
/// it is known. Breaks when there are more than `limit` of them, or when regions overlap so wildly that looking on
/// would take more than near-linear time.
pub(super) fn find(
    cells: Vec<Cell>,
    regions: &[Region],
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
    let count: u64 = cells.iter().map(|cell| cell.inside.len() as u64).sum();
    let mut search = Search {
        regions,
        is_tangled,
        missing,
        work_left: 1_000_000 + 8 * count * u64::from(64 - count.leading_zeros()),
        limit,
        gaps,
    };
    let mut stack = cells;
    let mut flow = Flow::Continue(());
    while let (Some(cell), true) = (stack.pop(), flow.is_continue() && search.missing != Some(0)) {
        flow = search.visit(cell, &mut stack);
    }
    join_touching(search.gaps);
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
    /// Settles a cell, or pushes its two halves.
    fn visit(&mut self, cell: Cell, stack: &mut Vec<Cell>) -> Flow {
        if cell.inside.is_empty() {
            return self.gap(cell.region);
        }
        self.work_left = match self.work_left.checked_sub(cell.inside.len() as u64) {
            Some(left) => left,
            None => return Flow::Break(()),
        };
        let mut volume = 0u128;
        let mut adds_up = true;
        for index in &cell.inside {
            let region = &self.regions[*index as usize];
            if region.contains(&cell.region) {
                return Flow::Continue(());
            }
            adds_up &= !self.is_tangled[*index as usize];
            volume += u128::from(region.shared_volume(&cell.region));
        }
        if adds_up && volume == u128::from(cell.region.volume()) {
            return Flow::Continue(());
        }
        // A region that does not contain the cell has a border inside it, so there is always a cut.
        if let Some((left, right)) = cell.halves(self.regions) {
            stack.push(right);
            stack.push(left);
        }
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
}

/// Joins gaps that make a larger box: the cuts went through them, their names need not.
fn join_touching(gaps: &mut Vec<Region>) {
    let ndim = gaps.first().map_or(0, Region::ndim);
    loop {
        let before = gaps.len();
        for dim in (0..ndim).rev() {
            gaps.sort_unstable_by(|a, b| {
                let others = |it: &Region| -> (Dims, Dims) { (without(it.offsets(), dim), without(it.sizes(), dim)) };
                others(a).cmp(&others(b)).then(a.offsets()[dim].cmp(&b.offsets()[dim]))
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
    numbers.iter().enumerate().filter(|(at, _)| *at != dim).map(|(_, number)| *number).collect()
}
