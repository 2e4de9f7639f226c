//! An opened checkpoint: its keys, its tensors' shapes and chunks, slices of them, and its values.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use reshard::layout::Region;
use reshard::records::together;
use reshard::storage::StoreOptions;
use reshard::{CatalogEntry, CatalogKind, ChunkPlace, DType, LoadedValue, OpenOptions, ValuePlace};

use crate::errors::{Raise, invalid};
use crate::group::group_of;
use crate::leaves::{Filled, dims};
use crate::options::{storage, store_at, store_options, store_with};
use crate::run::run;
use crate::tree::path_tuple;
use crate::value::to_python;

/// The element types, by code.
#[pyfunction]
pub(crate) fn dtype_names() -> Vec<&'static str> {
    DType::ALL.iter().map(|dtype| dtype.name()).collect()
}

/// The bytes of an element, by code.
#[pyfunction]
pub(crate) fn dtype_sizes() -> Vec<u64> {
    DType::ALL.iter().map(|dtype| dtype.size()).collect()
}

/// Whether a finished checkpoint lies at a path: its `.metadata` is there, which is published last.
#[pyfunction]
#[pyo3(signature = (path, storage_options=None))]
pub(crate) fn is_complete(py: Python<'_>, path: &str, storage_options: Option<&Bound<'_, PyDict>>) -> PyResult<bool> {
    let store = store_at(py, path, storage_options)?;
    py.detach(|| store.exists(".metadata")).map_err(|source| storage(path, source)).or_raise(py)
}

/// Opens a path.
pub(crate) fn opened(path: &str, store: StoreOptions) -> reshard::Result<reshard::Checkpoint> {
    let mut options = OpenOptions::default();
    options.store = store;
    reshard::Checkpoint::open_with(path, &options)
}

/// A checkpoint on disk or in an object store, of any format.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct Checkpoint {
    pub(crate) inner: Arc<reshard::Checkpoint>,
}

#[pymethods]
impl Checkpoint {
    /// Opens what lies at a path. With a group, all its ranks open it, and one that cannot is an error on all. A name of
    /// metadata other than `.metadata` opens a DCP folder by that.
    #[new]
    #[pyo3(signature = (path, storage_options=None, group=None, metadata=None))]
    fn new(
        py: Python<'_>,
        path: String,
        storage_options: Option<&Bound<'_, PyDict>>,
        group: Option<&Bound<'_, PyAny>>,
        metadata: Option<String>,
    ) -> PyResult<Checkpoint> {
        let options = store_options(py, storage_options)?;
        let group = group_of(group)?;
        let control = reshard::Control::new();
        let open = move || match metadata {
            None => opened(&path, options),
            Some(name) => reshard::Checkpoint::open_metadata(store_with(&path, &options)?, &name),
        };
        let inner = run(py, &control, move || together(group.as_ref(), open().map(Arc::new)))?.or_raise(py)?;
        Ok(Checkpoint { inner })
    }

    #[getter]
    fn path(&self) -> &str {
        self.inner.path()
    }

