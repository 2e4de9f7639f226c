//! Folders of trainers' own formats while they are written. Such a format has no step that makes its folder whole, so a marker lies
//! in it from before the first file until after the last. What has one is no checkpoint: nobody opens it, and the next conversion to
//! the same place begins anew.

use std::collections::BTreeSet;

use reshard_storage::{FileInfo, Publish, StorageError, Store, Version};

use super::Destination;
use crate::commit::{discard, new_save_id, settled};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::UNFINISHED_FILE;

const TEXT: &str = "A conversion is writing this folder, or was stopped while it did. Run it again.";
const MAX_TEXT_BYTES: u64 = 1 << 16;

/// A folder that is being written, marked by its writer: where a store has no locks, the marker keeps two conversions apart.
pub(super) struct Marked<'s> {
    store: &'s dyn Store,
    name: String,
    text: Vec<u8>,
}

/// Marks a folder, before anything else is written to it. Fails where another marker lies, unless it is the one to take `over`, and
/// where `seen`, the files of the folder when it was looked at, are no longer all that lies there.
pub(super) fn mark<'s>(store: &'s dyn Store, folder: &str, over: Option<Version>, seen: &[FileInfo]) -> Result<Marked<'s>> {
    let text = format!("{TEXT}\n{}\n", new_save_id()).into_bytes();
    let marked = Marked { store, name: format!("{folder}{UNFINISHED_FILE}"), text };
    let mode = over.map_or(Publish::Create, Publish::Update);
    let published = store.publish(&marked.name, &marked.text, mode);
    match settled(store, &marked.name, &marked.text, published) {
        Ok(()) => {}
        Err(failed) => {
            marked.give_up([].into_iter());
            return Err(failed.error);
        }
    }
    // Another conversion may have come and gone since the folder was looked at.
    let names = |files: &[FileInfo]| -> BTreeSet<String> {
        files.iter().map(|file| file.path.clone()).filter(|name| *name != marked.name).collect()
    };
    let unchanged = match store.list(folder) {
        Ok(now) if names(&now) == names(seen) => Ok(()),
        Ok(_) => Err(marked.taken()),
        Err(source) => Err(Error::Storage { doing: format!("looking into {}", store.describe()), source }),
    };
    if let Err(error) = unchanged {
        marked.give_up([].into_iter());
        return Err(error);
    }
    Ok(marked)
}

impl Marked<'_> {
    /// The marker.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Fails when another conversion has taken the folder over.
    pub(super) fn check(&self) -> Result<()> {
        match self.store.read(&self.name, MAX_TEXT_BYTES) {
            Ok(text) if text == self.text => Ok(()),
            Ok(_) | Err(StorageError::NotFound { .. }) => Err(self.taken()),
            Err(source) => Err(Error::Storage { doing: format!("reading {}", self.name), source }),
        }
    }

    fn taken(&self) -> Error {
        let detail = "another conversion to the same place has begun since".to_owned();
        Error::Conflict { path: self.store.describe(), detail }
    }

    /// The folder is whole.
    pub(super) fn remove(&self) -> Result<()> {
        self.store.delete(&self.name).doing(|| format!("removing {}", self.name))
    }

    /// Removes files that were begun, unless the folder is another's by now.
    pub(super) fn discard<'n>(&self, names: impl Iterator<Item = &'n str>) {
        if self.check().is_ok() {
            discard(names, self.store);
        }
    }

    /// Removes files that were begun, and the marker.
    pub(super) fn give_up<'n>(&'n self, names: impl Iterator<Item = &'n str>) {
        self.discard(names.chain([self.name.as_str()]));
    }
}

/// Removes what conversions that were stopped left in folders of their own below a root. Whoever calls it keeps other writers
/// away; where a store has no lock, another conversion may be at work there, and nothing is removed. Best effort: what stays is in
/// nobody's way.
pub(super) fn sweep(destination: &Destination) {
    let store = destination.store.as_ref();
    if !store.capabilities().locks {
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
