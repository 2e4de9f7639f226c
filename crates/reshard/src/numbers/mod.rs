//! What a checkpoint's numbers look like: one streaming pass over every tensor, in bounded memory, all threads at once.
//!
//! A thread reads a block that stays in its cache and counts it before the next one: sums in vector instructions, and a
//! table of counts that tells percentiles and histograms. What is stored twice is counted once.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::numbers::{StatsOptions, stats};
//!
//! let numbers = stats(&reshard::Checkpoint::open(path)?, "model.embed.weight", &StatsOptions::default())?;
//! println!("from {:?} to {:?}, {} NaN", numbers.min, numbers.max, numbers.nans);
//! # Ok::<(), reshard::Error>(())
//! ```

mod elements;
mod parts;
mod singles;
mod sums;
mod table;
mod tally;

use std::sync::{Mutex, PoisonError};

use indexmap::IndexMap;
use reshard_layout::Region;
use serde::Serialize;

pub use self::elements::element_text;
pub(crate) use self::elements::{numbers, real_part};
use self::parts::{Part, parts};
use self::sums::Sums;
use self::tally::{Counter, Tally};
use crate::checkpoint::{CatalogKind, CatalogTensor, Checkpoint};
use crate::control::Control;
use crate::error::{Geometry, Result};
use crate::select::Selection;
use crate::stream::PartStream;
use crate::workers::Workers;

/// A block is this many bytes: a multiple of every element's size, and still in a core's own cache when it is counted.
const BLOCK: usize = 256 << 10;
/// So many parts are looked at to tell whether what is read is in memory already.
const LOOKED_AT: usize = 16;
/// A few tensors of less than this are not worth a look.
const LEAST_LOOKED_AT: u64 = 1 << 20;

/// What to compute for one tensor.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StatsOptions {
    /// Only this region of the tensor.
    pub region: Option<Region>,
    /// A histogram of this many equal steps between the extremes.
    pub bins: usize,
    /// Do not compare stored checksums on the way.
    pub no_verify: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// What to compute for many tensors.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ScanOptions {
    /// Which keys, and under which names.
    pub selection: Selection,
    /// A histogram of this many equal steps between the extremes of each.
    pub bins: usize,
    /// Compare stored checksums on the way, so that damage is an error and not another number.
    pub verify: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// Numbers about a tensor: of each part of a complex element, of both numbers in a packed byte, and of codes that have scales
/// the weights that they are.
///
/// Everything but the counts is over finite numbers, and `None` when there are none, or when the result has no finite value.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct TensorStats {
    /// Numbers in all.
    pub elements: u64,
    /// That are not a number.
    pub nans: u64,
    /// That are infinite.
    pub infinities: u64,
    /// Of these the positive ones.
    pub positive_infinities: u64,
    /// Of these the negative ones.
    pub negative_infinities: u64,
    /// That are zero.
    pub zeros: u64,
    /// That are so small that they have lost digits.
    pub subnormals: u64,
    /// The smallest.
    pub min: Option<f64>,
    /// The largest.
    pub max: Option<f64>,
    /// The largest magnitude.
    pub absmax: Option<f64>,
    /// The mean.
    pub mean: Option<f64>,
    /// The standard deviation of the population.
    pub std: Option<f64>,
    /// The square root of the sum of squares.
    pub l2: Option<f64>,
    /// The square root of the mean of squares.
    pub rms: Option<f64>,
    /// Percentiles: exact for elements of at most 16 bits, else within 2⁻⁸ (0.4 %) of the element at that rank.
    pub percentiles: Option<Percentiles>,
    /// Counts by magnitude: `(e, n)` for n numbers of a magnitude from 2ᵉ up to 2ᵉ⁺¹, without zeros.
    pub magnitudes: Vec<(i32, u64)>,
    /// Counts in equal steps from `min` to `max`, to within the error of a percentile; empty unless asked for.
    pub histogram: Vec<u64>,
}

impl TensorStats {
    /// Numbers that are neither NaN nor infinite.
    pub fn finite(&self) -> u64 {
        self.elements - self.nans - self.infinities
    }
}

/// Numbers below which a share of the elements lies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct Percentiles {
    pub p1: f64,
    pub p5: f64,
    pub p25: f64,
    pub p50: f64,
    pub p75: f64,
    pub p95: f64,
    pub p99: f64,
}

impl Percentiles {
    fn of(at: impl Fn(f64) -> Option<f64>) -> Option<Percentiles> {
        Some(Percentiles {
            p1: at(0.01)?,
            p5: at(0.05)?,
            p25: at(0.25)?,
            p50: at(0.5)?,
            p75: at(0.75)?,
            p95: at(0.95)?,
            p99: at(0.99)?,
        })
    }
}

/// Computes numbers about a tensor, in bounded memory.
pub fn stats(checkpoint: &Checkpoint, key: &str, options: &StatsOptions) -> Result<TensorStats> {
    let stored = checkpoint.tensor(key)?;
    let mut tensor = checkpoint.values(key)?;
    let region = match &options.region {
        Some(region) => {
            // A region is one of what is stored; of packed codes it is no region of the weight.
            tensor = if tensor.shape == stored.shape { tensor } else { stored };
            region.check_inside(&stored.shape).given()?;
            checkpoint.check_region(key, region)?;
            region.clone()
        }
        None => {
            checkpoint.check_region(key, &Region::whole(&stored.shape).proven()?)?;
            Region::whole(&tensor.shape).proven()?
        }
    };
    let parts = parts(checkpoint, key, tensor, &region, !options.no_verify)?;
    let pass = Pass { checkpoint, bins: options.bins, verify: !options.no_verify, control: &options.control };
    let mut found = pass.run(&[Counted { key, tensor, parts }])?;
    Ok(found.pop().unwrap_or_default())
}

