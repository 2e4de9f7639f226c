//! How a tensor is cut into chunks, inferred from the chunks alone: a grid like that of a mesh, ranges of the flattened
//! tensor, or neither.

use reshard::checkpoint::CatalogTensor;
use reshard::layout::{Region, coverage_up_to, flat_range};

/// A way of cutting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// One chunk holds it all.
    Whole,
    /// The cells of a grid: so many along each dimension.
    Grid(Vec<u64>),
    /// Ranges of the flattened tensor, each one a chunk or several.
    Flat,
    /// Every element once, in no order known here.
    Irregular,
    /// Elements are missing, or stored twice.
    Broken(String),
}

impl Cut {
    /// Infers the cut of a tensor.
    pub(crate) fn of(tensor: &CatalogTensor) -> Cut {
        let shape = &tensor.shape[..];
        if let [only] = &tensor.chunks[..]
            && only.region.sizes() == shape
            && only.region.offsets().iter().all(|&offset| offset == 0)
        {
            return Cut::Whole;
        }
        // Ranks that got nothing may still have written a chunk of nothing.
        let regions: Vec<&Region> = tensor.chunks.iter().map(|chunk| &chunk.region).filter(|region| !region.is_empty()).collect();
        if let Some(mut parts) = grid(shape, &regions) {
            // Where one dimension is cut, they are parts of it: 6 rows over 4 ranks are 2 + 2 + 2 + 0.
            let empty = (tensor.chunks.len() - regions.len()) as u64;
            let cut: Vec<usize> = (0..parts.len()).filter(|dim| parts[*dim] > 1).collect();
            if let (1.., [] | [_], false) = (empty, &cut[..], parts.is_empty()) {
                parts[cut.first().copied().unwrap_or(0)] += empty;
            }
            return Cut::Grid(parts);
        }
        if is_flat(shape, &regions) {
            return Cut::Flat;
        }
        let regions: Vec<Region> = regions.into_iter().cloned().collect();
        match coverage_up_to(shape, &regions, 1) {
            Ok(coverage) if coverage.is_exact() => Cut::Irregular,
            Ok(coverage) => match (coverage.gaps.first(), coverage.overlaps.first()) {
                (Some(gap), _) => Cut::Broken(format!("{gap} is in no chunk")),
                (None, Some(overlap)) => Cut::Broken(format!("{} is in two chunks", overlap.region)),
                (None, None) => Cut::Broken("its chunks do not tile it".to_owned()),
            },
            Err(error) => Cut::Broken(error.to_string()),
        }
    }

    /// `Shard(0)/4`, `Shard(0)/2 · Shard(1)/2`, `whole`.
    pub(crate) fn label(&self) -> String {
        match self {
            Cut::Whole => "whole".to_owned(),
            Cut::Grid(parts) => {
                let cut = parts.iter().enumerate().filter(|(_, parts)| **parts > 1);
                cut.map(|(dim, parts)| format!("Shard({dim})/{parts}")).collect::<Vec<_>>().join(" · ")
            }
            Cut::Flat => "flat ranges".to_owned(),
            Cut::Irregular => "irregular".to_owned(),
            Cut::Broken(_) => "broken".to_owned(),
        }
    }

    /// One word, for programs.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Cut::Whole => "whole",
            Cut::Grid(_) => "grid",
            Cut::Flat => "flat",
            Cut::Irregular => "irregular",
            Cut::Broken(_) => "broken",
        }
    }

    /// Cells along each dimension, of a grid.
    pub(crate) fn parts(&self) -> Option<&[u64]> {
        match self {
            Cut::Grid(parts) => Some(parts),
            _ => None,
        }
    }
}

/// The number of cells along each dimension, if the regions are exactly the cells of a grid.
fn grid(shape: &[u64], regions: &[&Region]) -> Option<Vec<u64>> {
    let mut starts: Vec<Vec<u64>> = Vec::with_capacity(shape.len());
    let mut cells: usize = 1;
    for (dim, &size) in shape.iter().enumerate() {
        let mut at = regions.iter().map(|region| region.offsets().get(dim).copied()).collect::<Option<Vec<u64>>>()?;
        if !at.is_sorted() {
            at.sort_unstable();
        }
        at.dedup();
        if at.first() != Some(&0) || at.last() >= Some(&size) {
            return None;
        }
        cells = cells.checked_mul(at.len())?;
        if cells > regions.len() {
            return None;
        }
        at.push(size);
        starts.push(at);
    }
    if cells != regions.len() {
        return None;
    }
    // As many cells as regions: each region must be a cell, and no two the same.
    let mut seen = vec![false; cells];
    for region in regions {
        let mut cell = 0;
        for (dim, starts) in starts.iter().enumerate() {
            let at = starts.binary_search(region.offsets().get(dim)?).ok()?;
            if starts.get(at + 1)? - starts.get(at)? != *region.sizes().get(dim)? {
                return None;
            }
            cell = cell * (starts.len() - 1) + at;
        }
        if std::mem::replace(seen.get_mut(cell)?, true) {
            return None;
        }
    }
    Some(starts.iter().map(|starts| starts.len() as u64 - 1).collect())
}

/// Whether every region is a contiguous range of the flattened tensor and the ranges tile it.
fn is_flat(shape: &[u64], regions: &[&Region]) -> bool {
    let mut ranges = Vec::with_capacity(regions.len());
    for region in regions {
        match flat_range(shape, region) {
            Ok(Some(range)) => ranges.push((range.start, range.end)),
            _ => return false,
        }
    }
    ranges.sort_unstable();
    let end = ranges.iter().try_fold(0, |end, &(start, next)| (start == end).then_some(next));
    !ranges.is_empty() && end == shape.iter().try_fold(1_u64, |n, &size| n.checked_mul(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions(boxes: &[(&[u64], &[u64])]) -> Vec<Region> {
        boxes.iter().map(|(offsets, sizes)| Region::new(offsets, sizes).unwrap()).collect()
    }

    #[test]
    fn a_grid_in_any_order_is_found() {
        let cells = regions(&[(&[3, 4], &[2, 2]), (&[0, 0], &[3, 4]), (&[0, 4], &[3, 2]), (&[3, 0], &[2, 4])]);
        assert_eq!(grid(&[5, 6], &cells.iter().collect::<Vec<_>>()), Some(vec![2, 2]));
        let twice = regions(&[(&[0, 0], &[5, 3]), (&[0, 0], &[5, 3])]);
        assert_eq!(grid(&[5, 6], &twice.iter().collect::<Vec<_>>()), None);
        let gap = regions(&[(&[0, 0], &[5, 3]), (&[0, 4], &[5, 2])]);
        assert_eq!(grid(&[5, 6], &gap.iter().collect::<Vec<_>>()), None);
    }

    #[test]
    fn flat_ranges_are_found() {
        let pieces = regions(&[(&[0, 0], &[1, 6]), (&[1, 0], &[1, 2]), (&[1, 2], &[1, 4]), (&[2, 0], &[1, 6])]);
        assert!(is_flat(&[3, 6], &pieces.iter().collect::<Vec<_>>()));
        assert!(!is_flat(&[4, 6], &pieces.iter().collect::<Vec<_>>()));
    }

    #[test]
    fn labels_speak_of_placements() {
        assert_eq!(Cut::Grid(vec![2, 1, 4]).label(), "Shard(0)/2 · Shard(2)/4");
    }
}
