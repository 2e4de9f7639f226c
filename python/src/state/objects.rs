//! Python's containers to the state crate's trees and back. A tensor crosses as a handle with its facts, which a function of
//! the package tells; plain values cross as values; everything else as an opaque handle.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use reshard::layout::{Dims, Region};
use reshard::state::{DeviceKind, Dict, Opaque, SlotPiece, SlotTensor, TensorFacts, Tree, WithFacts};
use reshard::{DType, Value};

use crate::errors::invalid;
use crate::leaves::{dims, dtype_of};
use crate::tree::{key_from, key_object};
use crate::value::{plain, to_python};

/// A tensor of the program and what is known of it.
#[derive(Clone)]
pub(super) struct Handle {
    inner: Arc<(Py<PyAny>, TensorFacts)>,
}

impl WithFacts for Handle {
    fn facts(&self) -> &TensorFacts {
        &self.inner.1
    }
}

impl Handle {
    /// The tensor.
    pub(super) fn object<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.inner.0.bind(py).clone()
    }
}

/// The code of an element type, as Python knows it.
pub(super) fn code(dtype: DType) -> usize {
    DType::ALL.iter().position(|known| *known == dtype).unwrap_or(usize::MAX)
}

/// What crosses beside the trees: how to ask for a tensor's facts, and the opaque objects so far.
pub(super) struct Objects<'py> {
    py: Python<'py>,
    describe: Bound<'py, PyAny>,
    opaque: Vec<Bound<'py, PyAny>>,
}

impl<'py> Objects<'py> {
    /// `describe(object)` tells `(dtype, shape, device, scalar, pieces)` of a tensor and None of anything else. Pieces are
    /// None for a tensor at hand whole, else a list of `(offsets, tensor)`.
    pub(super) fn new(describe: &Bound<'py, PyAny>) -> Objects<'py> {
        Objects { py: describe.py(), describe: describe.clone(), opaque: Vec::new() }
    }

    /// The tree of an object.
    pub(super) fn tree(&mut self, object: &Bound<'py, PyAny>) -> PyResult<Tree<SlotTensor<Handle>>> {
        if let Ok(dict) = object.cast::<PyDict>() {
            return Ok(Tree::Dict(self.dict(dict)?));
        }
        if let Ok(list) = object.cast_exact::<PyList>() {
            return Ok(Tree::List(list.iter().map(|item| self.tree(&item)).collect::<PyResult<_>>()?));
        }
        if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            return Ok(Tree::Tuple(tuple.iter().map(|item| self.tree(&item)).collect::<PyResult<_>>()?));
        }
        if let Some(value) = plain(object)? {
            return Ok(Tree::Value(value));
        }
        let facts = self.describe.call1((object,))?;
        if facts.is_none() {
            let handle = self.opaque.len() as u64;
            self.opaque.push(object.clone());
            let class = object.get_type().qualname()?.to_str()?.to_owned();
            return Ok(Tree::Opaque(Opaque { class, handle }));
        }
        Ok(Tree::Tensor(self.tensor(object, &facts)?))
    }

    /// The entries of a dict.
    pub(super) fn dict(&mut self, dict: &Bound<'py, PyDict>) -> PyResult<Dict<SlotTensor<Handle>>> {
        dict.iter().map(|(key, value)| Ok((key_from(&key)?, self.tree(&value)?))).collect()
    }

