//! `ChunkIndex`: which stored regions of a tensor overlap a wanted one. Regular grids (which one-dimensional shards
//! are too) are answered by bisection in each dimension; everything else by a tree of bounding boxes.

mod grid;
mod tree;

use grid::Grid;
use tree::Tree;

use crate::{Dims, LayoutError, Region};

/// The most regions that one tensor may have; positions are kept in 32 bits.
const MOST_REGIONS: u64 = u32::MAX as u64;

/// An index over the stored regions of one tensor.
#[derive(Clone, Debug)]
pub struct ChunkIndex {
    shape: Dims,
    regions: Vec<Region>,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Grid(Grid),
    Tree(Tree),
}

impl ChunkIndex {
    /// Indexes regions, each of which must lie inside `shape`. They may overlap, leave gaps and be empty.
    pub fn new(shape: &[u64], regions: Vec<Region>) -> Result<ChunkIndex, LayoutError> {
        crate::region::volume_of(shape)?;
        for (index, region) in regions.iter().enumerate() {
            region.check_listed_inside(index, shape)?;
        }
        if regions.len() as u64 >= MOST_REGIONS {
            return Err(LayoutError::TooManyRegions { field: "regions", limit: MOST_REGIONS });
        }
        let kind = match Grid::detect(shape.len(), &regions) {
            Some(grid) => Kind::Grid(grid),
            None => Kind::Tree(Tree::new(shape.len(), &regions)),
        };
        Ok(ChunkIndex { shape: Dims::from_slice(shape), regions, kind })
    }

    /// The regions, in the order in which they were given.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The tensor's shape.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Calls `f` with the position of each stored region that shares elements with `wanted`, and what they share,
    /// in an order that depends on the index alone. A wanted region of another rank overlaps nothing.
    pub fn for_each_overlap(&self, wanted: &Region, mut f: impl FnMut(usize, Region)) {
        if wanted.ndim() != self.shape.len() || wanted.is_empty() {
            return;
        }
        let mut visit = |index: usize| {
            if let Some(shared) = self.regions.get(index).and_then(|region| region.intersection(wanted)) {
                f(index, shared);
            }
        };
        match &self.kind {
            Kind::Grid(grid) => grid.for_each(wanted, &mut visit),
            Kind::Tree(tree) => tree.for_each(wanted, &mut visit),
        }
    }

    /// The stored regions that share elements with `wanted`, ascending, with what they share.
    pub fn overlaps(&self, wanted: &Region) -> Vec<(usize, Region)> {
        let mut found = Vec::new();
        self.for_each_overlap(wanted, |index, shared| found.push((index, shared)));
        found.sort_unstable_by_key(|(index, _)| *index);
        found
    }
}

/// One planned copy: what a stored region and a wanted region share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Position of the stored region in the index.
    pub chunk: usize,
    /// Position of the wanted region in the list.
    pub wanted: usize,
    /// The elements, in the coordinates of the tensor.
    pub region: Region,
}

/// Everything that has to be copied to fill the wanted regions: ordered by wanted region, then by stored region.
pub fn moves(index: &ChunkIndex, wanted: &[Region]) -> Vec<Move> {
    let mut found = Vec::with_capacity(wanted.len());
    for (position, region) in wanted.iter().enumerate() {
        let first = found.len();
        index.for_each_overlap(region, |chunk, region| found.push(Move { chunk, wanted: position, region }));
        if let Some(new) = found.get_mut(first..)
            && !new.is_sorted_by_key(|found| found.chunk)
        {
            new.sort_unstable_by_key(|found| found.chunk);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets, sizes).unwrap()
    }

    fn found(index: &ChunkIndex, wanted: &Region) -> Vec<(usize, String)> {
        index.overlaps(wanted).into_iter().map(|(chunk, region)| (chunk, region.to_string())).collect()
    }

    #[test]
    fn a_shuffled_grid_is_recognised_and_answers_in_its_own_numbering() {
        let cells = [[4, 0], [0, 3], [4, 3], [0, 0]].iter().map(|at| region(at, &[4, 3])).collect();
        let index = ChunkIndex::new(&[8, 6], cells).unwrap();
        assert!(matches!(index.kind, Kind::Grid(_)));
        assert_eq!(found(&index, &region(&[0, 2], &[8, 1])), [(0, "[4:8, 2:3]".into()), (3, "[0:4, 2:3]".into())]);
    }

    #[test]
    fn irregular_boxes_go_to_the_tree() {
        let boxes = vec![region(&[0, 0], &[2, 8]), region(&[2, 0], &[6, 3]), region(&[2, 3], &[6, 5])];
        let index = ChunkIndex::new(&[8, 8], boxes).unwrap();
        assert!(matches!(index.kind, Kind::Tree(_)));
        assert_eq!(found(&index, &region(&[1, 3], &[2, 1])), [(0, "[1:2, 3:4]".into()), (2, "[2:3, 3:4]".into())]);
    }

    #[test]
    fn scalars_empty_regions_and_foreign_ranks() {
        let scalar = ChunkIndex::new(&[], vec![region(&[], &[]), region(&[], &[])]).unwrap();
        assert_eq!(scalar.overlaps(&region(&[], &[])).len(), 2);
        assert!(scalar.overlaps(&region(&[0], &[1])).is_empty());
        let index = ChunkIndex::new(&[6], vec![region(&[0], &[6]), region(&[6], &[0])]).unwrap();
        assert_eq!(found(&index, &region(&[0], &[6])), [(0, "[0:6]".into())]);
        assert!(index.overlaps(&region(&[3], &[0])).is_empty());
        assert!(ChunkIndex::new(&[6], vec![]).unwrap().overlaps(&region(&[0], &[6])).is_empty());
    }

    #[test]
    fn regions_outside_the_tensor_are_named() {
        let error = ChunkIndex::new(&[6], vec![region(&[0], &[6]), region(&[4], &[3])]).unwrap_err();
        assert_eq!(error.to_string(), "region 1, [4:7], reaches past dimension 0 of shape [6]");
    }
}
