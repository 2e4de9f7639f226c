//! Loading: every rank finds the stored chunks that overlap what it wants and reads exactly those bytes, straight into
//! their places. Ranks need not talk to each other to load; they only tell each other of errors.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::load::{CastPolicy, Strictness};
//! use reshard::{Checkpoint, LoadOptions, LoadState, Solo, load_with};
//!
//! let checkpoint = Checkpoint::open(path)?;
//! let shape = &checkpoint.tensor("model.embed.weight")?.shape;
//! let mut weight = vec![0.0f64; shape.iter().product::<u64>() as usize]; // stored as float32
//! let mut wanted = LoadState::new();
//! wanted.tensor("model.embed.weight", shape, &mut weight)?;
//! let mut options = LoadOptions::default();
//! (options.strictness, options.cast) = (Strictness::Lenient, CastPolicy::Widening);
//! println!("{} bytes", load_with(&Solo, &checkpoint, &mut wanted, &options)?.report.bytes_wanted);
//! # Ok::<(), reshard::Error>(())
//! ```

mod boxes;
mod direct;
mod exchange;
mod options;
mod order;
mod plan;
mod read;
mod resolve;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
pub use options::{CastPolicy, KeyFilter, KeyMap, LoadOptions, Strictness, Verify};
use plan::ReadPlan;
use rayon::prelude::*;
use read::Done;
use reshard_formats::DType;
pub use resolve::Cast;
use resolve::{Resolution, Resolved};
use serde::Serialize;

use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue, Precision, ValueLocation};
use crate::error::{Error, Geometry, Result};
use crate::group::{Group, Solo, agree, decode, encode, together};
use crate::leaf::LoadState;
use crate::mismatch::{Difference, Mismatch};
use crate::report::{PhaseClock, Phases, Slowest};
use crate::verify::check_stored_twice;
use crate::workers::Workers;

/// What a load brought besides the tensors, which are in their places.
#[derive(Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The wanted values, by wanted key.
    pub values: IndexMap<String, LoadedValue>,
    /// What happened.
    pub report: LoadReport,
}

/// What a load did on this rank.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// The address.
    pub path: String,
    /// Times on this rank.
    pub phases: Phases,
    /// Tensors loaded.
    pub tensors: u64,
    /// Bytes put into their places.
    pub bytes_wanted: u64,
    /// Bytes read from storage.
    pub bytes_read: u64,
    /// Bytes that other ranks read for this one.
    pub bytes_exchanged: u64,
    /// Read requests.
    pub reads: u64,
    /// Files touched.
    pub files: u64,
    /// Records whose checksum was compared.
    pub verified: u64,
    /// What differs, when loading leniently; nothing otherwise.
    pub differences: Vec<Difference>,
    /// Casts that the policy allowed.
    pub casts: Vec<Cast>,
    /// The rank that took longest to read its part.
    pub slowest: Option<Slowest>,
}

impl LoadReport {
    /// Bytes read over bytes wanted; 1 when nothing was read in vain.
    pub fn read_amplification(&self) -> f64 {
        if self.bytes_wanted == 0 { 1.0 } else { self.bytes_read as f64 / self.bytes_wanted as f64 }
    }

    /// Wanted keys that the checkpoint lacks.
    pub fn missing(&self) -> Vec<&str> {
        self.differences.iter().filter(|d| matches!(d, Difference::Missing { .. })).map(Difference::key).collect()
    }

    /// Stored keys that were not wanted.
    pub fn unexpected(&self) -> Vec<&str> {
        self.differences.iter().filter(|d| matches!(d, Difference::Unexpected { .. })).map(Difference::key).collect()
    }
}

/// Loads what this rank wants from a path, as [`load_with`] does with its defaults: strict, without casts, with checksums.
pub fn load(group: &dyn Group, path: &str, state: &mut LoadState<'_>) -> Result<Loaded> {
    let checkpoint = together(group, Checkpoint::open(path))?;
    load_with(group, &checkpoint, state, &LoadOptions::default())
}

