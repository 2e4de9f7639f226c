//! What one rank holds, as it travels to the rank that plans.
//!
//! Names, paths, dtypes and shapes (the *table*) are the same on nearly all ranks, so a rank whose table equals that of
//! rank 0 sends only its regions. A hash of both tells whether a cached plan still fits.

use std::sync::Arc;

use reshard_formats::own::{KeyEntry, TensorFacts};
use reshard_layout::Region;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

use crate::error::{Error, Geometry, Result};
use crate::group::encode;
use crate::leaf::{SaveLeaf, SaveState, Scope, per_rank_key, per_rank_path};

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
    pub(crate) table: Arc<Vec<KeyEntry>>,
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
                    Some(TensorFacts { dtype: tensor.dtype, requires_grad: tensor.requires_grad, shape: tensor.shape.clone() })
                }
                SaveLeaf::Value(_) | SaveLeaf::Record(_) => None,
            };
            table.push(KeyEntry::new(key, path, tensor));
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

/// A region from its offsets and sizes.
pub(crate) fn region_of(numbers: &[u64]) -> Result<Region> {
    let (offsets, sizes) = numbers.split_at(numbers.len() / 2);
    Region::new(offsets, sizes).proven()
}

pub(crate) fn hash(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}
