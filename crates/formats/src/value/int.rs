//! Python's integers: usually 64 bits, sometimes not.

use std::fmt;

use num_bigint::BigInt;

/// An integer of any size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Int {
    /// One that fits 64 bits with sign.
    Small(i64),
    /// One that doesn't; make it with `Int::from`, which picks the right variant.
    Big(Box<BigInt>),
}

impl Int {
    /// The number, if it fits.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Int::Small(value) => Some(*value),
            Int::Big(_) => None,
        }
    }

    /// The number, if it fits.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Int::Small(value) => u64::try_from(*value).ok(),
            Int::Big(big) => u64::try_from(big.as_ref()).ok(),
        }
    }
}

impl From<i64> for Int {
    fn from(value: i64) -> Self {
        Int::Small(value)
    }
}

impl From<u64> for Int {
    fn from(value: u64) -> Self {
        i64::try_from(value).map_or_else(|_| Int::Big(Box::new(value.into())), Int::Small)
    }
}

impl From<BigInt> for Int {
    fn from(value: BigInt) -> Self {
        i64::try_from(&value).map_or_else(|_| Int::Big(Box::new(value)), Int::Small)
    }
}

impl fmt::Display for Int {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Int::Small(value) => value.fmt(f),
            Int::Big(value) => value.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_small() {
        assert_eq!(Int::from(BigInt::from(7)), Int::Small(7));
        assert_eq!(Int::from(u64::MAX).as_u64(), Some(u64::MAX));
        assert_eq!(Int::from(u64::MAX).as_i64(), None);
        assert_eq!(Int::from(-1i64).as_u64(), None);
        assert_eq!(Int::from(u64::MAX).to_string(), "18446744073709551615");
    }
}
