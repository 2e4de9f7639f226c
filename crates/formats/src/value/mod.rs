//! Plain Python values as inert data: what a checkpoint holds beside tensors.

mod int;
mod json;
mod known;
mod repr;

pub use int::Int;
pub(crate) use known::type_string;
pub use known::{BUILTIN_CLASSES, Instance, LAYOUTS, MEMORY_FORMATS, NumpyArray, PlainClass};

use crate::DType;

/// A plain Python value.
///
/// Equality is of type and bits: `1` is not `1.0`, `NaN` equals itself, `0.0` is not `-0.0`. Dicts and sets are
/// equal when their elements are equal in order.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of any size.
    Int(Int),
    /// A float.
    Float(f64),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
    /// A string.
    Str(String),
    /// A bytes object.
    Bytes(Vec<u8>),
    /// A bytearray.
    ByteArray(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dict, in insertion order, without duplicate keys.
    Dict(Vec<(Value, Value)>),
    /// A `collections.OrderedDict`.
    OrderedDict(Vec<(Value, Value)>),
    /// A set, in the order it was written.
    Set(Vec<Value>),
    /// A frozenset.
    FrozenSet(Vec<Value>),
    /// A `torch.Size`.
    Size(Vec<i64>),
    /// A `torch.dtype`.
    DType(DType),
    /// A `torch.device`, such as `cuda:0`.
    Device(String),
    /// A `pathlib` path.
    Path(PathValue),
    /// A numpy scalar.
    Numpy(NumpyScalar),
    /// A numpy array.
    Array(Box<NumpyArray>),
    /// A date, a fraction, a range, a counter, …
    Instance(Instance),
}

/// A `pathlib` path: its text and which class it is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PathValue {
    /// The class.
    pub class: PathClass,
    /// The text, as `str(path)` gives it.
    pub text: String,
}

/// The classes of `pathlib`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PathClass {
    /// `PosixPath`.
    Posix,
    /// `WindowsPath`.
    Windows,
    /// `PurePosixPath`.
    PurePosix,
    /// `PureWindowsPath`.
    PureWindows,
}

impl PathClass {
    /// The class's name in `pathlib`.
    pub const fn name(self) -> &'static str {
        match self {
            PathClass::Posix => "PosixPath",
            PathClass::Windows => "WindowsPath",
            PathClass::PurePosix => "PurePosixPath",
            PathClass::PureWindows => "PureWindowsPath",
        }
    }

    /// The class of a name.
    pub fn from_name(name: &str) -> Option<PathClass> {
        [PathClass::Posix, PathClass::Windows, PathClass::PurePosix, PathClass::PureWindows]
            .into_iter()
            .find(|class| class.name() == name)
    }
}

/// A numpy scalar: a type code such as `f8` and the bytes of the number.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NumpyScalar {
    /// `b1`, `i1` to `i8`, `u1` to `u8`, `f2` to `f8`, `c8` or `c16`; dates and durations with their unit, such as `M8[ms]`.
    pub code: String,
    /// Whether the bytes are little-endian (also for single bytes).
    pub little_endian: bool,
    /// The number; as many bytes as the code says.
    pub data: Vec<u8>,
}

impl NumpyScalar {
    /// Bytes of a type code, for the codes that are numbers.
    pub fn size_of(code: &str) -> Option<usize> {
        match code {
            "b1" | "i1" | "u1" => Some(1),
            "i2" | "u2" | "f2" => Some(2),
            "i4" | "u4" | "f4" => Some(4),
            "i8" | "u8" | "f8" | "c8" => Some(8),
            "c16" => Some(16),
            _ => NumpyScalar::time_unit(code).map(|_| 8),
        }
    }

    /// Of a date (`M8[ms]`, `M8[25s]`) or a duration (`m8[D]`): how many of which unit it counts. One without a unit counts
    /// `generic` ones.
    pub fn time_unit(code: &str) -> Option<(u32, &str)> {
        const UNITS: [&str; 13] = ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"];
        let rest = code.strip_prefix("M8").or_else(|| code.strip_prefix("m8"))?;
        if rest.is_empty() {
            return Some((1, "generic"));
        }
        let inner = rest.strip_prefix('[')?.strip_suffix(']')?;
        let digits = inner.len() - inner.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = inner.split_at(digits);
        // A spelling of its own for each type: no `1`, no leading zero.
        let count = match number {
            "" => 1,
            "1" => return None,
            _ => number.parse().ok().filter(|count: &u32| !number.starts_with('0') && i32::try_from(*count).is_ok())?,
        };
        UNITS.contains(&unit).then_some((count, unit))
    }

