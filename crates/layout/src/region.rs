//! `Region`: a box of elements in a tensor. Construction checks everything once (ranks agree, ends and volume fit in
//! 64 bits), so that all later arithmetic on a region's own numbers is plain.

use std::fmt;

use crate::error::check_rank;
use crate::{Dims, LayoutError};

/// A box: where it starts and how far it reaches in each dimension. It may have no dimensions at all (a scalar, of
/// volume one) and it may be empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    offsets: Dims,
    sizes: Dims,
}

/// The number of elements of a shape; zero as soon as one dimension is zero, however large the others are.
pub fn volume_of(shape: &[u64]) -> Result<u64, LayoutError> {
    if shape.contains(&0) {
        return Ok(0);
    }
    shape
        .iter()
        .try_fold(1u64, |product, &size| product.checked_mul(size))
        .ok_or_else(|| LayoutError::overflow(format!("the volume of {shape:?}")))
}

impl Region {
    /// A region from one offset and one size per dimension.
    pub fn new(offsets: &[u64], sizes: &[u64]) -> Result<Region, LayoutError> {
        check_rank("sizes", offsets.len(), sizes.len())?;
        for (dim, (offset, size)) in offsets.iter().zip(sizes).enumerate() {
            if offset.checked_add(*size).is_none() {
                return Err(LayoutError::overflow(format!("offsets[{dim}] + sizes[{dim}] = {offset} + {size}")));
            }
        }
        volume_of(sizes)?;
        Ok(Region { offsets: Dims::from_slice(offsets), sizes: Dims::from_slice(sizes) })
    }

    /// The region that is a whole tensor of this shape.
    pub fn whole(shape: &[u64]) -> Result<Region, LayoutError> {
        volume_of(shape)?;
        Ok(Region { offsets: Dims::from_elem(0, shape.len()), sizes: Dims::from_slice(shape) })
    }

    /// From numbers that are already known to be sound: parts of an existing region.
    pub(crate) fn from_proven(offsets: Dims, sizes: Dims) -> Region {
        debug_assert_eq!(offsets.len(), sizes.len());
        Region { offsets, sizes }
    }

    /// Where the region starts, in each dimension.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// How many elements it has in each dimension.
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// One past its last index in a dimension; zero for a dimension that it does not have.
    pub fn end(&self, dim: usize) -> u64 {
        match (self.offsets.get(dim), self.sizes.get(dim)) {
            (Some(offset), Some(size)) => offset + size,
            _ => 0,
        }
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.offsets.len()
    }

