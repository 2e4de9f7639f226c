//! Descriptions of leaves as Python hands them over, one tuple a leaf, to the engine's: the one place where addresses of
//! tensors become memory.
//!
//! A leaf is `(key, path, per_rank, kind, …)`. The path is a tuple, or `None` when it is the key alone. After the kind:
//! - [`WHOLE`]: dtype, requires_grad, shape, memory, strides (`None` when contiguous)
//! - [`PIECES`]: dtype, requires_grad, shape, list of `(offsets, sizes, memory, strides)`
//! - [`VALUE`]: the object
//! - [`RECORD`]: the bytes of a `torch.save` record
//!
//! The dtype is a position in `dtype_names()`; strides count elements. Memory is an address; or, to save from, an object whose
//! `read(offset, into)` fills a memoryview with what lies where the CPU cannot read.
#![allow(unsafe_code)]

use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyString, PyTuple};
use reshard::layout::{ByteLayout, Dims, Region};
use reshard::{
    DType, DeviceMemory, DeviceMemoryMut, LoadLeaf, LoadPiece, LoadState, LoadTensor, SaveLeaf, SavePiece, SaveState, SaveTensor,
    Scope, Source, StridedBox, Target,
};

use crate::errors::{Raise, invalid};
use crate::group::call;
use crate::tree::key_path;
use crate::value::plain;

/// A whole tensor in one stretch of memory.
const WHOLE: u8 = 0;
/// Some regions of a tensor.
const PIECES: u8 = 1;
/// Anything that is not a tensor.
const VALUE: u8 = 2;
/// Bytes of a record made already.
const RECORD: u8 = 3;

/// What a rank saves. `pickle` makes a record of an object that is not plain.
pub(crate) fn save_state(leaves: &Bound<'_, PyList>, pickle: &Bound<'_, PyAny>) -> PyResult<SaveState<'static>> {
    let py = leaves.py();
    let mut state = SaveState::new();
    for leaf in leaves.iter() {
        let leaf = Leaf::new(leaf)?;
        let path = match leaf.get(1)? {
            none if none.is_none() => None,
            path => Some(key_path(path.cast::<PyTuple>()?)?),
        };
        let described = match leaf.kind {
            WHOLE | PIECES => SaveLeaf::Tensor(save_tensor(&leaf)?),
            VALUE => {
                let object = leaf.get(4)?;
                match plain(&object)? {
                    Some(value) => SaveLeaf::Value(value),
                    None => SaveLeaf::Record(pickle.call1((&leaf.key, object))?.cast::<PyBytes>()?.as_bytes().to_vec()),
                }
            }
            RECORD => SaveLeaf::Record(leaf.get(4)?.cast::<PyBytes>()?.as_bytes().to_vec()),
            other => return Err(invalid(py, format!("{other} is no kind of leaf"))),
        };
        let (key, scope) = (leaf.key.clone(), leaf.scope);
        state.insert(key, path, scope, described).or_raise(py)?;
    }
    Ok(state)
}

/// What a rank wants loaded.
pub(crate) fn load_state(leaves: &Bound<'_, PyList>) -> PyResult<LoadState<'static>> {
    let py = leaves.py();
    let mut state = LoadState::new();
    for leaf in leaves.iter() {
        let leaf = Leaf::new(leaf)?;
        let described = match leaf.kind {
            WHOLE | PIECES => LoadLeaf::Tensor(load_tensor(&leaf)?),
            VALUE => LoadLeaf::Value,
            other => return Err(invalid(py, format!("{other} is no kind of leaf to load"))),
        };
        state.insert(leaf.key.clone(), leaf.scope, described).or_raise(py)?;
    }
    Ok(state)
}

/// One tuple, with what all kinds have in common.
struct Leaf<'py> {
    tuple: Bound<'py, PyTuple>,
    key: String,
    scope: Scope,
    kind: u8,
}

impl<'py> Leaf<'py> {
    fn new(leaf: Bound<'py, PyAny>) -> PyResult<Leaf<'py>> {
        let tuple = leaf.cast_into::<PyTuple>()?;
        let key = tuple.get_item(0)?.cast::<PyString>()?.to_str()?.to_owned();
        let scope = if tuple.get_item(2)?.is_truthy()? { Scope::PerRank } else { Scope::Shared };
        let kind = tuple.get_item(3)?.extract()?;
        Ok(Leaf { tuple, key, scope, kind })
    }

    fn get(&self, index: usize) -> PyResult<Bound<'py, PyAny>> {
        self.tuple.get_item(index)
    }

    fn dtype(&self) -> PyResult<DType> {
        dtype_of(self.tuple.py(), self.get(4)?.extract()?)
    }
}

/// The element type of a code.
pub(crate) fn dtype_of(py: Python<'_>, code: usize) -> PyResult<DType> {
    DType::ALL.get(code).copied().ok_or_else(|| invalid(py, format!("{code} is no dtype code")))
}

/// Numbers, one a dimension.
pub(crate) fn dims(object: &Bound<'_, PyAny>) -> PyResult<Dims> {
    match object.cast::<PyTuple>() {
        Ok(tuple) => tuple.iter().map(|number| number.extract()).collect(),
        Err(_) => Ok(Dims::from_vec(object.extract()?)),
    }
}

