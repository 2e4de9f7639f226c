//! nanotron's folders: `checkpoint_metadata.json`, each weight in a safetensors file for each tensor parallel rank
//! (`model/…/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors`) that says which slices of the whole it has, and the
//! optimizer in `torch.save` files, whose partitions over data parallel ranks are flat (ZeRO-1).

mod names;
mod optimizer;
mod slices;

use std::collections::BTreeMap;

use indexmap::IndexMap;
use rayon::prelude::*;
use reshard_state::{Dict, Key, Tree};

use self::names::{Shard, weight_file};
use super::folder::Folder;
use super::parts;
use super::tensors::{self, Disagrees, Parts};
use super::values::from_json;
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::{Error, Result, StorageContext};
use crate::workers::Workers;

const METADATA: &str = "checkpoint_metadata.json";
/// Names the newest step, in the folder above.
const LATEST: &str = "latest.txt";
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// What a sharded weight's file says of itself.
const PAIRS: &str = "local_global_slices_pairs";
const SHAPE: &str = "unsharded_shape";

/// A step's folder, or a root whose `latest.txt` names one.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if folder.has(METADATA)? {
        return open(folder, "").map(Some);
    }
    if !folder.has(LATEST)? {
        return Ok(None);
    }
    let text = folder.store.read(LATEST, MAX_TEXT_BYTES).doing(|| format!("reading {LATEST}"))?;
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !plain || !folder.files()?.iter().any(|path| path.ends_with(&format!("/{METADATA}"))) {
        return Ok(None);
    }
    if !folder.has(&format!("{text}/{METADATA}"))? {
        let detail =
            format!("{LATEST} names the step {text}, and there is no {text}/{METADATA}; open another step by its folder");
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    open(folder, &format!("{text}/")).map(Some)
}

/// A weight: the shape that the whole has, and of each model parallel rank the part that it holds.
struct Weight {
    whole: Parts,
    /// By pipeline stage, tensor parallel rank and expert: the local shape and the slices.
    local: BTreeMap<(u64, u64, u64), Local>,
}

/// What a rank holds of a weight.
struct Local {
    shape: Vec<u64>,
    pairs: Vec<slices::Pair>,
}

fn open(folder: &Folder, prefix: &str) -> Result<Checkpoint> {
    let name = format!("{prefix}{METADATA}");
    let bytes = folder.store.read(&name, MAX_TEXT_BYTES).doing(|| format!("reading {name}"))?;
    let metadata: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|error| Error::format(&folder.path, &name, "metadata of nanotron", error))?;
    let number = |key: &str| metadata.get(key).and_then(serde_json::Value::as_u64);
    if metadata.get("metas").is_none() || number("tp").is_none() || number("dp").is_none() {
        return Err(invalid(folder, &name, "it has no tp, dp and metas, as nanotron's has".into()));
    }
    let mut files: Vec<String> = Vec::new();
    let weights = weights(folder, prefix, &mut files)?;
    let mut tree: Dict<Parts> = Dict::new();
    let state = optimizer::read(folder, prefix, &weights, &mut files)?;
    let model = weights.into_iter().map(|(name, weight)| (Key::from(name.as_str()), Tree::Tensor(weight.whole)));
    tree.insert(Key::from("model"), Tree::Dict(model.collect()));
    tree.extend(state.map(|state| (Key::from("optim"), state)));
    others(folder, prefix, &mut files, &mut tree)?;
    let version = metadata.get("version").and_then(|version| version.as_str()).map(str::to_owned);
    tree.insert(Key::from("checkpoint_metadata"), Tree::from_value(from_json(metadata)));
    let entries = tensors::entries(Tree::Dict(tree), &folder.path, &name)?;
    let writer = version.map_or("nanotron".to_owned(), |version| format!("nanotron, checkpoint version {version}"));
    let catalog = Catalog::new(Format::Nanotron, files, entries, writer);
    Ok(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, None))
}

