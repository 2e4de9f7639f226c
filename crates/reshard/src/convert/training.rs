//! A training checkpoint taken apart by what its keys are to a trainer: weights under the model's own names, the optimizer's slots of
//! each parameter, its parameter groups, and the rest. What writes the folders of a trainer begins here.

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use reshard_formats::{PathSegment, Value};

use super::output::Plan;
use crate::checkpoint::{Checkpoint, LoadedValue};
use crate::error::{Error, Result};
use crate::select::{LEADING_SLOTS, Part, Selection, below_optimizer};

/// Slots that are the parameter itself in the optimizer's precision.
const MASTERS: &[&str] = &["fp32", "fp32_param", "master_param", "param"];

/// What a slot is.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Slot {
    /// A tensor of the plan.
    Tensor(usize),
    /// A plain value, such as a step.
    Value(Value),
}

/// The optimizer's state of one parameter.
#[derive(Debug, Default)]
pub(super) struct ParamState {
    /// The parameter in the optimizer's precision, where it is kept apart from the model.
    pub(super) master: Option<usize>,
    pub(super) slots: IndexMap<String, Slot>,
}

/// A plan by what its keys are.
#[derive(Debug, Default)]
pub(super) struct Training {
    /// Tensors of the plan by the model's own names.
    pub(super) model: IndexMap<String, usize>,
    /// By the names of the parameters.
    pub(super) state: IndexMap<String, ParamState>,
    /// Options of each group, and the names of its parameters under `params` where they are known.
    pub(super) groups: Vec<IndexMap<String, Value>>,
    /// Tensors and values of the plan that are neither.
    pub(super) other_tensors: Vec<usize>,
    pub(super) other_values: Vec<usize>,
}

/// A key of an optimizer's state, without the words before it.
enum OptimizerKey {
    Slot { param: String, slot: String },
    Setting { group: String, option: String },
    Groups,
}

impl Training {
    /// Takes a plan apart. `selection` is what it was made of.
    pub(super) fn of(plan: &Plan<'_>, source: &Checkpoint, selection: &Selection) -> Result<Training> {
        let names = Selection { part: Part::Model, ..selection.clone() };
        let names: HashMap<&str, String> =
            names.apply(source).unwrap_or_default().into_iter().map(|item| (item.stored, item.key)).collect();
        let mut training = Training::default();
        let mut settings: IndexMap<String, IndexMap<String, Value>> = IndexMap::new();
        let weights: HashSet<&str> = names.values().map(String::as_str).collect();
        check_optimizers(plan, source)?;
        let optimizer = |key: &str, path: &[PathSegment]| optimizer_key(key, path, |name| weights.contains(name));
        for (i, tensor) in plan.tensors.iter().enumerate() {
            match optimizer(&tensor.key, &tensor.path) {
                Some(OptimizerKey::Slot { param, slot }) => training.add_slot(param, slot, Slot::Tensor(i)),
                Some(OptimizerKey::Setting { .. } | OptimizerKey::Groups) => training.other_tensors.push(i),
                None => match names.get(tensor.stored.as_str()) {
                    Some(name) => drop(training.model.insert(name.clone(), i)),
                    None => training.other_tensors.push(i),
                },
            }
        }
        for (i, value) in plan.values.iter().enumerate() {
            let LoadedValue::Plain(plain) = &value.value else {
                training.other_values.push(i);
                continue;
            };
            match optimizer(&value.key, &value.path) {
                Some(OptimizerKey::Slot { param, slot }) => training.add_slot(param, slot, Slot::Value(plain.clone())),
                Some(OptimizerKey::Setting { group, option }) => {
                    settings.entry(group).or_default().insert(option, plain.clone());
                }
                Some(OptimizerKey::Groups) => training.groups = listed(plain),
                None => training.other_values.push(i),
            }
        }
        if !settings.is_empty() {
            training.groups = groups(settings);
        }
        if let Some(number) = training.state.keys().find(|name| name.parse::<u64>().is_ok()) {
            return Err(Error::unsupported(format!(
                "the optimizer's state in {} is numbered ({number}, …) and not named, so it cannot be told which parameter it belongs \
                 to; save it with get_state_dict, which names it, or convert the model alone",
                source.path()
            )));
        }
        Ok(training)
    }

    fn add_slot(&mut self, param: String, slot: String, value: Slot) {
        let state = self.state.entry(param).or_default();
        match value {
            Slot::Tensor(i) if MASTERS.contains(&slot.as_str()) => state.master = Some(i),
            value => drop(state.slots.insert(slot, value)),
        }
    }

    /// Refuses state of parameters that the model does not have.
    pub(super) fn check_names(&self, source: &Checkpoint) -> Result<()> {
        let unknown: Vec<&str> = self
            .state
            .iter()
            .filter(|(name, state)| state.master.is_none() && !self.model.contains_key(*name))
            .map(|(name, _)| name.as_str())
            .collect();
        let Some(first) = unknown.first() else { return Ok(()) };
        let more = if unknown.len() > 1 { format!(" and {} more", unknown.len() - 1) } else { String::new() };
        let near = crate::mismatch::near_names(first, self.model.keys().map(String::as_str));
        let near = near.first().map_or_else(String::new, |near| format!("; the model has {near:?}"));
        Err(Error::unsupported(format!(
            "{} has optimizer state of {first:?}{more}, and no weight of that name{near}: rename one of them, or select the keys that \
             belong together",
            source.path()
        )))
    }

    /// The step that a group counts, where parameters do not.
    pub(super) fn group_step(&self) -> Option<f64> {
        self.groups.iter().find_map(|options| match options.get("step")? {
            Value::Int(step) => step.as_i64().map(|step| step as f64),
            Value::Float(step) => Some(*step),
            _ => None,
        })
    }

