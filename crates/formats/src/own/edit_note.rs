//! The note beside an edited checkpoint.
//!
//! Data files are linked and their own indexes speak of the old keys. So an edit leaves its `.metadata` a second time, with
//! the sizes of the files, where a recovery finds it.

use serde::{Deserialize, Serialize};

use super::{OwnFileError, seal, unseal};

const MAGIC: &[u8; 8] = b"RSHEDIT1";

/// What an edit made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditNote {
    /// Of the edit.
    pub save_id: String,
    /// Names and sizes of the data files.
    pub files: Vec<(String, u64)>,
    /// The `.metadata`, as it was published.
    pub metadata: Vec<u8>,
}

impl EditNote {
    /// The bytes of the file.
    pub fn encode(&self) -> Result<Vec<u8>, OwnFileError> {
        seal(MAGIC, self)
    }

    /// Reads such a file.
    pub fn decode(bytes: &[u8]) -> Result<EditNote, OwnFileError> {
        unseal(MAGIC, bytes)
    }
}
