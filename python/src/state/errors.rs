//! Errors of the state crate as exceptions. Setting state raises what PyTorch's own calls raise too, so the class for
//! differences is a `RuntimeError` as well (`reshard.torch.state`).

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use reshard::state::{Differences, StateError};

use crate::errors::invalid;

/// The state crate's results as Python's.
pub(super) trait RaiseState<T> {
    fn or_raise_state(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> RaiseState<T> for Result<T, StateError> {
    fn or_raise_state(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, &error))
    }
}

/// The exception of an error.
pub(super) fn raised(py: Python<'_>, error: &StateError) -> PyErr {
    match exception(py, error) {
        Ok(value) => PyErr::from_value(value),
        Err(_) => invalid(py, full_text(error)),
    }
}

/// The message with its causes.
fn full_text(error: &StateError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn exception<'py>(py: Python<'py>, error: &StateError) -> PyResult<Bound<'py, PyAny>> {
    let details = PyDict::new(py);
    let name = match error {
        StateError::Differences(differences) => {
            details.set_item("keys", keys(differences))?;
            details.set_item("differences", listed(py, differences)?)?;
            "StateMismatch"
        }
        StateError::InvalidOptions { .. } => "InvalidInput",
        StateError::UnknownName { name, .. } => {
            details.set_item("keys", vec![name])?;
            "StateError"
        }
        StateError::SlotShape { param, slot, .. } | StateError::RankDisagreement { param, slot, .. } => {
            details.set_item("keys", vec![format!("{param}.{slot}")])?;
            "StateMismatch"
        }
        StateError::Uncovered { key, .. } => {
            details.set_item("keys", vec![key])?;
            "StateIncomplete"
        }
        StateError::FlatMembers { .. } | StateError::FlatScalars { .. } | StateError::GroupDisagreement { .. } => "StateMismatch",
        _ => "StateError",
    };
    let class = py.import("reshard.torch.state._errors")?.getattr(name)?;
    class.call((full_text(error),), Some(&details))
}

fn keys(differences: &Differences) -> Vec<String> {
    let shapes = differences.shapes.iter().map(|(key, ..)| key.clone());
    let dtypes = differences.dtypes.iter().map(|(key, ..)| key.clone());
    differences.missing.iter().chain(&differences.unexpected).cloned().chain(shapes).chain(dtypes).collect()
}

/// Every difference as a dict, as the exceptions for checkpoints have them.
fn listed<'py>(py: Python<'py>, differences: &Differences) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    let entry = |kind: &str, key: &str| -> PyResult<Bound<'py, PyDict>> {
        let entry = PyDict::new(py);
        entry.set_item("difference", kind)?;
        entry.set_item("key", key)?;
        entry.set_item("text", format!("{kind}: '{key}'"))?;
        Ok(entry)
    };
    for key in &differences.missing {
        let missing = entry("missing", key)?;
        let near: Vec<&String> = differences.hints.iter().filter(|(name, _)| name == key).map(|(_, near)| near).collect();
        missing.set_item("near", near)?;
        list.append(missing)?;
    }
    for key in &differences.unexpected {
        list.append(entry("unexpected", key)?)?;
    }
    for (key, given, wanted) in &differences.shapes {
        let shape = entry("shape", key)?;
        shape.set_item("stored", given.to_vec())?;
        shape.set_item("wanted", wanted.to_vec())?;
        list.append(shape)?;
    }
    for (key, given, wanted) in &differences.dtypes {
        let dtype = entry("dtype", key)?;
        dtype.set_item("stored", given.name())?;
        dtype.set_item("wanted", wanted.name())?;
        list.append(dtype)?;
    }
    Ok(list)
}
