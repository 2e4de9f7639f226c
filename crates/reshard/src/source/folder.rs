//! A folder that somebody wants opened: listed once, and only when a format asks.

use std::sync::{Arc, OnceLock};

use reshard_storage::Store;

use crate::error::{Result, StorageContext};

/// The root of a store, and what lies in it.
pub(super) struct Folder {
    pub(super) store: Arc<dyn Store>,
    /// The address, for messages.
    pub(super) path: String,
    files: OnceLock<Vec<String>>,
}

impl Folder {
    pub(super) fn new(store: Arc<dyn Store>) -> Folder {
        let path = store.describe();
        Folder { store, path, files: OnceLock::new() }
    }

    /// Whether a file is there. Does not list: a plain web server cannot.
    pub(super) fn has(&self, name: &str) -> Result<bool> {
        self.store.exists(name).doing(|| format!("looking into {}", self.path))
    }

    /// All files, those of folders below as well, sorted by path.
    pub(super) fn files(&self) -> Result<&[String]> {
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let listed = self.store.list("").doing(|| format!("looking into {}", self.path))?;
        Ok(self.files.get_or_init(|| listed.into_iter().map(|file| file.path).collect()))
    }

    /// The files that lie in no folder below.
    pub(super) fn top(&self) -> Result<impl Iterator<Item = &str>> {
        Ok(self.files()?.iter().map(String::as_str).filter(|path| !path.contains('/')))
    }
}
