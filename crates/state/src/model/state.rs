//! Reading and setting the state of a model as plans over names: which keys there are, where each of them is in the live
//! model, and which keys of a given state go where.

use indexmap::{IndexMap, IndexSet};

use super::module::{Identity, ModuleTree};
use super::names::{LeafKind, Names};
use crate::tree::below;
use crate::{Differences, Recipients, StateDictOptions, StateError, TensorFacts};

/// One entry of a model's state dict.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelEntry {
    /// Key in the state dict.
    pub key: String,
    /// Canonical name; differs from the key where submodule prefixes are dropped.
    pub name: String,
    /// Name in the live model.
    pub raw: String,
    /// What it is.
    pub kind: LeafKind,
    /// Which tensor it is.
    pub identity: Option<Identity>,
    /// Index among the members of a flat parameter.
    pub member: Option<usize>,
    /// The key under which the same tensor is stored already: this one is only another name for it.
    pub alias_of: Option<String>,
}

/// The state dict of a model, as a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelState {
    /// Entries in the order of the model's own state dict.
    pub entries: IndexMap<String, ModelEntry>,
    /// Who receives the tensors.
    pub recipients: Recipients,
    /// Whether tensors go to the CPU.
    pub cpu_offload: bool,
}

/// Plans reading the state of a model, or of some of its submodules.
pub fn get_model_state(model: &ModuleTree, submodules: &[&str], options: &StateDictOptions) -> Result<ModelState, StateError> {
    options.check()?;
    let names = Names::of(model)?;
    let prefixes = Names::submodule_prefixes(model, submodules)?;
    let mut entries: IndexMap<String, ModelEntry> = IndexMap::new();
    let mut stored: IndexMap<(Identity, Option<usize>), String> = IndexMap::new();
    for leaf in names.leaves().filter(|leaf| leaf.persistent) {
        let Some(key) = key_of(&leaf.name, &prefixes, options.keep_submodule_prefixes) else {
            continue;
        };
        if options.ignore_frozen_params && leaf.kind == LeafKind::Parameter && !leaf.requires_grad {
            continue;
        }
        let alias_of = leaf.identity.and_then(|identity| stored.get(&(identity, leaf.member)).cloned());
        if let (Some(identity), None) = (leaf.identity, &alias_of) {
            stored.insert((identity, leaf.member), key.clone());
        }
        let entry = ModelEntry {
            key: key.clone(),
            name: leaf.name.clone(),
            raw: leaf.raw.clone(),
            kind: leaf.kind,
            identity: leaf.identity,
            member: leaf.member,
            alias_of,
        };
        if let Some(first) = entries.get(&key) {
            let (first, second) = (first.name.clone(), leaf.name.clone());
            return Err(StateError::PrefixConflict { key, first, second });
        }
        entries.insert(key, entry);
    }
    Ok(ModelState { entries, recipients: options.recipients(), cpu_offload: options.cpu_offload })
}

/// The key of a name when only some submodules are asked for; None for what is outside of them.
fn key_of(name: &str, prefixes: &IndexSet<String>, keep: bool) -> Option<String> {
    if prefixes.is_empty() {
        return Some(name.to_owned());
    }
    let rest = prefixes.iter().filter_map(|prefix| below(name, prefix)).min_by_key(|rest| rest.len())?;
    Some(if keep { name.to_owned() } else { rest.to_owned() })
}

/// What goes where when a given state is set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SetModel {
    /// Given key and the entry of the model it is for. One given key may serve several aliases only once: they are one
    /// tensor, so the tie survives.
    pub assignments: Vec<(String, ModelEntry)>,
    /// Missing and unexpected keys, and where facts were given, shapes and dtypes that differ.
    pub differences: Differences,
}

/// Plans setting a model's state from the given keys, which are canonical names (or names as the live model has them).
/// `facts` gives what is known of a given tensor; where it gives nothing, nothing is compared.
pub fn set_model_state<'a>(
    model: &ModuleTree,
    given: impl IntoIterator<Item = &'a str>,
    facts: impl Fn(&str) -> Option<TensorFacts>,
    options: &StateDictOptions,
) -> Result<SetModel, StateError> {
    options.check()?;
    let names = Names::of(model)?;
    let plan = get_model_state(model, &[], &StateDictOptions { ignore_frozen_params: false, ..options.clone() })?;
    let given: IndexSet<&str> = given.into_iter().collect();
    options.check_given(Some(given.len()), None, false)?;
    if let Some(key) = given.iter().find(|key| key.split('.').any(|segment| segment == "_flat_param")) {
        let reason = format!("'{key}' names a flat parameter; only its members have names of their own");
        return Err(StateError::InvalidModule { reason });
    }
    let mut used: IndexSet<&str> = IndexSet::new();
    let mut result = SetModel::default();
    let mut filled: IndexSet<(Identity, Option<usize>)> = IndexSet::new();
    for (key, entry) in &plan.entries {
        let leaf = names.get(&entry.name);
        let candidates = [entry.name.as_str(), entry.raw.as_str()];
        let aliases = names.aliases(&entry.name).iter().map(String::as_str);
        let own = candidates.into_iter().find(|name| given.contains(*name) && (entry.member.is_none() || *name != entry.raw));
        let found = own.or_else(|| aliases.into_iter().find(|name| given.contains(*name)));
        let frozen = entry.kind == LeafKind::Parameter && leaf.is_some_and(|leaf| !leaf.requires_grad);
        let Some(found) = found.and_then(|name| given.get(name).copied()) else {
            if !(options.ignore_frozen_params && frozen) {
                result.differences.missing.push(key.clone());
            }
            continue;
        };
        used.insert(found);
        if let (Some(have), Some(want)) = (facts(found), leaf.and_then(|leaf| leaf.facts.as_ref())) {
            if have.shape != want.shape {
                result.differences.shapes.push((found.to_owned(), have.shape, want.shape.clone()));
            } else if have.dtype != want.dtype {
                result.differences.dtypes.push((found.to_owned(), have.dtype, want.dtype));
            }
        }
        if let Some(identity) = entry.identity
            && !filled.insert((identity, entry.member))
        {
            continue;
        }
        result.assignments.push((found.to_owned(), entry.clone()));
    }
    let extra = given.iter().filter(|key| !used.contains(*key)).map(|key| (*key).to_owned());
    result.differences.unexpected = extra.collect();
    result.differences = result.differences.into_result(options.strict)?;
    Ok(result)
}
