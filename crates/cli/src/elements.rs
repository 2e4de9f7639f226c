//! Elements of a tensor as numbers and text: a region is read through the engine's own casts.

use reshard::layout::Region;
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, Scope};
use reshard::load::CastPolicy;
use reshard::{Checkpoint, DType, LoadOptions, LoadState, Solo, load_with};
use serde_json::Value as Json;

use crate::failure::{Failure, Result};
use crate::human;

/// One element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Element {
    /// Any real floating-point type.
    Float(f64),
    /// Any integer type.
    Int(i128),
    /// True or false.
    Bool(bool),
    /// Real and imaginary part.
    Complex(f64, f64),
    /// A type without a number of its own: its bytes.
    Raw(u8),
}

impl Element {
    /// For people: few digits.
    pub(crate) fn text(self) -> String {
        match self {
            Element::Float(value) if value.is_nan() => "nan".to_owned(),
            Element::Float(value) if value.is_infinite() => if value > 0.0 { "inf" } else { "-inf" }.to_owned(),
            Element::Float(value) => human::number(value),
            Element::Int(value) => value.to_string(),
            Element::Bool(value) => value.to_string(),
            Element::Complex(re, im) => {
                let sign = if im.is_sign_negative() { "-" } else { "+" };
                format!("{}{sign}{}j", Element::Float(re).text(), Element::Float(im.abs()).text())
            }
            Element::Raw(byte) => format!("0x{byte:02x}"),
        }
    }

    /// For programs: all digits; what JSON has no number for as text.
    pub(crate) fn json(self) -> Json {
        match self {
            Element::Float(value) => serde_json::Number::from_f64(value).map_or_else(|| Json::from(self.text()), Json::Number),
            Element::Int(value) => match (i64::try_from(value), u64::try_from(value)) {
                (Ok(value), _) => Json::from(value),
                (_, Ok(value)) => Json::from(value),
                _ => Json::from(value.to_string()),
            },
            Element::Bool(value) => Json::from(value),
            Element::Complex(re, im) => Json::from(vec![Element::Float(re).json(), Element::Float(im).json()]),
            Element::Raw(_) => Json::from(self.text()),
        }
    }
}

/// Reads a region, row by row.
pub(crate) fn read(checkpoint: &Checkpoint, key: &str, region: &Region) -> Result<Vec<Element>> {
    let tensor = checkpoint.tensor(key)?;
    let wide = match tensor.dtype {
        DType::Complex64 | DType::Complex128 | DType::Bool | DType::UInt64 | DType::Float4E2M1FnX2 | DType::Complex32 => {
            tensor.dtype
        }
        dtype if dtype.name().contains("float") => DType::Float64,
        _ => DType::Int64,
    };
    let bytes = region.volume().checked_mul(wide.size()).and_then(|n| usize::try_from(n).ok());
    let bytes = bytes.ok_or_else(|| Failure::new(format!("{region} of {key:?} does not fit into memory")))?;
    let mut memory = vec![0; bytes];
    let piece = LoadPiece::contiguous(region.clone(), wide, &mut memory)?;
    let mut state = LoadState::new();
    let wanted = LoadTensor { dtype: wide, shape: tensor.shape.clone(), pieces: vec![piece] };
    state.insert(key, Scope::Shared, LoadLeaf::Tensor(wanted))?;
    let mut options = LoadOptions::default();
    options.cast = CastPolicy::Any;
    options.expected = Some(std::sync::Arc::new(|_| false));
    load_with(&Solo, checkpoint, &mut state, &options)?;
    drop(state);
    Ok(decode(wide, &memory))
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<Element> {
    let words = |size: usize| bytes.chunks_exact(size);
    match dtype {
        DType::Float64 => words(8).map(|e| Element::Float(f64::from_le_bytes(array(e)))).collect(),
        DType::Int64 => words(8).map(|e| Element::Int(i64::from_le_bytes(array(e)).into())).collect(),
        DType::UInt64 => words(8).map(|e| Element::Int(u64::from_le_bytes(array(e)).into())).collect(),
        DType::Bool => words(1).map(|e| Element::Bool(e[0] != 0)).collect(),
        DType::Complex64 => words(8)
            .map(|e| Element::Complex(f32::from_le_bytes(array(&e[..4])).into(), f32::from_le_bytes(array(&e[4..])).into()))
            .collect(),
        DType::Complex128 => {
            words(16).map(|e| Element::Complex(f64::from_le_bytes(array(&e[..8])), f64::from_le_bytes(array(&e[8..])))).collect()
        }
        DType::Complex32 => words(4).map(|e| Element::Complex(half(array(&e[..2])), half(array(&e[2..])))).collect(),
        _ => bytes.iter().map(|byte| Element::Raw(*byte)).collect(),
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    out
}

/// A 16-bit float of IEEE 754.
fn half(bytes: [u8; 2]) -> f64 {
    let bits = u16::from_le_bytes(bytes);
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    sign * match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_have_text_and_json() {
        assert_eq!(Element::Complex(1.0, -0.5).text(), "1-0.5j");
        assert_eq!(Element::Float(f64::NEG_INFINITY).json(), Json::from("-inf"));
        assert_eq!(Element::Int(u64::MAX.into()).json(), Json::from(u64::MAX));
        assert_eq!(decode(DType::Bool, &[0, 1]), [Element::Bool(false), Element::Bool(true)]);
    }

    #[test]
    fn halves_are_ieee() {
        for (bits, value) in [(0x3c00_u16, 1.0), (0xc000, -2.0), (0x7bff, 65504.0), (1, 2f64.powi(-24)), (0x7c00, f64::INFINITY)]
        {
            assert_eq!(half(bits.to_le_bytes()), value);
        }
        assert!(half(0x7e00_u16.to_le_bytes()).is_nan());
    }
}
