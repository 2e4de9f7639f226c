//! What a checkpoint of ours stores twice must agree: `.metadata`, the index at the end of each data file, the sidecar, and
//! beside an edited checkpoint the edit's note.
//!
//! `.metadata` has no checksum of its own. Each data file says by itself what it holds (key, place in the tree, dtype, shape,
//! region), under a hash; comparing both proves that every record is loaded as what it was saved as.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use reshard_formats::own::{FileIndex, IndexedRecord};
use reshard_formats::{KeyPath, Metadata, PathSegment};
use reshard_storage::StorageError;

use super::{Finding, Gathered, Named, NamedByFile, Severity, structure};
use crate::checkpoint::{CatalogKind, Checkpoint, MAX_METADATA_BYTES, StoredFile};
use crate::edit_note::{check_files, read_note};
use crate::error::{Error, Result, StorageContext, chain};
use crate::layout_names::{DATA_PREFIX, DATA_SUFFIX, METADATA_FILE, note_name};
use crate::workers::Workers;

/// The index of each data file that has one, by number.
pub(crate) type Indexes = BTreeMap<u32, FileIndex>;

/// How a data file's index may speak of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// As `.metadata` does.
    Same,
    /// As they were before an edit; its note vouches for `.metadata`.
    Edited,
}

/// Reads the index of every file that is there. A damaged one, and one that is gone, is a finding.
pub(super) fn indexes(checkpoint: &Checkpoint, files: &[u32], gathered: &mut Gathered) -> Result<Indexes> {
    /// An index, none, or where it is damaged and how.
    type Found = std::result::Result<Option<FileIndex>, (u64, String)>;
    let read = |&file: &u32| -> Result<(u32, Found)> {
        let reader = checkpoint.reader(file)?;
        let found = FileIndex::read(&StoredFile(reader.as_ref()));
        Ok((file, found.map_err(|error| (reader.len().saturating_sub(24), chain(&error)))))
    };
    let found: Vec<_> =
        Workers::reading(checkpoint.store.as_ref()).run(|| files.par_iter().map(read).collect::<Result<_>>())??;
    let mut indexes = Indexes::new();
    let mut without = Vec::new();
    for (file, found) in found {
        match found {
            Ok(Some(index)) => drop(indexes.insert(file, index)),
            Ok(None) => without.push(file),
            Err((at, what)) => {
                let what = format!("the index at the file's end is damaged: {what}");
                gathered.error(None, checkpoint.file_name(file), Some(at), what);
            }
        }
    }
    for file in without {
        let name = checkpoint.file_name(file);
        let ours = checkpoint.side.as_ref().is_some_and(|side| side.files.iter().any(|f| f.file == name));
        if ours {
            let at = checkpoint.reader(file)?.len();
            gathered.error(None, name, Some(at), "the index at the file's end is gone: the file was cut off or changed");
        }
    }
    Ok(indexes)
}

/// Compares everything that is stored twice, for the files whose index was read.
pub(super) fn compare(
    checkpoint: &Checkpoint,
    named: &NamedByFile<'_>,
    indexes: &Indexes,
    gathered: &mut Gathered,
) -> Result<()> {
    paths(checkpoint, gathered);
    sidecar_files(checkpoint, gathered);
    let edited = note(checkpoint, gathered)?;
    one_save(checkpoint, named, indexes, edited, gathered);
    let empty = Vec::new();
    for (&file, index) in indexes {
        let name = checkpoint.file_name(file);
        let side = checkpoint.side.as_ref().and_then(|side| side.files.iter().find(|f| f.file == name));
        let agrees = side.is_some_and(|side| side.records.iter().eq(index.records.iter().map(|r| &r.sum)));
        if side.is_some() && !agrees {
            gathered.error(None, name, None, "the index at the file's end and the sidecar of checksums disagree");
        }
        let (end, size) = (index.records.last().map_or(0, |r| r.sum.offset + r.sum.length), checkpoint.reader(file)?.len());
        let length = index.encode().map_or(0, |bytes| bytes.len() as u64);
        if end + length != size {
            let what = format!("the records end at {end} and the index has {length} bytes, but the file has {size}");
            gathered.error(None, name, Some(end), what);
        }
        let same_save = checkpoint.catalog().save_id.as_deref() == Some(index.save_id.as_str());
        let keys = match (edited, same_save, agrees) {
            (true, ..) => Keys::Edited,
            (false, true, _) => Keys::Same,
            (false, false, _) => {
                let id = checkpoint.catalog().save_id.as_deref().unwrap_or("of no name");
                let edit = if agrees { "; it was edited, and the edit's note, which vouches for its keys, is gone" } else { "" };
                let what = format!("the file belongs to the save {}, and .metadata to the save {id}{edit}", index.save_id);
                gathered.error(None, name, None, what);
                continue;
            }
        };
        let named = named.get(&file).unwrap_or(&empty);
        records(name, index, named, keys, gathered);
        if keys == Keys::Same {
            unnamed(checkpoint, name, index, named, gathered);
        }
        gathered.indexes += 1;
    }
    Ok(())
}

