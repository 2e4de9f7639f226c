//! What differs between two checkpoints, across formats and layouts.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::diff::{DiffOptions, diff};
//!
//! let (first, second) = (reshard::Checkpoint::open(path)?, reshard::Checkpoint::open(path)?);
//! let report = diff(&first, &second, &DiffOptions::default())?;
//! assert!(report.different.is_empty() && report.only_first.is_empty() && report.only_second.is_empty());
//! # Ok::<(), reshard::Error>(())
//! ```

mod elements;

use std::sync::Mutex;

pub use elements::{Tolerance, ValueDifference};
use reshard_formats::DType;
use serde::Serialize;

use crate::checkpoint::{CatalogKind, CatalogTensor, Checkpoint, LoadedValue};
use crate::control::Control;
use crate::error::Result;
use crate::health::optimizer_keys;
use crate::numbers::real_part;
use crate::select::{Selected, Selection};
use crate::stream::check_covered;
use crate::workers::Workers;

/// How to compare.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DiffOptions {
    /// Which keys of the first, and under which names.
    pub first: Selection,
    /// Which keys of the second, and under which names.
    pub second: Selection,
    /// How far elements may be apart.
    pub tolerance: Tolerance,
    /// Compare elements; else only keys, kinds, dtypes and shapes.
    pub elements: bool,
    /// To watch and to cancel.
    pub control: Control,
}

impl Default for DiffOptions {
    fn default() -> DiffOptions {
        DiffOptions {
            first: Selection::default(),
            second: Selection::default(),
            tolerance: Tolerance::default(),
            elements: true,
            control: Control::new(),
        }
    }
}

/// How one key differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
#[non_exhaustive]
pub enum KeyDifference {
    /// A tensor in one, a value in the other.
    Kind {
        /// In the first.
        first: &'static str,
        /// In the second.
        second: &'static str,
    },
    /// Another shape.
    Shape {
        /// In the first.
        first: Vec<u64>,
        /// In the second.
        second: Vec<u64>,
    },
    /// Another element type; the values are compared as numbers where both have them.
    DType {
        /// In the first.
        first: String,
        /// In the second.
        second: String,
        /// How the numbers differ; `None` when they do not, or were not compared.
        elements: Option<ValueDifference>,
    },
    /// Other elements.
    Elements(ValueDifference),
    /// Another value.
    Value {
        /// In the first.
        first: serde_json::Value,
        /// In the second.
        second: serde_json::Value,
    },
}

/// One key that is in both and differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Differing {
    /// The key.
    pub key: String,
    /// How.
    #[serde(flatten)]
    pub difference: KeyDifference,
    /// Whether it is of an optimizer's state, and no weight.
    #[serde(skip)]
    pub of_optimizer: bool,
}

impl Differing {
    /// Whether no training does this: elements that became NaN or infinite, a tensor that became all zero, or another tensor altogether.
    pub fn is_broken(&self) -> bool {
        match &self.difference {
            KeyDifference::Kind { .. } | KeyDifference::Shape { .. } => true,
            other => other.elements().is_some_and(|found| found.new_nans > 0 || found.new_infinities > 0 || found.newly_zero),
        }
    }
}

impl KeyDifference {
    /// What differs between the elements of two tensors, where they were compared.
    pub fn elements(&self) -> Option<&ValueDifference> {
        match self {
            KeyDifference::Elements(found) | KeyDifference::DType { elements: Some(found), .. } => Some(found),
            _ => None,
        }
    }
}

/// What differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DiffReport {
    /// The first checkpoint.
    pub first: String,
    /// The second.
    pub second: String,
    /// Keys that only the first has.
    pub only_first: Vec<String>,
    /// Keys that only the second has.
    pub only_second: Vec<String>,
    /// Keys that both have and that differ, in the order of the first.
    pub different: Vec<Differing>,
    /// Keys that are the same, or within the tolerance.
    pub same: u64,
}

/// How far a module's tensors moved.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModuleChange {
    /// What its keys start with.
    pub module: String,
    /// Tensors in it that differ.
    pub tensors: u64,
    /// ‖Δw‖ / ‖w‖ over these.
    pub relative_change: Option<f64>,
    /// Elements that are NaN in the second only.
    pub new_nans: u64,
    /// Tensors that are all zero in the second only.
    pub newly_zero: u64,
}

