//! Tools that look at checkpoints, bring a lost `.metadata` back, or remove old steps: diff, digest, stats, recover, prune.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard::Checkpoint;
use reshard::diff::{DiffOptions, Tolerance};
use reshard::digest::DigestOptions;
use reshard::health::{HealthLimits, HealthOptions};
use reshard::numbers::{ScanOptions, StatsOptions};
use reshard::recover::RecoverOptions;
use reshard::steps::{StepsOptions, TrendOptions};

use super::options::{Keeping, Recovering, Selecting};
use crate::errors::{Raise, invalid};
use crate::options::{Storage, store_with};
use crate::reports::{report, reports};
use crate::run::run;

/// What differs between two checkpoints. `tolerance` is an absolute and a relative distance; `None` compares no elements.
#[pyfunction]
#[pyo3(signature = (first, second, selecting, tolerance, storage_options=None))]
pub(crate) fn diff<'py>(
    py: Python<'py>,
    first: String,
    second: String,
    mut selecting: Selecting,
    tolerance: Option<(f64, f64)>,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let (absolute, relative) = tolerance.unwrap_or_default();
    if ![absolute, relative].iter().all(|t| t.is_finite() && *t >= 0.0) {
        return Err(invalid(py, "a tolerance is a number that is not negative"));
    }
    let mut chosen = DiffOptions::default();
    chosen.first = selecting.selection(py)?;
    chosen.second = chosen.first.clone();
    chosen.second.renames = Vec::new();
    chosen.tolerance = Tolerance::both(0.0);
    chosen.tolerance.absolute = absolute;
    chosen.tolerance.relative = relative;
    chosen.elements = tolerance.is_some();
    let seen = selecting.open(py, storage_options)?;
    let mut open = seen.clone();
    open.views.clear();
    let found = run(py, &chosen.control.clone(), move || {
        let (first, second) = (Checkpoint::open_with(&first, &seen)?, Checkpoint::open_with(&second, &open)?);
        reshard::diff::diff(&first, &second, &chosen)
    })?;
    let mut found = found.or_raise(py)?;
    found.different = found.gravest_first().into_iter().cloned().collect();
    report(py, "DiffReport", &found)
}

/// What a checkpoint holds, independent of how.
#[pyfunction]
#[pyo3(signature = (path, selecting, verify, storage_options=None))]
pub(crate) fn digest<'py>(
    py: Python<'py>,
    path: String,
    mut selecting: Selecting,
    verify: bool,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut chosen = DigestOptions::default();
    chosen.selection = selecting.selection(py)?;
    chosen.verify = verify;
    let open = selecting.open(py, storage_options)?;
    let found =
        run(py, &chosen.control.clone(), move || reshard::digest::digest(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    reports(py, "DigestEntry", &found.or_raise(py)?.entries)
}

/// Numbers about a tensor.
#[pyfunction]
#[pyo3(signature = (path, key, selecting, bins, storage_options=None))]
pub(crate) fn stats<'py>(
    py: Python<'py>,
    path: String,
    key: String,
    mut selecting: Selecting,
    bins: usize,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = StatsOptions::default();
    chosen.bins = bins;
    let open = selecting.open(py, storage_options)?;
    let found =
        run(py, &chosen.control.clone(), move || reshard::numbers::stats(&Checkpoint::open_with(&path, &open)?, &key, &chosen))?;
    report(py, "TensorStats", &found.or_raise(py)?)
}

/// Numbers about every selected tensor.
#[pyfunction]
#[pyo3(signature = (path, selecting, bins, verify, storage_options=None))]
pub(crate) fn scan<'py>(
    py: Python<'py>,
    path: String,
    mut selecting: Selecting,
    bins: usize,
    verify: bool,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut chosen = ScanOptions::default();
    chosen.selection = selecting.selection(py)?;
    (chosen.bins, chosen.verify) = (bins, verify);
    let open = selecting.open(py, storage_options)?;
    let found = run(py, &chosen.control.clone(), move || reshard::numbers::scan(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    reports(py, "TensorStats", &found.or_raise(py)?)
}

/// Numbers about every selected tensor, judged by rules.
#[pyfunction]
#[pyo3(signature = (path, selecting, limits, verify, storage_options=None))]
pub(crate) fn health<'py>(
    py: Python<'py>,
    path: String,
    mut selecting: Selecting,
    limits: Vec<String>,
    verify: bool,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = HealthOptions::default();
    chosen.selection = selecting.selection(py)?;
    chosen.verify = verify;
    chosen.limits = HealthLimits::of_texts(&limits).or_raise(py)?;
    let open = selecting.open(py, storage_options)?;
    let found =
        run(py, &chosen.control.clone(), move || reshard::health::health(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    report(py, "HealthReport", &found.or_raise(py)?)
}

/// A run's steps side by side.
#[pyfunction]
#[pyo3(signature = (folder, selecting, numbers, limits, storage_options=None))]
pub(crate) fn trend<'py>(
    py: Python<'py>,
    folder: String,
    selecting: Selecting,
    numbers: bool,
    limits: Vec<String>,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = TrendOptions::default();
    chosen.selection = selecting.selection(py)?;
    chosen.numbers = numbers;
    chosen.limits = HealthLimits::of_texts(&limits).or_raise(py)?;
    chosen.steps.store = storage_options.unwrap_or_default().0;
    let found = run(py, &chosen.control.clone(), move || reshard::steps::trend(&folder, &chosen))?;
    report(py, "Trend", &found.or_raise(py)?)
}

/// `.metadata` from data files.
#[pyfunction]
#[pyo3(signature = (path, recovering, storage_options=None))]
pub(crate) fn recover<'py>(
    py: Python<'py>,
    path: String,
    recovering: Recovering,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = RecoverOptions::default();
    chosen.replace = recovering.replace;
    chosen.accept_absent_ranks = recovering.accept_absent_ranks;
    chosen.undo_edits = recovering.undo_edits;
    chosen.dry_run = recovering.dry_run;
    let store = storage_options.unwrap_or_default().0;
    let found = run(py, &chosen.control.clone(), move || reshard::recover::recover(&store_with(&path, &store)?, &chosen))?;
    report(py, "RecoverReport", &found.or_raise(py)?)
}

/// Removes old steps of a folder.
#[pyfunction]
#[pyo3(signature = (folder, keeping, deep, dry_run, storage_options=None))]
pub(crate) fn prune<'py>(
    py: Python<'py>,
    folder: String,
    keeping: Keeping,
    deep: bool,
    dry_run: bool,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let retention = keeping.retention(py)?;
    let mut options = StepsOptions::default();
    options.store = storage_options.unwrap_or_default().0;
    options.deep = deep;
    let found = run(py, &options.control.clone(), move || reshard::steps::prune(&folder, &retention, dry_run, &options))?;
    report(py, "PruneReport", &found.or_raise(py)?)
}
