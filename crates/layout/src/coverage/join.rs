//! All pairs of regions that overlap, by the streamed segment trees of Zomorodian and Edelsbrunner ("Fast software for
//! box intersections", 2000): O(n logᵈ n + pairs) for n boxes in d dimensions, whatever the boxes look like.
//!
//! Coordinates are replaced by ranks first: in each dimension the starts are numbered in ascending order, ties by
//! position, and an end becomes the number of starts below it. Then no two starts are equal, and of two boxes that
//! overlap in a dimension exactly one contains the start of the other.

use std::ops::ControlFlow;

use crate::Region;

/// Below this many boxes on either side, testing pairs beats another level of the tree.
const FEW: usize = 64;

type Flow = ControlFlow<()>;

/// Appends the pairs `(smaller, larger)` of positions in `regions`, out of `filled` (none of them empty), that
/// overlap; breaks when there are more than `limit`.
pub(super) fn overlapping_pairs(
    shape: &[u64],
    regions: &[Region],
    filled: &[u32],
    limit: usize,
    pairs: &mut Vec<(u32, u32)>,
) -> Flow {
    // Dimensions that no region cuts say nothing.
    let cut = |dim: &usize| filled.iter().any(|index| regions[*index as usize].sizes()[*dim] != shape[*dim]);
    let dims: Vec<usize> = (0..shape.len()).filter(cut).collect();
    let Some((first, rest)) = dims.split_first() else {
        return all_pairs(filled, limit, pairs);
    };
    // Boxes are renumbered by their start in the first dimension, so that every list below is in scanning order.
    let mut order = filled.to_vec();
    let start = |index: &u32| (regions[*index as usize].offsets()[*first], *index);
    if !order.is_sorted_by_key(start) {
        order.sort_by_key(start);
    }
    let mut ranks: Vec<Vec<Rank>> = vec![ranks_in(*first, regions, &order)];
    ranks.extend(rest.iter().map(|dim| ranks_in(*dim, regions, &order)));
    let all: Vec<u32> = (0..order.len() as u32).collect();
    Join { ranks, order: &order, limit, pairs }.tree(&all, &all, Rank { start: 0, end: all.len() as u32 }, dims.len() - 1)
}

/// Every region covers the same elements.
fn all_pairs(filled: &[u32], limit: usize, pairs: &mut Vec<(u32, u32)>) -> Flow {
    for (at, first) in filled.iter().enumerate() {
        for second in &filled[at + 1..] {
            if pairs.len() == limit {
                return Flow::Break(());
            }
            pairs.push((*first, *second));
        }
    }
    Flow::Continue(())
}

/// A box's interval in one dimension, in ranks; also a segment of the tree.
#[derive(Clone, Copy, Default)]
struct Rank {
    start: u32,
    end: u32,
}

impl Rank {
    fn has(self, start: u32) -> bool {
        self.start <= start && start < self.end
    }

    fn meets(self, other: Rank) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// The rank intervals of one dimension, by position in `order`.
fn ranks_in(dim: usize, regions: &[Region], order: &[u32]) -> Vec<Rank> {
    let ends_of = |index: u32| {
        let region = &regions[index as usize];
        (region.offsets()[dim], region.end(dim))
    };
    let mut starts: Vec<(u64, u32)> = order.iter().zip(0..).map(|(index, at)| (ends_of(*index).0, at)).collect();
    let mut ends: Vec<(u64, u32)> = order.iter().zip(0..).map(|(index, at)| (ends_of(*index).1, at)).collect();
    sort(&mut starts);
    sort(&mut ends);
    let mut ranks = vec![Rank::default(); order.len()];
    for ((_, at), rank) in starts.iter().zip(0..) {
        ranks[*at as usize].start = rank;
    }
    let mut below = 0;
    for (end, at) in ends {
        while starts.get(below).is_some_and(|(start, _)| *start < end) {
            below += 1;
        }
        ranks[at as usize].end = below as u32;
    }
    ranks
}

fn sort(ends: &mut [(u64, u32)]) {
    if !ends.is_sorted() {
        // Stable, because it finds the ascending stretches that lists of chunks are full of.
        ends.sort();
    }
}

struct Join<'a> {
    /// Per dimension and box.
    ranks: Vec<Vec<Rank>>,
    /// Box number to position in the caller's list.
    order: &'a [u32],
    limit: usize,
    pairs: &'a mut Vec<(u32, u32)>,
}

