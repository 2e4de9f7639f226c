//! Layouts without a mesh: `ChunkSharding` (one dimension cut over a list of ranks, as PyTorch's `ChunkShardingSpec`)
//! and `EnumerableSharding` (a list of regions with their owners, as its `EnumerableShardingSpec`).

use std::collections::HashMap;

use crate::placement::chunk;
use crate::region::volume_of;
use crate::{Coverage, Dims, LayoutError, Region, coverage};

/// One dimension of a tensor cut into as many chunks as there are ranks in a list. A rank may be listed more than
/// once, and then holds several chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSharding {
    dim: usize,
    ranks: Vec<u64>,
}

impl ChunkSharding {
    /// Cuts dimension `dim` into `ranks.len()` chunks, the first for the first rank.
    pub fn new(dim: usize, ranks: &[u64]) -> Result<ChunkSharding, LayoutError> {
        if ranks.is_empty() {
            return Err(LayoutError::BadPlacement { index: 0, reason: "the list of ranks is empty".to_owned() });
        }
        Ok(ChunkSharding { dim, ranks: ranks.to_vec() })
    }

    /// Every chunk with the rank that holds it, in order; chunks past the end are empty, at the dimension's end.
    pub fn regions(&self, shape: &[u64]) -> Result<Vec<(Region, u64)>, LayoutError> {
        volume_of(shape)?;
        let Some(size) = shape.get(self.dim).copied() else {
            let reason = format!("shards dimension {} of a tensor of {} dimensions", self.dim, shape.len());
            return Err(LayoutError::BadPlacement { index: 0, reason });
        };
        let pieces = self.ranks.len() as u64;
        let cut = |(index, rank): (u64, &u64)| {
            let mut offsets = Dims::from_elem(0, shape.len());
            let mut sizes = Dims::from_slice(shape);
            (offsets[self.dim], sizes[self.dim]) = chunk(size, pieces, index);
            (Region::from_proven(offsets, sizes), *rank)
        };
        Ok((0u64..).zip(&self.ranks).map(cut).collect())
    }

    /// The chunks that `rank` holds; none for a rank that is not listed.
    pub fn regions_of(&self, shape: &[u64], rank: u64) -> Result<Vec<Region>, LayoutError> {
        Ok(self.regions(shape)?.into_iter().filter(|(_, owner)| *owner == rank).map(|(region, _)| region).collect())
    }
}

/// A tensor given as a list of regions, each with its owner. The same region may have several owners (replicas);
/// different regions must tile the tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnumerableSharding {
    shape: Dims,
    shards: Vec<(Region, u64)>,
}

impl EnumerableSharding {
    /// Takes the list as it is, after checking that every region lies inside the shape.
    pub fn new(shape: &[u64], shards: Vec<(Region, u64)>) -> Result<EnumerableSharding, LayoutError> {
        volume_of(shape)?;
        for (index, (region, _)) in shards.iter().enumerate() {
            region.check_listed_inside(index, shape)?;
        }
        Ok(EnumerableSharding { shape: Dims::from_slice(shape), shards })
    }

    /// The tensor's shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The list, in the order in which it was given.
    pub fn shards(&self) -> &[(Region, u64)] {
        &self.shards
    }

    /// The regions that `rank` holds.
    pub fn regions_of(&self, rank: u64) -> Vec<Region> {
        self.shards.iter().filter(|(_, owner)| *owner == rank).map(|(region, _)| region.clone()).collect()
    }

    /// Each distinct region, in order of first appearance, and the ranks that hold it, ascending.
    pub fn holders(&self) -> Vec<(Region, Vec<u64>)> {
        let mut place: HashMap<&Region, usize> = HashMap::with_capacity(self.shards.len());
        let mut found: Vec<(Region, Vec<u64>)> = Vec::new();
        for (region, rank) in &self.shards {
            let at = *place.entry(region).or_insert(found.len());
            match found.get_mut(at) {
                Some((_, ranks)) => ranks.push(*rank),
                None => found.push((region.clone(), vec![*rank])),
            }
        }
        for (_, ranks) in &mut found {
            ranks.sort_unstable();
            ranks.dedup();
        }
        found
    }

    /// Gaps and overlaps of the distinct regions; replicas do not count as overlaps.
    pub fn coverage(&self) -> Result<Coverage, LayoutError> {
        let distinct: Vec<Region> = self.holders().into_iter().map(|(region, _)| region).collect();
        coverage(&self.shape, &distinct)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_the_list_of_ranks() {
        let sharding = ChunkSharding::new(1, &[2, 0, 2, 1]).unwrap();
        let all: Vec<_> = sharding.regions(&[3, 5]).unwrap().iter().map(|(region, rank)| (region.to_string(), *rank)).collect();
        let expected = [("[0:3, 0:2]", 2), ("[0:3, 2:4]", 0), ("[0:3, 4:5]", 2), ("[0:3, 5:5]", 1)];
        assert_eq!(all, expected.map(|(region, rank)| (region.to_owned(), rank)));
        assert_eq!(sharding.regions_of(&[3, 5], 2).unwrap().len(), 2);
        assert!(sharding.regions_of(&[3, 5], 7).unwrap().is_empty());
        assert!(matches!(sharding.regions(&[3]), Err(LayoutError::BadPlacement { .. })));
        assert!(ChunkSharding::new(0, &[]).is_err());
    }

    #[test]
    fn replicas_share_an_entry_and_are_no_overlap() {
        let region = |start, size| Region::new(&[start], &[size]).unwrap();
        let shards = vec![(region(0, 3), 4), (region(3, 3), 1), (region(0, 3), 2)];
        let sharding = EnumerableSharding::new(&[6], shards).unwrap();
        assert_eq!(sharding.holders(), [(region(0, 3), vec![2, 4]), (region(3, 3), vec![1])]);
        assert_eq!(sharding.regions_of(4), [region(0, 3)]);
        assert!(sharding.coverage().unwrap().is_exact());
        assert!(EnumerableSharding::new(&[6], vec![(region(5, 2), 0)]).is_err());
    }
}