/// How a box of elements lies at an address: contiguous, or by strides.
fn layout_of(py: Python<'_>, shape: &[u64], strides: &Bound<'_, PyAny>, dtype: DType) -> PyResult<ByteLayout> {
    let layout = match strides.is_none() {
        true => ByteLayout::contiguous(shape, dtype.size()),
        false => ByteLayout::strided(shape, &dims(strides)?, dtype.size()),
    };
    layout.map_err(|error| invalid(py, error.to_string()))
}

fn region(py: Python<'_>, offsets: &[u64], sizes: &[u64]) -> PyResult<Region> {
    Region::new(offsets, sizes).map_err(|error| invalid(py, error.to_string()))
}

/// One piece: its region, its layout and its memory.
type PieceParts<'py> = (Region, ByteLayout, Bound<'py, PyAny>);

/// The pieces of a leaf of either kind of tensor, with its dtype and shape.
fn pieces<'py>(leaf: &Leaf<'py>) -> PyResult<(DType, Dims, Vec<PieceParts<'py>>)> {
    let py = leaf.tuple.py();
    let dtype = leaf.dtype()?;
    let shape = dims(&leaf.get(6)?)?;
    if leaf.kind == WHOLE {
        let layout = layout_of(py, &shape, &leaf.get(8)?, dtype)?;
        let whole = Region::whole(&shape).map_err(|error| invalid(py, error.to_string()))?;
        return Ok((dtype, shape, vec![(whole, layout, leaf.get(7)?)]));
    }
    let list = leaf.get(7)?;
    let mut parts = Vec::new();
    for piece in list.cast::<PyList>()?.iter() {
        let piece = piece.cast_into::<PyTuple>()?;
        let sizes = dims(&piece.get_item(1)?)?;
        let layout = layout_of(py, &sizes, &piece.get_item(3)?, dtype)?;
        let region = region(py, &dims(&piece.get_item(0)?)?, &sizes)?;
        parts.push((region, layout, piece.get_item(2)?));
    }
    Ok((dtype, shape, parts))
}

fn save_tensor(leaf: &Leaf<'_>) -> PyResult<SaveTensor<'static>> {
    let py = leaf.tuple.py();
    let (dtype, shape, parts) = pieces(leaf)?;
    let pieces = parts
        .into_iter()
        .map(|(region, layout, memory)| {
            let memory = source(&layout, &memory)?;
            SavePiece::new(region, layout, memory).or_raise(py)
        })
        .collect::<PyResult<_>>()?;
    Ok(SaveTensor { dtype, shape, requires_grad: leaf.get(5)?.is_truthy()?, pieces })
}

/// The memory of a box of elements.
pub(crate) fn source(layout: &ByteLayout, memory: &Bound<'_, PyAny>) -> PyResult<Source<'static>> {
    let length = layout.end() as usize;
    if !memory.is_instance_of::<PyInt>() {
        return Ok(Source::device(length, Arc::new(PythonMemory::new(memory)?)));
    }
    let address: usize = memory.extract()?;
    // SAFETY: the package describes live tensors, whose storage covers shape and strides, and hands their owners over with
    // the description; whoever holds the description keeps the owners as long as the engine works on it.
    Ok(unsafe { Source::from_raw(address as *const u8, length) })
}

/// Memory that an object of the package reads and writes.
#[derive(Debug)]
struct PythonMemory {
    object: Py<PyAny>,
    address: usize,
}

impl PythonMemory {
    fn new(object: &Bound<'_, PyAny>) -> PyResult<PythonMemory> {
        Ok(PythonMemory { object: object.clone().unbind(), address: object.getattr("address")?.extract()? })
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
                object.call_method1("read", (offset, view)).map(drop)
            })
        }
    }
}

impl DeviceMemoryMut for PythonMemory {
    fn address(&self) -> usize {
        self.address
    }

    fn write(&self, to: StridedBox<'_>, bytes: &[u8]) -> Result<(), String> {
        let strides: Vec<u64> = to.byte_strides.iter().map(|stride| stride / to.element_size.max(1)).collect();
        // SAFETY: a shared borrow that lasts as long as the call; the view is read-only.
        unsafe {
            self.with_view(bytes.as_ptr().cast_mut(), bytes.len(), ffi::PyBUF_READ, |object, view| {
                object
                    .call_method1(
                        "write",
                        (to.offset, PyTuple::new(view.py(), to.sizes)?, PyTuple::new(view.py(), strides)?, view),
                    )
                    .map(drop)
            })
        }
    }
}

fn load_tensor(leaf: &Leaf<'_>) -> PyResult<LoadTensor<'static>> {
    let py = leaf.tuple.py();
    let (dtype, shape, parts) = pieces(leaf)?;
    let pieces = parts
        .into_iter()
        .map(|(region, layout, memory)| {
            let memory = target(&layout, &memory)?;
            LoadPiece::new(region, layout, memory).or_raise(py)
        })
        .collect::<PyResult<_>>()?;
    Ok(LoadTensor { dtype, shape, pieces })
}

fn target(layout: &ByteLayout, memory: &Bound<'_, PyAny>) -> PyResult<Target<'static>> {
    let length = layout.end() as usize;
    if !memory.is_instance_of::<PyInt>() {
        return Ok(Target::device(length, Arc::new(PythonMemory::new(memory)?)));
    }
    let address: usize = memory.extract()?;
    // SAFETY: as in `source`; the caller of a load leaves its tensors alone until it returns, and memory that is wanted under
    // several keys is filled one after the other by the engine.
    Ok(unsafe { Target::from_raw(address as *mut u8, length) })
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
