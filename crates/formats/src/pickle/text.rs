//! Operands that protocols 0 and 1 write as text, and integers of any size.

use std::borrow::Cow;

use num_bigint::BigInt;

use super::error::PickleError;
use super::limits::{MAX_INT_BYTES, MAX_INT_DIGITS};

/// An integer operand.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Number {
    Bool(bool),
    Small(i64),
    Big(BigInt),
}

/// `I` operands: a decimal number, or `00` / `01` for the booleans.
pub(super) fn int(line: &[u8], at: usize) -> Result<Number, PickleError> {
    match line {
        b"00" => Ok(Number::Bool(false)),
        b"01" => Ok(Number::Bool(true)),
        _ => decimal(line, at),
    }
}

/// `L` operands: a decimal number with an optional `L` behind it.
pub(super) fn long(line: &[u8], at: usize) -> Result<Number, PickleError> {
    decimal(line.strip_suffix(b"L").unwrap_or(line), at)
}

fn decimal(line: &[u8], at: usize) -> Result<Number, PickleError> {
    let malformed = PickleError::Text { what: "integer", at };
    let text = std::str::from_utf8(line).map_err(|_| malformed.clone())?.trim();
    if text.len() > MAX_INT_DIGITS + 1 {
        return Err(PickleError::Limit { what: "digits of an integer", limit: MAX_INT_DIGITS as u64, at });
    }
    if let Ok(small) = text.parse::<i64>() {
        return Ok(Number::Small(small));
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(malformed);
    }
    text.parse::<BigInt>().map(Number::Big).map_err(|_| malformed)
}

/// A number that counts or indexes, written in decimal.
pub(super) fn index(line: &[u8], at: usize) -> Result<u64, PickleError> {
    let text = std::str::from_utf8(line).ok().map(str::trim);
    text.and_then(|t| t.parse().ok()).ok_or(PickleError::Text { what: "memo slot", at })
}

/// `F` operands: a float as Python's `repr` writes it.
pub(super) fn float(line: &[u8], at: usize) -> Result<f64, PickleError> {
    let text = std::str::from_utf8(line).ok().map(str::trim);
    text.and_then(|t| t.parse().ok()).ok_or(PickleError::Text { what: "float", at })
}

/// Little-endian two's complement of any length.
pub(super) fn long_bytes(bytes: &[u8], at: usize) -> Result<Number, PickleError> {
    if bytes.len() > MAX_INT_BYTES {
        return Err(PickleError::Limit { what: "bytes of an integer", limit: MAX_INT_BYTES as u64, at });
    }
    if bytes.len() <= 8 {
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xff; 8] } else { [0; 8] };
        wide[..bytes.len()].copy_from_slice(bytes);
        return Ok(Number::Small(i64::from_le_bytes(wide)));
    }
    let big = BigInt::from_signed_bytes_le(bytes);
    Ok(i64::try_from(&big).map_or(Number::Big(big), Number::Small))
}

/// `V` operands: text in which `\uXXXX` and `\UXXXXXXXX` are escapes and other bytes are Latin-1.
pub(super) fn raw_unicode_escape(line: &[u8], at: usize) -> Result<Cow<'_, [u8]>, PickleError> {
    if line.is_ascii() && !line.contains(&b'\\') {
        return Ok(Cow::Borrowed(line));
    }
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let digits = match (byte, after.first()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => {
                text.push(char::from(byte));
                continue;
            }
        };
        let hex = after.get(1..=digits).ok_or(PickleError::Text { what: "escape in a string", at })?;
        text.push(unicode_escape(hex, at)?);
        rest = &after[1 + digits..];
    }
    Ok(Cow::Owned(text.into_bytes()))
}

fn unicode_escape(hex: &[u8], at: usize) -> Result<char, PickleError> {
    if !hex.iter().all(u8::is_ascii_hexdigit) {
        return Err(PickleError::Text { what: "escape in a string", at });
    }
    let code = std::str::from_utf8(hex).ok().and_then(|h| u32::from_str_radix(h, 16).ok());
    code.and_then(char::from_u32).ok_or(PickleError::Unicode { at })
}

