//! `Placement`: what a DTensor's placements on a mesh mean, computed as PyTorch computes it. Each tensor dimension is
//! a list of stretches (one, until a strided shard cuts it into several); each placement takes its part of the list,
//! from the first mesh dimension to the last; the rank's regions are the product of the stretches.

use smallvec::{SmallVec, smallvec};

use crate::error::check_rank;
use crate::region::volume_of;
use crate::{Dims, LayoutError, Mesh, Region};

/// What one mesh dimension does to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every rank along the mesh dimension holds the same.
    Replicate,
    /// The tensor dimension is cut by the rule of `torch.chunk`: equal pieces rounded up, so that the last ones may
    /// be smaller or empty (6 over 4 is 2, 2, 2, 0).
    Shard(usize),
    /// As PyTorch's `_StridedShard`: the tensor dimension is first cut into `split_factor` pieces, and each rank holds
    /// its part of every one of them.
    StridedShard {
        /// The tensor dimension.
        dim: usize,
        /// Into how many pieces it is cut before this mesh dimension takes its part of each.
        split_factor: u64,
    },
    /// Each rank holds one term of a sum that has not been computed; such a tensor has no regions.
    Partial,
}

/// A region that a rank holds, and where it lies in the rank's local tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalRegion {
    /// The elements, in the coordinates of the whole tensor.
    pub global: Region,
    /// The offset of this piece inside the rank's local tensor.
    pub local: Dims,
}

/// The most regions that one rank's part of a tensor may fall apart into.
const MOST_REGIONS: u64 = 1 << 24;

/// A tensor dimension on one rank: stretches `(start, length)`, ascending, none empty and none touching the next.
type Stretches = SmallVec<[(u64, u64); 1]>;

/// The regions of a tensor that `rank` holds, with their places in its local tensor. A rank whose shard is empty has
/// one empty region, with the dimension's size as its offset wherever a dimension ran out.
pub fn local_regions(mesh: &Mesh, placements: &[Placement], shape: &[u64], rank: u64) -> Result<Vec<LocalRegion>, LayoutError> {
    check(mesh, placements, shape)?;
    let coordinate = coordinate(mesh, rank)?;
    let dims = stretches(mesh, placements, shape, &coordinate)?;
    if dims.iter().any(SmallVec::is_empty) {
        // First offset and total length, as PyTorch reports it; the stretches ascend, so this stays inside.
        let offsets = dims.iter().zip(shape).map(|(dim, size)| dim.first().map_or(*size, |first| first.0)).collect();
        let sizes = dims.iter().map(length).collect();
        let global = Region::from_proven(offsets, sizes);
        return Ok(vec![LocalRegion { global, local: Dims::from_elem(0, shape.len()) }]);
    }
    product(&dims)
}

/// The shape of the local tensor on `rank`.
pub fn local_shape(mesh: &Mesh, placements: &[Placement], shape: &[u64], rank: u64) -> Result<Dims, LayoutError> {
    check(mesh, placements, shape)?;
    let coordinate = coordinate(mesh, rank)?;
    Ok(stretches(mesh, placements, shape, &coordinate)?.iter().map(length).collect())
}

/// Each distinct region of a tensor and the ranks that hold it, in mesh order, from the mesh alone. Empty regions are
/// left out, except that a tensor without elements is one region which every rank holds.
pub fn holders(mesh: &Mesh, placements: &[Placement], shape: &[u64]) -> Result<Vec<(Region, Vec<u64>)>, LayoutError> {
    check(mesh, placements, shape)?;
    if volume_of(shape)? == 0 {
        return Ok(vec![(Region::whole(shape)?, mesh.ranks().to_vec())]);
    }
    // Ranks hold the same exactly when they stand at the same place in the dimensions that shard; different places
    // hold disjoint parts. The place is numbered by those dimensions alone.
    let mut place_count = 1usize;
    let mut weights: SmallVec<[usize; 4]> = SmallVec::from_elem(0, placements.len());
    for ((weight, placement), size) in weights.iter_mut().zip(placements).zip(mesh.shape()).rev() {
        if *placement != Placement::Replicate {
            *weight = place_count;
            // At most the number of ranks, which a mesh bounds.
            place_count *= *size as usize;
        }
    }
    let mut ranks_at: Vec<Vec<u64>> = vec![Vec::new(); place_count];
    let mut coordinate_of: Vec<Dims> = vec![Dims::new(); place_count];
    for (position, rank) in mesh.ranks().iter().enumerate() {
        let coordinate = mesh.coordinate_at(position);
        let place: usize = coordinate.iter().zip(&weights).map(|(at, weight)| *at as usize * weight).sum();
        if ranks_at[place].is_empty() {
            coordinate_of[place] = coordinate;
        }
        ranks_at[place].push(*rank);
    }
    let mut found = Vec::with_capacity(place_count);
    for (coordinate, ranks) in coordinate_of.iter().zip(ranks_at) {
        let dims = stretches(mesh, placements, shape, coordinate)?;
        if dims.iter().any(SmallVec::is_empty) {
            continue;
        }
        let mut regions = product(&dims)?;
        let last = regions.pop();
        found.extend(regions.into_iter().map(|region| (region.global, ranks.clone())));
        found.extend(last.map(|region| (region.global, ranks)));
        if found.len() as u64 > MOST_REGIONS {
            return Err(too_many());
        }
    }
    Ok(found)
}

