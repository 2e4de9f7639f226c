//! What a power failure loses: content that nobody synced, and names in folders that nobody synced. A protocol that
//! publishes before it syncs does not survive this, although it survives a killed process.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;

use crate::{Result, Store, WriteOptions};

/// What a crash takes with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// Everything written stays, as when a process is killed.
    #[default]
    Nothing,
    /// Files that were not synced are empty; files whose name was not synced are gone.
    Truncate,
    /// Files that were not synced have their length and only zeros; files whose name was not synced are gone.
    Zero,
    /// Files that were not synced, or whose name was not, are gone.
    Remove,
}

/// What is known of every file made through the wrapper that a power failure could still take.
#[derive(Debug, Default)]
pub(super) struct Tracker(BTreeMap<(String, String), Tracked>);

#[derive(Debug)]
struct Tracked {
    store: Arc<dyn Store>,
    content_synced: bool,
    name_synced: bool,
}

impl Tracked {
    fn is_durable(&self) -> bool {
        self.content_synced && self.name_synced
    }
}

impl Tracker {
    /// A new file.
    pub(super) fn created(&mut self, store: &Arc<dyn Store>, path: &str, content_synced: bool) {
        // Objects appear whole and durable; there is nothing to lose.
        if !store.capabilities().ordered_writes {
            let tracked = Tracked { store: store.clone(), content_synced, name_synced: false };
            self.0.insert((store.describe(), path.to_owned()), tracked);
        }
    }

    /// A file's content was synced.
    pub(super) fn synced(&mut self, store: &dyn Store, path: &str) {
        if let Some(tracked) = self.0.get_mut(&(store.describe(), path.to_owned())) {
            tracked.content_synced = true;
            self.0.retain(|_, tracked| !tracked.is_durable());
        }
    }

    /// A file is gone, or has another name.
    pub(super) fn forget(&mut self, store: &dyn Store, path: &str) {
        self.0.remove(&(store.describe(), path.to_owned()));
    }

    /// A file took another name, which an earlier file may have had: as long as the folder is not synced, a power failure
    /// brings back one of the two, whole. Only content that nobody synced is lost.
    pub(super) fn renamed(&mut self, store: &Arc<dyn Store>, from: &str, to: &str) {
        let root = store.describe();
        self.0.remove(&(root.clone(), to.to_owned()));
        if let Some(tracked) = self.0.remove(&(root.clone(), from.to_owned()))
            && !tracked.content_synced
        {
            self.0.insert((root, to.to_owned()), Tracked { name_synced: true, ..tracked });
        }
    }

    /// The names below a root were synced.
    pub(super) fn names_synced(&mut self, store: &dyn Store) {
        let root = store.describe();
        for ((owner, _), tracked) in &mut self.0 {
            tracked.name_synced |= *owner == root;
        }
        self.0.retain(|_, tracked| !tracked.is_durable());
    }

    /// Everything below a root is gone.
    pub(super) fn root_deleted(&mut self, store: &dyn Store) {
        let root = store.describe();
        self.0.retain(|(owner, _), _| *owner != root);
    }

    /// The power fails.
    pub(super) fn lose(&mut self, loss: Loss) {
        if loss == Loss::Nothing {
            return;
        }
        for ((_, path), tracked) in std::mem::take(&mut self.0) {
            let lost = lose_one(&*tracked.store, &path, tracked.content_synced, loss);
            if let Err(error) = lost {
                tracing::warn!(path, %error, "could not lose a file");
            }
        }
    }
}

/// The file is replaced, not changed in place: another name for the same bytes may be durable.
fn lose_one(store: &dyn Store, path: &str, content_synced: bool, loss: Loss) -> Result<()> {
    let size = match store.size(path) {
        Ok(size) => size,
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(error),
    };
    store.delete(path)?;
    let length = match loss {
        _ if content_synced => return Ok(()),
        Loss::Nothing | Loss::Remove => return Ok(()),
        Loss::Truncate => 0,
        Loss::Zero => size,
    };
    let writer = store.create_writer(path, &WriteOptions::with_length(length))?;
    let zeros = vec![0; length.min(1 << 20) as usize];
    let mut offset = 0;
    while offset < length {
        let part = &zeros[..(length - offset).min(1 << 20) as usize];
        writer.write_at(offset, &[IoSlice::new(part)])?;
        offset += part.len() as u64;
    }
    writer.finish(false)
}