impl DiffReport {
    /// What differs, by what matters: what is no longer finite, what else broke (see [`Differing::is_broken`]), plain values, weights by
    /// how far they moved, and at last the optimizer's state, which every step changes.
    pub fn gravest_first(&self) -> Vec<&Differing> {
        let rank = |differing: &Differing| {
            let is_value = matches!(differing.difference, KeyDifference::Value { .. });
            let is_finite = differing.difference.elements().is_none_or(|found| found.new_nans == 0 && found.new_infinities == 0);
            (is_finite, !differing.is_broken(), differing.of_optimizer, !is_value)
        };
        let far = |differing: &Differing| match differing.difference.elements() {
            // What was all zero has moved farther than any share of it.
            Some(found) if found.first_l2 == Some(0.0) && found.change_l2 > Some(0.0) => f64::INFINITY,
            found => found.and_then(|found| found.relative_change).unwrap_or(0.0),
        };
        let mut all: Vec<&Differing> = self.different.iter().collect();
        all.sort_by(|a, b| rank(a).cmp(&rank(b)).then(far(b).total_cmp(&far(a))));
        all
    }

    /// The modules whose weights differ (what stands before the last dot of a key), the one that moved most first.
    pub fn modules(&self) -> Vec<ModuleChange> {
        let mut sums: indexmap::IndexMap<&str, (ModuleChange, f64, f64)> = indexmap::IndexMap::new();
        for differing in self.different.iter().filter(|differing| !differing.of_optimizer) {
            let Some(found) = differing.difference.elements() else { continue };
            let module = differing.key.rsplit_once('.').map_or("", |(module, _)| module);
            let (change, moved, all) = sums.entry(module).or_insert_with(|| {
                let (module, tensors, relative_change, new_nans, newly_zero) = (module.to_owned(), 0, None, 0, 0);
                (ModuleChange { module, tensors, relative_change, new_nans, newly_zero }, 0.0, 0.0)
            });
            change.tensors += 1;
            change.new_nans += found.new_nans;
            change.newly_zero += u64::from(found.newly_zero);
            *moved += found.change_l2.unwrap_or(0.0).powi(2);
            *all += found.first_l2.unwrap_or(0.0).powi(2);
        }
        let mut modules: Vec<ModuleChange> = sums
            .into_values()
            .map(|(change, moved, all)| {
                let ratio = (moved / all).sqrt();
                ModuleChange { relative_change: ratio.is_finite().then_some(ratio), ..change }
            })
            .collect();
        // New NaN before all else, then by how far.
        let rank = |change: &ModuleChange| (change.new_nans > 0, change.newly_zero > 0);
        modules.sort_by(|a, b| {
            let far = |change: &ModuleChange| change.relative_change.unwrap_or(f64::INFINITY);
            rank(b).cmp(&rank(a)).then(far(b).total_cmp(&far(a)))
        });
        modules
    }

    /// Whether there is no difference.
    pub fn is_same(&self) -> bool {
        self.only_first.is_empty() && self.only_second.is_empty() && self.different.is_empty()
    }
}

struct Pair<'c> {
    key: String,
    first: &'c Selected<'c>,
    second: &'c Selected<'c>,
}

