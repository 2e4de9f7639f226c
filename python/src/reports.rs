//! Reports. Their classes are written in Python (`reshard._reports`), so that they pickle and can be read; the fields go there by
//! their names in the engine.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use reshard::save::Phases;
use reshard::verify::VerifyReport;
use reshard::{LoadReport, SaveReport};
use serde::Serialize;
use serde_json::Value;

use crate::errors::{differences, invalid};

/// The report of a class, by the names of its fields.
pub(crate) fn report<'py>(py: Python<'py>, class: &str, report: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    built(py, class, &fields(py, report)?)
}

/// Reports of a class by key.
pub(crate) fn reports<'py>(py: Python<'py>, class: &str, reports: &impl Serialize) -> PyResult<Bound<'py, PyDict>> {
    let by_key = fields(py, reports)?;
    for (key, fields) in fields(py, reports)?.iter() {
        by_key.set_item(key, built(py, class, fields.cast::<PyDict>()?)?)?;
    }
    Ok(by_key)
}

/// The same, where two of the fields need more than their names.
pub(crate) fn save_report<'py>(py: Python<'py>, report: &SaveReport) -> PyResult<Bound<'py, PyAny>> {
    let fields = fields(py, report)?;
    fields.set_item("phases", phases(py, &report.phases)?)?;
    built(py, "SaveReport", &fields)
}

pub(crate) fn load_report<'py>(py: Python<'py>, report: &LoadReport) -> PyResult<Bound<'py, PyAny>> {
    let fields = fields(py, report)?;
    fields.set_item("phases", phases(py, &report.phases)?)?;
    fields.set_item("differences", differences(py, &report.differences)?)?;
    built(py, "LoadReport", &fields)
}

pub(crate) fn verify_report<'py>(py: Python<'py>, report: &VerifyReport) -> PyResult<Bound<'py, PyAny>> {
    let fields = fields(py, report)?;
    fields.set_item("sound", report.is_sound())?;
    built(py, "VerifyReport", &fields)
}

/// The report of a class from its fields.
pub(crate) fn built<'py>(py: Python<'py>, class: &str, fields: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
    py.import("reshard._reports")?.getattr("built")?.call1((class, fields))
}

fn phases<'py>(py: Python<'py>, phases: &Phases) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, time) in &phases.steps {
        let before: f64 = dict.get_item(name)?.map_or(Ok(0.0), |time| time.extract())?;
        dict.set_item(name, before + time.as_secs_f64())?;
    }
    Ok(dict)
}

fn fields<'py>(py: Python<'py>, report: &impl Serialize) -> PyResult<Bound<'py, PyDict>> {
    let value = serde_json::to_value(report).map_err(|error| invalid(py, format!("a report has no plain form: {error}")))?;
    Ok(object(py, &value)?.cast_into::<PyDict>()?)
}

fn object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => flag.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (_, Some(number)) => number.into_pyobject(py)?.into_any(),
            _ => number.as_f64().into_pyobject(py)?,
        },
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            PyList::new(py, items.iter().map(|item| object(py, item)).collect::<PyResult<Vec<_>>>()?)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            for (name, value) in entries {
                dict.set_item(name, object(py, value)?)?;
            }
            dict.into_any()
        }
    })
}
