//! Safetensors files as a catalog: every tensor of every file a chunk at a known position.

use std::collections::BTreeMap;
use std::sync::Arc;

use indexmap::IndexMap;
use reshard_formats::ElementForm;
use reshard_formats::safetensors::{INDEX_FILE, Notes, SHARDING_INFO, SafetensorsFile, SafetensorsIndex, sharded_tensors};
use reshard_layout::ByteLayout;
use reshard_storage::Store;

use super::folder::Folder;
use crate::checkpoint::{
    Catalog, CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, ChunkLocation, DataLocation, Flaw, Format, StoredChunk,
    StoredFile, ValueLocation,
};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{MODEL_FILE, is_safetensors};

const MAX_INDEX_BYTES: u64 = 256 << 20;
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// One file, or the files that an index names.
pub(super) fn open_file(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
    let path = format!("{}/{name}", store.describe());
    if !name.ends_with(INDEX_SUFFIX) {
        return open(store, path, vec![name.to_owned()]);
    }
    open_indexed(store, path, name)
}

/// All safetensors files of a folder: those that its index names, or all there are. As for the libraries that load models,
/// `model.safetensors` comes before its index and the numbered files `model-…` beside it.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    let mut names: Vec<String> = folder.top()?.map(str::to_owned).collect();
    if !names.iter().any(|name| is_safetensors(name)) {
        return Ok(None);
    }
    let single = names.iter().any(|name| name == MODEL_FILE);
    let shadowed = |name: &str| single && (name == INDEX_FILE || (name.starts_with("model-") && name.contains("-of-")));
    names.retain(|name| !shadowed(name));
    open_names(folder.store.clone(), folder.path.clone(), &names).map(Some)
}

fn open_names(store: Arc<dyn Store>, path: String, names: &[String]) -> Result<Checkpoint> {
    if let Some(index) = names.iter().find(|name| name.ends_with(INDEX_SUFFIX)) {
        return open_indexed(store, path, index);
    }
    let files: Vec<String> = names.iter().filter(|name| name.ends_with(".safetensors")).cloned().collect();
    if let Some((series, found, promised)) = incomplete_series(&files) {
        let detail =
            format!("there are {found} of the {promised} files {series}-…-of-{promised:05}, and no index that names them");
        return Err(Error::Incomplete { path, detail });
    }
    open(store, path, files)
}

/// A series `NAME-00001-of-0000N.safetensors` of which files are missing: a conversion that was never finished.
fn incomplete_series(files: &[String]) -> Option<(String, usize, usize)> {
    let mut series: BTreeMap<(&str, usize), usize> = BTreeMap::new();
    for file in files {
        let Some((before, count)) = file.strip_suffix(".safetensors").and_then(|stem| stem.rsplit_once("-of-")) else { continue };
        let (Some((name, number)), Ok(count)) = (before.rsplit_once('-'), count.parse()) else { continue };
        if number.parse::<usize>().is_ok() {
            *series.entry((name, count)).or_default() += 1;
        }
    }
    series.into_iter().find(|((_, count), found)| found < count).map(|((name, count), found)| (name.to_owned(), found, count))
}

/// The files that an index names. What the index says and the files do not is kept for verification.
fn open_indexed(store: Arc<dyn Store>, path: String, name: &str) -> Result<Checkpoint> {
    let bytes = store.read(name, MAX_INDEX_BYTES).doing(|| format!("reading {name}"))?;
    let index = SafetensorsIndex::parse(&bytes).map_err(|e| Error::format(&store.describe(), name, "safetensors index", e))?;
    let files = index.files().into_iter().map(str::to_owned).collect();
    let mut checkpoint = open(store, path, files)?;
    checkpoint.flaws = disagreements(&checkpoint.catalog, name, &index);
    Ok(checkpoint)
}

