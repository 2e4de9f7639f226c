//! Writing safetensors: one file, or several with an index, as the libraries that load models expect them.

use indexmap::IndexMap;
use reshard_formats::safetensors::{INDEX_FILE, SafetensorsHeader, SafetensorsIndex, SafetensorsSpec, model_file};
use reshard_layout::Region;
use reshard_storage::{Publish, Store};

use super::output::{Framing, OutputFile, OutputOptions, Piece, Plan, discard, write};
use super::publish::{check_free, promote, staged, sweep};
use super::{Written, keep_values};
use crate::checksums::Checksums;
use crate::error::{Error, Result, StorageContext, chain};
use crate::notes::Notes;

/// The name of a model in one file.
const MODEL_FILE: &str = "model.safetensors";

/// What is to be written.
pub(super) struct SafetensorsTarget<'t> {
    /// One file of this name; else a folder's worth.
    pub(super) file: Option<&'t str>,
    pub(super) max_shard_size: Option<u64>,
    pub(super) overwrite: bool,
    /// Free-form metadata to carry over.
    pub(super) notes: &'t IndexMap<String, String>,
}

struct Plain;

impl Framing for Plain {
    fn sums(&self) -> bool {
        false
    }

    fn head(&self, _piece: usize) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn tail(&self, _piece: usize, _sums: Checksums) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn ending(&self, _file: usize, _sums: &[Checksums]) -> Result<Option<(u64, Vec<u8>)>> {
        Ok(None)
    }
}

pub(super) fn write_safetensors(
    plan: &Plan<'_>,
    target: &SafetensorsTarget<'_>,
    store: &dyn Store,
    options: &OutputOptions,
) -> Result<Written> {
    let shards = shards(plan, target);
    let names = names(&shards, target, store)?;
    store.prepare().doing(|| format!("preparing {}", store.describe()))?;
    if let [name] = names.as_slice() {
        check_free(store, name, target.overwrite)?;
    }
    let old = old_files(store, target)?;
    let mut metadata: IndexMap<String, String> = target.notes.clone();
    metadata.entry("format".to_owned()).or_insert_with(|| "pt".to_owned());
    let mut files = Vec::with_capacity(shards.len());
    let mut pieces = Vec::with_capacity(plan.tensors.len());
    for (number, shard) in shards.iter().enumerate() {
        let mut metadata = metadata.clone();
        if number == 0 {
            metadata.extend(notes(plan)?);
        }
        let specs: Vec<SafetensorsSpec<'_>> = shard
            .iter()
            .map(|&i| {
                let tensor = &plan.tensors[i];
                SafetensorsSpec { key: &tensor.key, dtype: tensor.dtype, shape: &tensor.shape, saved_offsets: None }
            })
            .collect();
        let header = SafetensorsHeader::new(&specs, &metadata)
            .map_err(|e| Error::invalid(format!("{} cannot be written as safetensors: {}", names[number], chain(&e))))?;
        for (&tensor, &(offset, data)) in shard.iter().zip(&header.placements) {
            let region = Region::whole(&plan.tensors[tensor].shape)?;
            pieces.push(Piece { tensor, region, file: number, offset, head: 0, data, length: data });
        }
        files.push(OutputFile { name: staged(store, &names[number]), length: header.total_len, lead: header.head });
    }
    write(plan, &files, &pieces, &Plain, store, options)?;
    let published = publish(plan, &shards, &names, &files, target, store, options);
    if let Err(error) = published {
        discard(files.iter().map(|f| f.name.as_str()).filter(|f| !names.iter().any(|n| n == f)), store);
        return Err(error);
    }
    let mut warnings = Vec::new();
    for name in old.iter().filter(|old| !names.contains(old)) {
        if name == INDEX_FILE && names.len() > 1 {
            continue;
        }
        if let Err(error) = store.delete(name) {
            warnings.push(format!("{name} of the model that was there could not be removed: {error}"));
        }
    }
    names.iter().for_each(|name| sweep(store, name));
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    let bytes = plan.tensors.iter().map(|t| t.bytes()).sum();
    Ok(Written { files: names, bytes, warnings })
}