/// Loads what this rank wants. Every rank of the group calls it; each may want something else. An error on any rank, also
/// a difference found before reading, is an error on every rank.
pub fn load_with(group: &dyn Group, checkpoint: &Checkpoint, state: &mut LoadState<'_>, options: &LoadOptions) -> Result<Loaded> {
    let span = tracing::info_span!("load", rank = group.rank(), path = checkpoint.path());
    let _entered = span.enter();
    let mut clock = PhaseClock::new();
    clock.enter("plan");
    let resolution = resolved(group, checkpoint, state, options)?;
    let exchange = match options.exchange && group.size() > 1 {
        true => Some(exchange::agree_on_readers(group, state, &resolution.found)?),
        false => None,
    };
    let skipped = exchange.as_ref().map(|e| &e.skipped);
    let agreed = stored_twice(checkpoint, &resolution.found, options);
    let plan = agreed.and_then(|()| plan::plan(checkpoint, state, &resolution.found, skipped, options, Precision::Byte));
    clock.enter("values");
    // First of all: what is wrong with a value is known before any tensor is touched.
    let ready = plan.and_then(|plan| Ok((plan, read_values(checkpoint, state, &resolution.found, options)?)));
    let (plan, values) = together(group, ready)?;
    clock.enter("read");
    let started = Instant::now();
    let readers = Workers::reading(checkpoint.store.as_ref());
    let done = readers.run(|| read::execute(checkpoint, state, &plan, options)).and_then(|done| done);
    let reading = started.elapsed().as_secs_f64();
    let (done, slowest) = read_by_all(group, done, reading)?;
    let mut exchanged = 0;
    if let Some(exchange) = exchange {
        clock.enter("exchange");
        exchanged = together(group, exchange.pass_on(group, state))?;
    }
    let report = LoadReport { slowest, ..report(checkpoint, clock, &plan, &done, exchanged, resolution) };
    Ok(Loaded { values, report })
}

/// What a load of these tensors would do: resolved and planned as [`load_with`] does, and carried out up to the reading. Only
/// metadata is looked at, and the tensors need no memory.
pub(crate) fn dry_run(checkpoint: &Checkpoint, state: &LoadState<'_>, options: &LoadOptions) -> Result<LoadReport> {
    let mut clock = PhaseClock::new();
    clock.enter("plan");
    let resolution = resolved(&Solo, checkpoint, state, options)?;
    let plan = plan::plan(checkpoint, state, &resolution.found, None, options, Precision::Metadata)?;
    let done = read::count(checkpoint, state, &plan, options)?;
    Ok(report(checkpoint, clock, &plan, &done, 0, resolution))
}

fn report(
    checkpoint: &Checkpoint,
    clock: PhaseClock,
    plan: &ReadPlan,
    done: &Done,
    bytes_exchanged: u64,
    resolution: Resolution<'_>,
) -> LoadReport {
    LoadReport {
        path: checkpoint.path().to_owned(),
        phases: clock.finish(),
        tensors: plan.tensors,
        bytes_wanted: plan.bytes_wanted,
        bytes_read: done.bytes_read,
        reads: done.reads,
        files: plan.files,
        verified: done.verified,
        bytes_exchanged,
        differences: resolution.differences,
        casts: resolution.casts,
        slowest: None,
    }
}

/// What this rank read, once all ranks have read theirs, and the one that took longest.
fn read_by_all<T>(group: &dyn Group, done: Result<T>, seconds: f64) -> Result<(T, Option<Slowest>)> {
    let (value, told) = match done {
        Ok(value) => (Some(value), encode(&seconds)),
        Err(error) => (None, Err(error)),
    };
    let all = if group.size() == 1 { vec![told?] } else { agree(group, told)? };
    let read = all.iter().map(|bytes| Ok(vec![("read", decode(bytes)?)])).collect::<Result<Vec<_>>>()?;
    let value = value.ok_or_else(|| Error::internal("a rank failed without an error"))?;
    Ok((value, Slowest::of(&read)))
}

/// A load that verifies always trusts `.metadata` only where the data files' own indexes say the same.
fn stored_twice(checkpoint: &Checkpoint, found: &[Resolved<'_>], options: &LoadOptions) -> Result<()> {
    if options.verify != Verify::Always {
        return Ok(());
    }
    let mut files = BTreeSet::new();
    for resolved in found {
        match &resolved.stored.kind {
            CatalogKind::Tensor(tensor) => {
                files.extend(tensor.files());
            }
            CatalogKind::Value(ValueLocation::Record { file, .. }) => drop(files.insert(*file)),
            CatalogKind::Value(_) => {}
        }
    }
    files.retain(|file| *file < checkpoint.own_files());
    check_stored_twice(checkpoint, &files)
}

/// What can be loaded; a strict load fails here, with every difference at once.
fn resolved<'c>(
    group: &dyn Group,
    checkpoint: &'c Checkpoint,
    state: &LoadState<'_>,
    options: &LoadOptions,
) -> Result<Resolution<'c>> {
    let mut resolution = resolve::resolve(checkpoint, state, group.rank(), options);
    if !resolve::compare(group, checkpoint, &mut resolution)? {
        return Ok(resolution);
    }
    // Some rank has a difference; where it counts, all ranks fail with it.
    if options.strictness == Strictness::Strict && !resolution.differences.is_empty() {
        let missing = resolution.differences.iter().filter(|difference| matches!(difference, Difference::Missing { .. }));
        if let Some(error) = missing.map(Difference::key).find_map(|key| checkpoint.needs_parameter_map(key)) {
            return together(group, Err(error));
        }
        let (path, differences) = (checkpoint.path().to_owned(), std::mem::take(&mut resolution.differences));
        return together(group, Err(Error::Mismatch(Box::new(Mismatch { path, differences }))));
    }
    together(group, Ok(resolution))
}

