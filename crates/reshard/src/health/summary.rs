//! The optimizer's state at a glance: its slots, its param groups and its step, told by the names of keys.
//!
//! Groups are spelled as DCP does (`optim.param_groups.0.lr`), flattened as large jobs do (`optim.param_groups.FQN.lr`), or
//! as a plain `torch.save` of `optimizer.state_dict()` (parameters by number).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use reshard_formats::{DType, Value};

use super::state_keys::{Roots, by_param, roots};
use crate::checkpoint::{CatalogEntry, CatalogKind, Checkpoint, LoadedValue};
use crate::numbers::{StatsOptions, stats};
use crate::workers::Workers;

/// An optimizer's state.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct OptimizerSummary {
    /// What all its keys start with, such as `optim.`.
    pub root: String,
    /// The optimizer's name, where its slots tell.
    pub name: Option<&'static str>,
    /// The step of its first parameter.
    pub step: Option<i64>,
    /// Parameters that have state.
    pub params: u64,
    /// Slots, by name.
    pub slots: Vec<SlotShare>,
    /// Param groups, in their order.
    pub groups: Vec<OptimizerGroup>,
}

/// One slot of all parameters.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct SlotShare {
    /// Its name.
    pub name: String,
    /// Parameters that have it.
    pub tensors: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Element types found.
    pub dtypes: BTreeSet<&'static str>,
}

/// One param group.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct OptimizerGroup {
    /// Its number, or `all` where the groups were flattened away.
    pub name: String,
    /// Its parameters, where they are named.
    pub params: Option<Vec<String>>,
    /// Hyperparameters, in Python's words.
    pub options: Vec<(String, String)>,
}

impl OptimizerSummary {
    /// The parameter and the slot that a key is of, where it is one of the optimizer's state.
    pub fn param_and_slot<'k>(&self, key: &'k str) -> Option<(&'k str, &'k str)> {
        super::state_keys::param_and_slot(key, &self.root)
    }
}

/// Looks for optimizers: their slots, param groups and steps.
pub fn optimizer_summaries(checkpoint: &Checkpoint) -> Vec<OptimizerSummary> {
    roots(checkpoint.keys()).into_iter().map(|roots| summary(checkpoint, roots)).collect()
}

fn summary(checkpoint: &Checkpoint, Roots { all: root, groups }: Roots) -> OptimizerSummary {
    let entries = &checkpoint.catalog().entries;
    let mut found = OptimizerSummary { root: root.clone(), ..OptimizerSummary::default() };
    let mut slots: BTreeMap<&str, SlotShare> = BTreeMap::new();
    let params = by_param(entries.keys().map(String::as_str), &root);
    found.params = params.len() as u64;
    for (slot, key) in params.values().flatten() {
        let share = slots.entry(slot).or_default();
        share.tensors += 1;
        if let Some(CatalogEntry { kind: CatalogKind::Tensor(tensor), .. }) = entries.get(*key) {
            share.bytes = share.bytes.saturating_add(tensor.bytes());
            share.dtypes.insert(tensor.dtype.name());
        }
        if *slot == "step" && found.step.is_none() {
            found.step = small_integer(checkpoint, key);
        }
    }
    let of_group = |(key, entry)| -> Option<(&str, &str, &CatalogEntry)> {
        let key: &String = key;
        Some((key.as_str(), key.strip_prefix(&groups)?, entry))
    };
    let group_entries: Vec<(&str, &str, &CatalogEntry)> = entries.iter().filter_map(of_group).collect();
    found.slots = slots.into_iter().map(|(name, slot)| SlotShare { name: name.to_owned(), ..slot }).collect();
    found.groups = read_groups(checkpoint, &group_entries);
    found.name = name(&found);
    found
}

