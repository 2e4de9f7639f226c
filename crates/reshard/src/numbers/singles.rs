//! Sums and counts of `f32` in one loop, where a processor has the registers for both: additions take what is idle while counts
//! are stored, of which it stores one at a time.
#![allow(unsafe_code)]

use super::sums::{Sums, sums};
use super::table::{Table, bin_of};

/// Counts every element by its bin, and adds them up; `None` when one of them is not finite.
pub(super) fn sum_and_count(elements: &[[u8; 4]], table: &mut Table) -> Option<Sums> {
    #[cfg(target_arch = "x86_64")]
    if wide::is_known() && !elements.is_empty() {
        let (groups, rest) = elements.as_chunks::<{ wide::GROUP }>();
        if table.count_alike(elements.iter().map(|element| bin_of(f32::from_le_bytes(*element)))) {
            return sums(elements, f32::from_le_bytes);
        }
        // SAFETY: the processor has just been asked whether it knows these instructions; nothing else is required.
        let most = unsafe { wide::sum_and_count(groups, table.counts()) };
        table.count_upper::<4, 2>(rest);
        return Some(most?.join(sums(rest, f32::from_le_bytes)?));
    }
    table.count_upper::<4, 2>(elements);
    sums(elements, f32::from_le_bytes)
}

/// With AVX-512.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{
        __m512, __m512d, _mm512_add_pd, _mm512_castps512_ps256, _mm512_cvtps_pd, _mm512_extractf32x8_ps, _mm512_fmadd_pd,
        _mm512_loadu_ps, _mm512_max_ps, _mm512_min_ps, _mm512_reduce_add_pd, _mm512_reduce_max_ps, _mm512_reduce_min_ps,
        _mm512_set1_pd, _mm512_set1_ps, _mm512_setzero_pd, _mm512_sub_pd,
    };

    use crate::numbers::sums::Sums;
    use crate::numbers::table::{BINS, count_neighbours};

    /// Elements of one turn.
    pub(super) const GROUP: usize = 32;

    pub(super) fn is_known() -> bool {
        std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512dq")
    }

    /// Four vectors that are added to in turn, so that no addition waits for the last one.
    struct Added {
        sums: [__m512d; 4],
        squares: [__m512d; 4],
    }

    impl Added {
        #[inline]
        #[target_feature(enable = "avx512f,avx512dq")]
        fn add(&mut self, at: usize, sixteen: __m512, shift: __m512d) {
            let halves = [_mm512_castps512_ps256(sixteen), _mm512_extractf32x8_ps::<1>(sixteen)];
            for (half, eight) in halves.into_iter().enumerate() {
                let distance = _mm512_sub_pd(_mm512_cvtps_pd(eight), shift);
                let at = 2 * at + half;
                self.sums[at] = _mm512_add_pd(self.sums[at], distance);
                self.squares[at] = _mm512_fmadd_pd(distance, distance, self.squares[at]);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn sum_and_count(groups: &[[[u8; 4]; GROUP]], counts: &mut [u32; BINS]) -> Option<Sums> {
        let Some([first, ..]) = groups.first() else { return Some(Sums::default()) };
        // See `sums::by_lanes`.
        let first = f64::from(f32::from_le_bytes(*first));
        let shift = _mm512_set1_pd(first);
        let mut added = Added { sums: [_mm512_setzero_pd(); 4], squares: [_mm512_setzero_pd(); 4] };
        let mut min = [_mm512_set1_ps(f32::INFINITY); 2];
        let mut max = [_mm512_set1_ps(f32::NEG_INFINITY); 2];
        for group in groups {
            for (at, sixteen) in group.as_chunks::<16>().0.iter().enumerate() {
                // SAFETY: it reads sixteen numbers from wherever they lie, and there are as many.
                let sixteen = unsafe { _mm512_loadu_ps(sixteen.as_ptr().cast()) };
                min[at] = _mm512_min_ps(sixteen, min[at]);
                max[at] = _mm512_max_ps(sixteen, max[at]);
                added.add(at, sixteen, shift);
            }
            for two in group.as_chunks::<2>().0 {
                count_neighbours(counts, two);
            }
        }
        let all = |[a, b, c, d]: [__m512d; 4]| _mm512_reduce_add_pd(_mm512_add_pd(_mm512_add_pd(a, b), _mm512_add_pd(c, d)));
        let (sum, squares) = (all(added.sums), all(added.squares));
        let min = _mm512_reduce_min_ps(_mm512_min_ps(min[0], min[1]));
        let max = _mm512_reduce_max_ps(_mm512_max_ps(max[0], max[1]));
        let extremes = (f64::from(min), f64::from(max));
        sum.is_finite().then(|| Sums::of_distances(groups.len() * GROUP, first, sum, squares, extremes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_loop_gives_what_two_give() {
        let mut seed = 1u32;
        for length in [0usize, 1, 31, 32, 33, 64, 4096, 4099] {
            let numbers: Vec<[u8; 4]> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    ((seed as f32 / u32::MAX as f32 - 0.5) * 3.0).to_le_bytes()
                })
                .collect();
            let (mut one, mut two) = (Table::new(), Table::new());
            let found = sum_and_count(&numbers, &mut one).unwrap();
            two.count(numbers.iter().map(|element| bin_of(f32::from_le_bytes(*element))));
            let expected = sums(&numbers, f32::from_le_bytes).unwrap();
            assert_eq!(one.drain(), two.drain());
            assert_eq!((found.count, found.min, found.max), (expected.count, expected.min, expected.max));
            assert!((found.mean - expected.mean).abs() < 1e-12, "{found:?} {expected:?}");
            assert!((found.spread - expected.spread).abs() <= expected.spread * 1e-12, "{found:?} {expected:?}");
        }
    }

    #[test]
    fn what_is_not_finite_is_noticed_wherever_it_is() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 5, 99] {
                let mut numbers = [1f32; 100];
                (numbers[at], numbers[50]) = (odd, 3.0);
                assert_eq!(sum_and_count(&numbers.map(f32::to_le_bytes), &mut Table::new()), None);
            }
        }
    }
}
