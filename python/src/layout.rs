//! What a DTensor's mesh and placements mean on this rank. The regions stay here: what is saved from or loaded into a local tensor
//! is cut by them without a detour through Python.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use reshard::layout::{Dims, LocalRegion, Mesh, Placement as Placed, local_regions};

use crate::errors::invalid_key;
use crate::geometry::in_layout;
use crate::leaves::{Memory, Numbers, Piece};

/// What one dimension of a mesh does to a tensor.
#[pyclass(module = "reshard._reshard", frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Placement(Placed);

#[pymethods]
impl Placement {
    /// Every rank holds the same.
    #[staticmethod]
    fn replicate() -> Placement {
        Placement(Placed::Replicate)
    }

    /// A dimension of the tensor is cut.
    #[staticmethod]
    fn shard(dim: usize) -> Placement {
        Placement(Placed::Shard(dim))
    }

    /// A dimension is cut into pieces, and each rank holds its part of every one, as PyTorch's `_StridedShard`.
    #[staticmethod]
    fn strided_shard(dim: usize, split_factor: u64) -> Placement {
        Placement(Placed::StridedShard { dim, split_factor })
    }
}

/// A region of a tensor that a rank holds, and where it begins in the rank's local tensor.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct HeldRegion {
    offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
    local: Py<PyTuple>,
}

/// Which regions of a tensor lie in a rank's local tensor, and where.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct ShardLayout {
    pub(crate) shape: Dims,
    pub(crate) regions: Vec<LocalRegion>,
}

#[pymethods]
impl ShardLayout {
    /// On the mesh of these ranks, in row-major order.
    #[new]
    fn new(
        py: Python<'_>,
        mesh_shape: Vec<u64>,
        mesh_ranks: Vec<u64>,
        placements: Vec<PyRef<'_, Placement>>,
        shape: Numbers,
        rank: u64,
    ) -> PyResult<ShardLayout> {
        let placements: Vec<Placed> = placements.iter().map(|placement| placement.0).collect();
        let mesh = in_layout(py, Mesh::with_ranks(&mesh_shape, &mesh_ranks))?;
        let regions = in_layout(py, local_regions(&mesh, &placements, &shape.0, rank))?;
        Ok(ShardLayout { shape: shape.0, regions })
    }

    /// The regions.
    #[getter]
    fn regions<'py>(&self, py: Python<'py>) -> PyResult<Vec<HeldRegion>> {
        let tuple = |numbers: &[u64]| PyTuple::new(py, numbers).map(Bound::unbind);
        self.regions
            .iter()
            .map(|held| {
                let (offsets, sizes) = (tuple(held.global.offsets())?, tuple(held.global.sizes())?);
                Ok(HeldRegion { offsets, sizes, local: tuple(&held.local)? })
            })
            .collect()
    }

    /// The pieces of a local tensor that has this layout.
    #[pyo3(signature = (key, local_shape, memory, strides, itemsize))]
    fn pieces(
        &self,
        py: Python<'_>,
        key: &str,
        local_shape: Numbers,
        memory: Memory,
        strides: Option<Numbers>,
        itemsize: u64,
    ) -> PyResult<Vec<Piece>> {
        let local = local_shape.0;
        let is_empty = |sizes: &[u64]| sizes.contains(&0);
        let mut extent = Dims::from_elem(0, self.shape.len());
        for held in &self.regions {
            for ((end, at), size) in extent.iter_mut().zip(&held.local).zip(held.global.sizes()) {
                *end = (*end).max(at + size);
            }
        }
        // An empty shard may have any shape without elements: a shard of an empty shard has one of its own.
        if is_empty(&local) && self.regions.iter().all(|held| is_empty(held.global.sizes())) {
            let piece = |held: &LocalRegion| Piece { region: held.global.clone(), memory, strides: None };
            return Ok(self.regions.first().map(piece).into_iter().collect());
        }
        if extent != local {
            let detail =
                format!("{key:?}: the placements give this rank a shard of shape {extent:?}, its local tensor has {local:?}");
            return Err(invalid_key(py, key, detail));
        }
        if self.regions.len() == 1 {
            let region = self.regions[0].global.clone();
            return Ok(vec![Piece { region, memory, strides: strides.map(|strides| strides.0) }]);
        }
        let strides = strides.map_or_else(|| row_major(&local), |strides| strides.0);
        let piece = |held: &LocalRegion| {
            let start: u64 = held.local.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
            Piece { region: held.global.clone(), memory: memory.after(start * itemsize), strides: Some(strides.clone()) }
        };
        Ok(self.regions.iter().map(piece).collect())
    }
}

fn row_major(shape: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}
