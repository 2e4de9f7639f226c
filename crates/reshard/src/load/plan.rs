//! From wanted regions to batches of reads.
//!
//! Each wanted piece becomes moves from stored chunks. Moves are sorted by file and position and gathered into batches of a
//! few megabytes: the unit of work of one thread.

use std::collections::{HashMap, HashSet};

use rayon::prelude::*;
use reshard_layout::{Dims, Move, Region, moves};

use super::options::{LoadOptions, Verify};
use super::resolve::Resolved;
use crate::checkpoint::{CatalogKind, CatalogTensor, Check, Checkpoint, ChunkLocation, Located, Precision, StoredChunk};
use crate::error::{Geometry, Result};
use crate::leaf::{LoadLeaf, LoadState};
use crate::workers::Workers;

/// A batch of moves is closed when it has this many bytes, on a local disk and on an object store.
const LOCAL_BATCH: u64 = 4 << 20;
const REMOTE_BATCH: u64 = 8 << 20;

/// One planned copy from a chunk to a piece.
#[derive(Debug)]
pub(super) struct PlannedMove {
    /// Position of the wanted key, and of its piece.
    pub(super) wanted: u32,
    pub(super) piece: u32,
    /// The box, in elements: where in the chunk, where in the piece, how large.
    pub(super) chunk_offsets: Dims,
    pub(super) piece_offsets: Dims,
    pub(super) sizes: Dims,
    pub(super) located: Located,
    pub(super) bytes: u64,
    /// Whether the move takes the whole chunk.
    pub(super) whole: bool,
    /// Where in the file it starts; what batches are sorted by.
    pub(super) start: u64,
}

impl PlannedMove {
    /// Whether the stored bytes are not yet the values.
    pub(super) fn decodes(&self) -> bool {
        !self.located.form.is_plain(self.located.dtype)
    }
}

/// Pieces that want the same as another and are copied from it afterwards.
#[derive(Debug)]
pub(super) struct PlannedCopy {
    pub(super) from: (u32, u32),
    pub(super) to: (u32, u32),
}

/// A stretch of a file to be checked although only a part of it is wanted.
#[derive(Debug)]
pub(super) struct PlannedCheck {
    pub(super) wanted: u32,
    pub(super) file: u32,
    pub(super) check: Check,
}

/// All reads of a load.
#[derive(Debug, Default)]
pub(super) struct ReadPlan {
    /// Each inner list is the work of one thread, sorted by position. Batches of one wave run at the same time;
    /// memory that is wanted under several keys is filled in a later wave, never by two threads at once.
    pub(super) waves: Vec<Vec<Vec<PlannedMove>>>,
    pub(super) copies: Vec<PlannedCopy>,
    pub(super) checks: Vec<PlannedCheck>,
    pub(super) tensors: u64,
    pub(super) bytes_wanted: u64,
    pub(super) files: u64,
}

