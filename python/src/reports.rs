//! Reports as dicts; the package makes objects of them that print well.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use reshard::{LoadReport, Phases, SaveReport};

use crate::errors::differences;

fn phases<'py>(py: Python<'py>, phases: &Phases) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, time) in &phases.steps {
        let before: f64 = dict.get_item(name)?.map_or(Ok(0.0), |time| time.extract())?;
        dict.set_item(name, before + time.as_secs_f64())?;
    }
    Ok(dict)
}

pub(crate) fn save_report<'py>(py: Python<'py>, report: &SaveReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", &report.path)?;
    dict.set_item("save_id", &report.save_id)?;
    dict.set_item("phases", phases(py, &report.phases)?)?;
    dict.set_item("bytes", report.bytes)?;
    dict.set_item("total_bytes", report.total_bytes)?;
    dict.set_item("records", report.records)?;
    dict.set_item("files", report.files)?;
    dict.set_item("imbalance", report.imbalance)?;
    dict.set_item("plan_cached", report.plan_cached)?;
    dict.set_item("warnings", &report.warnings)?;
    Ok(dict)
}

pub(crate) fn load_report<'py>(py: Python<'py>, report: &LoadReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", &report.path)?;
    dict.set_item("phases", phases(py, &report.phases)?)?;
    dict.set_item("tensors", report.tensors)?;
    dict.set_item("bytes_wanted", report.bytes_wanted)?;
    dict.set_item("bytes_read", report.bytes_read)?;
    dict.set_item("reads", report.reads)?;
    dict.set_item("files", report.files)?;
    dict.set_item("verified", report.verified)?;
    dict.set_item("differences", differences(py, &report.differences)?)?;
    let casts = PyList::empty(py);
    for cast in &report.casts {
        let entry = PyDict::new(py);
        entry.set_item("key", &cast.key)?;
        entry.set_item("from", &cast.from)?;
        entry.set_item("to", &cast.to)?;
        entry.set_item("narrowing", cast.narrowing)?;
        casts.append(entry)?;
    }
    dict.set_item("casts", casts)?;
    Ok(dict)
}
