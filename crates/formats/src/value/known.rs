//! Values of classes outside of Python's core that are data all the same: arrays, dates, fractions, ranges and their kind.

use std::fmt::Write;

use super::{Int, NumpyScalar, Value};

/// A numpy array: its element type, its shape and its elements in row-major order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NumpyArray {
    /// A type code such as `f4`, `S5` or `U7`; see [`NumpyArray::item_size`].
    pub code: String,
    /// Whether elements are little-endian (also for single bytes).
    pub little_endian: bool,
    /// The shape.
    pub shape: Vec<u64>,
    /// The elements.
    pub data: Vec<u8>,
}

impl NumpyArray {
    /// Bytes of an element: of numbers, and of byte strings (`S5`) and texts (`U5`) of a fixed length.
    pub fn item_size(code: &str) -> Option<usize> {
        if let Some(size) = NumpyScalar::size_of(code) {
            return Some(size);
        }
        let (kind, length) = code.split_at_checked(1)?;
        let length: usize = length.parse().ok().filter(|length| (1..=1 << 20).contains(length))?;
        match kind {
            "S" => Some(length),
            "U" => Some(4 * length),
            _ => None,
        }
    }

    /// Whether shape and data fit together.
    pub fn is_sound(&self) -> bool {
        let size = NumpyArray::item_size(&self.code).map(|size| size as u64);
        let bytes = size.and_then(|size| self.shape.iter().try_fold(size, |bytes, dim| bytes.checked_mul(*dim)));
        self.shape.len() <= 64 && bytes == Some(self.data.len() as u64)
    }

    /// The element type with its byte order, as numpy spells it: `<f4`, `|b1`.
    pub fn type_string(&self) -> String {
        type_string(&self.code, self.little_endian)
    }
}

/// A type code with its byte order.
pub(crate) fn type_string(code: &str, little_endian: bool) -> String {
    let order = match (NumpyScalar::size_of(code), code.starts_with('S'), little_endian) {
        (Some(1), ..) | (_, true, _) => '|',
        (.., true) => '<',
        (.., false) => '>',
    };
    format!("{order}{code}")
}

/// An object of a class that is data, as the arguments it is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// The class.
    pub class: PlainClass,
    /// What it is made of; see [`PlainClass`].
    pub args: Vec<Value>,
}

/// The classes of [`Instance`], each with what its instances are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlainClass {
    /// `datetime.datetime`: the ten bytes that it pickles as, and a timezone if it has one.
    DateTime,
    /// `datetime.date`: the four bytes that it pickles as.
    Date,
    /// `datetime.time`: the six bytes that it pickles as, and a timezone if it has one.
    Time,
    /// `datetime.timedelta`: days, seconds and microseconds.
    TimeDelta,
    /// `datetime.timezone`: a timedelta, and a name if it has one.
    TimeZone,
    /// `fractions.Fraction`: numerator and denominator.
    Fraction,
    /// `decimal.Decimal`: its text.
    Decimal,
    /// `uuid.UUID`: its integer.
    Uuid,
    /// `range`: start, stop and step.
    Range,
    /// `slice`: start, stop and step, of any plain type.
    Slice,
    /// `collections.Counter`: a dict.
    Counter,
    /// `collections.defaultdict`: None or a built-in class, and a dict.
    DefaultDict,
    /// A memory layout of torch: its name, such as `torch.strided`.
    Layout,
    /// A memory format of torch: its name, such as `channels_last`.
    MemoryFormat,
    /// A built-in class itself: its name, such as `int`.
    Class,
    /// `numpy.dtype`: as numpy spells it, such as `<f4`.
    NumpyDType,
}

/// The built-in classes that may be values themselves.
pub const BUILTIN_CLASSES: [&str; 14] = [
    "int",
    "float",
    "str",
    "bool",
    "list",
    "dict",
    "tuple",
    "set",
    "frozenset",
    "bytes",
    "bytearray",
    "complex",
    "object",
    "range",
];

/// The layouts of torch.
pub const LAYOUTS: [&str; 8] = [
    "torch.strided",
    "torch.sparse_coo",
    "torch.sparse_csr",
    "torch.sparse_csc",
    "torch.sparse_bsr",
    "torch.sparse_bsc",
    "torch._mkldnn",
    "torch.jagged",
];

/// The memory formats of torch.
pub const MEMORY_FORMATS: [&str; 4] = ["contiguous_format", "preserve_format", "channels_last", "channels_last_3d"];

