//! Writing a universal checkpoint of DeepSpeed: `<tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, and `latest_universal`,
//! which names the tag.
//!
//! DeepSpeed loads it on any number of ranks (`"checkpoint": {"load_universal": true}`), with ZeRO-1, 2 or 3: the model file is there
//! under both names that the stages look for, and the optimizer's global state in both forms. A tag is a folder that nothing had
//! before, and one step makes it the checkpoint: `latest_universal` is put in its place. Tags that were there stay, as DeepSpeed's do.

use std::collections::HashMap;

use indexmap::IndexMap;
use reshard_formats::{DType, FileTensor, Value};
use reshard_state::{Dict, Key, Tree};
use reshard_storage::{Publish, Store};

use super::output::{OutputOptions, Plan};
use super::torch_files::{TorchFile, file_tensor, nested, write_files};
use super::training::{Slot, Training};
use super::{Destination, Written, unfinished};
use crate::checkpoint::{Checkpoint, LoadedValue};
use crate::commit::{claim, discard, new_save_id, settled};
use crate::error::{Error, Result, StorageContext};
use crate::health::small_integer;
use crate::select::is_float;

/// Names the newest tag.
const LATEST: &str = "latest_universal";
/// What a file of a parameter has its tensor under.
const PARAM: &str = "param";
/// The release whose files these are like, where the source names none.
const VERSION: &str = "0.19.8";
/// The same model file, as ZeRO-1 and 2 look for it and as ZeRO-3 does.
pub(super) const MODEL_FILES: [&str; 2] = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"];

/// Writes and publishes.
pub(super) fn write_universal(
    plan: Plan<'_>,
    training: &Training,
    source: &Checkpoint,
    overwrite: bool,
    destination: &Destination,
    options: &OutputOptions,
) -> Result<Written> {
    let store = destination.store.as_ref();
    training.check_names(source)?;
    if training.groups.is_empty() || training.state.is_empty() {
        return Err(Error::unsupported(format!(
            "{} has no {}, and DeepSpeed resumes from a universal checkpoint by it; write the model alone as safetensors, or convert a \
             checkpoint of the whole training state",
            source.path(),
            if training.state.is_empty() { "optimizer state" } else { "parameter groups of the optimizer" }
        )));
    }
    let _lock = claim(store)?;
    let seen = store.version(LATEST).doing(|| format!("looking for {LATEST}"))?;
    if seen.is_some() && !overwrite {
        return Err(Error::AlreadyExists { path: format!("{}/{LATEST}", store.describe()) });
    }
    unfinished::sweep(destination);
    let step = global_step(&plan, training, source);
    let tag = free_tag(store, &format!("global_step{step}_universal"))?;
    let plan = as_float32(plan, training)?;
    // Where groups count steps, each parameter is given its group's.
    let counted = training.group_step().filter(|_| training.state.values().all(|state| !state.slots.contains_key("step")));
    let (plan, group_step) = match counted {
        Some(steps) => {
            let (plan, position) = plan.with_number(steps as f32);
            (plan, Some(Slot::Tensor(position)))
        }
        None => (plan, None),
    };
    let (files, mut warnings) = files(&plan, training, group_step.as_ref(), &tag, step)?;
    let names = || files.iter().map(|file| file.name.as_str());
    let marked = unfinished::mark(store, &format!("{tag}/"), None, &[])?;
    let give_up = |error| {
        marked.give_up(names());
        error
    };
    let bytes = write_files(&plan, &files, store, options).map_err(give_up)?;
    options.control.check("publishing").and_then(|()| marked.check()).map_err(give_up)?;
    let whole = marked.remove().and_then(|()| match options.sync {
        true => store.sync().doing(|| "syncing the folder".into()),
        false => Ok(()),
    });
    whole.inspect_err(|_| discard(names().chain([marked.name()]), store))?;
    let mode = seen.clone().map_or(Publish::Create, Publish::Update);
    let done = store.publish(LATEST, tag.as_bytes(), mode);
    settled(store, LATEST, tag.as_bytes(), done).map_err(|failed| failed.discarding(names(), store))?;
    if seen.is_some() {
        warnings.push(format!("the universal checkpoint that {LATEST} named before stays beside {tag}"));
    }
    let files = files.into_iter().map(|file| file.name).chain([LATEST.to_owned()]).collect();
    Ok(Written { files, bytes, warnings })
}

