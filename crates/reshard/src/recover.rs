//! Rebuilding `.metadata` from data files alone.
//!
//! Every data file of ours ends with an index of what it holds. The newest save of which every file is there, and whose
//! chunks tile every tensor, is published; files that PyTorch wrote have no index and cannot be used for this. The files of an
//! edited checkpoint speak of the keys before the edit; what the edit made of them stands in its note.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use indexmap::IndexMap;
use reshard_formats::{
    Chunk, Entry, EntryKind, FileId, KeyPath, Metadata, StorageInfo, StorageMeta, TensorEntry, TensorProperties,
};
use reshard_layout::{Dims, Region, coverage};
use reshard_storage::{Publish, Store};
use serde::Serialize;

use crate::checkpoint::{MAX_METADATA_BYTES, StoredFile};
use crate::checksums::{FileIndex, MAX_SIDE_BYTES, Sidecar, SidecarFile, sidecar_name};
use crate::control::Control;
use crate::edit::EditNote;
use crate::error::{Error, Result, StorageContext, chain};
use crate::layout_names::{DATA_PREFIX, DATA_SUFFIX, EDIT_SUFFIX, METADATA_FILE, SIDE_PREFIX, SIDE_SUFFIX};
use crate::plan::local::{WireTensor, dtype_of};

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
    if !options.replace && readable(store) {
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
            Err(error) => unused.push(UnusedFile { file: file.path, why: format!("its index is damaged: {}", chain(&error)) }),
        }
    }
    let edits = edits(store, &saves).doing(|| format!("listing {path}"))?;
    // Ids start with the time, so the last one is the newest.
    let ids: BTreeSet<String> = saves.keys().chain(&edits).cloned().collect();
    let mut reasons: Vec<String> = Vec::new();
    for id in ids.into_iter().rev() {
        let files = saves.remove(&id).unwrap_or_default();
        let mut warnings = Vec::new();
        let edited = edits.contains(&id);
        let found = match edited {
            true => from_note(store, &id),
            false => assemble(store, &id, &files, options, &mut warnings),
        };
        let why = match found {
            Ok(found) => {
                let others = saves.into_iter().flat_map(|(other, files)| {
                    let why = format!("it belongs to the older save {other}");
                    files.into_iter().map(move |f| UnusedFile { file: f.name, why: why.clone() })
                });
                unused.extend(others.filter(|other| !found.metadata.files.contains(&other.file)));
                warnings.extend(reasons);
                if !options.dry_run {
                    publish(store, &id, &found)?;
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
                    published: !options.dry_run,
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

fn readable(store: &dyn Store) -> bool {
    store.read(METADATA_FILE, MAX_METADATA_BYTES).is_ok_and(|bytes| Metadata::decode(&bytes).is_ok())
}

fn sidecar(store: &dyn Store, id: &str) -> Option<Sidecar> {
    let bytes = store.read(&sidecar_name(id), MAX_SIDE_BYTES).ok()?;
    Sidecar::decode(&bytes).ok().filter(|side| side.save_id == id)
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
fn edits(store: &dyn Store, saves: &BTreeMap<String, Vec<Indexed>>) -> reshard_storage::Result<BTreeSet<String>> {
    let added = saves.iter().filter(|(_, files)| files.iter().any(|f| f.index.ranks == 0)).map(|(id, _)| id.clone());
    let mut found: BTreeSet<String> = added.collect();
    for file in store.list(SIDE_PREFIX)? {
        let name = file.path.strip_prefix(SIDE_PREFIX);
        if let Some(id) = name.and_then(|name| name.strip_suffix(EDIT_SUFFIX)) {
            found.insert(id.to_owned());
        } else if let Some(id) = name.and_then(|name| name.strip_suffix(SIDE_SUFFIX))
            && let Some(side) = sidecar(store, id)
        {
            let other = saves.iter().filter(|(save, _)| *save != id).flat_map(|(_, files)| files);
            let names: BTreeSet<&str> = other.map(|f| f.name.as_str()).collect();
            if side.files.iter().any(|f| names.contains(f.file.as_str())) {
                found.insert(id.to_owned());
            }
        }
    }
    Ok(found)
}

/// What an edit made, by its note.
fn from_note(store: &dyn Store, id: &str) -> std::result::Result<Found, String> {
    let note = EditNote::read(store, id)?;
    note.check_files(store)?;
    let metadata = Metadata::decode(&note.metadata).map_err(|e| chain(&e))?;
    let ranks = sidecar(store, id).map_or(0, |side| side.ranks);
    Ok(Found { metadata, ranks, side: None })
}

/// The metadata of a save, or why it is not complete.
fn assemble(
    store: &dyn Store,
    id: &str,
    files: &[Indexed],
    options: &RecoverOptions,
    warnings: &mut Vec<String>,
) -> std::result::Result<Found, String> {
    complete(store, id, files, options, warnings)?;
    let mut order: Vec<&Indexed> = files.iter().collect();
    order.sort_by(|a, b| (a.index.rank, &a.name).cmp(&(b.index.rank, &b.name)));
    let mut metadata = Metadata::new();
    metadata.storage_meta = Some(StorageMeta { save_id: Some(id.to_owned()), ..StorageMeta::default() });
    let mut tensors: IndexMap<&str, (&WireTensor, KeyPath, Vec<Chunk>)> = IndexMap::new();
    let mut values: IndexMap<&str, (KeyPath, StorageInfo)> = IndexMap::new();
    let mut side = Vec::with_capacity(order.len());
    for file in &order {
        let number = FileId(u32::try_from(metadata.files.len()).map_err(|_| "too many files".to_owned())?);
        metadata.files.push(file.name.clone());
        for record in &file.index.records {
            let entry = &file.index.table[record.key as usize];
            let storage = StorageInfo::new(number, record.sum.offset, record.sum.length);
            match (&entry.tensor, &record.region) {
                (Some(tensor), Some(numbers)) => {
                    let (offsets, sizes) = numbers.split_at(numbers.len() / 2);
                    let region = Region::new(offsets, sizes).map_err(|e| e.to_string())?;
                    let known = tensors.entry(&entry.key).or_insert_with(|| (tensor, entry.key_path(), Vec::new()));
                    if known.0 != tensor {
                        return Err(format!("its files disagree on {:?}", entry.key));
                    }
                    known.2.push(Chunk { region, storage });
                }
                (None, None) => {
                    values.entry(&entry.key).or_insert_with(|| (entry.key_path(), storage));
                }
                _ => return Err(format!("{} says two things about {:?}", file.name, entry.key)),
            }
        }
        let records = file.index.records.iter().map(|r| r.sum).collect();
        side.push(SidecarFile { file: file.name.clone(), length: file.size, records });
    }
    for (key, (tensor, path, mut chunks)) in tensors {
        chunks.sort_by(|a, b| a.region.cmp(&b.region));
        let regions: Vec<Region> = chunks.iter().map(|c| c.region.clone()).collect();
        let found = coverage(&tensor.shape, &regions).map_err(|e| format!("{key:?}: {e}"))?;
        if let Some(gap) = found.gaps.first() {
            return Err(format!("no file holds {gap} of {key:?}"));
        }
        if !found.is_exact() {
            return Err(format!("the chunks of {key:?} do not tile it"));
        }
        let mut properties = TensorProperties::new(dtype_of(tensor.dtype).map_err(|e| e.to_string())?);
        properties.requires_grad = tensor.requires_grad;
        let kind = EntryKind::Tensor(TensorEntry { properties, shape: Dims::from_slice(&tensor.shape), chunks, extra: None });
        metadata.entries.insert(key.to_owned(), Entry { path: Some(path), kind });
    }
    for (key, (path, storage)) in values {
        metadata.entries.insert(key.to_owned(), Entry { path: Some(path), kind: EntryKind::Bytes(storage) });
    }
    side.sort_by(|a, b| a.file.cmp(&b.file));
    let ranks = files.first().map_or(0, |f| f.index.ranks);
    let side = Sidecar { save_id: id.to_owned(), ranks, files: side };
    Ok(Found { metadata, ranks, side: sidecar(store, id).is_none().then_some(side) })
}

/// Whether every file of a save is there and whole, as far as can be told.
fn complete(
    store: &dyn Store,
    id: &str,
    files: &[Indexed],
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
    if let Some(side) = sidecar(store, id) {
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

fn publish(store: &dyn Store, id: &str, found: &Found) -> Result<()> {
    let encoded = found.metadata.encode()?;
    if let Some(side) = &found.side {
        let name = sidecar_name(id);
        let sums = side.encode().map_err(|e| Error::invalid(format!("the sidecar cannot be written: {e}")))?;
        store.publish(&name, &sums, Publish::Replace).doing(|| format!("writing {name}"))?;
    }
    store.publish(METADATA_FILE, &encoded, Publish::Replace).doing(|| "publishing .metadata".into())?;
    store.sync().doing(|| "syncing the folder".into())
}
