//! What can be wrong with a torch archive.

use std::io;

use crate::pickle::PickleError;
use crate::read_at::ReadAt;

/// Why a torch archive can't be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
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
    /// The archive is said to lie outside its file.
    #[error("the record at {offset} of {length} bytes reaches past the file's end at {file_len}")]
    OutsideFile {
        /// Where the record starts.
        offset: u64,
        /// Its length.
        length: u64,
        /// The file's length.
        file_len: u64,
    },
    /// A file from before torch 1.6, or one saved with `_use_new_zipfile_serialization=False`.
    #[error(
        "{kind}: this is not the zip format that torch.save has written since torch 1.6; load it \
         with torch.load and save it again to convert it"
    )]
    LegacyFormat {
        /// What the first bytes look like.
        kind: &'static str,
    },
    /// Not a zip archive, or a damaged one.
    #[error("not a readable torch archive: {reason} (at byte {offset})")]
    Malformed {
        /// What is wrong.
        reason: String,
        /// Where, as a position in the source.
        offset: u64,
    },
    /// An entry that is compressed or encrypted, which torch never writes.
    #[error("entry {entry:?} is {how}; torch archives store their entries plainly")]
    NotStored {
        /// The entry's name.
        entry: String,
        /// How it is stored instead.
        how: String,
    },
    /// Two entries claim the same bytes.
    #[error("entries {first:?} and {second:?} overlap at byte {offset}")]
    Overlap {
        /// The entry that starts first.
        first: String,
        /// The entry that starts inside it.
        second: String,
        /// Where the second one starts.
        offset: u64,
    },
    /// The archive lacks an entry that it needs.
    #[error("the archive has no entry {entry:?}")]
    MissingEntry {
        /// The entry's name inside the archive's root folder.
        entry: String,
    },
    /// An entry is larger than its kind may be.
    #[error("entry {entry:?} has {size} bytes; at most {limit} are accepted")]
    TooLarge {
        /// The entry's name.
        entry: String,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// An entry's bytes don't match the checksum that the archive has for it.
    #[error("entry {entry:?} at byte {offset} has CRC-32 {actual:08x}, but the archive says {expected:08x}")]
    Checksum {
        /// The entry's name.
        entry: String,
        /// Where its data starts in the source.
        offset: u64,
        /// What the archive says.
        expected: u32,
        /// What the bytes say.
        actual: u32,
    },
    /// The pickled object can't be read, or an object can't be pickled.
    #[error("in the pickle data.pkl")]
    Pickle(#[source] PickleError),
    /// A kind of tensor that has no plain memory behind it: quantised, sparse, nested, on no device.
    #[error("{key}: {what} can't be read as plain memory")]
    Unsupported {
        /// The tensor's place in the pickled object.
        key: String,
        /// What it is.
        what: String,
    },
    /// A tensor whose description does not hold together.
    #[error("{key}: {reason}")]
    BadTensor {
        /// The tensor's place in the pickled object.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that no archive can hold: its size in bytes exceeds 63 bits.
    #[error("a tensor of shape {shape:?} and type {dtype} is too large")]
    TensorTooLarge {
        /// The shape.
        shape: Vec<u64>,
        /// The element type.
        dtype: crate::DType,
    },
}

impl RecordError {
    pub(crate) fn malformed(reason: impl Into<String>, offset: u64) -> RecordError {
        RecordError::Malformed { reason: reason.into(), offset }
    }
}

/// Reads exactly `length` bytes at `offset`, refusing before allocating if the source is shorter.
pub(crate) fn read_bytes(src: &dyn ReadAt, offset: u64, length: u64) -> Result<Vec<u8>, RecordError> {
    crate::read_at::read_vec(src, offset, length).map_err(|source| RecordError::Io { offset, length, source })
}