/// The first name of a folder that nothing lies in.
fn free_tag(store: &dyn Store, wanted: &str) -> Result<String> {
    let taken = store.list(&format!("{wanted}/")).doing(|| format!("looking into {}", store.describe()))?;
    Ok(if taken.is_empty() { wanted.to_owned() } else { format!("{wanted}-{}", new_save_id()) })
}

/// Weights are kept in the optimizer's precision.
fn as_float32<'p>(plan: Plan<'p>, training: &Training) -> Result<Plan<'p>> {
    let mut casts = HashMap::new();
    for name in training.state.keys() {
        let Some(i) = training.weight(name) else { continue };
        let dtype = plan.tensors[i].dtype;
        if dtype != DType::Float32 {
            if !is_float(dtype) {
                let found = dtype.name();
                return Err(Error::unsupported(format!("{name:?} is {found}, which DeepSpeed does not train")));
            }
            casts.insert(i, DType::Float32);
        }
    }
    plan.with_dtypes(&casts)
}

/// The number of steps that were taken: as the source says, or as its parameters do.
pub(super) fn global_step(plan: &Plan<'_>, training: &Training, source: &Checkpoint) -> i64 {
    let number = |value: &Value| match value {
        Value::Int(int) => int.as_i64(),
        Value::Float(float) => Some(*float as i64),
        _ => None,
    };
    let named = plan.values.iter().find(|value| value.key == "global_steps" || value.key == "iteration");
    let named = named.and_then(|value| match &value.value {
        LoadedValue::Plain(plain) => number(plain),
        LoadedValue::Opaque { .. } => None,
    });
    let slot = || {
        training.state.values().find_map(|state| match state.slots.get("step")? {
            Slot::Value(value) => number(value),
            Slot::Tensor(i) => small_integer(source, &plan.tensors[*i].stored),
        })
    };
    named.or_else(slot).unwrap_or(0)
}

fn text(text: &str) -> Value {
    Value::from(text)
}

fn files(
    plan: &Plan<'_>,
    training: &Training,
    group_step: Option<&Slot>,
    tag: &str,
    step: i64,
) -> Result<(Vec<TorchFile>, Vec<String>)> {
    let mut files = Vec::new();
    let mut left_out = Vec::new();
    for (name, state) in &training.state {
        check_folder(name)?;
        let folder = format!("{tag}/zero/{name}");
        let param = |slot: &str, tensor: usize| TorchFile {
            name: format!("{folder}/{slot}.pt"),
            content: Tree::dict_of([(PARAM, file_tensor(plan, tensor, false)), ("cat_dim", Tree::Value(Value::from(0)))]),
        };
        files.extend(training.weight(name).map(|weight| param("fp32", weight)));
        let counted = group_step.map(|step| TorchFile { name: format!("{folder}/step.pt"), content: slot_tree(plan, step) });
        files.extend(counted);
        for (slot, value) in &state.slots {
            check_folder(slot)?;
            match (slot.as_str(), value) {
                ("step", value) => files.push(TorchFile { name: format!("{folder}/step.pt"), content: slot_tree(plan, value) }),
                (slot, Slot::Tensor(tensor)) => files.push(param(slot, *tensor)),
                (slot, Slot::Value(_)) => left_out.push(format!("{name}.{slot}")),
            }
        }
    }
    files.push(TorchFile { name: format!("{tag}/zero/optimizer_state.pt"), content: optimizer(plan, training, group_step) });
    let model = model(plan, training, step)?;
    files.extend(MODEL_FILES.iter().map(|name| TorchFile { name: format!("{tag}/{name}"), content: model.clone() }));
    let warnings = match left_out.as_slice() {
        [] => Vec::new(),
        [first, rest @ ..] => {
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            vec![format!("{first}{more} is not a tensor, and a universal checkpoint has no place for it: left out")]
        }
    };
    Ok((files, warnings))
}

