//! Rebuilding `.metadata` from data files alone.
//!
//! Every data file of ours ends with an index of what it holds. The newest save of which every file is there, and whose
//! chunks tile every tensor, is published; files that PyTorch wrote have no index and cannot be used for this. The files of an
//! edited checkpoint speak of the keys before the edit; what the edit made of them stands in its note.
//!
//! ```no_run
//! use reshard::recover::{RecoverOptions, recover};
//! use reshard::storage::{Address, StoreOptions};
//!
//! let store = reshard::storage::open(&Address::parse("ckpt/step-100")?, &StoreOptions::default())?;
//! let report = recover(&store, &RecoverOptions::default())?;
//! println!("{} keys of save {}", report.keys, report.save_id);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use indexmap::IndexMap;
use reshard_formats::own::{FileIndex, MAX_OWN_BYTES, OwnFileError, Sidecar, TensorFacts};
use reshard_formats::{Entry, EntryKind, Metadata};
use reshard_layout::{Region, coverage};
use reshard_storage::{Operation, StorageError, Store};
use serde::Serialize;

use crate::checkpoint::{MAX_METADATA_BYTES, StoredFile};
use crate::commit::{Assembly, Commit, Publication, encode_side};
use crate::control::Control;
use crate::edit_note::{check_files, read_note};
use crate::error::{Error, Result, StorageContext, chain};
use crate::layout_names::{DATA_PREFIX, DATA_SUFFIX, EDIT_SUFFIX, METADATA_FILE, SIDE_PREFIX, SIDE_SUFFIX, sidecar_name};

/// How to recover.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RecoverOptions {
    /// Also replace a `.metadata` that can be read.
    pub replace: bool,
    /// Accept a save although some ranks left no file at all and nothing tells whether they should have: a rank that had
    /// nothing to write leaves none.
    pub accept_absent_ranks: bool,
    /// Bring back the checkpoint as it was before an edit whose note is lost: keys that were dropped or renamed are back.
    pub undo_edits: bool,
    /// Only look.
    pub dry_run: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// A data file that was not used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnusedFile {
    /// Its name.
    pub file: String,
    /// Why.
    pub why: String,
}

/// What was recovered.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct RecoverReport {
    /// The address.
    pub path: String,
    /// The save that was brought back.
    pub save_id: String,
    /// How many ranks it was saved by.
    pub ranks: u32,
    /// Its data files.
    pub files: Vec<String>,
    /// Keys.
    pub keys: u64,
    /// Records.
    pub records: u64,
    /// Data files that were not used, and why.
    pub unused: Vec<UnusedFile>,
    /// Things worth knowing.
    pub warnings: Vec<String>,
    /// Whether `.metadata` was written.
    pub published: bool,
}

struct Indexed {
    name: String,
    size: u64,
    index: FileIndex,
}