/// Computes numbers about every selected tensor, in the order of the checkpoint.
pub fn scan(checkpoint: &Checkpoint, options: &ScanOptions) -> Result<IndexMap<String, TensorStats>> {
    let span = tracing::info_span!("scan", path = checkpoint.path());
    let _entered = span.enter();
    let mut names = Vec::new();
    let mut work = Vec::new();
    for item in options.selection.to_read(checkpoint)? {
        if let CatalogKind::Tensor(_) = &item.entry.kind {
            let (key, tensor) = (item.stored, checkpoint.values(item.stored)?);
            let parts = parts(checkpoint, key, tensor, &Region::whole(&tensor.shape).proven()?, options.verify)?;
            work.push(Counted { key, tensor, parts });
            names.push(item.key);
        }
    }
    let pass = Pass { checkpoint, bins: options.bins, verify: options.verify, control: &options.control };
    Ok(names.into_iter().zip(pass.run(&work)?).collect())
}

/// A tensor to be counted, as the numbers that it stands for.
struct Counted<'p> {
    key: &'p str,
    tensor: &'p CatalogTensor,
    parts: Vec<Part>,
}

struct Pass<'p> {
    checkpoint: &'p Checkpoint,
    bins: usize,
    verify: bool,
    control: &'p Control,
}

/// A tensor that is being counted: what is known, and how many of its parts are to come. Sums are joined in the order of the
/// parts, whichever is done first, so that the same files give the same numbers to the last digit.
struct Open {
    tally: Tally,
    sums: Vec<Sums>,
    left: usize,
}

impl Pass<'_> {
    /// The numbers of each tensor, given in parts.
    fn run(&self, tensors: &[Counted<'_>]) -> Result<Vec<TensorStats>> {
        let mut work: Vec<(usize, usize, u64)> = Vec::new();
        let mut open: Vec<Mutex<Open>> = Vec::with_capacity(tensors.len());
        for (i, Counted { tensor, parts, .. }) in tensors.iter().enumerate() {
            let element = tensor.dtype.size();
            let bytes = parts.iter().map(|part| part.region.volume().saturating_mul(element)).fold(0, u64::saturating_add);
            self.control.expect(bytes);
            work.extend((0..parts.len()).map(|part| (i, part, bytes)));
            let sums = vec![Sums::default(); parts.len()];
            open.push(Mutex::new(Open { tally: Tally::default(), sums, left: parts.len() }));
        }
        // Large tensors first, so that no thread is left alone with one at the end; the parts of one together, so that few
        // are open at a time.
        work.sort_by_key(|&(i, _, bytes)| (std::cmp::Reverse(bytes), i));
        let done: Mutex<Vec<TensorStats>> = Mutex::new(vec![TensorStats::default(); tensors.len()]);
        // As many as threads work at once: a table for each part would cost more than what is counted in a small one.
        let counters: Mutex<Vec<Counter>> = Mutex::new(Vec::new());
        let is_small = work.iter().all(|&(_, _, bytes)| bytes < LEAST_LOOKED_AT) && work.len() <= LOOKED_AT;
        let in_memory = is_small || self.are_in_memory(tensors, &work)?;
        Workers::scanning(self.checkpoint.store.as_ref(), in_memory).in_order(&work, |&(i, part, _)| {
            let counted = &tensors[i];
            let idle = counters.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut counter = idle.unwrap_or_else(Counter::new);
            let mut tally = self.part(&mut counter, counted, &counted.parts[part])?;
            counters.lock().unwrap_or_else(PoisonError::into_inner).push(counter);
            let mut open = open[i].lock().unwrap_or_else(PoisonError::into_inner);
            open.sums[part] = tally.take_sums();
            open.tally = std::mem::take(&mut open.tally).join(tally);
            open.left -= 1;
            if open.left == 0 {
                let sums = std::mem::take(&mut open.sums);
                let stats = std::mem::take(&mut open.tally).with_sums(sums).stats(counted.tensor.dtype, self.bins);
                done.lock().unwrap_or_else(PoisonError::into_inner)[i] = stats;
            }
            Ok(())
        })?;
        Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether most parts are there without waiting for a disk; when in doubt they are not. Of a service nothing is.
    fn are_in_memory(&self, tensors: &[Counted<'_>], work: &[(usize, usize, u64)]) -> Result<bool> {
        if self.checkpoint.store.capabilities().remote {
            return Ok(false);
        }
        let (mut looked_at, mut there) = (0, 0);
        for &(i, part, _) in work.iter().step_by(work.len().div_ceil(LOOKED_AT).max(1)) {
            let (Counted { key, tensor, .. }, Part { chunk, region }) = (&tensors[i], &tensors[i].parts[part]);
            let stream = PartStream::new(self.checkpoint, key, tensor, *chunk, region.clone(), false)?;
            looked_at += 1;
            there += usize::from(stream.is_in_memory()?);
        }
        Ok(there * 2 > looked_at)
    }

    fn part(&self, counter: &mut Counter, counted: &Counted<'_>, part: &Part) -> Result<Tally> {
        let Counted { key, tensor, .. } = counted;
        let dtype = tensor.dtype;
        let mut tally = Tally::default();
        let mut stream = PartStream::new(self.checkpoint, key, tensor, part.chunk, part.region.clone(), self.verify)?
            .with_memory(std::mem::take(&mut counter.memory));
        loop {
            self.control.check("computing statistics")?;
            let elements = stream.next()?;
            if elements.is_empty() {
                break;
            }
            for block in elements.chunks(BLOCK) {
                counter.block(dtype, block, &mut tally)?;
            }
            self.control.advance(elements.len() as u64);
        }
        counter.memory = stream.into_memory();
        counter.finish(&mut tally);
        Ok(tally)
    }
}
