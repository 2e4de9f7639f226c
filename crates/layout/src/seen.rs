//! A box of a tensor seen in another way: cut, turned, with more or fewer dimensions. Only numbers change; the elements stay
//! where they are. What has no strides in the new form falls apart into boxes that have.

use crate::error::check_rank;
use crate::region::volume_of;
use crate::{ByteLayout, Dims, LayoutError, Region, flat_pieces, flat_range};

/// A region of a tensor, and how its elements lie somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenBox {
    /// Which part of the tensor.
    pub region: Region,
    /// Where its elements are; of the region's sizes.
    pub layout: ByteLayout,
}

impl SeenBox {
    /// A region whose elements lie as `layout` says.
    pub fn new(region: Region, layout: ByteLayout) -> Result<SeenBox, LayoutError> {
        check_rank("layout", region.ndim(), layout.shape().len())?;
        for (dim, (&size, &extent)) in region.sizes().iter().zip(layout.shape()).enumerate() {
            if size != extent {
                return Err(LayoutError::OutsideLayout { field: "region", dim, offset: 0, size, extent });
            }
        }
        Ok(SeenBox { region, layout })
    }

    /// What of it lies in `window`, in coordinates that start where the window does.
    pub fn sliced(&self, window: &Region) -> Result<Option<SeenBox>, LayoutError> {
        let Some(common) = self.region.intersection(window) else { return Ok(None) };
        let layout = self.layout.narrowed(&common.within(&self.region)?)?;
        Ok(Some(SeenBox { region: common.within(window)?, layout }))
    }

    /// Moved along a dimension.
    pub fn moved(mut self, dim: usize, by: u64) -> Result<SeenBox, LayoutError> {
        let mut by_all = Dims::from_elem(0, self.region.ndim());
        *by_all.get_mut(dim).ok_or(LayoutError::RankMismatch { field: "dim", expected: self.region.ndim(), actual: dim })? = by;
        self.region = self.region.translated(&by_all)?;
        Ok(self)
    }

    /// With its dimensions in another order: dimension `i` of the new one is `order[i]` of this.
    pub fn permuted(&self, order: &[usize]) -> Result<SeenBox, LayoutError> {
        let layout = self.layout.permuted(order)?;
        let pick = |from: &[u64]| order.iter().filter_map(|&dim| from.get(dim).copied()).collect::<Dims>();
        Ok(SeenBox { region: Region::new(&pick(self.region.offsets()), &pick(self.region.sizes()))?, layout })
    }

    /// With one more dimension before `dim`, in which it has one index.
    pub fn with_dim(&self, dim: usize, index: u64) -> Result<SeenBox, LayoutError> {
        let layout = self.layout.with_dim(dim)?;
        let insert = |from: &[u64], value: u64| {
            let mut dims = Dims::from_slice(from);
            dims.insert(dim, value);
            dims
        };
        Ok(SeenBox { region: Region::new(&insert(self.region.offsets(), index), &insert(self.region.sizes(), 1))?, layout })
    }

    /// Without a dimension in which it has one index.
    pub fn without_dim(&self, dim: usize) -> Result<SeenBox, LayoutError> {
        let layout = self.layout.without_dim(dim)?;
        let remove = |from: &[u64]| {
            let mut dims = Dims::from_slice(from);
            dims.remove(dim);
            dims
        };
        Ok(SeenBox { region: Region::new(&remove(self.region.offsets()), &remove(self.region.sizes()))?, layout })
    }

    /// The same elements, in row-major order, in a tensor of another shape: the box is one of a tensor of shape `from` and
    /// becomes boxes of one of shape `to`. At most `limit` of them.
    pub fn reshaped(self, from: &[u64], to: &[u64], limit: usize) -> Result<Vec<SeenBox>, LayoutError> {
        check_rank("from", self.region.ndim(), from.len())?;
        if volume_of(from)? != volume_of(to)? {
            return Err(LayoutError::Reshape { from: Dims::from_slice(from), to: Dims::from_slice(to) });
        }
        if self.region.is_empty() {
            return Ok(Vec::new());
        }
        let mut boxes = vec![self];
        for (old, new) in groups(from, to) {
            if from[old.clone()] == to[new.clone()] {
                continue;
            }
            let mut next = Vec::with_capacity(boxes.len());
            for seen in boxes {
                for flat in seen.joined(new.start, &from[old.clone()], limit)? {
                    flat.parted(new.start, &to[new.clone()], &mut next)?;
                }
                if next.len() > limit {
                    return Err(LayoutError::TooManyRegions { field: "the new shape", limit: limit as u64 });
                }
            }
            boxes = next;
        }
        Ok(boxes)
    }

