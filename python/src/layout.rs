//! What a DTensor's mesh and placements mean on this rank.

use pyo3::prelude::*;
use reshard::layout::{Mesh, Placement, local_regions as regions_of};

use crate::errors::invalid;

/// Offsets, sizes, and the offset inside the rank's local tensor.
type Piece = (Vec<u64>, Vec<u64>, Vec<u64>);

/// The regions that `rank` holds. A placement is `("replicate",)`, `("shard", dim)`, `("strided", dim, split_factor)` or
/// `("partial",)`.
#[pyfunction]
pub(crate) fn local_regions(
    py: Python<'_>,
    mesh_shape: Vec<u64>,
    mesh_ranks: Vec<u64>,
    placements: Vec<(String, usize, u64)>,
    shape: Vec<u64>,
    rank: u64,
) -> PyResult<Vec<Piece>> {
    let placements = placements
        .iter()
        .map(|(name, dim, split_factor)| match name.as_str() {
            "replicate" => Ok(Placement::Replicate),
            "shard" => Ok(Placement::Shard(*dim)),
            "strided" => Ok(Placement::StridedShard { dim: *dim, split_factor: *split_factor }),
            "partial" => Ok(Placement::Partial),
            other => Err(invalid(py, format!("{other:?} is no placement that reshard knows"))),
        })
        .collect::<PyResult<Vec<_>>>()?;
    let problem = |error: reshard::layout::LayoutError| invalid(py, error.to_string());
    let mesh = Mesh::with_ranks(&mesh_shape, &mesh_ranks).map_err(problem)?;
    let found = regions_of(&mesh, &placements, &shape, rank).map_err(problem)?;
    Ok(found.into_iter().map(|r| (r.global.offsets().to_vec(), r.global.sizes().to_vec(), r.local.to_vec())).collect())
}
