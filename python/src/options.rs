//! Options as they come from Python, and the object through which work is watched and cancelled.

use std::path::Path;
use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;
use reshard::control::Phase;
use reshard::load::{CastPolicy, Strictness, Verify};
use reshard::storage::{Address, StorageError, Store, StoreOptions, open};

use crate::errors::invalid;

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

    /// How far the whole job is, the final sync included.
    fn progress(&self) -> Progress {
        let found = self.inner.progress();
        let phase = match found.phase {
            Phase::Syncing => "syncing",
            Phase::Finishing => "finishing",
            _ => "moving",
        };
        Progress { phase, done: found.done, total: found.total }
    }

    /// Asks the work to stop at its next step.
    fn cancel(&self) {
        self.inner.cancel();
    }
}

/// How far a whole job is: bytes that are moved, and again those that are made durable.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct Progress {
    phase: &'static str,
    done: u64,
    total: u64,
}

/// The plan of the last save of some ranks, kept for the next one of the same layout.
#[pyclass(module = "reshard._reshard", frozen)]
#[derive(Default)]
pub(crate) struct PlanCache {
    inner: Arc<reshard::save::PlanCache>,
}

#[pymethods]
impl PlanCache {
    #[new]
    fn new() -> PlanCache {
        PlanCache::default()
    }
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

/// Settings of a store by name; names that are none of ours go to the object store's client.
#[derive(Default)]
pub(crate) struct Storage(pub(crate) StoreOptions);

impl<'py> FromPyObject<'_, 'py> for Storage {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Storage> {
        let py = given.py();
        let mut options = StoreOptions::default();
        let Ok(mapping) = given.cast::<PyMapping>() else {
            return Err(PyTypeError::new_err("settings of a store come as a dict"));
        };
        for item in mapping.items()?.iter() {
            let (name, value): (String, Bound<'_, PyAny>) = item.extract()?;
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
        Ok(Storage(options))
    }
}

/// The file into which a call is traced, where one was given.
pub(crate) struct Trace(Option<reshard::trace::TraceFile>);

impl Trace {
    pub(crate) fn open(path: Option<&str>, rank: usize) -> reshard::Result<Trace> {
        let open = |path: &str| {
            let opened = reshard::trace::TraceFile::open(rank, Path::new(path));
            opened.map_err(|error| reshard::Error::Invalid { detail: format!("no trace can be written to {path:?}: {error}") })
        };
        path.map(open).transpose().map(Trace)
    }

    /// Does some work, traced or not.
    pub(crate) fn around<T>(self, work: impl FnOnce() -> T) -> T {
        match self.0 {
            Some(trace) => trace.around(work),
            None => work(),
        }
    }
}

/// How to save.
#[pyclass(module = "reshard._reshard", frozen)]
#[derive(Clone)]
pub(crate) struct SaveOptions(reshard::SaveOptions);

#[pymethods]
impl SaveOptions {
    /// What is left out is for the engine to decide.
    #[new]
    #[pyo3(signature = (*, overwrite=None, checksums=None, sync=None, split_replicated_above=None, check_replicas=None, check_files=None, files_per_rank=None, compression=None, plan_cache=None))]
    #[expect(clippy::too_many_arguments, reason = "one for each option")]
    fn new(
        py: Python<'_>,
        overwrite: Option<bool>,
        checksums: Option<bool>,
        sync: Option<bool>,
        split_replicated_above: Option<u64>,
        check_replicas: Option<bool>,
        check_files: Option<bool>,
        files_per_rank: Option<u32>,
        compression: Option<&str>,
        plan_cache: Option<PyRef<'_, PlanCache>>,
    ) -> PyResult<SaveOptions> {
        let mut options = reshard::SaveOptions::default();
        set(&mut options.overwrite, overwrite);
        set(&mut options.checksums, checksums);
        set(&mut options.sync, sync);
        set(&mut options.split_replicated_above, split_replicated_above);
        set(&mut options.check_replicas, check_replicas);
        set(&mut options.check_files, check_files);
        set(&mut options.files_per_rank, files_per_rank);
        options.compression = compression.map(|name| parsed_compression(py, name)).transpose()?;
        options.plan_cache = plan_cache.map(|cache| Arc::clone(&cache.inner));
        Ok(SaveOptions(options))
    }

    /// The same, and replicas are compared.
    fn checking_replicas(&self) -> SaveOptions {
        let mut options = self.0.clone();
        options.check_replicas = true;
        SaveOptions(options)
    }
}

impl SaveOptions {
    /// The engine's, watched through a control.
    pub(crate) fn watched(&self, control: &Control) -> reshard::SaveOptions {
        let mut options = self.0.clone();
        options.control = control.inner.clone();
        options
    }
}

/// A compression by its name.
pub(crate) fn parsed_compression(py: Python<'_>, name: &str) -> PyResult<reshard::save::Compression> {
    reshard::save::Compression::parse(name).ok_or_else(|| invalid(py, format!("compression is \"zstd\", not {name:?}")))
}

fn set<T>(option: &mut T, given: Option<T>) {
    if let Some(given) = given {
        *option = given;
    }
}

/// How to load.
#[pyclass(module = "reshard._reshard", frozen)]
#[derive(Clone)]
pub(crate) struct LoadOptions(pub(crate) reshard::LoadOptions);

#[pymethods]
impl LoadOptions {
    /// What is left out is for the engine to decide. With `ignore_unexpected` stored keys that nobody wants are no difference.
    #[new]
    #[pyo3(signature = (*, strict=true, cast="never", verify="whole", exchange=false, ignore_unexpected=false))]
    fn new(
        py: Python<'_>,
        strict: bool,
        cast: &str,
        verify: &str,
        exchange: bool,
        ignore_unexpected: bool,
    ) -> PyResult<LoadOptions> {
        let mut options = reshard::LoadOptions::default();
        options.strictness = if strict { Strictness::Strict } else { Strictness::Lenient };
        options.cast = match cast {
            "never" => CastPolicy::Never,
            "widening" => CastPolicy::Widening,
            "any" => CastPolicy::Any,
            other => return Err(invalid(py, format!("cast is \"never\", \"widening\" or \"any\", not {other:?}"))),
        };
        options.verify = match verify {
            "never" => Verify::Never,
            "whole" => Verify::Whole,
            "always" => Verify::Always,
            other => return Err(invalid(py, format!("verify is \"never\", \"whole\" or \"always\", not {other:?}"))),
        };
        options.exchange = exchange;
        if ignore_unexpected {
            options.expected = Some(Arc::new(|_| false));
        }
        Ok(LoadOptions(options))
    }

    /// Whether differences are an error.
    #[getter]
    fn strict(&self) -> bool {
        self.0.strictness == Strictness::Strict
    }

    /// Which casts are allowed where element types differ.
    #[getter]
    fn cast(&self) -> &'static str {
        match self.0.cast {
            CastPolicy::Never => "never",
            CastPolicy::Widening => "widening",
            _ => "any",
        }
    }
}
