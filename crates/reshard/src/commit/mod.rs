//! The commit: the only code that makes a checkpoint appear, and the only code that removes files because of it.
//!
//! Saves, background saves, conversions, re-layouts, merges, edits, recoveries and the writer under PyTorch's planner all end
//! here. The contract:
//!
//! 1. **Begin** ([`Commit::begin`]) claims the path, looks which `.metadata` is there and chooses the save's id. A second writer
//!    to the path is refused here, where the store has locks. Data files then get names that nothing there has.
//! 2. **Assemble** ([`Assembly`]) turns what was written into `.metadata` and the sidecar.
//! 3. **Publish** ([`Commit::publish`]). Every data file must be there with the length that its writer reported. Then
//!    `.metadata` is put in place, atomically, and only if the one that [`Commit::begin`] saw is still there: of two writers
//!    that no lock kept apart, the second gets an error. Before this step a reader finds what was there before; after it the new
//!    checkpoint, complete.
//! 4. **Sweep**, after a publication that is known to have happened: the data files of the checkpoint before, and whatever
//!    saves that were stopped left. What cannot be removed is a warning: the save itself is done.
//! 5. Or **discard** ([`discard`]): the files of a save that was not published.
//!
//! A publication can fail after it took effect: the folder could not be synced after the rename, the answer of the object store
//! got lost. So after a failure `.metadata` is read back. Nothing of the new data is discarded unless it is seen not to be the
//! new one, nothing of the old data is swept unless it is seen to be; in doubt both stay ([`Failed::keep`]), the error says so,
//! and the next save sweeps what is not needed.

mod assemble;
mod beside;
pub(crate) mod planned;

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rayon::prelude::*;
use reshard_formats::Metadata;
use reshard_storage::{Publish, StorageError, Store, Version, WriteLock, is_staged};

pub(crate) use self::assemble::{Assembly, encode_side};
use self::beside::{Beside, beside};
use crate::checkpoint::MAX_METADATA_BYTES;
use crate::control::Control;
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{DATA_PREFIX, DATA_SUFFIX, METADATA_FILE, is_save_file};
use crate::workers::Workers;

/// A commit under way: the claim on a path, and what was there when it was made.
#[derive(Debug)]
pub(crate) struct Commit {
    /// Unique among the saves to one path.
    pub(crate) save_id: String,
    /// Whether data files carry the id in their names, because others lie there.
    pub(crate) named: bool,
    /// The metadata of one rank among several, instead of the checkpoint's.
    rank_metadata: Option<String>,
    seen: Option<Version>,
    /// Whether what does not belong to the new checkpoint goes.
    sweeps: bool,
    /// What to say of a file of another format that lies there.
    beside: Option<String>,
    /// The data files of the checkpoint before, once it was read.
    old: Option<Vec<String>>,
    _lock: WriteLock,
}

/// What is to be published.
pub(crate) struct Publication<'p> {
    /// The encoded `.metadata`.
    pub(crate) metadata: &'p [u8],
    /// The data files, with their lengths where they are known.
    pub(crate) files: Vec<(&'p str, Option<u64>)>,
    /// Files beside the data that belong to the checkpoint and are there already.
    pub(crate) beside: Vec<String>,
    /// The sidecar, where it is still to be written: name and bytes.
    pub(crate) sidecar: Option<(String, Vec<u8>)>,
    /// Whether to ask the store for every data file.
    pub(crate) check_files: bool,
    pub(crate) control: &'p Control,
}

/// A publication that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// `.metadata` may be the new one: its data files must stay.
    pub(crate) keep: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed { error, keep: false }
    }
}

impl Failed {
    /// Discards the files of a save that was surely not published, and gives the error.
    pub(crate) fn discarding<'n>(self, names: impl Iterator<Item = &'n str>, store: &dyn Store) -> Error {
        if !self.keep {
            discard(names, store);
        }
        self.error
    }
}

impl Commit {
    /// Claims a path for a new checkpoint, which it makes where there are folders. A checkpoint that is there is an error
    /// unless it may be overwritten; so is a model of another format, which stays in any case.
    pub(crate) fn begin(store: &dyn Store, overwrite: bool) -> Result<Commit> {
        let (lock, gave_way) = claim_from_planned(store)?;
        let commit = Commit::look(store, None, lock, overwrite)?;
        Ok(Commit { named: commit.named || gave_way, ..commit })
    }

    /// As [`Commit::begin`], for the metadata of one rank among several that save to the path without talking to each other:
    /// no rank keeps the others away, and none sweeps.
    pub(crate) fn begin_rank(store: &dyn Store, overwrite: bool, name: &str) -> Result<Commit> {
        store.prepare().doing(|| format!("preparing {}", store.describe()))?;
        let whole = Commit::look(store, None, WriteLock::none(), overwrite)?;
        let commit = Commit::look(store, Some(name), WriteLock::none(), true)?;
        Ok(Commit { sweeps: false, named: commit.named || whole.named, ..commit })
    }

