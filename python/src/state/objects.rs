//! Python's containers to the state crate's trees and back. A tensor crosses as a handle with its facts, which a function of
//! the package tells; plain values cross as values; everything else as an opaque handle.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use reshard::layout::Dims;
use reshard::state::{DeviceKind, Dict, Opaque, SlotPiece, SlotTensor, TensorFacts, Tree, WithFacts};

use super::model::tuple;
use crate::checkpoint::code;
use crate::errors::invalid;
use crate::geometry::region;

use crate::leaves::{Code, Numbers};
use crate::tree::{key_from, key_object};
use crate::value::{plain, to_python};

/// What is known of a tensor: element type, whole shape, device, its only element if it has one, and the regions of it that are
/// here, if it is not here whole.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct TensorDescription {
    facts: TensorFacts,
    /// Where each begins, and a tensor of its shape.
    pieces: Option<Vec<(Dims, Py<PyAny>)>>,
}

#[pymethods]
impl TensorDescription {
    /// `device` is "cpu", "meta" or anything else for one with memory of its own; pieces are offsets and tensors.
    #[new]
    #[pyo3(signature = (dtype, shape, device, scalar=None, pieces=None))]
    fn new(
        dtype: Code,
        shape: Numbers,
        device: &str,
        scalar: Option<Vec<u8>>,
        pieces: Option<Vec<(Numbers, Py<PyAny>)>>,
    ) -> TensorDescription {
        let device = match device {
            "cpu" => DeviceKind::Cpu,
            "meta" => DeviceKind::Meta,
            _ => DeviceKind::Accelerator,
        };
        let facts = TensorFacts { dtype: dtype.0, shape: shape.0, device, scalar };
        let pieces = pieces.map(|pieces| pieces.into_iter().map(|(offsets, tensor)| (offsets.0, tensor)).collect());
        TensorDescription { facts, pieces }
    }
}

/// A region of a tensor inside of another: of a row-major box `within`, which starts at an element, the part `at`.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct SlotPart {
    tensor: Py<PyAny>,
    start: u64,
    within: Py<PyTuple>,
    at: Py<PyTuple>,
    offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
}

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

/// What crosses beside the trees: how to ask for a tensor's facts, and the opaque objects so far.
pub(super) struct Objects<'py> {
    py: Python<'py>,
    describe: Bound<'py, PyAny>,
    opaque: Vec<Bound<'py, PyAny>>,
}

impl<'py> Objects<'py> {
    /// `describe(object)` gives the description of a tensor and None of anything else.
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

    fn tensor(&self, object: &Bound<'py, PyAny>, described: &Bound<'py, PyAny>) -> PyResult<SlotTensor<Handle>> {
        let py = self.py;
        let TensorDescription { facts, pieces } = described.cast::<TensorDescription>()?.get();
        let handle =
            |object: &Bound<'py, PyAny>, facts: TensorFacts| Handle { inner: Arc::new((object.clone().unbind(), facts)) };
        let Some(pieces) = pieces else { return Ok(SlotTensor::Whole(handle(object, facts.clone()))) };
        let mut parts = Vec::new();
        for (offsets, tensor) in pieces {
            let tensor = tensor.bind(py);
            let sizes: Numbers = tensor.getattr("shape")?.extract()?;
            let region = region(py, offsets, &sizes.0)?;
            let facts = TensorFacts { shape: sizes.0, scalar: None, ..facts.clone() };
            parts.push(SlotPiece::contiguous(handle(tensor, facts), 0, region));
        }
        Ok(SlotTensor::Sharded { dtype: facts.dtype, shape: facts.shape.clone(), pieces: parts })
    }

    /// The object of a tree. `sharded(dtype, shape, parts)` makes the object of a tensor in parts.
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
                let part = |piece: &SlotPiece<Handle>| {
                    Ok(SlotPart {
                        tensor: piece.source.object(py).unbind(),
                        start: piece.start,
                        within: tuple(py, &piece.within)?,
                        at: tuple(py, &piece.at)?,
                        offsets: PyTuple::new(py, piece.region.offsets())?.unbind(),
                        sizes: PyTuple::new(py, piece.region.sizes())?.unbind(),
                    })
                };
                let parts = pieces.iter().map(part).collect::<PyResult<Vec<_>>>()?;
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
