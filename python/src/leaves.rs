//! Leaves of a state dict as Python describes them to the engine: the one place where addresses of tensors become memory.
//!
//! Memory is an address; or an object whose `read(offset, into)` and `write(offset, sizes, strides, content)` reach what lies where
//! the CPU cannot. Strides count elements.
#![allow(unsafe_code)]

use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyTuple};
use reshard::formats::KeyPath;
use reshard::layout::{ByteLayout, Dims, Region};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::memory::{DeviceMemory, DeviceMemoryMut, Source, StridedBox, Target};
use reshard::records::{RecordContent, RecordToWrite};
use reshard::{DType, LoadState, SaveState};

use crate::errors::{Raise, invalid, invalid_key};
use crate::geometry::{in_layout, region};
use crate::group::call;
use crate::tree::{key_path, path_tuple};
use crate::value::plain;

/// Numbers, one a dimension: a tuple, a `torch.Size`, a list.
pub(crate) struct Numbers(pub(crate) Dims);

impl<'py> FromPyObject<'_, 'py> for Numbers {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Numbers> {
        match object.cast::<PyTuple>() {
            Ok(tuple) => tuple.iter_borrowed().map(|number| number.extract()).collect::<PyResult<Dims>>().map(Numbers),
            Err(_) => Ok(Numbers(Dims::from_vec(object.extract()?))),
        }
    }
}

/// The element type of a code, which is a position in `dtype_names()`.
pub(crate) struct Code(pub(crate) DType);

impl<'py> FromPyObject<'_, 'py> for Code {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Code> {
        let code: usize = object.extract()?;
        let dtype = DType::ALL.get(code).copied();
        dtype.map(Code).ok_or_else(|| invalid(object.py(), format!("invalid dtype code {code}")))
    }
}

/// Where a box of elements begins.
#[derive(Clone)]
pub(crate) enum Memory {
    Address(usize),
    Device { memory: Arc<PythonMemory>, start: u64 },
}

impl Memory {
    /// The same, some bytes further.
    pub(crate) fn after(&self, bytes: u64) -> Memory {
        match self {
            Memory::Address(address) => Memory::Address(address + bytes as usize),
            Memory::Device { memory, start } => Memory::Device { memory: Arc::clone(memory), start: start + bytes },
        }
    }