/// Rebuilds `.metadata` of the newest complete save whose data files lie in a folder.
pub fn recover(store: &Arc<dyn Store>, options: &RecoverOptions) -> Result<RecoverReport> {
    let store = store.as_ref();
    let path = store.describe();
    // Claimed first: a save under way must not be taken for one that was lost.
    let commit = if options.dry_run { None } else { Some(Commit::begin_rebuild(store)?) };
    if !options.replace && readable(store)? {
        return Err(Error::AlreadyExists { path });
    }
    let mut saves: BTreeMap<String, Vec<Indexed>> = BTreeMap::new();
    let mut unused: Vec<UnusedFile> = Vec::new();
    for file in store.list(DATA_PREFIX).doing(|| format!("listing {path}"))? {
        options.control.check("recovering")?;
        if !file.path.ends_with(DATA_SUFFIX) {
            continue;
        }
        let reader = store.open_reader(&file.path).doing(|| format!("opening {}", file.path))?;
        match FileIndex::read(&StoredFile(reader.as_ref())) {
            Ok(Some(index)) => {
                saves.entry(index.save_id.clone()).or_default().push(Indexed { name: file.path, size: file.size, index })
            }
            Ok(None) => unused.push(UnusedFile {
                file: file.path,
                why: "it has no index at its end: PyTorch wrote it, or it was cut off".to_owned(),
            }),
            // What could not be read may be whole, and the newest.
            Err(OwnFileError::Io(error)) => {
                let source = StorageError::from_io(Operation::Read, file.path.as_str(), error);
                return Err(Error::Storage { doing: format!("reading the index of {}", file.path), source });
            }
            Err(error) => unused.push(UnusedFile { file: file.path, why: format!("its index is damaged: {}", chain(&error)) }),
        }
    }
    let sides = sidecars(store)?;
    let edits = edits(store, &saves, &sides).doing(|| format!("listing {path}"))?;
    // Ids start with the time, so the last one is the newest.
    let ids: BTreeSet<String> = saves.keys().chain(&edits).cloned().collect();
    let mut reasons: Vec<String> = Vec::new();
    for id in ids.into_iter().rev() {
        let files = saves.remove(&id).unwrap_or_default();
        let mut warnings = Vec::new();
        let edited = edits.contains(&id);
        let found = match edited {
            true => from_note(store, &id, sides.get(&id)),
            false => assemble(&id, &files, sides.get(&id), options, &mut warnings),
        };
        let why = match found {
            Ok(found) => {
                let others = saves.into_iter().flat_map(|(other, files)| {
                    let why = format!("it belongs to the older save {other}");
                    files.into_iter().map(move |f| UnusedFile { file: f.name, why: why.clone() })
                });
                unused.extend(others.filter(|other| !found.metadata.files.contains(&other.file)));
                warnings.extend(reasons);
                let published = commit.is_some();
                if let Some(commit) = commit {
                    publish(commit, store, &id, &found, options)?;
                }
                return Ok(RecoverReport {
                    path,
                    save_id: id,
                    ranks: found.ranks,
                    keys: found.metadata.entries.len() as u64,
                    records: found.metadata.entries.values().map(records).sum(),
                    files: found.metadata.files,
                    unused,
                    warnings,
                    published,
                });
            }
            Err(why) => why,
        };
        if edited && !options.undo_edits {
            let detail = format!(
                "it was edited ({id}), and what the edit did is lost ({why}); the data files know the keys as they were before: \
                 make the edit again from its source, or undo it"
            );
            return Err(Error::Incomplete { path, detail });
        }
        reasons.push(match edited {
            true => format!("the edit {id} is undone, because what it did is lost: {why}"),
            false => format!("the save {id} cannot be used: {why}"),
        });
        let why = format!("it belongs to the {} {id}", if edited { "lost edit" } else { "incomplete save" });
        unused.extend(files.into_iter().map(|f| UnusedFile { file: f.name, why: why.clone() }));
    }
    let without: Vec<String> =
        unused.iter().filter(|u| !u.why.starts_with("it belongs")).map(|u| format!("{} ({})", u.file, u.why)).collect();
    if !without.is_empty() {
        reasons.push(format!("these files cannot be used: {}", without.join(", ")));
    }
    if reasons.is_empty() {
        return Err(Error::NotFound { path, detail: "there are no data files".into() });
    }
    Err(Error::Incomplete { path, detail: reasons.join("; ") })
}

/// Whether there is a `.metadata` that can be decoded. One that could not be read may be whole.
fn readable(store: &dyn Store) -> Result<bool> {
    match store.read(METADATA_FILE, MAX_METADATA_BYTES) {
        Ok(bytes) => Ok(Metadata::decode(&bytes).is_ok()),
        Err(StorageError::NotFound { .. } | StorageError::TooLarge { .. }) => Ok(false),
        Err(error) => Err(error).doing(|| format!("reading {METADATA_FILE}")),
    }
}

