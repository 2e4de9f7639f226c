//! Nested containers from flattened keys, by the engine's own rule.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};
use reshard::formats::{KeyPath, PathSegment};
use reshard::state::{Dict, Key, KeyTypes, Tree, key_of, unflatten_entries};

use crate::errors::invalid;
use crate::value::{plain, to_python};

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

/// Builds nested dicts and lists from `(key, path, leaf)`. Paths know only text; `key_types`, as the function of that name
/// gives them, say which keys were something else.
#[pyfunction]
#[pyo3(signature = (entries, key_types=None))]
pub(crate) fn unflatten<'py>(
    py: Python<'py>,
    entries: Vec<(String, Bound<'py, PyTuple>, Bound<'py, PyAny>)>,
    key_types: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let entries = entries
        .into_iter()
        .map(|(key, path, leaf)| Ok((key, key_path(&path)?, Tree::Tensor(leaf))))
        .collect::<PyResult<Vec<_>>>()?;
    let mut nested = unflatten_entries(entries).map_err(|error| invalid(py, error.to_string()))?;
    if let Some(noted) = key_types {
        let types = plain(noted)?.as_ref().and_then(KeyTypes::from_value);
        nested = types.ok_or_else(|| invalid(py, "the note on types of keys is not one"))?.restore(nested);
    }
    dict(py, nested)
}

/// The keys of nested dicts that their text does not give back, as one plain value; None if there are none. Of `values`, the
/// parts of the same tree whose containers are values, also the containers of which flattening leaves nothing.
#[pyfunction]
#[pyo3(signature = (state, values=None))]
pub(crate) fn key_types<'py>(
    py: Python<'py>,
    state: &Bound<'py, PyDict>,
    values: Option<&Bound<'py, PyDict>>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let mut types = KeyTypes::of(&keys_of(state)?);
    if let Some(values) = values {
        types.note_values("", &keys_of(values)?);
    }
    if types.is_empty() { Ok(None) } else { Ok(Some(to_python(py, &types.to_value())?)) }
}

/// The dicts of a tree, without anything that is in them.
fn keys_of(dict: &Bound<'_, PyDict>) -> PyResult<Dict<()>> {
    let below = |value: Bound<'_, PyAny>| skeleton(&value);
    dict.iter().map(|(key, value)| Ok((key_from(&key)?, below(value)?))).collect()
}

fn skeleton(value: &Bound<'_, PyAny>) -> PyResult<Tree<()>> {
    if let Ok(dict) = value.cast::<PyDict>() {
        return Ok(Tree::Dict(keys_of(dict)?));
    }
    match value.cast_exact::<PyList>() {
        Ok(list) => Ok(Tree::List(list.iter().map(|item| skeleton(&item)).collect::<PyResult<_>>()?)),
        Err(_) => Ok(Tree::Tensor(())),
    }
}

/// A dict key.
pub(crate) fn key_from(key: &Bound<'_, PyAny>) -> PyResult<Key> {
    match plain(key)? {
        Some(value) => Ok(key_of(value)),
        None => Err(invalid(key.py(), format!("a {} can not be a key of a state dict", key.get_type().qualname()?))),
    }
}

/// The object of a dict key.
pub(crate) fn key_object<'py>(py: Python<'py>, key: &Key) -> PyResult<Bound<'py, PyAny>> {
    Ok(match key {
        Key::Str(text) => PyString::new(py, text).into_any(),
        Key::Int(number) => PyInt::new(py, *number).into_any(),
        Key::Other(value) => to_python(py, value)?,
    })
}

fn dict<'py>(py: Python<'py>, nested: Dict<Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyDict>> {
    let built = PyDict::new(py);
    for (key, below) in nested {
        built.set_item(key_object(py, &key)?, tree(py, below)?)?;
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
