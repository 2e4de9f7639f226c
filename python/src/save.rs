//! Saving, now and in the background.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use reshard::records::together;

use crate::errors::Raise;
use crate::group::group_of;
use crate::leaves::save_state;
use crate::options::{Control, save_options, store_at};
use crate::reports::save_report;
use crate::run::run;

/// What this rank could not do before the engine was called, for the other ranks.
fn failed_before(rank: usize, detail: String) -> reshard::Error {
    reshard::Error::Group { doing: "preparing the state".into(), detail, ranks: vec![rank] }
}

/// Saves. `leaves` are descriptions as in the module `leaves`; `owners` is whatever keeps their memory alive; `failure` says
/// that this rank failed before it could describe anything, so that no other rank waits for it.
#[pyfunction]
#[pyo3(signature = (place, leaves, owners, pickle, group, options, control, failure=None, storage_options=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn save<'py>(
    py: Python<'py>,
    place: &str,
    leaves: &Bound<'py, PyList>,
    owners: Py<PyAny>,
    pickle: &Bound<'py, PyAny>,
    group: Option<&Bound<'py, PyAny>>,
    options: &Bound<'py, PyDict>,
    control: &Control,
    failure: Option<String>,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let group = group_of(group)?;
    let prepared = prepare(py, place, leaves, pickle, options, control, storage_options);
    let (ready, own) = own_error(py, group.rank(), prepared, failure);
    let options = save_options(py, options, control).unwrap_or_default();
    let result = run(py, &control.inner, move || {
        let ready = together(group.as_ref(), ready);
        let (state, store) = ready?;
        let report = reshard::save(group.as_ref(), &state, &store, &options);
        drop(owners);
        report
    })?;
    match (result, own) {
        (Err(_), Some(own)) => Err(own),
        (result, _) => save_report(py, &result.or_raise(py)?),
    }
}

type Ready = (reshard::SaveState<'static>, Arc<dyn reshard::storage::Store>);

fn prepare<'py>(
    py: Python<'py>,
    place: &str,
    leaves: &Bound<'py, PyList>,
    pickle: &Bound<'py, PyAny>,
    options: &Bound<'py, PyDict>,
    control: &Control,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Ready> {
    save_options(py, options, control)?;
    Ok((save_state(leaves, pickle)?, store_at(py, place, storage_options)?))
}

/// Splits a rank's own exception from what the other ranks hear of it.
pub(crate) fn own_error<T>(
    py: Python<'_>,
    rank: usize,
    prepared: PyResult<T>,
    failure: Option<String>,
) -> (reshard::Result<T>, Option<PyErr>) {
    match (failure, prepared) {
        (Some(detail), _) => (Err(failed_before(rank, detail)), None),
        (None, Ok(ready)) => (Ok(ready), None),
        (None, Err(own)) => {
            let name = own.get_type(py).name().map_or_else(|_| "error".into(), |name| name.to_string());
            (Err(failed_before(rank, format!("{name}: {}", own.value(py)))), Some(own))
        }
    }
}

/// Saves in the background, one save at a time, with staging memory and plans that it keeps.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct AsyncSaver {
    inner: Arc<reshard::AsyncSaver>,
}

#[pymethods]
impl AsyncSaver {
    /// Stages at most `budget` bytes; what is beyond is written before `save` returns.
    #[new]
    fn new(budget: u64) -> AsyncSaver {
        AsyncSaver { inner: Arc::new(reshard::AsyncSaver::new(budget)) }
    }

    /// Allocates staging memory ahead of the first save.
    fn reserve(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        py.detach(|| self.inner.pool().reserve(bytes)).or_raise(py)
    }

    /// Plans and copies now, writes and publishes in the background; as `save` otherwise.
    #[pyo3(signature = (place, leaves, owners, pickle, group, options, control, failure=None, storage_options=None))]
    #[allow(clippy::too_many_arguments)]
    fn save<'py>(
        &self,
        py: Python<'py>,
        place: &str,
        leaves: &Bound<'py, PyList>,
        owners: Py<PyAny>,
        pickle: &Bound<'py, PyAny>,
        group: Option<&Bound<'py, PyAny>>,
        options: &Bound<'py, PyDict>,
        control: &Control,
        failure: Option<String>,
        storage_options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<SaveHandle> {
        let group = group_of(group)?;
        let prepared = prepare(py, place, leaves, pickle, options, control, storage_options);
        let (ready, own) = own_error(py, group.rank(), prepared, failure);
        let options = save_options(py, options, control).unwrap_or_default();
        let saver = Arc::clone(&self.inner);
        let result = run(py, &control.inner, move || {
            let (state, store) = together(group.as_ref(), ready)?;
            let handle = saver.save(group, &state, store, options);
            drop(owners);
            handle
        })?;
        match (result, own) {
            (Err(_), Some(own)) => Err(own),
            (result, _) => Ok(SaveHandle { inner: result.or_raise(py)? }),
        }
    }
}

/// A save under way.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct SaveHandle {
    inner: reshard::SaveHandle,
}

#[pymethods]
impl SaveHandle {
    /// Seconds for which the caller was kept waiting: planning and copying.
    #[getter]
    fn stall(&self) -> f64 {
        self.inner.stall().as_secs_f64()
    }

    /// Whether it has ended, well or badly.
    fn done(&self) -> bool {
        self.inner.is_done()
    }

    /// Asks it to stop. Nothing is published then, unless it already was.
    fn cancel(&self) {
        self.inner.cancel();
    }

    /// Waits until the checkpoint is durable, or failed. For a thread of its own: signals do not interrupt it.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = py.detach(|| self.inner.wait()).or_raise(py)?;
        save_report(py, &report)
    }
}
