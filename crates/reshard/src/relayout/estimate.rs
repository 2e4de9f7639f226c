//! What a load on a layout would read, without reading: bytes, files and requests of each rank, over-read, imbalance, memory.

use std::collections::BTreeSet;

use rayon::prelude::*;
use reshard_formats::DType;
use reshard_layout::{ByteLayout, local_regions, local_shape, moves, runs};
use serde::Serialize;

use crate::checkpoint::{CatalogKind, CatalogTensor, Checkpoint, ChunkPlace};
use crate::error::{Error, Result};
use crate::load::LoadOptions;
use crate::mesh::Layout;
use crate::select::Selection;
use crate::workers::Workers;

/// Requests are cut at this many bytes, as a load cuts them.
const REQUEST: u64 = 1 << 20;
/// Unwanted bytes between neighbours that are read rather than skipped, on a local disk and on an object store.
const LOCAL_GAP: u64 = 4 << 10;
const REMOTE_GAP: u64 = 256 << 10;

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
    let gap = if checkpoint.store().capabilities().remote { REMOTE_GAP } else { LOCAL_GAP };
    let buffers = LoadOptions::default().buffer * Workers::reading(checkpoint.store().as_ref()).threads() as u64;
    let numbers = layout.mesh().ranks().to_vec();
    let mut ranks = Workers::normal().run(|| {
        numbers.par_iter().with_max_len(1).map(|&rank| one_rank(rank, &tensors, layout, gap, buffers)).collect::<Result<Vec<_>>>()
    })??;
    ranks.sort_by_key(|r| r.rank);
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
    tensors: &[(&str, String, &CatalogTensor)],
    layout: &Layout,
    gap: u64,
    buffers: u64,
) -> Result<RankEstimate> {
    let mut estimate = RankEstimate { rank, ..RankEstimate::default() };
    let mut files: BTreeSet<u32> = BTreeSet::new();
    for (stored, key, tensor) in tensors {
        let named = |e: reshard_layout::LayoutError| Error::invalid(format!("{stored:?}: {e}"));
        let placements = layout.placements(key, tensor.shape.len())?;
        let regions = local_regions(layout.mesh(), &placements, &tensor.shape, rank).map_err(named)?;
        let shape = local_shape(layout.mesh(), &placements, &tensor.shape, rank).map_err(named)?;
        let index = tensor.index().map_err(named)?;
        let before = estimate.bytes;
        for local in regions.iter().filter(|l| !l.global.is_empty()) {
            estimate.bytes += local.global.volume() * tensor.dtype.size();
            for found in moves(index, std::slice::from_ref(&local.global)) {
                let chunk = &tensor.chunks[found.chunk];
                let Some(source) = stored_layout(&chunk.place, chunk.region.sizes(), tensor.dtype)? else { continue };
                files.insert(chunk.file);
                let inside = found.region.within(&local.global).map_err(named)?;
                let to: reshard_layout::Dims = inside.offsets().iter().zip(&local.local).map(|(a, b)| a + b).collect();
                let from = found.region.within(&chunk.region).map_err(named)?;
                let target = ByteLayout::contiguous(&shape, source.element_size()).map_err(named)?;
                let all = runs(found.region.sizes(), &source, from.offsets(), &target, &to).map_err(named)?;
                let (read, requests) = requests(all, gap);
                estimate.bytes_read += read;
                estimate.reads += requests;
            }
        }
        estimate.tensors += u64::from(estimate.bytes > before);
    }
    estimate.files = files.len() as u64;
    estimate.peak_memory = estimate.bytes + buffers;
    Ok(estimate)
}

/// How a chunk lies in its file, up to a constant: a record's tensor is packed. `None` for one that lies in no file.
fn stored_layout(place: &ChunkPlace, sizes: &[u64], dtype: DType) -> Result<Option<ByteLayout>> {
    Ok(match place {
        ChunkPlace::Data(data) => Some(data.layout.clone()),
        ChunkPlace::Record { .. } => Some(ByteLayout::contiguous(sizes, dtype.size())?),
        ChunkPlace::Seen(seen) => match stored_layout(&seen.stored, seen.region.sizes(), seen.dtype)? {
            Some(stored) => Some(stored.through(&seen.window)?),
            None => None,
        },
        ChunkPlace::Fill(_) | ChunkPlace::Live => None,
    })
}

/// Bytes and requests of reading runs, neighbours merged.
fn requests(all: reshard_layout::Runs, gap: u64) -> (u64, u64) {
    let (mut read, mut count) = (0u64, 0u64);
    let mut stretch: Option<(u64, u64)> = None;
    let mut close = |(start, end): (u64, u64)| {
        read += end - start;
        count += (end - start).div_ceil(REQUEST);
    };
    for run in all {
        stretch = Some(match stretch {
            Some((start, end)) if run.src >= end && run.src - end <= gap => (start, run.src + run.len),
            Some(done) => {
                close(done);
                (run.src, run.src + run.len)
            }
            None => (run.src, run.src + run.len),
        });
    }
    if let Some(done) = stretch {
        close(done);
    }
    (read, count)
}
