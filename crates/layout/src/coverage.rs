//! Coverage: whether regions tile a tensor exactly, and if they do not, which elements are missing and which regions
//! overlap, in near-linear time. One sweep says whether a box is tiled (`tiling`); what is not is narrowed down to
//! cells (`cells`), in which a join names the overlaps (`join`) and cutting at borders the gaps (`gaps`).

mod cells;
mod gaps;
mod join;
mod tiling;

use std::collections::HashSet;

use cells::Cell;
use gaps::Tangled;

use crate::region::volume_of;
use crate::{LayoutError, Region};

/// How many gaps and how many overlaps [`coverage`] names at most.
pub const NAMED_LIMIT: usize = 1000;

/// Two regions of a list that share elements.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Overlap {
    /// Position of the first in the list.
    pub first: usize,
    /// Position of the second, larger than `first`.
    pub second: usize,
    /// What they share.
    pub region: Region,
}

/// What is wrong with a set of regions as a tiling of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Coverage {
    /// Elements that no region has, as disjoint boxes, ascending.
    pub gaps: Vec<Region>,
    /// Pairs of regions that share elements, ascending.
    pub overlaps: Vec<Overlap>,
    /// There is more to say than these lists hold.
    pub truncated: bool,
    /// Every element was accounted for: if `gaps` is empty, there are none.
    pub gaps_complete: bool,
}

impl Coverage {
    /// Whether every element belongs to exactly one region.
    pub fn is_exact(&self) -> bool {
        self.overlaps.is_empty() && self.is_covered() && !self.truncated
    }

    /// Whether every element belongs to at least one region.
    pub fn is_covered(&self) -> bool {
        self.gaps.is_empty() && self.gaps_complete
    }
}

/// Gaps and overlaps of regions that should tile a tensor; of each at most [`NAMED_LIMIT`] are named.
pub fn coverage(shape: &[u64], regions: &[Region]) -> Result<Coverage, LayoutError> {
    coverage_up_to(shape, regions, NAMED_LIMIT)
}

/// As [`coverage`], naming at most `limit` gaps and `limit` overlaps.
pub fn coverage_up_to(shape: &[u64], regions: &[Region], limit: usize) -> Result<Coverage, LayoutError> {
    let elements = volume_of(shape)?;
    for (index, region) in regions.iter().enumerate() {
        region.check_listed_inside(index, shape)?;
    }
    if regions.len() >= u32::MAX as usize {
        return Err(LayoutError::TooManyRegions { field: "regions", limit: u64::from(u32::MAX) });
    }
    let is_filled = |(_, region): &(u32, &Region)| !region.is_empty();
    let filled: Vec<u32> = (0u32..).zip(regions).filter(is_filled).map(|(index, _)| index).collect();
    let mut cells = match elements {
        0 => Vec::new(),
        _ => cells::broken(Cell::whole(shape, filled), regions),
    };
    let mut found = Coverage { gaps_complete: true, ..Coverage::default() };
    if cells.is_empty() {
        return Ok(found);
    }
    let mut suspects: Vec<u32> = cells.iter().flat_map(|cell| &cell.inside).copied().collect();
    suspects.sort_unstable();
    suspects.dedup();
    let mut pairs = Vec::new();
    found.truncated = join::overlapping_pairs(shape, regions, &suspects, limit, &mut pairs).is_break();
    pairs.sort_unstable();
    let missing = if pairs.is_empty() && !found.truncated {
        // Disjoint regions inside the tensor never have more elements than it has.
        let stored: u128 = regions.iter().map(|region| u128::from(region.volume())).sum();
        Some(elements.saturating_sub(u64::try_from(stored).unwrap_or(u64::MAX)))
    } else {
        drop_copies(&mut cells, regions, suspects);
        None
    };
    let tangled = if found.truncated { Tangled::All } else { Tangled::Pairs(&pairs) };
    found.gaps_complete = gaps::find(cells, regions, missing, &tangled, limit, &mut found.gaps).is_continue();
    found.truncated |= !found.gaps_complete;
    found.overlaps = pairs
        .into_iter()
        .filter_map(|(first, second)| {
            let (first, second) = (first as usize, second as usize);
            let region = regions[first].intersection(&regions[second])?;
            Some(Overlap { first, second, region })
        })
        .collect();
    Ok(found)
}

