//! An opened checkpoint: its keys, its tensors' shapes and chunks, slices of them, and its values.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use reshard::checkpoint::{CatalogEntry, CatalogKind, CatalogTensor, ChunkLocation, LoadedValue, ValueLocation};
use reshard::records::together;
use reshard::storage::StoreOptions;
use reshard::{DType, OpenOptions};

use crate::errors::{Raise, invalid, raised};
use crate::geometry::region;
use crate::group::group_of;

use crate::leaves::{Filled, Numbers};
use crate::options::{Storage, storage, store_with};
use crate::reports::report;
use crate::run::run;
use crate::tree::path_tuple;
use crate::value::to_python;
use crate::view::{View, views_of};

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
pub(crate) fn is_complete(py: Python<'_>, path: &str, storage_options: Option<Storage>) -> PyResult<bool> {
    let store = store_with(path, &storage_options.unwrap_or_default().0).or_raise(py)?;
    py.detach(|| store.exists(".metadata")).map_err(|source| storage(path, source)).or_raise(py)
}

/// The map of parameters in a file.
pub(crate) fn read_map(file: Option<&str>) -> reshard::Result<Option<Arc<reshard::ParameterMap>>> {
    Ok(file.map(reshard::ParameterMap::read).transpose()?.map(Arc::new))
}

/// Opens a path.
pub(crate) fn opened(
    path: &str,
    store: StoreOptions,
    views: Vec<reshard::view::View>,
    parameter_map: Option<&str>,
) -> reshard::Result<reshard::Checkpoint> {
    let mut options = OpenOptions::default();
    options.store = store;
    options.views = views;
    options.parameter_map = read_map(parameter_map)?;
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
    /// metadata other than `.metadata` opens a DCP folder by that; `model_rank` opens the parts of one tensor parallel rank in
    /// the folder of a DeepSpeed tag.
    #[new]
    #[pyo3(signature = (
        path, storage_options=None, group=None, metadata=None, views=None, parameter_map=None, model_rank=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "all but one are named in Python")]
    fn new(
        py: Python<'_>,
        path: String,
        storage_options: Option<Storage>,
        group: Option<&Bound<'_, PyAny>>,
        metadata: Option<String>,
        views: Option<Vec<Py<View>>>,
        parameter_map: Option<String>,
        model_rank: Option<u64>,
    ) -> PyResult<Checkpoint> {
        let views = views_of(views);
        let options = storage_options.unwrap_or_default().0;
        let group = group_of(group)?;
        let control = reshard::Control::new();
        let open = move || match (metadata, model_rank) {
            (None, None) => opened(&path, options, views, parameter_map.as_deref()),
            (None, Some(rank)) => reshard::Checkpoint::open_model_rank(store_with(&path, &options)?, rank),
            (Some(name), _) => {
                let stored = reshard::Checkpoint::open_metadata(store_with(&path, &options)?, &name)?;
                views.iter().try_fold(stored, reshard::Checkpoint::through)
            }
        };
        let inner = run(py, &control, move || together(group.as_ref(), open().map(Arc::new)))?.or_raise(py)?;
        Ok(Checkpoint { inner })
    }

    /// What a view would make of it, from metadata alone.
    fn check_view<'py>(&self, py: Python<'py>, view: &View) -> PyResult<Bound<'py, PyAny>> {
        let found = py.detach(|| view.inner.check(&self.inner)).or_raise(py)?;
        report(py, "ViewReport", &found)
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

    /// What a key is.
    fn entry(&self, py: Python<'_>, key: &str) -> PyResult<Entry> {
        match self.inner.catalog().entries.get_index_of(key) {
            Some(index) => Ok(Entry { checkpoint: Arc::clone(&self.inner), index }),
            None => Err(self.inner.entry(key).err().map_or_else(|| invalid(py, format!("no key {key:?}")), |e| raised(py, &e))),
        }
    }

    /// Every key's, in the order of the file.
    fn entries(&self) -> Vec<Entry> {
        let count = self.inner.catalog().entries.len();
        (0..count).map(|index| Entry { checkpoint: Arc::clone(&self.inner), index }).collect()
    }

    /// Refuses to read a region that would take far more than what is stored of its tensor.
    fn check_region(&self, py: Python<'_>, key: &str, offsets: Numbers, sizes: Numbers) -> PyResult<()> {
        let region = region(py, &offsets.0, &sizes.0)?;
        self.inner.check_region(key, &region).or_raise(py)
    }

    /// Reads a region of a tensor into a contiguous buffer of bytes, in row-major order.
    fn read_into(
        &self,
        py: Python<'_>,
        key: String,
        offsets: Numbers,
        sizes: Numbers,
        buffer: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let region = region(py, &offsets.0, &sizes.0)?;
        let mut target = Filled::new(buffer)?;
        let checkpoint = Arc::clone(&self.inner);
        let control = reshard::Control::new();
        run(py, &control, move || checkpoint.read_bytes_into(&key, &region, target.bytes()))?.or_raise(py)
    }

    /// Reads a record as it lies in its file, for a caller who can undo what it was stored through.
    fn stored_record(&self, py: Python<'_>, key: String, file: String, offset: u64, length: u64) -> PyResult<Py<PyBytes>> {
        let checkpoint = Arc::clone(&self.inner);
        let control = reshard::Control::new();
        let record = run(py, &control, move || checkpoint.stored_record(&key, &file, offset, length))?.or_raise(py)?;
        Ok(PyBytes::new(py, &record).unbind())
    }

    /// Reads a plain value; one that needs unpickling is an error that names its class.
    fn value<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyAny>> {
        let value = py.detach(|| self.inner.value(key)).or_raise(py)?;
        to_python(py, &value)
    }

    /// Reads a value of any kind.
    fn stored_value(&self, py: Python<'_>, key: &str) -> PyResult<StoredValue> {
        StoredValue::new(py, &py.detach(|| self.inner.read_value(key)).or_raise(py)?)
    }

    /// The records of values, for a reader that unpickles: made anew for plain data, with no classes; as they lie in their
    /// files for anything else, with all that unpickling would import.
    fn value_records(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<Vec<ValueRecord>> {
        let records = py.detach(|| self.inner.value_records(&keys)).or_raise(py)?;
        let record =
            |(classes, record): (Vec<String>, Vec<u8>)| ValueRecord { classes, record: PyBytes::new(py, &record).unbind() };
        Ok(records.into_iter().map(record).collect())
    }
}

