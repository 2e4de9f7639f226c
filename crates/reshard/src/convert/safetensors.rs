//! Writing safetensors: one file, or several with an index, as the libraries that load models expect them.
//!
//! A folder's model is `model.safetensors` where it exists, else what the index names: so readers have it, ours and others'. One
//! step therefore replaces a model by another, whatever forms the two have: `model.safetensors` takes its name; or, after the
//! index of the new files is published beside it, `model.safetensors` is removed; or the new index takes the place of the old. What
//! belonged to the old model alone goes afterwards.

use indexmap::IndexMap;
use reshard_formats::SafetensorsError;
use reshard_formats::own::Checksums;
use reshard_formats::safetensors::{INDEX_FILE, Notes, SafetensorsHeader, SafetensorsIndex, SafetensorsSpec, model_file};
use reshard_layout::Region;
use reshard_storage::{Publish, StorageError, Store, Version, WriteLock, is_staged};

use super::output::{Framing, OutputFile, OutputOptions, Piece, Plan, write};
use super::publish::{check_free, promote, staged, sweep};
use super::{Written, keep_values};
use crate::commit::{Failed, claim, new_save_id, settled};
use crate::error::{Error, Geometry, Result, StorageContext, chain};
use crate::layout_names::MODEL_FILE;

/// No index is larger.
const MAX_INDEX_BYTES: u64 = 256 << 20;

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
    // One file among others does not concern whoever writes the others.
    let _lock = match target.file {
        Some(_) => {
            store.prepare().doing(|| format!("preparing {}", store.describe()))?;
            WriteLock::none()
        }
        None => claim(store)?,
    };
    let old = Old::look(store, target)?;
    let names = names(&shards, target, &old, store)?;
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
        let header = SafetensorsHeader::new(&specs, &metadata).map_err(|error| unwritable(&names[number], error))?;
        for (&tensor, &(offset, data)) in shard.iter().zip(&header.placements) {
            let region = Region::whole(&plan.tensors[tensor].shape).proven()?;
            pieces.push(Piece { tensor, region, file: number, offset, head: 0, data, length: data });
        }
        files.push(OutputFile { name: staged(store, &names[number]), length: header.total_len, lead: header.head });
    }
    write(plan, &files, &pieces, &Plain, store, options)?;
    let mut made: Vec<String> = files.iter().map(|f| f.name.clone()).filter(|name| !names.contains(name)).collect();
    if names.len() > 1 {
        made.extend(names.iter().filter(|name| files.iter().any(|f| f.name == **name)).cloned());
    }
    let published = options.control.check("publishing").map_err(Failed::from).and_then(|()| match names.as_slice() {
        [only] => promote(store, &files[0].name, only, target.overwrite).map_err(Failed::from),
        _ => publish_several(plan, &shards, &names, &files, &old, &mut made, store, options),
    });
    if let Err(failed) = published {
        return Err(failed.discarding(made.iter().map(String::as_str), store));
    }
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    let warnings = old.remove(store, &names);
    names.iter().for_each(|name| sweep(store, name));
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    let bytes = plan.tensors.iter().map(|t| t.bytes()).sum();
    Ok(Written { files: names, bytes, warnings })
}

/// Names the files, publishes the index, and removes a single file that would be taken for the model in its place. `made` are the
/// files that are ours to discard.
#[allow(clippy::too_many_arguments)]
fn publish_several(
    plan: &Plan<'_>,
    shards: &[Vec<usize>],
    names: &[String],
    files: &[OutputFile],
    old: &Old,
    made: &mut Vec<String>,
    store: &dyn Store,
    options: &OutputOptions,
) -> Result<(), Failed> {
    for (file, name) in files.iter().zip(names) {
        // Also when it fails: the rename may have happened. The name is new, and nobody else's while the path is ours.
        let refused = |e: &Error| matches!(e, Error::Storage { source: StorageError::AlreadyExists { .. }, .. });
        let done = promote(store, &file.name, name, false);
        if !done.as_ref().is_err_and(refused) {
            made.push(name.clone());
        }
        done?;
    }
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    let mut map = IndexMap::with_capacity(plan.tensors.len());
    for (shard, name) in shards.iter().zip(names) {
        map.extend(shard.iter().map(|&i| (plan.tensors[i].key.clone(), name.clone())));
    }
    let total = plan.tensors.iter().map(|t| t.bytes()).sum();
    let invalid = |e| Error::internal(format!("the index cannot be written: {}", chain(&e)));
    let index = SafetensorsIndex::new(map, total).map_err(invalid)?;
    let json = index.to_json().map_err(invalid)?;
    let mode = old.index.clone().map_or(Publish::Create, Publish::Update);
    settled(store, INDEX_FILE, &json, store.publish(INDEX_FILE, &json, mode))?;
    match old.model {
        true => remove_model(store),
        false => Ok(()),
    }
}

