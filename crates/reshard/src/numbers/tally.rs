//! What is known of a tensor's numbers after some of its blocks.

use reshard_formats::DType;

use super::elements::real_part;
use super::singles;
use super::sums::{Number, Sums, scaled, sums, tiny};
use super::table::{self, Bin, Table, bin_of, exact_values, joined, span};
use super::{Percentiles, TensorStats};
use crate::error::{Error, Result};

/// Bytes that stay in a core's first cache while several loops go over them.
const IN_CACHE: usize = 16 << 10;

/// How elements are counted.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Bytes, each its own bin.
    Bytes,
    /// Two bytes, each pair its own bin.
    Pairs,
    /// `f32`.
    Single,
    /// `f64`.
    Double,
    /// Integers of four and eight bytes, as `f64`.
    Wide(fn(&[u8]) -> f64),
}

/// The counters of one thread.
#[derive(Debug)]
pub(super) struct Counter {
    table: Table,
    scratch: Vec<f64>,
    /// For elements to be read into.
    pub(super) memory: Vec<u8>,
}

/// Numbers of one dtype, counted.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    bins: Vec<(u16, u64)>,
    sums: Sums,
    nans: u64,
    positive_infinities: u64,
    negative_infinities: u64,
}

fn kind(dtype: DType) -> Option<Kind> {
    fn wide<const N: usize>(element: &[u8], read: fn([u8; N]) -> f64) -> f64 {
        element.first_chunk::<N>().map_or(0.0, |element| read(*element))
    }
    Some(match real_part(dtype).unwrap_or(dtype) {
        DType::Float32 => Kind::Single,
        DType::Float64 => Kind::Double,
        DType::Int32 => Kind::Wide(|e| wide(e, |e| f64::from(i32::from_le_bytes(e)))),
        DType::UInt32 => Kind::Wide(|e| wide(e, |e| f64::from(u32::from_le_bytes(e)))),
        DType::Int64 => Kind::Wide(|e| wide(e, |e| i64::from_le_bytes(e) as f64)),
        DType::UInt64 => Kind::Wide(|e| wide(e, |e| u64::from_le_bytes(e) as f64)),
        other => match other.size() {
            1 => Kind::Bytes,
            2 => Kind::Pairs,
            _ => return None,
        },
    })
}

impl Counter {
    pub(super) fn new() -> Counter {
        Counter { table: Table::new(), scratch: Vec::new(), memory: Vec::new() }
    }

    /// Counts a block of packed elements into a tally.
    pub(super) fn block(&mut self, dtype: DType, bytes: &[u8], tally: &mut Tally) -> Result<()> {
        let kind =
            kind(dtype).ok_or_else(|| Error::unsupported(format!("elements of type {dtype} have no numeric value here")))?;
        self.table.make_room(bytes.len() as u64);
        match kind {
            Kind::Bytes => self.table.count_bytes(bytes),
            Kind::Pairs => self.table.count_upper::<2, 4>(bytes.as_chunks().0),
            Kind::Single => self.wide(bytes.as_chunks::<4>().0, f32::from_le_bytes, |x| x, singles::sum_and_count, tally),
            Kind::Double => self.doubles(bytes.as_chunks::<8>().0, tally),
            Kind::Wide(read) => {
                let real = real_part(dtype).unwrap_or(dtype).size() as usize;
                let numbers: Vec<[u8; 8]> = bytes.chunks_exact(real).map(|element| read(element).to_le_bytes()).collect();
                self.doubles(&numbers, tally);
            }
        }
        Ok(())
    }

    fn doubles(&mut self, elements: &[[u8; 8]], tally: &mut Tally) {
        let narrow = |x: f64| x as f32;
        let sum_and_count = |part: &[[u8; 8]], table: &mut Table| {
            table.count(part.iter().map(|element| bin_of(narrow(f64::from_le_bytes(*element)))));
            sums(part, f64::from_le_bytes)
        };
        self.wide(elements, f64::from_le_bytes, narrow, sum_and_count, tally);
    }

    /// Wide elements: `sum_and_count` counts each by the bin of the nearest `f32`, and adds them up if they are finite.
    fn wide<const N: usize, T: Number>(
        &mut self,
        elements: &[[u8; N]],
        read: impl Fn([u8; N]) -> T + Copy,
        narrow: impl Fn(T) -> f32,
        sum_and_count: impl Fn(&[[u8; N]], &mut Table) -> Option<Sums>,
        tally: &mut Tally,
    ) {
        let tiny_before = self.table.tiny();
        for part in elements.chunks(IN_CACHE / N) {
            let found = sum_and_count(part, &mut self.table).unwrap_or_else(|| self.odd(part, read, &narrow, tally));
            tally.sums = std::mem::take(&mut tally.sums).join(found);
        }
        // Looking for these in every block would cost more than all the sums; most have none, which the counts tell.
        if self.table.tiny() != tiny_before {
            let (zeros, subnormals) = tiny(elements, read);
            tally.sums.zeros += zeros;
            tally.sums.subnormals += subnormals;
        }
    }

