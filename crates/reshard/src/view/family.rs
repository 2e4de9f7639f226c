//! Which keys belong to one parameter: the parameter itself, its average, its optimizer's slots and settings.

use super::rules::Rules;
use crate::select::{MODEL_PARTS, OPTIMIZER_PARTS};

/// Averages of a model, beside it.
const AVERAGES: &[&str] = &["ema", "ema_model", "model_ema", "ema_state_dict"];

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
        let optimizers = rules.optimizers.iter().map(String::as_str).chain(OPTIMIZER_PARTS.iter().copied()).map(dotted);
        Families { prefixes, optimizers: optimizers.collect() }
    }

    /// What a key may be, and the parameter's name, the likelier first.
    pub(super) fn of<'k>(&self, key: &'k str) -> Vec<(Family, &'k str)> {
        for optimizer in &self.optimizers {
            let Some(below) = key.strip_prefix(optimizer.as_str()) else { continue };
            let state = below.strip_prefix("state.").map(|rest| (rest, "state."));
            let found = state.or_else(|| below.strip_prefix("param_groups.").map(|rest| (rest, "param_groups.")));
            let Some((rest, word)) = found else { continue };
            let Some((name, last)) = rest.rsplit_once('.') else { return Vec::new() };
            let kind = if word == "state." { FamilyKind::Slot(last.to_owned()) } else { FamilyKind::Setting };
            return vec![(Family { kind, before: format!("{optimizer}{word}"), after: format!(".{last}") }, name)];
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
        let groups = |optimizer: &String| key.strip_prefix(optimizer.as_str())?.strip_prefix("param_groups");
        self.optimizers.iter().filter_map(groups).any(|rest| {
            let number = rest.strip_prefix('.').and_then(|rest| rest.strip_suffix(".params"));
            rest.is_empty() || number.is_some_and(|number| number.parse::<u64>().is_ok())
        })
    }
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
        for key in ["optim.param_groups.0.lr", "optim.param_groups.layer.params", "model.param_groups", "optim.state.a.params"] {
            assert!(!families.is_group_list(key), "{key}");
        }
    }
}