impl Instance {
    /// An instance, if the class can be made of these.
    pub fn new(class: PlainClass, args: Vec<Value>) -> Option<Instance> {
        let fits = match (class, args.as_slice()) {
            (PlainClass::DateTime, [Value::Bytes(bytes), zone @ ..]) => {
                is_date(bytes, true) && bytes.len() == 10 && is_time(&bytes[4..], false) && is_zone(zone)
            }
            (PlainClass::Date, [Value::Bytes(bytes)]) => bytes.len() == 4 && is_date(bytes, false),
            (PlainClass::Time, [Value::Bytes(bytes), zone @ ..]) => bytes.len() == 6 && is_time(bytes, true) && is_zone(zone),
            (PlainClass::TimeDelta, [Value::Int(days), Value::Int(seconds), Value::Int(micros)]) => {
                let inside = |value: &Int, range: std::ops::Range<i64>| value.as_i64().is_some_and(|v| range.contains(&v));
                inside(days, -999_999_999..1_000_000_000) && inside(seconds, 0..86_400) && inside(micros, 0..1_000_000)
            }
            (PlainClass::TimeZone, [Value::Instance(offset), name @ ..]) => {
                // Less than a day in either direction.
                let hours = match offset.args.as_slice() {
                    [Value::Int(days), Value::Int(seconds), Value::Int(micros)] => match days.as_i64() {
                        Some(0) => true,
                        Some(-1) => seconds.as_i64() != Some(0) || micros.as_i64() != Some(0),
                        _ => false,
                    },
                    _ => false,
                };
                offset.class == PlainClass::TimeDelta && hours && matches!(name, [] | [Value::Str(_)])
            }
            (PlainClass::Fraction, [Value::Int(_), Value::Int(down)]) => down.as_i64().is_none_or(|down| down > 0),
            (PlainClass::Decimal, [Value::Str(text)]) => is_decimal(text),
            (PlainClass::Uuid, [Value::Int(number)]) => is_uuid(number),
            (PlainClass::Range, [Value::Int(_), Value::Int(_), Value::Int(step)]) => step.as_i64() != Some(0),
            (PlainClass::Slice, [_, _, _]) => true,
            (PlainClass::Counter, [Value::Dict(_)]) => true,
            (PlainClass::DefaultDict, [factory, Value::Dict(_)]) => match factory {
                Value::None => true,
                Value::Instance(factory) => factory.class == PlainClass::Class,
                _ => false,
            },
            (PlainClass::Layout, [Value::Str(name)]) => LAYOUTS.contains(&name.as_str()),
            (PlainClass::MemoryFormat, [Value::Str(name)]) => MEMORY_FORMATS.contains(&name.as_str()),
            (PlainClass::Class, [Value::Str(name)]) => BUILTIN_CLASSES.contains(&name.as_str()),
            (PlainClass::NumpyDType, [Value::Str(text)]) => {
                text.starts_with(['<', '>', '|']) && NumpyArray::item_size(&text[1..]).is_some()
            }
            _ => false,
        };
        fits.then_some(Instance { class, args })
    }

    /// What Python's `repr` prints, or nearly: a date in its constructor's words.
    pub(super) fn write_repr(&self, out: &mut String) {
        let all = |args: &[Value]| args.iter().map(Value::python_repr).collect::<Vec<_>>().join(", ");
        let _ = match (self.class, self.args.as_slice()) {
            (PlainClass::DateTime | PlainClass::Date | PlainClass::Time, [Value::Bytes(bytes), zone @ ..]) => {
                let (name, mut numbers) = match self.class {
                    PlainClass::Time => ("time", Vec::new()),
                    PlainClass::Date => ("date", date_parts(bytes)),
                    _ => ("datetime", date_parts(bytes)),
                };
                numbers.extend(time_parts(if self.class == PlainClass::Time { bytes } else { bytes.get(4..).unwrap_or(&[]) }));
                let numbers = numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
                let zone = zone.first().map(|zone| format!(", tzinfo={}", zone.python_repr())).unwrap_or_default();
                write!(out, "datetime.{name}({numbers}{zone})")
            }
            (PlainClass::Layout, [Value::Str(name)]) => write!(out, "{name}"),
            (PlainClass::MemoryFormat, [Value::Str(name)]) => write!(out, "torch.{name}"),
            (PlainClass::Class, [Value::Str(name)]) => write!(out, "<class '{name}'>"),
            (PlainClass::Uuid, [Value::Int(number)]) => write!(out, "UUID(int={number})"),
            (class, args) => write!(out, "{}({})", class.name(), all(args)),
        };
    }
}

impl PlainClass {
    /// The name, as `repr` shows it.
    fn name(self) -> &'static str {
        match self {
            PlainClass::TimeDelta => "datetime.timedelta",
            PlainClass::TimeZone => "datetime.timezone",
            PlainClass::Fraction => "Fraction",
            PlainClass::Decimal => "Decimal",
            PlainClass::Range => "range",
            PlainClass::Slice => "slice",
            PlainClass::Counter => "Counter",
            PlainClass::DefaultDict => "defaultdict",
            PlainClass::NumpyDType => "dtype",
            _ => "datetime",
        }
    }
}