    /// The number of elements. A region without dimensions has one.
    pub fn volume(&self) -> u64 {
        if self.is_empty() { 0 } else { self.sizes.iter().product() }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// The half-open interval of each dimension.
    pub(crate) fn intervals(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.offsets.iter().zip(&self.sizes).map(|(offset, size)| (*offset, offset + size))
    }

    /// The first dimension in which this region reaches past `shape`, if ranks agree.
    fn first_outside(&self, shape: &[u64]) -> Option<usize> {
        self.intervals().zip(shape).position(|((_, end), size)| end > *size)
    }

    /// An error unless the region lies inside a tensor of this shape. An empty region counts too: its offsets may
    /// equal the shape but not pass it.
    pub fn check_inside(&self, shape: &[u64]) -> Result<(), LayoutError> {
        check_rank("region", shape.len(), self.ndim())?;
        match self.first_outside(shape) {
            None => Ok(()),
            Some(dim) => Err(LayoutError::OutOfBounds { region: self.to_string(), dim, shape: Dims::from_slice(shape) }),
        }
    }

    /// Like `check_inside`, for region number `index` of a list.
    pub(crate) fn check_listed_inside(&self, index: usize, shape: &[u64]) -> Result<(), LayoutError> {
        check_rank("region", shape.len(), self.ndim())?;
        match self.first_outside(shape) {
            None => Ok(()),
            Some(dim) => {
                Err(LayoutError::ListedOutOfBounds { index, region: self.to_string(), dim, shape: Dims::from_slice(shape) })
            }
        }
    }

    /// Whether the two share at least one element. Regions of different ranks share none.
    pub fn overlaps(&self, other: &Region) -> bool {
        self.ndim() == other.ndim() && self.intervals().zip(other.intervals()).all(|((a, b), (c, d))| a.max(c) < b.min(d))
    }

    /// The elements that both have; `None` when there are none or the ranks differ. Two regions without dimensions
    /// share their one element.
    pub fn intersection(&self, other: &Region) -> Option<Region> {
        if self.ndim() != other.ndim() {
            return None;
        }
        let mut offsets = Dims::with_capacity(self.ndim());
        let mut sizes = Dims::with_capacity(self.ndim());
        for ((a, b), (c, d)) in self.intervals().zip(other.intervals()) {
            let (start, end) = (a.max(c), b.min(d));
            if start >= end {
                return None;
            }
            offsets.push(start);
            sizes.push(end - start);
        }
        Some(Region { offsets, sizes })
    }

    /// How many elements both have; both must have the same rank.
    pub(crate) fn shared_volume(&self, other: &Region) -> u64 {
        self.intervals()
            .zip(other.intervals())
            .map(|((a, b), (c, d))| b.min(d).saturating_sub(a.max(c)))
            .fold(1, |volume: u64, size| volume.saturating_mul(size))
    }

    /// Whether `other` lies inside this region (an empty one too: its bounds must).
    pub fn contains(&self, other: &Region) -> bool {
        self.ndim() == other.ndim() && self.intervals().zip(other.intervals()).all(|((a, b), (c, d))| a <= c && d <= b)
    }

    /// The same elements in the coordinates of `outer`, which must contain them: global to local.
    pub fn within(&self, outer: &Region) -> Result<Region, LayoutError> {
        check_rank("region", outer.ndim(), self.ndim())?;
        if !outer.contains(self) {
            return Err(LayoutError::NotInside { inner: self.to_string(), outer: outer.to_string() });
        }
        let offsets = self.offsets.iter().zip(&outer.offsets).map(|(inner, outer)| inner - outer).collect();
        Ok(Region { offsets, sizes: self.sizes.clone() })
    }

    /// The region moved by `by`: a region inside a region, local to global.
    pub fn translated(&self, by: &[u64]) -> Result<Region, LayoutError> {
        check_rank("by", self.ndim(), by.len())?;
        let mut offsets = Dims::with_capacity(self.ndim());
        for (dim, ((offset, size), by)) in self.offsets.iter().zip(&self.sizes).zip(by).enumerate() {
            match offset.checked_add(*by) {
                Some(moved) if moved.checked_add(*size).is_some() => offsets.push(moved),
                _ => {
                    return Err(LayoutError::overflow(format!(
                        "offsets[{dim}] + by[{dim}] + sizes[{dim}] = {offset} + {by} + {size}"
                    )));
                }
            }
        }
        Ok(Region { offsets, sizes: self.sizes.clone() })
    }

    /// Whole rows, shared between at most `parts` regions of nearly the same size, in order. A row is what one index of the
    /// first dimension longer than one selects.
    pub fn cut_rows(&self, parts: u64) -> Vec<Region> {
        let Some(dim) = self.row_dim() else { return vec![self.clone()] };
        let rows = self.sizes[dim].div_ceil(parts.max(1));
        self.cut_to(rows * (self.volume() / self.sizes[dim])).collect()
    }

    /// Regions of at most `volume` elements (at least one), in row-major order, of whole rows where a row is not larger. They
    /// are made as they are asked for: there may be as many as elements.
    pub fn cut_to(&self, volume: u64) -> impl Iterator<Item = Region> + use<> {
        let mut todo = vec![self.clone()];
        std::iter::from_fn(move || {
            while let Some(mut first) = todo.pop() {
                let Some(dim) = first.row_dim().filter(|_| first.volume() > volume) else { return Some(first) };
                let rows = (volume / (first.volume() / first.sizes[dim])).max(1);
                let mut rest = first.clone();
                rest.offsets[dim] += rows;
                rest.sizes[dim] -= rows;
                first.sizes[dim] = rows;
                todo.extend([rest, first]);
            }
            None
        })
    }

    /// What of this region lies outside of `other`, as disjoint regions: at most two a dimension.
    pub fn without(&self, other: &Region) -> Vec<Region> {
        let Some(shared) = self.intersection(other) else { return vec![self.clone()] };
        let mut outside = Vec::new();
        let mut rest = self.clone();
        for dim in 0..self.ndim() {
            let (start, end) = (rest.offsets[dim], rest.end(dim));
            let mut slab = |from: u64, to: u64| {
                if from < to {
                    let mut slab = rest.clone();
                    (slab.offsets[dim], slab.sizes[dim]) = (from, to - from);
                    outside.push(slab);
                }
            };
            slab(start, shared.offsets[dim]);
            slab(shared.end(dim), end);
            (rest.offsets[dim], rest.sizes[dim]) = (shared.offsets[dim], shared.sizes[dim]);
        }
        outside
    }

    fn row_dim(&self) -> Option<usize> {
        self.sizes.iter().position(|&size| size > 1)
    }
}

impl fmt::Display for Region {
    /// As Python would slice it: `[0:4, 2:8]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, (start, end)) in self.intervals().enumerate() {
            if dim > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{start}:{end}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets, sizes).unwrap()
    }

    #[test]
    fn construction_names_the_field_that_is_wrong() {
        assert_eq!(Region::new(&[0, 0], &[1]).unwrap_err().to_string(), "sizes has 1 dimensions, expected 2");
        assert!(Region::new(&[0, u64::MAX], &[1, 1]).unwrap_err().to_string().contains("offsets[1] + sizes[1]"));
        assert!(matches!(Region::new(&[0, 0], &[1 << 40, 1 << 40]), Err(LayoutError::Overflow { .. })));
        assert_eq!(region(&[0, 0, 0], &[1 << 40, 0, 1 << 40]).volume(), 0);
    }

    #[test]
    fn a_scalar_has_one_element_and_meets_itself() {
        let scalar = region(&[], &[]);
        assert_eq!((scalar.volume(), scalar.is_empty()), (1, false));
        assert_eq!(scalar.intersection(&scalar), Some(scalar.clone()));
        assert_eq!(scalar.to_string(), "[]");
    }

    #[test]
    fn rows_are_shared_and_parts_are_bounded() {
        let shown = |parts: Vec<Region>| parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let wide = region(&[0, 10, 0], &[1, 5, 4]);
        assert_eq!(shown(wide.cut_rows(2)), "[0:1, 10:13, 0:4] [0:1, 13:15, 0:4]");
        assert_eq!(wide.cut_rows(0), vec![wide.clone()]);
        assert_eq!(wide.cut_rows(100).len(), 5);
        assert_eq!(shown(wide.cut_to(9).collect()), "[0:1, 10:12, 0:4] [0:1, 12:14, 0:4] [0:1, 14:15, 0:4]");
        assert_eq!(shown(region(&[0, 0], &[2, 3]).cut_to(2).collect()), "[0:1, 0:2] [0:1, 2:3] [1:2, 0:2] [1:2, 2:3]");
        assert_eq!(region(&[0, 0], &[2, 3]).cut_to(0).count(), 6);
        assert_eq!(region(&[0, 0], &[0, 9]).cut_to(1).count(), 1);
        for small in [region(&[], &[]), region(&[3], &[1])] {
            assert_eq!((small.cut_rows(3), small.cut_to(1).collect::<Vec<_>>()), (vec![small.clone()], vec![small.clone()]));
        }
    }

    #[test]
    fn what_is_outside_and_what_is_shared_are_the_whole() {
        let whole = region(&[1, 2, 3], &[5, 4, 6]);
        for other in [
            region(&[0, 0, 0], &[3, 3, 20]),
            region(&[2, 3, 4], &[1, 1, 1]),
            region(&[1, 2, 3], &[5, 4, 6]),
            region(&[6, 0, 0], &[1, 9, 9]),
        ] {
            let outside = whole.without(&other);
            let shared = whole.intersection(&other).map_or(0, |shared| shared.volume());
            assert_eq!(outside.iter().map(Region::volume).sum::<u64>() + shared, whole.volume(), "{other}");
            for (i, one) in outside.iter().enumerate() {
                assert!(whole.contains(one) && !one.overlaps(&other), "{one}");
                assert!(outside[..i].iter().all(|before| !before.overlaps(one)), "{one}");
            }
        }
    }

    #[test]
    fn empty_regions_meet_nothing_but_can_be_contained() {
        let empty = region(&[4], &[0]);
        let whole = region(&[0], &[4]);
        assert_eq!(whole.intersection(&empty), None);
        assert!(whole.contains(&empty) && !empty.contains(&whole));
        assert!(empty.check_inside(&[4]).is_ok());
        assert!(region(&[5], &[0]).check_inside(&[4]).is_err());
    }

    #[test]
    fn local_and_global_coordinates_are_inverse() {
        let outer = region(&[2, 4], &[6, 6]);
        let inner = region(&[3, 5], &[2, 1]);
        let local = inner.within(&outer).unwrap();
        assert_eq!(local, region(&[1, 1], &[2, 1]));
        assert_eq!(local.translated(outer.offsets()).unwrap(), inner);
        assert_eq!(inner.to_string(), "[3:5, 5:6]");
        assert!(matches!(outer.within(&inner), Err(LayoutError::NotInside { .. })));
        assert!(matches!(inner.translated(&[u64::MAX, 0]), Err(LayoutError::Overflow { .. })));
        assert!(matches!(inner.translated(&[1]), Err(LayoutError::RankMismatch { .. })));
    }
}