/// All files of a save have an index, and all that an edit took over are of one save; what an edit added is of none.
fn one_save(checkpoint: &Checkpoint, named: &NamedByFile<'_>, indexes: &Indexes, edited: bool, gathered: &mut Gathered) {
    let mut saved = indexes.iter().filter(|(_, index)| index.ranks > 0);
    let Some((_, first)) = saved.next() else { return };
    for (&file, index) in saved {
        if index.save_id != first.save_id {
            let what = format!("the file belongs to the save {}, and others to the save {}", index.save_id, first.save_id);
            gathered.error(None, checkpoint.file_name(file), None, what);
        }
    }
    for &file in named.keys().filter(|file| !edited && !indexes.contains_key(file)) {
        if checkpoint.reader(file).is_ok() {
            let what = "the file has no index at its end, and others of its save have one: it was cut off or changed";
            gathered.error(None, checkpoint.file_name(file), None, what);
        }
    }
}

/// A key is its path in the nested state dict, written with dots, and all keys have one or none has: torch's planner and ours make
/// it so.
fn paths(checkpoint: &Checkpoint, gathered: &mut Gathered) {
    let entries = &checkpoint.catalog().entries;
    let nested = entries.values().any(|entry| entry.path.is_some());
    for (key, entry) in entries {
        match &entry.path {
            Some(path) if !is_written_as(path, key) => {
                let what = format!("its path in the nested state dict is {:?}, which is another key", dotted(path));
                gathered.error(Some(key), METADATA_FILE, None, what);
            }
            None if nested => {
                let what = "it has no path in the nested state dict, and other keys have one: .metadata was changed";
                gathered.error(Some(key), METADATA_FILE, None, what);
            }
            _ => {}
        }
    }
}

fn is_written_as(path: &KeyPath, key: &str) -> bool {
    // The common case without a copy: a path of one segment, or a key that is put together.
    match path.as_slice() {
        [PathSegment::Key(only)] => only == key,
        _ => dotted(path) == key,
    }
}

fn dotted(path: &KeyPath) -> String {
    let words: Vec<String> = path
        .iter()
        .map(|segment| match segment {
            PathSegment::Key(key) => key.clone(),
            PathSegment::Index(index) => index.to_string(),
        })
        .collect();
    words.join(".")
}

/// The sidecar and `.metadata` name the same files.
fn sidecar_files(checkpoint: &Checkpoint, gathered: &mut Gathered) {
    let Some(side) = &checkpoint.side else { return };
    // What lies beside a checkpoint and is part of it, such as Lightning's `meta.pt`, has no records.
    let is_records = |(number, _): &(usize, &String)| super::file_kind(checkpoint, *number as u32) == super::FileKind::Records;
    let files = checkpoint.catalog().files.iter().enumerate().filter(is_records);
    let files: BTreeSet<&str> = files.map(|(_, file)| file.as_str()).collect();
    for file in &side.files {
        if !file.records.is_empty() && !files.contains(file.file.as_str()) {
            gathered.error(None, &file.file, None, "the sidecar of checksums names this file, .metadata does not");
        }
    }
    let summed: BTreeSet<&str> = side.files.iter().map(|f| f.file.as_str()).collect();
    for file in files {
        if !summed.contains(file) {
            gathered.error(None, file, None, ".metadata names this file, the sidecar of checksums does not");
        }
    }
}

