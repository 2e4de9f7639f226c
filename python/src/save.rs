//! Saving, now and in the background.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use reshard::records::together;
use reshard::storage::Store;
use reshard::{Group, SaveOptions, SaveState};

use crate::errors::Raise;
use crate::group::group_of;
use crate::leaves::save_state;
use crate::options::{Control, Storage, Trace, store_with};
use crate::reports::save_report;
use crate::run::run;

/// What this rank could not do before the engine was called, for the other ranks.
fn failed_before(rank: usize, detail: String) -> reshard::Error {
    reshard::Error::Group { doing: "preparing the state".into(), detail, ranks: vec![rank] }
}

/// What to save and how: an object of the package with these attributes.
#[derive(FromPyObject)]
pub(crate) struct SaveRequest<'py> {
    path: String,
    /// Objects of the class `Leaf`.
    leaves: Bound<'py, PyList>,
    /// Whatever keeps the leaves' memory alive.
    owners: Py<PyAny>,
    /// Makes a record of an object that is not plain.
    pickle: Bound<'py, PyAny>,
    group: Option<Bound<'py, PyAny>>,
    options: PyRef<'py, crate::options::SaveOptions>,
    control: PyRef<'py, Control>,
    /// Says that this rank failed before it could describe anything, so that no other rank waits for it.
    failure: Option<String>,
    storage_options: Option<Storage>,
    /// A file to which a trace of the call is added.
    trace: Option<String>,
}

type Ready = (SaveState<'static>, Arc<dyn Store>, SaveOptions);

impl SaveRequest<'_> {
    fn prepare(&mut self, py: Python<'_>, rank: usize) -> PyResult<(Trace, Ready)> {
        let trace = Trace::open(self.trace.as_deref(), rank).or_raise(py)?;
        let store = store_with(&self.path, &self.storage_options.take().unwrap_or_default().0).or_raise(py)?;
        Ok((trace, (save_state(&self.leaves, &self.pickle)?, store, self.options.watched(&self.control))))
    }

    /// Runs `work` when every rank is ready for it. Every rank hears of one that is not.
    fn run<T: Send + 'static>(
        mut self,
        py: Python<'_>,
        work: impl FnOnce(Arc<dyn Group>, Ready) -> reshard::Result<T> + Send + 'static,
    ) -> PyResult<T> {
        let group = group_of(self.group.as_ref())?;
        let prepared = self.prepare(py, group.rank());
        let (ready, own) = own_error(py, group.rank(), prepared, self.failure);
        let owners = self.owners;
        let result = run(py, &self.control.inner, move || {
            let done = together(group.as_ref(), ready).and_then(|(trace, ready)| trace.around(|| work(group, ready)));
            drop(owners);
            done
        })?;
        match (result, own) {
            (Err(_), Some(own)) => Err(own),
            (result, _) => result.or_raise(py),
        }
    }
}

/// Saves.
#[pyfunction]
pub(crate) fn save<'py>(py: Python<'py>, request: SaveRequest<'py>) -> PyResult<Bound<'py, PyAny>> {
    let report =
        request.run(py, |group, (state, store, options)| reshard::save_with(group.as_ref(), &state, &store, &options))?;
    save_report(py, &report)
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
    fn save(&self, py: Python<'_>, request: SaveRequest<'_>) -> PyResult<SaveHandle> {
        let saver = Arc::clone(&self.inner);
        let inner = request.run(py, move |group, (state, store, options)| saver.save(group, &state, store, options))?;
        Ok(SaveHandle { inner })
    }
}

/// A save under way.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct SaveHandle {
    inner: reshard::save::SaveHandle,
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
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let report = py.detach(|| self.inner.wait()).or_raise(py)?;
        save_report(py, &report)
    }
}
