//! The note beside an edited checkpoint.
//!
//! Data files are linked and their own indexes speak of the old keys. So the edit leaves its `.metadata` a second time, with
//! the sizes of the files, where `recover` finds it; PyTorch ignores it.

use reshard_storage::Store;
use serde::{Deserialize, Serialize};

use crate::checkpoint::MAX_METADATA_BYTES;
use crate::checksums::{SideFileError, seal, unseal};
use crate::error::chain;
use crate::layout_names::{EDIT_SUFFIX, SIDE_PREFIX};

const MAGIC: &[u8; 8] = b"RSHEDIT1";

/// What an edit made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EditNote {
    pub(crate) save_id: String,
    /// Names and sizes of the data files.
    pub(crate) files: Vec<(String, u64)>,
    /// The `.metadata`, as it was published.
    pub(crate) metadata: Vec<u8>,
}

/// The name of the note of an edit.
pub(crate) fn note_name(save_id: &str) -> String {
    format!("{SIDE_PREFIX}{save_id}{EDIT_SUFFIX}")
}

impl EditNote {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, SideFileError> {
        seal(MAGIC, self)
    }

    /// The note of an edit, or why it cannot be used.
    pub(crate) fn read(store: &dyn Store, save_id: &str) -> Result<EditNote, String> {
        let bytes = store.read(&note_name(save_id), MAX_METADATA_BYTES).map_err(|e| chain(&e))?;
        let note: EditNote = unseal(MAGIC, &bytes).map_err(|e| chain(&e))?;
        if note.save_id != save_id {
            return Err(format!("it is the note of the edit {}", note.save_id));
        }
        Ok(note)
    }

    /// Whether every file is there as it was, or which one is not.
    pub(crate) fn check_files(&self, store: &dyn Store) -> Result<(), String> {
        for (name, length) in &self.files {
            let reader = store.open_reader(name).map_err(|e| chain(&e))?;
            if reader.len() != *length {
                return Err(format!("{name} has {} bytes, it had {length}", reader.len()));
            }
        }
        Ok(())
    }
}