    fn source(&self, layout: &ByteLayout) -> Source<'static> {
        let length = layout.end() as usize;
        match self {
            // SAFETY: the package describes live tensors, whose storage covers shape and strides, and hands their owners over with
            // the description; whoever holds the description keeps the owners as long as the engine works on it.
            Memory::Address(address) => unsafe { Source::from_raw(*address as *const u8, length) },
            Memory::Device { memory, start } => Source::device(length, Arc::new(memory.from(*start))),
        }
    }

    fn target(&self, layout: &ByteLayout) -> Target<'static> {
        let length = layout.end() as usize;
        match self {
            // SAFETY: as in `source`; the caller of a load leaves its tensors alone until it returns, and memory that is wanted under
            // several keys is filled one after the other by the engine.
            Memory::Address(address) => unsafe { Target::from_raw(*address as *mut u8, length) },
            Memory::Device { memory, start } => Target::device(length, Arc::new(memory.from(*start))),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Memory {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Memory> {
        if object.is_instance_of::<PyInt>() {
            return object.extract().map(Memory::Address);
        }
        Ok(Memory::Device { memory: Arc::new(PythonMemory::new(&object)?), start: 0 })
    }
}

/// A region of a tensor and the memory in which it lies.
#[pyclass(module = "reshard._reshard", frozen)]
#[derive(Clone)]
pub(crate) struct Piece {
    pub(crate) region: Region,
    pub(crate) memory: Memory,
    /// None when contiguous.
    pub(crate) strides: Option<Dims>,
}

#[pymethods]
impl Piece {
    /// A region by its offsets and sizes.
    #[new]
    #[pyo3(signature = (offsets, sizes, memory, strides=None))]
    fn new(py: Python<'_>, offsets: Numbers, sizes: Numbers, memory: Memory, strides: Option<Numbers>) -> PyResult<Piece> {
        let region = region(py, &offsets.0, &sizes.0)?;
        Ok(Piece { region, memory, strides: strides.map(|strides| strides.0) })
    }

    /// The same piece of a tensor of which this one's is a part that begins at these offsets.
    fn within(&self, py: Python<'_>, offsets: Numbers) -> PyResult<Piece> {
        let region = in_layout(py, self.region.translated(&offsets.0))?;
        Ok(Piece { region, ..self.clone() })
    }
}

impl Piece {
    /// How its elements lie in its memory.
    fn layout(&self, py: Python<'_>, dtype: DType) -> PyResult<ByteLayout> {
        let sizes = self.region.sizes();
        in_layout(
            py,
            match &self.strides {
                None => ByteLayout::contiguous(sizes, dtype.size()),
                Some(strides) => ByteLayout::strided(sizes, strides, dtype.size()),
            },
        )
    }

    fn to_save(&self, py: Python<'_>, dtype: DType) -> PyResult<SavePiece<'static>> {
        let layout = self.layout(py, dtype)?;
        let memory = self.memory.source(&layout);
        SavePiece::new(self.region.clone(), layout, memory).or_raise(py)
    }

    fn to_load(&self, py: Python<'_>, dtype: DType) -> PyResult<LoadPiece<'static>> {
        let layout = self.layout(py, dtype)?;
        let memory = self.memory.target(&layout);
        LoadPiece::new(self.region.clone(), layout, memory).or_raise(py)
    }
}

/// A tensor in pieces.
struct Tensor {
    dtype: DType,
    requires_grad: bool,
    shape: Dims,
    pieces: Vec<Piece>,
}

enum Content {
    Tensor(Tensor),
    /// Anything that is not a tensor.
    Value(Py<PyAny>),
    /// A `torch.save` record.
    Record(Py<PyBytes>),
    /// The record of a region of a tensor, behind transforms of the caller's.
    Transformed {
        dtype: DType,
        requires_grad: bool,
        shape: Dims,
        region: Region,
        record: Py<PyBytes>,
    },
}

/// One leaf: its key, its path (None when that is the key alone), and what it holds.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct Leaf {
    /// Its flattened key.
    #[pyo3(get)]
    key: String,
    /// Whether every rank has one of its own.
    #[pyo3(get)]
    per_rank: bool,
    path: Option<KeyPath>,
    content: Content,
}

/// A path, as a tuple of names and indices.
struct Path(KeyPath);

impl<'py> FromPyObject<'_, 'py> for Path {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Path> {
        key_path(&object.cast::<PyTuple>()?.to_owned()).map(Path)
    }
}

#[pymethods]
impl Leaf {
    /// A whole tensor in one stretch of memory.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "what a tensor is")]
    fn whole(
        py: Python<'_>,
        key: String,
        path: Option<Path>,
        per_rank: bool,
        dtype: Code,
        requires_grad: bool,
        shape: Numbers,
        memory: Memory,
        strides: Option<Numbers>,
    ) -> PyResult<Leaf> {
        let region = in_layout(py, Region::whole(&shape.0))?;
        let pieces = vec![Piece { region, memory, strides: strides.map(|strides| strides.0) }];
        let content = Content::Tensor(Tensor { dtype: dtype.0, requires_grad, shape: shape.0, pieces });
        Ok(Leaf { key, path: path.map(|path| path.0), per_rank, content })
    }

    /// Some regions of a tensor.
    #[staticmethod]
    fn pieces(
        key: String,
        path: Option<Path>,
        per_rank: bool,
        dtype: Code,
        requires_grad: bool,
        shape: Numbers,
        pieces: Vec<PyRef<'_, Piece>>,
    ) -> Leaf {
        let pieces = pieces.iter().map(|piece| (**piece).clone()).collect();
        let content = Content::Tensor(Tensor { dtype: dtype.0, requires_grad, shape: shape.0, pieces });
        Leaf { key, path: path.map(|path| path.0), per_rank, content }
    }

    /// Anything that is not a tensor: to save, or to be replaced by what is loaded.
    #[staticmethod]
    fn value(key: String, path: Option<Path>, per_rank: bool, value: Py<PyAny>) -> Leaf {
        Leaf { key, path: path.map(|path| path.0), per_rank, content: Content::Value(value) }
    }

