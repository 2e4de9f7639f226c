//! Formats as sources: one file for each, and one line in a table.
//!
//! A source is asked whether a folder is its own; if so it turns it into a [`Checkpoint`]: a catalog of regions of named
//! tensors with their places in files. Nothing of the data is read or copied for that. What the bytes of a file mean is
//! for the formats crate to say; here is only which files belong together, and how.

mod dcp;
mod deepspeed;
mod folder;
mod lightning;
mod megatron;
mod nanotron;
mod open;
mod parts;
mod ranks;
mod safetensors;
mod tensors;
mod torch_checkpointing;
mod torch_file;
mod values;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

pub(crate) use dcp::is_plain_id;
use folder::Folder;
pub use megatron::ParameterMap;
pub use open::OpenOptions;
use reshard_storage::Store;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::layout_names::{DATA_SUFFIX, META_FILE, METADATA_FILE, is_safetensors, is_torch};

/// "Is this yours? Open it": none where the folder is of another format.
type OpenFolder = fn(&Folder) -> Result<Option<Checkpoint>>;

/// Formats that know their folders by a file or a name of their own. The first that answers has it.
const MARKED: &[OpenFolder] = &[
    dcp::open_folder,
    megatron::open_folder,
    deepspeed::open_folder,
    deepspeed::open_universal,
    nanotron::open_folder,
    torch_checkpointing::open_folder,
    ranks::open_folder,
    parts::open_folder,
];

/// Formats of single files, which may lie in any folder; asked where the folder holds one thing only.
const PLAIN: &[OpenFolder] = &[safetensors::open_folder, torch_file::open_folder];

/// Opens what the root of a store holds.
pub(crate) fn open_folder(store: Arc<dyn Store>) -> Result<Checkpoint> {
    let folder = Folder::new(store);
    if let Some(root) = folder.store.local_root().filter(|root| root.is_file()) {
        let detail = no_folder(root).to_owned();
        return Err(Error::NotFound { path: folder.path, detail });
    }
    for open in MARKED {
        if let Some(checkpoint) = open(&folder)? {
            return Ok(checkpoint);
        }
    }
    let candidates = candidates(folder.files()?.iter().map(String::as_str));
    if candidates.len() > 1 {
        return Err(Error::Several { path: folder.path.clone(), candidates });
    }
    for open in PLAIN {
        if let Some(checkpoint) = open(&folder)? {
            return Ok(checkpoint);
        }
    }
    Err(nothing(&folder)?)
}

/// Opens what one tensor parallel rank of DeepSpeed holds.
pub(crate) fn open_model_rank(store: Arc<dyn Store>, rank: u64) -> Result<Checkpoint> {
    deepspeed::open_model_rank(&Folder::new(store), rank)
}

/// Opens one file of a store.
pub(crate) fn open_file(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
    if name.ends_with(".json") || name.ends_with(".safetensors") {
        safetensors::open_file(store, name)
    } else {
        torch_file::open(store, name)
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

/// Why a file is no checkpoint.
fn no_folder(file: &Path) -> &'static str {
    let named = |suffix: &str| file.file_name().is_some_and(|name| name.to_string_lossy().ends_with(suffix));
    if named(METADATA_FILE) || named(DATA_SUFFIX) {
        "it is one file of a checkpoint, which is the folder that it lies in"
    } else {
        "it is a file, and a checkpoint in one file ends in .safetensors, .pt, .pth, .bin or .ckpt"
    }
}

/// Why a folder is no checkpoint: it does not exist, it is empty, or what it holds instead.
fn nothing(folder: &Folder) -> Result<Error> {
    let path = folder.path.clone();
    let names = folder.files()?;
    if folder.top()?.any(|name| name.ends_with(DATA_SUFFIX)) {
        let detail = "there are data files but no .metadata: the save was never finished, or .metadata was lost".into();
        return Ok(Error::Incomplete { path, detail });
    }
    if lightning::is_unfinished(folder)? {
        let detail =
            format!("there is Lightning's {META_FILE} but no .metadata: the save was never finished, or .metadata was lost");
        return Ok(Error::Incomplete { path, detail });
    }
    if names.is_empty() {
        let missing = folder.store.local_root().is_some_and(|root| !root.exists());
        let detail = if missing { "it does not exist" } else { "it is empty" }.to_owned();
        return Ok(Error::NotFound { path, detail });
    }
    // A common slip: the folder above the checkpoint.
    let below: BTreeSet<&str> = names
        .iter()
        .filter_map(|name| name.split_once('/'))
        .filter(|(_, file)| *file == METADATA_FILE || (!file.contains('/') && is_safetensors(file)))
        .map(|(folder, _)| folder)
        .collect();
    let detail = match below.into_iter().collect::<Vec<_>>()[..] {
        [] => "no .metadata, no safetensors file and no single .pt file".to_owned(),
        [only] => format!("it holds a checkpoint one level below: {only}"),
        [first, .., last] => format!("it holds checkpoints one level below: from {first} to {last}"),
    };
    Ok(Error::NotFound { path, detail })
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
