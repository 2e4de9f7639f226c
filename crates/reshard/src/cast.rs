//! Casts between element types, for loads and conversions that were told to.

use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use reshard_formats::DType;

use crate::error::{Error, Result};

/// Casts packed elements. Floats round to nearest even; integers saturate; anything but zero is true.
pub(crate) fn cast(from: DType, source: &[u8], to: DType, target: &mut [u8]) -> Result<()> {
    if from == to {
        target.copy_from_slice(source);
        return Ok(());
    }
    match (from, to) {
        // The pairs that occur in training get loops without a detour; all others go through one wide type.
        (DType::Float32, DType::BFloat16) => {
            each::<4, 2>(source, target, |s| bf16::from_f32(f32::from_le_bytes(s)).to_le_bytes())
        }
        (DType::BFloat16, DType::Float32) => each::<2, 4>(source, target, |s| bf16::from_le_bytes(s).to_f32().to_le_bytes()),
        (DType::Float32, DType::Float16) => each::<4, 2>(source, target, |s| f16::from_f32(f32::from_le_bytes(s)).to_le_bytes()),
        (DType::Float16, DType::Float32) => each::<2, 4>(source, target, |s| f16::from_le_bytes(s).to_f32().to_le_bytes()),
        _ => {
            let (Some(read), Some(write)) = (reader(from), writer(to)) else {
                return Err(Error::unsupported(format!("no cast from {} to {}", from.name(), to.name())));
            };
            let (a, b) = (from.size() as usize, to.size() as usize);
            for (source, target) in source.chunks_exact(a).zip(target.chunks_exact_mut(b)) {
                write(read(source), target);
            }
        }
    }
    Ok(())
}

/// Whether [`cast`] knows this pair.
pub(crate) fn can_cast(from: DType, to: DType) -> bool {
    from == to || (reader(from).is_some() && writer(to).is_some())
}

/// The types that can hold the values of block-scaled codes, and in which weights can be added up.
pub(crate) fn holds_values(dtype: DType) -> bool {
    matches!(dtype, DType::BFloat16 | DType::Float16 | DType::Float32 | DType::Float64)
}

/// Reads element `index` of packed elements as a number, for statistics and printing; `None` for types without one.
pub(crate) fn as_f64(dtype: DType, element: &[u8]) -> Option<f64> {
    Some(match reader(dtype)?(element) {
        Wide::Int(i) => i as f64,
        Wide::Float(f) => f,
    })
}

fn each<const A: usize, const B: usize>(source: &[u8], target: &mut [u8], cast: impl Fn([u8; A]) -> [u8; B]) {
    for (source, target) in source.as_chunks::<A>().0.iter().zip(target.as_chunks_mut::<B>().0) {
        *target = cast(*source);
    }
}

/// Holds every element type's values exactly.
enum Wide {
    Int(i128),
    Float(f64),
}

fn bytes<const N: usize>(element: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let n = element.len().min(N);
    out[..n].copy_from_slice(&element[..n]);
    out
}

fn reader(dtype: DType) -> Option<fn(&[u8]) -> Wide> {
    Some(match dtype {
        DType::Float64 => |e| Wide::Float(f64::from_le_bytes(bytes(e))),
        DType::Float32 => |e| Wide::Float(f64::from(f32::from_le_bytes(bytes(e)))),
        DType::Float16 => |e| Wide::Float(f16::from_le_bytes(bytes(e)).to_f64()),
        DType::BFloat16 => |e| Wide::Float(bf16::from_le_bytes(bytes(e)).to_f64()),
        DType::Float8E4M3Fn => |e| Wide::Float(F8E4M3::from_bits(e[0]).to_f64()),
        DType::Float8E5M2 => |e| Wide::Float(F8E5M2::from_bits(e[0]).to_f64()),
        DType::Float8E4M3Fnuz => |e| Wide::Float(small_float(e[0], 4, 3, 8, true)),
        DType::Float8E5M2Fnuz => |e| Wide::Float(small_float(e[0], 5, 2, 16, true)),
        DType::Float8E8M0Fnu => |e| Wide::Float(if e[0] == 0xff { f64::NAN } else { 2f64.powi(i32::from(e[0]) - 127) }),
        DType::Int8 => |e| Wide::Int(i128::from(i8::from_le_bytes(bytes(e)))),
        DType::Int16 => |e| Wide::Int(i128::from(i16::from_le_bytes(bytes(e)))),
        DType::Int32 => |e| Wide::Int(i128::from(i32::from_le_bytes(bytes(e)))),
        DType::Int64 => |e| Wide::Int(i128::from(i64::from_le_bytes(bytes(e)))),
        DType::UInt8 => |e| Wide::Int(i128::from(e[0])),
        DType::UInt16 => |e| Wide::Int(i128::from(u16::from_le_bytes(bytes(e)))),
        DType::UInt32 => |e| Wide::Int(i128::from(u32::from_le_bytes(bytes(e)))),
        DType::UInt64 => |e| Wide::Int(i128::from(u64::from_le_bytes(bytes(e)))),
        DType::Bool => |e| Wide::Int(i128::from(e[0] != 0)),
        _ => return None,
    })
}

