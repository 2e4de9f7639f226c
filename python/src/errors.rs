//! The engine's errors as exceptions. The classes are written in Python (`reshard._errors`), so that they pickle and can be
//! read; here a kind finds its class, and the keys, files and ranks concerned go with the message.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use reshard::error::Caller;
use reshard::mismatch::Difference;
use reshard::{Error, ErrorKind};

/// The exception of an error.
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    match exception(py, error) {
        Ok(value) => PyErr::from_value(value),
        // Only when the package around this module is damaged; the message still arrives.
        Err(problem) => {
            let raised = PyRuntimeError::new_err(error.full_text());
            raised.set_cause(py, Some(problem));
            raised
        }
    }
}

/// The class for a kind.
fn class_name(error: &Error) -> &'static str {
    if matches!(error, Error::NoSuchKey { .. }) {
        return "NoSuchKey";
    }
    match error.kind() {
        ErrorKind::NotFound => "NotFound",
        ErrorKind::AlreadyExists => "AlreadyExists",
        ErrorKind::Incomplete => "Incomplete",
        ErrorKind::Corrupt => "Corrupt",
        ErrorKind::Mismatch => "Mismatch",
        ErrorKind::Untrusted => "UntrustedPickle",
        ErrorKind::Storage => "StorageError",
        ErrorKind::Group => "GroupError",
        ErrorKind::Invalid => "InvalidInput",
        ErrorKind::Cancelled => "Cancelled",
        ErrorKind::Exhausted => "ResourceExhausted",
        ErrorKind::Internal => "InternalError",
        _ => "ReshardError",
    }
}

fn exception<'py>(py: Python<'py>, error: &Error) -> PyResult<Bound<'py, PyAny>> {
    let class = py.import("reshard._errors")?.getattr(class_name(error))?;
    let details = PyDict::new(py);
    details.set_item("keys", error.keys())?;
    details.set_item("files", error.files())?;
    details.set_item("ranks", error.ranks())?;
    details.set_item("hint", error.hint_for(Caller::Python))?;
    match error {
        Error::Mismatch(mismatch) => details.set_item("differences", differences(py, &mismatch.differences)?)?,
        Error::Untrusted { class, .. } => details.set_item("class_name", class)?,
        _ => {}
    }
    class.call((error.full_text(),), Some(&details))
}

/// Differences as dicts: what differs, the key, and both sides.
pub(crate) fn differences<'py>(py: Python<'py>, differences: &[Difference]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for difference in differences {
        let entry = PyDict::new(py);
        entry.set_item("key", difference.key())?;
        let kind = match difference {
            Difference::Missing { near, .. } => {
                entry.set_item("near", near)?;
                "missing"
            }
            Difference::Unexpected { .. } => "unexpected",
            Difference::Shape { stored, wanted, .. } => {
                entry.set_item("stored", stored)?;
                entry.set_item("wanted", wanted)?;
                "shape"
            }
            Difference::DType { stored, wanted, narrowing, .. } => {
                entry.set_item("stored", stored)?;
                entry.set_item("wanted", wanted)?;
                entry.set_item("narrowing", narrowing)?;
                "dtype"
            }
            Difference::Scaled { stored, wanted, detail, .. } => {
                entry.set_item("stored", stored)?;
                entry.set_item("wanted", wanted)?;
                entry.set_item("detail", detail)?;
                "dtype"
            }
            Difference::Kind { stored, wanted, .. } => {
                entry.set_item("stored", stored)?;
                entry.set_item("wanted", wanted)?;
                "kind"
            }
            Difference::Coverage { detail, .. } => {
                entry.set_item("detail", detail)?;
                "coverage"
            }
            _ => "other",
        };
        entry.set_item("difference", kind)?;
        entry.set_item("text", difference.to_string())?;
        list.append(entry)?;
    }
    Ok(list)
}

/// The engine's results as Python's.
pub(crate) trait Raise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> Raise<T> for reshard::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, &error))
    }
}

/// An error of this layer: what Python handed over is not valid.
pub(crate) fn invalid(py: Python<'_>, detail: impl Into<String>) -> PyErr {
    raised(py, &Error::Invalid { detail: detail.into() })
}

/// The same, about one key.
pub(crate) fn invalid_key(py: Python<'_>, key: &str, detail: impl Into<String>) -> PyErr {
    let error = invalid(py, detail);
    // The class keeps a list of keys; should it not, the message still names this one.
    let _ = error.value(py).setattr("keys", vec![key]);
    error
}
