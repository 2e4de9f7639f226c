//! Universal checkpoints: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, and copies of the model files.

use rayon::prelude::*;
use reshard_formats::Value;
use reshard_state::{Dict, Key, Tree};

use super::names::tag_files;
use super::zero::{dims, frozen_weights};
use super::{add_rest, disagree, latest, text};
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::{Error, Result};
use crate::layout_names::UNFINISHED_FILE;
use crate::source::folder::Folder;
use crate::source::tensors::{self, Parts};
use crate::workers::Workers;

pub(super) const LATEST: &str = "latest_universal";
const ZERO: &str = "zero/";
const OPTIMIZER: &str = "zero/optimizer_state.pt";

pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    let files = folder.files()?;
    if files.iter().any(|path| parameter_file(path, "").is_some()) {
        return open(folder, "").map(Some);
    }
    let there = |tag: &str| files.iter().any(|path| parameter_file(path, &format!("{tag}/")).is_some());
    let tag = match latest(folder, LATEST)? {
        Some(tag) => Some(tag),
        None => latest(folder, super::LATEST)?.filter(|tag| there(tag)),
    };
    let Some(tag) = tag else { return Ok(None) };
    let prefix = format!("{tag}/");
    if !there(&tag) {
        let detail = format!("{LATEST} names {tag:?}, which holds no universal checkpoint");
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    open(folder, &prefix).map(Some)
}

/// Parameter and slot of a file `zero/<parameter>/<slot>.pt`.
fn parameter_file<'p>(path: &'p str, prefix: &str) -> Option<(&'p str, &'p str)> {
    let (name, file) = path.strip_prefix(prefix)?.strip_prefix(ZERO)?.rsplit_once('/')?;
    let slot = file.strip_suffix(".pt")?;
    (!name.is_empty() && !slot.is_empty()).then_some((name, slot))
}

