//! `ByteLayout`: how a box of elements lies in a buffer or a file. It is the bridge from regions, which count
//! elements, to runs, which count bytes.

use crate::error::check_rank;
use crate::region::volume_of;
use crate::{Dims, LayoutError};

/// The byte position of element `[0, …, 0]` and the bytes from one element to the next in each dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByteLayout {
    shape: Dims,
    byte_strides: Dims,
    element_size: u64,
    base: u64,
    /// Bytes from `base` to one past the last byte of the last element; zero when there are no elements.
    span: u64,
}

impl ByteLayout {
    /// Row-major without gaps, starting at byte zero.
    pub fn contiguous(shape: &[u64], element_size: u64) -> Result<ByteLayout, LayoutError> {
        let elements = volume_of(shape)?;
        let span = elements
            .checked_mul(element_size)
            .ok_or_else(|| LayoutError::overflow(format!("the bytes of shape {shape:?} × {element_size}")))?;
        check_element_size(element_size)?;
        let mut byte_strides = Dims::from_elem(element_size, shape.len());
        for dim in (1..shape.len()).rev() {
            // Saturation only happens beside a dimension of size zero, where no stride is ever used.
            byte_strides[dim - 1] = byte_strides[dim].saturating_mul(shape[dim]);
        }
        Ok(ByteLayout { shape: Dims::from_slice(shape), byte_strides, element_size, base: 0, span })
    }

    /// With strides counted in elements, as PyTorch has them; a stride of zero repeats an element.
    pub fn strided(shape: &[u64], element_strides: &[u64], element_size: u64) -> Result<ByteLayout, LayoutError> {
        check_rank("element_strides", shape.len(), element_strides.len())?;
        check_element_size(element_size)?;
        let elements = volume_of(shape)?;
        let mut span = if elements == 0 { 0 } else { element_size };
        let mut byte_strides = Dims::with_capacity(shape.len());
        for (dim, (&size, &stride)) in shape.iter().zip(element_strides).enumerate() {
            let byte_stride = stride.checked_mul(element_size);
            if elements > 0 && size > 1 {
                span = byte_stride
                    .and_then(|stride| stride.checked_mul(size - 1))
                    .and_then(|reach| reach.checked_add(span))
                    .ok_or_else(|| LayoutError::overflow(format!("element_strides[{dim}] × shape[{dim}] in bytes")))?;
            }
            byte_strides.push(byte_stride.unwrap_or(u64::MAX));
        }
        Ok(ByteLayout { shape: Dims::from_slice(shape), byte_strides, element_size, base: 0, span })
    }

    /// From strides in bytes; all that is touched must end inside the 64-bit range.
    pub(crate) fn from_parts(
        shape: &[u64],
        byte_strides: &[u64],
        element_size: u64,
        base: u64,
    ) -> Result<ByteLayout, LayoutError> {
        let elements = volume_of(shape)?;
        let mut span = if elements == 0 { 0 } else { element_size };
        for (&size, &stride) in shape.iter().zip(byte_strides) {
            if elements > 0 && size > 1 {
                let reach = stride.checked_mul(size - 1).and_then(|reach| reach.checked_add(span));
                span = reach.ok_or_else(|| LayoutError::overflow("strides × shape in bytes"))?;
            }
        }
        let layout =
            ByteLayout { shape: Dims::from_slice(shape), byte_strides: Dims::from_slice(byte_strides), element_size, base, span };
        layout.check_end()?;
        Ok(layout)
    }

    /// The same layout, starting at byte `base`. A position past the 64-bit range is reported by whoever uses the
    /// layout ([`crate::runs`]); [`ByteLayout::try_at`] reports it here.
    #[must_use]
    pub fn at(mut self, base: u64) -> ByteLayout {
        self.base = base;
        self
    }

    /// The same layout, starting at byte `base`, or an error if it would end past the 64-bit range.
    pub fn try_at(self, base: u64) -> Result<ByteLayout, LayoutError> {
        let moved = self.at(base);
        moved.check_end()?;
        Ok(moved)
    }

    pub(crate) fn check_end(&self) -> Result<(), LayoutError> {
        match self.base.checked_add(self.span) {
            Some(_) => Ok(()),
            None => Err(LayoutError::overflow(format!("base + bytes of the layout = {} + {}", self.base, self.span))),
        }
    }

    /// Elements per dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The byte position of element `[0, …, 0]`.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The byte position of an element that lies inside.
    pub fn position(&self, element: &[u64]) -> u64 {
        self.base + element.iter().zip(&self.byte_strides).map(|(at, stride)| at * stride).sum::<u64>()
    }

    /// Bytes per step of each dimension.
    pub fn byte_strides(&self) -> &[u64] {
        &self.byte_strides
    }

    /// Bytes per element.
    pub fn element_size(&self) -> u64 {
        self.element_size
    }

    /// One past the last byte touched; `base` when there are no elements.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.span)
    }

    /// Whether the elements lie one after the other in row-major order.
    pub fn is_contiguous(&self) -> bool {
        if self.span == 0 {
            return true;
        }
        let mut expected = self.element_size;
        for (&size, &stride) in self.shape.iter().zip(&self.byte_strides).rev() {
            if size != 1 {
                if stride != expected {
                    return false;
                }
                // Fits: the strides so far lie inside the span, which was checked.
                expected = expected.saturating_mul(size);
            }
        }
        true
    }
}

fn check_element_size(element_size: u64) -> Result<(), LayoutError> {
    if element_size == 0 {
        return Err(LayoutError::ElementSize { field: "layout", expected: 1, actual: 0 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_is_the_strided_layout_with_row_major_strides() {
        let contiguous = ByteLayout::contiguous(&[3, 4], 2).unwrap();
        assert_eq!(contiguous, ByteLayout::strided(&[3, 4], &[4, 1], 2).unwrap());
        assert_eq!((contiguous.end(), contiguous.is_contiguous()), (24, true));
        assert_eq!(contiguous.at(10).end(), 34);
        let transposed = ByteLayout::strided(&[3, 4], &[1, 3], 2).unwrap();
        assert_eq!((transposed.end(), transposed.is_contiguous()), (24, false));
        assert_eq!(ByteLayout::strided(&[3, 4], &[0, 1], 4).unwrap().end(), 16);
    }

    #[test]
    fn empty_layouts_touch_nothing_whatever_their_strides() {
        let empty = ByteLayout::contiguous(&[0, 1 << 40, 1 << 40], 8).unwrap().at(7);
        assert_eq!((empty.base(), empty.end()), (7, 7));
        assert_eq!(ByteLayout::strided(&[2, 0], &[u64::MAX, 1], 8).unwrap().end(), 0);
        assert!(ByteLayout::strided(&[1], &[u64::MAX], 8).unwrap().is_contiguous());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(matches!(ByteLayout::contiguous(&[1 << 62], 8), Err(LayoutError::Overflow { .. })));
        assert!(matches!(ByteLayout::strided(&[2], &[u64::MAX], 8), Err(LayoutError::Overflow { .. })));
        assert!(matches!(ByteLayout::contiguous(&[2], 0), Err(LayoutError::ElementSize { .. })));
        let layout = ByteLayout::contiguous(&[2], 8).unwrap();
        assert!(matches!(layout.clone().try_at(u64::MAX), Err(LayoutError::Overflow { .. })));
        assert_eq!(layout.at(u64::MAX).end(), u64::MAX);
    }
}
