//! A new checkpoint from an old one, of DCP without moving its data: keys dropped, renamed, plain values set.
//!
//! Data files of DCP are hard-linked, or copied by the server, and stay as they are; only `.metadata`, the sidecar, a small file
//! with the new values and a note are written. The indexes inside the old files still speak of the old keys: the note is what
//! `recover` goes by. What is of another format, or seen through a view, is written anew as DCP.
//!
//! ```
//! # let (path, to) = ("../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint", "memory://doc-edit");
//! use reshard::edit::{EditOptions, edit};
//! use reshard::select::Glob;
//! use reshard::storage::{Address, StoreOptions};
//!
//! let source = reshard::Checkpoint::open(path)?;
//! let to = reshard::storage::open(&Address::parse(to)?, &StoreOptions::default())?;
//! let mut options = EditOptions::default();
//! options.drop.push(Glob::new("optim.*")?);
//! println!("{} keys left out", edit(&source, &to, &options)?.dropped.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod anew;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::sync::Arc;

use indexmap::IndexMap;
use reshard_formats::own::{Checksums, EditNote, FileIndex, IndexedRecord, KeyEntry, RecordChecksums, Sidecar, SidecarFile};
use reshard_formats::{Entry, EntryKind, FileId, KeyPath, Metadata, PathSegment, StorageInfo, Value, value_record};
use reshard_storage::{Linked, Publish, Store, WriteOptions};
use serde::Serialize;

use crate::checkpoint::{Checkpoint, Format, MAX_METADATA_BYTES};
use crate::commit::{Commit, Failed, Publication, encode_side};
use crate::control::Control;
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{METADATA_FILE, data_file, note_name, sidecar_name};
use crate::select::{Glob, Rename, new_path};

/// What to change.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EditOptions {
    /// Keys to leave out.
    pub drop: Vec<Glob>,
    /// Renames of what stays, one after the other.
    pub renames: Vec<Rename>,
    /// Plain values to add or to replace, by their new keys, with their place in the tree; `None` when the key alone is it.
    pub set: Vec<(String, Option<KeyPath>, Value)>,
    /// Leave out objects that only unpickling could bring back, where a DCP checkpoint cannot carry them; else they are an error.
    pub skip_opaque: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// What was changed.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct EditReport {
    /// The source.
    pub from: String,
    /// The new checkpoint.
    pub to: String,
    /// Keys that were left out.
    pub dropped: Vec<String>,
    /// Old and new names.
    pub renamed: Vec<(String, String)>,
    /// Keys of values that were added or replaced.
    pub set: Vec<String>,
    /// Data files that share their bytes with the source.
    pub linked: u64,
    /// Data files that were copied, by the server or through here.
    pub copied: u64,
    /// Bytes of tensors that were written anew: of a source that is not DCP, all.
    pub bytes: u64,
    /// Objects that were left out because only unpickling could bring them back.
    pub skipped: Vec<String>,
}

/// Makes an edited copy of a checkpoint, as DCP, at a path that holds nothing.
pub fn edit(source: &Checkpoint, destination: &Arc<dyn Store>, options: &EditOptions) -> Result<EditReport> {
    let span = tracing::info_span!("edit", from = source.path(), to = destination.describe());
    let _entered = span.enter();
    let mut seen = BTreeSet::new();
    if let Some((key, ..)) = options.set.iter().find(|(key, ..)| !seen.insert(key)) {
        return Err(Error::invalid(format!("{key:?} is set twice")));
    }
    let store = destination.as_ref();
    let is_free = || match store.list("").doing(|| format!("looking into {}", store.describe()))?.is_empty() {
        true => Ok(()),
        false => Err(Error::AlreadyExists { path: store.describe() }),
    };
    let mut report = EditReport {
        from: source.path().to_owned(),
        to: store.describe(),
        dropped: Vec::new(),
        renamed: Vec::new(),
        set: Vec::new(),
        linked: 0,
        copied: 0,
        bytes: 0,
        skipped: Vec::new(),
    };
    // Only what is stored can be shared: not what is seen through a view.
    if source.catalog().format != Format::Dcp || source.base().is_some() {
        is_free()?;
        return anew::edit_anew(source, destination, options, report);
    }
    let commit = Commit::begin(store, false)?;
    is_free()?;
    let bytes = source.store().read(METADATA_FILE, MAX_METADATA_BYTES).doing(|| format!("reading {METADATA_FILE}"))?;
    let old = Metadata::decode(&bytes).map_err(|e| Error::format(source.path(), METADATA_FILE, "DCP metadata", e))?;
    let save_id = commit.save_id.clone();
    let mut metadata = edited(old, options, &mut report)?;
    let values = new_values(options, &mut metadata, &save_id)?;
    let mut written: Vec<String> = Vec::new();
    let done = write(source, store, &mut metadata, values, &save_id, options, &mut report, &mut written)
        .map_err(Failed::from)
        .and_then(|side| publish(commit, store, &metadata, side, &save_id, options));
    match done {
        Ok(()) => Ok(report),
        Err(failed) => Err(failed.discarding(written.iter().map(String::as_str), store)),
    }
}

