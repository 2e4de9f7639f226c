//! Folders of DeepSpeed: ZeRO-1, 2 and 3, and universal checkpoints.
//!
//! ZeRO keeps the float32 weights and the optimizer's state as flat partitions in a file for each rank, the names and
//! shapes of the parameters beside them. Each parameter is a few ranges of those partitions, and so a few regions. Keys
//! come out as those of `get_state_dict`: `model.<name>`, `optim.state.<name>.<slot>`, `optim.param_groups.<n>.<option>`.
//! Classes of DeepSpeed lie beside the data (a loss scaler, fragments' addresses); they are named, never imported.

mod names;
mod partition;
mod slices;
mod universal;
mod zero;

use std::collections::BTreeSet;
use std::ops::Range;

use reshard_formats::Value;
use reshard_state::{Dict, Key, Tree};

use self::names::{TagFiles, is_state_file, tag_files};
use super::folder::Folder;
use super::tensors::{self, Disagrees, Parts};
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::{Error, Result, StorageContext};

/// The file that names the newest tag.
const LATEST: &str = "latest";
/// A tag is a folder's name.
const MAX_TAG_BYTES: u64 = 4096;

/// A root with `latest`, or the folder of one tag.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    let files = folder.files()?;
    // A universal checkpoint has copies of the model files beside its folder `zero`.
    let universal = |tag: &str| files.iter().any(|path| path.strip_prefix(tag).is_some_and(|path| path.starts_with("zero/")));
    if universal("") {
        return Ok(None);
    }
    if files.iter().any(|path| !path.contains('/') && is_state_file(path)) {
        return open_tag(folder, "").map(Some);
    }
    let tags: BTreeSet<&str> = files
        .iter()
        .filter_map(|path| path.split_once('/'))
        .filter(|(_, name)| !name.contains('/') && is_state_file(name))
        .map(|(tag, _)| tag)
        .filter(|tag| !universal(&format!("{tag}/")))
        .collect();
    if tags.is_empty() {
        return Ok(None);
    }
    let named = latest(folder, LATEST)?;
    // A folder of universal checkpoints alone: a tag without one was left by a conversion that was stopped.
    if named.is_none() && folder.has(universal::LATEST)? {
        return Ok(None);
    }
    if named.as_ref().is_some_and(|tag| universal(&format!("{tag}/"))) {
        return Ok(None);
    }
    match named {
        Some(tag) if tags.contains(tag.as_str()) => open_tag(folder, &format!("{tag}/")).map(Some),
        Some(tag) => {
            let there = tags.into_iter().collect::<Vec<_>>().join(", ");
            let detail =
                format!("{LATEST} names the tag {tag:?}, which is not there (there are: {there}); open one by its folder");
            Err(Error::Incomplete { path: folder.path.clone(), detail })
        }
        None if tags.len() == 1 => {
            let tag = tags.into_iter().next().unwrap_or_default();
            open_tag(folder, &format!("{tag}/")).map(Some)
        }
        None => {
            let candidates = tags.into_iter().map(|tag| format!("{tag}/")).collect();
            Err(Error::Several { path: folder.path.clone(), candidates })
        }
    }
}

/// A universal checkpoint's folder, or a root whose `latest_universal` names one.
pub(super) fn open_universal(folder: &Folder) -> Result<Option<Checkpoint>> {
    universal::open_folder(folder)
}

/// The folder of a tag, as one tensor parallel rank of the training knows it: its own parts of parameters by their local
/// shapes. How they make up whole ones need not be known.
pub(super) fn open_model_rank(folder: &Folder, rank: u64) -> Result<Checkpoint> {
    let named = known_files(folder, "")?;
    let count = model_ranks(folder, &named)?;
    if rank >= count {
        let detail = format!("{} was written by {count} tensor parallel ranks; there is no rank {rank}", folder.path);
        return Err(Error::invalid(detail));
    }
    open_ranks(folder, &named, rank..rank + 1)
}

/// The tag that a text file names.
fn latest(folder: &Folder, file: &str) -> Result<Option<String>> {
    if !folder.has(file)? {
        return Ok(None);
    }
    let text = folder.store.read(file, MAX_TAG_BYTES).doing(|| format!("reading {file}"))?;
    let tag = String::from_utf8_lossy(&text).trim().to_owned();
    let plain = !tag.is_empty() && tag != "." && tag != ".." && !tag.contains(['/', '\\', '\0']);
    Ok(Some(tag).filter(|_| plain))
}

/// What the files of one tensor parallel rank say.
struct ModelRank {
    /// The model file's content; of ZeRO-3 that of data parallel rank 0.
    model: Tree<Parts>,
    /// Parameters by name: weights, and slots of the optimizer.
    parameters: zero::Parameters,
}

fn open_tag(folder: &Folder, prefix: &str) -> Result<Checkpoint> {
    let named = known_files(folder, prefix)?;
    let count = model_ranks(folder, &named)?;
    open_ranks(folder, &named, 0..count)
}

/// A tag's files, all of which are of a kind that can be read.
fn known_files(folder: &Folder, prefix: &str) -> Result<TagFiles> {
    let named = tag_files(folder.files()?.iter().map(String::as_str), prefix);
    if let Some(other) = &named.other {
        let detail = format!(
            "{other} in {} is of a pipeline stage or an expert in a file of its own, which is not supported; convert the \
             checkpoint with DeepSpeed's ds_to_universal and open the result",
            folder.path
        );
        return Err(Error::unsupported(detail));
    }
    Ok(named)
}

