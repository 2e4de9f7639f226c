//! The one error type of this crate. Every variant names the field, dimension or region that is wrong, because
//! most of these numbers come out of somebody else's file.

use crate::Dims;

/// What can be wrong with a region, a mesh, a placement or a byte layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Two lists that must have one number per dimension have different lengths.
    #[error("{field} has {actual} dimensions, expected {expected}")]
    RankMismatch {
        /// The list that has the wrong length.
        field: &'static str,
        /// How many dimensions it should have.
        expected: usize,
        /// How many it has.
        actual: usize,
    },
    /// A sum or product does not fit in 64 bits.
    #[error("{field} does not fit in 64 bits")]
    Overflow {
        /// The quantity that overflowed, for example `offsets[1] + sizes[1]`.
        field: String,
    },
    /// A region reaches past the end of a shape.
    #[error("region {region} reaches past dimension {dim} of shape {shape:?}")]
    OutOfBounds {
        /// The region.
        region: String,
        /// The first dimension in which it reaches too far.
        dim: usize,
        /// The shape that should contain it.
        shape: Dims,
    },
    /// Region number `index` of a list reaches past the end of the shape.
    #[error("region {index}, {region}, reaches past dimension {dim} of shape {shape:?}")]
    ListedOutOfBounds {
        /// Position in the list.
        index: usize,
        /// The region.
        region: String,
        /// The first dimension in which it reaches too far.
        dim: usize,
        /// The shape that should contain it.
        shape: Dims,
    },
    /// A region should lie inside another one and does not.
    #[error("region {inner} does not lie inside {outer}")]
    NotInside {
        /// The region that should be inside.
        inner: String,
        /// The region that should contain it.
        outer: String,
    },
    /// A flat range is reversed or reaches past the last element.
    #[error("flat range [{start}, {end}) is not a range of a tensor of {elements} elements")]
    BadFlatRange {
        /// First element of the range.
        start: u64,
        /// One past its last element.
        end: u64,
        /// Elements of the tensor.
        elements: u64,
    },
    /// An element has zero bytes, or source and destination have elements of different sizes.
    #[error("element size of the {field} is {actual}, expected {expected}")]
    ElementSize {
        /// Which layout.
        field: &'static str,
        /// What it should be.
        expected: u64,
        /// What it is.
        actual: u64,
    },
    /// A box of elements does not lie inside the layout it is copied from or to.
    #[error("{field}[{dim}]: elements {offset} to {offset}+{size} are outside a layout of {extent}")]
    OutsideLayout {
        /// `src_offsets` or `dst_offsets`.
        field: &'static str,
        /// The dimension.
        dim: usize,
        /// Where the box starts.
        offset: u64,
        /// How far it reaches.
        size: u64,
        /// How many elements the layout has there.
        extent: u64,
    },
    /// A buffer is too short for the runs that should be copied.
    #[error("the {field} buffer has {actual} bytes, the copy needs {needed}")]
    ShortBuffer {
        /// `source` or `destination`.
        field: &'static str,
        /// Bytes that the copy touches.
        needed: u64,
        /// Bytes that there are.
        actual: u64,
    },
    /// A mesh whose description contradicts itself.
    #[error("mesh: {reason}")]
    BadMesh {
        /// What is wrong, naming the field.
        reason: String,
    },
    /// A rank that is not part of the mesh, or of the list of owners.
    #[error("rank {rank} is not in {field}")]
    UnknownRank {
        /// The rank.
        rank: u64,
        /// Where it was looked for.
        field: &'static str,
    },
    /// A placement that cannot apply to this tensor and mesh.
    #[error("placements[{index}]: {reason}")]
    BadPlacement {
        /// Which placement.
        index: usize,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that is only a partial sum on each rank has no regions to save.
    #[error(
        "placements[{index}] is Partial: every rank holds only its own term of a pending reduction, so no rank has \
         the tensor's values; reduce it first (in PyTorch: `tensor.redistribute(placements=[...])` to Replicate or Shard)"
    )]
    Partial {
        /// Which placement.
        index: usize,
    },
    /// Two shapes that do not have the same elements.
    #[error("shape {from:?} cannot become {to:?}: they do not have the same number of elements")]
    Reshape {
        /// The shape that is there.
        from: Dims,
        /// The shape that is asked for.
        to: Dims,
    },
    /// An order of dimensions that does not name each of them once.
    #[error("{order:?} does not name every dimension once")]
    BadOrder {
        /// The order.
        order: Vec<usize>,
    },
    /// Elements that do not lie at regular distances in the order that is asked for.
    #[error("the stored elements do not lie in row-major order, and cannot be seen in this shape by strides alone")]
    NoStrides,
    /// A layout would fall apart into more regions than can be handled.
    #[error("{field} gives more than {limit} regions")]
    TooManyRegions {
        /// What asks for them.
        field: &'static str,
        /// The most that are accepted.
        limit: u64,
    },
}

impl LayoutError {
    pub(crate) fn overflow(field: impl Into<String>) -> LayoutError {
        LayoutError::Overflow { field: field.into() }
    }
}

/// `actual` numbers were given where `expected` are needed.
pub(crate) fn check_rank(field: &'static str, expected: usize, actual: usize) -> Result<(), LayoutError> {
    if expected == actual { Ok(()) } else { Err(LayoutError::RankMismatch { field, expected, actual }) }
}
