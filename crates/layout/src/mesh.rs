//! `Mesh`: ranks arranged in an n-dimensional array, in any order, with named dimensions. It answers where a rank
//! stands and cuts itself into sub-meshes; what that means for a tensor is the business of `placement`.

use crate::error::check_rank;
use crate::region::volume_of;
use crate::{Dims, LayoutError};

/// An n-dimensional arrangement of distinct ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    shape: Dims,
    names: Vec<String>,
    /// The rank at each position, row-major.
    ranks: Vec<u64>,
    /// `(rank, position)` ascending by rank, unless the ranks are simply 0, 1, 2, ….
    positions: Option<Vec<(u64, usize)>>,
}

/// More ranks than any job has; a larger number is a mistake in a file, and would be allocated.
const MOST_RANKS: u64 = 1 << 24;

impl Mesh {
    /// The ranks 0, 1, 2, … in row-major order; the dimensions are called `dim_0`, `dim_1`, ….
    pub fn new(shape: &[u64]) -> Result<Mesh, LayoutError> {
        let ranks = check_shape(shape)?;
        Ok(Mesh {
            shape: Dims::from_slice(shape),
            names: (0..shape.len()).map(|dim| format!("dim_{dim}")).collect(),
            ranks: (0..ranks).collect(),
            positions: None,
        })
    }

    /// A mesh with these ranks, row-major, in any order; each at most once.
    pub fn with_ranks(shape: &[u64], ranks: &[u64]) -> Result<Mesh, LayoutError> {
        let expected = check_shape(shape)?;
        if ranks.len() as u64 != expected {
            return Err(bad(format!("ranks has {} entries, shape {shape:?} needs {expected}", ranks.len())));
        }
        let mut mesh = Mesh::new(shape)?;
        if mesh.ranks != ranks {
            let mut positions: Vec<(u64, usize)> = ranks.iter().copied().zip(0..).collect();
            positions.sort_unstable();
            if let Some(pair) = positions.windows(2).find(|pair| pair[0].0 == pair[1].0) {
                let (rank, first, second) = (pair[0].0, pair[0].1, pair[1].1);
                return Err(bad(format!("ranks[{first}] and ranks[{second}] are both {rank}")));
            }
            mesh.ranks = ranks.to_vec();
            mesh.positions = Some(positions);
        }
        Ok(mesh)
    }

    /// The same mesh with names for its dimensions; each at most once.
    pub fn named<S: AsRef<str>>(mut self, names: &[S]) -> Result<Mesh, LayoutError> {
        check_rank("names", self.shape.len(), names.len())?;
        for (dim, name) in names.iter().enumerate() {
            if let Some(first) = names.iter().take(dim).position(|other| other.as_ref() == name.as_ref()) {
                return Err(bad(format!("names[{first}] and names[{dim}] are both {:?}", name.as_ref())));
            }
        }
        self.names = names.iter().map(|name| name.as_ref().to_owned()).collect();
        Ok(self)
    }

    /// Ranks along each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The number of dimensions.
    pub fn ndim(&self) -> usize {
        self.shape.len()
    }

    /// The names of the dimensions.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// All ranks, in row-major order of their positions.
    pub fn ranks(&self) -> &[u64] {
        &self.ranks
    }

    /// The dimension of this name.
    pub fn dim(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other == name)
    }

    /// Where a rank stands; `None` when it is not part of the mesh.
    pub fn coordinate(&self, rank: u64) -> Option<Dims> {
        let position = match &self.positions {
            None => usize::try_from(rank).ok().filter(|position| *position < self.ranks.len())?,
            Some(positions) => {
                let found = positions.binary_search_by_key(&rank, |(rank, _)| *rank).ok()?;
                positions.get(found)?.1
            }
        };
        Some(self.coordinate_at(position))
    }

    /// The coordinate of a row-major position.
    pub(crate) fn coordinate_at(&self, position: usize) -> Dims {
        let mut rest = position as u64;
        let mut coordinate = Dims::from_elem(0, self.shape.len());
        for (at, size) in coordinate.iter_mut().zip(&self.shape).rev() {
            *at = rest % size;
            rest /= size;
        }
        coordinate
    }

    /// The rank that stands at a coordinate; `None` outside the mesh.
    pub fn rank_at(&self, coordinate: &[u64]) -> Option<u64> {
        if coordinate.len() != self.shape.len() {
            return None;
        }
        let mut position = 0u64;
        for (at, size) in coordinate.iter().zip(&self.shape) {
            if at >= size {
                return None;
            }
            position = position * size + at;
        }
        self.ranks.get(usize::try_from(position).ok()?).copied()
    }
}

fn bad(reason: String) -> LayoutError {
    LayoutError::BadMesh { reason }
}

/// The number of ranks of a mesh of this shape.
fn check_shape(shape: &[u64]) -> Result<u64, LayoutError> {
    if let Some(dim) = shape.iter().position(|size| *size == 0) {
        return Err(bad(format!("shape[{dim}] is 0")));
    }
    match volume_of(shape) {
        Ok(ranks) if ranks <= MOST_RANKS => Ok(ranks),
        _ => Err(bad(format!("shape {shape:?} has more than {MOST_RANKS} ranks"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_may_stand_in_any_order() {
        let mesh = Mesh::with_ranks(&[2, 3], &[5, 3, 1, 0, 2, 9]).unwrap();
        assert_eq!(mesh.coordinate(9).unwrap().as_slice(), [1, 2]);
        assert_eq!(mesh.rank_at(&[0, 2]), Some(1));
        assert_eq!((mesh.coordinate(4), mesh.rank_at(&[2, 0]), mesh.rank_at(&[0])), (None, None, None));
    }

    #[test]
    fn contradictions_are_named() {
        let message = |mesh: Result<Mesh, LayoutError>| mesh.unwrap_err().to_string();
        assert_eq!(message(Mesh::new(&[2, 0])), "mesh: shape[1] is 0");
        assert!(message(Mesh::new(&[1 << 40, 1 << 40])).contains("more than"));
        assert_eq!(message(Mesh::with_ranks(&[3], &[4, 1, 4])), "mesh: ranks[0] and ranks[2] are both 4");
        assert!(message(Mesh::with_ranks(&[3], &[1])).contains("ranks has 1 entries"));
        let mesh = Mesh::new(&[2, 2]).unwrap();
        assert!(message(mesh.named(&["dp", "dp"])).contains("both \"dp\""));
    }
}