/// Where an index and the headers of its files do not say the same.
fn disagreements(catalog: &Catalog, name: &str, index: &SafetensorsIndex) -> Vec<Flaw> {
    let mut found = Vec::new();
    let mut push = |missing: bool, key: &str, what: String| {
        found.push(Flaw { missing, key: key.to_owned(), file: name.to_owned(), what });
    };
    for (key, file) in &index.weight_map {
        let there = match catalog.entries.get(key).map(|entry| &entry.kind) {
            Some(CatalogKind::Tensor(tensor)) => {
                tensor.chunks.iter().any(|chunk| catalog.files.get(chunk.file as usize) == Some(file))
            }
            _ => false,
        };
        if !there {
            push(true, key, format!("the index says that {file} holds it, and it does not"));
        }
    }
    for (key, entry) in &catalog.entries {
        if matches!(entry.kind, CatalogKind::Tensor(_)) && !index.weight_map.contains_key(key) {
            push(false, key, "a file holds it, and the index does not name it".to_owned());
        }
    }
    found
}

fn open(store: Arc<dyn Store>, path: String, files: Vec<String>) -> Result<Checkpoint> {
    let mut headers: Vec<SafetensorsFile> = Vec::with_capacity(files.len());
    for file in &files {
        let reader = match store.open_reader(file) {
            Err(reshard_storage::StorageError::NotFound { .. }) => {
                return Err(Error::Incomplete { path, detail: format!("the file {file}, which the index names, is missing") });
            }
            result => result.doing(|| format!("opening {file}"))?,
        };
        let header = SafetensorsFile::open(&StoredFile(reader.as_ref()));
        headers.push(header.map_err(|e| Error::format(&path, file, "safetensors file", e))?);
    }
    let first = files.first().map_or("?", String::as_str);
    let tensors = sharded_tensors(&headers).map_err(|e| Error::format(&path, first, "set of safetensors files", e))?;
    let mut notes: IndexMap<String, String> = IndexMap::new();
    for header in &headers {
        for (key, text) in &header.metadata {
            notes.entry(key.clone()).or_insert_with(|| text.clone());
        }
    }
    // What safetensors itself cannot hold, and an earlier conversion of ours kept beside the tensors.
    let kept = Notes::decode(&notes).map_err(|e| Error::format(&path, first, "set of reshard notes", e))?;
    let mut entries = IndexMap::with_capacity(tensors.len());
    for (key, tensor) in tensors {
        let chunks = tensor
            .chunks
            .into_iter()
            .map(|chunk| {
                let layout = ByteLayout::contiguous(chunk.region.sizes(), tensor.dtype.size())
                    .and_then(|layout| layout.try_at(chunk.data_offset))
                    .map_err(|error| Error::format(&path, first, "safetensors file", error))?;
                let data = DataLocation { layout, form: ElementForm::default(), checksum: None };
                Ok(StoredChunk { region: chunk.region, file: chunk.file as u32, location: ChunkLocation::Data(Box::new(data)) })
            })
            .collect::<Result<Vec<_>>>()?;
        let path = kept.paths.get(&key).cloned();
        entries.insert(key, CatalogEntry::tensor(path, CatalogTensor::new(tensor.dtype, tensor.shape, false, chunks)));
    }
    for (key, value) in kept.values {
        let path = kept.paths.get(&key).cloned();
        entries.entry(key).or_insert_with(|| CatalogEntry::value(path, ValueLocation::Inline(value)));
    }
    let writer = if headers.iter().any(|h| h.is_dcp) { "torch.distributed.checkpoint (safetensors)" } else { "safetensors" };
    // Where a file's tensors begin is of that file alone: a note of it would follow the tensors into files where it is wrong.
    notes.retain(|key, _| !Notes::is_ours(key) && key != SHARDING_INFO);
    let catalog = Catalog { notes, ..Catalog::new(Format::Safetensors, files, entries, writer) };
    Ok(Checkpoint::new(store, path, catalog, None))
}