/// Compares two checkpoints, block by block, all threads at once.
pub fn diff(first: &Checkpoint, second: &Checkpoint, options: &DiffOptions) -> Result<DiffReport> {
    let span = tracing::info_span!("diff", first = first.path(), second = second.path());
    let _entered = span.enter();
    let a = options.first.to_read(first)?;
    let b = options.second.to_read(second)?;
    let by_key: std::collections::HashMap<&str, &Selected<'_>> = b.iter().map(|item| (item.key.as_str(), item)).collect();
    let keys: std::collections::HashSet<&str> = a.iter().map(|item| item.key.as_str()).collect();
    let only_first = a.iter().filter(|item| !by_key.contains_key(item.key.as_str())).map(|item| item.key.clone()).collect();
    let only_second = b.iter().filter(|item| !keys.contains(item.key.as_str())).map(|item| item.key.clone()).collect();
    let pairs: Vec<Pair<'_>> = a
        .iter()
        .filter_map(|item| Some(Pair { key: item.key.clone(), first: item, second: by_key.get(item.key.as_str()).copied()? }))
        .collect();
    for pair in &pairs {
        if let (CatalogKind::Tensor(a), CatalogKind::Tensor(b)) = (&pair.first.entry.kind, &pair.second.entry.kind)
            && a.shape == b.shape
            && options.elements
        {
            options.control.expect(elements::sides(first, pair.first.stored, second, pair.second.stored)?.0.bytes());
        }
    }
    let found: Mutex<Vec<(usize, KeyDifference)>> = Mutex::new(Vec::new());
    let work: Vec<(usize, &Pair<'_>)> = pairs.iter().enumerate().collect();
    Workers::reading_any([first.store.as_ref(), second.store.as_ref()]).in_order(&work, |&(i, pair)| {
        if let Some(difference) = compare(first, second, pair, options)? {
            found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((i, difference));
        }
        Ok(())
    })?;
    let mut found = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    found.sort_by_key(|(i, _)| *i);
    let same = (pairs.len() - found.len()) as u64;
    let of_optimizer = optimizer_keys(first);
    let differing = |(i, difference)| {
        let Pair { key, first, .. } = &pairs[i];
        Differing { key: key.clone(), difference, of_optimizer: of_optimizer(first.stored) }
    };
    let different = found.into_iter().map(differing).collect();
    let (first, second) = (first.path().to_owned(), second.path().to_owned());
    Ok(DiffReport { first, second, only_first, only_second, different, same })
}

fn compare(first: &Checkpoint, second: &Checkpoint, pair: &Pair<'_>, options: &DiffOptions) -> Result<Option<KeyDifference>> {
    match (&pair.first.entry.kind, &pair.second.entry.kind) {
        (CatalogKind::Tensor(a), CatalogKind::Tensor(b)) => tensors(first, second, pair, a, b, options),
        (CatalogKind::Value(_), CatalogKind::Value(_)) => {
            let (a, b) = (first.read_value(pair.first.stored)?, second.read_value(pair.second.stored)?);
            let same = match (&a, &b) {
                (LoadedValue::Opaque { class: x, .. }, LoadedValue::Opaque { class: y, .. }) => x == y,
                (a, b) => a == b || json(a) == json(b),
            };
            Ok((!same).then(|| KeyDifference::Value { first: json(&a), second: json(&b) }))
        }
        (CatalogKind::Tensor(_), CatalogKind::Value(_)) => Ok(Some(KeyDifference::Kind { first: "tensor", second: "value" })),
        (CatalogKind::Value(_), CatalogKind::Tensor(_)) => Ok(Some(KeyDifference::Kind { first: "value", second: "tensor" })),
    }
}

fn json(value: &LoadedValue) -> serde_json::Value {
    match value {
        LoadedValue::Plain(value) => value.to_json(),
        LoadedValue::Opaque { class, .. } => serde_json::Value::String(format!("<pickled {class}>")),
    }
}

fn tensors(
    first: &Checkpoint,
    second: &Checkpoint,
    pair: &Pair<'_>,
    a: &CatalogTensor,
    b: &CatalogTensor,
    options: &DiffOptions,
) -> Result<Option<KeyDifference>> {
    if a.shape != b.shape {
        return Ok(Some(KeyDifference::Shape { first: a.shape.to_vec(), second: b.shape.to_vec() }));
    }
    let comparable = a.dtype == b.dtype || (is_number(a.dtype) && is_number(b.dtype));
    let elements = if options.elements && comparable {
        check_covered(first, pair.first.stored, a)?;
        check_covered(second, pair.second.stored, b)?;
        elements::compare(first, pair.first.stored, second, pair.second.stored, options)?
    } else {
        None
    };
    if a.dtype != b.dtype {
        let (first, second) = (a.dtype.name().to_owned(), b.dtype.name().to_owned());
        return Ok(Some(KeyDifference::DType { first, second, elements }));
    }
    Ok(elements.map(KeyDifference::Elements))
}

/// Whether elements are single numbers.
fn is_number(dtype: DType) -> bool {
    real_part(dtype) == Some(dtype)
}