fn remove_model(store: &dyn Store) -> Result<(), Failed> {
    let Err(source) = store.delete(MODEL_FILE) else { return Ok(()) };
    if matches!(store.exists(MODEL_FILE), Ok(false)) {
        return Ok(());
    }
    let doing = format!(
        "removing {MODEL_FILE}, which is found in place of the new files as long as it is there: both models stay, and overwriting \
         again removes the old one"
    );
    Err(Failed { error: Error::Storage { doing, source }, keep: true })
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

fn names(shards: &[Vec<usize>], target: &SafetensorsTarget<'_>, old: &Old, store: &dyn Store) -> Result<Vec<String>> {
    if let Some(file) = target.file {
        check_free(store, file, target.overwrite)?;
        return Ok(vec![file.to_owned()]);
    }
    if shards.len() == 1 {
        // An index, also one whose files are gone, is the mark of a model.
        if old.index.is_some() && !target.overwrite {
            return Err(Error::AlreadyExists { path: format!("{}/{INDEX_FILE}", store.describe()) });
        }
        check_free(store, MODEL_FILE, target.overwrite)?;
        return Ok(vec![MODEL_FILE.to_owned()]);
    }
    let count = shards.len() as u64;
    let names: Vec<String> = (1..=count).map(|i| model_file(i, count)).collect();
    let mut taken = old.index.is_some();
    for name in &names {
        taken |= store.exists(name).doing(|| format!("looking for {name}"))?;
    }
    if (taken || old.model) && !target.overwrite {
        return Err(Error::AlreadyExists { path: store.describe() });
    }
    if !taken {
        return Ok(names);
    }
    // The index names files freely: fresh names keep the old model whole until the new index takes its place.
    let id = new_save_id();
    Ok((1..=count).map(|i| model_file(i, count).replacen("model-", &format!("model-{id}-"), 1)).collect())
}

/// The model that is in the folder.
#[derive(Debug, Default)]
struct Old {
    index: Option<Version>,
    /// Whether `model.safetensors` is there.
    model: bool,
    /// What the index names, and files of conversions that were stopped.
    files: Vec<String>,
}

impl Old {
    fn look(store: &dyn Store, target: &SafetensorsTarget<'_>) -> Result<Old> {
        if target.file.is_some() {
            return Ok(Old::default());
        }
        let model = store.exists(MODEL_FILE).doing(|| format!("looking for {MODEL_FILE}"))?;
        let index = store.version(INDEX_FILE).doing(|| format!("looking for {INDEX_FILE}"))?;
        let staged = store.list(".model").doing(|| format!("listing {}", store.describe()))?;
        let mut files: Vec<String> = staged.into_iter().map(|f| f.path).filter(|name| is_staged(name)).collect();
        if target.overwrite {
            let listed = store.list("model-").doing(|| format!("listing {}", store.describe()))?;
            // Numbered files are the model, or what is left of one that a conversion which was stopped has replaced.
            files.extend(listed.into_iter().map(|f| f.path).filter(|name| numbered(name)));
        }
        if target.overwrite && index.is_some() {
            let bytes = store.read(INDEX_FILE, MAX_INDEX_BYTES).doing(|| format!("reading {INDEX_FILE}"))?;
            if let Ok(index) = SafetensorsIndex::parse(&bytes) {
                files.extend(index.files().into_iter().filter(|name| name.ends_with(".safetensors")).map(str::to_owned));
            }
        }
        files.sort();
        files.dedup();
        Ok(Old { index, model, files })
    }

    /// Removes what the new model does not consist of, once it is in place. Returns warnings.
    fn remove(&self, store: &dyn Store, names: &[String]) -> Vec<String> {
        let index = (self.index.is_some() && names.len() == 1).then_some(INDEX_FILE);
        let files = self.files.iter().map(String::as_str).filter(|old| !names.iter().any(|name| name == old));
        let mut warnings = Vec::new();
        for name in index.into_iter().chain(files) {
            if let Err(error) = store.delete(name) {
                warnings.push(format!("{name} of the model that was there could not be removed: {error}"));
            }
        }
        warnings
    }
}

/// Whether a name is `model-00001-of-00002.safetensors`, with or without the id of a conversion.
fn numbered(name: &str) -> bool {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let inner = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let Some((front, count)) = inner.and_then(|inner| inner.rsplit_once("-of-")) else { return false };
    let (id, number) = front.rsplit_once('-').map_or((None, front), |(id, number)| (Some(id), number));
    digits(number) && digits(count) && id.is_none_or(|id| id.len() == 24 && id.bytes().all(|b| b.is_ascii_hexdigit()))
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
    notes.encode().map_err(|e| Error::unsupported(format!("the values cannot be kept beside the tensors: {}", chain(&e))))
}

fn unwritable(name: &str, error: SafetensorsError) -> Error {
    match error {
        SafetensorsError::UnsupportedDType { key, dtype } => {
            Error::UnsupportedDType { key, dtype: dtype.name(), format: "safetensors" }
        }
        error => Error::unsupported(format!("{name} cannot be written as safetensors: {}", chain(&error))),
    }
}

#[cfg(test)]
mod tests {
    use super::numbered;

    #[test]
    fn only_names_of_this_pattern_are_taken_for_files_of_a_model() {
        for name in ["model-00001-of-00003.safetensors", "model-0123456789abcdef01234567-00001-of-00003.safetensors"] {
            assert!(numbered(name), "{name}");
        }
        for name in
            ["model-a-00001-of-00003.safetensors", "model-1-of-3.safetensors", "model-00001-of-00003.pt", "model.safetensors"]
        {
            assert!(!numbered(name), "{name}");
        }
    }
}
