//! The one error type of this crate. Every variant names the keys, parameters or ranks it speaks of, and where several
//! things are wrong at once all of them are listed: a caller should not have to fix one key per attempt.

use std::fmt::Write as _;

use reshard_layout::LayoutError;

/// What can be wrong with a tree, a model description or an optimizer's state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// Two leaves flatten to the same dotted key.
    #[error("two leaves flatten to the same key '{key}': {first} and {second}")]
    DuplicateKey {
        /// The dotted key.
        key: String,
        /// Path of the leaf that came first.
        first: String,
        /// Path of the leaf that collided with it.
        second: String,
    },
    /// A path runs through a leaf, or ends where another path has put a container.
    #[error("the path of '{key}' does not fit the tree: {reason}")]
    PathConflict {
        /// The flattened key whose path this is.
        key: String,
        /// What is in the way.
        reason: String,
    },
    /// A flattened key came without a path.
    #[error("there is no path for the flattened key '{key}'")]
    MissingPath {
        /// The key in question.
        key: String,
    },
    /// List indices of a flattened tree leave more gaps than any real tree has.
    #[error("list indices leave {gaps} gaps at '{key}', more than the {limit} allowed")]
    SparseList {
        /// A key under the list in question.
        key: String,
        /// How many elements would have to be invented.
        gaps: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// A tree is nested deeper than is accepted.
    #[error("the tree is nested deeper than {limit} levels")]
    TooDeep {
        /// The most levels accepted.
        limit: usize,
    },
    /// Several trees disagree about the same places.
    #[error("trees can not be merged: {}", list(conflicts, |c| format!("'{}' is in both {} and {}", c.path, c.first, c.second)))]
    MergeConflicts {
        /// Every place where they disagree.
        conflicts: Vec<MergeConflict>,
    },
    /// Options that exclude each other, or lack something they need.
    #[error("invalid options: {reason}")]
    InvalidOptions {
        /// Which rule is broken.
        reason: String,
    },
    /// A module description that no model can have.
    #[error("invalid module description: {reason}")]
    InvalidModule {
        /// What is wrong with it.
        reason: String,
    },
    /// A name that no module, parameter or buffer of the model has.
    #[error("the model has nothing called '{name}'{}", hint(nearest.as_deref()))]
    UnknownName {
        /// The name that was asked for.
        name: String,
        /// The nearest name that does exist.
        nearest: Option<String>,
    },
    /// Dropping submodule prefixes made two keys equal.
    #[error("without their submodule prefixes '{first}' and '{second}' are both called '{key}'")]
    PrefixConflict {
        /// The shortened key.
        key: String,
        /// The full name that came first.
        first: String,
        /// The full name that collided with it.
        second: String,
    },
    /// What was given does not fit what is wanted; every difference is listed.
    #[error("the state does not fit: {0}")]
    Differences(Box<crate::Differences>),
    /// The model or optimizer state is empty although it was asked for.
    #[error("the {what} state is empty, although the options ask for it")]
    Empty {
        /// Which of the two.
        what: &'static str,
    },
    /// An optimizer's state is not made the way optimizers make theirs.
    #[error("invalid optimizer state: {reason}")]
    InvalidOptimizerState {
        /// What is wrong with it.
        reason: String,
    },
    /// A parameter sits in two optimizers (or twice in one) whose states are to share a tree.
    #[error("parameter '{name}' belongs to optimizer {first} and to optimizer {second}")]
    SharedBetweenOptimizers {
        /// The parameter's canonical name.
        name: String,
        /// Index of the first optimizer.
        first: usize,
        /// Index of the second optimizer.
        second: usize,
    },
    /// Members of one param_group carry different values for the same option.
    #[error("members of one param_group disagree: {}", list(disagreements, ToString::to_string))]
    GroupDisagreement {
        /// Every option the members disagree about.
        disagreements: Vec<GroupDisagreement>,
    },
    /// Members of a flat parameter have state that can not share one flat tensor.
    #[error("the members of flat parameter '{flat}' can not share slot '{slot}': {reason}")]
    FlatMembers {
        /// The flat parameter's name.
        flat: String,
        /// The slot in question.
        slot: String,
        /// What differs, with the names of the members.
        reason: String,
    },
    /// A slot does not have the number of elements its parameter's piece has.
    #[error("slot '{slot}' of '{param}' has shape {found:?}, expected {expected:?}")]
    SlotShape {
        /// The parameter's canonical name.
        param: String,
        /// The slot.
        slot: String,
        /// Its shape.
        found: Vec<u64>,
        /// The shape its parameter asks for.
        expected: Vec<u64>,
    },
    /// What is at hand does not cover a region that is needed.
    #[error("slot '{slot}' of '{param}' is incomplete: nothing holds {region}")]
    Uncovered {
        /// The parameter's canonical name.
        param: String,
        /// The slot.
        slot: String,
        /// The first region that nothing covers.
        region: String,
    },
    /// Ranks have different things under one name that must be equal everywhere.
    #[error("ranks disagree about slot '{slot}' of '{param}': {reason}")]
    RankDisagreement {
        /// The parameter's canonical name.
        param: String,
        /// The slot.
        slot: String,
        /// What the ranks hold.
        reason: String,
    },
    /// Optimizers of some ranks lack parameters that others have; the same error on every rank.
    #[error("optimizers lack parameters: {}", list(ranks, |(rank, names)| format!("rank {rank} lacks {}", names.join(", "))))]
    MissingOnRanks {
        /// Rank, and the parameters it lacks.
        ranks: Vec<(u64, Vec<String>)>,
    },
    /// A flat parameter's description contradicts itself.
    #[error("invalid flat parameter '{name}': {reason}")]
    InvalidFlatParameter {
        /// The flat parameter's name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Geometry that can not be.
    #[error("impossible geometry of '{what}'")]
    Layout {
        /// The tensor in question.
        what: String,
        /// The layout's own words.
        #[source]
        source: LayoutError,
    },
}

/// One place at which two trees disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeConflict {
    /// Path of the place, as text.
    pub path: String,
    /// Name of the tree that had it first.
    pub first: String,
    /// Name of the tree that has it too.
    pub second: String,
}

/// One option of a param_group whose members disagree about its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupDisagreement {
    /// The option, such as `lr`.
    pub option: String,
    /// A member, and its value as text.
    pub first: (String, String),
    /// Another member, and its other value.
    pub second: (String, String),
}

impl std::fmt::Display for GroupDisagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "'{}' is {} for '{}' and {} for '{}'", self.option, self.first.1, self.first.0, self.second.1, self.second.0)
    }
}

impl StateError {
    pub(crate) fn layout(what: &str) -> impl FnOnce(LayoutError) -> StateError + use<'_> {
        move |source| StateError::Layout { what: what.to_owned(), source }
    }
}

fn hint(nearest: Option<&str>) -> String {
    nearest.map(|name| format!(" (did you mean '{name}'?)")).unwrap_or_default()
}

/// Joins a list for a message; long lists end in a count, since a model has thousands of names.
pub(crate) fn list<I>(items: &[I], text: impl Fn(&I) -> String) -> String {
    const SHOWN: usize = 20;
    let mut out = String::new();
    for (index, item) in items.iter().take(SHOWN).enumerate() {
        if index > 0 {
            out.push_str("; ");
        }
        out.push_str(&text(item));
    }
    if items.len() > SHOWN {
        let _ = write!(out, "; and {} more", items.len() - SHOWN);
    }
    out
}
