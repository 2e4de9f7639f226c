//! A value as Python's `repr` prints it.

use std::fmt::Write;

use super::{NumpyScalar, Value};

impl Value {
    /// What Python's `repr` prints (3.12's spelling of `OrderedDict`, numpy 2's of scalars).
    pub fn python_repr(&self) -> String {
        let mut out = String::new();
        self.write_repr(&mut out);
        out
    }

    fn write_repr(&self, out: &mut String) {
        match self {
            Value::None => out.push_str("None"),
            Value::Bool(value) => out.push_str(if *value { "True" } else { "False" }),
            Value::Int(value) => out.push_str(&value.to_string()),
            Value::Float(value) => out.push_str(&float_repr(*value)),
            Value::Complex(re, im) => out.push_str(&complex_repr(*re, *im)),
            Value::Str(text) => str_repr(text, out),
            Value::Bytes(bytes) => bytes_repr(bytes, out),
            Value::ByteArray(bytes) => {
                out.push_str("bytearray(");
                bytes_repr(bytes, out);
                out.push(')');
            }
            Value::List(elements) => write_all(elements, "[", "]", out),
            Value::Tuple(elements) => {
                write_all(elements, "(", if elements.len() == 1 { ",)" } else { ")" }, out);
            }
            Value::Dict(pairs) => write_pairs(pairs, "{", "}", out),
            Value::OrderedDict(pairs) if pairs.is_empty() => out.push_str("OrderedDict()"),
            Value::OrderedDict(pairs) => write_pairs(pairs, "OrderedDict({", "})", out),
            Value::Set(elements) if elements.is_empty() => out.push_str("set()"),
            Value::Set(elements) => write_all(elements, "{", "}", out),
            Value::FrozenSet(elements) if elements.is_empty() => out.push_str("frozenset()"),
            Value::FrozenSet(elements) => write_all(elements, "frozenset({", "})", out),
            Value::Size(dims) => {
                let dims: Vec<_> = dims.iter().map(i64::to_string).collect();
                out.push_str(&format!("torch.Size([{}])", dims.join(", ")));
            }
            Value::DType(dtype) => out.push_str(&format!("torch.{}", dtype.name())),
            Value::Device(text) => match text.split_once(':') {
                Some((kind, index)) => out.push_str(&format!("device(type='{kind}', index={index})")),
                None => out.push_str(&format!("device(type='{text}')")),
            },
            Value::Path(path) => {
                out.push_str(path.class.name());
                out.push('(');
                str_repr(&path.text, out);
                out.push(')');
            }
            Value::Numpy(scalar) => {
                let plain = scalar.to_plain();
                if let Value::Bool(value) = plain {
                    out.push_str(if value { "np.True_" } else { "np.False_" });
                    return;
                }
                if let Some((count, unit)) = NumpyScalar::time_unit(&scalar.code) {
                    let name = if scalar.code.starts_with('M') { "datetime64" } else { "timedelta64" };
                    let count = if count == 1 { String::new() } else { count.to_string() };
                    let unit = if unit == "generic" { String::new() } else { format!(",'{count}{unit}'") };
                    out.push_str(&format!("np.{name}({}{unit})", plain.python_repr()));
                    return;
                }
                let (kind, bytes) = scalar.code.split_at(1);
                let name = match kind {
                    "i" => "int",
                    "u" => "uint",
                    "f" => "float",
                    _ => "complex",
                };
                let bits = bytes.parse::<u32>().unwrap_or(0) * 8;
                let text = match (scalar.code.as_str(), &plain) {
                    ("f4", Value::Float(value)) => short_float_repr(f64::from(*value as f32), *value as f32),
                    _ => plain.python_repr(),
                };
                out.push_str(&format!("np.{name}{bits}({text})"));
            }
            Value::Array(array) => {
                let shape: Vec<_> = array.shape.iter().map(u64::to_string).collect();
                out.push_str(&format!("<array {}[{}]>", array.type_string(), shape.join(", ")));
            }
            Value::Instance(instance) => instance.write_repr(out),
        }
    }
}

fn write_all(elements: &[Value], open: &str, close: &str, out: &mut String) {
    out.push_str(open);
    for (i, element) in elements.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        element.write_repr(out);
    }
    out.push_str(close);
}

fn write_pairs(pairs: &[(Value, Value)], open: &str, close: &str, out: &mut String) {
    out.push_str(open);
    for (i, (key, value)) in pairs.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        key.write_repr(out);
        out.push_str(": ");
        value.write_repr(out);
    }
    out.push_str(close);
}

/// The shortest digits that read back as the same float, in Python's layout.
pub(super) fn float_repr(value: f64) -> String {
    layout(value, &format!("{value:e}"))
}

