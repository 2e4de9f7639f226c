//! Counts of elements by their upper sixteen bits, from which percentiles and histograms are told.
//!
//! An element of at most sixteen bits is its own bin, so everything about such a tensor is told exactly by its counts
//! alone. Wider elements are counted by the sign, the exponent and the upper seven bits of the fraction of the nearest
//! `f32`: a bin spans a factor of at most 1 + 2⁻⁷, its middle is within 2⁻⁸ (0.4 %) of everything in it.

use reshard_formats::DType;

use crate::cast::as_f64;

/// Bins of a table.
pub(super) const BINS: usize = 1 << 16;
/// Counts are moved to wider ones before they could overflow.
const MOST: u64 = 1 << 31;

/// Counts by bin, being filled.
#[derive(Debug)]
pub(super) struct Table {
    counts: Box<[u32; BINS]>,
    /// Elements counted since the last move.
    pending: u64,
    moved: Vec<(u16, u64)>,
}

impl Table {
    pub(super) fn new() -> Table {
        // Allocated zeroed: pages that are not used cost nothing.
        let counts = vec![0u32; BINS].into_boxed_slice().try_into().unwrap_or_else(|_| Box::new([0; BINS]));
        Table { counts, pending: 0, moved: Vec::new() }
    }

    /// Counts so many more without overflowing; to be called before they are.
    pub(super) fn make_room(&mut self, elements: u64) {
        if self.pending + elements > MOST {
            let moved = self.drain();
            self.moved = moved;
        }
        self.pending += elements;
    }

    /// Counts bins.
    pub(super) fn count(&mut self, bins: impl Iterator<Item = u16> + Clone) {
        if !self.count_alike(bins.clone()) {
            for bin in bins {
                self.counts[usize::from(bin)] += 1;
            }
        }
    }

    /// Counts bytes, each its own bin.
    pub(super) fn count_bytes(&mut self, bytes: &[u8]) {
        if self.count_alike(bytes.iter().map(|byte| u16::from(*byte))) {
            return;
        }
        // Each of four neighbours in bins of its own: a count waits for the last one of the same bin, and there are few of them.
        let (fours, rest) = bytes.as_chunks::<4>();
        for four in fours {
            for (place, byte) in four.iter().enumerate() {
                self.counts[usize::from(*byte) + (place << 8)] += 1;
            }
        }
        for byte in rest {
            self.counts[usize::from(*byte)] += 1;
        }
        let (first, others) = self.counts[..4 << 8].split_at_mut(1 << 8);
        for (at, count) in others.iter_mut().enumerate() {
            first[at & 0xff] += std::mem::take(count);
        }
    }

    /// Counts elements by the upper two of their bytes, so many neighbours at a time.
    pub(super) fn count_upper<const SIZE: usize, const NEIGHBOURS: usize>(&mut self, elements: &[[u8; SIZE]]) {
        let bin = |element: &[u8; SIZE]| u16::from_le_bytes([element[SIZE - 2], element[SIZE - 1]]);
        if self.count_alike(elements.iter().map(bin)) {
            return;
        }
        let (groups, rest) = elements.as_chunks::<NEIGHBOURS>();
        for group in groups {
            count_neighbours(&mut self.counts, group);
        }
        for element in rest {
            self.counts[usize::from(bin(element))] += 1;
        }
    }

    /// Counts bins that are all the same at once, since counting waits for the last count of the same bin; says whether they are.
    pub(super) fn count_alike(&mut self, mut bins: impl Iterator<Item = u16>) -> bool {
        let Some(first) = bins.next() else { return true };
        let mut count = 1u32;
        let alike = bins.all(|bin| {
            count += 1;
            bin == first
        });
        if alike {
            self.counts[usize::from(first)] += count;
        }
        alike
    }

    /// Takes back one that was counted since there was last made room.
    pub(super) fn uncount(&mut self, bin: u16) {
        self.counts[usize::from(bin)] -= 1;
    }

