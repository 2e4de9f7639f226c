//! What a load on a layout would read, without reading: bytes, files and requests of each rank, over-read, imbalance, memory.
//! Every rank's load is planned and carried out as ever, up to the reading.

use rayon::prelude::*;
use serde::Serialize;

use crate::checkpoint::{CatalogKind, CatalogTensor, Checkpoint};
use crate::error::Result;
use crate::leaf::{LoadLeaf, LoadPiece, LoadState, LoadTensor, Scope};
use crate::load::{LoadOptions, dry_run};
use crate::memory::Target;
use crate::mesh::Layout;
use crate::select::Selection;
use crate::typed::shard_pieces;
use crate::workers::Workers;

/// What one rank would do.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankEstimate {
    /// The rank.
    pub rank: u64,
    /// Tensors of which it wants something.
    pub tensors: u64,
    /// Bytes it wants.
    pub bytes: u64,
    /// Bytes it would read.
    pub bytes_read: u64,
    /// Requests it would make.
    pub reads: u64,
    /// Files it would touch.
    pub files: u64,
    /// Its tensors and the buffers of a load.
    pub peak_memory: u64,
}

/// What a load would do.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadEstimate {
    /// Each rank, in order.
    pub ranks: Vec<RankEstimate>,
    /// Bytes of all tensors, each once.
    pub stored_bytes: u64,
    /// Bytes that all ranks want together.
    pub bytes: u64,
    /// Bytes that all ranks would read together.
    pub bytes_read: u64,
    /// Bytes read over bytes wanted.
    pub read_amplification: f64,
    /// The most loaded rank's bytes over the mean.
    pub imbalance: f64,
    /// The largest of the ranks' peaks.
    pub peak_memory: u64,
}

/// Estimates a load of the selected tensors on a layout, from the metadata alone.
pub fn estimate_load(checkpoint: &Checkpoint, layout: &Layout, selection: &Selection) -> Result<LoadEstimate> {
    let selected = selection.apply_some(checkpoint)?;
    let mut tensors: Vec<(&str, String, &CatalogTensor)> = Vec::new();
    for item in &selected {
        if let CatalogKind::Tensor(tensor) = &item.entry.kind {
            tensors.push((item.stored, item.key.clone(), tensor));
        }
    }
    let options = LoadOptions { expected: Some(std::sync::Arc::new(|_| false)), ..LoadOptions::default() };
    let readers = Workers::reading(checkpoint.store().as_ref());
    let buffers = options.buffer * readers.threads() as u64;
    let mut ranks = readers.run(|| {
        let one = |&rank: &u64| one_rank(rank, checkpoint, &tensors, layout, &options);
        layout.mesh().ranks().par_iter().with_max_len(1).map(one).collect::<Result<Vec<_>>>()
    })??;
    ranks.sort_by_key(|r| r.rank);
    for rank in &mut ranks {
        rank.peak_memory = rank.bytes + buffers;
    }
    let bytes: u64 = ranks.iter().map(|r| r.bytes).sum();
    let bytes_read: u64 = ranks.iter().map(|r| r.bytes_read).sum();
    let mean = bytes as f64 / ranks.len().max(1) as f64;
    let most = ranks.iter().map(|r| r.bytes).max().unwrap_or(0) as f64;
    Ok(LoadEstimate {
        stored_bytes: tensors.iter().map(|(_, _, t)| t.bytes()).sum(),
        bytes,
        bytes_read,
        read_amplification: if bytes > 0 { bytes_read as f64 / bytes as f64 } else { 1.0 },
        imbalance: if mean > 0.0 { most / mean } else { 1.0 },
        peak_memory: ranks.iter().map(|r| r.peak_memory).max().unwrap_or(0),
        ranks,
    })
}

fn one_rank(
    rank: u64,
    checkpoint: &Checkpoint,
    tensors: &[(&str, String, &CatalogTensor)],
    layout: &Layout,
    options: &LoadOptions,
) -> Result<RankEstimate> {
    let mut state = LoadState::new();
    for (number, (stored, key, tensor)) in tensors.iter().enumerate() {
        let placements = layout.placements(key, tensor.shape.len())?;
        let (pieces, local) = shard_pieces(stored, (layout.mesh(), &placements, &tensor.shape), rank, tensor.dtype)?;
        if pieces.is_empty() {
            continue;
        }
        let length = (local.iter().product::<u64>() * tensor.dtype.size()) as usize;
        let piece = |(region, memory)| LoadPiece::new(region, memory, Target::absent(length, number));
        let pieces = pieces.into_iter().map(piece).collect::<Result<_>>()?;
        let wanted = LoadTensor { dtype: tensor.dtype, shape: tensor.shape.clone(), pieces };
        state.insert(*stored, Scope::Shared, LoadLeaf::Tensor(wanted))?;
    }
    let report = dry_run(checkpoint, &state, options)?;
    Ok(RankEstimate {
        rank,
        tensors: report.tensors,
        bytes: report.bytes_wanted,
        bytes_read: report.bytes_read,
        reads: report.reads,
        files: report.files,
        peak_memory: 0,
    })
}
