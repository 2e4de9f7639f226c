//! Folders of trainers' own formats while they are written. Such a format has no step that makes its folder whole, so a marker lies
//! in it from before the first file until after the last. What has one is no checkpoint: nobody opens it, and the next conversion to
//! the same place begins anew.

use reshard_storage::{Publish, Store};

use super::Destination;
use crate::commit::discard;
use crate::error::{Result, StorageContext};
use crate::layout_names::UNFINISHED_FILE;

const TEXT: &[u8] = b"A conversion is writing this folder, or was stopped while it did. Run it again.\n";

/// Marks a folder, before anything else is written to it.
pub(super) fn mark(store: &dyn Store, folder: &str) -> Result<()> {
    let name = format!("{folder}{UNFINISHED_FILE}");
    store.publish(&name, TEXT, Publish::Replace).doing(|| format!("writing {name}"))
}

/// The folder is whole.
pub(super) fn unmark(store: &dyn Store, folder: &str) -> Result<()> {
    let name = format!("{folder}{UNFINISHED_FILE}");
    store.delete(&name).doing(|| format!("removing {name}"))
}

/// Gives up what was begun.
pub(super) fn discard_marked<'n>(names: impl Iterator<Item = &'n str>, store: &dyn Store, folder: &str) {
    discard(names, store);
    discard([format!("{folder}{UNFINISHED_FILE}").as_str()].into_iter(), store);
}

/// Removes what conversions that were stopped left in folders of their own below a root. Whoever calls it keeps other writers
/// away; where a store has no lock, another conversion may be at work there, and nothing is removed. Best effort: what stays is in
/// nobody's way.
pub(super) fn sweep(destination: &Destination) {
    let store = destination.store.as_ref();
    if store.local_root().is_none() {
        return;
    }
    let Ok(files) = store.list("") else { return };
    let marked = files.iter().filter_map(|file| file.path.strip_suffix(UNFINISHED_FILE)?.strip_suffix('/'));
    for folder in marked.filter(|folder| !folder.contains('/')) {
        let below = format!("{folder}/");
        let ours = |name: &str| name == UNFINISHED_FILE || (name.starts_with("zero/") && name.ends_with(".pt")) || is_model(name);
        // With anything else in it, it is no longer ours alone.
        if files.iter().filter_map(|file| file.path.strip_prefix(&below)).all(ours)
            && let Ok(folder) = destination.below(folder)
            && let Err(error) = folder.delete_root()
        {
            tracing::warn!(%error, "the folder of a conversion that was stopped could not be removed");
        }
    }
}

fn is_model(name: &str) -> bool {
    super::universal::MODEL_FILES.contains(&name)
}
