//! Verifying checkpoints and finding them in folders of steps; the tools that write and compare are below.

pub(crate) mod looking;
pub(crate) mod writing;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use reshard::{OpenOptions, Severity, Step, StepState, StepsOptions, VerifyOptions, verify_path};

use crate::errors::Raise;
use crate::options::{Control, store_options};
use crate::run::run;

/// Checks a checkpoint; returns what was checked and found.
#[pyfunction]
#[pyo3(signature = (path, data, control, storage_options=None))]
pub(crate) fn verify<'py>(
    py: Python<'py>,
    path: String,
    data: bool,
    control: &Control,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut open = OpenOptions::default();
    open.store = store_options(py, storage_options)?;
    let mut options = VerifyOptions::default();
    options.data = data;
    options.control = control.inner.clone();
    let report = run(py, &control.inner, move || verify_path(&path, &open, &options))?.or_raise(py)?;
    let dict = PyDict::new(py);
    dict.set_item("path", &report.path)?;
    dict.set_item("sound", report.is_sound())?;
    dict.set_item("format", report.format.map(|format| format.name()))?;
    dict.set_item("writer", &report.writer)?;
    dict.set_item("keys", report.keys)?;
    dict.set_item("records", report.records)?;
    dict.set_item("files", report.files)?;
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("checked", report.checked)?;
    dict.set_item("unchecked", report.unchecked)?;
    dict.set_item("indexes", report.indexes)?;
    dict.set_item("values", report.values)?;
    dict.set_item("opaque", &report.opaque)?;
    dict.set_item("data", report.data)?;
    dict.set_item("seconds", report.seconds)?;
    let findings = PyList::empty(py);
    for finding in &report.findings {
        let entry = PyDict::new(py);
        entry.set_item("severity", if finding.severity == Severity::Error { "error" } else { "warning" })?;
        entry.set_item("key", &finding.key)?;
        entry.set_item("file", &finding.file)?;
        entry.set_item("offset", finding.offset)?;
        entry.set_item("what", &finding.what)?;
        findings.append(entry)?;
    }
    dict.set_item("findings", findings)?;
    Ok(dict)
}

/// The valid steps of a folder, `(number, name)`, oldest first.
#[pyfunction]
#[pyo3(signature = (folder, deep=false, storage_options=None))]
pub(crate) fn steps(
    py: Python<'_>,
    folder: String,
    deep: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<(u64, String)>> {
    let (options, control) = steps_options(py, deep, storage_options)?;
    let found = run(py, &control, move || reshard::steps(&folder, &options))?.or_raise(py)?;
    let valid = found.into_iter().filter(|step| step.state == StepState::Valid);
    Ok(valid.filter_map(|step| step.number.map(|number| (number, step.name))).collect())
}

/// The name of the newest valid step of a folder.
#[pyfunction]
#[pyo3(signature = (folder, deep=false, storage_options=None))]
pub(crate) fn latest(
    py: Python<'_>,
    folder: String,
    deep: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Option<String>> {
    let (options, control) = steps_options(py, deep, storage_options)?;
    let found: Option<Step> = run(py, &control, move || reshard::latest(&folder, &options))?.or_raise(py)?;
    Ok(found.map(|step| step.name))
}

fn steps_options(
    py: Python<'_>,
    deep: bool,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<(StepsOptions, reshard::Control)> {
    let mut options = StepsOptions::default();
    options.store = store_options(py, storage_options)?;
    options.deep = deep;
    let control = options.control.clone();
    Ok((options, control))
}