    /// For a checkpoint whose data files are there already, under the id that they carry. Only staged files are swept: other data
    /// files may be all that is left of other saves.
    pub(crate) fn begin_rebuild(store: &dyn Store) -> Result<Commit> {
        let lock = claim(store)?;
        Ok(Commit { sweeps: false, ..Commit::look(store, None, lock, true)? })
    }

    fn look(store: &dyn Store, rank_metadata: Option<&str>, lock: WriteLock, overwrite: bool) -> Result<Commit> {
        let path = || format!("preparing {}", store.describe());
        let seen = store.version(rank_metadata.unwrap_or(METADATA_FILE)).doing(path)?;
        if seen.is_some() && !overwrite {
            return Err(Error::AlreadyExists { path: store.describe() });
        }
        let files = if seen.is_some() { Vec::new() } else { store.list("").doing(path)? };
        let named = seen.is_some() || files.iter().any(|file| file.path.starts_with(DATA_PREFIX));
        let beside = match beside(files.iter().map(|file| file.path.as_str())) {
            Some(Beside::Model(file)) if !overwrite => {
                return Err(Error::OtherModel { path: store.describe(), file: file.to_owned() });
            }
            Some(Beside::Model(file) | Beside::File(file)) => Some(format!(
                "{file:?} lies in the same folder and stays: opening {} finds the new checkpoint, no longer that file",
                store.describe()
            )),
            None => None,
        };
        Ok(Commit {
            beside,
            save_id: new_save_id(),
            named,
            rank_metadata: rank_metadata.map(str::to_owned),
            seen,
            sweeps: true,
            old: None,
            _lock: lock,
        })
    }

    /// Reads which files the checkpoint before names, as far as it can be read; [`Commit::publish`] does it otherwise.
    pub(crate) fn read_old(&mut self, store: &dyn Store) {
        let read = || Metadata::decode(&store.read(METADATA_FILE, MAX_METADATA_BYTES).ok()?).ok();
        let metadata = (self.sweeps && self.seen.is_some()).then(read).flatten();
        self.old = Some(metadata.map_or_else(Vec::new, |metadata| metadata.files));
    }

    /// Publishes, and sweeps. Returns warnings. The path is free again when this returns.
    pub(crate) fn publish(mut self, store: &dyn Store, publication: Publication<'_>) -> Result<Vec<String>, Failed> {
        let Publication { metadata, files, mut beside, sidecar, check_files, control } = publication;
        control.check("publishing")?;
        if check_files {
            self.check_files(store, &files)?;
        }
        if self.old.is_none() {
            self.read_old(store);
        }
        if let Some((name, bytes)) = &sidecar {
            self.write_sidecar(store, name, bytes)?;
        }
        if let Err(failed) = self.put(store, metadata) {
            // Of a rebuilt checkpoint the sidecar says what the data files say, and may have been there before.
            if let (false, true, Some((name, _))) = (failed.keep, self.sweeps, &sidecar) {
                discard(std::iter::once(name.as_str()), store);
            }
            return Err(failed);
        }
        if self.rank_metadata.is_some() {
            return Ok(Vec::new());
        }
        if !self.sweeps {
            return Ok(sweep(store, &HashSet::new(), Vec::new(), is_staged));
        }
        beside.extend(sidecar.map(|(name, _)| name));
        let keep = files.into_iter().map(|(name, _)| name).chain(beside.iter().map(String::as_str)).collect();
        let mut warnings: Vec<String> = self.beside.take().into_iter().collect();
        warnings.extend(sweep(store, &keep, self.old.take().unwrap_or_default(), is_save_file));
        Ok(warnings)
    }

    /// A data file that a rank wrote to another path, or to a disk of its own, is not there.
    fn check_files(&self, store: &dyn Store, files: &[(&str, Option<u64>)]) -> Result<()> {
        let wrong: Vec<String> = Workers::reading(store).run(|| {
            let check = |(name, length): &(&str, Option<u64>)| wrong_file(store, name, *length);
            files.par_iter().filter_map(|file| check(file).transpose()).collect::<Result<_>>()
        })??;
        let Some(first) = wrong.first() else { return Ok(()) };
        let more = if wrong.len() > 1 { format!(" (and {} more files)", wrong.len() - 1) } else { String::new() };
        Err(Error::invalid(format!(
            "{}: {first}{more}; all ranks must save to the same path, on storage that they share, and nobody else may remove files \
             there; nothing was published",
            store.describe()
        )))
    }

    fn write_sidecar(&self, store: &dyn Store, name: &str, bytes: &[u8]) -> Result<()> {
        // The name is new because the id is; only what is rebuilt has the id of a save that may have left a damaged one.
        let mode = if self.sweeps || self.rank_metadata.is_some() { Publish::Create } else { Publish::Replace };
        store.publish(name, bytes, mode).doing(|| format!("writing {name}"))
    }

    /// The one step that makes a checkpoint visible.
    fn put(&self, store: &dyn Store, metadata: &[u8]) -> Result<(), Failed> {
        let mode = self.seen.clone().map_or(Publish::Create, Publish::Update);
        match &self.rank_metadata {
            None => settled(store, METADATA_FILE, metadata, store.publish(METADATA_FILE, metadata, mode)),
            Some(name) => settled(store, name, metadata, store.publish(name, metadata, mode)),
        }
    }
}

