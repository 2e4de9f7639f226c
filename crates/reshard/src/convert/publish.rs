//! Giving finished files their names, all or none of them visible.
//!
//! Where a store can make a second name for a file, files are written under a name that readers ignore and sweeps recognise,
//! and get their own when they are complete and synced. Object stores show an object only when it is complete.

use std::time::{SystemTime, UNIX_EPOCH};

use reshard_storage::{Publish, STAGED_SUFFIX, Store};

use crate::error::{Error, Result, StorageContext};

/// The name under which `name` is written.
pub(crate) fn staged(store: &dyn Store, name: &str) -> String {
    if !store.capabilities().hard_links {
        return name.to_owned();
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    format!(".{name}.{}-{clock:x}{STAGED_SUFFIX}", std::process::id())
}

/// Whether a file of this name may be written.
pub(crate) fn check_free(store: &dyn Store, name: &str, overwrite: bool) -> Result<()> {
    let exists = store.exists(name).doing(|| format!("looking for {name}"))?;
    let path = || format!("{}/{name}", store.describe());
    match (exists, overwrite) {
        (false, _) => Ok(()),
        (true, false) => Err(Error::AlreadyExists { path: path() }),
        (true, true) if store.capabilities().hard_links => Ok(()),
        (true, true) => {
            let path = path();
            Err(Error::unsupported(format!(
                "{path} cannot be replaced in one step on this kind of store; choose another name, or delete it first"
            )))
        }
    }
}

/// Gives a finished file its name, in one step.
pub(crate) fn promote(store: &dyn Store, from: &str, name: &str, overwrite: bool) -> Result<()> {
    if from == name {
        return Ok(());
    }
    let mode = if overwrite { Publish::Replace } else { Publish::Create };
    store.rename(from, name, mode).doing(|| format!("publishing {name}"))
}

/// Removes what killed conversions to the same name left.
pub(crate) fn sweep(store: &dyn Store, name: &str) {
    let prefix = format!(".{name}.");
    let Ok(files) = store.list(&prefix) else { return };
    for file in files.iter().filter(|f| f.path.ends_with(STAGED_SUFFIX) && f.path.starts_with(&prefix)) {
        let _ = store.delete(&file.path);
    }
}
