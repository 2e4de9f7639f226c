//! The flattened form of optimizer state, `state.{name}.{slot}` and `param_groups.{name}.{key}`: every value under the
//! name of a parameter, so that parts of a model (pipeline stages) can be saved and loaded on their own.

use indexmap::{IndexMap, IndexSet};

use super::groups::value_text;
use super::state::{PARAM_GROUPS, STATE, USER_STATE, same_tensor};
use crate::error::GroupDisagreement;
use crate::tree::below;
use crate::{Dict, Key, KeyTypes, LiveOptimizer, Names, OptimizerState, ParamGroup, StateError, TensorLike, Tree};

/// Optimizer state in its flattened form.
pub type FlattenedOptimizer<T> = IndexMap<String, Tree<T>>;

/// The key under which the flattened form notes keys that are not text.
const SLOT_KEYS: &str = "slot_keys";

/// The key under which a saved flattened form notes what flattening takes from values of groups; whoever loads it has used that.
const VALUE_KEYS: &str = "value_keys";

/// Flattens optimizer state. Dicts inside of slots are opened, at any depth; user-defined state stays below `state`, or
/// below `user_state` where it says which optimizer's it is. Keys that text does not give back are noted in one more entry.
pub fn flatten_optimizer<T: Clone>(state: &OptimizerState<T>) -> Result<FlattenedOptimizer<T>, StateError> {
    let mut flat = FlattenedOptimizer::new();
    for (name, slots) in &state.state {
        open(&format!("{STATE}.{name}"), slots, &mut flat)?;
    }
    open(STATE, &state.user_state, &mut flat)?;
    for (name, own) in &state.owned_state {
        open(&format!("{USER_STATE}.{name}"), own, &mut flat)?;
    }
    for group in &state.param_groups {
        for name in &group.params {
            for (key, value) in &group.options {
                insert(format!("{PARAM_GROUPS}.{name}.{key}"), value, &mut flat)?;
            }
        }
    }
    let mut types = KeyTypes::default();
    types.note_dotted(STATE, &state.user_state);
    for (name, slots) in &state.state {
        types.note_dotted(&format!("{STATE}.{name}"), slots);
    }
    for (name, own) in &state.owned_state {
        types.note_dotted(&format!("{USER_STATE}.{name}"), own);
    }
    if !types.is_empty() {
        insert(SLOT_KEYS.to_owned(), &Tree::from_value(types.to_value()), &mut flat)?;
    }
    Ok(flat)
}

fn open<T: Clone>(prefix: &str, dict: &Dict<T>, flat: &mut FlattenedOptimizer<T>) -> Result<(), StateError> {
    for (key, value) in dict {
        let full = format!("{prefix}.{key}");
        match value {
            Tree::Dict(inner) => open(&full, inner, flat)?,
            leaf => insert(full, leaf, flat)?,
        }
    }
    Ok(())
}

fn insert<T: Clone>(key: String, value: &Tree<T>, flat: &mut FlattenedOptimizer<T>) -> Result<(), StateError> {
    match flat.insert(key.clone(), value.clone()) {
        None => Ok(()),
        Some(_) => Err(StateError::DuplicateKey { first: format!("'{key}'"), second: format!("'{key}'"), key }),
    }
}

/// What un-flattening could not place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Keys that belong to parameters nobody knows.
    pub unexpected: Vec<String>,
    /// Live parameters without a single key.
    pub missing: Vec<String>,
}

/// Un-flattens optimizer state for the given live optimizers: their groups say which parameters belong together. Members
/// of one group must agree about every option; those that do not are all named.
pub fn unflatten_optimizer<T: TensorLike>(
    flat: &FlattenedOptimizer<T>,
    live: &[LiveOptimizer<T>],
    names: &Names,
) -> Result<(OptimizerState<T>, Leftovers), StateError> {
    let known: IndexSet<&str> =
        names.leaves().filter(|leaf| leaf.kind == crate::LeafKind::Parameter).map(|leaf| leaf.name.as_str()).collect();
    let mut sorted = sort_keys(flat, &known)?;
    let user_state = std::mem::take(&mut sorted.user_state);
    let owned_state = std::mem::take(&mut sorted.owned_state);
    let mut result = OptimizerState { user_state, owned_state, ..OptimizerState::default() };
    let mut leftovers = Leftovers { unexpected: std::mem::take(&mut sorted.unexpected), missing: Vec::new() };
    let mut placed: IndexSet<&str> = IndexSet::new();
    for optimizer in live {
        for group in &optimizer.param_groups {
            let mut params = Vec::new();
            let mut options: IndexMap<Key, (String, Tree<T>)> = IndexMap::new();
            let mut disagreements = Vec::new();
            for identity in &group.params {
                for first in names.of_identity(*identity) {
                    // A shared parameter was saved under one of its names, not necessarily the first.
                    let alias = names.aliases(first).iter().map(String::as_str).find(|alias| sorted.has(alias));
                    let Some(name) = alias else {
                        leftovers.missing.push(first.to_owned());
                        continue;
                    };
                    placed.extend(known.get(name).copied());
                    params.push(name.to_owned());
                    if let Some(slots) = sorted.slots.get(name) {
                        result.insert_slots(name.to_owned(), slots.clone())?;
                    }
                    let own = sorted.options.get(name);
                    for (key, value) in own.into_iter().flatten() {
                        match options.get(key) {
                            Some((other, before)) if !before.same_as(value, &same_tensor) => {
                                disagreements.push(GroupDisagreement {
                                    option: key.to_string(),
                                    first: (other.clone(), value_text(before)),
                                    second: (name.to_owned(), value_text(value)),
                                });
                            }
                            Some(_) => {}
                            None => {
                                options.insert(key.clone(), (name.to_owned(), value.clone()));
                            }
                        }
                    }
                }
            }
            if !disagreements.is_empty() {
                return Err(StateError::GroupDisagreement { disagreements });
            }
            let options = options.into_iter().map(|(key, (_, value))| (key, value)).collect();
            result.param_groups.push(ParamGroup { params, options });
        }
    }
    let unplaced = sorted.slots.keys().filter(|name| !placed.contains(name.as_str()));
    leftovers.unexpected.extend(unplaced.map(|name| format!("{STATE}.{name}")));
    Ok((result, leftovers))
}