/// All weights, by name.
fn weights(folder: &Folder, prefix: &str, files: &mut Vec<String>) -> Result<IndexMap<String, Weight>> {
    let mut shards: IndexMap<String, BTreeMap<Shard, &str>> = IndexMap::new();
    for path in folder.files()? {
        let Some((name, shard)) = path.strip_prefix(prefix).and_then(weight_file) else { continue };
        shards.entry(name).or_default().insert(shard, path);
    }
    let first = files.len();
    files.extend(shards.values().flat_map(BTreeMap::values).map(|path| (*path).to_owned()));
    let (store, path, listed) = (folder.store.as_ref(), folder.path.as_str(), &files[first..]);
    let read = Workers::reading(store).run(|| {
        let read = |(i, name): (usize, &String)| tensors::read_safetensors(store, path, name, (first + i) as u32);
        listed.par_iter().enumerate().map(read).collect::<Result<Vec<_>>>()
    })??;
    let mut read = read.into_iter();
    let mut weights = IndexMap::with_capacity(shards.len());
    for (name, of_weight) in shards {
        check_complete(folder, &name, &of_weight)?;
        let mut weight: Option<Weight> = None;
        for (shard, file) in &of_weight {
            let Some((mut tensors, texts)) = read.next() else { return Err(Error::internal("a file that was not read")) };
            let Some(local) = tensors.swap_remove("data") else {
                return Err(invalid(folder, file, "it has no tensor \"data\", as each of nanotron's has".into()));
            };
            let wrong = |detail: String| invalid(folder, file, detail);
            let shape = texts.get(SHAPE).map(|text| slices::shape(text)).transpose().map_err(wrong)?;
            let pairs = texts.get(PAIRS).map(|text| slices::pairs(text)).transpose().map_err(wrong)?;
            let shape = shape.unwrap_or_else(|| local.shape.to_vec());
            let into = weight.get_or_insert_with(|| Weight { whole: Parts::new(local.dtype, &shape), local: BTreeMap::new() });
            if into.whole.shape.as_slice() != shape || into.whole.dtype != local.dtype {
                let (a, b) = (shape, into.whole.shape.as_slice());
                return Err(wrong(format!("it is of a tensor of shape {a:?}, and the others of {b:?}: two saves are mixed")));
            }
            let pairs = pairs.unwrap_or_else(|| vec![slices::Pair::all()]);
            slices::place(&mut into.whole, &local, &pairs).map_err(wrong)?;
            into.local.insert((shard.stage, shard.tensor, shard.expert), Local { shape: local.shape.to_vec(), pairs });
        }
        if let Some(weight) = weight {
            slices::check_whole(&weight.whole).map_err(|what| {
                let detail = format!("the files of {name:?} {what}; copy the missing ones from where they were written");
                Error::Incomplete { path: folder.path.clone(), detail }
            })?;
            weights.insert(name, weight);
        }
    }
    if weights.is_empty() {
        let detail = format!("there is {prefix}{METADATA}, but no weight in {prefix}model/");
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    Ok(weights)
}

/// All tensor parallel ranks, and all experts, have their files.
fn check_complete(folder: &Folder, name: &str, shards: &BTreeMap<Shard, &str>) -> Result<()> {
    let mut first: Option<(Shard, &str)> = None;
    for (shard, file) in shards {
        let (like, other) = *first.get_or_insert((*shard, *file));
        if (shard.tensors, shard.experts) != (like.tensors, like.experts) {
            let detail =
                format!("it is of {} tensor parallel ranks, and {other} of {}: two saves are mixed", shard.tensors, like.tensors);
            return Err(invalid(folder, file, detail));
        }
    }
    let Some((like, file)) = first else { return Ok(()) };
    let there = |tensor, expert| shards.keys().any(|shard| (shard.tensor, shard.expert) == (tensor, expert));
    let most = shards.len() as u64;
    for expert in 0..like.experts.min(most + 1) {
        for tensor in 0..like.tensors.min(most + 1) {
            if !there(tensor, expert) {
                let file = names::like(file, tensor, expert);
                let detail =
                    format!("the file {file} with rank {tensor}'s part of {name:?} is missing; all ranks' files are needed");
                return Err(Error::Incomplete { path: folder.path.clone(), detail });
            }
        }
    }
    Ok(())
}

/// Schedulers and random states: each rank's own.
fn others(folder: &Folder, prefix: &str, files: &mut Vec<String>, tree: &mut Dict<Parts>) -> Result<()> {
    for path in folder.files()? {
        let Some((part, name)) = path.strip_prefix(prefix).and_then(|path| path.split_once('/')) else { continue };
        let Some(rank) = name.strip_suffix(".pt").filter(|_| matches!(part, "lr_scheduler" | "random")) else { continue };
        let rank = rank.strip_prefix("lr_scheduler_").unwrap_or(rank);
        let state = parts::read_or_opaque(folder, path, rank, files.len() as u32)?;
        files.push(path.clone());
        let state = match state.get(&Key::from(rank)) {
            Some(Tree::Opaque(opaque)) if state.len() == 1 => Tree::Opaque(opaque.clone()),
            _ => Tree::Dict(state),
        };
        // One for all ranks, or each rank's own.
        if rank == part {
            tree.insert(Key::from(part), state);
        } else if let Tree::Dict(part) = tree.entry(Key::from(part)).or_insert_with(Tree::dict) {
            part.insert(Key::from(rank), state);
        }
    }
    Ok(())
}

fn invalid(folder: &Folder, file: &str, detail: String) -> Error {
    Error::format(&folder.path, file, "file of a nanotron checkpoint", Disagrees(detail))
}
