//! Files that trainers and Hugging Face keep beside what the engine writes: complete or not there, and durable.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use reshard::Error;
use reshard::storage::{Publish, StoreOptions};

use crate::errors::Raise;
use crate::options::store_with;

/// Writes a file of a folder, in place of the one that is there: nobody ever finds a part of it, and it is on the disk when this
/// returns.
#[pyfunction]
pub(crate) fn publish_file(py: Python<'_>, folder: &str, name: &str, content: PyBackedBytes) -> PyResult<()> {
    let published = py.detach(|| {
        let store = store_with(folder, &StoreOptions::default())?;
        let written = store.prepare().and_then(|()| store.publish(name, &content, Publish::Replace));
        written.map_err(|source| Error::Storage { doing: format!("writing {name} in {folder}"), source })
    });
    published.or_raise(py)
}

/// Gives a file of a folder another name, over what is there, durably.
#[pyfunction]
pub(crate) fn rename_file(py: Python<'_>, folder: &str, name: &str, to: &str) -> PyResult<()> {
    let renamed = py.detach(|| {
        let store = store_with(folder, &StoreOptions::default())?;
        let renamed = store.rename(name, to, Publish::Replace).and_then(|()| store.sync());
        renamed.map_err(|source| Error::Storage { doing: format!("renaming {name} in {folder} to {to}"), source })
    });
    renamed.or_raise(py)
}