fn read_groups(checkpoint: &Checkpoint, entries: &[(&str, &str, &CatalogEntry)]) -> Vec<OptimizerGroup> {
    let value = |key: &str, entry: &CatalogEntry| match &entry.kind {
        CatalogKind::Value(_) => match checkpoint.read_value(key) {
            Ok(LoadedValue::Plain(value)) => Some(value),
            _ => None,
        },
        CatalogKind::Tensor(tensor) if tensor.shape.is_empty() => {
            let number = scalar(checkpoint, key)?;
            Some(match tensor.dtype {
                DType::Bool => Value::Bool(number != 0.0),
                dtype if dtype.is_integer() => Value::Int((number as i64).into()),
                _ => Value::Float(number),
            })
        }
        _ => None,
    };
    // All groups in one value.
    if let [(key, "", entry)] = entries {
        let Some(Value::List(groups) | Value::Tuple(groups)) = value(key, entry) else { return Vec::new() };
        return groups.iter().enumerate().map(|(number, group)| of_dict(number, group)).collect();
    }
    // Each is a small record, of which a service gives many at once.
    let first_param = entries.iter().find_map(|(_, rest, _)| option_of(rest).filter(|(middle, _)| !is_number(middle)));
    let wanted = |rest: &str| {
        option_of(rest).is_some_and(|(middle, _)| is_number(middle) || first_param.is_some_and(|(first, _)| first == middle))
    };
    let wanted: Vec<_> = entries.iter().filter(|(_, rest, _)| wanted(rest)).collect();
    let values = Mutex::new(HashMap::new());
    let take = |(key, _, entry): &(&str, &str, &CatalogEntry)| {
        if let Some(value) = value(key, entry) {
            values.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_string(), value);
        }
    };
    let at_once = Workers::reading(checkpoint.store.as_ref()).in_order(&wanted, |item| {
        take(item);
        Ok(())
    });
    if at_once.is_err() {
        // Where no threads can be started, one after the other.
        wanted.iter().for_each(|item| take(item));
    }
    let mut values = values.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut groups: BTreeMap<u64, OptimizerGroup> = BTreeMap::new();
    let mut flat = OptimizerGroup { name: "all".to_owned(), ..OptimizerGroup::default() };
    let mut flat_params = Vec::new();
    for (key, rest, _) in entries {
        let Some((middle, option)) = option_of(rest) else { continue };
        let number = middle.parse::<u64>().ok();
        if number.is_none() {
            if flat_params.last() != Some(&middle) {
                flat_params.push(middle);
            }
            // Every parameter carries its group's options; those of the first one speak for all.
            if first_param.is_none_or(|(first, _)| first != middle) {
                continue;
            }
        }
        let read = values.remove(*key);
        let group = match number {
            Some(number) => {
                groups.entry(number).or_insert_with(|| OptimizerGroup { name: number.to_string(), ..OptimizerGroup::default() })
            }
            None => &mut flat,
        };
        match (option, read) {
            ("params", Some(Value::List(names) | Value::Tuple(names))) => group.params = Some(names.iter().map(plain).collect()),
            (_, Some(value)) => group.options.push((option.to_owned(), value.python_repr())),
            (_, None) => {}
        }
    }
    let mut groups: Vec<OptimizerGroup> = groups.into_values().collect();
    if !flat_params.is_empty() {
        flat_params.sort_unstable();
        flat_params.dedup();
        flat.params = Some(flat_params.into_iter().map(str::to_owned).collect());
        groups.push(flat);
    }
    groups
}

fn of_dict(number: usize, group: &Value) -> OptimizerGroup {
    let mut found = OptimizerGroup { name: number.to_string(), ..OptimizerGroup::default() };
    if let Value::Dict(pairs) | Value::OrderedDict(pairs) = group {
        for (key, value) in pairs {
            match (plain(key).as_str(), value) {
                ("params", Value::List(names) | Value::Tuple(names)) => found.params = Some(names.iter().map(plain).collect()),
                (option, value) => found.options.push((option.to_owned(), value.python_repr())),
            }
        }
    }
    found
}

fn plain(value: &Value) -> String {
    match value {
        Value::Str(text) => text.clone(),
        other => other.python_repr(),
    }
}

/// What stands before an option in what follows the root of groups, and the option.
fn option_of(rest: &str) -> Option<(&str, &str)> {
    rest.strip_prefix('.')?.rsplit_once('.')
}

fn is_number(text: &str) -> bool {
    text.parse::<u64>().is_ok()
}

/// The optimizer, by its slots and options.
fn name(found: &OptimizerSummary) -> Option<&'static str> {
    let has = |slot: &str| found.slots.iter().any(|found| found.name == slot);
    let option = |name: &str| found.groups.iter().flat_map(|group| &group.options).find(|(option, _)| option == name);
    let decoupled = option("decoupled_weight_decay").is_some_and(|(_, text)| text == "True");
    if has("exp_avg") && has("exp_avg_sq") {
        return Some(match (decoupled, option("decoupled_weight_decay").is_some()) {
            (true, _) => "AdamW",
            (false, true) => "Adam",
            // Before PyTorch 2.7 the two cannot be told apart.
            (false, false) => "Adam or AdamW",
        });
    }
    match () {
        () if has("exp_avg") && has("exp_inf") => Some("Adamax"),
        () if has("square_avg") && has("acc_delta") => Some("Adadelta"),
        () if has("square_avg") => Some("RMSprop"),
        () if has("sum") => Some("Adagrad"),
        () if has("momentum_buffer") || option("nesterov").is_some() => Some("SGD"),
        () if has("row_var") || has("col_var") || has("variance") || has("exp_avg_sq_row") => Some("Adafactor"),
        () => None,
    }
}

/// The number in a tensor of one element.
fn scalar(checkpoint: &Checkpoint, key: &str) -> Option<f64> {
    stats(checkpoint, key, &StatsOptions::default()).ok()?.min
}

/// A plain number, or that of a tensor of one element.
pub(crate) fn small_number(checkpoint: &Checkpoint, key: &str, entry: &CatalogEntry) -> Option<f64> {
    match &entry.kind {
        CatalogKind::Value(_) => match checkpoint.read_value(key).ok()? {
            LoadedValue::Plain(Value::Int(number)) => number.as_i64().map(|number| number as f64),
            LoadedValue::Plain(Value::Float(number)) => Some(number),
            _ => None,
        },
        CatalogKind::Tensor(tensor) if tensor.elements() == 1 && !tensor.dtype.is_complex() => scalar(checkpoint, key),
        CatalogKind::Tensor(_) => None,
    }
}

/// A value or a tensor of one element, as an integer, where it is one.
pub fn small_integer(checkpoint: &Checkpoint, key: &str) -> Option<i64> {
    let entry = checkpoint.catalog().entries.get(key)?;
    small_number(checkpoint, key, entry).filter(|n| n.fract() == 0.0 && n.abs() < 9e15).map(|n| n as i64)
}