/// The metadata with keys dropped and renamed, and only the files that are still needed.
fn edited(old: Metadata, options: &EditOptions, report: &mut EditReport) -> Result<Metadata> {
    let mut entries: IndexMap<String, Entry> = IndexMap::with_capacity(old.entries.len());
    for (key, mut entry) in old.entries {
        if options.drop.iter().any(|glob| glob.matches(&key)) {
            report.dropped.push(key);
            continue;
        }
        let name = options.renames.iter().fold(key.clone(), |name, rename| rename.apply(&name));
        if name != key {
            entry.path = Some(new_path(&key, entry.path.as_ref(), &name, None));
            report.renamed.push((key, name.clone()));
        }
        if options.set.iter().any(|(set, ..)| *set == name) {
            continue;
        }
        if entries.insert(name.clone(), entry).is_some() {
            return Err(Error::invalid(format!("two keys would be named {name:?}")));
        }
    }
    let mut files: Vec<String> = Vec::new();
    let mut numbers: BTreeMap<FileId, FileId> = BTreeMap::new();
    let mut renumber = |storage: &mut StorageInfo| -> Result<()> {
        let name = old
            .files
            .get(storage.file.0 as usize)
            .ok_or_else(|| Error::internal("the metadata names a file that it does not list"))?;
        let next = FileId(files.len() as u32);
        let number = *numbers.entry(storage.file).or_insert(next);
        if number == next {
            files.push(name.clone());
        }
        storage.file = number;
        Ok(())
    };
    for entry in entries.values_mut() {
        match &mut entry.kind {
            EntryKind::Tensor(tensor) => tensor.chunks.iter_mut().try_for_each(|chunk| renumber(&mut chunk.storage))?,
            EntryKind::Bytes(storage) => renumber(storage)?,
        }
    }
    let unreferenced = Vec::new();
    Ok(Metadata { entries, files, unreferenced, unstored_paths: Vec::new(), ..old })
}

/// A data file with the new values.
struct ValueFile {
    name: String,
    bytes: Vec<u8>,
    records: Vec<RecordChecksums>,
}

fn new_values(options: &EditOptions, metadata: &mut Metadata, save_id: &str) -> Result<Option<ValueFile>> {
    if options.set.is_empty() {
        return Ok(None);
    }
    let file = FileId(u32::try_from(metadata.files.len()).map_err(|_| Error::exhausted("too many files"))?);
    let name = data_file(0, 0, Some(save_id));
    let mut bytes = Vec::new();
    let mut table = Vec::new();
    let mut indexed = Vec::new();
    for (key, path, value) in &options.set {
        let record =
            value_record(value, None).map_err(|e| Error::invalid(format!("the value of {key:?} cannot be saved: {e}")))?;
        let (offset, length) = (bytes.len() as u64, record.len() as u64);
        let sum = RecordChecksums::of_value(offset, length, Some(Checksums::of(&record)));
        let path = path.clone().unwrap_or_else(|| vec![PathSegment::Key(key.clone())]);
        table.push(KeyEntry::new(key.clone(), path.clone(), None));
        indexed.push(IndexedRecord { key: table.len() as u32 - 1, region: None, sum });
        let kind = EntryKind::Bytes(StorageInfo::new(file, offset, length));
        metadata.entries.insert(key.clone(), Entry { path: Some(path), kind });
        bytes.extend(record);
    }
    let records = indexed.iter().map(|r| r.sum).collect();
    let index = FileIndex { save_id: save_id.to_owned(), rank: 0, ranks: 0, files: 1, table, records: indexed };
    bytes.extend(index.encode().map_err(|e| Error::internal(format!("the index of {name} cannot be written: {e}")))?);
    metadata.files.push(name.clone());
    Ok(Some(ValueFile { name, bytes, records }))
}