/// The wanted values, by wanted key.
fn read_values(
    checkpoint: &Checkpoint,
    state: &LoadState<'_>,
    found: &[Resolved<'_>],
    options: &LoadOptions,
) -> Result<IndexMap<String, LoadedValue>> {
    let wanted: Vec<_> = found.iter().filter(|r| matches!(r.stored.kind, CatalogKind::Value(_))).collect();
    checkpoint.check_expanded(wanted.iter().map(|found| found.key))?;
    let read = |found: &&Resolved<'_>| {
        let name = state.leaves.get_index(found.wanted).map(|(name, _)| name.clone()).unwrap_or_default();
        let value = checkpoint.read_value(found.key)?;
        let refused = options.trusted.as_ref().and_then(|trusted| value.untrusted(trusted.as_ref()));
        match refused.map(str::to_owned) {
            Some(class) => Err(Error::Untrusted { path: checkpoint.path().to_owned(), key: name, class }),
            None => Ok((name, value)),
        }
    };
    let values: Vec<_> =
        Workers::reading(checkpoint.store.as_ref()).run(|| wanted.par_iter().map(read).collect::<Result<_>>())??;
    Ok(values.into_iter().collect())
}

impl Checkpoint {
    /// Reads a region of a tensor, packed in row-major order.
    pub fn read_bytes(&self, key: &str, region: &reshard_layout::Region) -> Result<Vec<u8>> {
        let tensor = self.tensor(key)?;
        let bytes = region.volume().checked_mul(tensor.dtype.size()).and_then(|n| usize::try_from(n).ok());
        let bytes = bytes.ok_or_else(|| Error::exhausted(format!("{region} of {key:?} does not fit into memory")))?;
        region.check_inside(&tensor.shape).given()?;
        self.check_region(key, region)?;
        // Asked for beforehand, as memory that there is not ends the process.
        let room = Vec::<u8>::new().try_reserve_exact(bytes);
        room.map_err(|_| Error::exhausted(format!("{region} of {key:?} takes {bytes} bytes, more than there is memory")))?;
        let mut memory = vec![0; bytes];
        self.read_bytes_into(key, region, &mut memory)?;
        Ok(memory)
    }

    /// Reads a region of a tensor into memory, packed in row-major order.
    pub fn read_bytes_into(&self, key: &str, region: &reshard_layout::Region, memory: &mut [u8]) -> Result<()> {
        self.read_region(key, self.tensor(key)?.dtype, region, memory)
    }

    /// Reads a region of a tensor that must have the given dtype.
    pub(crate) fn read_region(&self, key: &str, dtype: DType, region: &reshard_layout::Region, memory: &mut [u8]) -> Result<()> {
        let piece = crate::leaf::LoadPiece::contiguous(region.clone(), dtype, memory)?;
        let shape = self.tensor(key)?.shape.clone();
        let wanted = crate::leaf::LoadTensor { dtype, shape, pieces: vec![piece] };
        let mut state = LoadState::new();
        state.insert(key, crate::leaf::Scope::Shared, crate::leaf::LoadLeaf::Tensor(wanted))?;
        let options = LoadOptions { expected: Some(Arc::new(|_| false)), ..LoadOptions::default() };
        load_with(&Solo, self, &mut state, &options).map(drop)
    }

    /// Reads a whole tensor, packed in row-major order.
    pub fn read_whole(&self, key: &str) -> Result<Vec<u8>> {
        let shape = self.tensor(key)?.shape.clone();
        self.read_bytes(key, &reshard_layout::Region::whole(&shape).proven()?)
    }
}