/// The record of a value, and the classes that unpickling it would import.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct ValueRecord {
    classes: Vec<String>,
    record: Py<PyBytes>,
}

/// A stored value: plain data, or the class and the record of what only unpickling could bring back.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct StoredValue {
    /// The value, of plain data.
    value: Py<PyAny>,
    /// The class of what is not plain data.
    class_name: Option<String>,
    /// All classes that unpickling it would import.
    classes: Vec<String>,
    /// Its record; empty where it has none of its own.
    record: Option<Py<PyBytes>>,
}

impl StoredValue {
    pub(crate) fn new(py: Python<'_>, value: &LoadedValue) -> PyResult<StoredValue> {
        Ok(match value {
            LoadedValue::Plain(value) => {
                StoredValue { value: to_python(py, value)?.unbind(), class_name: None, classes: Vec::new(), record: None }
            }
            LoadedValue::Opaque { class, classes, record, .. } => StoredValue {
                value: py.None(),
                class_name: Some(class.clone()),
                classes: classes.clone(),
                record: Some(PyBytes::new(py, record).unbind()),
            },
            _ => return Err(invalid(py, "a value of a kind that this version does not know")),
        })
    }
}

/// What a `torch.save` record holds. Nothing is run.
#[pyfunction]
pub(crate) fn decode_record(py: Python<'_>, record: Vec<u8>) -> PyResult<StoredValue> {
    StoredValue::new(py, &py.detach(|| reshard::checkpoint::decode_record(record)).or_raise(py)?)
}

/// Where a record lies.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct RecordLocation {
    pub(crate) file: String,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A stored region of a tensor.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct StoredChunk {
    offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
    /// The file it lies in.
    file: String,
    /// Where in the file its record begins; None where it has none of its own.
    offset: Option<u64>,
    length: Option<u64>,
    /// What the record was stored through and the engine cannot undo.
    transforms: Option<String>,
}

