//! What differs from another checkpoint, as the page shows it.

use std::collections::HashMap;
use std::sync::Arc;

use reshard::checkpoint::{CatalogKind, LoadedValue};
use reshard::diff::{DiffOptions, KeyDifference, Tolerance, ValueDifference, diff};
use reshard::{Checkpoint, Control};

use crate::report::{Changed, ChangedValue, Diff, OtherTensor};

/// What to compare with, and how.
pub(crate) struct Comparison {
    /// The other checkpoint.
    pub(crate) other: Arc<Checkpoint>,
    /// What counts as the same.
    pub(crate) tolerance: Tolerance,
    /// Whether to read tensors.
    pub(crate) elements: bool,
}

impl Comparison {
    /// What is known before anything is compared.
    pub(super) fn outline(&self, first: &Checkpoint) -> Diff {
        let path = self.other.path();
        let (name_a, name_b) = super::names::apart(first.path(), path);
        let mut page = Diff {
            name_a,
            name_b,
            location: path.to_owned(),
            values_compared: self.elements,
            tolerance: (self.tolerance.absolute > 0.0).then_some(self.tolerance.absolute),
            ..Diff::default()
        };
        for entry in self.other.catalog().entries.values() {
            if let CatalogKind::Tensor(tensor) = &entry.kind {
                page.tensors += 1;
                page.bytes = page.bytes.saturating_add(tensor.bytes());
            }
        }
        page
    }

    /// Compares; `places` are those of the first one's tensors on the page.
    pub(super) fn page(&self, first: &Checkpoint, places: &HashMap<String, u32>, control: &Control) -> reshard::Result<Diff> {
        let mut options = DiffOptions::default();
        options.tolerance = self.tolerance;
        options.elements = self.elements;
        options.control = control.clone();
        let report = diff(first, &self.other, &options)?;
        let mut page = self.outline(first);
        for key in &report.only_first {
            match places.get(key.as_str()) {
                Some(number) => page.only_a.push(*number),
                None => page.plain.push(ChangedValue { key: key.clone(), a: Some(text(first, key)), b: None }),
            }
        }
        for key in &report.only_second {
            match self.other.tensor(key) {
                Ok(tensor) => page.only_b.push(OtherTensor {
                    key: key.clone(),
                    dtype: tensor.dtype.name().to_owned(),
                    shape: tensor.shape.to_vec(),
                    bytes: tensor.bytes(),
                }),
                Err(_) => page.plain.push(ChangedValue { key: key.clone(), a: None, b: Some(text(&self.other, key)) }),
            }
        }
        for differing in &report.different {
            match places.get(differing.key.as_str()) {
                Some(number) => page.changed.push(changed(*number, &differing.difference)),
                None => page.plain.push(ChangedValue {
                    key: differing.key.clone(),
                    a: Some(text(first, &differing.key)),
                    b: Some(text(&self.other, &differing.key)),
                }),
            }
        }
        Ok(page)
    }
}

fn text(checkpoint: &Checkpoint, key: &str) -> String {
    match checkpoint.read_value(key) {
        Ok(LoadedValue::Plain(value)) => value.python_repr(),
        Ok(LoadedValue::Opaque { class, .. }) => format!("<{class}>"),
        Ok(_) => String::new(),
        Err(_) => checkpoint.tensor(key).map_or_else(|_| "?".to_owned(), |tensor| format!("a {} tensor", tensor.dtype.name())),
    }
}

fn changed(tensor: u32, difference: &KeyDifference) -> Changed {
    let mut page = Changed { tensor, ..Changed::default() };
    let mut distance = |found: &ValueDifference| {
        page.max_abs = found.max_absolute;
        page.mean_abs = found.mean_absolute;
        page.max_rel = found.max_relative;
        page.mean_rel = found.mean_relative;
        page.moved = found.relative_change;
        page.cosine = found.cosine;
        page.newly_bad = found.new_nans + found.new_infinities;
        page.newly_zero = found.newly_zero;
        page.first = Some(found.first_index.clone());
    };
    match difference {
        KeyDifference::Elements(found) => distance(found),
        KeyDifference::DType { second, elements, .. } => {
            if let Some(found) = elements {
                distance(found);
            }
            page.dtype = Some(second.clone());
        }
        KeyDifference::Shape { second, .. } => page.shape = Some(second.clone()),
        KeyDifference::Kind { second, .. } => page.dtype = Some((*second).to_owned()),
        _ => {}
    }
    page
}
