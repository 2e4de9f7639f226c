//! Geometry for Python: its errors as exceptions.

use pyo3::prelude::*;
use reshard::layout::{LayoutError, Region};

use crate::errors::invalid;

/// An error of the geometry as an exception.
pub(crate) fn in_layout<T>(py: Python<'_>, result: Result<T, LayoutError>) -> PyResult<T> {
    result.map_err(|error| invalid(py, error.to_string()))
}

/// A region by offsets and sizes.
pub(crate) fn region(py: Python<'_>, offsets: &[u64], sizes: &[u64]) -> PyResult<Region> {
    in_layout(py, Region::new(offsets, sizes))
}
