//! Setting optimizer state: which part of a given state belongs to which live optimizer, parameter by parameter and group
//! by group. Groups are matched by their members; nothing here depends on their order or on their options.

use std::collections::BTreeMap;

use indexmap::{IndexMap, IndexSet};
use reshard_formats::Value;

use crate::error::GroupDisagreement;
use crate::optimizer::{PARAM_NAMES, USER_STATE, by_given_ids, id_of, names_by_id, same_tensor};
use crate::{
    Dict, Key, LiveOptimizer, Names, OptimizerState, ParamGroup, RawOptimizer, StateDictOptions, StateError, TensorLike, Tree,
};

/// What one live optimizer loads: slots by its own ids, groups in its own order.
#[derive(Clone, Debug)]
pub struct OptimizerLoad<T> {
    /// Canonical names by id.
    pub names: Vec<String>,
    /// Slots by id. Only parameters that have state are here.
    pub state: IndexMap<usize, Dict<T>>,
    /// State that belongs to no parameter.
    pub user_state: Dict<T>,
    /// The live groups with the given options laid over their own.
    pub param_groups: Vec<ParamGroup<usize, T>>,
}

impl<T> OptimizerLoad<T> {
    /// As the optimizer's own `load_state_dict` takes it.
    pub fn into_raw(self) -> RawOptimizer<T> {
        let key = |id: usize| Key::Int(i64::try_from(id).unwrap_or(i64::MAX));
        let mut state: Dict<T> = self.state.into_iter().map(|(id, slots)| (key(id), Tree::Dict(slots))).collect();
        state.extend(self.user_state);
        let groups = self.param_groups.into_iter();
        let param_groups = groups
            .map(|group| ParamGroup { params: group.params.into_iter().map(key).collect(), options: group.options })
            .collect();
        RawOptimizer { state, param_groups, ..RawOptimizer::default() }
    }
}

/// How a given optimizer state met the live optimizers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptimizerReport {
    /// Live parameters that the given state does not know at all.
    pub missing: Vec<String>,
    /// Live parameters that it knows and that had no state when it was made; they have none now.
    pub absent: Vec<String>,
    /// Parameters of the given state that no live optimizer has.
    pub unexpected: Vec<String>,
    /// Live groups (optimizer, group) for which the given state has no counterpart; they keep their options.
    pub unmatched_groups: Vec<(usize, usize)>,
}

/// Distributes a given state over the live optimizers.
pub fn set_optimizer_state<T: TensorLike>(
    given: OptimizerState<T>,
    live: &[LiveOptimizer<T>],
    names: &Names,
    options: &StateDictOptions,
) -> Result<(Vec<OptimizerLoad<T>>, OptimizerReport), StateError> {
    options.check()?;
    let mut report = OptimizerReport::default();
    let mut given_state: IndexMap<String, Dict<T>> = IndexMap::new();
    for (name, slots) in given.state {
        given_state.insert(names.primary(&name).to_owned(), slots);
    }
    let group_of: IndexMap<String, usize> = given
        .param_groups
        .iter()
        .enumerate()
        .flat_map(|(index, group)| group.params.iter().map(move |name| (names.primary(name).to_owned(), index)))
        .collect();
    let mut used: IndexSet<String> = IndexSet::new();
    let mut loads = Vec::new();
    for optimizer in live {
        let by_id = names_by_id(optimizer, names)?;
        let mut state = IndexMap::new();
        for (id, name) in by_id.iter().enumerate() {
            let name = names.primary(name);
            // A parameter may be in two live optimizers; each gets its own copy of what the handle stands for.
            match given_state.get(name) {
                Some(slots) => {
                    state.insert(id, slots.clone());
                }
                None if group_of.contains_key(name) => report.absent.push(name.to_owned()),
                None => report.missing.push(name.to_owned()),
            }
            used.insert(name.to_owned());
        }
        loads.push(OptimizerLoad { names: by_id, state, user_state: Dict::new(), param_groups: Vec::new() });
    }
    let extra: IndexSet<&String> = given_state.keys().chain(group_of.keys()).filter(|name| !used.contains(*name)).collect();
    report.unexpected = extra.into_iter().cloned().collect();
    if options.strict && !report.missing.is_empty() {
        let differences =
            crate::Differences { missing: report.missing.clone(), unexpected: report.unexpected.clone(), ..Default::default() };
        differences.into_result(true)?;
    }
    let members: Vec<Vec<Vec<String>>> =
        loads.iter().map(|load| load.names.iter().map(|name| vec![name.clone()]).collect()).collect();
    let (groups, unmatched) = match_groups(&given.param_groups, live, &members, names)?;
    report.unmatched_groups = unmatched;
    for ((load, optimizer), options) in loads.iter_mut().zip(live).zip(groups) {
        let mut id = 0;
        for (group, options) in optimizer.param_groups.iter().zip(options) {
            let params = (id..id + group.params.len()).collect();
            id += group.params.len();
            load.param_groups.push(ParamGroup { params, options });
        }
    }
    let (user_states, unclaimed) = share_user_state(given.user_state, given.owned_state, &members, names);
    report.unexpected.extend(unclaimed);
    for (load, user_state) in loads.iter_mut().zip(user_states) {
        load.user_state = user_state;
    }
    Ok((loads, report))
}

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
