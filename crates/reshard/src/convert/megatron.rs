//! Writing a folder of Megatron core: `iter_0000100` with a DCP checkpoint whose keys are flat (`torch_dist`), `common.pt` with what
//! all ranks share, and `latest_checkpointed_iteration.txt`, which names the iteration.
//!
//! The optimizer's state is written as `fully_reshardable`: `optimizer.state.{param,exp_avg,exp_avg_sq}.<parameter>` in the shape of
//! the parameter, so that Megatron loads it in any layout of tensor, pipeline and data parallel ranks. The iteration is complete
//! when its `.metadata` is published; one step more makes it the one that a run goes on from.

use indexmap::IndexMap;
use reshard_formats::{DType, FileTensor, PathSegment, Value};
use reshard_state::{Key, Tree};
use reshard_storage::{Publish, StorageError, Store};

use super::dcp::write_dcp;
use super::output::{OutputOptions, Plan, PlanTensor, PlanValue};
use super::torch_files::{TorchFile, write_files};
use super::training::{Slot, Training};
use super::universal::{global_step, others};
use super::{Destination, Written, unfinished};
use crate::checkpoint::Checkpoint;
use crate::commit::{claim, settled};
use crate::error::{Error, Result, StorageContext, chain};
use crate::layout_names::{METADATA_FILE, UNFINISHED_FILE};
use crate::mesh::Layout;
use crate::select::is_float;

const LATEST: &str = "latest_checkpointed_iteration.txt";
const CONFIG: &str = "metadata.json";
const COMMON: &str = "common.pt";
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// As Megatron core 0.16 writes it.
const CONFIG_TEXT: &[u8] =
    br#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}"#;

/// Writes and publishes.
pub(super) fn write_megatron(
    plan: Plan<'_>,
    training: &Training,
    source: &Checkpoint,
    ranks: usize,
    overwrite: bool,
    destination: &Destination,
    options: &OutputOptions,
) -> Result<Written> {
    training.check_names(source)?;
    let root = destination.store.as_ref();
    let _lock = claim(root)?;
    let seen = root.version(LATEST).doing(|| format!("looking for {LATEST}"))?;
    if seen.is_some() && !overwrite {
        return Err(Error::AlreadyExists { path: format!("{}/{LATEST}", root.describe()) });
    }
    let iteration = global_step(&plan, training, source);
    let name = format!("iter_{iteration:07}");
    let store = destination.below(&name)?;
    let there = store.list("").doing(|| format!("looking into {}", store.describe()))?;
    let is_there = |name: &str| there.iter().any(|file| file.path == name);
    let ours: Vec<&str> = [METADATA_FILE, COMMON, CONFIG].into_iter().filter(|name| is_there(name)).collect();
    let marker = store.version(UNFINISHED_FILE).doing(|| format!("looking for {UNFINISHED_FILE}"))?;
    // What a conversion that was stopped left: the marker goes last, when the root names the iteration. The lock says that none is
    // at work; where there are no locks, it is the caller who says so.
    let at_work = marker.is_some() && !root.capabilities().locks && !overwrite;
    let foreign = !ours.is_empty() && (marker.is_none() || names(root, iteration)?);
    if at_work || foreign {
        return Err(Error::AlreadyExists { path: store.describe() });
    }
    let common = TorchFile { name: COMMON.to_owned(), content: common(&plan, training, iteration)? };
    let shared: Vec<usize> = common.content.tensors().iter().map(|tensor| tensor.storage as usize).collect();
    store.prepare().doing(|| format!("preparing {}", store.describe()))?;
    let marked = unfinished::mark(store.as_ref(), "", marker, &there)?;
    for name in ours {
        store.delete(name).doing(|| format!("removing {name} of a conversion that was stopped"))?;
    }
    let beside = || [COMMON, CONFIG].into_iter();
    let give_up = |error| {
        // Whose `.metadata` may be there, and only its answer was lost, stays marked: the next conversion begins anew.
        match store.exists(METADATA_FILE) {
            Ok(false) => marked.give_up(beside()),
            _ => marked.discard(beside()),
        }
        error
    };
    let mut bytes = write_files(&plan, std::slice::from_ref(&common), store.as_ref(), options).map_err(give_up)?;
    let config = store.publish(CONFIG, CONFIG_TEXT, Publish::Create).doing(|| format!("writing {CONFIG}"));
    let folder = config.and_then(|()| {
        let plan = flat(plan, training, &shared)?;
        let pieces = plan.pieces(&Layout::rows(ranks.max(1) as u64)?)?;
        write_dcp(&plan, &pieces, ranks.max(1), false, &store, options)
    });
    let folder = folder.map_err(give_up)?;
    bytes += folder.bytes;
    marked.check()?;
    // The iteration is whole, and stays whatever becomes of the rest; marked, so that it is begun anew where nothing names it.
    let text = iteration.to_string();
    let mode = seen.map_or(Publish::Create, Publish::Update);
    settled(root, LATEST, text.as_bytes(), root.publish(LATEST, text.as_bytes(), mode)).map_err(|failed| failed.error)?;
    let mut warnings = folder.warnings;
    if let Err(error) = marked.remove() {
        warnings.push(format!(
            "{}/{UNFINISHED_FILE} is in nobody's way and could not be removed: {}",
            store.describe(),
            chain(&error)
        ));
    }
    let files = folder.files.iter().map(String::as_str).chain(beside()).chain([METADATA_FILE]);
    let files = files.map(|file| format!("{name}/{file}")).chain([LATEST.to_owned()]).collect();
    Ok(Written { files, bytes, warnings })
}

