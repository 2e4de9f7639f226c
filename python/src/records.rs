//! Saves that torch's planners plan: records in, places out, and the publishing of what all ranks wrote.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use reshard::SavePiece;
use reshard::layout::{ByteLayout, Region};
use reshard::records::{RecordContent, RecordSave, RecordToWrite, begin, publish_records as publish, write_records as write};

use crate::errors::{Raise, invalid};
use crate::leaves::{dims, dtype_of, source};
use crate::options::{Control, save_options, store_at};
use crate::run::run;
use crate::tree::key_path;

/// Prepares a path; returns the save's id, and whether data files carry it in their names.
#[pyfunction]
#[pyo3(signature = (path, options, metadata_name=None, storage_options=None))]
pub(crate) fn begin_records(
    py: Python<'_>,
    path: &str,
    options: &Bound<'_, PyDict>,
    metadata_name: Option<&str>,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<(String, bool)> {
    let store = store_at(py, path, storage_options)?;
    let options = save_options(py, options, &Control::default())?;
    let save = py.detach(|| begin(store.as_ref(), metadata_name, &options)).or_raise(py)?;
    Ok((save.save_id, save.named))
}

/// File, offset and length of every record, in the order given, and the sums that `publish_records` wants.
type Places<'py> = (Vec<(String, u64, u64)>, Bound<'py, PyBytes>);

/// Writes one rank's records: `(key, path, bytes)` or
/// `(key, path, None, dtype, requires_grad, shape, offsets, sizes, memory, strides)`.
#[pyfunction]
#[pyo3(signature = (path, save_id, named, rank, ranks, records, owners, options, control, storage_options=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn write_records<'py>(
    py: Python<'py>,
    path: &str,
    save_id: String,
    named: bool,
    rank: usize,
    ranks: usize,
    records: &Bound<'py, PyList>,
    owners: Py<PyAny>,
    options: &Bound<'py, PyDict>,
    control: &Control,
    storage_options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Places<'py>> {
    let store = store_at(py, path, storage_options)?;
    let options = save_options(py, options, control)?;
    let records = records.iter().map(record).collect::<PyResult<Vec<_>>>()?;
    let save = RecordSave { begun: save_id.clone(), save_id, named };
    let written = run(py, &control.inner, move || {
        let written = write(store.as_ref(), &save, rank, ranks, records, &options);
        drop(owners);
        written
    })?
    .or_raise(py)?;
    let places = written.records.into_iter().map(|r| (r.file, r.offset, r.length)).collect();
    Ok((places, PyBytes::new(py, &written.sums)))
}

fn record(record: Bound<'_, PyAny>) -> PyResult<RecordToWrite<'static>> {
    let py = record.py();
    let record = record.cast_into::<PyTuple>()?;
    let key = record.get_item(0)?.cast::<PyString>()?.to_str()?.to_owned();
    let path = match record.get_item(1)? {
        none if none.is_none() => None,
        path => Some(key_path(path.cast::<PyTuple>()?)?),
    };
    let bytes = record.get_item(2)?;
    if !bytes.is_none() {
        let content = RecordContent::Bytes(bytes.cast::<PyBytes>()?.as_bytes().to_vec());
        return Ok(RecordToWrite { key, path, content });
    }
    let problem = |error: reshard::layout::LayoutError| invalid(py, error.to_string());
    let dtype = dtype_of(py, record.get_item(3)?.extract()?)?;
    let sizes = dims(&record.get_item(7)?)?;
    let region = Region::new(&dims(&record.get_item(6)?)?, &sizes).map_err(problem)?;
    let strides = record.get_item(9)?;
    let layout = match strides.is_none() {
        true => ByteLayout::contiguous(&sizes, dtype.size()),
        false => ByteLayout::strided(&sizes, &dims(&strides)?, dtype.size()),
    };
    let layout = layout.map_err(problem)?;
    let memory = source(&layout, &record.get_item(8)?)?;
    let piece = SavePiece::new(region, layout, memory).or_raise(py)?;
    let requires_grad = record.get_item(4)?.is_truthy()?;
    let content = RecordContent::Tensor { dtype, requires_grad, shape: dims(&record.get_item(5)?)?, piece };
    Ok(RecordToWrite { key, path, content })
}

/// Publishes what all ranks wrote; returns warnings.
#[pyfunction]
#[pyo3(signature = (path, save_id, named, begun, sums, metadata, options, metadata_name=None, storage_options=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn publish_records(
    py: Python<'_>,
    path: &str,
    save_id: String,
    named: bool,
    begun: String,
    sums: Vec<Vec<u8>>,
    metadata: &[u8],
    options: &Bound<'_, PyDict>,
    metadata_name: Option<&str>,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<String>> {
    let store = store_at(py, path, storage_options)?;
    let options = save_options(py, options, &Control::default())?;
    let save = RecordSave { save_id, named, begun };
    py.detach(|| publish(store.as_ref(), &save, &sums, metadata, metadata_name, &options)).or_raise(py)
}
