//! Tools that write a checkpoint out of others: convert, relayout, merge, edit.

use std::collections::HashMap;

use pyo3::prelude::*;
use reshard::Checkpoint;
use reshard::convert::Destination;
use reshard::edit::EditOptions;
use reshard::mesh::Layout;

use super::options::{Renames, Selecting, Texts, Writing, globs};
use crate::errors::{Raise, invalid};
use crate::options::{Storage, store_with};
use crate::reports::report;
use crate::run::run;
use crate::value::plain;

/// Writes a checkpoint in another format.
#[pyfunction]
#[pyo3(signature = (source, destination, selecting, writing, storage_options=None))]
pub(crate) fn convert<'py>(
    py: Python<'py>,
    source: String,
    destination: String,
    mut selecting: Selecting,
    writing: Writing,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let chosen = writing.options(py, &selecting)?;
    let target = writing.target(&destination, None).or_raise(py)?;
    let open = selecting.open(py, storage_options)?;
    let found = run(py, &chosen.control.clone(), move || {
        let source = Checkpoint::open_with(&source, &open)?;
        reshard::convert::convert(&source, &Destination::parse(&destination, target, &open.store)?, target, &chosen)
    })?;
    report(py, "ConvertReport", &found.or_raise(py)?)
}

/// Reshards a checkpoint for a device mesh.
#[pyfunction]
#[pyo3(signature = (source, destination, layout, selecting, writing, storage_options=None))]
pub(crate) fn relayout<'py>(
    py: Python<'py>,
    source: String,
    destination: String,
    layout: (String, Vec<String>),
    mut selecting: Selecting,
    writing: Writing,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let chosen = writing.options(py, &selecting)?;
    let layout = Layout::parse(&layout.0, &layout.1).or_raise(py)?;
    let open = selecting.open(py, storage_options)?;
    let found = run(py, &chosen.control.clone(), move || {
        let source = Checkpoint::open_with(&source, &open)?;
        reshard::relayout::relayout(&source, &store_with(&destination, &open.store)?, &layout, &chosen)
    })?;
    report(py, "ConvertReport", &found.or_raise(py)?)
}

/// Averages checkpoints.
#[pyfunction]
#[pyo3(signature = (sources, destination, weights, selecting, writing, storage_options=None))]
pub(crate) fn merge<'py>(
    py: Python<'py>,
    sources: Vec<String>,
    destination: String,
    weights: Vec<f64>,
    mut selecting: Selecting,
    writing: Writing,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let chosen = writing.options(py, &selecting)?;
    let open = selecting.open(py, storage_options)?;
    let again = open.clone();
    let opened = run(py, &chosen.control, move || {
        sources.iter().map(|path| Checkpoint::open_with(path, &again)).collect::<reshard::Result<Vec<_>>>()
    })?
    .or_raise(py)?;
    let format = opened.first().map(|source| source.catalog().format);
    let target = writing.target(&destination, format).or_raise(py)?;
    let found = run(py, &chosen.control.clone(), move || {
        let destination = Destination::parse(&destination, target, &open.store)?;
        reshard::merge::merge(&opened.iter().collect::<Vec<_>>(), &weights, &destination, target, &chosen)
    })?;
    report(py, "MergeReport", &found.or_raise(py)?)
}

/// What an edit changes.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Editing<'py> {
    drop: Option<Texts>,
    #[pyo3(default)]
    rename: Option<Renames>,
    #[pyo3(default)]
    set: Option<HashMap<String, Bound<'py, PyAny>>>,
    #[pyo3(default)]
    skip_opaque: Option<bool>,
}

/// Drops and renames keys and sets values; data of DCP is not touched.
#[pyfunction]
#[pyo3(signature = (source, destination, selecting, editing, storage_options=None))]
pub(crate) fn edit<'py>(
    py: Python<'py>,
    source: String,
    destination: String,
    mut selecting: Selecting,
    editing: Editing<'py>,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = EditOptions::default();
    chosen.drop = globs(py, editing.drop.as_ref())?;
    chosen.renames = Renames::compiled(editing.rename.as_ref(), py)?;
    chosen.skip_opaque = editing.skip_opaque.unwrap_or(chosen.skip_opaque);
    for (key, value) in editing.set.iter().flatten() {
        let Some(value) = plain(value)? else {
            return Err(invalid(py, format!("the value for {key:?} is not plain data (numbers, text, lists and dicts)")));
        };
        chosen.set.push((key.clone(), None, value));
    }
    let open = selecting.open(py, storage_options)?;
    let found = run(py, &chosen.control.clone(), move || {
        let source = Checkpoint::open_with(&source, &open)?;
        for (key, path, _) in &mut chosen.set {
            *path = reshard::edit::setting_path(&source, key);
        }
        reshard::edit::edit(&source, &store_with(&destination, &open.store)?, &chosen)
    })?;
    report(py, "EditReport", &found.or_raise(py)?)
}
