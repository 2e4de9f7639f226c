//! Sums that do not depend on who adds what in which order.

/// Why the demo's runs can be equal bit for bit.
pub(super) const WHY: &str = "\
Why it can be equal: floating-point addition depends on its order, and another layout adds in another order. So this
trainer adds across samples and ranks in 64-bit fixed point, where every order gives the same sum. All else is computed
per element, or by one rank in one order: AdamW touches each parameter with its own gradient and moments alone. What the
checkpoint must do is bring back every bit, and it does.";

/// Fractional bits of the fixed-point numbers: fine enough for gradients, with room for thousands of addends.
const FRACTION: i32 = 40;

/// A sum that is the same in every order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Exact(i64);

impl Exact {
    pub(super) fn of(value: f64) -> Exact {
        Exact((value * f64::powi(2.0, FRACTION)).round() as i64)
    }

    pub(super) fn add(&mut self, other: Exact) {
        self.0 = self.0.wrapping_add(other.0);
    }

    pub(super) fn value(self) -> f64 {
        self.0 as f64 / f64::powi(2.0, FRACTION)
    }

    pub(super) fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    pub(super) fn from_bytes(bytes: [u8; 8]) -> Exact {
        Exact(i64::from_le_bytes(bytes))
    }
}

/// Numbers for data and first weights: splitmix64, the same on every rank.
pub(super) fn noise(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 * 2.0 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_gives_the_same_sum() {
        let values: Vec<f64> = (0..1000).map(|i| noise(7, i) * 100.0).collect();
        let sum = |values: &mut dyn Iterator<Item = &f64>| {
            let mut total = Exact::default();
            values.for_each(|v| total.add(Exact::of(*v)));
            total
        };
        assert_eq!(sum(&mut values.iter()), sum(&mut values.iter().rev()));
    }
}