    /// The bytes of a `torch.save` record.
    #[staticmethod]
    fn record(key: String, path: Option<Path>, per_rank: bool, record: Py<PyBytes>) -> Leaf {
        Leaf { key, path: path.map(|path| path.0), per_rank, content: Content::Record(record) }
    }

    /// The record of a region of a tensor, as transforms of the caller's made it.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "what a region of a tensor is")]
    fn transformed(
        py: Python<'_>,
        key: String,
        path: Option<Path>,
        dtype: Code,
        requires_grad: bool,
        shape: Numbers,
        offsets: Numbers,
        sizes: Numbers,
        record: Py<PyBytes>,
    ) -> PyResult<Leaf> {
        let region = region(py, &offsets.0, &sizes.0)?;
        let content = Content::Transformed { dtype: dtype.0, requires_grad, shape: shape.0, region, record };
        Ok(Leaf { key, path: path.map(|path| path.0), per_rank: false, content })
    }

    /// Where it sits in the state dict; None when that is its key alone.
    #[getter]
    fn path<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.path.as_ref().map(|path| path_tuple(py, path)).transpose()
    }
}

impl Leaf {
    fn scope(&self) -> Scope {
        if self.per_rank { Scope::PerRank } else { Scope::Shared }
    }

    fn to_save(&self, py: Python<'_>, pickle: &Bound<'_, PyAny>) -> PyResult<SaveLeaf<'static>> {
        Ok(match &self.content {
            Content::Tensor(tensor) => {
                let pieces = tensor.pieces.iter().map(|piece| piece.to_save(py, tensor.dtype)).collect::<PyResult<_>>()?;
                let (dtype, shape, requires_grad) = (tensor.dtype, tensor.shape.clone(), tensor.requires_grad);
                SaveLeaf::Tensor(SaveTensor { dtype, shape, requires_grad, pieces })
            }
            Content::Value(object) => match plain(object.bind(py))? {
                Some(value) => SaveLeaf::Value(value),
                None => SaveLeaf::Record(pickle.call1((&self.key, object))?.cast::<PyBytes>()?.as_bytes().to_vec()),
            },
            Content::Record(record) => SaveLeaf::Record(record.bind(py).as_bytes().to_vec()),
            Content::Transformed { .. } => {
                return Err(invalid_key(py, &self.key, format!("{:?} has its transforms named by a planner alone", self.key)));
            }
        })
    }

    /// The record that a planner of torch's wants written: bytes, or one region of a tensor.
    pub(crate) fn to_write(&self, py: Python<'_>) -> PyResult<RecordToWrite<'static>> {
        let content = match &self.content {
            Content::Record(record) => RecordContent::Bytes(record.bind(py).as_bytes().to_vec()),
            Content::Tensor(Tensor { dtype, requires_grad, shape, pieces }) if pieces.len() == 1 => RecordContent::Tensor {
                dtype: *dtype,
                requires_grad: *requires_grad,
                shape: shape.clone(),
                piece: pieces[0].to_save(py, *dtype)?,
            },
            Content::Transformed { dtype, requires_grad, shape, region, record } => RecordContent::Transformed {
                dtype: *dtype,
                requires_grad: *requires_grad,
                shape: shape.clone(),
                region: region.clone(),
                bytes: record.bind(py).as_bytes().to_vec(),
            },
            _ => return Err(invalid_key(py, &self.key, format!("{:?} is more than one record", self.key))),
        };
        Ok(RecordToWrite { key: self.key.clone(), path: self.path.clone(), content })
    }
}

/// What a rank saves. `pickle` makes a record of an object that is not plain.
pub(crate) fn save_state(leaves: &Bound<'_, PyList>, pickle: &Bound<'_, PyAny>) -> PyResult<SaveState<'static>> {
    let py = leaves.py();
    let mut state = SaveState::new();
    for leaf in leaves.iter() {
        let leaf = leaf.cast::<Leaf>()?.get();
        state.insert(leaf.key.clone(), leaf.path.clone(), leaf.scope(), leaf.to_save(py, pickle)?).or_raise(py)?;
    }
    Ok(state)
}