/// `S` operands: a quoted string literal with Python's escapes, as bytes.
pub(super) fn string_literal(line: &[u8], at: usize) -> Result<Vec<u8>, PickleError> {
    let malformed = PickleError::Text { what: "string literal", at };
    let trimmed = line.trim_ascii_end();
    let inner = match trimmed {
        [first @ (b'\'' | b'"'), inner @ .., last] if first == last => inner,
        _ => return Err(malformed),
    };
    let mut bytes = Vec::with_capacity(inner.len());
    let mut rest = inner.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        let escaped = match rest.next().ok_or(malformed.clone())? {
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'a' => 7,
            b'b' => 8,
            b'f' => 12,
            b'v' => 11,
            b'x' => {
                let mut value = 0;
                for _ in 0..2 {
                    let digit = rest.next().and_then(|d| char::from(d).to_digit(16)).ok_or(malformed.clone())?;
                    value = value * 16 + digit;
                }
                value as u8
            }
            digit @ b'0'..=b'7' => {
                let mut value = u32::from(digit - b'0');
                for _ in 0..2 {
                    let Some(next) = rest.next_if(|d| (b'0'..=b'7').contains(d)) else {
                        break;
                    };
                    value = value * 8 + u32::from(next - b'0');
                }
                (value & 0xff) as u8
            }
            quote @ (b'\\' | b'\'' | b'"') => quote,
            other => {
                bytes.push(b'\\');
                other
            }
        };
        bytes.push(escaped);
    }
    Ok(bytes)
}

/// Latin-1 encoding of a string, as `_codecs.encode(text, "latin1")` gives.
pub(super) fn latin1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_size_are_read_from_text_and_from_bytes() {
        assert_eq!(int(b"01", 0), Ok(Number::Bool(true)));
        assert_eq!(int(b"1", 0), Ok(Number::Small(1)));
        assert_eq!(long(b"-7L", 0), Ok(Number::Small(-7)));
        let big: BigInt = "-123456789012345678901234567890".parse().unwrap();
        assert_eq!(long(b"-123456789012345678901234567890L", 0), Ok(Number::Big(big.clone())));
        assert_eq!(long_bytes(&big.to_signed_bytes_le(), 0), Ok(Number::Big(big)));
        assert_eq!(long_bytes(&[], 0), Ok(Number::Small(0)));
        assert_eq!(long_bytes(&[0xff], 0), Ok(Number::Small(-1)));
        assert_eq!(long_bytes(&[0xff, 0], 0), Ok(Number::Small(255)));
        assert_eq!(long_bytes(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0), Ok(Number::Small(1)));
        for bad in [&b""[..], b"-", b"1_0", b"0x10", b"1.5", b"\xff"] {
            assert!(long(bad, 3).is_err(), "{bad:?}");
        }
        assert!(matches!(long(&[b'9'; 5000], 3), Err(PickleError::Limit { at: 3, .. })));
    }

    #[test]
    fn escapes_are_those_of_python() {
        assert_eq!(
            raw_unicode_escape(b"na\\u00efve \xe9 \\U0001f600 \\n", 0).unwrap().as_ref(),
            "na\u{ef}ve \u{e9} \u{1f600} \\n".as_bytes()
        );
        assert_eq!(raw_unicode_escape(b"\\ud800", 5), Err(PickleError::Unicode { at: 5 }));
        assert!(raw_unicode_escape(b"\\u12", 5).is_err());
        assert!(raw_unicode_escape(b"\\u+123", 5).is_err());
        assert_eq!(string_literal(b"'a\\n\\x41\\101\\'\\q'", 0).unwrap(), b"a\nAA'\\q");
        assert!(string_literal(b"'abc", 0).is_err());
        assert!(string_literal(b"'", 0).is_err());
        assert!(string_literal(b"'\\x4'", 0).is_err());
    }
}
