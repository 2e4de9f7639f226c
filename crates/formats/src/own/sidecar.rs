//! The sidecar: place and checksums of every record of one save, in a file of its own.

use serde::{Deserialize, Serialize};

use super::checksums::{RecordChecksums, check_records, find_record};
use super::{OwnFileError, seal, unseal};

const MAGIC: &[u8; 8] = b"RSHSUMS1";

/// The sidecar of one save. It belongs to the `.metadata` that carries the same save id and to no other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sidecar {
    /// Of the save.
    pub save_id: String,
    /// How many ranks saved.
    pub ranks: u32,
    /// The data files, sorted by name.
    pub files: Vec<SidecarFile>,
}

/// One data file's records, by offset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SidecarFile {
    /// Its name.
    pub file: String,
    /// Its whole length.
    pub length: u64,
    /// Every record in it.
    pub records: Vec<RecordChecksums>,
}

impl Sidecar {
    /// The bytes of the file.
    pub fn encode(&self) -> Result<Vec<u8>, OwnFileError> {
        seal(MAGIC, self)
    }

    /// Reads such a file.
    pub fn decode(bytes: &[u8]) -> Result<Sidecar, OwnFileError> {
        let side: Sidecar = unseal(MAGIC, bytes)?;
        side.files.iter().try_for_each(|file| check_records(file.records.iter().copied()))?;
        if !side.files.is_sorted_by(|a, b| a.file < b.file) {
            return Err(OwnFileError::Content("its files are not sorted by name".into()));
        }
        Ok(side)
    }

    /// The record at `offset` of `file`.
    pub fn find(&self, file: &str, offset: u64) -> Option<&RecordChecksums> {
        let position = self.files.binary_search_by(|entry| entry.file.as_str().cmp(file)).ok()?;
        find_record(&self.files[position].records, offset)
    }
}