    /// The counts, for loops that do more than counting.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn counts(&mut self) -> &mut [u32; BINS] {
        &mut self.counts
    }

    /// How many are in bins that hold zeros and subnormals of `f32`, and so all those of wider elements.
    pub(super) fn tiny(&self) -> u64 {
        let half = |from: usize| self.counts[from..from + (1 << 7)].iter().map(|count| u64::from(*count)).sum::<u64>();
        half(0) + half(BINS / 2)
    }

    /// What was counted, by bin; the table is empty afterwards.
    pub(super) fn drain(&mut self) -> Vec<(u16, u64)> {
        let mut found = Vec::new();
        let (groups, _) = self.counts.as_chunks_mut::<32>();
        for (group, counts) in groups.iter_mut().enumerate() {
            if counts.iter().fold(0, |all, count| all | count) == 0 {
                continue;
            }
            for (i, count) in counts.iter_mut().enumerate() {
                if *count > 0 {
                    found.push(((group * 32 + i) as u16, u64::from(std::mem::take(count))));
                }
            }
        }
        self.pending = 0;
        joined(std::mem::take(&mut self.moved), found)
    }
}

/// Counts neighbours that are eight bytes together by the upper two bytes of each. One load for all of them: what limits such a loop is
/// how many loads and stores a processor does at a time.
#[inline(always)]
pub(super) fn count_neighbours<const SIZE: usize, const NEIGHBOURS: usize>(
    counts: &mut [u32; BINS],
    neighbours: &[[u8; SIZE]; NEIGHBOURS],
) {
    const { assert!(SIZE * NEIGHBOURS == 8) };
    let all = u64::from_le_bytes(neighbours.as_flattened().first_chunk().copied().unwrap_or_default());
    for place in 1..=NEIGHBOURS {
        counts[usize::from((all >> (8 * SIZE * place - 16)) as u16)] += 1;
    }
}

/// Two lists of counts in the order of their bins as one.
pub(super) fn joined(one: Vec<(u16, u64)>, other: Vec<(u16, u64)>) -> Vec<(u16, u64)> {
    if one.is_empty() || other.is_empty() {
        return if one.is_empty() { other } else { one };
    }
    let mut all = Vec::with_capacity(one.len().max(other.len()));
    let (mut one, mut other) = (one.into_iter().peekable(), other.into_iter().peekable());
    loop {
        let next = match (one.peek(), other.peek()) {
            (Some(a), Some(b)) if a.0 == b.0 => {
                let both = (a.0, a.1 + b.1);
                one.next();
                other.next();
                Some(both)
            }
            (Some(a), Some(b)) if a.0 < b.0 => one.next(),
            (Some(_), None) => one.next(),
            _ => other.next(),
        };
        match next {
            Some(next) => all.push(next),
            None => return all,
        }
    }
}

/// Finite elements between two numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bin {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) count: u64,
}

impl Bin {
    /// The number that stands for all in it.
    pub(super) fn middle(&self) -> f64 {
        self.low + (self.high - self.low) / 2.0
    }
}

/// The numbers that a bin of elements of at most sixteen bits stands for: one, or the two of a packed byte.
pub(super) fn exact_values(dtype: DType, bin: u16) -> [Option<f64>; 2] {
    match dtype {
        DType::Float4E2M1FnX2 => [Some(four_bits(bin & 15)), Some(four_bits(bin >> 4 & 15))],
        _ => [as_f64(dtype, &bin.to_le_bytes()[..dtype.size().min(2) as usize]), None],
    }
}