fn open(folder: &Folder, prefix: &str) -> Result<Checkpoint> {
    let all = folder.files()?;
    if folder.has(&format!("{prefix}{UNFINISHED_FILE}"))? {
        let detail = format!(
            "{prefix}{UNFINISHED_FILE} is there: the conversion that wrote it was stopped, or has not ended; run it again"
        );
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    let parameters: Vec<&String> = all.iter().filter(|path| parameter_file(path, prefix).is_some()).collect();
    let models = tag_files(all.iter().map(String::as_str), prefix).model;
    let optimizer = format!("{prefix}{OPTIMIZER}");
    let mut files: Vec<String> = parameters.iter().map(|path| (*path).clone()).collect();
    let first_model = files.len();
    files.extend(models.values().cloned());
    let optimizer_number = all.contains(&optimizer).then(|| {
        files.push(optimizer.clone());
        files.len() - 1
    });
    let (store, path) = (folder.store.as_ref(), folder.path.as_str());
    let mut trees: Vec<Option<Tree<Parts>>> = Workers::reading(store).run(|| {
        let read = |(i, name): (usize, &String)| tensors::read_file(store, path, name, i as u32).map(Some);
        files.par_iter().enumerate().map(read).collect::<Result<_>>()
    })??;
    let mut copies: Vec<Tree<Parts>> = trees.iter_mut().skip(first_model).take(models.len()).filter_map(Option::take).collect();
    check_steps(folder, &models.values().map(String::as_str).collect::<Vec<_>>(), &copies)?;
    // Of ZeRO-3 there is one of each rank.
    let cut = models.keys().all(|rank| rank.data.is_some() && rank.model == 0);
    let frozen =
        if cut { frozen_weights(folder, &models.values().map(String::as_str).collect::<Vec<_>>(), &copies)? } else { Vec::new() };
    let model = if copies.is_empty() { Tree::dict() } else { copies.swap_remove(0) };
    let shapes = shapes(&model);
    let buffers = buffers(&model);

    let mut weights: Dict<Parts> = Dict::new();
    let mut state: Dict<Parts> = Dict::new();
    for (file, tree) in parameters.iter().zip(&mut trees) {
        let (Some((name, slot)), Some(tree)) = (parameter_file(file, prefix), tree.take()) else { continue };
        let value = value(folder, file, tree, shapes.get(&Key::from(name)).map(Vec::as_slice))?;
        if slot == "fp32" {
            weights.insert(Key::from(name), value);
            continue;
        }
        let slots = state.entry(Key::from(name)).or_insert_with(Tree::dict);
        if let Tree::Dict(slots) = slots {
            slots.insert(Key::from(slot), value);
        }
    }
    check_slots(folder, prefix, &weights, &state)?;
    // A parameter that is trained has its weight in a file; the model file's copy is of another precision.
    let named = shapes.keys().chain(state.keys()).filter_map(|key| match key {
        Key::Str(name) if !weights.contains_key(key) => Some(name.as_str()),
        _ => None,
    });
    if let Some(name) = named.min() {
        let detail = format!(
            "{prefix}{ZERO}{name}/fp32.pt, the weight of a parameter, is missing; copy it, or convert the checkpoint again"
        );
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    weights.extend(frozen.into_iter().map(|(name, weight)| (Key::from(name.as_str()), Tree::Tensor(weight))));
    // Buffers, and whatever no optimizer held, as the model has them.
    for (name, tensor) in model.get("module").and_then(Tree::as_dict).into_iter().flatten() {
        let is_buffer = buffers.as_ref().is_none_or(|buffers| buffers.contains(name));
        if let Tree::Tensor(parts) = tensor
            && (is_buffer || (!weights.contains_key(name) && parts.elements() > 0))
        {
            weights.insert(name.clone(), tensor.clone());
        }
    }
    if let Some(shared) = model.get("shared_params").and_then(Tree::as_dict) {
        for (alias, target) in shared {
            if let Some(weight) = text(target).and_then(|target| weights.get(&Key::from(target)).cloned()) {
                weights.insert(alias.clone(), weight);
            }
        }
    }
    let groups = optimizer_number.and_then(|number| trees.get_mut(number)?.take()).map(groups).unwrap_or_default();
    let mut tree = Dict::new();
    let writer = match model.get("ds_version").and_then(text) {
        Some(version) => format!("DeepSpeed {version}, universal"),
        None => "DeepSpeed, universal".into(),
    };
    tree.insert(Key::from("model"), Tree::Dict(weights));
    if !state.is_empty() {
        let parts = [(Key::from("state"), Tree::Dict(state)), (Key::from("param_groups"), Tree::List(groups))];
        tree.insert(Key::from("optim"), Tree::Dict(parts.into_iter().collect()));
    }
    add_rest(&mut tree, model);
    let entries = tensors::entries(Tree::Dict(tree), path, &optimizer)?;
    Ok(Checkpoint::new(folder.store.clone(), folder.path.clone(), Catalog::new(Format::Universal, files, entries, writer), None))
}

/// What the optimizer has for a parameter is as large as it, or one number.
fn check_slots(folder: &Folder, prefix: &str, weights: &Dict<Parts>, state: &Dict<Parts>) -> Result<()> {
    for (name, slots) in state {
        let (Key::Str(name), Some(Tree::Tensor(weight)), Some(slots)) = (name, weights.get(name), slots.as_dict()) else {
            continue;
        };
        for (slot, tensor) in slots {
            let (Key::Str(slot), Tree::Tensor(tensor)) = (slot, tensor) else { continue };
            if tensor.shape != weight.shape && tensor.elements() != 1 {
                let (own, other) = (tensor.shape.as_slice(), weight.shape.as_slice());
                let detail = format!(
                    "it has the shape {own:?}, and fp32.pt beside it {other:?}: sizes disagree, files of two saves are mixed"
                );
                return Err(disagree(folder, &format!("{prefix}{ZERO}{name}/{slot}.pt"), detail));
            }
        }
    }
    Ok(())
}

/// The copies of the model files are of one step.
fn check_steps(folder: &Folder, names: &[&str], copies: &[Tree<Parts>]) -> Result<()> {
    let step = |copy: &Tree<Parts>| copy.get("global_steps").and_then(Tree::to_value);
    let mut steps = names.iter().zip(copies).filter_map(|(name, copy)| Some((name, step(copy)?)));
    let Some((first, expected)) = steps.next() else { return Ok(()) };
    let Some((name, other)) = steps.find(|(_, step)| *step != expected) else { return Ok(()) };
    let (step, expected) = (other.python_repr(), expected.python_repr());
    let detail = format!(
        "it is of step {step}, and {first} of step {expected}: files of two saves are mixed; convert the checkpoint again"
    );
    Err(disagree(folder, name, detail))
}

/// A file's tensor, in the shape of its parameter: ZeRO-3 leaves it flat.
fn value(folder: &Folder, file: &str, tree: Tree<Parts>, shape: Option<&[u64]>) -> Result<Tree<Parts>> {
    let inner = match tree {
        Tree::Dict(mut fields) => fields.swap_remove(&Key::from("param")),
        other => Some(other),
    };
    let inner = inner.ok_or_else(|| disagree(folder, file, "it holds no \"param\""))?;
    match (&inner, shape) {
        (Tree::Tensor(tensor), Some(shape))
            if tensor.shape.len() == 1 && tensor.shape.as_slice() != shape && shape != [] as [u64; 0] =>
        {
            let wanted = shape.iter().fold(1u64, |product, size| product.saturating_mul(*size));
            // A step is one number whatever the parameter's shape.
            if tensor.elements() == 1 {
                return Ok(inner);
            }
            if wanted != tensor.elements() {
                let detail = format!(
                    "it has {} elements, and its parameter has the shape {shape:?}: sizes disagree; convert the checkpoint again",
                    tensor.elements()
                );
                return Err(disagree(folder, file, detail));
            }
            let reshaped = tensor.reshaped(shape).map_err(|error| disagree(folder, file, error.to_string()))?;
            Ok(reshaped.map_or(inner, Tree::Tensor))
        }
        _ => Ok(inner),
    }
}

fn shapes(model: &Tree<Parts>) -> std::collections::HashMap<Key, Vec<u64>> {
    let groups: Vec<&Tree<Parts>> = match model.get("param_shapes") {
        Some(Tree::List(groups)) => groups.iter().collect(),
        Some(group) => vec![group],
        None => Vec::new(),
    };
    let pairs = groups.into_iter().filter_map(Tree::as_dict).flatten();
    pairs.filter_map(|(key, shape)| Some((key.clone(), dims(shape)?))).collect()
}

fn buffers(model: &Tree<Parts>) -> Option<std::collections::HashSet<Key>> {
    let Value::List(names) = model.get("buffer_names")?.to_value()? else { return None };
    let key = |name: Value| match name {
        Value::Str(name) => Some(Key::from(name.as_str())),
        _ => None,
    };
    Some(names.into_iter().filter_map(key).collect())
}

/// The optimizer's groups, as far as a universal checkpoint has them: options without members.
fn groups(optimizer: Tree<Parts>) -> Vec<Tree<Parts>> {
    let state = optimizer.get("optimizer_state_dict").unwrap_or(&optimizer);
    let inner = state.get("base_optimizer_state").or_else(|| state.get("optimizer_state_dict")).unwrap_or(state);
    match inner.get("param_groups") {
        Some(Tree::List(groups)) => groups
            .iter()
            .filter_map(Tree::as_dict)
            .map(|group| {
                Tree::Dict(
                    group.iter().filter(|(key, _)| **key != Key::from("params")).map(|(k, v)| (k.clone(), v.clone())).collect(),
                )
            })
            .collect(),
        _ => Vec::new(),
    }
}
