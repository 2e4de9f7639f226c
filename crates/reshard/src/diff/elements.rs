//! Comparing the elements of two tensors, block by block. Blocks of equal bytes cost a comparison of memory.

use reshard_formats::DType;
use reshard_layout::{Region, flat_pieces};
use serde::Serialize;

use super::DiffOptions;
use crate::checkpoint::{CatalogTensor, Checkpoint};
use crate::error::{Geometry, Result};
use crate::numbers::{StatsOptions, numbers, real_part, stats};
use crate::stream::{BLOCK, Stream, TensorStream};

/// How far elements may be apart and count as the same: `|a − b| ≤ absolute + relative · |b|`.
///
/// That is for numbers. An infinity is the same only as the same infinity, and what is not a number (NaN) only as another
/// NaN, whatever the tolerance.
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

/// How elements differ. Two NaN are the same, and at no distance; NaN and a number, or an infinity and anything else, are
/// infinitely far apart.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct ValueDifference {
    /// Elements in all.
    pub elements: u64,
    /// Elements that differ by more than the tolerance.
    pub different: u64,
    /// The largest distance, which may be infinite; `None` where elements have none.
    #[serde(serialize_with = "distance")]
    pub max_absolute: Option<f64>,
    /// The mean distance over all elements at a finite distance.
    pub mean_absolute: Option<f64>,
    /// The largest distance as a share of the second's element, which may be infinite.
    #[serde(serialize_with = "distance")]
    pub max_relative: Option<f64>,
    /// The mean of those that are finite.
    pub mean_relative: Option<f64>,
    /// The index of the first element that differs.
    pub first_index: Vec<u64>,
    /// The norm of the first, over elements that are finite in both.
    pub first_l2: Option<f64>,
    /// The norm of the second, over the same.
    pub second_l2: Option<f64>,
    /// The norm of their difference, over the same.
    pub change_l2: Option<f64>,
    /// The norm of their difference as a share of the first's: ‖Δw‖ / ‖w‖.
    pub relative_change: Option<f64>,
    /// The cosine of the angle between them.
    pub cosine: Option<f64>,
    /// Elements that are NaN in the second only.
    pub new_nans: u64,
    /// Elements that are infinite in the second only.
    pub new_infinities: u64,
    /// All elements are zero in the second, and not in the first.
    pub newly_zero: bool,
}

/// JSON has no infinity, and leaving it out would hide the largest difference there is.
fn distance<S: serde::Serializer>(distance: &Option<f64>, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    match distance {
        Some(distance) if distance.is_infinite() => serializer.serialize_str("Infinity"),
        other => other.serialize(serializer),
    }
}

#[derive(Default)]
struct Tally {
    different: u64,
    first: Option<u64>,
    compared: bool,
    finite: u64,
    max_absolute: f64,
    sum_absolute: f64,
    relative: u64,
    max_relative: f64,
    sum_relative: f64,
    norms: Norms,
    /// Blocks of equal bytes were not looked into.
    passed: bool,
    new_nans: u64,
    new_infinities: u64,
}

/// Sums over elements that are finite in both.
#[derive(Default)]
struct Norms {
    first: f64,
    second: f64,
    product: f64,
    change: f64,
}

impl Norms {
    fn add(&mut self, x: f64, y: f64) {
        self.first += x * x;
        self.second += y * y;
        self.product += x * y;
        self.change += (y - x) * (y - x);
    }

    /// Adds elements that are the same in both, of which the sum of squares of the whole first is known.
    fn complete(&mut self, first: f64) {
        let same = (first - self.first).max(0.0);
        self.first += same;
        self.second += same;
        self.product += same;
    }
}

/// What is compared: the numbers that both stand for.
pub(super) fn sides<'c>(
    first: &'c Checkpoint,
    first_key: &str,
    second: &'c Checkpoint,
    second_key: &str,
) -> Result<(&'c CatalogTensor, &'c CatalogTensor)> {
    let (a, b) = (first.values(first_key)?, second.values(second_key)?);
    if a.shape == b.shape {
        return Ok((a, b));
    }
    // Packed codes, whose scales only one has.
    Ok((first.tensor(first_key)?, second.tensor(second_key)?))
}

