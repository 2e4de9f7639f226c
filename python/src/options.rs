//! Options as they come from Python, and the object through which work is watched and cancelled.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard::storage::{Address, StorageError, Store, StoreOptions, open};
use reshard::{CastPolicy, LoadOptions, SaveOptions, Strictness, Verify};

use crate::errors::{Raise, invalid};

/// Progress and cancellation of a save or a load.
#[pyclass(module = "reshard._reshard", frozen)]
#[derive(Clone, Default)]
pub(crate) struct Control {
    pub(crate) inner: reshard::Control,
}

#[pymethods]
impl Control {
    #[new]
    fn new() -> Control {
        Control::default()
    }

    /// Bytes to move in all, as far as known.
    #[getter]
    fn total(&self) -> u64 {
        self.inner.total()
    }

    /// Bytes moved so far.
    #[getter]
    fn done(&self) -> u64 {
        self.inner.done()
    }

    /// Asks the work to stop at its next step.
    fn cancel(&self) {
        self.inner.cancel();
    }
}

/// The plan of the last save of some ranks, kept for the next one of the same layout.
#[pyclass(module = "reshard._reshard", frozen)]
#[derive(Default)]
pub(crate) struct PlanCache {
    inner: Arc<reshard::PlanCache>,
}

#[pymethods]
impl PlanCache {
    #[new]
    fn new() -> PlanCache {
        PlanCache::default()
    }
}

/// The store at a path, with options by name.
pub(crate) fn store_at(py: Python<'_>, path: &str, options: Option<&Bound<'_, PyDict>>) -> PyResult<Arc<dyn Store>> {
    store_with(path, &store_options(py, options)?).or_raise(py)
}

/// The store at a path.
pub(crate) fn store_with(path: &str, options: &StoreOptions) -> reshard::Result<Arc<dyn Store>> {
    let opened = Address::parse(path).and_then(|address| open(&address, options));
    opened.map_err(|source| storage(path, source))
}

/// A failure of the storage as the engine would report it.
pub(crate) fn storage(path: &str, source: StorageError) -> reshard::Error {
    reshard::Error::Storage { doing: format!("opening {}", reshard::storage::redacted(path)), source }
}

/// Store options by name; names that are none of ours go to the object store's client.
pub(crate) fn store_options(py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<StoreOptions> {
    let mut options = StoreOptions::default();
    for (name, value) in given.into_iter().flat_map(|dict| dict.iter()) {
        let name: String = name.extract()?;
        match name.as_str() {
            "direct_io" => options.direct_io = value.extract()?,
            "preallocate" => options.preallocate = value.extract()?,
            "early_writeback" => options.early_writeback = value.extract()?,
            "follow_symlinks" => options.follow_symlinks = value.extract()?,
            "upload_budget" => options.upload_budget = value.extract()?,
            "part_size" => options.part_size = value.extract()?,
            "coalesce_gap" => options.coalesce_gap = value.extract()?,
            "read_concurrency" => options.read_concurrency = value.extract()?,
            "max_retries" => options.retry.max_retries = value.extract()?,
            "endpoint" => options.endpoint = value.extract()?,
            "allow_http" => options.allow_http = value.extract()?,
            "region" => options.region = value.extract()?,
            _ => match value.extract::<String>() {
                Ok(value) => options.settings.push((name, value)),
                Err(_) => return Err(invalid(py, format!("the storage option {name:?} must be a string"))),
            },
        }
    }
    Ok(options)
}

/// How to save, by name.
pub(crate) fn save_options(py: Python<'_>, given: &Bound<'_, PyDict>, control: &Control) -> PyResult<SaveOptions> {
    let mut options = SaveOptions::default();
    options.control = control.inner.clone();
    for (name, value) in given.iter() {
        match name.extract::<String>()?.as_str() {
            "overwrite" => options.overwrite = value.extract()?,
            "checksums" => options.checksums = value.extract()?,
            "sync" => options.sync = value.extract()?,
            // None leaves it to the engine.
            "split_replicated_above" => {
                options.split_replicated_above = value.extract::<Option<_>>()?.unwrap_or(options.split_replicated_above);
            }
            "check_replicas" => options.check_replicas = value.extract()?,
            "check_files" => options.check_files = value.extract()?,
            "files_per_rank" => options.files_per_rank = value.extract()?,
            "plan_cache" => options.plan_cache = Some(Arc::clone(&value.cast::<PlanCache>()?.get().inner)),
            other => return Err(invalid(py, format!("{other:?} is no option of a save"))),
        }
    }
    Ok(options)
}

/// How to load, by name.
pub(crate) fn load_options(py: Python<'_>, given: &Bound<'_, PyDict>, control: &Control) -> PyResult<LoadOptions> {
    let mut options = LoadOptions::default();
    options.control = control.inner.clone();
    for (name, value) in given.iter() {
        match name.extract::<String>()?.as_str() {
            "strict" => {
                options.strictness = if value.extract()? { Strictness::Strict } else { Strictness::Lenient };
            }
            "cast" => options.cast = cast_policy(py, &value)?,
            "verify" => options.verify = verify(py, &value)?,
            "max_gap" => options.max_gap = value.extract()?,
            "exchange" => options.exchange = value.extract()?,
            "parts" => options.parts = value.extract()?,
            // Which stored keys may go unwanted is known to the caller, who asks for all of them or none.
            "ignore_unexpected" => {
                if value.extract()? {
                    options.expected = Some(Arc::new(|_| false));
                }
            }
            other => return Err(invalid(py, format!("{other:?} is no option of a load"))),
        }
    }
    Ok(options)
}

fn cast_policy(py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<CastPolicy> {
    match value.extract::<String>()?.as_str() {
        "never" => Ok(CastPolicy::Never),
        "widening" => Ok(CastPolicy::Widening),
        "any" => Ok(CastPolicy::Any),
        other => Err(invalid(py, format!("cast is \"never\", \"widening\" or \"any\", not {other:?}"))),
    }
}

fn verify(py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<Verify> {
    match value.extract::<String>()?.as_str() {
        "never" => Ok(Verify::Never),
        "whole" => Ok(Verify::Whole),
        "always" => Ok(Verify::Always),
        other => Err(invalid(py, format!("verify is \"never\", \"whole\" or \"always\", not {other:?}"))),
    }
}
