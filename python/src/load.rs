//! Loading into the caller's memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use reshard::LoadedValue;
use reshard::records::together;

use crate::checkpoint::{Checkpoint, opened};
use crate::errors::Raise;
use crate::group::group_of;
use crate::leaves::load_state;
use crate::options::{Control, load_options, store_options};
use crate::reports::load_report;
use crate::run::run;
use crate::save::own_error;
use crate::value::to_python;

/// Loads what `leaves` describe, from a path or an opened checkpoint. Returns values by wanted key, each `(object, None)`,
/// or `(class, record)` for one that only unpickling could bring back; and the report. `renames` maps wanted keys to stored
/// ones, or to `None` for keys to leave alone. `trusted` are the classes that the caller would unpickle; `None` trusts all.
#[pyfunction]
#[pyo3(signature = (source, leaves, owners, group, options, control, renames=None, trusted=None, failure=None, storage_options=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn load<'py>(
    py: Python<'py>,
    source: &Bound<'py, PyAny>,
    leaves: &Bound<'py, PyList>,
    owners: Py<PyAny>,
    group: Option<&Bound<'py, PyAny>>,
    options: &Bound<'py, PyDict>,
    control: &Control,
    renames: Option<HashMap<String, Option<String>>>,
    trusted: Option<HashSet<String>>,
    failure: Option<String>,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>)> {
    let group = group_of(group)?;
    let prepared = prepare(py, source, leaves, options, control, renames, trusted, storage_options);
    let (ready, own) = own_error(py, group.rank(), prepared, failure);
    let result = run(py, &control.inner, move || {
        let ready = ready.and_then(|(from, state, options)| {
            let checkpoint = match from {
                From::Opened(checkpoint) => checkpoint,
                From::Path(path, store) => Arc::new(opened(&path, store)?),
            };
            Ok((checkpoint, state, options))
        });
        let (checkpoint, mut state, options) = together(group.as_ref(), ready)?;
        let loaded = reshard::load_with(group.as_ref(), &checkpoint, &mut state, &options);
        drop(owners);
        loaded
    })?;
    let loaded = match (result, own) {
        (Err(_), Some(own)) => return Err(own),
        (result, _) => result.or_raise(py)?,
    };
    let values = PyDict::new(py);
    for (key, value) in &loaded.values {
        match value {
            LoadedValue::Plain(value) => values.set_item(key, (to_python(py, value)?, py.None()))?,
            LoadedValue::Opaque { class, record, .. } => values.set_item(key, (class, PyBytes::new(py, record)))?,
            _ => values.set_item(key, ("unknown", PyBytes::new(py, &[])))?,
        }
    }
    Ok((values, load_report(py, &loaded.report)?))
}

/// Where to load from.
enum From {
    Opened(Arc<reshard::Checkpoint>),
    Path(String, reshard::storage::StoreOptions),
}

type Ready = (From, reshard::LoadState<'static>, reshard::LoadOptions);

#[allow(clippy::too_many_arguments)]
fn prepare<'py>(
    py: Python<'py>,
    source: &Bound<'py, PyAny>,
    leaves: &Bound<'py, PyList>,
    options: &Bound<'py, PyDict>,
    control: &Control,
    renames: Option<HashMap<String, Option<String>>>,
    trusted: Option<HashSet<String>>,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Ready> {
    let mut options = load_options(py, options, control)?;
    options.trusted = trusted.map(|names| Arc::new(move |class: &str| names.contains(class)) as reshard::KeyFilter);
    if let Some(renames) = renames {
        options.key_map = Some(Arc::new(move |key| match renames.get(key) {
            Some(stored) => stored.clone(),
            None => Some(key.to_owned()),
        }));
    }
    let from = match source.cast::<Checkpoint>() {
        Ok(checkpoint) => From::Opened(Arc::clone(&checkpoint.get().inner)),
        Err(_) => From::Path(source.extract()?, store_options(py, storage_options)?),
    };
    Ok((from, load_state(leaves)?, options))
}
