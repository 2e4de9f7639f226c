//! The average of several checkpoints of the same model.
//!
//! ```
//! # let (path, to) = ("../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint", "memory://doc-merge/average.pt");
//! use reshard::convert::{ConvertOptions, Destination, Target};
//! use reshard::merge::merge;
//!
//! let (first, second) = (reshard::Checkpoint::open(path)?, reshard::Checkpoint::open(path)?);
//! let to = Destination::parse(to, Target::Torch, &Default::default())?;
//! let report = merge(&[&first, &second], &[0.9, 0.1], &to, Target::Torch, &ConvertOptions::default())?;
//! println!("{} tensors averaged", report.averaged);
//! # Ok::<(), reshard::Error>(())
//! ```

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Instant;

use reshard_formats::DType;
use serde::Serialize;

use crate::cast::cast;
use crate::checkpoint::{CatalogKind, Checkpoint};
use crate::convert::output::{OutputOptions, Plan};
use crate::convert::{ConvertOptions, ConvertReport, Destination, Target, plan_of, write_plan};
use crate::error::{Error, Result};
use crate::mismatch::{Difference, Mismatch};
use crate::numbers::{numbers, real_part};
use crate::stream::{Stream, TensorStream, check_covered};

/// What a merge did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct MergeReport {
    /// The sources, in order.
    pub sources: Vec<String>,
    /// Their weights, as given.
    pub weights: Vec<f64>,
    /// Tensors that were averaged.
    pub averaged: u64,
    /// Tensors and values that have no average (integers, flags, text) and differ; those of the first source were taken.
    pub taken_from_first: Vec<String>,
    /// What was written.
    pub written: ConvertReport,
}

/// Averages checkpoints of equal keys, dtypes and shapes: floating-point and complex tensors element by element in double
/// precision, by weight; everything else is that of the first. `weights` may be empty for a plain average.
pub fn merge(
    sources: &[&Checkpoint],
    weights: &[f64],
    destination: &Destination,
    target: Target,
    options: &ConvertOptions,
) -> Result<MergeReport> {
    let start = Instant::now();
    let Some((first, others)) = sources.split_first() else { return Err(Error::invalid("no checkpoint was given to merge")) };
    let weights = checked_weights(weights, sources.len())?;
    if !options.casts.is_empty() {
        return Err(Error::invalid("a merge does not cast; convert its result"));
    }
    check_same(first, others, options)?;
    if let Some((name, _)) = first.scaled_weights().first() {
        let hint = "convert with --cast bfloat16 first";
        return Err(Error::unsupported(format!("{name:?} is stored in codes with scales, whose mean is not a weight; {hint}")));
    }
    let planned = plan_of(first, options, target.format())?;
    let differing: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let stored: Vec<&str> = planned.plan.tensors.iter().map(|t| t.stored.as_str()).collect();
    compare_values(first, others, options, &differing)?;
    let averaged = planned.plan.tensors.iter().filter(|t| has_average(t.dtype)).count() as u64;
    let verify = options.verify;
    let open = {
        let (weights, differing, stored) = (&weights, &differing, &stored);
        Box::new(move |i: usize, region: &reshard_layout::Region| {
            let key = stored[i];
            let streams =
                sources.iter().map(|s| TensorStream::new(s, key, region.clone(), verify)).collect::<Result<Vec<_>>>()?;
            let dtype = first.tensor(key)?.dtype;
            let stream: Box<dyn Stream + '_> = match has_average(dtype) {
                true => Box::new(Average { streams, dtype, weights, sums: Vec::new(), scratch: Vec::new() }),
                false => Box::new(FirstOf { streams, key, differing, scratch: Vec::new() }),
            };
            Ok(stream)
        })
    };
    let plan = Plan { tensors: planned.plan.tensors.clone(), values: planned.plan.values.clone(), open };
    let output = OutputOptions::new(options.sync, &options.control, sources);
    let written = write_plan(&plan, sources, destination, target, options, &output)?;
    drop(plan);
    let written = planned.report(first, destination.describe(), target.format(), written, start);
    let differing = differing.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(MergeReport {
        sources: sources.iter().map(|s| s.path().to_owned()).collect(),
        weights,
        averaged,
        taken_from_first: differing.into_iter().collect(),
        written,
    })
}

fn checked_weights(weights: &[f64], sources: usize) -> Result<Vec<f64>> {
    if weights.is_empty() {
        return Ok(vec![1.0; sources]);
    }
    if weights.len() != sources {
        return Err(Error::invalid(format!("{} weights were given for {sources} checkpoints", weights.len())));
    }
    let sum: f64 = weights.iter().sum();
    if !sum.is_finite() || sum == 0.0 || weights.iter().any(|w| !w.is_finite()) {
        return Err(Error::invalid("weights must be finite numbers whose sum is not zero"));
    }
    Ok(weights.to_vec())
}

