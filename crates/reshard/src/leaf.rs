//! What a rank gives to a save and to a load: keys, and for each key the pieces of a tensor in memory, or a value.
//!
//! ```
//! use reshard::layout::Region;
//! use reshard::leaf::{SaveLeaf, SavePiece, SaveTensor, Scope};
//! use reshard::{DType, SaveState};
//!
//! let rows = [0u8; 2 * 6];
//! let region = Region::new(&[2, 0], &[2, 6])?; // rows 2 and 3 of a matrix of 8 x 6
//! let piece = SavePiece::contiguous(region, DType::UInt8, &rows)?;
//! let tensor = SaveTensor { dtype: DType::UInt8, shape: [8, 6][..].into(), requires_grad: false, pieces: vec![piece] };
//! let mut state = SaveState::new();
//! state.insert("matrix", None, Scope::Shared, SaveLeaf::Tensor(tensor))?;
//! # Ok::<(), reshard::Error>(())
//! ```

use indexmap::IndexMap;
use reshard_formats::{DType, KeyPath, PathSegment, Value};
use reshard_layout::{ByteLayout, Dims, Region};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Geometry, Result};
use crate::memory::{Source, Target};

/// Whose content a key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Scope {
    /// The ranks that have the key hold pieces of one tensor, or the same value; equal regions are copies of each other.
    #[default]
    Shared,
    /// Every rank has content of its own under this key (random-number state, a data loader's position); each is kept.
    PerRank,
}

/// The pieces of one tensor that a rank holds.
#[derive(Debug, Clone)]
pub struct SaveTensor<'a> {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole tensor.
    pub shape: Dims,
    /// Whether PyTorch should see it as requiring gradients.
    pub requires_grad: bool,
    /// What this rank holds; may be empty.
    pub pieces: Vec<SavePiece<'a>>,
}

/// A region of a tensor in this rank's memory.
#[derive(Debug, Clone)]
pub struct SavePiece<'a> {
    /// Which part of the whole.
    pub region: Region,
    /// How the region's elements lie in `memory`.
    pub layout: ByteLayout,
    /// The memory.
    pub memory: Source<'a>,
}

impl<'a> SavePiece<'a> {
    /// A region in memory of the given layout; its shape must be the region's and it must lie inside the memory.
    pub fn new(region: Region, layout: ByteLayout, memory: Source<'a>) -> Result<SavePiece<'a>> {
        check_piece(&region, &layout, memory.len())?;
        Ok(SavePiece { region, layout, memory })
    }

    /// A region that fills `memory` contiguously.
    pub fn contiguous(region: Region, dtype: DType, memory: &'a [u8]) -> Result<SavePiece<'a>> {
        let layout = ByteLayout::contiguous(region.sizes(), dtype.size()).given()?;
        SavePiece::new(region, layout, Source::new(memory))
    }
}

fn check_piece(region: &Region, layout: &ByteLayout, memory: usize) -> Result<()> {
    if layout.shape() != region.sizes() {
        return Err(Error::invalid(format!("a piece of shape {:?} cannot hold the region {region}", layout.shape())));
    }
    if layout.end() > memory as u64 {
        return Err(Error::invalid(format!("the region {region} needs {} bytes, its memory has {memory}", layout.end())));
    }
    Ok(())
}

/// One leaf of a state dict to save.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum SaveLeaf<'a> {
    /// A tensor or this rank's pieces of one.
    Tensor(SaveTensor<'a>),
    /// A plain value.
    Value(Value),
    /// A whole `torch.save` record of an object that only its own library understands.
    Record(Vec<u8>),
}

/// A state dict to save: leaves by flattened key.
#[derive(Debug, Clone, Default)]
pub struct SaveState<'a> {
    pub(crate) leaves: IndexMap<String, SaveEntry<'a>>,
    /// Whose state it is, for shards.
    pub(crate) rank: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct SaveEntry<'a> {
    pub(crate) path: KeyPath,
    pub(crate) scope: Scope,
    pub(crate) leaf: SaveLeaf<'a>,
}

impl<'a> SaveState<'a> {
    /// Nothing yet.
    pub fn new() -> SaveState<'a> {
        SaveState::default()
    }

    /// Adds a leaf. The path is where it sat in the tree; `None` when the key itself is the only segment.
    pub fn insert(&mut self, key: impl Into<String>, path: Option<KeyPath>, scope: Scope, leaf: SaveLeaf<'a>) -> Result<()> {
        let key = key.into();
        let path = path.unwrap_or_else(|| vec![PathSegment::Key(key.clone())]);
        if let SaveLeaf::Tensor(tensor) = &leaf {
            check_tensor(&key, tensor)?;
        }
        if self.leaves.contains_key(&key) {
            return Err(Error::invalid(format!("the key {key:?} occurs twice in the state to save")));
        }
        self.leaves.insert(key, SaveEntry { path, scope, leaf });
        Ok(())
    }

    /// Adds a whole tensor that lies contiguously in memory.
    pub fn insert_bytes(&mut self, key: impl Into<String>, dtype: DType, shape: &[u64], memory: &'a [u8]) -> Result<()> {
        let piece = SavePiece::contiguous(Region::whole(shape).given()?, dtype, memory)?;
        let tensor = SaveTensor { dtype, shape: Dims::from_slice(shape), requires_grad: false, pieces: vec![piece] };
        self.insert(key, None, Scope::Shared, SaveLeaf::Tensor(tensor))
    }