/// Whether an edit made this checkpoint, and its note vouches for `.metadata`.
fn note(checkpoint: &Checkpoint, gathered: &mut Gathered) -> Result<bool> {
    let Some(id) = checkpoint.catalog().save_id.as_deref().filter(|id| crate::source::is_plain_id(id)) else {
        return Ok(false);
    };
    let name = note_name(id);
    let store = checkpoint.store();
    match store.size(&name) {
        Ok(_) => {}
        Err(StorageError::NotFound { .. }) => return Ok(false),
        Err(source) => return Err(Error::Storage { doing: format!("looking at {name}"), source }),
    }
    let note = match read_note(store.as_ref(), id) {
        Ok(note) => note,
        Err(what) => {
            gathered.error(None, &name, None, format!("the note of the edit is damaged: {what}"));
            return Ok(false);
        }
    };
    if let Err(what) = check_files(&note, store.as_ref()) {
        gathered.error(None, &name, None, format!("the note of the edit and the files disagree: {what}"));
    }
    let bytes = store.read(METADATA_FILE, MAX_METADATA_BYTES).doing(|| format!("reading {METADATA_FILE}"))?;
    let same = bytes == note.metadata
        || matches!((Metadata::decode(&bytes), Metadata::decode(&note.metadata)), (Ok(a), Ok(b)) if a == b);
    if !same {
        gathered.error(None, METADATA_FILE, None, "it is not what the note of the edit says that was published");
    }
    Ok(true)
}