/// Copies of one region say nothing more about gaps; and without them most cells are tiled again.
fn drop_copies(cells: &mut Vec<Cell>, regions: &[Region], mut suspects: Vec<u32>) {
    suspects.sort_unstable_by_key(|index| (&regions[*index as usize], *index));
    let is_copy = |pair: &&[u32]| regions[pair[0] as usize] == regions[pair[1] as usize];
    let copies: HashSet<u32> = suspects.windows(2).filter(is_copy).map(|pair| pair[1]).collect();
    if copies.is_empty() {
        return;
    }
    for cell in &mut *cells {
        cell.inside.retain(|index| !copies.contains(index));
    }
    cells.retain(|cell| !cell.is_tiled(regions));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets, sizes).unwrap()
    }

    fn grid(rows: u64, columns: u64) -> Vec<Region> {
        (0..rows * columns).map(|cell| region(&[cell / columns * 2, cell % columns * 3], &[2, 3])).collect()
    }

    #[test]
    fn a_missing_chunk_is_named_exactly() {
        let mut chunks = grid(30, 20);
        assert!(coverage(&[60, 60], &chunks).unwrap().is_exact());
        let missing = chunks.remove(271);
        let found = coverage(&[60, 60], &chunks).unwrap();
        assert_eq!((&found.gaps, found.overlaps.len(), found.truncated), (&vec![missing], 0, false));
        assert!(!found.is_exact() && !found.is_covered());
    }

    #[test]
    fn an_overlap_is_named_with_both_regions() {
        let mut chunks = grid(10, 10);
        chunks.push(region(&[3, 4], &[1, 1]));
        let found = coverage(&[20, 30], &chunks).unwrap();
        assert_eq!(found.overlaps, [Overlap { first: 11, second: 100, region: region(&[3, 4], &[1, 1]) }]);
        assert!(found.is_covered() && !found.is_exact());
    }

    #[test]
    fn duplicates_do_not_hide_a_gap() {
        let chunks = vec![region(&[0], &[4]), region(&[0], &[4])];
        let found = coverage(&[8], &chunks).unwrap();
        assert_eq!(found.gaps, [region(&[4], &[4])]);
        assert_eq!(found.overlaps.len(), 1);
    }

    #[test]
    fn scalars_and_empty_tensors() {
        assert!(coverage(&[], &[region(&[], &[])]).unwrap().is_exact());
        assert_eq!(coverage(&[], &[]).unwrap().gaps, [region(&[], &[])]);
        assert_eq!(coverage(&[], &[region(&[], &[]), region(&[], &[])]).unwrap().overlaps.len(), 1);
        assert!(coverage(&[0, 3], &[]).unwrap().is_exact());
        assert!(coverage(&[0, 3], &vec![region(&[0, 0], &[0, 3]); 2]).unwrap().is_exact());
        assert_eq!(coverage(&[2, 3], &[]).unwrap().gaps, [region(&[0, 0], &[2, 3])]);
    }

    #[test]
    fn the_lists_are_bounded() {
        let all = vec![region(&[0, 0], &[4, 4]); 3000];
        let found = coverage(&[4, 4], &all).unwrap();
        assert_eq!((found.overlaps.len(), found.truncated, found.is_covered()), (NAMED_LIMIT, true, true));
        let every_other: Vec<_> = (0..5000).map(|at| region(&[2 * at], &[1])).collect();
        let found = coverage(&[10_000], &every_other).unwrap();
        assert_eq!((found.gaps.len(), found.truncated, found.is_covered()), (NAMED_LIMIT, true, false));
    }

    #[test]
    fn regions_outside_are_refused() {
        assert!(matches!(coverage(&[4], &[region(&[2], &[3])]), Err(LayoutError::ListedOutOfBounds { index: 0, dim: 0, .. })));
        assert!(matches!(coverage(&[4, 4], &[region(&[2], &[2])]), Err(LayoutError::RankMismatch { .. })));
    }
}