    /// Adds a plain value.
    pub fn insert_value(&mut self, key: impl Into<String>, value: Value) -> Result<()> {
        self.insert(key, None, Scope::Shared, SaveLeaf::Value(value))
    }

    /// The number of leaves.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }
}

fn check_tensor(key: &str, tensor: &SaveTensor<'_>) -> Result<()> {
    for piece in &tensor.pieces {
        piece.region.check_inside(&tensor.shape).map_err(|e| Error::invalid(format!("{key:?}: {e}")))?;
        if piece.layout.element_size() != tensor.dtype.size() {
            return Err(Error::invalid(format!(
                "{key:?}: elements of {} bytes are not {}",
                piece.layout.element_size(),
                tensor.dtype.name()
            )));
        }
        check_piece(&piece.region, &piece.layout, piece.memory.len()).map_err(|e| Error::invalid(format!("{key:?}: {e}")))?;
    }
    Ok(())
}

/// A region that a rank wants, and where it wants it.
#[derive(Debug)]
pub struct LoadPiece<'a> {
    /// Which part of the whole.
    pub region: Region,
    /// How the region's elements are to lie in `memory`.
    pub layout: ByteLayout,
    /// The memory.
    pub memory: Target<'a>,
}

impl<'a> LoadPiece<'a> {
    /// A region to be laid into memory by the given layout.
    pub fn new(region: Region, layout: ByteLayout, memory: Target<'a>) -> Result<LoadPiece<'a>> {
        check_piece(&region, &layout, memory.len())?;
        Ok(LoadPiece { region, layout, memory })
    }

    /// A region that is to fill `memory` contiguously.
    pub fn contiguous(region: Region, dtype: DType, memory: &'a mut [u8]) -> Result<LoadPiece<'a>> {
        let layout = ByteLayout::contiguous(region.sizes(), dtype.size()).given()?;
        LoadPiece::new(region, layout, Target::new(memory))
    }
}

/// The pieces of one tensor that a rank wants.
#[derive(Debug)]
pub struct LoadTensor<'a> {
    /// Element type of the memory.
    pub dtype: DType,
    /// Shape of the whole tensor.
    pub shape: Dims,
    /// What this rank wants; may be empty.
    pub pieces: Vec<LoadPiece<'a>>,
}

/// One wanted leaf.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadLeaf<'a> {
    /// A tensor, into the caller's memory.
    Tensor(LoadTensor<'a>),
    /// A plain value, returned by the load.
    Value,
}

/// What a rank wants loaded, by key.
#[derive(Debug, Default)]
pub struct LoadState<'a> {
    pub(crate) leaves: IndexMap<String, LoadEntry<'a>>,
    /// Who wants it, for shards.
    pub(crate) rank: usize,
}

#[derive(Debug)]
pub(crate) struct LoadEntry<'a> {
    pub(crate) scope: Scope,
    pub(crate) leaf: LoadLeaf<'a>,
}

impl<'a> LoadState<'a> {
    /// Nothing yet.
    pub fn new() -> LoadState<'a> {
        LoadState::default()
    }

    /// Adds a wanted leaf.
    pub fn insert(&mut self, key: impl Into<String>, scope: Scope, leaf: LoadLeaf<'a>) -> Result<()> {
        let key = key.into();
        if let LoadLeaf::Tensor(tensor) = &leaf {
            for piece in &tensor.pieces {
                piece.region.check_inside(&tensor.shape).map_err(|e| Error::invalid(format!("{key:?}: {e}")))?;
                if piece.layout.element_size() != tensor.dtype.size() {
                    return Err(Error::invalid(format!("{key:?}: the memory's elements are not {}", tensor.dtype.name())));
                }
            }
        }
        if self.leaves.contains_key(&key) {
            return Err(Error::invalid(format!("the key {key:?} is wanted twice")));
        }
        self.leaves.insert(key, LoadEntry { scope, leaf });
        Ok(())
    }

    /// Adds a whole tensor, to lie contiguously in memory.
    pub fn insert_bytes(&mut self, key: impl Into<String>, dtype: DType, shape: &[u64], memory: &'a mut [u8]) -> Result<()> {
        let piece = LoadPiece::contiguous(Region::whole(shape).given()?, dtype, memory)?;
        let tensor = LoadTensor { dtype, shape: Dims::from_slice(shape), pieces: vec![piece] };
        self.insert(key, Scope::Shared, LoadLeaf::Tensor(tensor))
    }

    /// Adds a plain value.
    pub fn insert_value(&mut self, key: impl Into<String>) -> Result<()> {
        self.insert(key, Scope::Shared, LoadLeaf::Value)
    }

    /// The number of wanted leaves.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }
}

/// The key and path under which a rank's own content is kept.
pub(crate) fn per_rank_key(key: &str, rank: usize) -> String {
    format!("{key}.rank_{rank}")
}

pub(crate) fn per_rank_path(path: &KeyPath, rank: usize) -> KeyPath {
    let mut path = path.clone();
    path.push(PathSegment::Key(format!("rank_{rank}")));
    path
}
