//! Which keys belong to one parameter: the parameter itself, its average, its optimizer's slots and settings.

use super::rules::Rules;
use crate::select::{LEADING_SLOTS, MODEL_PARTS, below_optimizer};

/// Averages of a model, beside it.
const AVERAGES: &[&str] = &["ema", "ema_model", "model_ema", "ema_state_dict"];

/// What settings of parameter groups lie below: PyTorch's word, and that of Megatron's FSDP.
const GROUPS: [&str; 2] = ["param_groups.", "param_to_group_meta."];

/// What a key is of its parameter: the key is `before`, the parameter's name and `after`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Family {
    pub(super) kind: FamilyKind,
    pub(super) before: String,
    pub(super) after: String,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FamilyKind {
    /// The parameter itself, or an average of it.
    Parameter,
    /// One of the optimizer's slots for it.
    Slot(String),
    /// A setting of the parameter's group.
    Setting,
}

impl Family {
    /// The key of a parameter of this name.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}{name}{}", self.before, self.after)
    }
}

/// The words that stand before parameters' names.
pub(super) struct Families {
    prefixes: Vec<String>,
    optimizers: Vec<String>,
}

impl Families {
    pub(super) fn new(rules: &Rules) -> Families {
        let dotted = |word: &str| if word.is_empty() || word.ends_with('.') { word.to_owned() } else { format!("{word}.") };
        let usual = MODEL_PARTS.iter().chain(AVERAGES).copied();
        let prefixes = rules.prefixes.iter().map(String::as_str).chain(usual).map(dotted).collect();
        Families { prefixes, optimizers: rules.optimizers.iter().map(String::as_str).map(dotted).collect() }
    }

    /// The word for an optimizer that a key begins with, with its dot, and what follows.
    fn optimizer<'k>(&self, key: &'k str) -> Option<(&'k str, &'k str)> {
        let told = |word: &String| Some(key.split_at(key.starts_with(word.as_str()).then_some(word.len())?));
        let usual = || below_optimizer(key).map(|(word, below)| (&key[..=word.len()], below));
        self.optimizers.iter().find_map(told).or_else(usual)
    }

    /// What a key may be, and the parameter's name, the likelier first.
    pub(super) fn of<'k>(&self, key: &'k str) -> Vec<(Family, &'k str)> {
        if let Some((optimizer, below)) = self.optimizer(key) {
            if let Some(rest) = below.strip_prefix("state.") {
                return slots(&format!("{optimizer}state."), rest);
            }
            if let Some(word) = GROUPS.iter().find(|word| below.starts_with(**word)) {
                let Some((name, last)) = below[word.len()..].rsplit_once('.') else { return Vec::new() };
                let family =
                    Family { kind: FamilyKind::Setting, before: format!("{optimizer}{word}"), after: format!(".{last}") };
                return vec![(family, name)];
            }
        }
        let parameter = |before: &str| Family { kind: FamilyKind::Parameter, before: before.to_owned(), after: String::new() };
        let mut found = vec![(parameter(""), key)];
        for prefix in &self.prefixes {
            if let Some(name) = key.strip_prefix(prefix.as_str()).filter(|name| !name.is_empty()) {
                found.push((parameter(prefix), name));
            }
        }
        found
    }

    /// Whether a key names parameters: a list of parameter groups, or the list of a group's parameters.
    pub(super) fn is_group_list(&self, key: &str) -> bool {
        let rest = self.optimizer(key).and_then(|(_, below)| below.strip_prefix("param_groups"));
        rest.is_some_and(|rest| {
            let number = rest.strip_prefix('.').and_then(|rest| rest.strip_suffix(".params"));
            rest.is_empty() || number.is_some_and(|number| number.parse::<u64>().is_ok())
        })
    }
}

/// What a key of an optimizer's state may be, below the words before it: the slot stands first in Megatron's, last in all others.
fn slots<'k>(before: &str, rest: &'k str) -> Vec<(Family, &'k str)> {
    let kind = |slot: &str| FamilyKind::Slot(slot.to_owned());
    let first = rest.split_once('.').filter(|(slot, _)| LEADING_SLOTS.contains(slot));
    let last = rest.rsplit_once('.');
    let first =
        first.map(|(slot, name)| (Family { kind: kind(slot), before: format!("{before}{slot}."), after: String::new() }, name));
    // A module may be called as a slot is.
    let sure = last.is_some_and(|(_, slot)| LEADING_SLOTS.contains(&slot));
    let last = last.map(|(name, slot)| (Family { kind: kind(slot), before: before.to_owned(), after: format!(".{slot}") }, name));
    if sure { last.into_iter().chain(first).collect() } else { first.into_iter().chain(last).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_parameters_are_told_from_their_settings() {
        let families = Families::new(&Rules::default());
        for key in ["optim.param_groups", "optim.param_groups.0.params", "optimizer.param_groups.12.params"] {
            assert!(families.is_group_list(key), "{key}");
        }
        assert!(families.is_group_list("optimizer_0.param_groups.1.params"));
        for key in ["optim.param_groups.0.lr", "optim.param_groups.layer.params", "model.param_groups", "optim.state.a.params"] {
            assert!(!families.is_group_list(key), "{key}");
        }
    }

    #[test]
    fn slots_stand_behind_parameters_or_before_them() {
        let families = Families::new(&Rules { optimizers: vec!["app.adam".to_owned()], ..Rules::default() });
        let found = |key: &'static str| -> Vec<(String, &str)> {
            let what = |kind: &FamilyKind| match kind {
                FamilyKind::Parameter => String::new(),
                FamilyKind::Slot(slot) => slot.clone(),
                FamilyKind::Setting => "setting".to_owned(),
            };
            families.of(key).into_iter().map(|(family, name)| (what(&family.kind), name)).collect()
        };
        let one = |kind: &str, name| vec![(kind.to_owned(), name)];
        for key in ["optim.state.a.w.exp_avg", "optimizer_1.state.a.w.exp_avg", "app.adam.state.a.w.exp_avg"] {
            assert_eq!(found(key), one("exp_avg", "a.w"), "{key}");
        }
        assert_eq!(found("optimizer.state.exp_avg.a.w"), [("exp_avg".to_owned(), "a.w"), ("w".to_owned(), "exp_avg.a")]);
        assert_eq!(found("optim.state.param.w.exp_avg")[0], ("exp_avg".to_owned(), "param.w"));
        assert_eq!(found("optimizer.param_to_group_meta.a.w.lr"), one("setting", "a.w"));
        assert_eq!(found("optimizer_x.state.a.w.exp_avg"), one("", "optimizer_x.state.a.w.exp_avg"));
    }
}