/// A parameter's name is a folder's, and must not lead out of the checkpoint.
fn check_folder(name: &str) -> Result<()> {
    let plain =
        !name.is_empty() && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..") && !name.contains('\0');
    match plain {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name:?} cannot be the name of a folder, which each parameter has; rename it"))),
    }
}

fn slot_tree(plan: &Plan<'_>, slot: &Slot) -> Tree<FileTensor> {
    match slot {
        Slot::Tensor(tensor) => file_tensor(plan, *tensor, false),
        Slot::Value(value) => Tree::Value(value.clone()),
    }
}

/// The global state, as ZeRO-1 and 2 read it and, below `optimizer_state_dict`, as ZeRO-3 does.
fn optimizer(plan: &Plan<'_>, training: &Training, group_step: Option<&Slot>) -> Tree<FileTensor> {
    let group = |options: &IndexMap<String, Value>| {
        let options = options.iter().filter(|(option, _)| *option != "params");
        Value::Dict(options.map(|(option, value)| (text(option), value.clone())).collect())
    };
    let groups = Tree::Value(Value::List(training.groups.iter().map(group).collect()));
    let step = training.state.values().find_map(|state| state.slots.get("step")).or(group_step);
    let step = step.map(|slot| slot_tree(plan, slot));
    let step = step.unwrap_or(Tree::Value(Value::None));
    let state = Tree::Dict([(Key::Int(0), Tree::dict_of([("step", step)]))].into_iter().collect());
    Tree::dict_of([
        ("ds_version", Tree::Value(version(plan))),
        ("param_groups", groups.clone()),
        ("optimizer_state_dict", Tree::dict_of([("state", state), ("param_groups", groups)])),
    ])
}

/// DeepSpeed's release, by the source where that is DeepSpeed's.
fn version(plan: &Plan<'_>) -> Value {
    let named = plan.values.iter().find(|value| value.key == "ds_version");
    match named.map(|value| &value.value) {
        Some(LoadedValue::Plain(version @ Value::Str(_))) => version.clone(),
        _ => text(VERSION),
    }
}

/// What is no parameter that is trained, counters, and all that the source has besides.
fn model(plan: &Plan<'_>, training: &Training, step: i64) -> Result<Tree<FileTensor>> {
    let rest: Vec<(&String, usize)> =
        training.model.iter().filter(|(name, _)| !training.state.contains_key(*name)).map(|(name, i)| (name, *i)).collect();
    let names = rest.iter().map(|(name, _)| text(name)).collect();
    let module = Tree::dict_of(rest.iter().map(|(name, i)| (name.as_str(), file_tensor(plan, *i, false))));
    let mut fields = Dict::new();
    for (name, value) in [
        ("module", module),
        ("buffer_names", Tree::Value(Value::List(names))),
        ("ds_version", Tree::Value(version(plan))),
        ("dp_world_size", Tree::Value(Value::from(1))),
        ("mp_world_size", Tree::Value(Value::from(1))),
        ("global_steps", Tree::Value(Value::from(step))),
        ("skipped_steps", Tree::Value(Value::from(0))),
    ] {
        fields.insert(Key::from(name), value);
    }
    // The structure of the checkpoint is its own.
    let own = |key: &Key| matches!(key.as_str(), Some("module" | "buffer_names"));
    fields.extend(others(plan, training)?.into_iter().filter(|(key, _)| !own(key)));
    Ok(Tree::Dict(fields))
}

/// What is neither the model's nor the optimizer's, as the tree that it was.
pub(super) fn others(plan: &Plan<'_>, training: &Training) -> Result<Dict<FileTensor>> {
    let values = training.other_values.iter().filter_map(|&i| match &plan.values[i].value {
        LoadedValue::Plain(plain) => Some((&plan.values[i], plain)),
        LoadedValue::Opaque { .. } => None,
    });
    nested(plan, training.other_tensors.iter().copied(), values)
}
