//! Numbers about a tensor: extremes, mean, spread, zeros and what is not a number; a histogram on request.

use rayon::prelude::*;
use reshard_formats::DType;
use reshard_layout::Region;
use serde::Serialize;

use crate::cast::{as_f64, cast};
use crate::checkpoint::Checkpoint;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::stream::{BLOCK, Stream, TensorStream, check_covered};
use crate::workers::Workers;

/// What to compute.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StatsOptions {
    /// Only this region of the tensor.
    pub region: Option<Region>,
    /// A histogram of this many bins between the extremes; takes a second pass.
    pub bins: usize,
    /// To watch and to cancel.
    pub control: Control,
}

/// Numbers about a tensor. Means and extremes are over finite elements; `None` when there are none.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct TensorStats {
    /// Elements in all.
    pub elements: u64,
    /// The smallest.
    pub min: Option<f64>,
    /// The largest.
    pub max: Option<f64>,
    /// The mean.
    pub mean: Option<f64>,
    /// The standard deviation of the population.
    pub std: Option<f64>,
    /// Elements that are zero.
    pub zeros: u64,
    /// Elements that are not a number.
    pub nans: u64,
    /// Elements that are infinite.
    pub infinities: u64,
    /// Counts by bin, equal steps from `min` to `max`; empty unless asked for.
    pub histogram: Vec<u64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    elements: u64,
    finite: u64,
    min: f64,
    max: f64,
    mean: f64,
    /// Sum of squared distances from the mean.
    spread: f64,
    zeros: u64,
    nans: u64,
    infinities: u64,
}

impl Tally {
    fn of(numbers: &[f64]) -> Tally {
        let mut tally = Tally { elements: numbers.len() as u64, min: f64::INFINITY, max: f64::NEG_INFINITY, ..Tally::default() };
        let mut sum = 0.0;
        for &x in numbers {
            if x.is_finite() {
                tally.finite += 1;
                sum += x;
                tally.min = tally.min.min(x);
                tally.max = tally.max.max(x);
                tally.zeros += u64::from(x == 0.0);
            } else if x.is_nan() {
                tally.nans += 1;
            } else {
                tally.infinities += 1;
            }
        }
        if tally.finite > 0 {
            tally.mean = sum / tally.finite as f64;
            tally.spread = numbers.iter().filter(|x| x.is_finite()).map(|x| (x - tally.mean).powi(2)).sum();
        }
        tally
    }

    /// Two tallies as one (Chan's formula, which loses nothing to cancellation).
    fn join(self, other: Tally) -> Tally {
        if self.finite == 0 || other.finite == 0 {
            let (full, rest) = if self.finite == 0 { (other, self) } else { (self, other) };
            return Tally {
                elements: full.elements + rest.elements,
                nans: full.nans + rest.nans,
                infinities: full.infinities + rest.infinities,
                ..full
            };
        }
        let finite = self.finite + other.finite;
        let delta = other.mean - self.mean;
        let share = other.finite as f64 / finite as f64;
        Tally {
            elements: self.elements + other.elements,
            finite,
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            mean: self.mean + delta * share,
            spread: self.spread + other.spread + delta * delta * self.finite as f64 * share,
            zeros: self.zeros + other.zeros,
            nans: self.nans + other.nans,
            infinities: self.infinities + other.infinities,
        }
    }
}

/// Computes numbers about a tensor, in bounded memory.
pub fn stats(checkpoint: &Checkpoint, key: &str, options: &StatsOptions) -> Result<TensorStats> {
    let tensor = checkpoint.tensor(key)?;
    check_covered(checkpoint, key, tensor)?;
    let region = match &options.region {
        Some(region) => region.clone(),
        None => Region::whole(&tensor.shape)?,
    };
    region.check_inside(&tensor.shape)?;
    checkpoint.check_region(key, &region)?;
    let passes = if options.bins > 0 { 2 } else { 1 };
    options.control.expect(region.volume().saturating_mul(tensor.dtype.size()).saturating_mul(passes));
    let tally = fold(checkpoint, key, &region, options, Tally::of, Tally::join)?.unwrap_or_default();
    let mut stats = TensorStats {
        elements: tally.elements,
        zeros: tally.zeros,
        nans: tally.nans,
        infinities: tally.infinities,
        ..TensorStats::default()
    };
    if tally.finite > 0 {
        stats.min = Some(tally.min);
        stats.max = Some(tally.max);
        stats.mean = Some(tally.mean);
        stats.std = Some((tally.spread / tally.finite as f64).sqrt());
    }
    if options.bins > 0 && tally.finite > 0 {
        let (low, step) = (tally.min, (tally.max - tally.min) / options.bins as f64);
        let count = |numbers: &[f64]| {
            let mut bins = vec![0u64; options.bins];
            for x in numbers.iter().filter(|x| x.is_finite()) {
                let bin = if step > 0.0 { ((x - low) / step) as usize } else { 0 };
                bins[bin.min(options.bins - 1)] += 1;
            }
            bins
        };
        let join = |a: Vec<u64>, b: Vec<u64>| a.into_iter().zip(b).map(|(a, b)| a + b).collect();
        stats.histogram = fold(checkpoint, key, &region, options, count, join)?.unwrap_or_default();
    }
    Ok(stats)
}