/// Whether the root names an iteration.
fn names(root: &dyn Store, iteration: i64) -> Result<bool> {
    match root.read(LATEST, MAX_TEXT_BYTES) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).trim() == iteration.to_string()),
        Err(StorageError::NotFound { .. }) => Ok(false),
        Err(source) => Err(Error::Storage { doing: format!("reading {LATEST}"), source }),
    }
}

/// The tensors under Megatron's keys, and the objects that were sharded.
fn flat<'p>(plan: Plan<'p>, training: &Training, shared: &[usize]) -> Result<Plan<'p>> {
    let mut chosen: Vec<(usize, PlanTensor)> = Vec::new();
    let mut add = |i: usize, key: String, dtype: DType| {
        let path = vec![PathSegment::Key(key.clone())];
        chosen.push((i, PlanTensor { key, path, dtype, requires_grad: false, ..plan.tensors[i].clone() }));
    };
    for (name, &i) in &training.model {
        add(i, name.clone(), plan.tensors[i].dtype);
    }
    for (name, state) in &training.state {
        if let Some(i) = training.weight(name) {
            let dtype = plan.tensors[i].dtype;
            add(i, format!("optimizer.state.param.{name}"), if is_float(dtype) { DType::Float32 } else { dtype });
        }
        for (slot, value) in &state.slots {
            match value {
                // The step is the group's.
                Slot::Tensor(_) if slot == "step" => {}
                Slot::Tensor(i) => add(*i, format!("optimizer.state.{slot}.{name}"), plan.tensors[*i].dtype),
                Slot::Value(_) => {}
            }
        }
    }
    for &i in training.other_tensors.iter().filter(|i| !shared.contains(i)) {
        add(i, plan.tensors[i].key.clone(), plan.tensors[i].dtype);
    }
    let values = plan.values.iter().filter(|value| is_sharded_object(&value.key)).cloned();
    let values: Vec<PlanValue> =
        values.map(|value| PlanValue { path: vec![PathSegment::Key(value.key.clone())], ..value }).collect();
    plan.remapped(chosen, values)
}

/// Whether a key is that of an object which Megatron shards: `rng_state/shard_0_1`.
fn is_sharded_object(key: &str) -> bool {
    key.rsplit_once('/').is_some_and(|(_, last)| last.starts_with("shard_"))
}

/// Whether a value is one that all ranks share, and not how an optimizer's state was sharded before.
fn is_common(key: &str) -> bool {
    !is_sharded_object(key) && key != "optimizer.param_state_sharding_type"
}

/// What all ranks share.
fn common(plan: &Plan<'_>, training: &Training, iteration: i64) -> Result<Tree<FileTensor>> {
    let text = |text: &str| Value::from(text);
    let training_values = Training {
        other_values: training.other_values.iter().copied().filter(|&i| is_common(&plan.values[i].key)).collect(),
        other_tensors: training.other_tensors.iter().copied().filter(|&i| plan.tensors[i].path.len() > 1).collect(),
        ..Training::default()
    };
    let mut fields = others(plan, &training_values)?;
    let mut set = |name: &str, value: Value| {
        fields.entry(Key::from(name)).or_insert(Tree::Value(value));
    };
    set("iteration", Value::from(iteration));
    set("checkpoint_version", Value::from(3.0));
    if !training.groups.is_empty() {
        let groups = training.groups.iter().map(|options| group(options, iteration)).collect();
        let inner = Value::Dict(vec![(text("param_groups"), Value::List(groups))]);
        set(
            "optimizer",
            Value::Dict(vec![(text("optimizer"), inner), (text("param_state_sharding_type"), text("fully_reshardable"))]),
        );
    }
    Ok(Tree::Dict(fields))
}

/// A group's options, and what Megatron tells its groups apart by.
fn group(options: &IndexMap<String, Value>, iteration: i64) -> Value {
    let mut options: IndexMap<&str, Value> =
        options.iter().filter(|(name, _)| *name != "params").map(|(name, value)| (name.as_str(), value.clone())).collect();
    let decays = !matches!(options.get("weight_decay"), Some(Value::Float(decay)) if *decay == 0.0);
    let defaults = [
        ("wd_mult", Value::from(if decays { 1.0 } else { 0.0 })),
        ("lr_mult", Value::from(1.0)),
        ("is_expert_parallel", Value::from(false)),
        ("is_decoupled_lr", Value::from(false)),
        ("step", Value::from(iteration)),
    ];
    for (name, value) in defaults {
        options.entry(name).or_insert(value);
    }
    Value::Dict(options.into_iter().map(|(name, value)| (Value::from(name), value)).collect())
}
