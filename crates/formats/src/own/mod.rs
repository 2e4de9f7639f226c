//! The files that reshard itself adds to a checkpoint: the sidecar with the checksums of every record, the index at the end
//! of every data file, the note beside an edited checkpoint.
//!
//! PyTorch ignores all of them. Each ends with a checksum of itself and is decoded as foreign bytes; docs/format.md describes
//! them byte by byte. What has a mark is never given another meaning: a changed structure gets a new one.

mod checksums;
mod edit_note;
mod error;
mod index;
mod keys;
mod sidecar;

use serde::Serialize;
use serde::de::DeserializeOwned;
use twox_hash::XxHash3_64;

pub use checksums::{ChecksumBuilder, Checksums, RecordChecksums, find_record};
pub use edit_note::EditNote;
pub use error::OwnFileError;
pub use index::{FileIndex, FileIndexRef, IndexedRecord, IndexedRecordRef, OffsetsAndSizes};
pub use keys::{KeyEntry, TensorFacts};
pub use sidecar::{Sidecar, SidecarFile};

/// No index and no sidecar is larger.
pub const MAX_OWN_BYTES: u64 = 4 << 30;

/// A small file: a mark, the content, and the checksum of both.
fn seal(magic: &[u8; 8], content: &impl Serialize) -> Result<Vec<u8>, OwnFileError> {
    let mut bytes = postcard::to_extend(content, magic.to_vec()).map_err(OwnFileError::content)?;
    bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
    Ok(bytes)
}

/// The content of such a file.
fn unseal<T: DeserializeOwned>(magic: &[u8; 8], bytes: &[u8]) -> Result<T, OwnFileError> {
    let body = bytes.len().checked_sub(8).filter(|&n| n >= magic.len() && bytes.starts_with(magic));
    let Some((body, stored)) = body.map(|n| bytes.split_at(n)) else {
        return Err(OwnFileError::NotOne);
    };
    check_hash(body, stored)?;
    whole(&body[magic.len()..])
}

fn check_hash(body: &[u8], stored: &[u8]) -> Result<(), OwnFileError> {
    let expected = u64::from_le_bytes(stored.try_into().map_err(|_| OwnFileError::NotOne)?);
    let actual = XxHash3_64::oneshot(body);
    if expected == actual { Ok(()) } else { Err(OwnFileError::Damaged { expected, actual }) }
}

/// Decodes all of the bytes: what follows the content belongs to nothing.
fn whole<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, OwnFileError> {
    match postcard::take_from_bytes(bytes).map_err(OwnFileError::content)? {
        (content, []) => Ok(content),
        (_, rest) => Err(OwnFileError::Content(format!("{} bytes follow it", rest.len()))),
    }
}
