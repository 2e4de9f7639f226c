//! Which groups and which user-defined state of a given state belong to which live optimizer, and what ids without names mean.
//! Groups are matched by their members; nothing here depends on their order or on their options.

use std::collections::BTreeMap;

use indexmap::{IndexMap, IndexSet};
use reshard_formats::Value;

use super::state::{PARAM_NAMES, USER_STATE, by_given_ids, id_of, names_by_id, same_tensor};
use crate::error::GroupDisagreement;
use crate::{Dict, Key, LiveOptimizer, Names, OptimizerState, ParamGroup, RawOptimizer, StateError, TensorLike, Tree};

/// User-defined state for each of the live optimizers, whose parameters' names are `members`, and the places of what no
/// optimizer claims. State that says whose it is goes to that optimizer; of other state there is no telling, so that every
/// optimizer gets it.
pub(crate) fn share_user_state<T: Clone>(
    common: Dict<T>,
    owned: IndexMap<String, Dict<T>>,
    members: &[Vec<Vec<String>>],
    names: &Names,
) -> (Vec<Dict<T>>, Vec<String>) {
    let mut shares = vec![common; members.len()];
    let mut unclaimed = Vec::new();
    for (name, own) in owned {
        let owner = members.iter().position(|members| members.iter().flatten().any(|m| names.primary(m) == names.primary(&name)));
        match owner.and_then(|index| shares.get_mut(index)) {
            Some(share) => share.extend(own),
            None => unclaimed.push(format!("{USER_STATE}.{name}")),
        }
    }
    (shares, unclaimed)
}

/// Options of every group of every optimizer, and the (optimizer, group) pairs that found no counterpart.
pub(crate) type MatchedGroups<T> = (Vec<Vec<Dict<T>>>, Vec<(usize, usize)>);

/// Finds the options of every live group among the given groups, by members. `members` are the names of every parameter
/// of every optimizer, by id: several where the parameter is a flat one. Also gives the groups that found no counterpart.
pub(crate) fn match_groups<T: TensorLike>(
    given: &[ParamGroup<String, T>],
    live: &[LiveOptimizer<T>],
    members: &[Vec<Vec<String>>],
    names: &Names,
) -> Result<MatchedGroups<T>, StateError> {
    let group_of: IndexMap<&str, usize> = given
        .iter()
        .enumerate()
        .flat_map(|(index, group)| group.params.iter().map(move |name| (names.primary(name), index)))
        .collect();
    let empties = match_empty_groups(given, live);
    let mut unmatched = Vec::new();
    let mut result = Vec::new();
    for (index, (optimizer, members)) in live.iter().zip(members).enumerate() {
        let mut members = members.iter();
        let mut options = Vec::new();
        for (position, group) in optimizer.param_groups.iter().enumerate() {
            let own: Vec<&str> = members.by_ref().take(group.params.len()).flatten().map(String::as_str).collect();
            // The first member to lead to a given group speaks for it in messages.
            let mut found: BTreeMap<usize, &str> = BTreeMap::new();
            for name in &own {
                if let Some(at) = group_of.get(names.primary(name)) {
                    found.entry(*at).or_insert(name);
                }
            }
            if let Some(empty) = empties.get(&(index, position)) {
                found.insert(*empty, "");
            }
            let sources: Vec<_> = found.into_iter().filter_map(|(at, name)| Some((given.get(at)?, name))).collect();
            if sources.is_empty() {
                unmatched.push((index, position));
            }
            options.push(overlay(&group.options, &sources, &own)?);
        }
        result.push(options);
    }
    Ok((result, unmatched))
}

/// Options of the given groups over those of the live group. A live key is never removed.
fn overlay<T: TensorLike>(
    live: &Dict<T>,
    sources: &[(&ParamGroup<String, T>, &str)],
    members: &[&str],
) -> Result<Dict<T>, StateError> {
    let mut options = live.clone();
    let mut origin: IndexMap<&Key, (&Tree<T>, &str)> = IndexMap::new();
    let mut disagreements = Vec::new();
    let names_key = Key::from(PARAM_NAMES);
    for (group, member) in sources {
        for (key, value) in &group.options {
            if *key == names_key {
                // Names in the order of the members: the live group's own order is what counts.
                let same_members = group.params.iter().map(String::as_str).eq(members.iter().copied());
                if !live.contains_key(&names_key) && same_members {
                    options.insert(key.clone(), value.clone());
                }
                continue;
            }
            match origin.get(key) {
                Some((first, name)) if !first.same_as(value, &same_tensor) => disagreements.push(GroupDisagreement {
                    option: key.to_string(),
                    first: ((*name).to_owned(), value_text(first)),
                    second: ((*member).to_owned(), value_text(value)),
                }),
                Some(_) => {}
                None => {
                    origin.insert(key, (value, member));
                    options.insert(key.clone(), value.clone());
                }
            }
        }
    }
    if disagreements.is_empty() { Ok(options) } else { Err(StateError::GroupDisagreement { disagreements }) }
}