/// What a rank wants loaded.
pub(crate) fn load_state(leaves: &Bound<'_, PyList>) -> PyResult<LoadState<'static>> {
    let py = leaves.py();
    let mut state = LoadState::new();
    for leaf in leaves.iter() {
        let leaf = leaf.cast::<Leaf>()?.get();
        let wanted = match &leaf.content {
            Content::Tensor(tensor) => {
                let pieces = tensor.pieces.iter().map(|piece| piece.to_load(py, tensor.dtype)).collect::<PyResult<_>>()?;
                LoadLeaf::Tensor(LoadTensor { dtype: tensor.dtype, shape: tensor.shape.clone(), pieces })
            }
            _ => LoadLeaf::Value,
        };
        state.insert(leaf.key.clone(), leaf.scope(), wanted).or_raise(py)?;
    }
    Ok(state)
}

/// Memory that an object of the package reads and writes.
#[derive(Debug)]
pub(crate) struct PythonMemory {
    object: Py<PyAny>,
    address: usize,
    /// Where it begins for whoever asks, in bytes.
    start: u64,
}

impl PythonMemory {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<PythonMemory> {
        Ok(PythonMemory { object: object.clone().unbind(), address: object.getattr("address")?.extract()?, start: 0 })
    }

    /// The same memory from some byte on.
    fn from(&self, start: u64) -> PythonMemory {
        let object = Python::attach(|py| self.object.clone_ref(py));
        PythonMemory { object, address: self.address, start: self.start + start }
    }

    /// Calls a method whose last argument is a view of memory of the engine.
    ///
    /// # Safety
    /// The memory must be valid for reads, and for writes if `flags` say so, until this returns.
    unsafe fn with_view(
        &self,
        memory: *mut u8,
        length: usize,
        flags: std::ffi::c_int,
        method: impl FnOnce(&Bound<'_, PyAny>, &Bound<'_, PyAny>) -> PyResult<()>,
    ) -> Result<(), String> {
        call(|py| {
            // SAFETY: by this function's contract. The view is released before it returns, and releasing fails while anything
            // still refers to what it shows.
            let view = unsafe {
                let view = ffi::PyMemoryView_FromMemory(memory.cast(), length as ffi::Py_ssize_t, flags);
                Bound::from_owned_ptr_or_err(py, view)?
            };
            let done = method(self.object.bind(py), &view);
            let released = view.call_method0("release");
            done.and(released.map(drop))
        })
    }
}

impl DeviceMemory for PythonMemory {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        // SAFETY: an exclusive borrow that lasts as long as the call.
        unsafe {
            self.with_view(into.as_mut_ptr(), into.len(), ffi::PyBUF_WRITE, |object, view| {
                object.call_method1("read", (self.start + offset, view)).map(drop)
            })
        }
    }
}

impl DeviceMemoryMut for PythonMemory {
    fn address(&self) -> usize {
        self.address + self.start as usize
    }

    fn write(&self, to: StridedBox<'_>, bytes: &[u8]) -> Result<(), String> {
        let strides: Vec<u64> = to.byte_strides.iter().map(|stride| stride / to.element_size.max(1)).collect();
        // SAFETY: a shared borrow that lasts as long as the call; the view is read-only.
        unsafe {
            self.with_view(bytes.as_ptr().cast_mut(), bytes.len(), ffi::PyBUF_READ, |object, view| {
                object
                    .call_method1(
                        "write",
                        (self.start + to.offset, PyTuple::new(view.py(), to.sizes)?, PyTuple::new(view.py(), strides)?, view),
                    )
                    .map(drop)
            })
        }
    }
}

/// A writable buffer that another thread fills while its owner is kept.
pub(crate) struct Filled {
    buffer: PyBuffer<u8>,
}

impl Filled {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Filled> {
        let buffer = PyBuffer::<u8>::get(object)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(invalid(object.py(), "a buffer to read into must be writable and contiguous"));
        }
        Ok(Filled { buffer })
    }

    /// The bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        if self.buffer.len_bytes() == 0 {
            return &mut [];
        }
        // SAFETY: the buffer is exported as long as this lives, writable and contiguous by `new`; its owner was made for
        // this read and is given to nobody before it ends.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.buf_ptr().cast(), self.buffer.len_bytes()) }
    }
}