/// The sidecars by their ids, without those that are damaged. One that could not be read is an error: it may name files that are
/// missing.
fn sidecars(store: &dyn Store) -> Result<BTreeMap<String, Sidecar>> {
    let mut found = BTreeMap::new();
    for file in store.list(SIDE_PREFIX).doing(|| format!("listing {}", store.describe()))? {
        let name = file.path.strip_prefix(SIDE_PREFIX).and_then(|name| name.strip_suffix(SIDE_SUFFIX));
        let Some(id) = name else { continue };
        let bytes = match store.read(&file.path, MAX_OWN_BYTES) {
            Err(StorageError::TooLarge { .. }) => continue,
            read => read.doing(|| format!("reading {}", file.path))?,
        };
        if let Some(side) = Sidecar::decode(&bytes).ok().filter(|side| side.save_id == id) {
            found.insert(id.to_owned(), side);
        }
    }
    Ok(found)
}

/// What is to be published.
struct Found {
    metadata: Metadata,
    ranks: u32,
    /// The checksums, where there is no sidecar with them yet.
    side: Option<Sidecar>,
}

fn records(entry: &Entry) -> u64 {
    match &entry.kind {
        EntryKind::Tensor(tensor) => tensor.chunks.len() as u64,
        EntryKind::Bytes(_) => 1,
    }
}

/// The ids of edits that were made here: by their notes, by files with values that they added, and by sidecars that speak of
/// data files of other saves.
fn edits(
    store: &dyn Store,
    saves: &BTreeMap<String, Vec<Indexed>>,
    sides: &BTreeMap<String, Sidecar>,
) -> reshard_storage::Result<BTreeSet<String>> {
    let added = saves.iter().filter(|(_, files)| files.iter().any(|f| f.index.ranks == 0)).map(|(id, _)| id.clone());
    let mut found: BTreeSet<String> = added.collect();
    for file in store.list(SIDE_PREFIX)? {
        let name = file.path.strip_prefix(SIDE_PREFIX);
        if let Some(id) = name.and_then(|name| name.strip_suffix(EDIT_SUFFIX)) {
            found.insert(id.to_owned());
        }
    }
    for (id, side) in sides {
        let other = saves.iter().filter(|(save, _)| *save != id).flat_map(|(_, files)| files);
        let names: BTreeSet<&str> = other.map(|f| f.name.as_str()).collect();
        if side.files.iter().any(|f| names.contains(f.file.as_str())) {
            found.insert(id.clone());
        }
    }
    Ok(found)
}

/// What an edit made, by its note.
fn from_note(store: &dyn Store, id: &str, side: Option<&Sidecar>) -> std::result::Result<Found, String> {
    let note = read_note(store, id)?;
    check_files(&note, store)?;
    let metadata = Metadata::decode(&note.metadata).map_err(|e| chain(&e))?;
    let ranks = side.map_or(0, |side| side.ranks);
    Ok(Found { metadata, ranks, side: None })
}