/// What became of a publication of `name`: `Ok` when it is there and durable, also when its answer was an error.
pub(crate) fn settled(store: &dyn Store, name: &str, bytes: &[u8], published: Result<(), StorageError>) -> Result<(), Failed> {
    let Err(error) = published else { return Ok(()) };
    let capabilities = store.capabilities();
    let refused = matches!(error, StorageError::AlreadyExists { .. } | StorageError::Changed { .. });
    // A request whose answer never came may still be carried out.
    let may_follow =
        capabilities.remote && !refused && !matches!(error, StorageError::PermissionDenied { .. } | StorageError::NoSpace { .. });
    let keep = match store.read(name, MAX_METADATA_BYTES) {
        Ok(found) if found == bytes => match capabilities.visible_is_durable {
            true => return Ok(()),
            false => true,
        },
        Ok(_) | Err(StorageError::NotFound { .. }) => may_follow,
        Err(_) => true,
    };
    let error = match (keep, refused) {
        (false, true) => Error::Conflict {
            path: store.describe(),
            detail: format!("{name} was changed since this one began; nothing of this one was published"),
        },
        (false, false) => Error::Storage { doing: format!("publishing {name}"), source: error },
        (true, _) => Error::Storage {
            doing: format!(
                "publishing {name}, which may have taken effect: the files of the old and of the new checkpoint both stay, \
                 opening {} tells which of them is there, and overwriting it removes the other",
                store.describe()
            ),
            source: error,
        },
    };
    Err(Failed { error, keep })
}

/// Makes a path where there are folders, and keeps other writers away from it.
pub(crate) fn claim(store: &dyn Store) -> Result<WriteLock> {
    claim_from_planned(store).map(|(lock, _)| lock)
}

/// As [`claim`]; says whether a save that someone else plans had to give way.
fn claim_from_planned(store: &dyn Store) -> Result<(WriteLock, bool)> {
    let path = || format!("preparing {}", store.describe());
    store.prepare().doing(path)?;
    let mut gave_way = false;
    let mut locked = store.lock();
    if let Err(StorageError::Busy { .. }) = locked
        && planned::give_way(store)
    {
        gave_way = true;
        locked = store.lock();
    }
    locked.map(|lock| (lock, gave_way)).map_err(|error| match error {
        StorageError::Busy { path } => {
            let detail = "a save, conversion or recovery is under way there; wait for it to end, or choose another path";
            Error::Conflict { path, detail: detail.to_owned() }
        }
        source => Error::Storage { doing: path(), source },
    })
}

/// What is wrong with a data file, if something is. A network file system may show a file of another machine a little late.
fn wrong_file(store: &dyn Store, name: &str, length: Option<u64>) -> Result<Option<String>> {
    let mut wrong = None;
    for pause in [0, 50, 400] {
        std::thread::sleep(Duration::from_millis(pause));
        wrong = match store.size(name) {
            Ok(size) if length.is_none_or(|length| length == size) => return Ok(None),
            Ok(size) => Some(format!("{name} has {size} bytes, {} were written", length.unwrap_or(size))),
            Err(StorageError::NotFound { .. }) => Some(format!("{name} was written, but is not there")),
            Err(error) => return Err(error).doing(|| format!("looking for {name}")),
        };
    }
    Ok(wrong)
}

/// Removes what does not belong to the checkpoint that was published: the old data files, and leftovers.
fn sweep(store: &dyn Store, keep: &HashSet<&str>, old: Vec<String>, leftover: fn(&str) -> bool) -> Vec<String> {
    let mut warnings = Vec::new();
    // A foreign `.metadata` may name anything, files of checkpoints in folders below too; only data files of this folder go.
    let own = |name: &String| name.ends_with(DATA_SUFFIX) && !name.contains('/');
    let mut remove: HashSet<String> = old.into_iter().filter(own).collect();
    match store.list("") {
        Ok(files) => remove.extend(files.into_iter().map(|f| f.path).filter(|name| leftover(name))),
        Err(error) => warnings.push(format!("files of earlier saves could not be listed: {error}")),
    }
    for name in remove.into_iter().filter(|name| !keep.contains(name.as_str())) {
        if let Err(error) = store.delete(&name) {
            warnings.push(format!("{name} of an earlier save could not be removed: {error}"));
        }
    }
    warnings
}

/// Removes files of a save that was not published. Best effort: what stays is swept by the next save.
pub(crate) fn discard<'n>(names: impl Iterator<Item = &'n str>, store: &dyn Store) {
    for name in names {
        if let Err(error) = store.delete(name) {
            tracing::warn!(%error, name, "a file of a failed save could not be removed");
        }
    }
}

/// Unique among the saves to one path: the time, and a number that differs between processes that start at once.
pub(crate) fn new_save_id() -> String {
    use std::hash::{BuildHasher, Hasher};
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    format!("{nanos:016x}{:08x}", random as u32)
}