/// A float of four bits: sign, two of exponent, one of fraction.
fn four_bits(bits: u16) -> f64 {
    const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = VALUES[usize::from(bits & 7)];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// The bin of a wide element.
#[inline(always)]
pub(super) fn bin_of(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// What a bin of wide elements spans. Those that no `f32` can hold lie in the outermost.
pub(super) fn span(bin: u16, count: u64) -> Bin {
    let near = f64::from(f32::from_bits(u32::from(bin & 0x7fff) << 16));
    let far = f32::from_bits(u32::from(bin & 0x7fff) << 16 | 0xffff);
    let near = if near.is_finite() { near } else { f64::from(f32::MAX) };
    let far = if far.is_finite() { f64::from(far) } else { f64::MAX };
    if bin & 0x8000 == 0 { Bin { low: near, high: far, count } } else { Bin { low: -far, high: -near, count } }
}

/// The number below which a share of the elements lies, told by bins in order; `None` when there are none.
pub(super) fn percentile(bins: &[Bin], share: f64) -> Option<f64> {
    let all: u64 = bins.iter().map(|bin| bin.count).sum();
    let rank = (share * all.saturating_sub(1) as f64).round() as u64;
    let mut before = 0;
    for bin in bins {
        before += bin.count;
        if before > rank {
            return Some(bin.middle());
        }
    }
    bins.last().map(Bin::middle)
}

/// Counts in equal steps between two numbers.
pub(super) fn steps(bins: &[Bin], low: f64, high: f64, steps: usize) -> Vec<u64> {
    let mut counts = vec![0; steps];
    // Halved, so that the whole range of f64 has a width.
    let width = high / 2.0 - low / 2.0;
    for bin in bins {
        let at = if width > 0.0 { (bin.middle() / 2.0 - low / 2.0) / width } else { 0.0 };
        if let Some(count) = counts.get_mut(((at * steps as f64) as usize).min(steps.saturating_sub(1))) {
            *count += bin.count;
        }
    }
    counts
}

/// Counts by power of two: those of magnitude 2ᵉ up to 2ᵉ⁺¹, without zeros, in the order of e.
pub(super) fn magnitudes(bins: &[Bin]) -> Vec<(i32, u64)> {
    let mut counts = std::collections::BTreeMap::new();
    for bin in bins.iter().filter(|bin| bin.count > 0 && bin.middle() != 0.0) {
        *counts.entry(bin.middle().abs().log2().floor() as i32).or_insert(0) += bin.count;
    }
    counts.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_lies_in_the_span_of_its_bin_and_near_its_middle() {
        let mut bits = 1u32;
        while bits < 0xff80_0000 {
            let value = f32::from_bits(bits);
            if value.is_finite() {
                let (bin, value) = (span(bin_of(value), 1), f64::from(value));
                assert!(bin.low <= value && value <= bin.high, "{value:e} {bin:?}");
                if value.abs() >= f64::from(f32::MIN_POSITIVE) {
                    assert!((bin.middle() / value - 1.0).abs() <= 2f64.powi(-8), "{value:e} {bin:?}");
                }
            }
            bits = bits.wrapping_add(49_999);
        }
    }

    #[test]
    fn counts_are_kept_over_moves_and_alike_elements() {
        let mut table = Table::new();
        table.count([7; 100].into_iter());
        table.count([1, 2, 1].into_iter());
        table.make_room(MOST);
        table.make_room(1);
        assert_eq!(table.moved, [(1, 2), (2, 1), (7, 100)]);
        table.count([0xffff, 2, 9].into_iter());
        table.uncount(9);
        assert_eq!(table.drain(), [(1, 2), (2, 2), (7, 100), (0xffff, 1)]);
        assert_eq!(table.drain(), []);
    }

    #[test]
    fn packed_bytes_hold_two_numbers() {
        assert_eq!(exact_values(DType::Float4E2M1FnX2, 0x2a), [Some(-1.0), Some(1.0)]);
        assert_eq!(exact_values(DType::Float4E2M1FnX2, 0x7f), [Some(-6.0), Some(6.0)]);
        assert_eq!(exact_values(DType::Int16, 0xffff), [Some(-1.0), None]);
        assert_eq!(exact_values(DType::BFloat16, 0x3f80), [Some(1.0), None]);
    }
}