fn writer(dtype: DType) -> Option<fn(Wide, &mut [u8])> {
    fn float(wide: Wide) -> f64 {
        match wide {
            Wide::Int(i) => i as f64,
            Wide::Float(f) => f,
        }
    }
    fn int<T: TryFrom<i128>>(wide: Wide, least: T, most: T) -> T {
        let value = match wide {
            Wide::Int(i) => i,
            Wide::Float(f) => f as i128,
        };
        T::try_from(value).unwrap_or(if value < 0 { least } else { most })
    }
    Some(match dtype {
        DType::Float64 => |w, out| out.copy_from_slice(&float(w).to_le_bytes()),
        DType::Float32 => |w, out| out.copy_from_slice(&(float(w) as f32).to_le_bytes()),
        DType::Float16 => |w, out| out.copy_from_slice(&f16::from_f64(float(w)).to_le_bytes()),
        DType::BFloat16 => |w, out| out.copy_from_slice(&bf16::from_f64(float(w)).to_le_bytes()),
        DType::Float8E4M3Fn => |w, out| out[0] = F8E4M3::from_f64(float(w)).to_bits(),
        DType::Float8E5M2 => |w, out| out[0] = F8E5M2::from_f64(float(w)).to_bits(),
        DType::Int8 => |w, out| out.copy_from_slice(&int(w, i8::MIN, i8::MAX).to_le_bytes()),
        DType::Int16 => |w, out| out.copy_from_slice(&int(w, i16::MIN, i16::MAX).to_le_bytes()),
        DType::Int32 => |w, out| out.copy_from_slice(&int(w, i32::MIN, i32::MAX).to_le_bytes()),
        DType::Int64 => |w, out| out.copy_from_slice(&int(w, i64::MIN, i64::MAX).to_le_bytes()),
        DType::UInt8 => |w, out| out.copy_from_slice(&int(w, u8::MIN, u8::MAX).to_le_bytes()),
        DType::UInt16 => |w, out| out.copy_from_slice(&int(w, u16::MIN, u16::MAX).to_le_bytes()),
        DType::UInt32 => |w, out| out.copy_from_slice(&int(w, u32::MIN, u32::MAX).to_le_bytes()),
        DType::UInt64 => |w, out| out.copy_from_slice(&int(w, u64::MIN, u64::MAX).to_le_bytes()),
        DType::Bool => |w, out| {
            out[0] = u8::from(match w {
                Wide::Int(i) => i != 0,
                Wide::Float(f) => f != 0.0,
            })
        },
        _ => return None,
    })
}

/// An eight-bit float of the `fnuz` kind: no infinities, no negative zero, whose bit pattern is the one NaN.
fn small_float(bits: u8, exponent_bits: u32, mantissa_bits: u32, bias: i32, fnuz: bool) -> f64 {
    if fnuz && bits == 0x80 {
        return f64::NAN;
    }
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((bits & 0x7f) >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
    if exponent == 0 { sign * mantissa * 2f64.powi(1 - bias) } else { sign * (1.0 + mantissa) * 2f64.powi(exponent - bias) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_and_back_is_the_identity() {
        for (narrow, wide) in [
            (DType::BFloat16, DType::Float32),
            (DType::Float16, DType::Float32),
            (DType::Float16, DType::Float64),
            (DType::Int16, DType::Int64),
            (DType::UInt16, DType::Int32),
        ] {
            let source: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let mut wider = vec![0; (source.len() / 2) * wide.size() as usize];
            cast(narrow, &source, wide, &mut wider).unwrap();
            let mut back = vec![0; source.len()];
            cast(wide, &wider, narrow, &mut back).unwrap();
            let nan = |e: &[u8]| as_f64(narrow, e).unwrap().is_nan();
            for (a, b) in source.chunks(2).zip(back.chunks(2)) {
                assert!(a == b || (nan(a) && nan(b)), "{narrow:?}: {a:?} {b:?}");
            }
        }
    }

    #[test]
    fn integers_saturate() {
        let mut out = [0; 1];
        cast(DType::Int64, &300i64.to_le_bytes(), DType::UInt8, &mut out).unwrap();
        assert_eq!(out, [255]);
        cast(DType::Float32, &(-1.5f32).to_le_bytes(), DType::UInt8, &mut out).unwrap();
        assert_eq!(out, [0]);
    }
}
