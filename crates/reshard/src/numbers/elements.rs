//! Elements as numbers and as text.

use reshard_formats::DType;

use crate::cast::{as_f64, cast};
use crate::error::{Error, Result};

/// Packed elements as numbers; a complex element gives two.
pub(crate) fn numbers(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>> {
    let real = real_part(dtype)
        .ok_or_else(|| Error::unsupported(format!("elements of type {} have no numeric value here", dtype.name())))?;
    let mut wide = vec![0u8; bytes.len() / real.size() as usize * 8];
    cast(real, bytes, DType::Float64, &mut wide)?;
    Ok(wide.as_chunks::<8>().0.iter().map(|n| f64::from_le_bytes(*n)).collect())
}

/// The type of the numbers in an element: of the parts of a complex one; `None` for packed types without a number.
pub(crate) fn real_part(dtype: DType) -> Option<DType> {
    match dtype {
        DType::Complex32 => Some(DType::Float16),
        DType::Complex64 => Some(DType::Float32),
        DType::Complex128 => Some(DType::Float64),
        other => crate::cast::can_cast(other, DType::Float64).then_some(other),
    }
}

/// One element as text: integers in full, floats with as many digits as tell them apart, packed types in hexadecimal.
pub fn element_text(dtype: DType, element: &[u8]) -> String {
    if dtype == DType::Bool {
        return if element.iter().any(|b| *b != 0) { "True".into() } else { "False".into() };
    }
    if let Some(part) = real_part(dtype).filter(|part| *part != dtype) {
        let (real, imaginary) = element.split_at(element.len() / 2);
        let imaginary = element_text(part, imaginary);
        let sign = if imaginary.starts_with('-') { "" } else { "+" };
        return format!("{}{sign}{imaginary}j", element_text(part, real));
    }
    let name = dtype.name();
    if name.starts_with("int") || name.starts_with("uint") {
        let negative = name.starts_with("int") && element.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        let length = element.len().min(16);
        wide[..length].copy_from_slice(&element[..length]);
        return i128::from_le_bytes(wide).to_string();
    }
    match as_f64(dtype, element) {
        Some(number) if dtype == DType::Float64 => format!("{number:?}"),
        Some(number) => format!("{:?}", number as f32),
        None => element.iter().fold("0x".to_owned(), |text, b| format!("{text}{b:02x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_shown_in_full() {
        assert_eq!(element_text(DType::Int64, &(-5i64).to_le_bytes()), "-5");
        assert_eq!(element_text(DType::UInt64, &u64::MAX.to_le_bytes()), "18446744073709551615");
        assert_eq!(element_text(DType::Int8, &[0x80]), "-128");
        assert_eq!(element_text(DType::Float32, &0.1f32.to_le_bytes()), "0.1");
        assert_eq!(element_text(DType::Float64, &0.1f64.to_le_bytes()), "0.1");
        assert_eq!(element_text(DType::BFloat16, &[0x80, 0x3f]), "1.0");
        assert_eq!(element_text(DType::Bool, &[1]), "True");
        let complex = [1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat();
        assert_eq!(element_text(DType::Complex64, &complex), "1.5-2.0j");
        assert_eq!(element_text(DType::Float4E2M1FnX2, &[0x2a]), "0x2a");
    }
}
