//! The note beside an edited checkpoint, and whether what it says is still so.

use reshard_formats::own::EditNote;
use reshard_storage::Store;

use crate::checkpoint::MAX_METADATA_BYTES;
use crate::error::chain;
use crate::layout_names::note_name;

/// The note of an edit, or why it cannot be used.
pub(crate) fn read_note(store: &dyn Store, save_id: &str) -> Result<EditNote, String> {
    let bytes = store.read(&note_name(save_id), MAX_METADATA_BYTES).map_err(|e| chain(&e))?;
    let note = EditNote::decode(&bytes).map_err(|e| chain(&e))?;
    if note.save_id != save_id {
        return Err(format!("it is the note of the edit {}", note.save_id));
    }
    Ok(note)
}

/// Whether every file is there as it was, or which one is not.
pub(crate) fn check_files(note: &EditNote, store: &dyn Store) -> Result<(), String> {
    for (name, length) in &note.files {
        let reader = store.open_reader(name).map_err(|e| chain(&e))?;
        if reader.len() != *length {
            return Err(format!("{name} has {} bytes, it had {length}", reader.len()));
        }
    }
    Ok(())
}
