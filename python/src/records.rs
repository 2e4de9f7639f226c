//! Saves that torch's planners plan: records in, places out, and the publishing of what all ranks wrote.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use reshard::records::{RecordSave, abandon, begin, publish_records as publish, write_records as write};

use crate::checkpoint::RecordLocation;
use crate::errors::Raise;
use crate::leaves::Leaf;
use crate::options::{Control, SaveOptions, Storage, store_with};
use crate::run::run;

/// Where records go and how: an object of the package with these attributes.
#[derive(FromPyObject)]
pub(crate) struct RecordTarget<'py> {
    path: String,
    options: PyRef<'py, SaveOptions>,
    /// The name of the metadata, where it is not `.metadata`.
    metadata_name: Option<String>,
    storage_options: Option<Storage>,
}

/// A save that was begun: what the coordinator decided, for every rank. An object of the package with these attributes.
#[derive(FromPyObject)]
pub(crate) struct Begun {
    save_id: String,
    named: bool,
    rank: usize,
    ranks: usize,
}

/// The id of a save that was begun, and whether its data files carry it in their names.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct BegunSave {
    save_id: String,
    named: bool,
}

/// What a rank wrote.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct WrittenRecords {
    /// Where every record lies, in the order given.
    records: Vec<Py<RecordLocation>>,
    /// The checksums, for `publish_records`.
    checksums: Py<PyBytes>,
}

/// Prepares a path.
#[pyfunction]
pub(crate) fn begin_records(py: Python<'_>, target: RecordTarget<'_>) -> PyResult<BegunSave> {
    let store = store_with(&target.path, &target.storage_options.unwrap_or_default().0).or_raise(py)?;
    let (name, options) = (target.metadata_name, target.options.watched(&Control::default()));
    let save = py.detach(|| begin(store.as_ref(), name.as_deref(), &options)).or_raise(py)?;
    Ok(BegunSave { save_id: save.save_id, named: save.named })
}

/// Gives up a save that was begun, when no rank of it writes any more.
#[pyfunction]
pub(crate) fn abandon_records(py: Python<'_>, begun: &str) {
    py.detach(|| abandon(begun));
}

/// Writes one rank's records: leaves that are bytes, or one region of a tensor.
#[pyfunction]
pub(crate) fn write_records(
    py: Python<'_>,
    target: RecordTarget<'_>,
    save: Begun,
    records: &Bound<'_, PyList>,
    owners: Py<PyAny>,
    control: &Control,
) -> PyResult<WrittenRecords> {
    let store = store_with(&target.path, &target.storage_options.unwrap_or_default().0).or_raise(py)?;
    let options = target.options.watched(control);
    let records = records.iter().map(|leaf| leaf.cast::<Leaf>()?.get().to_write(py)).collect::<PyResult<Vec<_>>>()?;
    let Begun { save_id, named, rank, ranks } = save;
    let save = RecordSave { begun: save_id.clone(), save_id, named };
    let written = run(py, &control.inner, move || {
        let written = write(store.as_ref(), &save, rank, ranks, records, &options);
        drop(owners);
        written
    })?
    .or_raise(py)?;
    let location = |record: reshard::records::WrittenRecord| {
        Py::new(py, RecordLocation { file: record.file, offset: record.offset, length: record.length })
    };
    let records = written.records.into_iter().map(location).collect::<PyResult<_>>()?;
    Ok(WrittenRecords { records, checksums: PyBytes::new(py, &written.sums).unbind() })
}

/// Publishes what all ranks wrote; returns warnings. `begun` is the id under which the path was claimed.
#[pyfunction]
pub(crate) fn publish_records(
    py: Python<'_>,
    target: RecordTarget<'_>,
    save: Begun,
    begun: String,
    checksums: Vec<Vec<u8>>,
    metadata: &[u8],
) -> PyResult<Vec<String>> {
    let store = store_with(&target.path, &target.storage_options.unwrap_or_default().0).or_raise(py)?;
    let (name, options) = (target.metadata_name, target.options.watched(&Control::default()));
    let save = RecordSave { save_id: save.save_id, named: save.named, begun };
    py.detach(|| publish(store.as_ref(), &save, &checksums, metadata, name.as_deref(), &options)).or_raise(py)
}
