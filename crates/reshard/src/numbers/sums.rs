//! Sums over blocks of wide elements, in loops over lanes that the compiler turns into vector instructions.
#![allow(unsafe_code)]

/// Lanes of an accumulator: enough to keep several vectors of additions in flight.
const LANES: usize = 16;

/// Sums of squares below this have lost digits.
const LEAST_SQUARES: f64 = 1e-280;

/// Finite numbers added up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sums {
    pub(super) count: u64,
    pub(super) mean: f64,
    /// The square root of the sum of squared distances from the mean: the sum itself of numbers that `f64` can hold may be one that it
    /// cannot.
    pub(super) spread: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) zeros: u64,
    pub(super) subnormals: u64,
}

impl Default for Sums {
    fn default() -> Sums {
        Sums { count: 0, mean: 0.0, spread: 0.0, min: f64::INFINITY, max: f64::NEG_INFINITY, zeros: 0, subnormals: 0 }
    }
}

impl Sums {
    /// Of so many numbers whose distances from `shift`, and the squares of these, add up to `sum` and `squares`.
    pub(super) fn of_distances(count: usize, shift: f64, sum: f64, squares: f64, (min, max): (f64, f64)) -> Sums {
        let numbers = count as f64;
        Sums {
            count: count as u64,
            mean: shift + sum / numbers,
            spread: (squares - sum * sum / numbers).max(0.0).sqrt(),
            min,
            max,
            zeros: 0,
            subnormals: 0,
        }
    }

    /// Two sums as one (Chan's formula, which loses nothing to cancellation).
    pub(super) fn join(self, other: Sums) -> Sums {
        if self.count == 0 || other.count == 0 {
            return if self.count == 0 { other } else { self };
        }
        let count = self.count + other.count;
        let delta = other.mean - self.mean;
        let share = other.count as f64 / count as f64;
        Sums {
            count,
            mean: self.mean + delta * share,
            spread: self.spread.hypot(other.spread).hypot(delta.abs() * (self.count as f64 * share).sqrt()),
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            zeros: self.zeros + other.zeros,
            subnormals: self.subnormals + other.subnormals,
        }
    }
}

/// Sums of finite numbers whose squares, or whose sum, are none that `f64` can hold: they are made of numbers next to one.
pub(super) fn scaled(numbers: impl Iterator<Item = f64> + Clone) -> Sums {
    let (mut count, mut min, mut max) = (0u64, f64::INFINITY, f64::NEG_INFINITY);
    for x in numbers.clone() {
        (count, min, max) = (count + 1, min.min(x), max.max(x));
    }
    let largest = min.abs().max(max.abs());
    if count == 0 || largest == 0.0 {
        return Sums { count, min, max, ..Sums::default() };
    }
    let by = 2f64.powi(-(largest.log2().floor() as i32).clamp(-1000, 1000));
    let mean = numbers.clone().map(|x| x * by).sum::<f64>() / count as f64;
    let spread = numbers.map(|x| (x * by - mean).powi(2)).sum::<f64>().sqrt();
    Sums { count, mean: mean / by, spread: spread / by, min, max, zeros: 0, subnormals: 0 }
}

/// A number that sums are made of.
pub(super) trait Number: Copy + PartialOrd {
    const MOST: Self;
    const LEAST: Self;
    /// The smallest magnitude that has not lost digits.
    const NORMAL: Self;
    const ZERO: Self;
    fn wide(self) -> f64;
    fn magnitude(self) -> Self;
}

impl Number for f32 {
    const MOST: f32 = f32::INFINITY;
    const LEAST: f32 = f32::NEG_INFINITY;
    const NORMAL: f32 = f32::MIN_POSITIVE;
    const ZERO: f32 = 0.0;
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn magnitude(self) -> f32 {
        self.abs()
    }
}

impl Number for f64 {
    const MOST: f64 = f64::INFINITY;
    const LEAST: f64 = f64::NEG_INFINITY;
    const NORMAL: f64 = f64::MIN_POSITIVE;
    const ZERO: f64 = 0.0;
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn magnitude(self) -> f64 {
        self.abs()
    }
}

/// Adds numbers up; `None` when one of them is not finite (or their sum is not). Zeros and subnormals are not counted here:
/// see [`tiny`].
pub(super) fn sums<const N: usize, T: Number>(elements: &[[u8; N]], read: impl Fn([u8; N]) -> T + Copy) -> Option<Sums> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has just been asked whether it knows these instructions; nothing else is required.
        return unsafe { with_avx2(elements, read) };
    }
    by_lanes::<N, T, { cfg!(target_arch = "aarch64") }>(elements, read)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<const N: usize, T: Number>(elements: &[[u8; N]], read: impl Fn([u8; N]) -> T + Copy) -> Option<Sums> {
    by_lanes::<N, T, true>(elements, read)
}

/// `FUSED` where a product and a sum are one instruction; elsewhere that would be a call.
#[inline(always)]
fn by_lanes<const N: usize, T: Number, const FUSED: bool>(
    elements: &[[u8; N]],
    read: impl Fn([u8; N]) -> T + Copy,
) -> Option<Sums> {
    let Some(first) = elements.first() else { return Some(Sums::default()) };
    // Distances from some element of the block: squares of what is far from zero and close together would cancel.
    let shift = read(*first).wide();
    let (sum, squares) = added::<N, T, FUSED>(elements, shift, read);
    if !sum.is_finite() {
        return None;
    }
    let (min, max) = extremes(elements, read);
    if !squares.is_finite() || (squares < LEAST_SQUARES && min < max) {
        return Some(scaled(elements.iter().map(|element| read(*element).wide())));
    }
    Some(Sums::of_distances(elements.len(), shift, sum, squares, (min, max)))
}

