//! Exchanging what parameters are called in an optimizer's state.

use indexmap::{IndexMap, IndexSet};

use crate::{Dict, Key, ParamGroup, RawOptimizer, StateError};

/// Renames the parameters of an optimizer's state by a mapping from its keys to others (ids to names, or back). Keys that
/// are not in the mapping stay if no group lists them: they are user-defined. Members come out sorted, as PyTorch's do.
pub fn rekey<T>(raw: RawOptimizer<T>, mapping: &IndexMap<Key, Key>) -> Result<RawOptimizer<T>, StateError> {
    let members: IndexSet<Key> = raw.param_groups.iter().flat_map(|group| group.params.iter().cloned()).collect();
    let target = |key: &Key| mapping.get(key).cloned();
    let mut state = Dict::new();
    for (key, slots) in raw.state {
        let to = match target(&key) {
            Some(to) => to,
            None if members.contains(&key) || matches!(key, Key::Int(_)) => {
                return Err(unknown(&key));
            }
            None => key.clone(),
        };
        if state.insert(to.clone(), slots).is_some() {
            let reason = format!("two parameters are both to be called '{to}'");
            return Err(StateError::InvalidOptimizerState { reason });
        }
    }
    let mut param_groups = Vec::with_capacity(raw.param_groups.len());
    for group in raw.param_groups {
        let params = group.params.iter().map(|key| target(key).ok_or_else(|| unknown(key)));
        let mut params: Vec<Key> = params.collect::<Result<IndexSet<_>, _>>()?.into_iter().collect();
        params.sort_by(|a, b| match (a, b) {
            (Key::Int(a), Key::Int(b)) => a.cmp(b),
            _ => a.to_string().cmp(&b.to_string()),
        });
        param_groups.push(ParamGroup { params, options: group.options });
    }
    Ok(RawOptimizer { state, param_groups, owned_state: raw.owned_state })
}

fn unknown(key: &Key) -> StateError {
    StateError::InvalidOptimizerState { reason: format!("nothing is known of the parameter '{key}'") }
}