struct Sorted<T> {
    slots: IndexMap<String, Dict<T>>,
    options: IndexMap<String, Dict<T>>,
    user_state: Dict<T>,
    owned_state: IndexMap<String, Dict<T>>,
    unexpected: Vec<String>,
}

impl<T> Sorted<T> {
    fn has(&self, name: &str) -> bool {
        self.options.contains_key(name) || self.slots.contains_key(name)
    }
}

/// Sorts keys by the parameter they belong to. Names contain dots, so the longest known name counts.
fn sort_keys<T: Clone>(flat: &FlattenedOptimizer<T>, known: &IndexSet<&str>) -> Result<Sorted<T>, StateError> {
    let mut sorted = Sorted {
        slots: IndexMap::new(),
        options: IndexMap::new(),
        user_state: Dict::new(),
        owned_state: IndexMap::new(),
        unexpected: Vec::new(),
    };
    let types = key_types(flat)?;
    let unknown = Unknown::of(flat, known);
    for (key, value) in flat {
        if let Some(rest) = below(key, STATE) {
            match split_name(rest, known) {
                Some((name, slot)) => {
                    let slots = sorted.slots.entry(name.to_owned()).or_default();
                    nest(key, slots, &format!("{STATE}.{name}"), slot, value, &types)?;
                }
                None if unknown.own(rest) => sorted.unexpected.push(key.clone()),
                None => nest(key, &mut sorted.user_state, STATE, rest, value, &types)?,
            }
        } else if let Some(rest) = below(key, USER_STATE) {
            match split_name(rest, known) {
                Some((name, inner)) => {
                    let own = sorted.owned_state.entry(name.to_owned()).or_default();
                    nest(key, own, &format!("{USER_STATE}.{name}"), inner, value, &types)?;
                }
                None => sorted.unexpected.push(key.clone()),
            }
        } else if let Some(rest) = below(key, PARAM_GROUPS) {
            match split_name(rest, known) {
                Some((name, option)) => {
                    sorted.options.entry(name.to_owned()).or_default().insert(Key::from(option), value.clone());
                }
                None => sorted.unexpected.push(key.clone()),
            }
        } else if key != SLOT_KEYS && key != VALUE_KEYS {
            sorted.unexpected.push(key.clone());
        }
    }
    Ok(sorted)
}

fn key_types<T>(flat: &FlattenedOptimizer<T>) -> Result<KeyTypes, StateError> {
    let Some(noted) = flat.get(SLOT_KEYS) else { return Ok(KeyTypes::default()) };
    noted.to_value().as_ref().and_then(KeyTypes::from_value).ok_or_else(|| {
        let reason = format!("'{SLOT_KEYS}' is {}, not a list of places and keys", noted.kind());
        StateError::InvalidOptimizerState { reason }
    })
}

/// Parameters that the flattened state knows and nobody here does: those of other stages of a pipeline.
struct Unknown<'a> {
    names: IndexSet<&'a str>,
    /// Without any group there is no telling a parameter from what is the user's own.
    groups: bool,
}

impl<'a> Unknown<'a> {
    fn of<T>(flat: &'a FlattenedOptimizer<T>, known: &IndexSet<&str>) -> Unknown<'a> {
        let listed = || flat.keys().filter_map(|key| below(key, PARAM_GROUPS));
        let strange = listed().filter(|rest| split_name(rest, known).is_none());
        Unknown { names: strange.filter_map(|rest| Some(rest.rsplit_once('.')?.0)).collect(), groups: listed().next().is_some() }
    }

    /// Whether what is left of a key below `state` is a slot of one of them.
    fn own(&self, rest: &str) -> bool {
        match self.groups {
            true => rest.match_indices('.').any(|(dot, _)| self.names.contains(&rest[..dot])),
            false => rest.contains('.'),
        }
    }
}

fn split_name<'a>(rest: &'a str, known: &IndexSet<&str>) -> Option<(&'a str, &'a str)> {
    rest.rmatch_indices('.')
        .map(|(dot, _)| (&rest[..dot], &rest[dot + 1..]))
        .find(|(name, slot)| known.contains(name) && !slot.is_empty())
}

/// Puts a value into a dict at a place, below as many keys as its dotted text stands for.
fn nest<T: Clone>(
    key: &str,
    dict: &mut Dict<T>,
    place: &str,
    text: &str,
    value: &Tree<T>,
    types: &KeyTypes,
) -> Result<(), StateError> {
    let conflict = |kind: &str| StateError::PathConflict { key: key.to_owned(), reason: format!("{kind} is in its way") };
    let (mut dict, mut place, mut text) = (dict, place.to_owned(), text);
    loop {
        let (first, below, rest) = types.split_first(&place, text);
        let Some(rest) = rest else {
            return match dict.insert(first, value.clone()) {
                None => Ok(()),
                Some(other) => Err(conflict(other.kind())),
            };
        };
        dict = match dict.entry(first).or_insert_with(Tree::dict) {
            Tree::Dict(inner) => inner,
            other => return Err(conflict(other.kind())),
        };
        (place, text) = (below, rest);
    }
}
