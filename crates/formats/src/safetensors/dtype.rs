//! Element types: safetensors' names and torch's.

use safetensors::Dtype;

use super::error::SafetensorsError;
use crate::DType;

/// Both names of every type that the two have in common.
const COMMON: &[(Dtype, DType)] = &[
    (Dtype::BOOL, DType::Bool),
    (Dtype::F4, DType::Float4E2M1FnX2),
    (Dtype::U8, DType::UInt8),
    (Dtype::I8, DType::Int8),
    (Dtype::F8_E5M2, DType::Float8E5M2),
    (Dtype::F8_E4M3, DType::Float8E4M3Fn),
    (Dtype::F8_E8M0, DType::Float8E8M0Fnu),
    (Dtype::F8_E4M3FNUZ, DType::Float8E4M3Fnuz),
    (Dtype::F8_E5M2FNUZ, DType::Float8E5M2Fnuz),
    (Dtype::I16, DType::Int16),
    (Dtype::U16, DType::UInt16),
    (Dtype::F16, DType::Float16),
    (Dtype::BF16, DType::BFloat16),
    (Dtype::I32, DType::Int32),
    (Dtype::U32, DType::UInt32),
    (Dtype::F32, DType::Float32),
    (Dtype::C64, DType::Complex64),
    (Dtype::F64, DType::Float64),
    (Dtype::I64, DType::Int64),
    (Dtype::U64, DType::UInt64),
];

/// Torch's type and shape for a tensor as safetensors describes it.
pub(super) fn to_torch(key: &str, name: &str, shape: &[u64]) -> Result<(Dtype, DType, Vec<u64>), SafetensorsError> {
    let (safe, dtype) = COMMON
        .iter()
        .copied()
        .find(|(safe, _)| safe.to_string() == name)
        .ok_or_else(|| SafetensorsError::UnknownDType { key: key.to_owned(), dtype: name.to_owned() })?;
    let mut shape = shape.to_vec();
    if dtype == DType::Float4E2M1FnX2 {
        // Safetensors counts the 4-bit values, torch the bytes that hold two of them.
        match shape.last_mut() {
            Some(last) if *last % 2 == 0 => *last /= 2,
            _ => {
                return Err(SafetensorsError::BadTensor {
                    key: key.to_owned(),
                    reason: format!("4-bit values of shape {shape:?} don't fill bytes"),
                });
            }
        }
    }
    Ok((safe, dtype, shape))
}

/// Safetensors' type and shape for a torch tensor.
pub(super) fn to_safetensors(key: &str, dtype: DType, shape: &[u64]) -> Result<(Dtype, Vec<u64>), SafetensorsError> {
    let safe = COMMON.iter().find(|(_, torch)| *torch == dtype);
    let (safe, _) = safe.ok_or_else(|| SafetensorsError::UnsupportedDType { key: key.to_owned(), dtype })?;
    let mut shape = shape.to_vec();
    if dtype == DType::Float4E2M1FnX2 {
        let doubled = shape.last_mut().and_then(|last| {
            *last = last.checked_mul(2)?;
            Some(())
        });
        doubled.ok_or_else(|| SafetensorsError::BadTensor {
            key: key.to_owned(),
            reason: "safetensors can't hold a zero-dim tensor of 4-bit values".to_owned(),
        })?;
    }
    Ok((*safe, shape))
}