pub(super) fn plan(
    checkpoint: &Checkpoint,
    state: &LoadState<'_>,
    found: &[Resolved<'_>],
    skipped: Option<&HashSet<(u32, u32)>>,
    options: &LoadOptions,
    precision: Precision,
) -> Result<ReadPlan> {
    let mut plan = ReadPlan::default();
    let mut waves: Vec<Vec<PlannedMove>> = Vec::new();
    // The pieces that fill a stretch of memory, to find memory that is wanted twice.
    let mut filled: HashMap<usize, usize, foldhash::fast::RandomState> = HashMap::default();
    let mut jobs: Vec<(usize, u32, &Resolved<'_>, &CatalogTensor, usize)> = Vec::new();
    for resolved in found {
        let CatalogKind::Tensor(stored) = &resolved.stored.kind else { continue };
        let Some((_, entry)) = state.leaves.get_index(resolved.wanted) else { continue };
        let LoadLeaf::Tensor(wanted) = &entry.leaf else { continue };
        plan.tensors += 1;
        for (i, piece) in wanted.pieces.iter().enumerate() {
            plan.bytes_wanted += piece.region.volume() * wanted.dtype.size();
            let same = wanted.pieces[..i].iter().position(|earlier| earlier.region == piece.region);
            // What another rank reads arrives in every piece that wants it.
            if let Some(earlier) = same.filter(|_| skipped.is_none_or(|s| !s.contains(&(resolved.wanted as u32, i as u32)))) {
                let key = resolved.wanted as u32;
                plan.copies.push(PlannedCopy { from: (key, earlier as u32), to: (key, i as u32) });
                continue;
            }
            if piece.region.is_empty() || skipped.is_some_and(|s| s.contains(&(resolved.wanted as u32, i as u32))) {
                continue;
            }
            let wave = filled.entry(piece.memory.address()).and_modify(|wave| *wave += 1).or_insert(0);
            jobs.push((*wave, i as u32, resolved, stored, jobs.len()));
        }
    }
    // Finding a chunk may mean reading its record's header, so it is done by all threads.
    let remote = checkpoint.store.capabilities().remote;
    let planned: Vec<(usize, Vec<PlannedMove>, Vec<PlannedCheck>)> =
        Workers::reading(checkpoint.store.as_ref()).run(|| {
            jobs.par_iter()
                .with_min_len(if remote { 1 } else { 16 })
                .map(|(wave, piece, resolved, stored, _)| {
                    let (moves, checks) = piece_moves(checkpoint, state, (resolved, stored, *piece), options, precision)?;
                    Ok((*wave, moves, checks))
                })
                .collect::<Result<Vec<_>>>()
        })??;
    for (wave, moves, checks) in planned {
        if waves.len() <= wave {
            waves.resize_with(wave + 1, Vec::new);
        }
        waves[wave].extend(moves);
        plan.checks.extend(checks);
    }
    plan.checks.sort_by_key(|c| (c.file, c.check.stretch()));
    plan.checks.dedup_by_key(|c| (c.file, c.check));
    let mut files: Vec<u32> = waves.iter().flatten().map(|m| m.located.file).collect();
    let computed = waves.iter().flatten().filter_map(|m| m.located.computed.as_deref());
    let inputs: Vec<u32> = computed.flat_map(|computed| computed.tensors().flat_map(CatalogTensor::files)).collect();
    files.extend(inputs);
    files.sort_unstable();
    files.dedup();
    files.retain(|&file| file != StoredChunk::NO_FILE);
    plan.files = files.len() as u64;
    let size = if remote { REMOTE_BATCH } else { LOCAL_BATCH };
    plan.waves = waves.into_iter().map(|moves| batches(moves, size)).collect();
    Ok(plan)
}

fn piece_moves(
    checkpoint: &Checkpoint,
    state: &LoadState<'_>,
    (resolved, stored, piece): (&Resolved<'_>, &CatalogTensor, u32),
    options: &LoadOptions,
    precision: Precision,
) -> Result<(Vec<PlannedMove>, Vec<PlannedCheck>)> {
    let mut planned = Vec::new();
    let mut checks = Vec::new();
    let Some((_, entry)) = state.leaves.get_index(resolved.wanted) else { return Ok((planned, checks)) };
    let LoadLeaf::Tensor(wanted) = &entry.leaf else { return Ok((planned, checks)) };
    let target = &wanted.pieces[piece as usize];
    let mut failure = None;
    let key = resolved.wanted as u32;
    for found in overlaps(stored, &target.region)? {
        let chunk = &stored.chunks[found.chunk];
        // What a view leaves as it is.
        if matches!(chunk.location, ChunkLocation::Live) {
            continue;
        }
        let mut step = || -> Result<()> {
            let located = checkpoint.locate_to(precision, resolved.key, stored, found.chunk)?;
            let whole = found.region == chunk.region;
            if options.verify == Verify::Always && !(whole && located.check_is_layout()) && located.check.stretch().is_some() {
                checks.push(PlannedCheck { wanted: key, file: located.file, check: located.check });
            }
            let chunk_offsets = Dims::from_slice(found.region.within(&chunk.region).proven()?.offsets());
            let start = located.layout.position(&chunk_offsets);
            if let Some(computed) =
                located.computed.as_deref().filter(|_| options.verify != Verify::Never && precision == Precision::Byte)
            {
                let part = found.region.within(&chunk.region).proven()?;
                let found = computed.checks(checkpoint, &located.layout, &part, options.verify == Verify::Always)?;
                checks.extend(found.into_iter().map(|(file, check)| PlannedCheck { wanted: key, file, check }));
            }
            planned.push(PlannedMove {
                wanted: key,
                piece,
                piece_offsets: Dims::from_slice(found.region.within(&target.region).proven()?.offsets()),
                chunk_offsets,
                sizes: Dims::from_slice(found.region.sizes()),
                bytes: found.region.volume() * located.dtype.size(),
                located,
                whole,
                start,
            });
            Ok(())
        };
        if let Err(error) = step() {
            failure = Some(error);
            break;
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok((planned, checks)),
    }
}

/// The stored chunks that overlap a region; no index is built for a tensor of one chunk.
fn overlaps(stored: &CatalogTensor, wanted: &Region) -> Result<Vec<Move>> {
    if let [only] = stored.chunks.as_slice() {
        let region = only.region.intersection(wanted);
        return Ok(region.map(|region| Move { chunk: 0, wanted: 0, region }).into_iter().collect());
    }
    Ok(moves(stored.index().proven()?, std::slice::from_ref(wanted)))
}

/// Sorted by position, at most `size` bytes each unless a move has more.
fn batches(mut moves: Vec<PlannedMove>, size: u64) -> Vec<Vec<PlannedMove>> {
    moves.sort_by_key(|m| (m.located.file, m.start));
    let mut batches: Vec<Vec<PlannedMove>> = Vec::new();
    let mut bytes = 0;
    for planned in moves {
        let fits = bytes + planned.bytes <= size
            && batches.last().and_then(|b| b.last()).is_some_and(|last| last.located.file == planned.located.file);
        bytes = if fits { bytes } else { 0 } + planned.bytes;
        match batches.last_mut().filter(|_| fits) {
            Some(batch) => batch.push(planned),
            None => batches.push(vec![planned]),
        }
    }
    batches
}

impl Located {
    /// Whether the checksum is about exactly the chunk's bytes in their order.
    pub(super) fn check_is_layout(&self) -> bool {
        self.check.stretch() == Some((self.layout.base(), self.layout.end() - self.layout.base())) && self.layout.is_contiguous()
    }
}