/// The metadata of a save, or why it is not complete.
fn assemble(
    id: &str,
    files: &[Indexed],
    known: Option<&Sidecar>,
    options: &RecoverOptions,
    warnings: &mut Vec<String>,
) -> std::result::Result<Found, String> {
    complete(files, known, options, warnings)?;
    let mut order: Vec<&Indexed> = files.iter().collect();
    order.sort_by(|a, b| (a.index.rank, &a.name).cmp(&(b.index.rank, &b.name)));
    let ranks = files.first().map_or(0, |f| f.index.ranks);
    let mut assembly = Assembly::new(id, ranks);
    let mut keys: IndexMap<&str, (usize, Option<&TensorFacts>)> = IndexMap::new();
    for file in &order {
        let number = assembly.add_file(file.name.clone(), file.size).map_err(|e| e.to_string())?;
        for record in &file.index.records {
            let entry = &file.index.table[record.key as usize];
            let (key, tensor) = match keys.get(entry.key.as_str()) {
                Some(known) => *known,
                None => {
                    let number = assembly.add_key(entry.key.clone(), entry.key_path(), entry.tensor.clone());
                    let known = (number, entry.tensor.as_ref());
                    *keys.entry(&entry.key).or_insert(known)
                }
            };
            if tensor != entry.tensor.as_ref() {
                return Err(format!("its files disagree on {:?}", entry.key));
            }
            assembly
                .add_record(key, record.region.clone(), number, record.sum)
                .map_err(|_| format!("{} says two things about {:?}", file.name, entry.key))?;
        }
    }
    let (metadata, side) = assembly.finish().map_err(|e| e.to_string())?;
    for (key, entry) in &metadata.entries {
        let EntryKind::Tensor(tensor) = &entry.kind else { continue };
        let regions: Vec<Region> = tensor.chunks.iter().map(|c| c.region.clone()).collect();
        let found = coverage(&tensor.shape, &regions).map_err(|e| format!("{key:?}: {e}"))?;
        if let Some(gap) = found.gaps.first() {
            return Err(format!("no file holds {gap} of {key:?}"));
        }
        if !found.is_exact() {
            return Err(format!("the chunks of {key:?} do not tile it"));
        }
    }
    Ok(Found { metadata, ranks, side: known.is_none().then_some(side) })
}

/// Whether every file of a save is there and whole, as far as can be told.
fn complete(
    files: &[Indexed],
    side: Option<&Sidecar>,
    options: &RecoverOptions,
    warnings: &mut Vec<String>,
) -> std::result::Result<(), String> {
    for file in files {
        let end = file.index.records.last().map_or(0, |r| r.sum.offset + r.sum.length);
        let index = file.index.encode().map_or(0, |bytes| bytes.len() as u64);
        if end + index != file.size {
            return Err(format!("{} has {} bytes, {} were written", file.name, file.size, end + index));
        }
    }
    // The sidecar is published when all data is written: it names every file.
    if let Some(side) = side {
        let there: BTreeSet<&str> = files.iter().map(|f| f.name.as_str()).collect();
        let missing: Vec<&str> = side.files.iter().map(|f| f.file.as_str()).filter(|name| !there.contains(name)).collect();
        return if missing.is_empty() { Ok(()) } else { Err(format!("{} is missing", missing.join(", "))) };
    }
    let mut by_rank: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    let mut ranks = 0;
    for file in files {
        let counts = by_rank.entry(file.index.rank).or_insert((0, file.index.files));
        counts.0 += 1;
        ranks = ranks.max(file.index.ranks);
    }
    for (rank, (found, wanted)) in &by_rank {
        if found != wanted {
            return Err(format!("rank {rank} wrote {wanted} files, {found} are there"));
        }
    }
    let absent: Vec<String> = (0..ranks).filter(|rank| !by_rank.contains_key(rank)).map(|r| r.to_string()).collect();
    if absent.is_empty() {
        return Ok(());
    }
    let what = format!("rank {} left no file: it had nothing to write, or its file is lost", absent.join(", "));
    if options.accept_absent_ranks {
        warnings.push(what);
        return Ok(());
    }
    Err(format!("{what}; accept absent ranks if you know that they wrote nothing"))
}

fn publish(commit: Commit, store: &dyn Store, id: &str, found: &Found, options: &RecoverOptions) -> Result<()> {
    let sidecar = match &found.side {
        Some(side) => Some((sidecar_name(id), encode_side(side)?)),
        None => None,
    };
    let publication = Publication {
        metadata: &found.metadata.encode()?,
        files: found.metadata.files.iter().map(|name| (name.as_str(), None)).collect(),
        beside: Vec::new(),
        sidecar,
        check_files: true,
        control: &options.control,
    };
    commit.publish(store, publication).map(drop).map_err(|failed| failed.error)
}
