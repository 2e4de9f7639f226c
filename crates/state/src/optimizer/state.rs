//! Optimizer state by canonical names, and the shapes it comes in: as an optimizer gives it (by parameter id or by name)
//! and as one tree for any number of optimizers.

use indexmap::IndexMap;
use reshard_formats::Value;

use crate::{Dict, Identity, Key, Names, StateError, TensorLike, Tree};

/// The key of the per-parameter part.
pub(crate) const STATE: &str = "state";
/// The key of the groups.
pub(crate) const PARAM_GROUPS: &str = "param_groups";
/// The key of a group's members.
pub(crate) const PARAMS: &str = "params";
/// The key of state that belongs to no parameter, by a member of the optimizer that it belongs to: there if several
/// optimizers share a tree. One alone keeps such state beside its parameters'.
pub(crate) const USER_STATE: &str = "user_state";
/// The key under which newer optimizers list their members' names beside their ids.
pub(crate) const PARAM_NAMES: &str = "param_names";

/// A param_group: its members and everything else it holds, verbatim.
#[derive(Clone, Debug)]
pub struct ParamGroup<K, T> {
    /// Members: ids, names or identities.
    pub params: Vec<K>,
    /// All other keys, known or not: `lr`, `betas`, `initial_lr`, …
    pub options: Dict<T>,
}

/// An optimizer's state as its own `state_dict` gives it.
#[derive(Clone, Debug)]
pub struct RawOptimizer<T> {
    /// Slots by parameter id (an int) or name (a string); strings that name no parameter are user-defined state.
    pub state: Dict<T>,
    /// The groups, members as in `state`.
    pub param_groups: Vec<ParamGroup<Key, T>>,
    /// User-defined state of optimizers that share the tree, by a member of each.
    pub owned_state: IndexMap<String, Dict<T>>,
}

impl<T> Default for RawOptimizer<T> {
    fn default() -> Self {
        RawOptimizer { state: Dict::new(), param_groups: Vec::new(), owned_state: IndexMap::new() }
    }
}

/// The optimizer as it is in the running program: which tensors it trains, in its own order, and its groups' options.
#[derive(Clone, Debug)]
pub struct LiveOptimizer<T> {
    /// The groups, members by identity.
    pub param_groups: Vec<ParamGroup<Identity, T>>,
}

impl<T> LiveOptimizer<T> {
    /// The members of all groups in order: the position of a member is its id.
    pub fn members(&self) -> impl Iterator<Item = Identity> + '_ {
        self.param_groups.iter().flat_map(|group| group.params.iter().copied())
    }
}

/// Optimizer state by canonical names. Presence is per (parameter, slot): what is not here was never there.
#[derive(Clone, Debug)]
pub struct OptimizerState<T> {
    /// Slots by parameter; never an empty dict.
    pub state: IndexMap<String, Dict<T>>,
    /// State that belongs to no parameter, of the only optimizer or of nobody knows which.
    pub user_state: Dict<T>,
    /// State that belongs to no parameter, of several optimizers: by the name of a parameter that each of them trains.
    pub owned_state: IndexMap<String, Dict<T>>,
    /// The groups, members by name.
    pub param_groups: Vec<ParamGroup<String, T>>,
}

impl<T> Default for OptimizerState<T> {
    fn default() -> Self {
        OptimizerState { state: IndexMap::new(), user_state: Dict::new(), owned_state: IndexMap::new(), param_groups: Vec::new() }
    }
}

fn invalid(reason: impl Into<String>) -> StateError {
    StateError::InvalidOptimizerState { reason: reason.into() }
}

impl<T> RawOptimizer<T> {
    /// Reads the tree `{"state": …, "param_groups": …}`.
    pub fn from_tree(tree: Tree<T>) -> Result<RawOptimizer<T>, StateError> {
        let Tree::Dict(mut dict) = tree else {
            return Err(invalid(format!("it is {}, not a dict", tree.kind())));
        };
        let state = match dict.shift_remove(&Key::from(STATE)) {
            Some(Tree::Dict(state)) => state,
            None if dict.contains_key(&Key::from(PARAM_GROUPS)) => Dict::new(),
            None => return Err(invalid("'state' is missing")),
            Some(other) => return Err(invalid(format!("'state' is {}, not a dict", other.kind()))),
        };
        let groups = match dict.shift_remove(&Key::from(PARAM_GROUPS)) {
            Some(Tree::List(groups) | Tree::Tuple(groups)) => groups,
            None => Vec::new(),
            Some(other) => {
                return Err(invalid(format!("'param_groups' is {}, not a list", other.kind())));
            }
        };
        let owned_state = match dict.shift_remove(&Key::from(USER_STATE)) {
            Some(Tree::Dict(owners)) => owners.into_iter().map(owned).collect::<Result<_, _>>()?,
            None => IndexMap::new(),
            Some(other) => return Err(invalid(format!("'user_state' is {}, not a dict", other.kind()))),
        };
        let param_groups = groups.into_iter().enumerate().map(|(index, group)| raw_group(index, group));
        Ok(RawOptimizer { state, param_groups: param_groups.collect::<Result<_, _>>()?, owned_state })
    }