    /// The sums of elements of which some are not finite (or their sum is not), one by one.
    fn odd<const N: usize, T: Number>(
        &mut self,
        elements: &[[u8; N]],
        read: impl Fn([u8; N]) -> T,
        narrow: impl Fn(T) -> f32,
        tally: &mut Tally,
    ) -> Sums {
        self.scratch.clear();
        for x in elements.iter().map(|element| read(*element)) {
            let wide = x.wide();
            if wide.is_finite() {
                self.scratch.push(wide);
                continue;
            }
            self.table.uncount(bin_of(narrow(x)));
            match (wide.is_nan(), wide > 0.0) {
                (true, _) => tally.nans += 1,
                (_, true) => tally.positive_infinities += 1,
                (_, false) => tally.negative_infinities += 1,
            }
        }
        let bytes: Vec<[u8; 8]> = self.scratch.iter().map(|x| x.to_le_bytes()).collect();
        sums(&bytes, f64::from_le_bytes).unwrap_or_else(|| scaled(self.scratch.iter().copied()))
    }

    /// Moves what the table holds to the tally.
    pub(super) fn finish(&mut self, tally: &mut Tally) {
        tally.bins = joined(std::mem::take(&mut tally.bins), self.table.drain());
    }
}

impl Tally {
    /// Two tallies of one dtype as one.
    pub(super) fn join(self, other: Tally) -> Tally {
        Tally {
            bins: joined(self.bins, other.bins),
            sums: self.sums.join(other.sums),
            nans: self.nans + other.nans,
            positive_infinities: self.positive_infinities + other.positive_infinities,
            negative_infinities: self.negative_infinities + other.negative_infinities,
        }
    }

    /// The sums, which the tally then lacks.
    pub(super) fn take_sums(&mut self) -> Sums {
        std::mem::take(&mut self.sums)
    }

    /// The tally with sums, joined in their order.
    pub(super) fn with_sums(self, sums: Vec<Sums>) -> Tally {
        Tally { sums: sums.into_iter().fold(self.sums, Sums::join), ..self }
    }

    /// What it says about the elements, with a histogram of so many equal steps.
    pub(super) fn stats(mut self, dtype: DType, steps: usize) -> TensorStats {
        let real = real_part(dtype).unwrap_or(dtype);
        let mut bins = match kind(dtype) {
            Some(Kind::Bytes | Kind::Pairs) => self.exact(real),
            _ => self.spans(),
        };
        let Sums { count, mean, spread, min, max, zeros, subnormals } = self.sums;
        for bin in &mut bins {
            (bin.low, bin.high) = (bin.low.clamp(min, max), bin.high.clamp(min, max));
        }
        bins.sort_by(|a, b| a.low.total_cmp(&b.low));
        let mut stats = TensorStats {
            elements: count + self.nans + self.positive_infinities + self.negative_infinities,
            nans: self.nans,
            infinities: self.positive_infinities + self.negative_infinities,
            positive_infinities: self.positive_infinities,
            negative_infinities: self.negative_infinities,
            zeros,
            subnormals,
            ..TensorStats::default()
        };
        if count == 0 {
            return stats;
        }
        let finite = |x: f64| x.is_finite().then_some(x);
        let root = (count as f64).sqrt();
        let rms = (spread / root).hypot(mean);
        (stats.min, stats.max) = (Some(min), Some(max));
        stats.absmax = Some(min.abs().max(max.abs()));
        stats.mean = finite(mean);
        stats.std = finite(spread / root);
        stats.l2 = finite(rms * root);
        stats.rms = finite(rms);
        stats.percentiles = Percentiles::of(|share| table::percentile(&bins, share));
        stats.magnitudes = table::magnitudes(&bins);
        stats.histogram = if steps > 0 { table::steps(&bins, min, max, steps) } else { Vec::new() };
        stats
    }

    /// Bins of wide elements; zeros have one of their own.
    fn spans(&self) -> Vec<Bin> {
        let mut zeros = self.sums.zeros;
        let mut bins = Vec::with_capacity(self.bins.len() + 1);
        bins.push(Bin { low: 0.0, high: 0.0, count: zeros });
        for &(bin, mut count) in &self.bins {
            if bin & 0x7fff == 0 {
                let here = zeros.min(count);
                (count, zeros) = (count - here, zeros - here);
            }
            bins.push(span(bin, count));
        }
        bins.retain(|bin| bin.count > 0);
        bins
    }

