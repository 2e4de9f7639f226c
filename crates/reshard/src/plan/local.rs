//! What one rank holds, as it travels to the rank that plans.
//!
//! Names, paths, dtypes and shapes (the *table*) are the same on nearly all ranks, so a rank whose table equals that of
//! rank 0 sends only its regions. A hash of both tells whether a cached plan still fits.

use std::sync::Arc;

use reshard_formats::{DType, KeyPath, PathSegment};
use reshard_layout::{Dims, Region};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::error::{Error, Result};
use crate::group::encode;
use crate::leaf::{SaveLeaf, SaveState, Scope, per_rank_key, per_rank_path};

/// One key of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TableEntry {
    pub(crate) key: String,
    /// `None` when the path is the key alone.
    pub(crate) path: Option<Vec<WireSegment>>,
    /// `None` for a value.
    pub(crate) tensor: Option<WireTensor>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireTensor {
    /// Position in [`DType::ALL`].
    pub(crate) dtype: u8,
    pub(crate) requires_grad: bool,
    pub(crate) shape: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WireSegment {
    Key(String),
    Index(i64),
}

/// The regions a rank holds, for each tensor of the table in its order: flat numbers, offsets then sizes of each region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub(crate) struct Holdings {
    /// Number of regions of each tensor.
    pub(crate) counts: Vec<u32>,
    pub(crate) numbers: Vec<u64>,
}

/// What one rank holds.
#[derive(Debug, Clone)]
pub(crate) struct LocalPlan {
    pub(crate) table: Arc<Vec<TableEntry>>,
    pub(crate) holdings: Holdings,
    pub(crate) table_hash: u128,
    pub(crate) hash: u128,
}

impl LocalPlan {
    pub(crate) fn of(state: &SaveState<'_>, rank: usize) -> Result<LocalPlan> {
        let mut table = Vec::with_capacity(state.leaves.len());
        let mut holdings = Holdings::default();
        for (key, entry) in &state.leaves {
            let (key, path) = match entry.scope {
                Scope::Shared => (key.clone(), entry.path.clone()),
                Scope::PerRank => (per_rank_key(key, rank), per_rank_path(&entry.path, rank)),
            };
            let tensor = match &entry.leaf {
                SaveLeaf::Tensor(tensor) => {
                    let count = u32::try_from(tensor.pieces.len())
                        .map_err(|_| Error::exhausted(format!("{key:?} has too many pieces on rank {rank}")))?;
                    holdings.counts.push(count);
                    for piece in &tensor.pieces {
                        holdings.numbers.extend_from_slice(piece.region.offsets());
                        holdings.numbers.extend_from_slice(piece.region.sizes());
                    }
                    Some(WireTensor {
                        dtype: dtype_code(tensor.dtype)?,
                        requires_grad: tensor.requires_grad,
                        shape: tensor.shape.to_vec(),
                    })
                }
                SaveLeaf::Value(_) | SaveLeaf::Record(_) => None,
            };
            table.push(TableEntry { path: wire_path(&key, &path), key, tensor });
        }
        let table_hash = hash(&encode(&table)?);
        let holdings_hash = hash(&encode(&holdings)?);
        let mut both = XxHash3_128::new();
        both.write(&table_hash.to_le_bytes());
        both.write(&holdings_hash.to_le_bytes());
        Ok(LocalPlan { table: Arc::new(table), holdings, table_hash, hash: both.finish_128() })
    }
}

/// Where a rank's pieces are among its numbers.
pub(crate) struct Pieces<'p> {
    /// For each key: where its first piece starts, and how many numbers a piece has.
    places: Vec<(usize, usize)>,
    numbers: &'p [u64],
}

impl LocalPlan {
    pub(crate) fn pieces(&self) -> Pieces<'_> {
        let mut places = Vec::with_capacity(self.table.len());
        let mut counts = self.holdings.counts.iter();
        let mut start = 0;
        for entry in self.table.iter() {
            let width = entry.tensor.as_ref().map_or(0, |tensor| 2 * tensor.shape.len());
            places.push((start, width));
            let count = if entry.tensor.is_some() { counts.next().copied().unwrap_or(0) } else { 0 };
            start += width * count as usize;
        }
        Pieces { places, numbers: &self.holdings.numbers }
    }
}

impl<'p> Pieces<'p> {
    /// The offsets and sizes of a piece.
    pub(crate) fn get(&self, local: u32, piece: u32) -> Option<&'p [u64]> {
        let (start, width) = *self.places.get(local as usize)?;
        let start = start.checked_add(width.checked_mul(piece as usize)?)?;
        self.numbers.get(start..start.checked_add(width)?)
    }
}

impl TableEntry {
    pub(crate) fn key_path(&self) -> KeyPath {
        match &self.path {
            None => vec![PathSegment::Key(self.key.clone())],
            Some(path) => path
                .iter()
                .map(|segment| match segment {
                    WireSegment::Key(key) => PathSegment::Key(key.clone()),
                    WireSegment::Index(index) => PathSegment::Index(*index),
                })
                .collect(),
        }
    }
}

pub(crate) fn wire_path(key: &str, path: &KeyPath) -> Option<Vec<WireSegment>> {
    if let [PathSegment::Key(only)] = path.as_slice()
        && only == key
    {
        return None;
    }
    Some(
        path.iter()
            .map(|segment| match segment {
                PathSegment::Key(key) => WireSegment::Key(key.clone()),
                PathSegment::Index(index) => WireSegment::Index(*index),
            })
            .collect(),
    )
}

/// The element type as it travels.
pub(crate) fn dtype_code(dtype: DType) -> Result<u8> {
    DType::ALL
        .iter()
        .position(|d| *d == dtype)
        .and_then(|i| u8::try_from(i).ok())
        .ok_or_else(|| Error::invalid(format!("the dtype {} cannot be planned", dtype.name())))
}

pub(crate) fn dtype_of(code: u8) -> Result<DType> {
    DType::ALL.get(usize::from(code)).copied().ok_or_else(|| Error::internal(format!("unknown dtype code {code}")))
}

/// A region from its offsets and sizes.
pub(crate) fn region_of(numbers: &[u64]) -> Result<Region> {
    let (offsets, sizes) = numbers.split_at(numbers.len() / 2);
    Ok(Region::new(offsets, sizes)?)
}

pub(crate) fn hash(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

pub(crate) fn dims(numbers: &[u64]) -> Dims {
    Dims::from_slice(numbers)
}
