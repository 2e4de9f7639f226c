//! Tools that look at checkpoints, bring a lost `.metadata` back, or remove old steps: diff, digest, stats, recover, prune.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard::Checkpoint;
use reshard::diff::{DiffOptions, Tolerance};
use reshard::digest::DigestOptions;
use reshard::health::HealthOptions;
use reshard::numbers::{ScanOptions, StatsOptions};
use reshard::recover::RecoverOptions;
use reshard::steps::{Best, Retention, StepsOptions, TrendOptions};

use super::writing::{open_options, open_through, renames, selection};
use crate::errors::{Raise, invalid};
use crate::options::{Control, Storage, store_with};
use crate::reports::{report, reports};
use crate::run::run;

/// What differs between two checkpoints.
#[pyfunction]
#[pyo3(signature = (first, second, options, absolute, relative, elements, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn diff<'py>(
    py: Python<'py>,
    first: String,
    second: String,
    options: &Bound<'_, PyDict>,
    absolute: f64,
    relative: f64,
    elements: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    if ![absolute, relative].iter().all(|t| t.is_finite() && *t >= 0.0) {
        return Err(invalid(py, "a tolerance is a number that is not negative"));
    }
    let mut chosen = DiffOptions::default();
    chosen.first = selection(py, options)?;
    chosen.second = chosen.first.clone();
    chosen.second.renames = Vec::new();
    chosen.first.renames = renames(py, options)?;
    chosen.tolerance = Tolerance::both(0.0);
    chosen.tolerance.absolute = absolute;
    chosen.tolerance.relative = relative;
    chosen.elements = elements;
    chosen.control = control.inner.clone();
    let seen = open_through(storage_options, options)?;
    let mut open = seen.clone();
    open.views.clear();
    let found = run(py, &control.inner, move || {
        let (first, second) = (Checkpoint::open_with(&first, &seen)?, Checkpoint::open_with(&second, &open)?);
        reshard::diff::diff(&first, &second, &chosen)
    })?;
    report(py, "DiffReport", &found.or_raise(py)?)
}

/// What a checkpoint holds, independent of how.
#[pyfunction]
#[pyo3(signature = (path, options, verify, control, storage_options=None))]
pub(crate) fn digest<'py>(
    py: Python<'py>,
    path: String,
    options: &Bound<'_, PyDict>,
    verify: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut chosen = DigestOptions::default();
    chosen.selection = selection(py, options)?;
    chosen.verify = verify;
    chosen.control = control.inner.clone();
    let open = open_through(storage_options, options)?;
    let found = run(py, &control.inner, move || reshard::digest::digest(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    reports(py, "DigestEntry", &found.or_raise(py)?.entries)
}

/// Numbers about a tensor.
#[pyfunction]
#[pyo3(signature = (path, key, bins, control, storage_options=None))]
pub(crate) fn stats<'py>(
    py: Python<'py>,
    path: String,
    key: String,
    bins: usize,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = StatsOptions::default();
    chosen.bins = bins;
    chosen.control = control.inner.clone();
    let open = open_options(storage_options);
    let found = run(py, &control.inner, move || reshard::numbers::stats(&Checkpoint::open_with(&path, &open)?, &key, &chosen))?;
    report(py, "TensorStats", &found.or_raise(py)?)
}

/// Numbers about every selected tensor.
#[pyfunction]
#[pyo3(signature = (path, options, bins, verify, control, storage_options=None))]
pub(crate) fn scan<'py>(
    py: Python<'py>,
    path: String,
    options: &Bound<'_, PyDict>,
    bins: usize,
    verify: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut chosen = ScanOptions::default();
    chosen.selection = selection(py, options)?;
    (chosen.bins, chosen.verify) = (bins, verify);
    chosen.control = control.inner.clone();
    let open = open_options(storage_options);
    let found = run(py, &control.inner, move || reshard::numbers::scan(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    reports(py, "TensorStats", &found.or_raise(py)?)
}

/// Numbers about every selected tensor, judged by rules.
#[pyfunction]
#[pyo3(signature = (path, options, limits, verify, control, storage_options=None))]
pub(crate) fn health<'py>(
    py: Python<'py>,
    path: String,
    options: &Bound<'_, PyDict>,
    limits: Vec<String>,
    verify: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = HealthOptions::default();
    chosen.selection = selection(py, options)?;
    chosen.verify = verify;
    for limit in &limits {
        chosen.limits.parse(limit).or_raise(py)?;
    }
    chosen.control = control.inner.clone();
    let open = open_options(storage_options);
    let found = run(py, &control.inner, move || reshard::health::health(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    report(py, "HealthReport", &found.or_raise(py)?)
}

/// A run's steps side by side.
#[pyfunction]
#[pyo3(signature = (folder, options, numbers, control, storage_options=None))]
pub(crate) fn trend<'py>(
    py: Python<'py>,
    folder: String,
    options: &Bound<'_, PyDict>,
    numbers: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = TrendOptions::default();
    chosen.selection = selection(py, options)?;
    chosen.numbers = numbers;
    chosen.steps.store = storage_options.unwrap_or_default().0;
    chosen.control = control.inner.clone();
    let found = run(py, &control.inner, move || reshard::steps::trend(&folder, &chosen))?;
    report(py, "Trend", &found.or_raise(py)?)
}

/// `.metadata` from data files.
#[pyfunction]
#[pyo3(signature = (path, replace, accept_absent_ranks, undo_edits, dry_run, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn recover<'py>(
    py: Python<'py>,
    path: String,
    replace: bool,
    accept_absent_ranks: bool,
    undo_edits: bool,
    dry_run: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = RecoverOptions::default();
    chosen.replace = replace;
    chosen.accept_absent_ranks = accept_absent_ranks;
    chosen.undo_edits = undo_edits;
    chosen.dry_run = dry_run;
    chosen.control = control.inner.clone();
    let store = storage_options.unwrap_or_default().0;
    let found = run(py, &control.inner, move || reshard::recover::recover(&store_with(&path, &store)?, &chosen))?;
    report(py, "RecoverReport", &found.or_raise(py)?)
}

/// Removes old steps of a folder.
#[pyfunction]
#[pyo3(signature = (folder, keep_last, keep_every, keep_best, keep_younger, budget, fallback, grace, abandoned, deep, dry_run, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn prune<'py>(
    py: Python<'py>,
    folder: String,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    keep_best: Option<(String, bool, usize)>,
    keep_younger: Option<f64>,
    budget: Option<u64>,
    fallback: bool,
    grace: f64,
    abandoned: bool,
    deep: bool,
    dry_run: bool,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let age = |seconds: f64| {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| invalid(py, format!("{seconds} s is no age: it is a number that is not negative")))
    };
    if keep_every == Some(0) {
        return Err(invalid(py, "no number is a multiple of 0: keep_every needs at least 1"));
    }
    let mut retention = Retention::default();
    retention.last = keep_last;
    retention.every = keep_every;
    retention.best = keep_best.map(|(key, largest, count)| Best::new(&key, largest, count));
    retention.younger_than = keep_younger.map(age).transpose()?;
    retention.budget = budget;
    retention.fallback = fallback;
    retention.grace = age(grace)?;
    retention.abandoned = abandoned;
    let mut options = StepsOptions::default();
    options.store = storage_options.unwrap_or_default().0;
    options.deep = deep;
    options.control = control.inner.clone();
    let found = run(py, &control.inner, move || reshard::steps::prune(&folder, &retention, dry_run, &options))?;
    report(py, "PruneReport", &found.or_raise(py)?)
}