fn date_parts(bytes: &[u8]) -> Vec<u32> {
    match bytes {
        [high, low, month, day, ..] => {
            vec![u32::from(*high) * 256 + u32::from(*low), u32::from(*month & 0x7f), u32::from(*day)]
        }
        _ => Vec::new(),
    }
}

fn time_parts(bytes: &[u8]) -> Vec<u32> {
    match bytes {
        [hour, minute, second, a, b, c] => {
            let micros = u32::from(*a) << 16 | u32::from(*b) << 8 | u32::from(*c);
            vec![u32::from(*hour & 0x7f), u32::from(*minute), u32::from(*second), micros]
        }
        _ => Vec::new(),
    }
}

/// Year, month and day as `datetime` pickles them; with a time, the month's highest bit says which of two equal times it is.
fn is_date(bytes: &[u8], folds: bool) -> bool {
    if !folds && bytes.get(2).is_some_and(|month| month & 0x80 != 0) {
        return false;
    }
    match date_parts(bytes).as_slice() {
        [year, month, day] => {
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let days = match month {
                2 if leap => 29,
                2 => 28,
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            (1..=9999).contains(year) && (1..=12).contains(month) && (1..=days).contains(day)
        }
        _ => false,
    }
}

fn is_time(bytes: &[u8], folds: bool) -> bool {
    if !folds && bytes.first().is_some_and(|hour| hour & 0x80 != 0) {
        return false;
    }
    matches!(time_parts(bytes).as_slice(), [hour, minute, second, micros] if *hour < 24 && *minute < 60 && *second < 60 && *micros < 1_000_000)
}

fn is_zone(zone: &[Value]) -> bool {
    match zone {
        [] => true,
        [Value::Instance(zone)] => zone.class == PlainClass::TimeZone,
        _ => false,
    }
}

/// A number as `str(Decimal)` writes it.
fn is_decimal(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    if let Some(rest) = text.strip_prefix("sNaN").or_else(|| text.strip_prefix("NaN")) {
        return rest.bytes().all(|b| b.is_ascii_digit());
    }
    if text == "Infinity" {
        return true;
    }
    let (number, exponent) = text.split_once('E').unwrap_or((text, "0"));
    let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let sane = whole.len() + part.len() <= 10_000 && !exponent.is_empty() && exponent.len() <= 18;
    sane && !whole.is_empty() && !part.is_empty() && digits(whole) && digits(part) && digits(exponent)
}

fn is_uuid(number: &Int) -> bool {
    match number {
        Int::Small(number) => *number >= 0,
        Int::Big(number) => number.sign() != num_bigint::Sign::Minus && number.bits() <= 128,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_class_can_be_made_of_is_taken() {
        let bytes = |bytes: &[u8]| Value::Bytes(bytes.to_vec());
        let date = Instance::new(PlainClass::Date, vec![bytes(&[7, 232, 2, 29])]).unwrap();
        assert_eq!(Value::Instance(date).python_repr(), "datetime.date(2024, 2, 29)");
        for wrong in [&[7u8, 231, 2, 29][..], &[7, 232, 13, 1], &[0, 0, 1, 1], &[7, 232, 0x82, 1], &[7, 232, 2]] {
            assert_eq!(Instance::new(PlainClass::Date, vec![bytes(wrong)]), None, "{wrong:?}");
        }
        let time = Instance::new(PlainClass::DateTime, vec![bytes(&[7, 232, 0x82, 29, 1, 2, 3, 0, 0, 9])]).unwrap();
        assert_eq!(Value::Instance(time).python_repr(), "datetime.datetime(2024, 2, 29, 1, 2, 3, 9)");
        for good in ["1", "-0.50", "1E+5", "1.5E-7", "NaN", "-sNaN12", "Infinity", "-Infinity"] {
            assert!(is_decimal(good), "{good}");
        }
        for bad in ["", "-", "1.", ".5", "1e5", "0x1", "inf", "1_0", "1E", "1E99999999999999999999"] {
            assert!(!is_decimal(bad), "{bad}");
        }
        assert!(Instance::new(PlainClass::Range, vec![Value::from(0), Value::from(3), Value::from(0)]).is_none());
        assert!(Instance::new(PlainClass::Class, vec![Value::from("eval")]).is_none());
    }

    #[test]
    fn arrays_hold_as_much_as_they_say() {
        let array = |code: &str, shape: &[u64], bytes: usize| NumpyArray {
            code: code.into(),
            little_endian: true,
            shape: shape.to_vec(),
            data: vec![0; bytes],
        };
        assert!(array("f4", &[2, 3], 24).is_sound());
        assert!(array("U2", &[2], 16).is_sound());
        assert!(array("f4", &[0, 3], 0).is_sound());
        assert!(!array("f4", &[2, 3], 23).is_sound());
        assert!(!array("O", &[1], 8).is_sound());
        assert!(!array("f8", &[u64::MAX, 2], 0).is_sound());
        assert_eq!(array("b1", &[1], 1).type_string(), "|b1");
    }
}