    #[getter]
    fn format(&self) -> &'static str {
        self.inner.catalog().format.name()
    }

    #[getter]
    fn writer(&self) -> &str {
        &self.inner.catalog().writer
    }

    #[getter]
    fn save_id(&self) -> Option<&str> {
        self.inner.catalog().save_id.as_deref()
    }

    #[getter]
    fn dcp_version(&self) -> Option<&str> {
        self.inner.catalog().dcp_version.as_deref()
    }

    #[getter]
    fn files(&self) -> Vec<String> {
        self.inner.catalog().files.clone()
    }

    #[getter]
    fn notes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let notes = PyDict::new(py);
        for (name, note) in &self.inner.catalog().notes {
            notes.set_item(name, note)?;
        }
        Ok(notes)
    }

    fn __len__(&self) -> usize {
        self.inner.catalog().entries.len()
    }

    fn __contains__(&self, key: &str) -> bool {
        self.inner.catalog().entries.contains_key(key)
    }

    /// All keys, in the order of the file.
    fn keys(&self) -> Vec<&str> {
        self.inner.keys().collect()
    }

    /// What a key is: `(path, dtype, shape, requires_grad, chunks)`, or `(path, None, None, False, None)` for a value.
    /// A chunk is `(offsets, sizes, file, offset, length)`; the last two are `None` where it has no record of its own.
    fn entry<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyTuple>> {
        described(py, key, self.inner.entry(key).or_raise(py)?)
    }

    /// `(key, entry)` of every key, in one go.
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for (key, entry) in &self.inner.catalog().entries {
            list.append((key, described(py, key, entry)?))?;
        }
        Ok(list)
    }

    /// Where a value's record lies: `(file, offset, length)`, or `None` where it has none.
    fn value_place(&self, py: Python<'_>, key: &str) -> PyResult<Option<(u32, u64, u64)>> {
        Ok(match &self.inner.entry(key).or_raise(py)?.kind {
            CatalogKind::Value(ValuePlace::Record { file, offset, length }) => Some((*file, *offset, *length)),
            _ => None,
        })
    }

    /// Refuses to read a region that would take far more than what is stored of its tensor.
    fn check_region(&self, py: Python<'_>, key: &str, offsets: &Bound<'_, PyAny>, sizes: &Bound<'_, PyAny>) -> PyResult<()> {
        let region = Region::new(&dims(offsets)?, &dims(sizes)?).map_err(|error| invalid(py, error.to_string()))?;
        self.inner.check_region(key, &region).or_raise(py)
    }

    /// Reads a region of a tensor into a contiguous buffer of bytes, in row-major order.
    fn read_into(
        &self,
        py: Python<'_>,
        key: String,
        offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let region = Region::new(&dims(offsets)?, &dims(sizes)?).map_err(|error| invalid(py, error.to_string()))?;
        let mut target = Filled::new(buffer)?;
        let checkpoint = Arc::clone(&self.inner);
        let control = reshard::Control::new();
        run(py, &control, move || checkpoint.read_bytes_into(&key, &region, target.bytes()))?.or_raise(py)
    }

    /// Reads a plain value; one that needs unpickling is an error that names its class.
    fn value<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyAny>> {
        let value = py.detach(|| self.inner.value(key)).or_raise(py)?;
        to_python(py, &value)
    }

    /// Reads a value: `(object, None)`, or `(class, record)` for one that only unpickling could bring back.
    fn value_or_record<'py>(&self, py: Python<'py>, key: &str) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyBytes>>)> {
        match py.detach(|| self.inner.read_value(key)).or_raise(py)? {
            LoadedValue::Plain(value) => Ok((to_python(py, &value)?, None)),
            LoadedValue::Opaque { class, record, .. } => {
                Ok((class.into_pyobject(py)?.into_any(), Some(PyBytes::new(py, &record))))
            }
            _ => Err(invalid(py, format!("{key:?} is of a kind that this version does not know"))),
        }
    }

    /// The records of values, for a reader that unpickles: made anew for plain data, with no classes; as they lie in their
    /// files for anything else, with all that unpickling would import.
    fn value_records<'py>(&self, py: Python<'py>, keys: Vec<String>) -> PyResult<Vec<(Vec<String>, Bound<'py, PyBytes>)>> {
        let records = py.detach(|| self.inner.value_records(&keys)).or_raise(py)?;
        Ok(records.into_iter().map(|(classes, record)| (classes, PyBytes::new(py, &record))).collect())
    }
}

/// What a `torch.save` record holds: `(object, None)` for plain data, otherwise `(class, classes)`: what unpickling it would
/// import. Nothing is run.
#[pyfunction]
pub(crate) fn decode_record<'py>(py: Python<'py>, record: Vec<u8>) -> PyResult<(Bound<'py, PyAny>, Option<Vec<String>>)> {
    match py.detach(|| reshard::decode_record(record)).or_raise(py)? {
        LoadedValue::Plain(value) => Ok((to_python(py, &value)?, None)),
        LoadedValue::Opaque { class, classes, .. } => Ok((class.into_pyobject(py)?.into_any(), Some(classes))),
        _ => Err(invalid(py, "a record of a kind that this version does not know")),
    }
}

fn described<'py>(py: Python<'py>, key: &str, entry: &CatalogEntry) -> PyResult<Bound<'py, PyTuple>> {
    let path = match &entry.path {
        Some(path) => path_tuple(py, path)?,
        None => PyTuple::new(py, [key])?,
    };
    let CatalogKind::Tensor(tensor) = &entry.kind else {
        return (path, py.None(), py.None(), false, py.None()).into_pyobject(py);
    };
    let chunks = PyList::empty(py);
    for chunk in &tensor.chunks {
        let place = match &chunk.place {
            ChunkPlace::Record { offset, length, .. } => Some((*offset, *length)),
            _ => None,
        };
        let region = (PyTuple::new(py, chunk.region.offsets())?, PyTuple::new(py, chunk.region.sizes())?);
        chunks.append((region.0, region.1, chunk.file, place.map(|p| p.0), place.map(|p| p.1)))?;
    }
    (path, tensor.dtype.name(), PyTuple::new(py, &tensor.shape)?, tensor.requires_grad, chunks).into_pyobject(py)
}