#[allow(clippy::too_many_arguments)]
fn write(
    source: &Checkpoint,
    store: &dyn Store,
    metadata: &mut Metadata,
    values: Option<ValueFile>,
    save_id: &str,
    options: &EditOptions,
    report: &mut EditReport,
    written: &mut Vec<String>,
) -> Result<Option<Sidecar>> {
    let mut side = Vec::new();
    for name in &metadata.files {
        options.control.check("editing")?;
        if values.as_ref().is_some_and(|v| v.name == *name) {
            continue;
        }
        written.push(name.clone());
        let linked = source.store().link_or_copy(name, store, name).doing(|| format!("taking over {name}"))?;
        match linked {
            Linked::HardLink => report.linked += 1,
            _ => report.copied += 1,
        }
        if let Some(known) = source.side.as_ref().and_then(|side| side.files.iter().find(|f| f.file == *name)) {
            side.push(known.clone());
        }
    }
    if let Some(values) = &values {
        written.push(values.name.clone());
        let length = values.bytes.len() as u64;
        let doing = || format!("writing {}", values.name);
        let writer = store.create_writer(&values.name, &WriteOptions::with_length(length)).doing(doing)?;
        writer.write_at(0, &[IoSlice::new(&values.bytes)]).doing(doing)?;
        writer.finish(true).doing(doing)?;
        side.push(SidecarFile { file: values.name.clone(), length, records: values.records.clone() });
        report.set = options.set.iter().map(|(key, ..)| key.clone()).collect();
    }
    store.sync().doing(|| "syncing the folder".into())?;
    let mut meta = metadata.storage_meta.clone().unwrap_or_default();
    meta.save_id = Some(save_id.to_owned());
    metadata.storage_meta = Some(meta);
    side.sort_by(|a, b| a.file.cmp(&b.file));
    written.push(note_name(save_id));
    leave_note(store, metadata, save_id)?;
    // What PyTorch wrote has no sidecar, and one for the new values alone would only puzzle.
    let known = source.side.as_ref();
    Ok(known.map(|known| Sidecar { save_id: save_id.to_owned(), ranks: known.ranks, files: side }))
}

fn publish(
    commit: Commit,
    store: &dyn Store,
    metadata: &Metadata,
    side: Option<Sidecar>,
    save_id: &str,
    options: &EditOptions,
) -> Result<(), Failed> {
    let length = |name: &str| side.as_ref().and_then(|side| side.files.iter().find(|f| f.file == name)).map(|f| f.length);
    let sidecar = match &side {
        Some(side) => Some((sidecar_name(save_id), encode_side(side)?)),
        None => None,
    };
    let publication = Publication {
        metadata: &metadata.encode().map_err(Error::from)?,
        files: metadata.files.iter().map(|name| (name.as_str(), length(name))).collect(),
        beside: vec![note_name(save_id)],
        sidecar,
        check_files: true,
        control: &options.control,
    };
    commit.publish(store, publication).map(drop)
}

fn leave_note(store: &dyn Store, metadata: &Metadata, save_id: &str) -> Result<()> {
    let name = note_name(save_id);
    let mut files = Vec::with_capacity(metadata.files.len());
    for file in &metadata.files {
        let length = store.open_reader(file).doing(|| format!("looking at {file}"))?.len();
        files.push((file.clone(), length));
    }
    let note = EditNote { save_id: save_id.to_owned(), files, metadata: metadata.encode()? };
    let bytes = note.encode().map_err(|e| Error::internal(format!("the note of the edit cannot be written: {e}")))?;
    store.publish(&name, &bytes, Publish::Create).doing(|| format!("writing {name}"))
}

/// Where a value sits in the tree: where it was, or in the top-level container that its key names.
pub fn setting_path(source: &Checkpoint, key: &str) -> Option<KeyPath> {
    let entries = &source.catalog().entries;
    if let Some(entry) = entries.get(key) {
        return entry.path.clone();
    }
    let (first, rest) = key.split_once('.')?;
    let container = entries.values().filter_map(|entry| entry.path.as_deref());
    let exists = container.into_iter().any(|path| matches!(path, [PathSegment::Key(name), _, ..] if name == first));
    exists.then(|| vec![PathSegment::Key(first.to_owned()), PathSegment::Key(rest.to_owned())])
}