    /// The number as a plain value (half precision excepted, which no plain type holds: it widens to a float).
    pub fn to_plain(&self) -> Value {
        let mut le = self.data.clone();
        let is_complex = self.code.starts_with('c');
        if !self.little_endian {
            let part = if is_complex { le.len() / 2 } else { le.len() };
            le.chunks_mut(part.max(1)).for_each(<[u8]>::reverse);
        }
        match self.code.as_str() {
            "b1" => Value::Bool(le.first().is_some_and(|b| *b != 0)),
            code if matches!(code, "i1" | "i2" | "i4" | "i8") || NumpyScalar::time_unit(code).is_some() => {
                let fill = if le.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
                le.resize(8, fill);
                Value::from(i64::from_le_bytes(first_8(&le)))
            }
            "u1" | "u2" | "u4" | "u8" => {
                le.resize(8, 0);
                Value::from(u64::from_le_bytes(first_8(&le)))
            }
            "c8" | "c16" => {
                let (re, im) = le.split_at(le.len() / 2);
                Value::Complex(float_of(re), float_of(im))
            }
            _ => Value::Float(float_of(&le)),
        }
    }
}

fn first_8(bytes: &[u8]) -> [u8; 8] {
    bytes.first_chunk().copied().unwrap_or_default()
}

/// A little-endian float of 2, 4 or 8 bytes.
fn float_of(bytes: &[u8]) -> f64 {
    match bytes {
        [a, b] => half_to_f64(u16::from_le_bytes([*a, *b])),
        [a, b, c, d] => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        _ => f64::from_le_bytes(first_8(bytes)),
    }
}

fn half_to_f64(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    match exponent {
        0 => sign * fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => sign * f64::INFINITY,
        31 => f64::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        use Value as V;
        match (self, other) {
            (V::None, V::None) => true,
            (V::Bool(a), V::Bool(b)) => a == b,
            (V::Int(a), V::Int(b)) => a == b,
            (V::Float(a), V::Float(b)) => same_float(*a, *b),
            (V::Complex(a, b), V::Complex(c, d)) => same_float(*a, *c) && same_float(*b, *d),
            (V::Str(a), V::Str(b)) | (V::Device(a), V::Device(b)) => a == b,
            (V::Bytes(a), V::Bytes(b)) | (V::ByteArray(a), V::ByteArray(b)) => a == b,
            (V::List(a), V::List(b))
            | (V::Tuple(a), V::Tuple(b))
            | (V::Set(a), V::Set(b))
            | (V::FrozenSet(a), V::FrozenSet(b)) => a == b,
            (V::Dict(a), V::Dict(b)) | (V::OrderedDict(a), V::OrderedDict(b)) => a == b,
            (V::Size(a), V::Size(b)) => a == b,
            (V::DType(a), V::DType(b)) => a == b,
            (V::Path(a), V::Path(b)) => a == b,
            (V::Numpy(a), V::Numpy(b)) => a == b,
            (V::Array(a), V::Array(b)) => a == b,
            (V::Instance(a), V::Instance(b)) => a == b,
            _ => false,
        }
    }
}

/// Equal bits, or both not a number.
fn same_float(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

impl Eq for Value {}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Value::Bool(value)
    }
}

impl From<i32> for Value {
    fn from(value: i32) -> Self {
        Value::Int(i64::from(value).into())
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Value::Int(value.into())
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Value::Int(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Value::Float(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::Str(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Value::Str(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equality_is_of_type_and_bits() {
        assert_ne!(Value::from(1), Value::from(1.0));
        assert_ne!(Value::from(true), Value::from(1));
        assert_eq!(Value::from(f64::NAN), Value::from(-f64::NAN));
        assert_ne!(Value::from(0.0), Value::from(-0.0));
        assert_ne!(Value::List(vec![]), Value::Tuple(vec![]));
    }

    #[test]
    fn numpy_scalars_are_numbers() {
        let scalar = |code: &str, little_endian, data: &[u8]| {
            NumpyScalar { code: code.into(), little_endian, data: data.into() }.to_plain()
        };
        assert_eq!(scalar("i2", true, &[0xfe, 0xff]), Value::from(-2));
        assert_eq!(scalar("i2", false, &[0xff, 0xfe]), Value::from(-2));
        assert_eq!(scalar("u8", true, &[0xff; 8]), Value::from(u64::MAX));
        assert_eq!(scalar("f2", true, &[0x00, 0x3e]), Value::from(1.5));
        assert_eq!(scalar("f2", true, &[0x01, 0x00]), Value::from(2f64.powi(-24)));
        assert_eq!(scalar("f4", false, &1.25f32.to_be_bytes()), Value::from(1.25));
        assert_eq!(scalar("b1", true, &[1]), Value::from(true));
        assert_eq!(scalar("M8[ms]", false, &[0, 0, 0, 0, 0, 0, 1, 0]), Value::from(256));
        for code in ["M8[1s]", "M8[01s]", "M8[0s]", "M8[]", "M8[x]", "M8[s", "M4[s]", "m8[99999999999s]"] {
            assert_eq!(NumpyScalar::size_of(code), None, "{code}");
        }
        assert_eq!(NumpyScalar::time_unit("m8[25us]"), Some((25, "us")));
        let mut complex = 2.0f32.to_be_bytes().to_vec();
        complex.extend((-3.0f32).to_be_bytes());
        assert_eq!(scalar("c8", false, &complex), Value::Complex(2.0, -3.0));
    }
}