fn publish(
    plan: &Plan<'_>,
    shards: &[Vec<usize>],
    names: &[String],
    files: &[OutputFile],
    target: &SafetensorsTarget<'_>,
    store: &dyn Store,
    options: &OutputOptions,
) -> Result<()> {
    options.control.check("publishing")?;
    for (file, name) in files.iter().zip(names) {
        promote(store, &file.name, name, target.overwrite)?;
    }
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    if names.len() == 1 {
        return Ok(());
    }
    // Only with the index do the files become a model.
    let mut map = IndexMap::with_capacity(plan.tensors.len());
    for (shard, name) in shards.iter().zip(names) {
        map.extend(shard.iter().map(|&i| (plan.tensors[i].key.clone(), name.clone())));
    }
    let total = plan.tensors.iter().map(|t| t.bytes()).sum();
    let invalid = |e| Error::invalid(format!("the index cannot be written: {}", chain(&e)));
    let index = SafetensorsIndex::new(map, total).map_err(invalid)?;
    let json = index.to_json().map_err(invalid)?;
    let mode = if target.overwrite { Publish::Replace } else { Publish::Create };
    store.publish(INDEX_FILE, &json, mode).doing(|| format!("publishing {INDEX_FILE}"))
}

/// Tensors in their order, a new file whenever the next would exceed the size.
fn shards(plan: &Plan<'_>, target: &SafetensorsTarget<'_>) -> Vec<Vec<usize>> {
    let most = target.max_shard_size.filter(|_| target.file.is_none()).unwrap_or(u64::MAX);
    let mut shards: Vec<Vec<usize>> = vec![Vec::new()];
    let mut size = 0u64;
    for (i, tensor) in plan.tensors.iter().enumerate() {
        let bytes = tensor.bytes();
        if size > 0 && size.saturating_add(bytes) > most {
            shards.push(Vec::new());
            size = 0;
        }
        size = size.saturating_add(bytes);
        if let Some(shard) = shards.last_mut() {
            shard.push(i);
        }
    }
    shards
}

fn names(shards: &[Vec<usize>], target: &SafetensorsTarget<'_>, store: &dyn Store) -> Result<Vec<String>> {
    if let Some(file) = target.file {
        return Ok(vec![file.to_owned()]);
    }
    let mut taken = store.exists(INDEX_FILE).doing(|| format!("looking for {INDEX_FILE}"))?;
    if shards.len() == 1 {
        // An index, also one whose files are gone, would be taken for the model in place of the file.
        return match taken && !target.overwrite {
            true => Err(Error::AlreadyExists { path: format!("{}/{INDEX_FILE}", store.describe()) }),
            false => Ok(vec![MODEL_FILE.to_owned()]),
        };
    }
    let count = shards.len() as u64;
    let names: Vec<String> = (1..=count).map(|i| model_file(i, count)).collect();
    for name in &names {
        taken |= store.exists(name).doing(|| format!("looking for {name}"))?;
    }
    if !taken {
        return Ok(names);
    }
    if !target.overwrite {
        return Err(Error::AlreadyExists { path: store.describe() });
    }
    // The index names files freely: fresh names keep the old model whole until the new index takes its place.
    let id = crate::save::prepare::new_save_id();
    Ok((1..=count).map(|i| model_file(i, count).replacen("model-", &format!("model-{id}-"), 1)).collect())
}

/// The files of the model that is there and will be replaced.
fn old_files(store: &dyn Store, target: &SafetensorsTarget<'_>) -> Result<Vec<String>> {
    if target.file.is_some() || !target.overwrite {
        return Ok(Vec::new());
    }
    let mut old = Vec::new();
    if let Ok(bytes) = store.read(INDEX_FILE, 256 << 20) {
        old.push(INDEX_FILE.to_owned());
        if let Ok(index) = SafetensorsIndex::parse(&bytes) {
            old.extend(index.files().into_iter().map(str::to_owned));
        }
    }
    if store.exists(MODEL_FILE).doing(|| format!("looking for {MODEL_FILE}"))? {
        old.push(MODEL_FILE.to_owned());
    }
    Ok(old)
}

/// Values, and places in the tree, which safetensors itself has no room for.
fn notes(plan: &Plan<'_>) -> Result<Vec<(String, String)>> {
    let mut notes = Notes { values: keep_values(plan)?, ..Notes::default() };
    let paths = plan.tensors.iter().map(|t| (&t.key, &t.path)).chain(plan.values.iter().map(|v| (&v.key, &v.path)));
    for (key, path) in paths {
        if !matches!(path.as_slice(), [reshard_formats::PathSegment::Key(only)] if only == key) {
            notes.paths.insert(key.clone(), path.clone());
        }
    }
    notes.encode().map_err(|e| Error::invalid(format!("the values cannot be kept beside the tensors: {}", chain(&e))))
}
