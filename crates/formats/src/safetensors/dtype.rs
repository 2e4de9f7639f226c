//! Element types: safetensors' names and torch's.

use safetensors::Dtype;

use super::error::SafetensorsError;
use crate::DType;

/// Torch's type and shape for a tensor as safetensors describes it.
pub(super) fn to_torch(key: &str, name: &str, shape: &[u64]) -> Result<(Dtype, DType, Vec<u64>), SafetensorsError> {
    let (safe, dtype) = DType::ALL
        .iter()
        .filter_map(|dtype| Some((dtype.safetensors()?, *dtype)))
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
    let safe = dtype.safetensors().ok_or_else(|| SafetensorsError::UnsupportedDType { key: key.to_owned(), dtype })?;
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
    Ok((safe, shape))
}
