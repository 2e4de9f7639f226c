//! Megatron core's folders: `iter_0000100` with a DCP checkpoint (`torch_dist`) and `common.pt` beside it, or with a file
//! for each model parallel rank (`torch`, the older format).
//!
//! Keys are Megatron's own. Of the optimizer's state, `fully_reshardable` has the parameters' shapes; `dp_reshardable` is
//! flat buffers, whose parameters nothing in the checkpoint names.

use reshard_formats::Value;
use reshard_state::{Dict, Key, Tree};
use reshard_storage::StorageError;

use super::folder::Folder;
use super::tensors::{self, Parts};
use super::{dcp, parts};
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::METADATA_FILE;

/// Names the newest iteration.
const LATEST: &str = "latest_checkpointed_iteration.txt";
/// Says which backend wrote a folder.
const CONFIG: &str = "metadata.json";
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// What is the same on all ranks, before 0.20.
const COMMON: &str = "common.pt";
/// A rank's file of the older format.
const RANK_FILE: &str = "/model_optim_rng.pt";

/// A root whose `latest_checkpointed_iteration.txt` names an iteration, or an iteration of the older format.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if folder.has(LATEST)? {
        let text = folder.store.read(LATEST, MAX_TEXT_BYTES).doing(|| format!("reading {LATEST}"))?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        let name = match text.parse::<u64>() {
            Ok(number) => format!("iter_{number:07}"),
            Err(_) if text == "release" => text,
            Err(_) => return Err(invalid(folder, LATEST, format!("it should name an iteration, and says {text:?}"))),
        };
        let prefix = format!("{name}/");
        if let Some(checkpoint) = beside(folder, &prefix)? {
            return Ok(Some(checkpoint));
        }
        if let Some(checkpoint) = per_rank(folder, &prefix)? {
            return Ok(Some(checkpoint));
        }
        let detail = format!("{LATEST} names {name}, which holds no checkpoint");
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    if folder.has(METADATA_FILE)? {
        return Ok(None);
    }
    per_rank(folder, "")
}

/// A DCP folder below `prefix`, with what lies beside it.
fn beside(folder: &Folder, prefix: &str) -> Result<Option<Checkpoint>> {
    if !folder.has(&format!("{prefix}{METADATA_FILE}"))? {
        return Ok(None);
    }
    let mut read = dcp::read(folder.store.as_ref(), &folder.path, prefix, METADATA_FILE)?;
    // By way of the root it is Megatron's whatever else it says.
    read.catalog.format = Format::Megatron;
    add_common(folder, prefix, &mut read)?;
    Ok(Some(Checkpoint::new(folder.store.clone(), folder.path.clone(), read.catalog, read.side)))
}

/// Adds what all ranks share to a DCP folder's catalog, if Megatron wrote it: its `metadata.json` says so.
pub(super) fn add_common(folder: &Folder, prefix: &str, read: &mut dcp::Read) -> Result<()> {
    let name = format!("{prefix}{CONFIG}");
    let config = match folder.store.read(&name, MAX_TEXT_BYTES) {
        Ok(config) => config,
        Err(StorageError::NotFound { .. }) => return Ok(()),
        Err(source) => return Err(Error::Storage { doing: format!("reading {name}"), source }),
    };
    let backend = serde_json::from_slice::<serde_json::Value>(&config).ok().and_then(|config| {
        let backend = config.get("sharded_backend")?.as_str()?.to_owned();
        Some(backend)
    });
    match backend.as_deref() {
        Some("torch_dist") => {}
        Some(other) => {
            return Err(Error::invalid(format!(
                "{} was written by Megatron's backend {other:?}, which is not supported; of its backends torch_dist is",
                folder.path
            )));
        }
        None => return Ok(()),
    }
    let catalog = &mut read.catalog;
    catalog.format = Format::Megatron;
    if read.side.is_none() {
        catalog.writer = "Megatron core".into();
    }
    let common = format!("{prefix}{COMMON}");
    if folder.has(&common)? {
        let number = catalog.files.len() as u32;
        catalog.files.push(common.clone());
        let tree = parts::read_or_opaque(folder, &common, "common", number)?;
        for (key, entry) in tensors::entries(Tree::Dict(tree), &folder.path, &common)? {
            catalog.entries.entry(key).or_insert(entry);
        }
    }
    Ok(())
}

/// `mp_rank_00[_000]/model_optim_rng.pt` of each model parallel rank. Nothing says how their tensors make up one, so each
/// rank's stay apart where there are several.
fn per_rank(folder: &Folder, prefix: &str) -> Result<Option<Checkpoint>> {
    let files = folder.files()?;
    let is_rank = |path: &&String| {
        path.strip_prefix(prefix).and_then(|path| path.strip_suffix(RANK_FILE)).is_some_and(|rank| rank.starts_with("mp_rank_"))
    };
    let names: Vec<String> = files.iter().filter(is_rank).cloned().collect();
    if names.is_empty() {
        return Ok(None);
    }
    let mut tree: Dict<Parts> = Dict::new();
    for (number, name) in names.iter().enumerate() {
        let rank = name.strip_prefix(prefix).and_then(|path| path.strip_suffix(RANK_FILE)).unwrap_or_default();
        let below = parts::read_or_opaque(folder, name, rank, number as u32)?;
        if names.len() == 1 {
            tree = below;
        } else {
            tree.insert(Key::from(rank), Tree::Dict(below));
        }
    }
    let mut steps: Vec<(Value, &str)> = Vec::new();
    for (name, rank) in names.iter().zip(tree.values()).filter(|_| names.len() > 1) {
        if let Some(step) = rank.get("iteration").and_then(Tree::to_value) {
            steps.push((step, name));
        }
    }
    if let Some(other) = steps.iter().find(|(step, _)| *step != steps[0].0) {
        let detail = format!(
            "it is of iteration {}, and {} of {}: files of two saves are mixed",
            other.0.python_repr(),
            steps[0].1,
            steps[0].0.python_repr()
        );
        return Err(invalid(folder, other.1, detail));
    }
    let entries = tensors::entries(Tree::Dict(tree), &folder.path, &names[0])?;
    let catalog = Catalog::new(Format::Megatron, names, entries, "Megatron, one file a rank");
    Ok(Some(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, None)))
}

fn invalid(folder: &Folder, file: &str, detail: String) -> Error {
    Error::format(&folder.path, file, "file of a Megatron checkpoint", parts::Disagrees(detail))
}