    /// Elements that are their own bins: sums are told by the counts.
    fn exact(&mut self, dtype: DType) -> Vec<Bin> {
        let mut bins: Vec<Bin> = Vec::with_capacity(self.bins.len());
        for &(bin, count) in &self.bins {
            for value in exact_values(dtype, bin).into_iter().flatten() {
                match value {
                    x if x.is_nan() => self.nans += count,
                    f64::INFINITY => self.positive_infinities += count,
                    f64::NEG_INFINITY => self.negative_infinities += count,
                    x => bins.push(Bin { low: x, high: x, count }),
                }
            }
        }
        let least = least_normal(dtype);
        let count: u64 = bins.iter().map(|bin| bin.count).sum();
        let mean = bins.iter().map(|bin| bin.low * bin.count as f64).sum::<f64>() / count.max(1) as f64;
        let spread = bins.iter().map(|bin| (bin.low - mean).powi(2) * bin.count as f64).sum::<f64>().sqrt();
        self.sums = bins.iter().fold(Sums { count, mean, spread, ..Sums::default() }, |mut sums, bin| {
            sums.min = sums.min.min(bin.low);
            sums.max = sums.max.max(bin.low);
            sums.zeros += if bin.low == 0.0 { bin.count } else { 0 };
            sums.subnormals += if bin.low != 0.0 && bin.low.abs() < least { bin.count } else { 0 };
            sums
        });
        bins
    }
}

/// The smallest number of a type that is not subnormal.
fn least_normal(dtype: DType) -> f64 {
    match dtype {
        DType::Float16 => 2f64.powi(-14),
        DType::BFloat16 => 2f64.powi(-126),
        DType::Float8E4M3Fn => 2f64.powi(-6),
        DType::Float8E5M2 => 2f64.powi(-14),
        DType::Float8E4M3Fnuz => 2f64.powi(-7),
        DType::Float8E5M2Fnuz => 2f64.powi(-15),
        DType::Float4E2M1FnX2 => 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::numbers::elements::numbers;

    /// The plain way: all numbers at once, sorted.
    fn plainly(numbers: &[f64]) -> (u64, u64, u64, Vec<f64>) {
        let mut finite: Vec<f64> = numbers.iter().copied().filter(|x| x.is_finite()).collect();
        finite.sort_by(f64::total_cmp);
        let nans = numbers.iter().filter(|x| x.is_nan()).count() as u64;
        let zeros = finite.iter().filter(|x| **x == 0.0).count() as u64;
        (nans, numbers.len() as u64 - nans - finite.len() as u64, zeros, finite)
    }

    fn close(a: Option<f64>, b: f64, scale: f64) -> bool {
        a.is_some_and(|a| (a - b).abs() <= scale * 1e-9 + f64::MIN_POSITIVE)
    }

    proptest! {
        #[test]
        fn every_dtype_is_counted_as_the_plain_way_counts_it(
            which in 0..DType::ALL.len(), bytes in proptest::collection::vec(any::<u8>(), 0..4096), zero in any::<bool>(), cut in 1usize..9,
        ) {
            let dtype = DType::ALL[which];
            let size = dtype.size() as usize;
            let mut bytes = bytes[..bytes.len() / size * size].to_vec();
            if zero {
                let half = bytes.len() / 2;
                bytes[..half].fill(0);
            }
            let mut counter = Counter::new();
            let mut parts = Vec::new();
            for block in bytes.chunks(size * 37 * cut) {
                let mut tally = Tally::default();
                counter.block(dtype, block, &mut tally).unwrap();
                counter.finish(&mut tally);
                parts.push(tally);
            }
            let found = parts.into_iter().fold(Tally::default(), Tally::join).stats(dtype, 7);
            let all = if dtype == DType::Float4E2M1FnX2 {
                bytes.iter().flat_map(|b| exact_values(dtype, u16::from(*b))).flatten().collect()
            } else {
                numbers(dtype, &bytes).unwrap()
            };
            let (nans, infinities, zeros, finite) = plainly(&all);
            prop_assert_eq!((found.elements, found.nans, found.infinities, found.zeros), (all.len() as u64, nans, infinities, zeros));
            prop_assert_eq!(found.histogram.iter().sum::<u64>(), if finite.is_empty() { 0 } else { finite.len() as u64 });
            prop_assert_eq!(found.min, finite.first().copied().map(|x| x + 0.0));
            prop_assert_eq!(found.max, finite.last().copied());
            let Some(largest) = found.absmax else { return Ok(()) };
            let mean = finite.iter().sum::<f64>() / finite.len() as f64;
            if largest < 1e150 {
                let squares: f64 = finite.iter().map(|x| x * x).sum();
                let spread: f64 = finite.iter().map(|x| (x - mean).powi(2)).sum();
                prop_assert!(close(found.mean, mean, largest), "{:?} {}", found.mean, mean);
                prop_assert!(close(found.l2, squares.sqrt(), largest * finite.len() as f64));
                prop_assert!(close(found.std, (spread / finite.len() as f64).sqrt(), largest));
            }
            let p = found.percentiles.unwrap();
            for (share, told) in [(0.01, p.p1), (0.25, p.p25), (0.5, p.p50), (0.99, p.p99)] {
                let exact = finite[(share * (finite.len() - 1) as f64).round() as usize];
                let bound = if size <= 2 || dtype == DType::Complex32 { 0.0 } else { exact.abs() * 2f64.powi(-8) + 1e-37 };
                // Beyond f32 there is one bin for all.
                prop_assert!((told - exact).abs() <= bound * 1.001 || exact.abs() > 3.4e38, "{} {} {}", share, told, exact);
            }
        }
    }
}