    /// The dimensions from `first` on, which have these sizes in the tensor, as one.
    fn joined(self, first: usize, sizes: &[u64], limit: usize) -> Result<Vec<SeenBox>, LayoutError> {
        let count = sizes.len();
        if count == 0 {
            return Ok(vec![self.with_dim(first, 0)?]);
        }
        let mut done = Vec::new();
        let mut todo = vec![self];
        while let Some(seen) = todo.pop() {
            let dims = first..first + count;
            let own = Region::new(&seen.region.offsets()[dims.clone()], &seen.region.sizes()[dims.clone()])?;
            if let (Some(range), Some(layout)) = (flat_range(sizes, &own)?, seen.layout.joined(dims.clone())?) {
                let join = |from: &[u64], value: u64| {
                    let mut all = Dims::from_slice(&from[..first]);
                    all.push(value);
                    all.extend_from_slice(&from[first + count..]);
                    all
                };
                let region =
                    Region::new(&join(seen.region.offsets(), range.start), &join(seen.region.sizes(), range.end - range.start))?;
                done.push(SeenBox { region, layout });
                continue;
            }
            // One index of the outermost dimension at a time; a box of one row joins at last.
            let dim = dims.clone().find(|&dim| seen.region.sizes()[dim] > 1).unwrap_or(first);
            let rows = seen.region.sizes()[dim];
            if done.len().saturating_add(todo.len()).saturating_add(usize::try_from(rows).unwrap_or(usize::MAX)) > limit {
                return Err(LayoutError::TooManyRegions { field: "the new shape", limit: limit as u64 });
            }
            for row in (0..rows).rev() {
                let mut offsets = Dims::from_elem(0, seen.region.ndim());
                let mut sizes = Dims::from_slice(seen.region.sizes());
                (offsets[dim], sizes[dim]) = (row, 1);
                let local = Region::new(&offsets, &sizes)?;
                let layout = seen.layout.narrowed(&local)?;
                todo.push(SeenBox { region: local.translated(seen.region.offsets())?, layout });
            }
        }
        Ok(done)
    }

    /// Dimension `dim` as several of these sizes; the boxes that it becomes.
    fn parted(&self, dim: usize, sizes: &[u64], into: &mut Vec<SeenBox>) -> Result<(), LayoutError> {
        if sizes.is_empty() {
            into.push(self.without_dim(dim)?);
            return Ok(());
        }
        let start = self.region.offsets()[dim];
        for piece in flat_pieces(sizes, start, start + self.region.sizes()[dim])? {
            let mut offsets = Dims::from_elem(0, self.region.ndim());
            let mut own = Dims::from_slice(self.region.sizes());
            (offsets[dim], own[dim]) = (piece.start, piece.region.volume());
            let layout = self.layout.narrowed(&Region::new(&offsets, &own)?)?.parted(dim, piece.region.sizes())?;
            let part = |from: &[u64], values: &[u64]| {
                let mut all = Dims::from_slice(&from[..dim]);
                all.extend_from_slice(values);
                all.extend_from_slice(&from[dim + 1..]);
                all
            };
            let region = Region::new(
                &part(self.region.offsets(), piece.region.offsets()),
                &part(self.region.sizes(), piece.region.sizes()),
            )?;
            into.push(SeenBox { region, layout });
        }
        Ok(())
    }
}

type Dimensions = std::ops::Range<usize>;

/// The smallest groups of neighbouring dimensions that hold the same elements in both shapes, neither of which is empty.
fn groups(from: &[u64], to: &[u64]) -> Vec<(Dimensions, Dimensions)> {
    let mut groups = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < to.len() {
        let (a, b) = (i, j);
        let (mut old, mut new) = (1u64, 1u64);
        let take = |at: &mut usize, sizes: &[u64], product: &mut u64| {
            if let Some(size) = sizes.get(*at) {
                *product *= size;
                *at += 1;
            }
        };
        take(&mut i, from, &mut old);
        take(&mut j, to, &mut new);
        while old != new && (i < from.len() || j < to.len()) {
            if (old < new && i < from.len()) || j == to.len() {
                take(&mut i, from, &mut old);
            } else {
                take(&mut j, to, &mut new);
            }
        }
        groups.push((a..i, b..j));
    }
    groups
}

impl ByteLayout {
    /// The part of it that a region selects.
    pub fn narrowed(&self, part: &Region) -> Result<ByteLayout, LayoutError> {
        part.check_inside(self.shape())?;
        let base = if part.is_empty() { self.base() } else { self.position(part.offsets()) };
        ByteLayout::from_parts(part.sizes(), self.byte_strides(), self.element_size(), base)
    }

