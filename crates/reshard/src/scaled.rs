//! Scaled tensors: codes of a small type in one tensor, what to multiply them with in another. Codes without their scales are not
//! values, so nothing casts them alone.

use reshard_formats::DType;

use crate::checkpoint::{Catalog, CatalogEntry, CatalogKind};

/// What is put behind the name of a float8 tensor for that of its scales.
const BEHIND: [&str; 3] = ["_scale_inv", "_scale", "_scales"];

/// The key of a stored tensor's scales, if it is one of codes: a float8 tensor with scales beside it, or packed blocks.
pub(crate) fn scales_of<'c>(catalog: &'c Catalog, key: &str, entry: &CatalogEntry) -> Option<&'c str> {
    let CatalogKind::Tensor(tensor) = &entry.kind else { return None };
    let found = |name: String| {
        let (_, name, beside) = catalog.entries.get_full(name.as_str())?;
        matches!(beside.kind, CatalogKind::Tensor(_)).then_some(name.as_str())
    };
    if is_float8(tensor.dtype) {
        return BEHIND.iter().find_map(|behind| found(format!("{key}{behind}")));
    }
    let packed = key.strip_suffix("_blocks").filter(|_| tensor.dtype == DType::UInt8)?;
    found(format!("{packed}_scales"))
}

fn is_float8(dtype: DType) -> bool {
    matches!(dtype, DType::Float8E4M3Fn | DType::Float8E5M2 | DType::Float8E4M3Fnuz | DType::Float8E5M2Fnuz)
}