/// The sum of all distances from a number, and that of their squares.
#[inline(always)]
fn added<const N: usize, T: Number, const FUSED: bool>(
    elements: &[[u8; N]],
    shift: f64,
    read: impl Fn([u8; N]) -> T,
) -> (f64, f64) {
    let (mut sum, mut squares) = ([0f64; LANES], [0f64; LANES]);
    let (groups, rest) = elements.as_chunks::<LANES>();
    let mut add = |lane: usize, element: [u8; N]| {
        let distance = read(element).wide() - shift;
        sum[lane] += distance;
        squares[lane] = if FUSED { distance.mul_add(distance, squares[lane]) } else { distance * distance + squares[lane] };
    };
    for group in groups {
        for (lane, element) in group.iter().enumerate() {
            add(lane, *element);
        }
    }
    for (lane, element) in rest.iter().enumerate() {
        add(lane, *element);
    }
    (sum.iter().sum(), squares.iter().sum())
}

/// The smallest and the largest of finite numbers. A loop of its own: with the sums in one there are more lanes than a processor
/// has registers for.
#[inline(always)]
fn extremes<const N: usize, T: Number>(elements: &[[u8; N]], read: impl Fn([u8; N]) -> T) -> (f64, f64) {
    let (mut min, mut max) = ([T::MOST; 2 * LANES], [T::LEAST; 2 * LANES]);
    let (groups, rest) = elements.as_chunks::<{ 2 * LANES }>();
    let mut look = |lane: usize, element: [u8; N]| {
        let x = read(element);
        min[lane] = if x < min[lane] { x } else { min[lane] };
        max[lane] = if x > max[lane] { x } else { max[lane] };
    };
    for group in groups {
        for (lane, element) in group.iter().enumerate() {
            look(lane, *element);
        }
    }
    for (lane, element) in rest.iter().enumerate() {
        look(lane, *element);
    }
    (min.iter().fold(f64::INFINITY, |a, b| a.min(b.wide())), max.iter().fold(f64::NEG_INFINITY, |a, b| a.max(b.wide())))
}

/// How many are zero, and how many subnormal.
pub(super) fn tiny<const N: usize, T: Number>(elements: &[[u8; N]], read: impl Fn([u8; N]) -> T) -> (u64, u64) {
    let (mut zeros, mut tiny) = (0u64, 0u64);
    // Narrow counts of a few elements at a time, which vector instructions have room for.
    for part in elements.chunks(1 << 16) {
        let (mut zero, mut small) = (0u32, 0u32);
        for element in part {
            let magnitude = read(*element).magnitude();
            zero += u32::from(magnitude == T::ZERO);
            small += u32::from(magnitude < T::NORMAL);
        }
        zeros += u64::from(zero);
        tiny += u64::from(small);
    }
    (zeros, tiny - zeros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_sums_equal_one_over_all_and_the_plain_way() {
        let all: Vec<f64> = (0..1003).map(|i| ((i * 7919) % 1009) as f64 * 0.25 + 1e6).chain([0.0, 1e-310]).collect();
        let bytes: Vec<[u8; 8]> = all.iter().map(|n| n.to_le_bytes()).collect();
        let one = sums(&bytes, f64::from_le_bytes).unwrap();
        let many = bytes.chunks(17).map(|part| sums(part, f64::from_le_bytes).unwrap()).reduce(Sums::join).unwrap();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let spread: f64 = all.iter().map(|x| (x - mean).powi(2)).sum();
        for found in [one, many] {
            assert!((found.mean - mean).abs() < 1e-6 && (found.spread / spread.sqrt() - 1.0).abs() < 1e-9, "{found:?}");
            assert_eq!(found.count, 1005);
            assert_eq!((found.min, found.max), (0.0, 1_000_252.0));
        }
        let plainly = by_lanes::<8, f64, false>(&bytes, f64::from_le_bytes).unwrap();
        assert!((plainly.spread / one.spread - 1.0).abs() < 1e-12 && plainly.mean == one.mean, "{plainly:?}");
        assert_eq!(tiny(&bytes, f64::from_le_bytes), (1, 1));
    }

    #[test]
    fn what_is_far_from_zero_and_close_together_does_not_cancel() {
        let bytes: Vec<[u8; 4]> = (0..4096).map(|i| (65536.0f32 + (i % 2) as f32 / 128.0).to_le_bytes()).collect();
        let found = sums(&bytes, f32::from_le_bytes).unwrap();
        assert_eq!(found.spread / 64.0, 1.0 / 256.0);
    }

    #[test]
    fn squares_that_f64_cannot_hold_do_not_matter() {
        for scale in [1e200, 1e-200, 1e300, 1e-310] {
            let numbers: Vec<f64> = (0..1000).map(|i| (f64::from(i) / 400.0 - 1.0) * scale).collect();
            let bytes: Vec<[u8; 8]> = numbers.iter().map(|x| x.to_le_bytes()).collect();
            let parts = bytes.chunks(100).map(|part| sums(part, f64::from_le_bytes).unwrap()).reduce(Sums::join).unwrap();
            let expected = scaled(numbers.iter().map(|x| x / scale));
            for found in [sums(&bytes, f64::from_le_bytes).unwrap(), parts] {
                assert!((found.mean / scale / expected.mean - 1.0).abs() < 1e-6, "{scale:e} {found:?}");
                assert!((found.spread / scale / expected.spread - 1.0).abs() < 1e-6, "{scale:e} {found:?}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_noticed() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 5, 99] {
                let mut numbers = [1f32; 100];
                numbers[at] = odd;
                let bytes = numbers.map(f32::to_le_bytes);
                assert_eq!(sums(&bytes, f32::from_le_bytes), None);
            }
        }
    }
}
