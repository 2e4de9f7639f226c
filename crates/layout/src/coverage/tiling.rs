//! Whether regions tile a box exactly, without asking which pairs overlap. A box is its corners: the signed corners
//! of all regions must add up to the corners of the whole box, and then every element is in exactly one region.
//!
//! Corners are compared by sweeping one dimension after the other. At each coordinate the regions that start there
//! count +1 and those that end there −1, and what they make up in the remaining dimensions must vanish. That is
//! O(2ᵈ n log n) for d dimensions that are cut at all, in any arrangement.

use smallvec::SmallVec;

use crate::Region;

/// A region that starts or ends at a coordinate.
#[derive(Clone, Copy)]
struct Event {
    at: u64,
    region: u32,
    sign: i32,
}

/// Whether `filled`, regions that share elements with `cell`, tile it: `None` if finding out took too long, which
/// many dimensions can do.
pub(super) fn is_exact(cell: &Region, regions: &[Region], filled: &[u32]) -> Option<bool> {
    let mut sweep = Sweep { cell, regions, dims: SmallVec::new(), events: Vec::new(), work_left: 64 * filled.len() + 4096 };
    let cuts = |dim: &usize| filled.iter().any(|index| sweep.interval(*index, *dim) != sweep.interval(WHOLE, *dim));
    sweep.dims = (0..cell.ndim()).filter(cuts).collect();
    // The whole cell, with the opposite sign, is one more region: then everything must vanish.
    let signed: Vec<(u32, i32)> = filled.iter().map(|index| (*index, 1)).chain([(WHOLE, -1)]).collect();
    sweep.vanishes(&signed, 0)
}

/// Stands for the whole cell among the numbers of regions.
const WHOLE: u32 = u32::MAX;

struct Sweep<'a> {
    cell: &'a Region,
    regions: &'a [Region],
    dims: SmallVec<[usize; 8]>,
    /// One list per dimension that is being swept, reused from group to group.
    events: Vec<Vec<Event>>,
    work_left: usize,
}

impl Sweep<'_> {
    /// What a region has of a dimension of the cell.
    fn interval(&self, region: u32, dim: usize) -> (u64, u64) {
        let (start, end) = (self.cell.offsets()[dim], self.cell.end(dim));
        match self.regions.get(region as usize) {
            Some(region) => (region.offsets()[dim].max(start), region.end(dim).min(end)),
            None => (start, end),
        }
    }

    /// Whether signed regions add up to nothing in the dimensions from number `level` on.
    fn vanishes(&mut self, signed: &[(u32, i32)], level: usize) -> Option<bool> {
        let Some(dim) = self.dims.get(level).copied() else {
            return Some(signed.iter().map(|(_, sign)| i64::from(*sign)).sum::<i64>() == 0);
        };
        match signed {
            // One region alone is not nothing.
            [_] => return Some(false),
            // Two are, if they are the same with opposite signs; this is most groups of a real tiling.
            [(one, plus), (other, minus)] => {
                let same = |dim: &usize| self.interval(*one, *dim) == self.interval(*other, *dim);
                return Some(plus + minus == 0 && self.dims[level..].iter().all(same));
            }
            _ => {}
        }
        self.work_left = self.work_left.checked_sub(2 * signed.len())?;
        let mut events = self.events.pop().unwrap_or_default();
        events.clear();
        // Starts, then ends: in lists that ascend, two ascending stretches, which the sort only has to merge.
        events.extend(signed.iter().map(|(region, sign)| Event {
            at: self.interval(*region, dim).0,
            region: *region,
            sign: *sign,
        }));
        events.extend(signed.iter().map(|(region, sign)| Event {
            at: self.interval(*region, dim).1,
            region: *region,
            sign: -sign,
        }));
        events.sort_by_key(|event| event.at);
        let mut answer = Some(true);
        if level + 1 == self.dims.len() {
            let sums = events.chunk_by(|a, b| a.at == b.at).map(|group| group.iter().map(|it| i64::from(it.sign)).sum());
            answer = Some(sums.into_iter().all(|sum: i64| sum == 0));
        } else {
            let mut group: Vec<(u32, i32)> = Vec::new();
            for same in events.chunk_by(|a, b| a.at == b.at) {
                group.clear();
                group.extend(same.iter().map(|event| (event.region, event.sign)));
                answer = self.vanishes(&group, level + 1);
                if answer != Some(true) {
                    break;
                }
            }
        }
        self.events.push(events);
        answer
    }
}
