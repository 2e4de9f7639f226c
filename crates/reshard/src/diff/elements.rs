//! Comparing the elements of two tensors, block by block. Blocks of equal bytes cost a comparison of memory.

use reshard_formats::DType;
use reshard_layout::flat_pieces;
use serde::Serialize;

use super::DiffOptions;
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::stats::{numbers, real_part};
use crate::stream::{BLOCK, Stream, TensorStream};

/// How far elements may be apart and count as the same: `|a − b| ≤ absolute + relative · |b|`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
#[non_exhaustive]
pub struct Tolerance {
    /// In units of the elements.
    pub absolute: f64,
    /// As a share of the second's element.
    pub relative: f64,
}

impl Tolerance {
    /// The same number for both.
    pub fn both(tolerance: f64) -> Tolerance {
        Tolerance { absolute: tolerance, relative: tolerance }
    }
}

/// How elements differ. Elements that are not numbers are the same when both are not.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct ValueDifference {
    /// Elements in all.
    pub elements: u64,
    /// Elements that differ by more than the tolerance.
    pub different: u64,
    /// The largest distance; `None` where none is a finite number.
    pub max_absolute: Option<f64>,
    /// The mean distance over all elements at a finite distance.
    pub mean_absolute: Option<f64>,
    /// The largest distance as a share of the second's element.
    pub max_relative: Option<f64>,
    /// The mean of these.
    pub mean_relative: Option<f64>,
    /// The index of the first element that differs.
    pub first_index: Vec<u64>,
}

#[derive(Default)]
struct Tally {
    different: u64,
    first: Option<u64>,
    finite: u64,
    max_absolute: f64,
    sum_absolute: f64,
    relative: u64,
    max_relative: f64,
    sum_relative: f64,
}

pub(super) fn compare(
    first: &Checkpoint,
    first_key: &str,
    second: &Checkpoint,
    second_key: &str,
    options: &DiffOptions,
) -> Result<Option<ValueDifference>> {
    let (a, b) = (first.tensor(first_key)?, second.tensor(second_key)?);
    let elements = a.elements();
    let mut streams = (TensorStream::whole(first, first_key, true)?, TensorStream::whole(second, second_key, true)?);
    let step = BLOCK as u64 / a.dtype.size().max(b.dtype.size());
    let mut blocks = (Vec::new(), Vec::new());
    let mut tally = Tally::default();
    let mut at = 0;
    while at < elements {
        options.control.check("comparing")?;
        let count = step.min(elements - at);
        blocks.0.resize((count * a.dtype.size()) as usize, 0u8);
        blocks.1.resize((count * b.dtype.size()) as usize, 0u8);
        streams.0.fill(&mut blocks.0)?;
        streams.1.fill(&mut blocks.1)?;
        if a.dtype != b.dtype || blocks.0 != blocks.1 {
            tally.block((a.dtype, &blocks.0), (b.dtype, &blocks.1), at, options.tolerance)?;
        } else {
            tally.finite += count;
            tally.relative += count;
        }
        options.control.advance(count * a.dtype.size());
        at += count;
    }
    tally.finish(elements, &a.shape)
}

impl Tally {
    fn block(&mut self, a: (DType, &[u8]), b: (DType, &[u8]), start: u64, tolerance: Tolerance) -> Result<()> {
        let same_type = a.0 == b.0;
        let (size, parts) = (a.0.size() as usize, real_part(a.0).map_or(1, |real| a.0.size() / real.size()));
        if real_part(a.0).is_none() {
            // No number to compare by: bytes alone.
            for (i, (x, y)) in a.1.chunks(size).zip(b.1.chunks(size)).enumerate() {
                if x != y {
                    self.differs(start + i as u64);
                }
            }
            return Ok(());
        }
        let (x, y) = (numbers(a.0, a.1)?, numbers(b.0, b.1)?);
        // Integers past 2^53 may be equal as numbers although their bytes differ.
        let exact = same_type && !crate::select::is_float(a.0) && parts == 1;
        let mut last = None;
        for (i, (x, y)) in x.iter().zip(&y).enumerate() {
            let index = start + i as u64 / parts;
            let distance = (x - y).abs();
            let within = x == y || (x.is_nan() && y.is_nan()) || distance <= tolerance.absolute + tolerance.relative * y.abs();
            let bytes_differ = exact && x == y && a.1[i * size..(i + 1) * size] != b.1[i * size..(i + 1) * size];
            if (!within || bytes_differ) && last != Some(index) {
                self.differs(index);
                last = Some(index);
            }
            if distance.is_finite() {
                self.finite += 1;
                self.max_absolute = self.max_absolute.max(distance);
                self.sum_absolute += distance;
                let share = if distance == 0.0 { 0.0 } else { distance / y.abs() };
                if share.is_finite() {
                    self.relative += 1;
                    self.max_relative = self.max_relative.max(share);
                    self.sum_relative += share;
                }
            }
        }
        Ok(())
    }

    fn differs(&mut self, index: u64) {
        self.different += 1;
        self.first.get_or_insert(index);
    }

    fn finish(self, elements: u64, shape: &[u64]) -> Result<Option<ValueDifference>> {
        let Some(first) = self.first else { return Ok(None) };
        let index = flat_pieces(shape, first, first + 1)?;
        let mean = |sum: f64, count: u64| (count > 0).then(|| sum / count as f64);
        Ok(Some(ValueDifference {
            elements,
            different: self.different,
            max_absolute: (self.finite > 0).then_some(self.max_absolute),
            mean_absolute: mean(self.sum_absolute, self.finite),
            max_relative: (self.relative > 0).then_some(self.max_relative),
            mean_relative: mean(self.sum_relative, self.relative),
            first_index: index.first().map(|piece| piece.region.offsets().to_vec()).unwrap_or_default(),
        }))
    }
}