fn has_average(dtype: DType) -> bool {
    crate::select::is_float(dtype) || matches!(dtype, DType::Complex32 | DType::Complex64 | DType::Complex128)
}

/// Every difference between the sources at once.
fn check_same(first: &Checkpoint, others: &[&Checkpoint], options: &ConvertOptions) -> Result<()> {
    let wanted = options.selection.to_write(first)?;
    for other in others {
        let mut differences = Vec::new();
        for item in &wanted {
            let Some(found) = other.catalog().entries.get(item.stored) else {
                differences.push(Difference::Missing { key: item.stored.to_owned(), near: Vec::new() });
                continue;
            };
            match (&item.entry.kind, &found.kind) {
                (CatalogKind::Tensor(a), CatalogKind::Tensor(b)) => {
                    if a.shape != b.shape {
                        let (stored, wanted) = (b.shape.to_vec(), a.shape.to_vec());
                        differences.push(Difference::Shape { key: item.stored.to_owned(), stored, wanted });
                    } else if a.dtype != b.dtype {
                        let (stored, wanted) = (b.dtype.name().to_owned(), a.dtype.name().to_owned());
                        differences.push(Difference::DType { key: item.stored.to_owned(), stored, wanted, narrowing: false });
                    } else {
                        check_covered(other, item.stored, b)?;
                    }
                }
                (CatalogKind::Value(_), CatalogKind::Value(_)) => {}
                (CatalogKind::Tensor(_), _) => {
                    differences.push(Difference::Kind { key: item.stored.to_owned(), stored: "a value", wanted: "a tensor" });
                }
                (CatalogKind::Value(_), _) => {
                    differences.push(Difference::Kind { key: item.stored.to_owned(), stored: "a tensor", wanted: "a value" });
                }
            }
        }
        for item in options.selection.to_read(other)? {
            if !first.catalog().entries.contains_key(item.stored) {
                differences.push(Difference::Unexpected { key: item.stored.to_owned() });
            }
        }
        if !differences.is_empty() {
            return Err(Error::Mismatch(Box::new(Mismatch { path: other.path().to_owned(), differences })));
        }
    }
    Ok(())
}

fn compare_values(
    first: &Checkpoint,
    others: &[&Checkpoint],
    options: &ConvertOptions,
    differing: &Mutex<BTreeSet<String>>,
) -> Result<()> {
    for item in options.selection.apply(first)? {
        if !matches!(item.entry.kind, CatalogKind::Value(_)) {
            continue;
        }
        let value = first.read_value(item.stored)?;
        for other in others {
            if other.read_value(item.stored)? != value {
                differing.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(item.stored.to_owned());
            }
        }
    }
    Ok(())
}

/// The weighted mean of several streams.
struct Average<'m> {
    streams: Vec<TensorStream<'m>>,
    dtype: DType,
    weights: &'m [f64],
    sums: Vec<f64>,
    scratch: Vec<u8>,
}

impl Stream for Average<'_> {
    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        let real = real_part(self.dtype).ok_or_else(|| Error::unsupported(format!("{} has no average", self.dtype.name())))?;
        let total: f64 = self.weights.iter().sum();
        self.sums.clear();
        self.sums.resize(buf.len() / real.size() as usize, 0.0);
        self.scratch.resize(buf.len(), 0);
        for (stream, weight) in self.streams.iter_mut().zip(self.weights) {
            stream.fill(&mut self.scratch)?;
            for (sum, x) in self.sums.iter_mut().zip(numbers(self.dtype, &self.scratch)?) {
                *sum += weight * x;
            }
        }
        let wide: Vec<u8> = self.sums.iter().flat_map(|sum| (sum / total).to_le_bytes()).collect();
        cast(DType::Float64, &wide, real, buf)
    }
}

/// The first of several streams; tells when another differs.
struct FirstOf<'m> {
    streams: Vec<TensorStream<'m>>,
    key: &'m str,
    differing: &'m Mutex<BTreeSet<String>>,
    scratch: Vec<u8>,
}

impl Stream for FirstOf<'_> {
    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        let Some((first, others)) = self.streams.split_first_mut() else { return Err(Error::internal("nothing to merge")) };
        first.fill(buf)?;
        self.scratch.resize(buf.len(), 0);
        for other in others {
            other.fill(&mut self.scratch)?;
            if self.scratch != *buf {
                self.differing.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(self.key.to_owned());
            }
        }
        Ok(())
    }
}
