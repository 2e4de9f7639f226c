//! What lies at a path.

use std::collections::BTreeSet;
use std::sync::Arc;

use reshard_storage::{Address, StorageError, Store, StoreOptions};

use super::{Checkpoint, dcp, safetensors, torch_file};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::METADATA_FILE;

/// How to open a checkpoint.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// How to reach the store.
    pub store: StoreOptions,
}

impl Checkpoint {
    /// Opens what lies at an address: a DCP folder, a safetensors file or folder, a `torch.save` file.
    pub fn open(path: &str) -> Result<Checkpoint> {
        Checkpoint::open_with(path, &OpenOptions::default())
    }

    /// [`Checkpoint::open`], with options.
    pub fn open_with(path: &str, options: &OpenOptions) -> Result<Checkpoint> {
        let address = Address::parse(path).doing(|| format!("opening {path}"))?;
        let name = address.file_name().unwrap_or_default().to_owned();
        if is_safetensors(&name) || is_torch(&name) {
            // Named like a file; a folder may be named like one too, so the store is asked.
            if let Some(parent) = address.parent() {
                let store = reshard_storage::open(&parent, &options.store).doing(|| format!("opening {path}"))?;
                match store.size(&name) {
                    Ok(_) => return Checkpoint::open_file(store, &name),
                    Err(StorageError::NotFound { .. }) => {}
                    Err(_) if store.local_root().is_some_and(|root| root.join(&name).is_dir()) => {}
                    Err(error) => return Err(error).doing(|| format!("opening {path}")),
                }
            }
        }
        let store = reshard_storage::open(&address, &options.store).doing(|| format!("opening {path}"))?;
        Checkpoint::open_store(store)
    }

    /// Opens the checkpoint that a store's root holds.
    pub fn open_store(store: Arc<dyn Store>) -> Result<Checkpoint> {
        if store.exists(METADATA_FILE).doing(|| format!("looking into {}", store.describe()))? {
            return dcp::open(store);
        }
        let files = store.list("").doing(|| format!("looking into {}", store.describe()))?;
        let top: Vec<&str> = files.iter().map(|f| f.path.as_str()).filter(|p| !p.contains('/')).collect();
        let candidates = candidates(files.iter().map(|f| f.path.as_str()));
        if candidates.len() > 1 {
            return Err(Error::Several { path: store.describe(), candidates });
        }
        if top.iter().any(|name| is_safetensors(name)) {
            return safetensors::open_folder(store, &top.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        }
        if let [only] = top.iter().filter(|name| is_torch(name)).collect::<Vec<_>>()[..] {
            let only = (*only).to_owned();
            return torch_file::open(store, &only);
        }
        let path = store.describe();
        if top.iter().any(|name| name.ends_with(".distcp")) {
            let detail = "there are data files but no .metadata: the save was never finished, or .metadata was lost".into();
            return Err(Error::Incomplete { path, detail });
        }
        let names: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        Err(Error::NotFound { path, detail: why_not_found(store.as_ref(), &names) })
    }

    /// Opens one file of a store.
    pub fn open_file(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
        if name.ends_with(".json") || name.ends_with(".safetensors") {
            safetensors::open_file(store, name)
        } else {
            torch_file::open(store, name)
        }
    }
}

/// What in a folder without `.metadata` could be meant: its safetensors files together, each `torch.save` file, and each
/// folder below that is a checkpoint itself. Training libraries put several beside each other. Safetensors in folders
/// below a safetensors model are its parts or other forms of it (`sharded`, `original`), and no rivals.
fn candidates<'f>(files: impl Iterator<Item = &'f str>) -> Vec<String> {
    let mut safetensors: Vec<&str> = Vec::new();
    let mut found = BTreeSet::new();
    let mut models_below = BTreeSet::new();
    for path in files {
        match path.rsplit_once('/') {
            None if is_safetensors(path) => safetensors.push(path),
            None if is_torch(path) => drop(found.insert(path.to_owned())),
            None => {}
            Some((folder, METADATA_FILE)) => drop(found.insert(format!("{folder}/"))),
            Some((folder, name)) if is_safetensors(name) => drop(models_below.insert(format!("{folder}/"))),
            Some(_) => {}
        }
    }
    if safetensors.is_empty() {
        found.append(&mut models_below);
    }
    let index = safetensors.iter().find(|name| name.ends_with(".index.json"));
    let mut all: Vec<String> = index.or(safetensors.first()).map(|name| (*name).to_owned()).into_iter().collect();
    // Folders below count only beside something of the same standing: alone they are found by name.
    let folders = found.iter().filter(|name| name.ends_with('/')).count();
    if all.is_empty() && folders == found.len() {
        return all;
    }
    all.extend(found);
    all
}

pub(crate) fn is_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
}

pub(crate) fn is_torch(name: &str) -> bool {
    [".pt", ".pth", ".bin", ".ckpt"].iter().any(|suffix| name.ends_with(suffix))
}

/// Why a folder is no checkpoint: it does not exist, it is empty, or what it holds instead.
fn why_not_found(store: &dyn Store, names: &[&str]) -> String {
    if names.is_empty() {
        let missing = store.local_root().is_some_and(|root| !root.exists());
        return if missing { "it does not exist" } else { "it is empty" }.to_owned();
    }
    // A common slip: the folder above the checkpoint.
    let below: BTreeSet<&str> = names
        .iter()
        .filter_map(|name| name.split_once('/'))
        .filter(|(_, file)| *file == METADATA_FILE || (!file.contains('/') && is_safetensors(file)))
        .map(|(folder, _)| folder)
        .collect();
    match below.into_iter().collect::<Vec<_>>()[..] {
        [] => "no .metadata, no safetensors file and no single .pt file".to_owned(),
        [only] => format!("it holds a checkpoint one level below: {only}"),
        [first, .., last] => format!("it holds checkpoints one level below: from {first} to {last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::candidates;

    #[test]
    fn what_could_be_meant_is_told_apart() {
        let several = |files: &[&str]| candidates(files.iter().copied());
        assert_eq!(several(&["model-1.safetensors", "model.safetensors.index.json"]), ["model.safetensors.index.json"]);
        // Parts of a model, or other forms of it, are no rivals; a checkpoint beside it is one.
        assert_eq!(several(&["model.safetensors", "sharded/a.safetensors", "original/a.safetensors"]), ["model.safetensors"]);
        assert_eq!(several(&["model.safetensors", "optimizer_0/.metadata"]), ["model.safetensors", "optimizer_0/"]);
        assert_eq!(several(&["scheduler.bin", "model/x.safetensors"]), ["model/", "scheduler.bin"]);
        assert_eq!(several(&["scheduler.bin", "pytorch_model_fsdp_0/.metadata"]), ["pytorch_model_fsdp_0/", "scheduler.bin"]);
        // Steps below a folder are found by their names.
        assert!(several(&["step-1/.metadata", "step-2/.metadata"]).is_empty());
    }
}
