//! Where an optimizer's state lies in a checkpoint: which keys are its own, and of which parameter and slot each is.
//!
//! `STATE.PARAM.SLOT` is PyTorch's spelling and that of most. Megatron puts the slot first (`state.exp_avg.PARAM`), its
//! buckets of all parameters lie beside (`distributed.….exp_avg`), and the parts of a low-bit slot lie below it
//! (`state.PARAM.exp_avg.codes`).

use indexmap::{IndexMap, IndexSet};

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
    "variance",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "param",
    "fp32_param",
    "master_param",
];
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

/// Looks for optimizers, in the order of their keys. Some jobs train with several: one for each of two networks, or one a kind of weight.
pub(super) fn roots<'a>(keys: impl Iterator<Item = &'a str>) -> Vec<Roots> {
    let mut found: IndexMap<&str, &str> = IndexMap::new();
    let mut with_state: IndexSet<&str> = IndexSet::new();
    for key in keys {
        if let Some((at, word)) = GROUPS.iter().find_map(|word| Some((key.find(word)?, word)))
            && (at == 0 || key[..at].ends_with('.'))
        {
            found.entry(&key[..at]).or_insert(&key[..at + word.len()]);
        }
        with_state.extend(["state.", "distributed."].iter().find_map(|word| before_part(key, word)));
    }
    let mut found: Vec<Roots> =
        found.into_iter().map(|(all, groups)| Roots { all: all.to_owned(), groups: groups.to_owned() }).collect();
    for roots in &mut found {
        // Groups of an optimizer inside an optimizer, whose state lies above.
        if let Some((first, _)) = roots.all.split_once('.')
            && is_optimizer(first)
            && !with_state.contains(roots.all.as_str())
            && with_state.contains(&roots.all[..first.len() + 1])
        {
            roots.all.truncate(first.len() + 1);
        }
    }
    for before in with_state {
        let first = before.split_once('.').filter(|(_, rest)| rest.is_empty()).map(|(first, _)| first);
        if first.is_some_and(is_optimizer) && !found.iter().any(|roots| roots.all.starts_with(before)) {
            found.push(Roots { all: before.to_owned(), groups: format!("{before}{}", GROUPS[0]) });
        }
    }
    let mut seen: IndexSet<String> = IndexSet::new();
    found.retain(|roots| seen.insert(roots.all.clone()));
    found
}

/// What stands before the first part of a key that is this word.
fn before_part<'k>(key: &'k str, word: &str) -> Option<&'k str> {
    key.match_indices(word).map(|(at, _)| &key[..at]).find(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether a name is one that optimizers have: `optim`, `optimizer_state_dict`, `optim_disc`.
fn is_optimizer(name: &str) -> bool {
    let rest = name.strip_prefix("optimizers").or_else(|| name.strip_prefix("optimizer")).or_else(|| name.strip_prefix("optim"));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_') || rest.bytes().all(|byte| byte.is_ascii_digit()))
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

    fn found(keys: &[&str]) -> Vec<(String, String)> {
        roots(keys.iter().copied()).into_iter().map(|roots| (roots.all, roots.groups)).collect()
    }

    fn root(all: &str, groups: &str) -> Vec<(String, String)> {
        vec![(all.to_owned(), groups.to_owned())]
    }

    #[test]
    fn the_root_is_what_stands_before_state_and_groups() {
        assert_eq!(found(&["model.w", "app.optim.param_groups.0.lr"]), root("app.optim.", "app.optim.param_groups"));
        assert_eq!(found(&["param_groups.0.lr", "state.0.step"]), root("", "param_groups"));
        assert_eq!(found(&["optim.state.w.step"]), root("optim.", "optim.param_groups"));
        assert_eq!(found(&["model.state.w", "model.my_param_groups"]), []);
        let nested = ["optimizer.optimizer.param_groups.0.lr", "optimizer.state.exp_avg.w"];
        assert_eq!(found(&nested), root("optimizer.", "optimizer.optimizer.param_groups"));
        let buckets = ["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"];
        assert_eq!(found(&buckets), root("optimizer.", "optimizer.param_groups"));
        let meta = ["optimizer.param_to_group_meta.w.lr", "optimizer.state.w.exp_avg"];
        assert_eq!(found(&meta), root("optimizer.", "optimizer.param_to_group_meta"));
    }

    #[test]
    fn every_optimizer_is_found() {
        let roots = |keys: &[&str]| found(keys).into_iter().map(|(all, _)| all).collect::<Vec<_>>();
        let two = ["gen.w", "optim_gen.param_groups.0.lr", "optim_gen.state.w.step", "optim_disc.state.w.step"];
        assert_eq!(roots(&two), ["optim_gen.", "optim_disc."]);
        let listed = ["optim.0.param_groups.0.lr", "optim.0.state.w.step", "optim.1.param_groups.0.lr", "optim.1.state.b.step"];
        assert_eq!(roots(&listed), ["optim.0.", "optim.1."]);
        assert_eq!(roots(&["optimism.state.w.step", "optimal_w.state.x"]), [] as [&str; 0]);
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
