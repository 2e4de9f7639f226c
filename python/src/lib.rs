//! The extension module `reshard._reshard`.
use pyo3::prelude::*;

#[pymodule]
mod _reshard {}
