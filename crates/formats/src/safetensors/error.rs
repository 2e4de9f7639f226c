//! What can be wrong with a safetensors file or index.

use std::io;

use safetensors::SafeTensorError;

/// Why a safetensors file or index can't be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The source could not be read.
    #[error("reading {length} bytes at {offset} failed")]
    Io {
        /// Position in the source.
        offset: u64,
        /// Bytes wanted.
        length: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The header's length makes no sense for this file.
    #[error("a header of {length} bytes in a file of {file_len}: not a safetensors file")]
    HeaderLength {
        /// What the first eight bytes say.
        length: u64,
        /// The file's length.
        file_len: u64,
    },
    /// The header is not the JSON that it should be.
    #[error("the safetensors header is malformed")]
    Json(#[source] serde_json::Error),
    /// The safetensors crate's own rules are broken: gaps, overlaps, sizes that don't match shapes.
    #[error("the safetensors header does not hold together")]
    Invalid(#[source] SafeTensorError),
    /// The file is shorter or longer than the header says.
    #[error("the header describes {expected} bytes of data, but the file has {actual}")]
    DataLength {
        /// Bytes that the header describes.
        expected: u64,
        /// Bytes that are there.
        actual: u64,
    },
    /// A name occurs twice.
    #[error("{key:?} occurs twice in {place}")]
    Duplicate {
        /// The name.
        key: String,
        /// Where it does.
        place: &'static str,
    },
    /// An element type that torch lacks.
    #[error("{key}: the safetensors type {dtype:?} has no torch equivalent")]
    UnknownDType {
        /// The tensor.
        key: String,
        /// The type as the file spells it.
        dtype: String,
    },
    /// An element type that safetensors lacks.
    #[error("{key}: safetensors has no type for torch's {dtype}")]
    UnsupportedDType {
        /// The tensor.
        key: String,
        /// Torch's type.
        dtype: crate::DType,
    },
    /// A tensor's description does not hold together.
    #[error("{key}: {reason}")]
    BadTensor {
        /// The tensor.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// DCP's sharding information is malformed.
    #[error("DCP_SHARDING_INFO is malformed: {reason}")]
    ShardingInfo {
        /// What is wrong.
        reason: String,
    },
    /// The index is malformed.
    #[error("the safetensors index is malformed: {reason}")]
    Index {
        /// What is wrong.
        reason: String,
    },
}
