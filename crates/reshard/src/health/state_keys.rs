//! Where an optimizer's state lies in a checkpoint: which keys are its own, and of which parameter and slot each is.
//!
//! `STATE.PARAM.SLOT` is PyTorch's spelling and that of most. Megatron puts the slot first (`state.exp_avg.PARAM`), its
//! buckets of all parameters lie beside (`distributed.….exp_avg`), and the parts of a low-bit slot lie below it
//! (`state.PARAM.exp_avg.codes`).

use indexmap::IndexMap;

/// Slots by which a key is known to be one of state, wherever they stand in it.
const SLOTS: &[&str] = &[
    "step",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "momentum_buffer",
    "row_var",
    "col_var",
    "param",
    "fp32_param",
    "master_param",
];
/// Roots by which an optimizer is known even without param groups.
const ROOTS: &[&str] = &["optim", "optimizer", "optim_state", "optimizer_state", "optim_state_dict", "optimizer_state_dict"];
/// What the options of groups lie below: PyTorch's word, and that of Megatron's FSDP.
const GROUPS: [&str; 2] = ["param_groups", "param_to_group_meta"];

/// What the keys of an optimizer start with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Roots {
    /// All of them.
    pub(super) all: String,
    /// Those of its param groups, without the dot behind.
    pub(super) groups: String,
}

/// Looks for an optimizer.
pub(super) fn roots<'a>(keys: impl Iterator<Item = &'a str> + Clone) -> Option<Roots> {
    let by_groups = || {
        keys.clone().find_map(|key| {
            let (at, word) = GROUPS.iter().find_map(|word| Some((key.find(word)?, word)))?;
            let own = at == 0 || key[..at].ends_with('.');
            own.then(|| Roots { all: key[..at].to_owned(), groups: key[..at + word.len()].to_owned() })
        })
    };
    let by_name = || {
        keys.clone().find_map(|key| {
            let (first, rest) = key.split_once('.')?;
            let own = ROOTS.contains(&first) && (rest.starts_with("state.") || rest.starts_with("distributed."));
            own.then(|| Roots { all: format!("{first}."), groups: format!("{first}.param_groups") })
        })
    };
    let mut found = by_groups().or_else(by_name)?;
    // Groups of an optimizer inside an optimizer, whose state lies above.
    let has_state = |root: &str| keys.clone().any(|key| key.strip_prefix(root).is_some_and(|rest| rest.starts_with("state.")));
    if let Some((first, _)) = found.all.split_once('.')
        && ROOTS.contains(&first)
        && !has_state(&found.all)
    {
        found.all = format!("{first}.");
    }
    Some(found)
}

/// Whether a key is an optimizer's own.
pub(super) fn is_own(key: &str, root: &str) -> bool {
    key.strip_prefix(root).is_some_and(|rest| {
        !root.is_empty() || rest.starts_with("state.") || GROUPS.iter().any(|groups| rest.starts_with(groups))
    })
}

/// The parameter and the slot that a key of an optimizer is of.
pub(super) fn param_and_slot<'k>(key: &'k str, root: &str) -> Option<(&'k str, &'k str)> {
    let own = key.strip_prefix(root)?;
    let is_slot = |word: &str| SLOTS.contains(&word);
    let Some(rest) = own.strip_prefix("state.") else {
        return own.strip_prefix("distributed.")?.rsplit_once('.').filter(|(_, slot)| is_slot(slot));
    };
    let (before, last) = rest.rsplit_once('.')?;
    if is_slot(last) {
        return Some((before, last));
    }
    if let Some((first, param)) = rest.split_once('.').filter(|(first, _)| is_slot(first)) {
        return Some((param, first));
    }
    // A slot of several tensors.
    let below = before.match_indices('.').map(|(at, _)| at).rev().find(|at| {
        let word = &before[at + 1..];
        is_slot(word.split('.').next().unwrap_or(word))
    });
    Some(below.map_or((before, last), |at| (&rest[..at], &rest[at + 1..])))
}

/// The keys of an optimizer's state: by parameter, each slot with its key.
pub(super) fn by_param<'k>(keys: impl Iterator<Item = &'k str>, root: &str) -> IndexMap<&'k str, Vec<(&'k str, &'k str)>> {
    let mut found: IndexMap<&str, Vec<(&str, &str)>> = IndexMap::new();
    for key in keys {
        if let Some((param, slot)) = param_and_slot(key, root) {
            found.entry(param).or_default().push((slot, key));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(keys: &[&str]) -> Option<(String, String)> {
        roots(keys.iter().copied()).map(|roots| (roots.all, roots.groups))
    }

    fn root(all: &str, groups: &str) -> Option<(String, String)> {
        Some((all.to_owned(), groups.to_owned()))
    }

    #[test]
    fn the_root_is_what_stands_before_state_and_groups() {
        assert_eq!(found(&["model.w", "app.optim.param_groups.0.lr"]), root("app.optim.", "app.optim.param_groups"));
        assert_eq!(found(&["param_groups.0.lr", "state.0.step"]), root("", "param_groups"));
        assert_eq!(found(&["optim.state.w.step"]), root("optim.", "optim.param_groups"));
        assert_eq!(found(&["model.state.w", "model.my_param_groups"]), None);
        let nested = ["optimizer.optimizer.param_groups.0.lr", "optimizer.state.exp_avg.w"];
        assert_eq!(found(&nested), root("optimizer.", "optimizer.optimizer.param_groups"));
        let buckets = ["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"];
        assert_eq!(found(&buckets), root("optimizer.", "optimizer.param_groups"));
        let meta = ["optimizer.param_to_group_meta.w.lr", "optimizer.state.w.exp_avg"];
        assert_eq!(found(&meta), root("optimizer.", "optimizer.param_to_group_meta"));
    }

    #[test]
    fn parameters_and_slots_are_told_in_every_spelling() {
        for (key, param, slot) in [
            ("optim.state.layers.0.weight.exp_avg_sq", "layers.0.weight", "exp_avg_sq"),
            ("optim.state.layers.0.weight.own_slot", "layers.0.weight", "own_slot"),
            ("optim.state.exp_avg.layers.0.weight", "layers.0.weight", "exp_avg"),
            ("optim.state.param.weight.exp_avg", "param.weight", "exp_avg"),
            ("optim.state.layers.0.weight.exp_avg.codes", "layers.0.weight", "exp_avg.codes"),
            ("optim.distributed.group_0.bucket_0.exp_avg_sq", "group_0.bucket_0", "exp_avg_sq"),
        ] {
            assert_eq!(param_and_slot(key, "optim."), Some((param, slot)), "{key}");
        }
        assert_eq!(param_and_slot("optim.distributed.group_0.numel", "optim."), None);
        assert_eq!(param_and_slot("model.weight", "optim."), None);
    }
}
