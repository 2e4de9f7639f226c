//! Which keys are the model's, and what the model itself calls them.
//!
//! A model lies below a key of its own (`{"model": …, "optim": …}`), or its keys lie at the top level: Hugging Face's
//! files, torchtitan's and Megatron's checkpoints. In the first case the key above is no part of a parameter's name.

use reshard_formats::PathSegment;

use super::{Part, part_by_path, part_of};
use crate::checkpoint::{CatalogEntry, CatalogKind, Checkpoint};

/// What lies beside a model at the top level and is neither it nor an optimizer.
const OTHER_PARTS: &[&str] = &[
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "schedulers",
    "train_state",
    "trainer",
    "dataloader",
    "data_loader",
    "rng",
    "rng_state",
    "metrics",
    "_reshard",
];

/// How parts are told apart in one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By the containers that keys sit in.
    Paths,
    /// By the first word of keys: the format knows no containers.
    Words,
    /// The model has no container: it is what is nothing else.
    Top,
}

/// A part of one checkpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartOf {
    part: Part,
    way: Way,
    /// A bare optimizer's state dict, whose keys are `state` and `param_groups`.
    bare_optimizer: bool,
}

fn first_word(key: &str) -> &str {
    key.split('.').next().unwrap_or(key)
}

impl PartOf {
    pub(super) fn of(part: Part, checkpoint: &Checkpoint) -> PartOf {
        let entries = &checkpoint.catalog().entries;
        let bare_optimizer = entries.keys().any(|key| first_word(key) == "param_groups");
        let top = PartOf { part, way: Way::Top, bare_optimizer };
        if part == Part::All {
            return top;
        }
        let by_path = |wanted: Part| entries.values().any(|entry| part_by_path(entry) == Some(wanted));
        if by_path(part) || (part == Part::Optimizer && by_path(Part::Model)) {
            return PartOf { way: Way::Paths, ..top };
        }
        if part == Part::Optimizer {
            return PartOf { way: Way::Words, ..top };
        }
        // `model.` before every key of a file without an optimizer is a word of the model's own, as in Hugging Face's.
        let has_optimizer = entries.keys().any(|key| part_of(first_word(key)) == Some(Part::Optimizer));
        let of_model = |(key, entry): (&String, &CatalogEntry)| {
            !matches!(entry.kind, CatalogKind::Tensor(_))
                || !top.is_top(key, entry)
                || part_of(first_word(key)) == Some(Part::Model)
        };
        let way = if has_optimizer && entries.iter().all(of_model) { Way::Words } else { Way::Top };
        PartOf { way, ..top }
    }

    /// What the part itself calls a key; `None` for one that is not in it.
    pub(super) fn name<'k>(&self, key: &'k str, entry: &CatalogEntry) -> Option<&'k str> {
        match (self.part, self.way) {
            (Part::All, _) => Some(key),
            (part, Way::Paths) => {
                (part_by_path(entry) == Some(part)).then(|| if part == Part::Model { below_part(key, entry) } else { key })
            }
            (part, Way::Words) => {
                if part_of(first_word(key)) != Some(part) {
                    return None;
                }
                if part == Part::Model { key.split_once('.').map(|(_, rest)| rest) } else { Some(key) }
            }
            (_, Way::Top) => {
                let state = matches!(entry.kind, CatalogKind::Tensor(_)) || key.ends_with("_extra_state");
                (state && self.is_top(key, entry)).then_some(key)
            }
        }
    }

    fn is_top(&self, key: &str, entry: &CatalogEntry) -> bool {
        let word = first_word(key);
        let optimizer = part_of(word) == Some(Part::Optimizer) || part_by_path(entry) == Some(Part::Optimizer);
        !(optimizer || OTHER_PARTS.contains(&word) || (self.bare_optimizer && matches!(word, "state" | "param_groups")))
    }
}

/// A key without the containers down to that of its part.
fn below_part<'k>(key: &'k str, entry: &CatalogEntry) -> &'k str {
    let mut rest = key;
    for segment in entry.path.as_deref().unwrap_or_default() {
        let PathSegment::Key(word) = segment else { return key };
        let Some(shorter) = rest.strip_prefix(word.as_str()).and_then(|rest| rest.strip_prefix('.')) else { return key };
        rest = shorter;
        if part_of(word).is_some() {
            return rest;
        }
    }
    key
}