    /// With its dimensions in another order.
    pub fn permuted(&self, order: &[usize]) -> Result<ByteLayout, LayoutError> {
        let ndim = self.shape().len();
        check_rank("order", ndim, order.len())?;
        let mut seen = vec![false; ndim];
        for &dim in order {
            match seen.get_mut(dim) {
                Some(taken) if !*taken => *taken = true,
                _ => return Err(LayoutError::BadOrder { order: order.to_vec() }),
            }
        }
        let pick = |from: &[u64]| order.iter().map(|&dim| from[dim]).collect::<Dims>();
        ByteLayout::from_parts(&pick(self.shape()), &pick(self.byte_strides()), self.element_size(), self.base())
    }

    /// With one more dimension before `dim`, of one index.
    pub fn with_dim(&self, dim: usize) -> Result<ByteLayout, LayoutError> {
        let ndim = self.shape().len();
        if dim > ndim {
            return Err(LayoutError::RankMismatch { field: "dim", expected: ndim, actual: dim });
        }
        let (mut shape, mut strides) = (Dims::from_slice(self.shape()), Dims::from_slice(self.byte_strides()));
        shape.insert(dim, 1);
        strides.insert(dim, 0);
        ByteLayout::from_parts(&shape, &strides, self.element_size(), self.base())
    }

    /// Without a dimension of one index.
    pub fn without_dim(&self, dim: usize) -> Result<ByteLayout, LayoutError> {
        if self.shape().get(dim) != Some(&1) {
            return Err(LayoutError::RankMismatch { field: "dim", expected: self.shape().len(), actual: dim });
        }
        let (mut shape, mut strides) = (Dims::from_slice(self.shape()), Dims::from_slice(self.byte_strides()));
        shape.remove(dim);
        strides.remove(dim);
        ByteLayout::from_parts(&shape, &strides, self.element_size(), self.base())
    }

    /// Neighbouring dimensions as one, where one stride steps through all of their elements in row-major order.
    pub fn joined(&self, dims: Dimensions) -> Result<Option<ByteLayout>, LayoutError> {
        let (shape, strides) = (self.shape(), self.byte_strides());
        let (mut size, mut stride) = (1u64, 0u64);
        for dim in dims.clone().rev().filter(|&dim| shape[dim] != 1) {
            if size == 1 {
                (size, stride) = (shape[dim], strides[dim]);
            } else if stride.checked_mul(size) == Some(strides[dim]) {
                size *= shape[dim];
            } else {
                return Ok(None);
            }
        }
        let join = |from: &[u64], value: u64| {
            let mut all = Dims::from_slice(&from[..dims.start]);
            all.push(value);
            all.extend_from_slice(&from[dims.end..]);
            all
        };
        ByteLayout::from_parts(&join(shape, size), &join(strides, stride), self.element_size(), self.base()).map(Some)
    }

    /// A dimension as several of these sizes, which together have its elements.
    fn parted(&self, dim: usize, sizes: &[u64]) -> Result<ByteLayout, LayoutError> {
        let (shape, strides) = (self.shape(), self.byte_strides());
        let mut inner = Dims::from_elem(strides[dim], sizes.len());
        for at in (1..sizes.len()).rev() {
            inner[at - 1] = inner[at].saturating_mul(sizes[at]);
        }
        let part = |from: &[u64], values: &[u64]| {
            let mut all = Dims::from_slice(&from[..dim]);
            all.extend_from_slice(values);
            all.extend_from_slice(&from[dim + 1..]);
            all
        };
        ByteLayout::from_parts(&part(shape, sizes), &part(strides, &inner), self.element_size(), self.base())
    }

