//! Verifying checkpoints and finding them in folders of steps; the tools that write and compare are below.

pub(crate) mod looking;
mod options;
pub(crate) mod writing;

use pyo3::prelude::*;
use reshard::OpenOptions;
use reshard::steps::{Step, StepState, StepsOptions};
use reshard::verify::{VerifyOptions, verify_path};

use crate::checkpoint::read_map;
use crate::errors::Raise;
use crate::options::Storage;
use crate::reports::verify_report;
use crate::run::run;
use crate::view::{View, views_of};

/// Checks a checkpoint; returns what was checked and found.
#[pyfunction]
#[pyo3(signature = (path, data, storage_options=None, views=None, parameter_map=None))]
pub(crate) fn verify<'py>(
    py: Python<'py>,
    path: String,
    data: bool,
    storage_options: Option<Storage>,
    views: Option<Vec<Py<View>>>,
    parameter_map: Option<String>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut open = OpenOptions::default();
    open.parameter_map = read_map(parameter_map.as_deref()).or_raise(py)?;
    open.store = storage_options.unwrap_or_default().0;
    open.views = views_of(views);
    let mut options = VerifyOptions::default();
    options.data = data;
    let report = run(py, &options.control.clone(), move || verify_path(&path, &open, &options))?.or_raise(py)?;
    verify_report(py, &report)
}

/// The valid steps of a folder, `(number, name)`, oldest first.
#[pyfunction]
#[pyo3(signature = (folder, deep=false, storage_options=None))]
pub(crate) fn steps(
    py: Python<'_>,
    folder: String,
    deep: bool,
    storage_options: Option<Storage>,
) -> PyResult<Vec<(u64, String)>> {
    let (options, control) = steps_options(deep, storage_options);
    let found = run(py, &control, move || reshard::steps::steps(&folder, &options))?.or_raise(py)?;
    let valid = found.into_iter().filter(|step| step.state == StepState::Valid);
    Ok(valid.filter_map(|step| step.number.map(|number| (number, step.name))).collect())
}

/// The name of the newest valid step of a folder.
#[pyfunction]
#[pyo3(signature = (folder, deep=false, storage_options=None))]
pub(crate) fn latest(py: Python<'_>, folder: String, deep: bool, storage_options: Option<Storage>) -> PyResult<Option<String>> {
    let (options, control) = steps_options(deep, storage_options);
    let found: Option<Step> = run(py, &control, move || reshard::steps::latest(&folder, &options))?.or_raise(py)?;
    Ok(found.map(|step| step.name))
}

fn steps_options(deep: bool, storage_options: Option<Storage>) -> (StepsOptions, reshard::Control) {
    let mut options = StepsOptions::default();
    options.store = storage_options.unwrap_or_default().0;
    options.deep = deep;
    let control = options.control.clone();
    (options, control)
}