/// What writes an index puts all that it compresses in a file through the same transforms, so that one name among others is damage.
fn transforms(name: &str, named: &[Named<'_>], gathered: &mut Gathered) {
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    for transform in named.iter().filter_map(|record| record.transform) {
        *uses.entry(transform).or_default() += 1;
    }
    let usual = uses.iter().max_by_key(|(_, count)| **count).map(|(usual, _)| *usual);
    for record in named.iter().filter(|record| record.transform.is_some() && record.transform != usual) {
        let (other, usual) = (record.transform.unwrap_or_default(), usual.unwrap_or_default());
        let what = format!(".metadata says that it went through {other:?}, and of the rest of the file {usual:?}");
        gathered.error(Some(record.key), name, Some(record.offset), what);
    }
}

/// Everything that the metadata names must be what the file says it holds.
fn records(name: &str, index: &FileIndex, named: &[Named<'_>], keys: Keys, gathered: &mut Gathered) {
    transforms(name, named, gathered);
    for wanted in named {
        let found = index.records.binary_search_by_key(&wanted.offset, |r| r.sum.offset).ok().map(|i| &index.records[i]);
        let Some(found) = found.filter(|found| found.sum.length == wanted.length) else {
            let what = format!("the file has no record of {} bytes there", wanted.length);
            gathered.error(Some(wanted.key), name, Some(wanted.offset), what);
            continue;
        };
        if let Some(what) = difference(index, found, wanted, keys) {
            gathered.error(Some(wanted.key), name, Some(wanted.offset), format!("the file's own index says {what}"));
        }
    }
}

/// What the index says of a record that `.metadata` says otherwise.
fn difference(index: &FileIndex, found: &IndexedRecord, wanted: &Named<'_>, keys: Keys) -> Option<String> {
    let entry = index.table.get(found.key as usize)?;
    if keys == Keys::Same && entry.key != wanted.key {
        return Some(format!("that {:?} is stored there", entry.key));
    }
    // Where the index has no path, it is the key alone, or what planned the save did not tell; the key was compared.
    if keys == Keys::Same && entry.path.is_some() && wanted.entry.path.as_ref() != Some(&entry.key_path()) {
        return Some(format!("that its path in the nested state dict is {:?}", entry.key_path()));
    }
    match (&entry.tensor, &found.region, wanted.chunk) {
        // The index says nothing of a value's transforms: those that are known are undone, of others it is said that they are not.
        (None, None, None) => None,
        (Some(tensor), Some(region), Some((stored, wanted_region))) => {
            match (found.sum.is_packed_tensor(), wanted.transform) {
                (true, None) => return Some("that it went through a stream transform".to_owned()),
                (false, Some(name)) => return Some(format!("that it did not go through {name:?}")),
                (true, Some(_)) | (false, None) => {}
            }
            let same = tensor.dtype == stored.dtype
                && tensor.requires_grad == stored.requires_grad
                && tensor.shape == stored.shape
                && region == wanted_region;
            (!same).then(|| {
                let (offsets, sizes, dtype) = (region.offsets(), region.sizes(), tensor.dtype);
                let grad = if tensor.requires_grad { ", requires_grad" } else { "" };
                format!("that it is the part at {offsets:?} of sizes {sizes:?} of a {dtype} of shape {:?}{grad}", tensor.shape)
            })
        }
        (Some(_), ..) => Some("that a tensor is stored there".to_owned()),
        _ => Some("that a value is stored there".to_owned()),
    }
}

/// Everything that the file holds must be named by the metadata: a key or a chunk may have been dropped from it.
fn unnamed(checkpoint: &Checkpoint, name: &str, index: &FileIndex, named: &[Named<'_>], gathered: &mut Gathered) {
    for record in &index.records {
        if named.binary_search_by_key(&record.sum.offset, |n| n.offset).is_ok() {
            continue;
        }
        let Some(entry) = index.table.get(record.key as usize) else { continue };
        // Ranks that hold nothing of a tensor share one empty chunk; a value may have been written by several.
        let elsewhere = match (checkpoint.catalog().entries.get(&entry.key).map(|e| &e.kind), &record.region) {
            (Some(CatalogKind::Value(_)), None) => true,
            (Some(CatalogKind::Tensor(tensor)), Some(region)) => {
                region.is_empty() || tensor.chunks.iter().any(|chunk| chunk.region == *region)
            }
            _ => false,
        };
        if !elsewhere {
            let what = "the file holds a record of it that .metadata does not name";
            gathered.error(Some(&entry.key), name, Some(record.sum.offset), what);
        }
    }
}

/// Data files that belong to this save by their own index and that `.metadata` does not name.
pub(super) fn forgotten<'l>(checkpoint: &Checkpoint, listed: impl Iterator<Item = &'l String>, gathered: &mut Gathered) {
    let Some(id) = checkpoint.catalog().save_id.as_deref() else { return };
    for name in listed.filter(|name| name.starts_with(DATA_PREFIX) && name.ends_with(DATA_SUFFIX)) {
        let Ok(reader) = checkpoint.store().open_reader(name) else { continue };
        let index = FileIndex::read(&StoredFile(reader.as_ref()));
        if let Ok(Some(index)) = index
            && index.save_id == id
            && !index.records.is_empty()
        {
            gathered.error(None, name, None, "the file belongs to this save, and .metadata does not name it");
        }
    }
}

/// What opening found: a safetensors index against the files' headers.
pub(super) fn flaws(checkpoint: &Checkpoint, gathered: &mut Gathered) {
    for flaw in &checkpoint.flaws {
        let severity = if flaw.missing { Severity::Error } else { Severity::Warning };
        gathered.push(severity, Some(&flaw.key), Some(&flaw.file), None, flaw.what.clone());
    }
}

/// For loads that verify always: the same comparison for the files that hold what is wanted.
pub(crate) fn check_stored_twice(checkpoint: &Checkpoint, files: &BTreeSet<u32>) -> Result<()> {
    let checkpoint = checkpoint.base().unwrap_or(checkpoint);
    let mut gathered = Gathered::default();
    flaws(checkpoint, &mut gathered);
    if checkpoint.catalog().format.is_dcp() {
        let mut named = structure::named_records(checkpoint);
        named.retain(|file, _| files.contains(file));
        let is_records = |file: &u32| super::file_kind(checkpoint, *file) == super::FileKind::Records;
        let files: Vec<u32> = files.iter().copied().filter(is_records).collect();
        let indexes = indexes(checkpoint, &files, &mut gathered)?;
        compare(checkpoint, &named, &indexes, &mut gathered)?;
    }
    let first = gathered.findings.into_iter().find(|f| f.severity == Severity::Error);
    match first {
        None => Ok(()),
        Some(Finding { key, file, offset, what, .. }) => Err(Error::Corrupt {
            path: checkpoint.path().to_owned(),
            key,
            file: file.unwrap_or_else(|| METADATA_FILE.to_owned()),
            offset: offset.unwrap_or(0),
            detail: what,
        }),
    }
}
