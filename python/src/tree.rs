//! Nested containers from flattened keys, by the engine's own rule.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};
use reshard::state::{Dict, Key, Tree, unflatten_entries};
use reshard::{KeyPath, PathSegment};

use crate::errors::invalid;
use crate::value::to_python;

/// A path as a tuple of names and indices.
pub(crate) fn path_tuple<'py>(py: Python<'py>, path: &KeyPath) -> PyResult<Bound<'py, PyTuple>> {
    let segments = path.iter().map(|segment| match segment {
        PathSegment::Key(key) => PyString::new(py, key).into_any(),
        PathSegment::Index(index) => PyInt::new(py, *index).into_any(),
    });
    PyTuple::new(py, segments.collect::<Vec<_>>())
}

/// The other way.
pub(crate) fn key_path(tuple: &Bound<'_, PyTuple>) -> PyResult<KeyPath> {
    tuple
        .iter()
        .map(|segment| match segment.cast::<PyString>() {
            Ok(text) => Ok(PathSegment::Key(text.to_str()?.to_owned())),
            Err(_) => segment.extract().map(PathSegment::Index),
        })
        .collect()
}

/// Builds nested dicts and lists from `(key, path, leaf)`.
#[pyfunction]
pub(crate) fn unflatten<'py>(
    py: Python<'py>,
    entries: Vec<(String, Bound<'py, PyTuple>, Bound<'py, PyAny>)>,
) -> PyResult<Bound<'py, PyDict>> {
    let entries = entries
        .into_iter()
        .map(|(key, path, leaf)| Ok((key, key_path(&path)?, Tree::Tensor(leaf))))
        .collect::<PyResult<Vec<_>>>()?;
    let nested = unflatten_entries(entries).map_err(|error| invalid(py, error.to_string()))?;
    dict(py, nested)
}

fn dict<'py>(py: Python<'py>, nested: Dict<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyDict>> {
    let built = PyDict::new(py);
    for (key, below) in nested {
        let key = match key {
            Key::Str(text) => PyString::new(py, &text).into_any(),
            Key::Int(number) => PyInt::new(py, number).into_any(),
            Key::Other(value) => to_python(py, &value)?,
        };
        built.set_item(key, tree(py, below)?)?;
    }
    Ok(built)
}

fn tree<'py>(py: Python<'py>, tree_: Tree<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyAny>> {
    Ok(match tree_ {
        Tree::Tensor(leaf) => leaf,
        Tree::Value(value) => to_python(py, &value)?,
        Tree::Dict(below) => dict(py, below)?.into_any(),
        Tree::List(items) => PyList::new(py, items.into_iter().map(|i| tree(py, i)).collect::<PyResult<Vec<_>>>()?)?.into_any(),
        Tree::Tuple(items) => PyTuple::new(py, items.into_iter().map(|i| tree(py, i)).collect::<PyResult<Vec<_>>>()?)?.into_any(),
        Tree::Opaque(opaque) => return Err(invalid(py, format!("a {} has no place here", opaque.class))),
    })
}