    /// The tree of it, members last in every group as PyTorch writes them.
    pub fn into_tree(self) -> Tree<T> {
        let groups = self.param_groups.into_iter().map(|group| {
            let params = group.params.into_iter().map(|key| Tree::Value(key.to_value())).collect();
            group_tree(group.options, params)
        });
        whole_tree(self.state, groups.collect(), self.owned_state)
    }

    /// Whether parameters go by id. Numbers that went through a flattened tree come back as digits, and count.
    pub fn is_keyed_by_id(&self) -> bool {
        let mut members = self.param_groups.iter().flat_map(|group| &group.params).peekable();
        if members.peek().is_some() {
            return members.all(|key| id_of(key).is_some());
        }
        !self.state.is_empty() && self.state.keys().all(|key| id_of(key).is_some())
    }
}

fn whole_tree<T>(state: Dict<T>, groups: Vec<Tree<T>>, owned_state: IndexMap<String, Dict<T>>) -> Tree<T> {
    let mut entries = vec![(STATE, Tree::Dict(state)), (PARAM_GROUPS, Tree::List(groups))];
    if !owned_state.is_empty() {
        entries.push((USER_STATE, Tree::dict_of(owned_state.into_iter().map(|(name, own)| (name, Tree::Dict(own))))));
    }
    Tree::dict_of(entries)
}

fn owned<T>((key, value): (Key, Tree<T>)) -> Result<(String, Dict<T>), StateError> {
    match (key, value) {
        (Key::Str(name), Tree::Dict(own)) => Ok((name, own)),
        (key, other) => Err(invalid(format!("'user_state' has {} under '{key}', not a dict under a name", other.kind()))),
    }
}

fn group_tree<T>(options: Dict<T>, params: Vec<Tree<T>>) -> Tree<T> {
    let mut dict = options;
    dict.insert(Key::from(PARAMS), Tree::List(params));
    Tree::Dict(dict)
}

fn raw_group<T>(index: usize, tree: Tree<T>) -> Result<ParamGroup<Key, T>, StateError> {
    let Tree::Dict(mut options) = tree else {
        return Err(invalid(format!("param_group {index} is {}, not a dict", tree.kind())));
    };
    let params = match options.shift_remove(&Key::from(PARAMS)) {
        Some(Tree::List(params) | Tree::Tuple(params)) => params,
        // A group without members flattens to one without the key.
        None => Vec::new(),
        Some(other) => {
            return Err(invalid(format!("'params' of param_group {index} is {}", other.kind())));
        }
    };
    let params = params.into_iter().map(|param| match param {
        Tree::Value(value @ (Value::Str(_) | Value::Int(_))) => Ok(crate::key_of(value)),
        other => Err(invalid(format!("a member of param_group {index} is {}, neither id nor name", other.kind()))),
    });
    Ok(ParamGroup { params: params.collect::<Result<_, _>>()?, options })
}