    /// This layout seen through another, whose bytes are the numbers of this one's elements in row-major order.
    pub fn through(&self, window: &ByteLayout) -> Result<ByteLayout, LayoutError> {
        let element = self.element_size();
        let overflow = || LayoutError::overflow("the bytes of a layout seen through another");
        let elements = volume_of(self.shape())?;
        if window.end() > elements {
            return Err(LayoutError::BadFlatRange { start: window.base(), end: window.end(), elements });
        }
        if self.is_contiguous() {
            let scaled: Option<Dims> = window
                .byte_strides()
                .iter()
                .zip(window.shape())
                .map(|(stride, size)| if *size > 1 { stride.checked_mul(element) } else { Some(0) })
                .collect();
            let base = window.base().checked_mul(element).and_then(|start| start.checked_add(self.base()));
            let (scaled, base) = (scaled.ok_or_else(overflow)?, base.ok_or_else(overflow)?);
            return ByteLayout::from_parts(window.shape(), &scaled, element, base);
        }
        // Each step of the window must stay inside one dimension here; neighbours that are one dimension count as one.
        let own = self.coalesced();
        let mut flat = Dims::from_elem(1, own.len());
        for dim in (1..own.len()).rev() {
            flat[dim - 1] = flat[dim] * own[dim].0;
        }
        let mut at: Dims = own.iter().zip(&flat).map(|(&(size, _), flat)| window.base() / flat % size).collect();
        let mut base = self.base();
        for (index, (_, stride)) in at.iter().zip(&own) {
            base = index.checked_mul(*stride).and_then(|by| base.checked_add(by)).ok_or_else(overflow)?;
        }
        let mut strides = Dims::from_elem(0, window.shape().len());
        for (dim, (&size, &step)) in window.shape().iter().zip(window.byte_strides()).enumerate() {
            if size <= 1 || step == 0 {
                continue;
            }
            let inner = flat.iter().position(|&flat| flat <= step && step.is_multiple_of(flat)).ok_or(LayoutError::NoStrides)?;
            let times = step / flat[inner];
            at[inner] = (size - 1).checked_mul(times).and_then(|by| at[inner].checked_add(by)).ok_or_else(overflow)?;
            strides[dim] = times.checked_mul(own[inner].1).ok_or_else(overflow)?;
        }
        if at.iter().zip(&own).any(|(last, (size, _))| last >= size) {
            return Err(LayoutError::NoStrides);
        }
        ByteLayout::from_parts(window.shape(), &strides, element, base)
    }

