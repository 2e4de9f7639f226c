//! A group of ranks over a Python object: `rank`, `size`, `all_gather`, `gather`, `broadcast` and `scatter` of bytes. The
//! package fills it with torch.distributed; a single process needs none.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use reshard::group::{Callback, Collectives};
use reshard::{Group, Solo};

use crate::errors::Raise;

struct PythonCollectives {
    object: Py<PyAny>,
}

/// The group that a Python object stands for; `None` is a single process.
pub(crate) fn group_of(object: Option<&Bound<'_, PyAny>>) -> PyResult<Arc<dyn Group>> {
    let Some(object) = object else { return Ok(Arc::new(Solo)) };
    let rank: usize = object.getattr("rank")?.extract()?;
    let size: usize = object.getattr("size")?.extract()?;
    let collectives = Arc::new(PythonCollectives { object: object.clone().unbind() });
    Ok(Arc::new(Callback::new(rank, size, collectives).or_raise(object.py())?))
}

/// Runs a call into Python from whatever thread the engine is on.
pub(crate) fn call<T>(work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, String> {
    let attached = Python::try_attach(|py| work(py).map_err(|error| describe(py, &error)));
    attached.unwrap_or_else(|| Err("the Python interpreter is shutting down".into()))
}

fn describe(py: Python<'_>, error: &PyErr) -> String {
    let name = error.get_type(py).name().map_or_else(|_| "error".into(), |name| name.to_string());
    format!("{name}: {}", error.value(py))
}

fn bytes_list(list: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    let list = list.cast::<PyList>()?;
    list.iter().map(|item| Ok(item.cast::<PyBytes>()?.as_bytes().to_vec())).collect()
}

impl Collectives for PythonCollectives {
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        call(|py| bytes_list(&self.object.bind(py).call_method1("all_gather", (PyBytes::new(py, bytes),))?))
    }

    fn gather(&self, root: usize, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>, String> {
        call(|py| {
            let all = self.object.bind(py).call_method1("gather", (root, PyBytes::new(py, bytes)))?;
            if all.is_none() { Ok(None) } else { bytes_list(&all).map(Some) }
        })
    }

    fn broadcast(&self, root: usize, bytes: Option<&[u8]>) -> Result<Vec<u8>, String> {
        call(|py| {
            let bytes = bytes.map(|bytes| PyBytes::new(py, bytes));
            let received = self.object.bind(py).call_method1("broadcast", (root, bytes))?;
            Ok(received.cast::<PyBytes>()?.as_bytes().to_vec())
        })
    }

    fn scatter(&self, root: usize, parts: Option<Vec<Vec<u8>>>) -> Result<Vec<u8>, String> {
        call(|py| {
            let parts = parts.map(|parts| PyList::new(py, parts.iter().map(|part| PyBytes::new(py, part)))).transpose()?;
            let received = self.object.bind(py).call_method1("scatter", (root, parts))?;
            Ok(received.cast::<PyBytes>()?.as_bytes().to_vec())
        })
    }
}