/// A parameter id, if the key is one.
pub(crate) fn id_of(key: &Key) -> Option<usize> {
    match key {
        Key::Int(id) => usize::try_from(*id).ok(),
        Key::Str(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    }
}

impl<T> OptimizerState<T> {
    /// The nested tree of it.
    pub fn into_tree(self) -> Tree<T> {
        let mut state: Dict<T> = self.state.into_iter().map(|(name, slots)| (Key::Str(name), Tree::Dict(slots))).collect();
        state.extend(self.user_state);
        let groups = self.param_groups.into_iter().map(|group| {
            let params = group.params.into_iter().map(|name| Tree::Value(Value::Str(name))).collect();
            group_tree(group.options, params)
        });
        whole_tree(state, groups.collect(), self.owned_state)
    }

    /// Reads state by names. What `names` does not know and no group lists is user-defined state.
    pub fn from_named(raw: RawOptimizer<T>, names: &Names) -> Result<OptimizerState<T>, StateError> {
        let owned_state = raw.owned_state.into_iter().map(|(name, own)| (canonical(&name, names), own)).collect();
        let mut result = OptimizerState { owned_state, ..OptimizerState::default() };
        for group in raw.param_groups {
            let params = group.params.into_iter().map(|key| match key {
                Key::Str(name) => Ok(canonical(&name, names)),
                other => Err(invalid(format!("the member {other} is an id among names"))),
            });
            result.param_groups.push(ParamGroup { params: params.collect::<Result<_, _>>()?, options: group.options });
        }
        let listed: indexmap::IndexSet<String> =
            result.param_groups.iter().flat_map(|group| group.params.iter().cloned()).collect();
        for (key, value) in raw.state {
            let name = key.as_str().map(|name| canonical(name, names));
            match (name, value) {
                (Some(name), Tree::Dict(slots)) if names.get(&name).is_some() || listed.contains(&name) => {
                    result.insert_slots(name, slots)?;
                }
                (_, value) => {
                    result.user_state.insert(key, value);
                }
            }
        }
        Ok(result)
    }

    pub(crate) fn insert_slots(&mut self, name: String, slots: Dict<T>) -> Result<(), StateError> {
        // An optimizer without state leaves empty dicts behind once somebody has looked; they are no state.
        if slots.is_empty() {
            return Ok(());
        }
        if self.state.contains_key(&name) {
            return Err(invalid(format!("parameter '{name}' has its state twice")));
        }
        self.state.insert(name, slots);
        Ok(())
    }
}

/// The canonical form of a name that may come from a live model.
fn canonical(name: &str, names: &Names) -> String {
    if names.get(name).is_some() {
        return name.to_owned();
    }
    match names.canonical(name) {
        [only] => only.clone(),
        _ => name.to_owned(),
    }
}

/// The names of an optimizer's parameters by id. A parameter of a flat parameter has several names and is not one that
/// this can answer for; [`crate::FlatParameter`] can.
pub(crate) fn names_by_id<T>(live: &LiveOptimizer<T>, names: &Names) -> Result<Vec<String>, StateError> {
    live.members()
        .enumerate()
        .map(|(id, identity)| match names.of_identity(identity).as_slice() {
            [only] => Ok((*only).to_owned()),
            [] => Err(invalid(format!("parameter {id} of the optimizer is not a parameter of the model"))),
            several => Err(invalid(format!("parameter {id} of the optimizer is a flat parameter of {}", several.join(", ")))),
        })
        .collect()
}

pub(crate) fn by_given_ids<T>(
    raw: RawOptimizer<T>,
    name_of: &dyn Fn(usize) -> Option<String>,
) -> Result<OptimizerState<T>, StateError> {
    let resolve = |key: &Key| id_of(key).and_then(name_of).ok_or_else(|| invalid(format!("unknown parameter id {key}")));
    let mut result = OptimizerState { owned_state: raw.owned_state, ..OptimizerState::default() };
    for (key, value) in raw.state {
        match (id_of(&key), value) {
            (Some(_), Tree::Dict(slots)) => result.insert_slots(resolve(&key)?, slots)?,
            (_, value) => {
                result.user_state.insert(key, value);
            }
        }
    }
    for group in raw.param_groups {
        let params = group.params.iter().map(resolve).collect::<Result<_, _>>()?;
        result.param_groups.push(ParamGroup { params, options: group.options });
    }
    Ok(result)
}

/// Puts the states of several optimizers over one model into one. A parameter in two of them is an error. What belongs to
/// no parameter is kept by a parameter of its optimizer, so that each gets its own back.
pub fn combine<T: TensorLike>(states: Vec<OptimizerState<T>>) -> Result<OptimizerState<T>, StateError> {
    let mut combined = OptimizerState::default();
    let mut owners: IndexMap<String, usize> = IndexMap::new();
    let several = states.len() > 1;
    for (index, state) in states.into_iter().enumerate() {
        let members = state.param_groups.iter().flat_map(|group| group.params.iter());
        let mut own: indexmap::IndexSet<&String> = members.collect();
        own.extend(state.state.keys());
        for name in own {
            if let Some(first) = owners.insert(name.clone(), index) {
                return Err(StateError::SharedBetweenOptimizers { name: name.clone(), first, second: index });
            }
        }
        combined.owned_state.extend(state.owned_state);
        let member = state.param_groups.iter().flat_map(|group| &group.params).chain(state.state.keys()).next().cloned();
        combined.state.extend(state.state);
        if let Some(member) = member.filter(|_| several && !state.user_state.is_empty()) {
            combined.owned_state.insert(member, state.user_state);
            combined.param_groups.extend(state.param_groups);
            continue;
        }
        for (key, value) in state.user_state {
            if let Some(other) = combined.user_state.get(&key)
                && !other.same_as(&value, &same_tensor)
            {
                return Err(invalid(format!("two optimizers have different state under '{key}'")));
            }
            combined.user_state.insert(key, value);
        }
        combined.param_groups.extend(state.param_groups);
    }
    Ok(combined)
}

/// Whether two tensors are the same as far as their facts tell; single elements are compared by their bytes.
pub(crate) fn same_tensor<T: TensorLike>(a: &T, b: &T) -> bool {
    a.dtype() == b.dtype()
        && a.shape() == b.shape()
        && match (a.scalar(), b.scalar()) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        }
}