    fn tensor(&self, object: &Bound<'py, PyAny>, facts: &Bound<'py, PyAny>) -> PyResult<SlotTensor<Handle>> {
        let py = self.py;
        let facts = facts.cast::<PyTuple>()?;
        let dtype = dtype_of(py, facts.get_item(0)?.extract()?)?;
        let shape = dims(&facts.get_item(1)?)?;
        let device = match facts.get_item(2)?.extract::<u8>()? {
            0 => DeviceKind::Cpu,
            1 => DeviceKind::Accelerator,
            _ => DeviceKind::Meta,
        };
        let scalar = match facts.get_item(3)? {
            none if none.is_none() => None,
            bytes => Some(bytes.cast::<PyBytes>()?.as_bytes().to_vec()),
        };
        let handle = |object: &Bound<'py, PyAny>, shape: Dims, scalar| Handle {
            inner: Arc::new((object.clone().unbind(), TensorFacts { dtype, shape, device, scalar })),
        };
        let pieces = facts.get_item(4)?;
        if pieces.is_none() {
            return Ok(SlotTensor::Whole(handle(object, shape, scalar)));
        }
        let mut parts = Vec::new();
        for piece in pieces.cast::<PyList>()?.iter() {
            let piece = piece.cast_into::<PyTuple>()?;
            let tensor = piece.get_item(1)?;
            let sizes = dims(&tensor.getattr("shape")?)?;
            let region = Region::new(&dims(&piece.get_item(0)?)?, &sizes).map_err(|error| invalid(py, error.to_string()))?;
            parts.push(SlotPiece::contiguous(handle(&tensor, sizes, None), 0, region));
        }
        Ok(SlotTensor::Sharded { dtype, shape, pieces: parts })
    }

    /// The object of a tree. `sharded(dtype, shape, pieces)` makes the object of a tensor in parts, each of them
    /// `(tensor, start, within, at, offsets, sizes)`.
    pub(super) fn object(&self, tree: &Tree<SlotTensor<Handle>>, sharded: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match tree {
            Tree::Dict(dict) => self.dict_object(dict, sharded)?.into_any(),
            Tree::List(items) => self.list_object(items, sharded)?.into_any(),
            Tree::Tuple(items) => self.list_object(items, sharded)?.to_tuple().into_any(),
            Tree::Value(value) => to_python(py, value)?,
            Tree::Opaque(opaque) => match self.opaque.get(opaque.handle as usize) {
                Some(object) => object.clone(),
                None => return Err(invalid(py, format!("a {} is not known here", opaque.class))),
            },
            Tree::Tensor(SlotTensor::Whole(handle)) => handle.object(py),
            Tree::Tensor(SlotTensor::Sharded { dtype, shape, pieces }) => {
                let parts = PyList::empty(py);
                for piece in pieces {
                    parts.append((
                        piece.source.object(py),
                        piece.start,
                        tuple(py, &piece.within)?,
                        tuple(py, &piece.at)?,
                        tuple(py, piece.region.offsets())?,
                        tuple(py, piece.region.sizes())?,
                    ))?;
                }
                sharded.call1((code(*dtype), tuple(py, shape)?, parts))?
            }
        })
    }

    /// The dict of entries.
    pub(super) fn dict_object(
        &self,
        dict: &Dict<SlotTensor<Handle>>,
        sharded: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let built = PyDict::new(self.py);
        for (key, value) in dict {
            built.set_item(key_object(self.py, key)?, self.object(value, sharded)?)?;
        }
        Ok(built)
    }

    fn list_object(&self, items: &[Tree<SlotTensor<Handle>>], sharded: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(self.py, items.iter().map(|item| self.object(item, sharded)).collect::<PyResult<Vec<_>>>()?)
    }
}

/// Numbers as a tuple.
pub(super) fn tuple<'py>(py: Python<'py>, numbers: &[u64]) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, numbers)
}

/// Only whole tensors: what a live optimizer holds.
pub(super) fn whole(tree: Tree<SlotTensor<Handle>>) -> Option<Tree<Handle>> {
    Some(match tree {
        Tree::Dict(dict) => Tree::Dict(whole_dict(dict)?),
        Tree::List(items) => Tree::List(items.into_iter().map(whole).collect::<Option<_>>()?),
        Tree::Tuple(items) => Tree::Tuple(items.into_iter().map(whole).collect::<Option<_>>()?),
        Tree::Tensor(SlotTensor::Whole(handle)) => Tree::Tensor(handle),
        Tree::Tensor(SlotTensor::Sharded { .. }) => return None,
        Tree::Value(value) => Tree::Value(value),
        Tree::Opaque(opaque) => Tree::Opaque(opaque),
    })
}

/// The same for the entries of a dict.
pub(super) fn whole_dict(dict: Dict<SlotTensor<Handle>>) -> Option<Dict<Handle>> {
    dict.into_iter().map(|(key, value)| Some((key, whole(value)?))).collect()
}

/// A plain value, or None where an object is not one.
pub(super) fn value_of(object: &Bound<'_, PyAny>) -> PyResult<Option<Value>> {
    plain(object)
}