/// Folds a region's elements, as numbers, block by block; several blocks are worked on at once.
fn fold<T: Send>(
    checkpoint: &Checkpoint,
    key: &str,
    region: &Region,
    options: &StatsOptions,
    each: impl Fn(&[f64]) -> T + Sync,
    join: impl Fn(T, T) -> T,
) -> Result<Option<T>> {
    const AT_ONCE: usize = 8;
    let dtype = checkpoint.tensor(key)?.dtype;
    let mut stream = TensorStream::new(checkpoint, key, region.clone(), true)?;
    let mut left = region.volume() * dtype.size();
    let mut folded: Option<T> = None;
    let mut blocks: Vec<Vec<u8>> = Vec::new();
    while left > 0 {
        blocks.clear();
        while blocks.len() < AT_ONCE && left > 0 {
            options.control.check("computing statistics")?;
            let mut block = vec![0; left.min(BLOCK as u64) as usize];
            stream.fill(&mut block)?;
            left -= block.len() as u64;
            options.control.advance(block.len() as u64);
            blocks.push(block);
        }
        let work = || blocks.par_iter().map(|block| numbers(dtype, block).map(|n| each(&n))).collect::<Result<Vec<T>>>();
        for part in Workers::normal().run(work)?? {
            folded = Some(match folded {
                Some(folded) => join(folded, part),
                None => part,
            });
        }
    }
    Ok(folded)
}

/// Packed elements as numbers; a complex element gives two.
pub(crate) fn numbers(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>> {
    let real = real_part(dtype)
        .ok_or_else(|| Error::invalid(format!("elements of type {} have no numeric value here", dtype.name())))?;
    let mut wide = vec![0u8; bytes.len() / real.size() as usize * 8];
    cast(real, bytes, DType::Float64, &mut wide)?;
    Ok(wide.as_chunks::<8>().0.iter().map(|n| f64::from_le_bytes(*n)).collect())
}

/// The type of the numbers in an element: of the parts of a complex one; `None` for packed types without a number.
pub(crate) fn real_part(dtype: DType) -> Option<DType> {
    match dtype {
        DType::Complex32 => Some(DType::Float16),
        DType::Complex64 => Some(DType::Float32),
        DType::Complex128 => Some(DType::Float64),
        other => crate::cast::can_cast(other, DType::Float64).then_some(other),
    }
}

/// One element as text: integers in full, floats with as many digits as tell them apart, packed types in hexadecimal.
pub fn element_text(dtype: DType, element: &[u8]) -> String {
    if dtype == DType::Bool {
        return if element.iter().any(|b| *b != 0) { "True".into() } else { "False".into() };
    }
    if let Some(part) = real_part(dtype).filter(|part| *part != dtype) {
        let (real, imaginary) = element.split_at(element.len() / 2);
        let imaginary = element_text(part, imaginary);
        let sign = if imaginary.starts_with('-') { "" } else { "+" };
        return format!("{}{sign}{imaginary}j", element_text(part, real));
    }
    let name = dtype.name();
    if name.starts_with("int") || name.starts_with("uint") {
        let negative = name.starts_with("int") && element.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        let length = element.len().min(16);
        wide[..length].copy_from_slice(&element[..length]);
        return i128::from_le_bytes(wide).to_string();
    }
    match as_f64(dtype, element) {
        Some(number) if dtype == DType::Float64 => format!("{number:?}"),
        Some(number) => format!("{:?}", number as f32),
        None => element.iter().fold("0x".to_owned(), |text, b| format!("{text}{b:02x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_tallies_equal_one_over_all() {
        let all: Vec<f64> =
            (0..1000).map(|i| ((i * 7919) % 1009) as f64 * 0.25 - 100.0).chain([f64::NAN, f64::INFINITY]).collect();
        let one = Tally::of(&all);
        let many = all.chunks(17).map(Tally::of).reduce(Tally::join).unwrap();
        assert_eq!((one.elements, one.finite, one.zeros, one.nans), (many.elements, many.finite, many.zeros, many.nans));
        assert!((one.mean - many.mean).abs() < 1e-9 && (one.spread / many.spread - 1.0).abs() < 1e-12);
        assert_eq!((one.min, one.max), (many.min, many.max));
    }

    #[test]
    fn elements_are_shown_in_full() {
        assert_eq!(element_text(DType::Int64, &(-5i64).to_le_bytes()), "-5");
        assert_eq!(element_text(DType::UInt64, &u64::MAX.to_le_bytes()), "18446744073709551615");
        assert_eq!(element_text(DType::Int8, &[0x80]), "-128");
        assert_eq!(element_text(DType::Float32, &0.1f32.to_le_bytes()), "0.1");
        assert_eq!(element_text(DType::Float64, &0.1f64.to_le_bytes()), "0.1");
        assert_eq!(element_text(DType::BFloat16, &[0x80, 0x3f]), "1.0");
        assert_eq!(element_text(DType::Bool, &[1]), "True");
        let complex = [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat();
        assert_eq!(element_text(DType::Complex64, &complex), "1.5-2.0j");
        assert_eq!(element_text(DType::Float4E2M1FnX2, &[0x2a]), "0x2a");
    }
}
