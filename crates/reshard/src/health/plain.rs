//! What rules say of plain values, such as a loss that was saved beside the model.

use std::sync::{Mutex, PoisonError};

use indexmap::IndexMap;
use reshard_formats::{DType, NumpyScalar, Value};

use super::{HealthFinding, HealthOptions};
use crate::cast::as_f64;
use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue};
use crate::error::{Error, Result};
use crate::workers::Workers;

/// Looks at the selected values; those whose content cannot be seen are given back, each with what it is.
pub(super) fn judge(
    checkpoint: &Checkpoint,
    options: &HealthOptions,
    found: &mut Vec<HealthFinding>,
) -> Result<IndexMap<String, String>> {
    let items = options.selection.to_read(checkpoint)?;
    let values: Vec<&str> =
        items.iter().filter(|item| matches!(item.entry.kind, CatalogKind::Value(_))).map(|item| item.stored).collect();
    let looked = Mutex::new(Vec::new());
    Workers::reading(checkpoint.store.as_ref()).in_order(&values, |key| {
        options.control.check("looking at plain values")?;
        let unread = match checkpoint.read_value(key) {
            Ok(LoadedValue::Plain(value)) if holds_nan(&value) => None,
            Ok(LoadedValue::Plain(_)) => return Ok(()),
            Ok(LoadedValue::Opaque { class, .. }) => Some(class),
            // What was not read was not looked at.
            Err(error @ Error::Storage { .. }) => return Err(error),
            // `verify` tells more of what cannot be decoded.
            Err(error) => Some(error.to_string()),
        };
        looked.lock().unwrap_or_else(PoisonError::into_inner).push((*key, unread));
        Ok(())
    })?;
    let mut looked = looked.into_inner().unwrap_or_else(PoisonError::into_inner);
    looked.sort_unstable();
    let mut unread = IndexMap::new();
    for (key, what) in looked {
        match what {
            Some(what) => drop(unread.insert(key.to_owned(), what)),
            None => HealthFinding::add(found, &options.limits, "nan-value", key, None, "a plain value".to_owned()),
        }
    }
    Ok(unread)
}

fn holds_nan(value: &Value) -> bool {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::Float(number) if number.is_nan() => return true,
            Value::Numpy(scalar) if is_nan(scalar) => return true,
            Value::Complex(real, imaginary) if real.is_nan() || imaginary.is_nan() => return true,
            Value::List(items) | Value::Tuple(items) | Value::Set(items) | Value::FrozenSet(items) => open.extend(items),
            Value::Dict(items) | Value::OrderedDict(items) => open.extend(items.iter().map(|(_, value)| value)),
            _ => {}
        }
    }
    false
}

fn is_nan(scalar: &NumpyScalar) -> bool {
    let dtype = match scalar.code.as_str() {
        "f2" => DType::Float16,
        "f4" => DType::Float32,
        "f8" => DType::Float64,
        _ => return false,
    };
    let mut bytes = scalar.data.clone();
    if !scalar.little_endian {
        bytes.reverse();
    }
    bytes.len() as u64 == dtype.size() && as_f64(dtype, &bytes).is_some_and(f64::is_nan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_is_found_wherever_it_lies() {
        let numpy = |little_endian, data: &[u8]| {
            Value::Numpy(NumpyScalar { code: format!("f{}", data.len()), little_endian, data: data.to_vec() })
        };
        let inside = Value::Dict(vec![(Value::Bool(true), Value::Tuple(vec![Value::None, Value::Complex(0.0, f64::NAN)]))]);
        for bad in [inside, numpy(true, &f64::NAN.to_le_bytes()), numpy(false, &f32::NAN.to_be_bytes()), numpy(true, &[0, 0x7e])]
        {
            assert!(holds_nan(&bad), "{bad:?}");
        }
        for good in [Value::Float(f64::INFINITY), numpy(false, &1f32.to_be_bytes()), Value::List(vec![Value::Float(0.5)])] {
            assert!(!holds_nan(&good), "{good:?}");
        }
    }
}