impl Join<'_> {
    /// Reports the pairs of a box of `holding` that contains the start of a box of `points` in dimension `dim`, and
    /// overlaps it in all lower dimensions. All starts of `points` in `dim` lie in `segment`, all of `holding` meet it.
    fn tree(&mut self, holding: &[u32], points: &[u32], segment: Rank, dim: usize) -> Flow {
        if holding.is_empty() || points.is_empty() {
            return Flow::Continue(());
        }
        if dim == 0 {
            return self.scan(holding, points);
        }
        if holding.len() < FEW || points.len() < FEW {
            return self.scan_few(holding, points, dim);
        }
        let rank = |at: &u32| self.ranks[dim][*at as usize];
        let middle = self.median_start(points, dim);
        let (left, right) = (Rank { start: segment.start, end: middle }, Rank { start: middle, end: segment.end });
        let (mut spanning, mut in_left, mut in_right) = (Vec::new(), Vec::new(), Vec::new());
        for at in holding {
            let rank = rank(at);
            if rank.start <= segment.start && segment.end <= rank.end {
                spanning.push(*at);
            } else {
                if rank.meets(left) {
                    in_left.push(*at);
                }
                if rank.meets(right) {
                    in_right.push(*at);
                }
            }
        }
        if !spanning.is_empty() {
            // These contain every point here; what remains is to overlap in the lower dimensions, either way around.
            let whole = Rank { start: 0, end: self.order.len() as u32 };
            self.tree(&spanning, points, whole, dim - 1)?;
            self.tree(points, &spanning, whole, dim - 1)?;
        }
        drop(spanning);
        let rank = |at: &u32| self.ranks[dim][*at as usize];
        let (left_points, right_points): (Vec<u32>, Vec<u32>) = points.iter().partition(|at| rank(at).start < middle);
        self.tree(&in_left, &left_points, left, dim)?;
        drop((in_left, left_points));
        self.tree(&in_right, &right_points, right, dim)
    }

    /// The median start: both halves of `points` are smaller than the whole, because no two starts are equal.
    fn median_start(&self, points: &[u32], dim: usize) -> u32 {
        let mut starts: Vec<u32> = points.iter().map(|at| self.ranks[dim][*at as usize].start).collect();
        let half = starts.len() / 2;
        *starts.select_nth_unstable(half).1
    }

    /// Dimension zero: the lists are in order of their starts, and everything that is met is a pair.
    fn scan(&mut self, holding: &[u32], points: &[u32]) -> Flow {
        let mut left = points;
        for at in holding {
            let interval = self.ranks[0][*at as usize];
            while let Some((point, rest)) = left.split_first()
                && self.ranks[0][*point as usize].start < interval.start
            {
                left = rest;
            }
            for point in left {
                if !interval.has(self.ranks[0][*point as usize].start) {
                    break;
                }
                self.report(*at, *point)?;
            }
        }
        Flow::Continue(())
    }

    /// A few boxes against many, without a tree: pairs that meet in dimension zero are tested in the others.
    fn scan_few(&mut self, holding: &[u32], points: &[u32], dim: usize) -> Flow {
        let (mut holding_left, mut points_left) = (holding, points);
        // The box that starts first is compared with those of the other list that start inside it.
        while let (Some((hold, other_holding)), Some((point, other_points))) =
            (holding_left.split_first(), points_left.split_first())
        {
            let (held, pointed) = (self.ranks[0][*hold as usize], self.ranks[0][*point as usize]);
            if held.start < pointed.start {
                for point in points_left {
                    if !held.has(self.ranks[0][*point as usize].start) {
                        break;
                    }
                    self.report_if(*hold, *point, dim)?;
                }
                holding_left = other_holding;
            } else {
                // Equal starts are one and the same box in both lists, which is no pair.
                for hold in holding_left {
                    if !pointed.has(self.ranks[0][*hold as usize].start) {
                        break;
                    }
                    self.report_if(*hold, *point, dim)?;
                }
                points_left = other_points;
            }
        }
        Flow::Continue(())
    }

    fn report_if(&mut self, hold: u32, point: u32, dim: usize) -> Flow {
        let rank = |dim: usize, at: u32| self.ranks[dim][at as usize];
        if rank(dim, hold).has(rank(dim, point).start) && (1..dim).all(|lower| rank(lower, hold).meets(rank(lower, point))) {
            return self.report(hold, point);
        }
        Flow::Continue(())
    }

    fn report(&mut self, one: u32, other: u32) -> Flow {
        if one != other {
            if self.pairs.len() == self.limit {
                return Flow::Break(());
            }
            let (one, other) = (self.order[one as usize], self.order[other as usize]);
            self.pairs.push((one.min(other), one.max(other)));
        }
        Flow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Touching is not overlapping: what only touches must not even count against the limit.
    #[test]
    fn a_grid_has_no_pairs_and_a_stray_box_has_its_own() {
        let region = |offsets: &[u64], sizes: &[u64]| Region::new(offsets, sizes).unwrap();
        let mut regions: Vec<Region> = (0..900).map(|at| region(&[at / 30 * 2, at % 30 * 2], &[2, 2])).collect();
        regions.push(region(&[3, 4], &[2, 2]));
        let all: Vec<u32> = (0..901).collect();
        let mut pairs = Vec::new();
        assert!(overlapping_pairs(&[60, 60], &regions, &all[..900], 0, &mut pairs).is_continue());
        assert!(overlapping_pairs(&[60, 60], &regions, &all, 2, &mut pairs).is_continue());
        pairs.sort_unstable();
        assert_eq!(pairs, [(32, 900), (62, 900)]);
        pairs.clear();
        assert!(overlapping_pairs(&[60, 60], &regions, &all, 1, &mut pairs).is_break());
    }
}
