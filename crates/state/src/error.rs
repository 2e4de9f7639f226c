//! The one error type of this crate. Every variant names the keys, parameters or ranks it speaks of, and where several
//! things are wrong at once all of them are listed: a caller should not have to fix one key per attempt.

use std::fmt::{self, Write as _};

use reshard_formats::DType;
use reshard_layout::{Dims, LayoutError};

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
    #[error("the flattened key '{key}' has no path")]
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
    Differences(Box<Differences>),
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
    /// Members of a flat parameter have state that cannot share one flat tensor.
    #[error("the members of flat parameter '{flat}' cannot share slot '{slot}': {reason}")]
    FlatMembers {
        /// The flat parameter's name.
        flat: String,
        /// The slot in question.
        slot: String,
        /// What differs, with the names of the members.
        reason: String,
    },
    /// Members of a flat parameter have different numbers where the flat parameter has one. In PyTorch's words, which programs
    /// look for.
    #[error(
        "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype: \
         slot '{slot}' of flat parameter '{flat}': {reason}"
    )]
    FlatScalars {
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
    #[error("'{key}' is incomplete: nothing holds {region}")]
    Uncovered {
        /// What is needed; of a slot, the parameter's canonical name comes first.
        key: String,
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

impl fmt::Display for GroupDisagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// Every difference between two sets of named things.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Wanted, not given.
    pub missing: Vec<String>,
    /// Given, not wanted.
    pub unexpected: Vec<String>,
    /// Missing names with the unexpected name that looks most like them.
    pub hints: Vec<(String, String)>,
    /// Given with another shape: key, given, wanted.
    pub shapes: Vec<(String, Dims, Dims)>,
    /// Given with another dtype: key, given, wanted.
    pub dtypes: Vec<(String, DType, DType)>,
}

impl Differences {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.shapes.is_empty() && self.dtypes.is_empty()
    }

    /// The error, if differences are not allowed. Shapes and dtypes never are: no leniency makes them fit.
    pub fn into_result(mut self, strict: bool) -> Result<Differences, StateError> {
        let fits = self.shapes.is_empty() && self.dtypes.is_empty();
        if fits && (self.is_empty() || !strict) {
            return Ok(self);
        }
        self.find_hints();
        Err(StateError::Differences(Box::new(self)))
    }

    fn find_hints(&mut self) {
        // Quadratic in the number of names that differ: worth it for a typo, not for two unrelated models.
        if self.missing.len().saturating_mul(self.unexpected.len()) > 10_000 {
            return;
        }
        self.hints = self
            .missing
            .iter()
            .filter_map(|name| {
                let near = crate::near::nearest(name, self.unexpected.iter().map(String::as_str))?;
                Some((name.clone(), near))
            })
            .collect();
    }
}

/// With the words of `nn.Module.load_state_dict`, which people search logs for.
impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            let names = list(&self.missing, |name| {
                let hint = self.hints.iter().find(|(missing, _)| missing == name);
                match hint {
                    Some((_, near)) => format!("'{name}' (there is '{near}')"),
                    None => format!("'{name}'"),
                }
            });
            parts.push(format!("Missing key(s) in state_dict: {names}"));
        }
        if !self.unexpected.is_empty() {
            let names = list(&self.unexpected, |name| format!("'{name}'"));
            parts.push(format!("Unexpected key(s) in state_dict: {names}"));
        }
        if !self.shapes.is_empty() {
            let shapes = list(&self.shapes, |(key, given, wanted)| {
                format!("size mismatch for '{key}': it has shape {:?}, wanted {:?}", given.as_slice(), wanted.as_slice())
            });
            parts.push(shapes);
        }
        if !self.dtypes.is_empty() {
            let dtypes =
                list(&self.dtypes, |(key, given, wanted)| format!("'{key}' is {}, wanted {}", given.name(), wanted.name()));
            parts.push(dtypes);
        }
        f.write_str(&parts.join("; "))
    }
}
