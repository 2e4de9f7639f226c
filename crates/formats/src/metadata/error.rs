//! What can be wrong with a `.metadata`, with the key it is wrong for.

use reshard_layout::{LayoutError, Region};
use thiserror::Error;

use crate::pickle::PickleError;

/// Why a checkpoint's metadata was refused.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The pickle itself is unsound or names a class that is not data.
    #[error("metadata is not a readable pickle")]
    Pickle(#[from] PickleError),
    /// Something is not of the type it must be.
    #[error("{place}: expected {expected}, found {found}")]
    Type {
        /// Which field of what.
        place: String,
        /// What must be there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A field that every version writes is not there.
    #[error("{place}: field `{field}` is missing")]
    MissingField {
        /// Of what.
        place: String,
        /// The field.
        field: &'static str,
    },
    /// A key, or a field of an object, is there twice.
    #[error("`{key}` occurs twice in {place}")]
    DuplicateKey {
        /// The key.
        key: String,
        /// Where.
        place: String,
    },
    /// A tensor's shape or chunk is impossible, or a chunk lies outside of its tensor.
    #[error("`{key}`: chunk {chunk} is not a part of the tensor")]
    Chunk {
        /// The key.
        key: String,
        /// Which chunk of the tensor's list.
        chunk: usize,
        /// What is wrong with it.
        #[source]
        source: LayoutError,
    },
    /// A tensor's shape is impossible.
    #[error("`{key}`: shape is impossible")]
    Shape {
        /// The key.
        key: String,
        /// What is wrong with it.
        #[source]
        source: LayoutError,
    },
    /// Nothing says where a chunk (or a value) is stored.
    #[error("`{key}`: no storage info for the {what}")]
    NoStorage {
        /// The key.
        key: String,
        /// The chunk at its offsets, or the value.
        what: String,
    },
    /// Two storage infos for one chunk.
    #[error("`{key}`: two storage infos for the {what}")]
    DuplicateStorage {
        /// The key.
        key: String,
        /// The chunk at its offsets, or the value.
        what: String,
    },
    /// A file path that could lead out of the checkpoint.
    #[error("`{key}`: file path `{path}` does not stay inside the checkpoint: {reason}")]
    PathEscapes {
        /// The key.
        key: String,
        /// The path.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An element type that is not supported.
    #[error("`{key}`: element type {dtype} is not supported")]
    DType {
        /// The key.
        key: String,
        /// The type's name.
        dtype: String,
    },
    /// A memory layout other than strided (sparse, mkldnn).
    #[error("`{key}`: layout {layout} is not supported")]
    Layout {
        /// The key.
        key: String,
        /// The layout's name.
        layout: String,
    },
    /// A path segment that is neither a string nor an integer.
    #[error("`{key}`: path in the state dict has {found} at position {position}; strings and integers are supported")]
    PathSegment {
        /// The key.
        key: String,
        /// Which segment.
        position: usize,
        /// What it is.
        found: String,
    },
    /// The end of a record is past 64 bits.
    #[error("`{key}`: a record at offset {offset} cannot be {length} bytes long")]
    Range {
        /// The key.
        key: String,
        /// The record's position.
        offset: u64,
        /// Its length.
        length: u64,
    },
    /// A storage info refers to a file that the metadata doesn't list.
    #[error("`{key}`: file number {file} does not exist")]
    File {
        /// The key.
        key: String,
        /// The number.
        file: u32,
    },
    /// Chunks leave a part of their tensor out.
    #[error("`{key}`: no chunk holds {region}")]
    Gap {
        /// The key.
        key: String,
        /// A part that is missing.
        region: Region,
    },
    /// Two chunks hold the same elements.
    #[error("`{key}`: chunks {first} and {second} both hold {region}")]
    Overlap {
        /// The key.
        key: String,
        /// One chunk.
        first: usize,
        /// The other.
        second: usize,
        /// What both hold.
        region: Region,
    },
    /// More files, keys or chunks than are supported.
    #[error("metadata has more than {limit} {what}")]
    Limit {
        /// What is counted.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}