/// What a record was stored through, where the engine cannot undo it.
fn unknown(transform: Option<&str>) -> Option<String> {
    transform.filter(|name| !reshard::checkpoint::can_undo(name)).map(str::to_owned)
}

/// A key of a checkpoint and what it is. Nothing is made of it before it is asked for.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct Entry {
    checkpoint: Arc<reshard::Checkpoint>,
    index: usize,
}

impl Entry {
    fn get(&self) -> Option<(&String, &CatalogEntry)> {
        self.checkpoint.catalog().entries.get_index(self.index)
    }

    fn tensor(&self) -> Option<&CatalogTensor> {
        match self.get() {
            Some((_, CatalogEntry { kind: CatalogKind::Tensor(tensor), .. })) => Some(tensor),
            _ => None,
        }
    }

    fn file(&self, index: u32) -> String {
        self.checkpoint.catalog().files.get(index as usize).cloned().unwrap_or_default()
    }
}

#[pymethods]
impl Entry {
    /// The flattened key.
    #[getter]
    fn key(&self) -> &str {
        self.get().map_or("", |(key, _)| key)
    }

    /// Where it sat in the state dict.
    #[getter]
    fn path<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match self.get() {
            Some((_, CatalogEntry { path: Some(path), .. })) => path_tuple(py, path),
            _ => PyTuple::new(py, [self.key()]),
        }
    }

    /// The name of the element type; None of a value.
    #[getter]
    fn dtype(&self) -> Option<&'static str> {
        self.tensor().map(|tensor| tensor.dtype.name())
    }

    /// The code of the element type; None of a value.
    #[getter]
    fn dtype_code(&self) -> Option<usize> {
        self.tensor().map(|tensor| code(tensor.dtype))
    }

    /// The shape; of a value that of a scalar.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.tensor().map(|tensor| tensor.shape.as_slice()).unwrap_or_default())
    }

    /// Whether PyTorch should see it as requiring gradients.
    #[getter]
    fn requires_grad(&self) -> bool {
        self.tensor().is_some_and(|tensor| tensor.requires_grad)
    }

    /// How many chunks a tensor is stored in.
    #[getter]
    fn chunk_count(&self) -> usize {
        self.tensor().map_or(0, |tensor| tensor.chunks.len())
    }

    /// The chunks that a tensor is stored in.
    #[getter]
    fn chunks(&self, py: Python<'_>) -> PyResult<Vec<StoredChunk>> {
        let chunks = self.tensor().map(|tensor| tensor.chunks.as_slice()).unwrap_or_default();
        let stored = |chunk: &reshard::checkpoint::StoredChunk| {
            let (offset, length, transforms) = match chunk.location.stored() {
                ChunkLocation::Record { offset, length, transform } => {
                    (Some(*offset), Some(*length), unknown(transform.as_deref()))
                }
                _ => (None, None, None),
            };
            let offsets = PyTuple::new(py, chunk.region.offsets())?.unbind();
            let sizes = PyTuple::new(py, chunk.region.sizes())?.unbind();
            Ok(StoredChunk { offsets, sizes, file: self.file(chunk.file), offset, length, transforms })
        };
        chunks.iter().map(stored).collect()
    }

    /// What the record of a value was stored through and the engine cannot undo.
    #[getter]
    fn transforms(&self) -> Option<String> {
        match self.get() {
            Some((_, CatalogEntry { kind: CatalogKind::Value(ValueLocation::Record { transform, .. }), .. })) => {
                unknown(transform.as_deref())
            }
            _ => None,
        }
    }

    /// Where the record of a value lies; None where it has none.
    #[getter]
    fn record(&self) -> Option<RecordLocation> {
        match self.get() {
            Some((_, CatalogEntry { kind: CatalogKind::Value(ValueLocation::Record { file, offset, length, .. }), .. })) => {
                Some(RecordLocation { file: self.file(*file), offset: *offset, length: *length })
            }
            _ => None,
        }
    }
}

/// The code of an element type, as Python knows it.
pub(crate) fn code(dtype: DType) -> usize {
    DType::ALL.iter().position(|known| *known == dtype).unwrap_or(usize::MAX)
}
