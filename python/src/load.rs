//! Loading into the caller's memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use reshard::records::together;

use crate::checkpoint::{Checkpoint, StoredValue};
use crate::errors::Raise;
use crate::group::group_of;
use crate::leaves::load_state;
use crate::options::{Control, LoadOptions, Trace};
use crate::reports::load_report;
use crate::run::run;
use crate::save::own_error;

/// What to load and how: an object of the package with these attributes.
#[derive(FromPyObject)]
pub(crate) struct LoadRequest<'py> {
    checkpoint: PyRef<'py, Checkpoint>,
    /// Objects of the class `Leaf`.
    leaves: Bound<'py, PyList>,
    /// Whatever keeps the leaves' memory alive.
    owners: Py<PyAny>,
    group: Option<Bound<'py, PyAny>>,
    options: PyRef<'py, LoadOptions>,
    control: PyRef<'py, Control>,
    /// From wanted keys to stored ones, or to None for keys to leave alone.
    renames: Option<HashMap<String, Option<String>>>,
    /// Top-level entries that are wanted although they are empty here.
    parts: Vec<String>,
    /// The classes that the caller would unpickle; None trusts all.
    trusted: Option<HashSet<String>>,
    /// Says that this rank failed before it could describe anything, so that no other rank waits for it.
    failure: Option<String>,
    /// A file to which a trace of the call is added.
    trace: Option<String>,
}

/// What was loaded.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct Loaded {
    /// What is not a tensor, by wanted key.
    values: Py<PyDict>,
    /// What happened.
    report: Py<PyAny>,
}

impl LoadRequest<'_> {
    fn prepare(&mut self, py: Python<'_>, rank: usize) -> PyResult<(Trace, reshard::LoadState<'static>, reshard::LoadOptions)> {
        let trace = Trace::open(self.trace.as_deref(), rank).or_raise(py)?;
        let mut options = self.options.0.clone();
        options.control = self.control.inner.clone();
        options.parts = std::mem::take(&mut self.parts);
        options.trusted =
            self.trusted.take().map(|names| Arc::new(move |class: &str| names.contains(class)) as reshard::load::KeyFilter);
        if let Some(renames) = self.renames.take() {
            options.key_map = Some(Arc::new(move |key| match renames.get(key) {
                Some(stored) => stored.clone(),
                None => Some(key.to_owned()),
            }));
        }
        Ok((trace, load_state(&self.leaves)?, options))
    }
}

/// Loads what the leaves describe.
#[pyfunction]
pub(crate) fn load<'py>(py: Python<'py>, mut request: LoadRequest<'py>) -> PyResult<Loaded> {
    let group = group_of(request.group.as_ref())?;
    let prepared = request.prepare(py, group.rank());
    let (ready, own) = own_error(py, group.rank(), prepared, request.failure);
    let (checkpoint, owners) = (Arc::clone(&request.checkpoint.inner), request.owners);
    let result = run(py, &request.control.inner, move || {
        let (trace, mut state, options) = together(group.as_ref(), ready)?;
        let loaded = trace.around(|| reshard::load_with(group.as_ref(), &checkpoint, &mut state, &options));
        drop(owners);
        loaded
    })?;
    let loaded = match (result, own) {
        (Err(_), Some(own)) => return Err(own),
        (result, _) => result.or_raise(py)?,
    };
    let values = PyDict::new(py);
    for (key, value) in &loaded.values {
        values.set_item(key, StoredValue::new(py, value)?)?;
    }
    Ok(Loaded { values: values.unbind(), report: load_report(py, &loaded.report)?.unbind() })
}