/// What some tensor parallel ranks hold together.
fn open_ranks(folder: &Folder, named: &TagFiles, models: Range<u64>) -> Result<Checkpoint> {
    let mut opening = zero::Opening::new(folder);
    let mut ranks = Vec::new();
    for model in models {
        ranks.push(zero::read_rank(&mut opening, named, model)?);
    }
    check_one_step(folder, named, &ranks)?;
    let tree = assemble(folder, ranks)?;
    let (files, writer) = opening.finish();
    let name = files.first().cloned().unwrap_or_default();
    let entries = tensors::entries(Tree::Dict(tree), &folder.path, &name)?;
    Ok(Checkpoint::new(folder.store.clone(), folder.path.clone(), Catalog::new(Format::DeepSpeed, files, entries, writer), None))
}

/// How many tensor parallel ranks there are; every one must have its model file.
fn model_ranks(folder: &Folder, named: &TagFiles) -> Result<u64> {
    let last = named.model.keys().chain(named.optimizer.keys()).map(|rank| rank.model).max().unwrap_or(0);
    for model in 0..=last {
        if !named.model.keys().any(|rank| rank.model == model) {
            let detail = format!(
                "the model file of tensor parallel rank {model} (mp_rank_{model:02}_model_states.pt) is missing; there are \
                 files of rank {last}"
            );
            return Err(Error::Incomplete { path: folder.path.clone(), detail });
        }
    }
    Ok(last + 1)
}

/// Tensor parallel ranks are of one step.
fn check_one_step(folder: &Folder, named: &TagFiles, ranks: &[ModelRank]) -> Result<()> {
    let file = |model: usize| {
        let found = named.model.iter().find(|(rank, _)| rank.model == model as u64);
        found.map_or("?", |(_, file)| file.as_str())
    };
    let step = |rank: &ModelRank| rank.model.get("global_steps").and_then(Tree::to_value);
    let Some(first) = ranks.first().and_then(step) else { return Ok(()) };
    for (model, other) in ranks.iter().enumerate().skip(1) {
        match step(other) {
            Some(other) if other != first => {
                let detail = format!(
                    "it is of step {}, and {} of step {}: files of two saves are mixed; open a tag whose files are of one",
                    other.python_repr(),
                    file(0),
                    first.python_repr()
                );
                return Err(disagree(folder, file(model), detail));
            }
            _ => {}
        }
    }
    Ok(())
}

/// One tree of what all tensor parallel ranks hold.
fn assemble(folder: &Folder, mut ranks: Vec<ModelRank>) -> Result<Dict<Parts>> {
    let joined = slices::join(folder, &mut ranks)?;
    let first = ranks.swap_remove(0);
    let mut model = Dict::new();
    let mut state = Dict::new();
    for (name, parameter) in joined {
        if let Some(weight) = parameter.weight {
            model.insert(Key::from(name.as_str()), Tree::Tensor(weight));
        }
        if !parameter.slots.is_empty() {
            state.insert(Key::from(name.as_str()), Tree::Dict(parameter.slots));
        }
    }
    // A weight under a second name is stored once.
    if let Some(shared) = first.model.get("shared_params").and_then(Tree::as_dict) {
        for (alias, target) in shared {
            if let (Key::Str(_), Some(weight)) = (alias, text(target).and_then(|target| model.get(&Key::from(target)).cloned())) {
                model.entry(alias.clone()).or_insert(weight);
            }
        }
    }
    let mut tree = Dict::new();
    tree.insert(Key::from("model"), Tree::Dict(model));
    let groups = first.parameters.groups;
    if !state.is_empty() || !groups.is_empty() {
        let groups = Tree::List(groups.into_iter().map(Tree::Dict).collect());
        let parts = [(Key::from("state"), Tree::Dict(state)), (Key::from("param_groups"), groups)];
        tree.insert(Key::from("optim"), Tree::Dict(parts.into_iter().collect()));
    }
    add_rest(&mut tree, first.model);
    Ok(tree)
}

/// What else the model file holds: counters, schedulers, what the user gave along. The structure of ZeRO is not repeated.
fn add_rest(tree: &mut Dict<Parts>, model: Tree<Parts>) {
    const STRUCTURE: &[&str] = &[
        "module",
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "universal_checkpoint_info",
    ];
    let Tree::Dict(fields) = model else { return };
    for (key, value) in fields {
        let Key::Str(name) = &key else { continue };
        if STRUCTURE.contains(&name.as_str()) || tensors::is_vacant(&value) {
            continue;
        }
        let key = if tree.contains_key(&key) { Key::from(format!("deepspeed.{name}").as_str()) } else { key };
        tree.insert(key, value);
    }
}

fn text(tree: &Tree<Parts>) -> Option<&str> {
    match tree {
        Tree::Value(Value::Str(text)) => Some(text),
        _ => None,
    }
}

/// An error about a file whose numbers do not fit together.
fn disagree(folder: &Folder, file: &str, detail: impl Into<String>) -> Error {
    Error::format(&folder.path, file, "file of a DeepSpeed checkpoint", Disagrees(detail.into()))
}