fn check(mesh: &Mesh, placements: &[Placement], shape: &[u64]) -> Result<(), LayoutError> {
    check_rank("placements", mesh.ndim(), placements.len())?;
    volume_of(shape)?;
    for (index, placement) in placements.iter().enumerate() {
        let bad = |reason| Err(LayoutError::BadPlacement { index, reason });
        match *placement {
            Placement::Replicate => {}
            Placement::Partial => return Err(LayoutError::Partial { index }),
            Placement::StridedShard { split_factor: 0, .. } => return bad("split_factor is 0".to_owned()),
            Placement::Shard(dim) | Placement::StridedShard { dim, .. } => {
                if dim >= shape.len() {
                    return bad(format!("shards dimension {dim} of a tensor of {} dimensions", shape.len()));
                }
            }
        }
    }
    Ok(())
}

fn coordinate(mesh: &Mesh, rank: u64) -> Result<Dims, LayoutError> {
    mesh.coordinate(rank).ok_or(LayoutError::UnknownRank { rank, field: "the mesh" })
}

fn too_many() -> LayoutError {
    LayoutError::TooManyRegions { field: "placements", limit: MOST_REGIONS }
}

fn length(dim: &Stretches) -> u64 {
    dim.iter().map(|stretch| stretch.1).sum()
}

/// The rule of `torch.chunk`: piece `index` of `size` elements cut into `pieces`, as start and length.
pub(crate) fn chunk(size: u64, pieces: u64, index: u64) -> (u64, u64) {
    let full = size.div_ceil(pieces);
    let start = full.saturating_mul(index).min(size);
    (start, full.min(size - start))
}

/// What a rank at `coordinate` holds of each tensor dimension.
fn stretches(
    mesh: &Mesh,
    placements: &[Placement],
    shape: &[u64],
    coordinate: &[u64],
) -> Result<SmallVec<[Stretches; 4]>, LayoutError> {
    let mut dims: SmallVec<[Stretches; 4]> =
        shape.iter().map(|&size| if size == 0 { smallvec![] } else { smallvec![(0, size)] }).collect();
    for ((placement, &pieces), &at) in placements.iter().zip(mesh.shape()).zip(coordinate) {
        match *placement {
            Placement::Replicate | Placement::Partial => {}
            Placement::Shard(dim) => {
                let (start, len) = chunk(length(&dims[dim]), pieces, at);
                let mut taker = Taker::new(&dims[dim]);
                taker.take(start, len);
                dims[dim] = taker.kept;
            }
            Placement::StridedShard { dim, split_factor } => {
                dims[dim] = strided(&dims[dim], split_factor, pieces, at)?;
            }
        }
    }
    Ok(dims)
}

fn strided(dim: &Stretches, split_factor: u64, pieces: u64, at: u64) -> Result<Stretches, LayoutError> {
    let total = length(dim);
    if total == 0 {
        return Ok(Stretches::new());
    }
    // Only the pieces that have elements matter, however large the factor is.
    let filled = total.div_ceil(total.div_ceil(split_factor));
    if filled > MOST_REGIONS {
        return Err(too_many());
    }
    let mut taker = Taker::new(dim);
    for piece in 0..filled {
        let (start, len) = chunk(total, split_factor, piece);
        let (inner, len) = chunk(len, pieces, at);
        taker.take(start + inner, len);
    }
    Ok(taker.kept)
}

/// Takes ascending parts of a dimension's list, in one pass over the list.
struct Taker<'a> {
    left: &'a [(u64, u64)],
    /// Elements in the stretches before `left`.
    passed: u64,
    kept: Stretches,
}

