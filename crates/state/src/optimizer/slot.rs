//! A slot of a parameter as parts of tensors, and the copies that carry such parts elsewhere.

use reshard_formats::DType;
use reshard_layout::{ByteLayout, Dims, LayoutError, Region, Runs, coverage, runs};

use crate::{DeviceKind, StateError, TensorLike};

/// A part of a logical tensor inside of a tensor that is at hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPiece<T> {
    /// The tensor at hand.
    pub source: T,
    /// Element of it at which the box starts that the part lies in. A box is row-major.
    pub start: u64,
    /// Shape of that box.
    pub within: Dims,
    /// Where in the box the part is.
    pub at: Dims,
    /// Which part of the logical tensor it is.
    pub region: Region,
}

impl<T> SlotPiece<T> {
    /// A part that lies contiguously in its tensor, from an element on.
    pub fn contiguous(source: T, start: u64, region: Region) -> SlotPiece<T> {
        let within = Dims::from_slice(region.sizes());
        let at = Dims::from_elem(0, within.len());
        SlotPiece { source, start, within, at, region }
    }
}

/// A slot's tensor: one at hand, whole, or a logical one of which parts are at hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotTensor<T> {
    /// Whole, or replicated: the same on every rank that has it.
    Whole(T),
    /// The parts at hand. None of them is not the same as no slot.
    Sharded {
        /// Element type.
        dtype: DType,
        /// Shape of the logical tensor.
        shape: Dims,
        /// Its parts.
        pieces: Vec<SlotPiece<T>>,
    },
}

impl<T: TensorLike> TensorLike for SlotTensor<T> {
    fn dtype(&self) -> DType {
        match self {
            SlotTensor::Whole(tensor) => tensor.dtype(),
            SlotTensor::Sharded { dtype, .. } => *dtype,
        }
    }

    fn shape(&self) -> &[u64] {
        match self {
            SlotTensor::Whole(tensor) => tensor.shape(),
            SlotTensor::Sharded { shape, .. } => shape,
        }
    }

    fn device(&self) -> DeviceKind {
        match self {
            SlotTensor::Whole(tensor) => tensor.device(),
            SlotTensor::Sharded { pieces, .. } => pieces.first().map(|piece| piece.source.device()).unwrap_or_default(),
        }
    }

    fn scalar(&self) -> Option<&[u8]> {
        match self {
            SlotTensor::Whole(tensor) => tensor.scalar(),
            SlotTensor::Sharded { .. } => None,
        }
    }
}

impl<T: TensorLike> SlotTensor<T> {
    /// The parts at hand; a whole tensor is one part.
    pub fn pieces(&self) -> Result<Vec<SlotPiece<T>>, LayoutError> {
        Ok(match self {
            SlotTensor::Whole(tensor) => {
                vec![SlotPiece::contiguous(tensor.clone(), 0, Region::whole(tensor.shape())?)]
            }
            SlotTensor::Sharded { pieces, .. } => pieces.clone(),
        })
    }
}

/// A copy of one box of elements between row-major boxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxCopy<T> {
    /// Where the elements come from.
    pub source: T,
    /// Element of the source at which its box starts.
    pub source_start: u64,
    /// Shape of the source's box.
    pub source_shape: Dims,
    /// Where in the source's box the elements are.
    pub source_at: Dims,
    /// How many elements in each dimension.
    pub sizes: Dims,
    /// Element of the destination at which its box starts.
    pub dest_start: u64,
    /// Shape of the destination's box.
    pub dest_shape: Dims,
    /// Where in the destination's box the elements go.
    pub dest_at: Dims,
}

impl<T> BoxCopy<T> {
    /// The contiguous byte stretches of the copy.
    pub fn runs(&self, element_size: u64) -> Result<Runs, LayoutError> {
        let place = |shape: &[u64], start: u64| -> Result<ByteLayout, LayoutError> {
            ByteLayout::contiguous(shape, element_size)?.try_at(start.saturating_mul(element_size))
        };
        let source = place(&self.source_shape, self.source_start)?;
        let dest = place(&self.dest_shape, self.dest_start)?;
        runs(&self.sizes, &source, &self.source_at, &dest, &self.dest_at)
    }
}

/// The copies that bring a region of a logical tensor, row-major, to an element of a destination. What no part covers is
/// an error that names it.
pub(crate) fn copies_for<T: Clone>(
    (param, slot): (&str, &str),
    pieces: &[SlotPiece<T>],
    wanted: &Region,
    dest_start: u64,
) -> Result<Vec<BoxCopy<T>>, StateError> {
    let minus = |a: &[u64], b: &[u64]| -> Dims { a.iter().zip(b).map(|(a, b)| a - b).collect() };
    let mut copies = Vec::new();
    let mut covered = Vec::new();
    for piece in pieces {
        let Some(part) = piece.region.intersection(wanted) else {
            continue;
        };
        let inside = minus(part.offsets(), piece.region.offsets());
        copies.push(BoxCopy {
            source: piece.source.clone(),
            source_start: piece.start,
            source_shape: piece.within.clone(),
            source_at: piece.at.iter().zip(&inside).map(|(at, inside)| at + inside).collect(),
            sizes: Dims::from_slice(part.sizes()),
            dest_start,
            dest_shape: Dims::from_slice(wanted.sizes()),
            dest_at: minus(part.offsets(), wanted.offsets()),
        });
        covered.push(part.within(wanted).map_err(StateError::layout(param))?);
    }
    // One part that is all there is to have needs no sweep, and is what loading usually finds.
    if covered.len() == 1 && covered[0].volume() == wanted.volume() || wanted.is_empty() {
        return Ok(copies);
    }
    let coverage = coverage(wanted.sizes(), &covered).map_err(StateError::layout(param))?;
    match coverage.gaps.first() {
        None => Ok(copies),
        Some(gap) => {
            let gap = gap.translated(wanted.offsets()).map_err(StateError::layout(param))?;
            Err(StateError::Uncovered { key: format!("{param}.{slot}"), region: gap.to_string() })
        }
    }
}