/// The same for a number whose shortest digits are those of a narrower float.
fn short_float_repr(value: f64, narrow: f32) -> String {
    layout(value, &format!("{narrow:e}"))
}

/// Python's layout of `d.ddde±x`: plain between 1e-4 and 1e16, otherwise with an exponent of two digits at least.
fn layout(value: f64, scientific: &str) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let (sign, digits) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let digits: String = digits.chars().filter(|c| *c != '.').collect();
    if exponent < 0 {
        let zeros = "0".repeat((-exponent - 1) as usize);
        return format!("{sign}0.{zeros}{digits}");
    }
    let whole = exponent as usize + 1;
    if digits.len() <= whole {
        return format!("{sign}{digits}{}.0", "0".repeat(whole - digits.len()));
    }
    format!("{sign}{}.{}", &digits[..whole], &digits[whole..])
}

fn complex_repr(re: f64, im: f64) -> String {
    // Python leaves `.0` away inside complex numbers.
    let part = |v: f64| {
        let text = float_repr(v);
        text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
    };
    if re == 0.0 && re.is_sign_positive() {
        return format!("{}j", part(im));
    }
    let plus = if im.is_sign_negative() && !im.is_nan() { "" } else { "+" };
    format!("({}{plus}{}j)", part(re), part(im))
}

fn quote_for(single: bool, double: bool) -> char {
    if single && !double { '"' } else { '\'' }
}

fn str_repr(text: &str, out: &mut String) {
    let quote = quote_for(text.contains('\''), text.contains('"'));
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            ' '..='~' => out.push(c),
            c if is_printable(c) => out.push(c),
            c => {
                // Writing to a string can't fail.
                let _ = match u32::from(c) {
                    code @ 0..=0xff => write!(out, "\\x{code:02x}"),
                    code @ 0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// As near to Python's `isprintable` as the standard library's tables allow.
fn is_printable(c: char) -> bool {
    !c.is_control() && !c.is_whitespace() && (c.is_alphanumeric() || c.escape_debug().len() == 1)
}

fn bytes_repr(bytes: &[u8], out: &mut String) {
    let quote = quote_for(bytes.contains(&b'\''), bytes.contains(&b'"'));
    out.push('b');
    out.push(quote);
    for &b in bytes {
        match b {
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            b if char::from(b) == quote => {
                out.push('\\');
                out.push(quote);
            }
            b' '..=b'~' => out.push(char::from(b)),
            b => {
                let _ = write!(out, "\\x{b:02x}");
            }
        }
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::value::{NumpyScalar, PathClass, PathValue};

    #[test]
    fn floats_are_laid_out_as_python_does() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (123456.789, "123456.789"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.25e300, "-1.25e+300"),
            (f64::MAX, "1.7976931348623157e+308"),
            (5e-324, "5e-324"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(float_repr(value), text);
        }
    }

    #[test]
    fn every_kind_prints_as_in_python() {
        let repr = |v: Value| v.python_repr();
        assert_eq!(repr(Value::Tuple(vec![Value::from(1)])), "(1,)");
        assert_eq!(repr(Value::from("it's")), "\"it's\"");
        assert_eq!(repr(Value::from("a'\"b\n\u{7f}\u{ef}\u{2028}\u{1f600}")), "'a\\'\"b\\n\\x7f\u{ef}\\u2028\u{1f600}'");
        assert_eq!(repr(Value::Bytes(b"\x00'a".to_vec())), "b\"\\x00'a\"");
        assert_eq!(repr(Value::Set(vec![])), "set()");
        assert_eq!(repr(Value::Size(vec![2, 3])), "torch.Size([2, 3])");
        assert_eq!(repr(Value::DType(DType::BFloat16)), "torch.bfloat16");
        assert_eq!(repr(Value::Device("cuda:1".into())), "device(type='cuda', index=1)");
        assert_eq!(repr(Value::Complex(1.0, -2.5)), "(1-2.5j)");
        assert_eq!(repr(Value::Complex(0.0, 1.0)), "1j");
        let path = PathValue { class: PathClass::Posix, text: "a/b".into() };
        assert_eq!(repr(Value::Path(path)), "PosixPath('a/b')");
        let scalar = NumpyScalar { code: "f4".into(), little_endian: true, data: 0.1f32.to_le_bytes().into() };
        assert_eq!(repr(Value::Numpy(scalar)), "np.float32(0.1)");
        let date = NumpyScalar { code: "M8[D]".into(), little_endian: true, data: 9i64.to_le_bytes().into() };
        assert_eq!(repr(Value::Numpy(date)), "np.datetime64(9,'D')");
        let pairs = vec![(Value::from("k"), Value::List(vec![Value::None]))];
        assert_eq!(repr(Value::OrderedDict(pairs)), "OrderedDict({'k': [None]})");
    }
}