impl<'a> Taker<'a> {
    fn new(dim: &'a [(u64, u64)]) -> Taker<'a> {
        Taker { left: dim, passed: 0, kept: Stretches::new() }
    }

    /// Keeps the elements `[start, start + len)` of the list, joining what touches.
    fn take(&mut self, start: u64, len: u64) {
        let (mut start, end) = (start, start + len);
        while start < end
            && let Some((&(from, length), rest)) = self.left.split_first()
        {
            let skip = start - self.passed;
            if skip >= length {
                self.passed += length;
                self.left = rest;
                continue;
            }
            let taken = (end - start).min(length - skip);
            match self.kept.last_mut() {
                Some(last) if last.0 + last.1 == from + skip => last.1 += taken,
                _ => self.kept.push((from + skip, taken)),
            }
            start += taken;
        }
    }
}

/// All combinations of one stretch per dimension, in row-major order.
fn product(dims: &[Stretches]) -> Result<Vec<LocalRegion>, LayoutError> {
    let count = dims
        .iter()
        .try_fold(1u64, |count, dim| count.checked_mul(dim.len() as u64))
        .filter(|count| *count <= MOST_REGIONS)
        .ok_or_else(too_many)?;
    let mut regions = Vec::with_capacity(count as usize);
    let mut chosen: SmallVec<[usize; 4]> = SmallVec::from_elem(0, dims.len());
    let mut local = Dims::from_elem(0, dims.len());
    for _ in 0..count {
        let picked = || dims.iter().zip(&chosen).map(|(dim, index)| dim[*index]);
        let global = Region::from_proven(picked().map(|it| it.0).collect(), picked().map(|it| it.1).collect());
        regions.push(LocalRegion { global, local: local.clone() });
        for (dim, stretches) in dims.iter().enumerate().rev() {
            local[dim] += stretches[chosen[dim]].1;
            chosen[dim] += 1;
            if chosen[dim] < stretches.len() {
                break;
            }
            (local[dim], chosen[dim]) = (0, 0);
        }
    }
    Ok(regions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Placement::{Partial, Replicate, Shard, StridedShard};

    fn held(mesh: &Mesh, placements: &[Placement], shape: &[u64], rank: u64) -> Vec<String> {
        let regions = local_regions(mesh, placements, shape, rank).unwrap();
        regions.iter().map(|region| format!("{}@{:?}", region.global, region.local.as_slice())).collect()
    }

    #[test]
    fn six_over_four_leaves_the_last_rank_empty_at_the_end() {
        let mesh = Mesh::new(&[4]).unwrap();
        let all: Vec<_> = (0..4).map(|rank| held(&mesh, &[Shard(0)], &[6], rank)).collect();
        assert_eq!(all, [["[0:2]@[0]"], ["[2:4]@[0]"], ["[4:6]@[0]"], ["[6:6]@[0]"]]);
        assert_eq!(holders(&mesh, &[Shard(0)], &[6]).unwrap().len(), 3);
    }

    #[test]
    fn a_strided_shard_is_several_regions() {
        // FSDP over tensor parallelism on the same dimension, uneven.
        let mesh = Mesh::new(&[2, 2]).unwrap();
        let placements = [StridedShard { dim: 0, split_factor: 2 }, Replicate];
        assert_eq!(held(&mesh, &placements, &[9, 3], 0), ["[0:3, 0:3]@[0, 0]", "[5:7, 0:3]@[3, 0]"]);
        assert_eq!(held(&mesh, &placements, &[9, 3], 3), ["[3:5, 0:3]@[0, 0]", "[7:9, 0:3]@[2, 0]"]);
        assert_eq!(local_shape(&mesh, &placements, &[9, 3], 3).unwrap().as_slice(), [4, 3]);
        let split = [StridedShard { dim: 0, split_factor: 2 }, Shard(0)];
        assert_eq!(held(&mesh, &split, &[8], 1), ["[4:6]@[0]"]);
    }

    #[test]
    fn replicas_are_known_from_the_mesh_alone() {
        let mesh = Mesh::with_ranks(&[2, 2], &[3, 1, 0, 2]).unwrap();
        let found = holders(&mesh, &[Replicate, Shard(1)], &[2, 4]).unwrap();
        let named: Vec<_> = found.iter().map(|(region, ranks)| (region.to_string(), ranks.as_slice())).collect();
        assert_eq!(named, [("[0:2, 0:2]".to_owned(), &[3, 0][..]), ("[0:2, 2:4]".to_owned(), &[1, 2][..])]);
        let empty = holders(&mesh, &[Shard(0), Shard(1)], &[0, 4]).unwrap();
        assert_eq!(empty, [(Region::whole(&[0, 4]).unwrap(), vec![3, 1, 0, 2])]);
    }

    #[test]
    fn what_cannot_be_placed_is_named() {
        let mesh = Mesh::new(&[2]).unwrap();
        let message = |placement| local_regions(&mesh, &[placement], &[4], 0).unwrap_err().to_string();
        assert!(message(Partial).contains("redistribute"), "{}", message(Partial));
        assert_eq!(message(Shard(1)), "placements[0]: shards dimension 1 of a tensor of 1 dimensions");
        assert_eq!(message(StridedShard { dim: 0, split_factor: 0 }), "placements[0]: split_factor is 0");
        assert!(matches!(local_regions(&mesh, &[], &[4], 0), Err(LayoutError::RankMismatch { .. })));
        assert!(matches!(local_shape(&mesh, &[Replicate], &[4], 2), Err(LayoutError::UnknownRank { rank: 2, .. })));
        let huge = [StridedShard { dim: 0, split_factor: u64::MAX }];
        assert!(matches!(local_regions(&mesh, &huge, &[1 << 60], 0), Err(LayoutError::TooManyRegions { .. })));
    }
}