    /// The tensor that a parameter's weight in the optimizer's precision is.
    pub(super) fn weight(&self, name: &str) -> Option<usize> {
        self.state.get(name).and_then(|state| state.master).or_else(|| self.model.get(name).copied())
    }
}

/// There is one optimizer: the folders of trainers have no place for a second one's groups.
fn check_optimizers(plan: &Plan<'_>, source: &Checkpoint) -> Result<()> {
    let keys = plan.tensors.iter().map(|tensor| &tensor.key).chain(plan.values.iter().map(|value| &value.key));
    let mut words = keys.filter_map(|key| below_optimizer(key)).map(|(word, _)| word);
    let Some(first) = words.next() else { return Ok(()) };
    let Some(other) = words.find(|word| *word != first) else { return Ok(()) };
    Err(Error::unsupported(format!(
        "{} has two optimizers, {first:?} and {other:?}, and what is written has one: select the keys of one of them, and of the model",
        source.path()
    )))
}

fn optimizer_key(key: &str, path: &[PathSegment], is_weight: impl Fn(&str) -> bool) -> Option<OptimizerKey> {
    let (_, below) = below_optimizer(key)?;
    // Megatron has an optimizer in its optimizer.
    let below = below_optimizer(below).map_or(below, |(_, below)| below);
    if below == "param_groups" {
        return Some(OptimizerKey::Groups);
    }
    // The tree knows where a name ends; a key's dots do not.
    let ends = match path {
        [.., PathSegment::Key(name), PathSegment::Key(last)] => Some((name.as_str(), last.as_str())),
        _ => None,
    };
    if let Some(rest) = below.strip_prefix("state.") {
        if let Some((slot, name)) = rest.split_once('.')
            && LEADING_SLOTS.contains(&slot)
            && is_weight(name)
        {
            return Some(OptimizerKey::Slot { param: name.to_owned(), slot: slot.to_owned() });
        }
        let (name, slot) = ends.filter(|(name, slot)| rest == format!("{name}.{slot}")).or_else(|| rest.rsplit_once('.'))?;
        return Some(OptimizerKey::Slot { param: name.to_owned(), slot: slot.to_owned() });
    }
    let (group, option) = below.strip_prefix("param_groups.")?.rsplit_once('.')?;
    Some(OptimizerKey::Setting { group: group.to_owned(), option: option.to_owned() })
}

/// Groups by number as they are; settings by parameter are put together where they are alike.
fn groups(settings: IndexMap<String, IndexMap<String, Value>>) -> Vec<IndexMap<String, Value>> {
    let numbers: Option<Vec<u64>> = settings.keys().map(|name| name.parse().ok()).collect();
    if let Some(numbers) = numbers {
        let mut numbered: Vec<_> = numbers.into_iter().zip(settings.into_values()).collect();
        numbered.sort_by_key(|(number, _)| *number);
        return numbered.into_iter().map(|(_, options)| options).collect();
    }
    let mut found: Vec<(IndexMap<String, Value>, Vec<Value>)> = Vec::new();
    for (name, mut options) in settings {
        options.sort_keys();
        let name = Value::from(name);
        match found.iter_mut().find(|(known, _)| *known == options) {
            Some((_, members)) => members.push(name),
            None => found.push((options, vec![name])),
        }
    }
    let named = |(mut options, members): (IndexMap<String, Value>, Vec<Value>)| {
        options.insert("params".to_owned(), Value::List(members));
        options
    };
    found.into_iter().map(named).collect()
}

/// The groups of a list that is one value.
fn listed(value: &Value) -> Vec<IndexMap<String, Value>> {
    let (Value::List(groups) | Value::Tuple(groups)) = value else { return Vec::new() };
    let options = |group: &Value| match group {
        Value::Dict(pairs) | Value::OrderedDict(pairs) => pairs
            .iter()
            .filter_map(|(key, value)| match key {
                Value::Str(name) => Some((name.clone(), value.clone())),
                _ => None,
            })
            .collect(),
        _ => IndexMap::new(),
    };
    groups.iter().map(options).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(key: &str, path: &[&str]) -> Option<(String, String)> {
        let path: Vec<PathSegment> = path.iter().map(|word| PathSegment::Key((*word).to_owned())).collect();
        match optimizer_key(key, &path, |name| name == "layers.0.weight")? {
            OptimizerKey::Slot { param, slot } => Some((param, slot)),
            OptimizerKey::Setting { group, option } => Some((format!("group {group}"), option)),
            OptimizerKey::Groups => Some(("groups".into(), String::new())),
        }
    }

    #[test]
    fn keys_of_optimizers_are_told_apart() {
        let is = |found: Option<(String, String)>, param: &str, slot: &str| assert_eq!(found, Some((param.into(), slot.into())));
        is(parsed("optim.state.layers.0.weight.exp_avg", &[]), "layers.0.weight", "exp_avg");
        is(parsed("optimizer.state.exp_avg.layers.0.weight", &[]), "layers.0.weight", "exp_avg");
        is(parsed("optim.state.exp_avg.bias.exp_avg_sq", &[]), "exp_avg.bias", "exp_avg_sq");
        is(parsed("optim.state.a.b.c", &["optim", "state", "a", "b.c"]), "a", "b.c");
        is(parsed("optim.param_groups.0.lr", &[]), "group 0", "lr");
        is(parsed("optim.param_groups.layers.0.weight.lr", &[]), "group layers.0.weight", "lr");
        is(parsed("optim.param_groups", &[]), "groups", "");
        is(parsed("optimizer.optimizer.param_groups.1.lr", &[]), "group 1", "lr");
        assert_eq!(parsed("model.optim.weight", &[]), None);
        assert_eq!(parsed("optimus.state.x", &[]), None);
    }
}