    /// Sizes and strides of its dimensions, those of one index left out and those that are one dimension joined.
    fn coalesced(&self) -> Vec<(u64, u64)> {
        let mut own: Vec<(u64, u64)> = Vec::new();
        for (&size, &stride) in self.shape().iter().zip(self.byte_strides()).filter(|(size, _)| **size != 1) {
            match own.last_mut() {
                Some(outer) if size.checked_mul(stride) == Some(outer.1) => *outer = (outer.0 * size, stride),
                _ => own.push((size, stride)),
            }
        }
        own
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The numbers of a tensor's elements, by what boxes say; `u64::MAX` where none does.
    fn rendered(shape: &[u64], boxes: &[SeenBox]) -> Vec<u64> {
        let mut all = vec![u64::MAX; volume_of(shape).unwrap() as usize];
        let target = ByteLayout::contiguous(shape, 1).unwrap();
        for seen in boxes {
            for flat in 0..seen.region.volume() {
                let (mut rest, mut local) = (flat, Dims::from_elem(0, shape.len()));
                for dim in (0..shape.len()).rev() {
                    local[dim] = rest % seen.region.sizes()[dim];
                    rest /= seen.region.sizes()[dim];
                }
                let global: Dims = local.iter().zip(seen.region.offsets()).map(|(a, b)| a + b).collect();
                let at = &mut all[target.position(&global) as usize];
                assert_eq!(*at, u64::MAX, "an element twice");
                *at = seen.layout.position(&local);
            }
        }
        all
    }

    /// The pieces of a tensor cut along its first dimension, each the numbers of the whole's elements.
    fn cut(shape: &[u64], parts: u64) -> Vec<SeenBox> {
        let whole = ByteLayout::contiguous(shape, 1).unwrap();
        let boxes = Region::whole(shape).unwrap().cut_rows(parts);
        boxes.into_iter().map(|region| SeenBox { layout: whole.narrowed(&region).unwrap(), region }).collect()
    }

    fn shape_and_reshape() -> impl Strategy<Value = (Vec<u64>, Vec<u64>)> {
        prop::collection::vec(1u64..5, 0..4).prop_flat_map(|factors| {
            let joins = |n: usize| prop::collection::vec(any::<bool>(), n);
            (Just(factors.clone()), joins(factors.len()), joins(factors.len())).prop_map(|(factors, a, b)| {
                let group = |joins: &[bool]| {
                    let mut shape: Vec<u64> = Vec::new();
                    for (size, join) in factors.iter().zip(joins) {
                        match shape.last_mut().filter(|_| *join) {
                            Some(last) => *last *= size,
                            None => shape.push(*size),
                        }
                    }
                    shape
                };
                (group(&a), group(&b))
            })
        })
    }

    proptest! {
        #[test]
        fn a_reshape_keeps_every_element_in_row_major_order((from, to) in shape_and_reshape(), parts in 1u64..4) {
            let mut boxes = Vec::new();
            for seen in cut(&from, parts) {
                boxes.extend(seen.reshaped(&from, &to, 10_000).unwrap());
            }
            let elements = volume_of(&from).unwrap();
            prop_assert_eq!(rendered(&to, &boxes), (0..elements).collect::<Vec<_>>());
        }

        #[test]
        fn a_permuted_tensor_reshapes_by_falling_apart(
            shape in prop::collection::vec(1u64..5, 3), seed in 0usize..6, parts in 1u64..4,
        ) {
            let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
            let order = orders[seed];
            let turned: Vec<u64> = order.iter().map(|&dim| shape[dim]).collect();
            let flat = [volume_of(&shape).unwrap()];
            let boxes: Vec<SeenBox> = cut(&shape, parts).iter().map(|seen| seen.permuted(&order).unwrap()).collect();
            let expected = rendered(&turned, &boxes);
            let mut flattened = Vec::new();
            for seen in boxes {
                flattened.extend(seen.reshaped(&turned, &flat, 10_000).unwrap());
            }
            prop_assert_eq!(rendered(&flat, &flattened), expected);
        }

        #[test]
        fn a_layout_seen_through_a_window_gives_the_windows_elements(
            dims in prop::collection::vec((1u64..5, 1u64..3), 1..4), order in 0usize..6, seed in 0u64..1000,
        ) {
            // A base of any nesting of dimensions with gaps between them.
            let shape: Vec<u64> = dims.iter().map(|d| d.0).collect();
            let mut nested: Vec<usize> = (0..shape.len()).collect();
            nested.rotate_left(order % shape.len());
            let (mut strides, mut next) = (vec![0; shape.len()], 1);
            for &dim in &nested {
                strides[dim] = next;
                next *= shape[dim] * dims[dim].1;
            }
            let base = ByteLayout::strided(&shape, &strides, 2).unwrap().at(10);
            // A window: a part of it, turned.
            let offsets: Vec<u64> = shape.iter().enumerate().map(|(dim, size)| (seed >> dim) % size).collect();
            let sizes: Vec<u64> = shape.iter().zip(&offsets).map(|(size, at)| size - at).collect();
            let part = Region::new(&offsets, &sizes).unwrap();
            let turn: Vec<usize> = (0..shape.len()).rev().collect();
            let window = ByteLayout::contiguous(&shape, 1).unwrap().narrowed(&part).unwrap().permuted(&turn).unwrap();
            let found = base.through(&window).unwrap();
            let expected = base.narrowed(&part).unwrap().permuted(&turn).unwrap();
            prop_assert_eq!(found.base(), expected.base());
            prop_assert_eq!(found.end(), expected.end());
            for (dim, size) in found.shape().iter().enumerate() {
                prop_assert!(*size == 1 || found.byte_strides()[dim] == expected.byte_strides()[dim]);
            }
        }
    }

    #[test]
    fn interleaved_halves_become_pairs_of_rows() {
        // Rotary embeddings: [heads, 2, half, columns] with the middle two exchanged, seen as rows again.
        let shape = [2, 2, 3, 4];
        let whole = SeenBox::new(Region::whole(&shape).unwrap(), ByteLayout::contiguous(&shape, 1).unwrap()).unwrap();
        let turned = whole.permuted(&[0, 2, 1, 3]).unwrap();
        let boxes = turned.reshaped(&[2, 3, 2, 4], &[12, 4], 100).unwrap();
        assert_eq!(boxes.len(), 6);
        assert_eq!(rendered(&[12, 4], &boxes)[..12], [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7]);
        let turned = whole.permuted(&[0, 2, 1, 3]).unwrap();
        assert!(matches!(turned.reshaped(&[2, 3, 2, 4], &[12, 4], 4), Err(LayoutError::TooManyRegions { .. })));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let whole = SeenBox::new(Region::whole(&[4, 6]).unwrap(), ByteLayout::contiguous(&[4, 6], 1).unwrap()).unwrap();
        assert!(matches!(whole.clone().reshaped(&[4, 6], &[5, 5], 10), Err(LayoutError::Reshape { .. })));
        assert!(matches!(whole.permuted(&[0, 0]), Err(LayoutError::BadOrder { .. })));
        assert!(matches!(whole.layout.without_dim(0), Err(LayoutError::RankMismatch { .. })));
        // Rows of a transposed file cannot be joined by strides alone.
        let transposed = ByteLayout::strided(&[4, 6], &[1, 4], 2).unwrap();
        let flat = ByteLayout::contiguous(&[24], 1).unwrap();
        assert!(matches!(transposed.through(&flat), Err(LayoutError::NoStrides)));
        assert!(matches!(transposed.through(&ByteLayout::contiguous(&[25], 1).unwrap()), Err(LayoutError::BadFlatRange { .. })));
    }
}
