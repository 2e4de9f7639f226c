//! Loading into the caller's memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use reshard::records::{per_rank_key, together};
use reshard::{CatalogKind, LoadedValue};

use crate::checkpoint::{Checkpoint, opened};
use crate::errors::Raise;
use crate::group::group_of;
use crate::leaves::{load_state, value_keys};
use crate::options::{Control, load_options, store_options};
use crate::reports::load_report;
use crate::run::run;
use crate::save::own_error;
use crate::value::to_python;

/// Loads what `leaves` describe, from a place or an opened checkpoint. Returns values by wanted key, each `(object, None)`,
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
    let rank = group.rank();
    let values = if trusted.is_some() { value_keys(leaves)? } else { Vec::new() };
    let prepared = prepare(py, source, leaves, options, control, renames, storage_options);
    let (ready, own) = own_error(py, group.rank(), prepared, failure);
    let result = run(py, &control.inner, move || {
        let ready = ready.and_then(|(from, state, options)| {
            let checkpoint = match from {
                From::Opened(checkpoint) => checkpoint,
                From::Place(place, store) => Arc::new(opened(&place, store)?),
            };
            if let Some(trusted) = &trusted {
                check_trusted(&checkpoint, &values, rank, &options, trusted)?;
            }
            Ok((checkpoint, state, options))
        });
        let (checkpoint, mut state, options) = together(group.as_ref(), ready)?;
        let loaded = reshard::load(group.as_ref(), &checkpoint, &mut state, &options);
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
            LoadedValue::Opaque { class, record } => values.set_item(key, (class, PyBytes::new(py, record)))?,
            _ => values.set_item(key, ("unknown", PyBytes::new(py, &[])))?,
        }
    }
    Ok((values, load_report(py, &loaded.report)?))
}

/// Values that only unpickling could bring back are found before any tensor is touched.
fn check_trusted(
    checkpoint: &reshard::Checkpoint,
    wanted: &[(String, bool)],
    rank: usize,
    options: &reshard::LoadOptions,
    trusted: &HashSet<String>,
) -> reshard::Result<()> {
    for (key, per_rank) in wanted {
        let stored = options.key_map.as_ref().map_or_else(|| Some(key.clone()), |map| map(key));
        let Some(mut stored) = stored else { continue };
        if *per_rank {
            stored = per_rank_key(&stored, rank);
        }
        // What is missing or is a tensor is for the load to complain about.
        let Ok(CatalogKind::Value(_)) = checkpoint.entry(&stored).map(|entry| &entry.kind) else { continue };
        if let LoadedValue::Opaque { class, .. } = checkpoint.read_value(&stored)?
            && !trusted.contains(&class)
        {
            return Err(reshard::Error::Untrusted { place: checkpoint.place().to_owned(), key: key.clone(), class });
        }
    }
    Ok(())
}

/// Where to load from.
enum From {
    Opened(Arc<reshard::Checkpoint>),
    Place(String, reshard::storage::StoreOptions),
}

type Ready = (From, reshard::LoadState<'static>, reshard::LoadOptions);

fn prepare<'py>(
    py: Python<'py>,
    source: &Bound<'py, PyAny>,
    leaves: &Bound<'py, PyList>,
    options: &Bound<'py, PyDict>,
    control: &Control,
    renames: Option<HashMap<String, Option<String>>>,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Ready> {
    let mut options = load_options(py, options, control)?;
    if let Some(renames) = renames {
        options.key_map = Some(Arc::new(move |key| match renames.get(key) {
            Some(stored) => stored.clone(),
            None => Some(key.to_owned()),
        }));
    }
    let from = match source.cast::<Checkpoint>() {
        Ok(checkpoint) => From::Opened(Arc::clone(&checkpoint.get().inner)),
        Err(_) => From::Place(source.extract()?, store_options(py, storage_options)?),
    };
    Ok((from, load_state(leaves)?, options))
}