/// A group without members has nothing to be recognised by but its place among the others without members, and that only
/// where there are as many of them on both sides, or where their keys tell them apart.
fn match_empty_groups<T>(given: &[ParamGroup<String, T>], live: &[LiveOptimizer<T>]) -> IndexMap<(usize, usize), usize> {
    let from: Vec<usize> = (0..given.len()).filter(|index| given[*index].params.is_empty()).collect();
    let to: Vec<(usize, usize)> = live
        .iter()
        .enumerate()
        .flat_map(|(index, optimizer)| {
            let groups = optimizer.param_groups.iter().enumerate();
            groups.filter(|(_, group)| group.params.is_empty()).map(move |(position, _)| (index, position))
        })
        .collect();
    if from.len() == to.len() {
        return to.into_iter().zip(from).collect();
    }
    let keys = |options: &Dict<T>| -> Vec<String> {
        let mut keys: Vec<String> = options.keys().map(ToString::to_string).collect();
        keys.sort();
        keys
    };
    let mut matched = IndexMap::new();
    for (index, position) in to {
        let wanted = keys(&live[index].param_groups[position].options);
        let mut fits = from.iter().filter(|at| keys(&given[**at].options) == wanted);
        if let (Some(only), None) = (fits.next(), fits.next()) {
            matched.insert((index, position), *only);
        }
    }
    matched
}

/// Reads any optimizer state for the given live optimizers: by names, by ids, nested or as digits that were ids once.
pub fn read_optimizer_state<T: TensorLike>(
    raw: RawOptimizer<T>,
    live: &[LiveOptimizer<T>],
    names: &Names,
) -> Result<OptimizerState<T>, StateError> {
    let members = raw.param_groups.iter().any(|group| !group.params.is_empty());
    if !raw.is_keyed_by_id() || (!members && raw.state.is_empty()) {
        return OptimizerState::from_named(raw, names);
    }
    let mut named: IndexMap<usize, String> = IndexMap::new();
    for group in &raw.param_groups {
        if let Some(Tree::List(listed)) = group.options.get(&Key::from(PARAM_NAMES)) {
            for (key, name) in group.params.iter().zip(listed) {
                if let (Some(id), Tree::Value(Value::Str(name))) = (id_of(key), name) {
                    named.insert(id, name.clone());
                }
            }
        }
    }
    let all_named = raw.param_groups.iter().flat_map(|group| &group.params).filter_map(id_of);
    if members && all_named.clone().count() == named.len() {
        let name = |id: usize| {
            let name = named.get(&id)?;
            match names.canonical(name) {
                [only] if names.get(name).is_none() => Some(only.clone()),
                _ => Some(name.clone()),
            }
        };
        return by_given_ids(raw, &name);
    }
    // Ids without names mean what they mean to the one live optimizer, and only if it is made the same way.
    let [optimizer] = live else {
        let reason = format!("parameter ids are ambiguous between {} optimizers", live.len());
        return Err(StateError::InvalidOptimizerState { reason });
    };
    let sizes = |groups: &mut dyn Iterator<Item = usize>| groups.collect::<Vec<_>>();
    let given_sizes = sizes(&mut raw.param_groups.iter().map(|group| group.params.len()));
    let live_sizes = sizes(&mut optimizer.param_groups.iter().map(|group| group.params.len()));
    if members && given_sizes != live_sizes {
        let reason = format!(
            "it goes by parameter ids, but its groups have {given_sizes:?} members where the optimizer's have {live_sizes:?}"
        );
        return Err(StateError::InvalidOptimizerState { reason });
    }
    let by_id = names_by_id(optimizer, names)?;
    // Ids need not be consecutive in the given state: the place of a member in its groups is what carries over.
    let order: IndexSet<usize> = raw.param_groups.iter().flat_map(|group| &group.params).filter_map(id_of).collect();
    let name = |id: usize| {
        let place = if order.is_empty() { Some(id) } else { order.get_index_of(&id) };
        place.and_then(|place| by_id.get(place).cloned())
    };
    by_given_ids(raw, &name)
}

pub(crate) fn value_text<T>(tree: &Tree<T>) -> String {
    match tree.to_value() {
        Some(value) => value.python_repr(),
        None => tree.kind().to_owned(),
    }
}