pub(super) fn compare(
    first: &Checkpoint,
    first_key: &str,
    second: &Checkpoint,
    second_key: &str,
    options: &DiffOptions,
) -> Result<Option<ValueDifference>> {
    let (a, b) = sides(first, first_key, second, second_key)?;
    let elements = a.elements();
    let mut streams = (
        TensorStream::of(first, first_key, a, Region::whole(&a.shape)?, true)?,
        TensorStream::of(second, second_key, b, Region::whole(&b.shape)?, true)?,
    );
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
            tally.compared = true;
            tally.passed = true;
            tally.finite += count;
            tally.relative += count;
        }
        options.control.advance(count * a.dtype.size());
        at += count;
    }
    if tally.first.is_some() && tally.passed && real_part(a.dtype).is_some() {
        // Few tensors change in part; the rest of such a one counts as well.
        let wanted = StatsOptions { no_verify: true, control: options.control.clone(), ..StatsOptions::default() };
        let whole = stats(first, first_key, &wanted)?;
        tally.norms.complete(whole.l2.map_or(0.0, |norm| norm * norm));
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
            let distance = apart(*x, *y);
            let within =
                distance == 0.0 || (distance.is_finite() && distance <= tolerance.absolute + tolerance.relative * y.abs());
            let bytes_differ = exact && x == y && a.1[i * size..(i + 1) * size] != b.1[i * size..(i + 1) * size];
            if (!within || bytes_differ) && last != Some(index) {
                self.differs(index);
                last = Some(index);
            }
            self.compared = true;
            if x.is_finite() && y.is_finite() {
                self.norms.add(*x, *y);
            } else {
                self.new_nans += u64::from(y.is_nan() && !x.is_nan());
                self.new_infinities += u64::from(y.is_infinite() && !x.is_infinite());
            }
            self.max_absolute = self.max_absolute.max(distance);
            // Beside an infinity or NaN every other number is infinitely far off; beside zero too.
            let share = if distance == 0.0 || !distance.is_finite() { distance } else { distance / y.abs() };
            self.max_relative = self.max_relative.max(share);
            if distance.is_finite() {
                self.finite += 1;
                self.sum_absolute += distance;
            }
            if share.is_finite() {
                self.relative += 1;
                self.sum_relative += share;
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
        let index = flat_pieces(shape, first, first + 1).proven()?;
        let mean = |sum: f64, count: u64| (count > 0).then(|| sum / count as f64);
        let norms = &self.norms;
        let finite = |number: f64| Some(number).filter(|number| number.is_finite() && self.compared);
        Ok(Some(ValueDifference {
            elements,
            different: self.different,
            max_absolute: self.compared.then_some(self.max_absolute),
            mean_absolute: mean(self.sum_absolute, self.finite),
            max_relative: self.compared.then_some(self.max_relative),
            mean_relative: mean(self.sum_relative, self.relative),
            first_index: index.first().map(|piece| piece.region.offsets().to_vec()).unwrap_or_default(),
            first_l2: finite(norms.first.sqrt()),
            second_l2: finite(norms.second.sqrt()),
            change_l2: finite(norms.change.sqrt()),
            relative_change: finite((norms.change / norms.first).sqrt()),
            cosine: finite(norms.product / (norms.first * norms.second).sqrt()),
            new_nans: self.new_nans,
            new_infinities: self.new_infinities,
            newly_zero: self.compared && norms.second == 0.0 && norms.first > 0.0 && self.max_absolute.is_finite(),
        }))
    }
}

/// How far two elements are apart.
fn apart(x: f64, y: f64) -> f64 {
    if x == y || (x.is_nan() && y.is_nan()) {
        return 0.0;
    }
    let distance = (x - y).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(a: &[f32], b: &[f32], tolerance: f64) -> Option<ValueDifference> {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let mut tally = Tally::default();
        let (x, y) = (bytes(a), bytes(b));
        tally.block((DType::Float32, &x), (DType::Float32, &y), 0, Tolerance::both(tolerance)).unwrap();
        tally.finish(a.len() as u64, &[a.len() as u64]).unwrap()
    }

    #[test]
    fn infinities_and_nan_are_the_same_only_as_themselves() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for tolerance in [0.0, 0.5, 1e30] {
            for (a, b) in [(1.0, inf), (inf, 1.0), (inf, -inf), (nan, 1.0), (1.0, nan), (inf, nan), (f32::MAX, inf)] {
                let found = compared(&[0.0, a], &[0.0, b], tolerance).unwrap();
                assert_eq!((found.different, found.first_index.as_slice()), (1, &[1][..]), "{a} {b} {tolerance}");
                assert_eq!((found.max_absolute, found.max_relative), (Some(f64::INFINITY), Some(f64::INFINITY)), "{a} {b}");
                assert_eq!(found.mean_absolute, Some(0.0));
            }
            assert!(compared(&[inf, -inf, nan], &[inf, -inf, nan], tolerance).is_none());
        }
        assert!(compared(&[1.0], &[1.4], 0.5).is_none());
        assert_eq!(
            compared(&[1.0, 2.0], &[nan, inf], 0.0).map(|d| (d.new_nans, d.new_infinities, d.newly_zero)),
            Some((1, 1, false))
        );
        let json = serde_json::to_value(compared(&[1.0], &[inf], 0.0).unwrap()).unwrap();
        assert_eq!((&json["max_absolute"], &json["mean_absolute"]), (&"Infinity".into(), &serde_json::Value::Null));
    }

    #[test]
    fn how_far_weights_moved_is_a_share_of_their_norm() {
        let found = compared(&[3.0, 4.0], &[3.0, 4.5], 0.0).unwrap();
        assert_eq!((found.first_l2, found.change_l2, found.relative_change), (Some(5.0), Some(0.5), Some(0.1)));
        let across = compared(&[1.0, 0.0], &[0.0, 1.0], 0.0).unwrap();
        assert_eq!((across.cosine, across.newly_zero), (Some(0.0), false));
        let dead = compared(&[1.0, 2.0], &[0.0, 0.0], 0.0).unwrap();
        assert_eq!((dead.newly_zero, dead.cosine, dead.relative_change), (true, None, Some(1.0)));
    }
}
