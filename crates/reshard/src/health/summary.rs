//! The optimizer's state at a glance: its slots, its param groups and its step, told by the names of keys.
//!
//! Three spellings occur: DCP's (`optim.state.FQN.exp_avg`, `optim.param_groups.0.lr`), the flattened one that large
//! jobs use (`optim.param_groups.FQN.lr`), and a plain `torch.save` of `optimizer.state_dict()` (parameters by number).

use std::collections::{BTreeMap, BTreeSet};

use reshard_formats::{DType, Value};

use crate::checkpoint::{CatalogEntry, CatalogKind, Checkpoint, LoadedValue};
use crate::numbers::{StatsOptions, stats};

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

/// Roots by which an optimizer is known even without param groups.
const ROOTS: &[&str] = &["optim", "optimizer", "optim_state", "optimizer_state", "optim_state_dict", "optimizer_state_dict"];
/// Values are small records, but each is a read: a glance makes no more than this many.
const MOST_READS: usize = 96;

/// Looks for an optimizer: its slots, param groups and step.
pub fn optimizer_summary(checkpoint: &Checkpoint) -> Option<OptimizerSummary> {
    let entries = &checkpoint.catalog().entries;
    let root = root(entries.keys().map(String::as_str))?;
    let mut found = OptimizerSummary { root: root.clone(), ..OptimizerSummary::default() };
    let (state, groups) = (format!("{root}state."), format!("{root}param_groups"));
    let mut slots: BTreeMap<&str, SlotShare> = BTreeMap::new();
    let mut last_param = "";
    let mut group_entries: Vec<(&str, &str, &CatalogEntry)> = Vec::new();
    for (key, entry) in entries {
        if let Some((param, slot)) = key.strip_prefix(&state).and_then(|rest| rest.rsplit_once('.')) {
            let share = slots.entry(slot).or_default();
            share.tensors += 1;
            if let CatalogKind::Tensor(tensor) = &entry.kind {
                share.bytes = share.bytes.saturating_add(tensor.bytes());
                share.dtypes.insert(tensor.dtype.name());
            }
            if slot == "step" && found.step.is_none() {
                found.step = small_integer(checkpoint, key);
            }
            if param != last_param {
                found.params += 1;
                last_param = param;
            }
        } else if let Some(rest) = key.strip_prefix(&groups) {
            group_entries.push((key, rest, entry));
        }
    }
    // A parameter's slots usually stand together; where they do not, the fullest slot knows better.
    found.params = found.params.min(slots.values().map(|slot| slot.tensors).max().unwrap_or(0));
    found.slots = slots.into_iter().map(|(name, slot)| SlotShare { name: name.to_owned(), ..slot }).collect();
    found.groups = read_groups(checkpoint, &group_entries);
    found.name = name(&found);
    Some(found)
}

fn root<'a>(keys: impl Iterator<Item = &'a str> + Clone) -> Option<String> {
    let by_groups = keys.clone().find_map(|key| {
        let at = key.find("param_groups")?;
        (at == 0 || key[..at].ends_with('.')).then(|| key[..at].to_owned())
    });
    let by_name = || {
        keys.clone().find_map(|key| {
            let (first, rest) = key.split_once('.')?;
            (ROOTS.contains(&first) && rest.starts_with("state.")).then(|| format!("{first}."))
        })
    };
    by_groups.or_else(by_name)
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
    let mut groups: BTreeMap<u64, OptimizerGroup> = BTreeMap::new();
    let mut flat = OptimizerGroup { name: "all".to_owned(), ..OptimizerGroup::default() };
    let (mut flat_params, mut first_param) = (Vec::new(), None);
    for (reads, (key, rest, entry)) in entries.iter().enumerate() {
        let Some((middle, option)) = rest.strip_prefix('.').and_then(|rest| rest.rsplit_once('.')) else { continue };
        let number = middle.parse::<u64>().ok();
        if number.is_none() {
            if flat_params.last() != Some(&middle) {
                flat_params.push(middle);
            }
            // Every parameter carries its group's options; those of the first one speak for all.
            if *first_param.get_or_insert(middle) != middle {
                continue;
            }
        }
        if reads >= MOST_READS {
            continue;
        }
        let read = value(key, entry);
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
        () if has("row_var") || has("col_var") => Some("Adafactor"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_what_stands_before_param_groups() {
        let find = |keys: &[&str]| root(keys.iter().copied());
        assert_eq!(find(&["model.w", "app.optim.param_groups.0.lr"]), Some("app.optim.".to_owned()));
        assert_eq!(find(&["param_groups.0.lr", "state.0.step"]), Some(String::new()));
        assert_eq!(find(&["optim.state.w.step"]), Some("optim.".to_owned()));
        assert_eq!(find(&["model.state.w", "model.my_param_groups"]), None);
    }
}
