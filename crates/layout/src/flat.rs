//! Ranges of the row-major flattening of a tensor (an FSDP flat parameter's shard, a ZeRO slice) as regions, and
//! back. A range of a tensor of `n` dimensions is at most `2n − 1` regions, each of them contiguous in the flattening.

use std::ops::Range;

use crate::error::check_rank;
use crate::region::volume_of;
use crate::{Dims, LayoutError, Region};

/// One region of a flat range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatPiece {
    /// The elements, in the coordinates of the tensor.
    pub region: Region,
    /// Where the piece starts inside the flat range, in elements.
    pub start: u64,
}

/// Elements per step of each dimension in the row-major flattening of a shape that is not empty.
fn flat_strides(shape: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// The regions of the elements `[start, end)` of the flattened tensor, in ascending order.
pub fn flat_pieces(shape: &[u64], start: u64, end: u64) -> Result<Vec<FlatPiece>, LayoutError> {
    let elements = volume_of(shape)?;
    if start > end || end > elements {
        return Err(LayoutError::BadFlatRange { start, end, elements });
    }
    let mut pieces = Vec::new();
    if start == end {
        return Ok(pieces);
    }
    if shape.is_empty() {
        pieces.push(FlatPiece { region: Region::whole(shape)?, start: 0 });
        return Ok(pieces);
    }
    let strides = flat_strides(shape);
    let mut position = start;
    while position < end {
        // The outermost dimension of which a whole step starts here and fits; the last one always does.
        let dim = strides
            .iter()
            .position(|&stride| position.is_multiple_of(stride) && stride <= end - position)
            .unwrap_or(shape.len() - 1);
        let mut offsets = Dims::from_elem(0, shape.len());
        let mut sizes = Dims::from_slice(shape);
        for outer in 0..=dim {
            offsets[outer] = position / strides[outer] % shape[outer];
            sizes[outer] = 1;
        }
        sizes[dim] = (shape[dim] - offsets[dim]).min((end - position) / strides[dim]);
        let taken = sizes[dim] * strides[dim];
        pieces.push(FlatPiece { region: Region::from_proven(offsets, sizes), start: position - start });
        position += taken;
    }
    Ok(pieces)
}

/// The elements of the flattened tensor that a region covers, if they are one contiguous range; an empty region is
/// the empty range at zero.
pub fn flat_range(shape: &[u64], region: &Region) -> Result<Option<Range<u64>>, LayoutError> {
    let elements = volume_of(shape)?;
    check_rank("region", shape.len(), region.ndim())?;
    region.check_inside(shape)?;
    if elements == 0 || region.is_empty() {
        return Ok(Some(0..0));
    }
    // Contiguous: ones, then one dimension that may be cut, then whole dimensions.
    let cut = region.sizes().iter().position(|&size| size != 1).unwrap_or(shape.len());
    if region.sizes().iter().zip(shape).skip(cut + 1).any(|(size, whole)| size != whole) {
        return Ok(None);
    }
    let start: u64 = region.offsets().iter().zip(flat_strides(shape)).map(|(offset, stride)| offset * stride).sum();
    Ok(Some(start..start + region.volume()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_inside_a_matrix_is_head_body_and_tail() {
        let pieces = flat_pieces(&[5, 4], 3, 18).unwrap();
        let named: Vec<_> = pieces.iter().map(|piece| (piece.region.to_string(), piece.start)).collect();
        assert_eq!(named, [("[0:1, 3:4]".to_owned(), 0), ("[1:4, 0:4]".to_owned(), 1), ("[4:5, 0:2]".to_owned(), 13)]);
    }

    #[test]
    fn scalars_and_empty_tensors_have_flat_ranges_too() {
        assert_eq!(flat_pieces(&[], 0, 1).unwrap().len(), 1);
        assert!(flat_pieces(&[3, 0], 0, 0).unwrap().is_empty());
        assert!(matches!(flat_pieces(&[3, 0], 0, 1), Err(LayoutError::BadFlatRange { .. })));
        assert!(matches!(flat_pieces(&[3], 2, 1), Err(LayoutError::BadFlatRange { .. })));
    }

    #[test]
    fn a_column_is_no_flat_range() {
        let column = Region::new(&[0, 1], &[5, 1]).unwrap();
        assert_eq!(flat_range(&[5, 4], &column).unwrap(), None);
    }
}
