//! Tools that look at checkpoints, bring a lost `.metadata` back, or remove old steps: diff, digest, stats, recover, prune.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard::{
    Best, Checkpoint, DiffOptions, DigestOptions, HealthOptions, RecoverOptions, Retention, ScanOptions, StatsOptions,
    StepsOptions, Tolerance, TrendOptions,
};

use super::writing::{json, open_options, renames, selection};
use crate::errors::{Raise, invalid};
use crate::options::{Control, store_options, store_with};
use crate::run::run;

/// What differs between two checkpoints.
#[pyfunction]
#[pyo3(signature = (first, second, options, absolute, relative, elements, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn diff(
    py: Python<'_>,
    first: String,
    second: String,
    options: &Bound<'_, PyDict>,
    absolute: f64,
    relative: f64,
    elements: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
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
    let open = open_options(py, storage_options)?;
    let report = run(py, &control.inner, move || {
        let (first, second) = (Checkpoint::open_with(&first, &open)?, Checkpoint::open_with(&second, &open)?);
        reshard::diff(&first, &second, &chosen)
    })?;
    json(py, &report.or_raise(py)?)
}

/// What a checkpoint holds, independent of how.
#[pyfunction]
#[pyo3(signature = (path, options, verify, control, storage_options=None))]
pub(crate) fn digest(
    py: Python<'_>,
    path: String,
    options: &Bound<'_, PyDict>,
    verify: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let mut chosen = DigestOptions::default();
    chosen.selection = selection(py, options)?;
    chosen.verify = verify;
    chosen.control = control.inner.clone();
    let open = open_options(py, storage_options)?;
    let report = run(py, &control.inner, move || reshard::digest(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    json(py, &report.or_raise(py)?)
}

/// Numbers about a tensor.
#[pyfunction]
#[pyo3(signature = (path, key, bins, control, storage_options=None))]
pub(crate) fn stats(
    py: Python<'_>,
    path: String,
    key: String,
    bins: usize,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let mut chosen = StatsOptions::default();
    chosen.bins = bins;
    chosen.control = control.inner.clone();
    let open = open_options(py, storage_options)?;
    let report = run(py, &control.inner, move || reshard::stats(&Checkpoint::open_with(&path, &open)?, &key, &chosen))?;
    json(py, &report.or_raise(py)?)
}

/// Numbers about every selected tensor.
#[pyfunction]
#[pyo3(signature = (path, options, bins, verify, control, storage_options=None))]
pub(crate) fn scan(
    py: Python<'_>,
    path: String,
    options: &Bound<'_, PyDict>,
    bins: usize,
    verify: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let mut chosen = ScanOptions::default();
    chosen.selection = selection(py, options)?;
    (chosen.bins, chosen.verify) = (bins, verify);
    chosen.control = control.inner.clone();
    let open = open_options(py, storage_options)?;
    let report = run(py, &control.inner, move || reshard::scan(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    json(py, &report.or_raise(py)?)
}

/// Numbers about every selected tensor, judged by rules.
#[pyfunction]
#[pyo3(signature = (path, options, limits, verify, control, storage_options=None))]
pub(crate) fn health(
    py: Python<'_>,
    path: String,
    options: &Bound<'_, PyDict>,
    limits: Vec<String>,
    verify: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let mut chosen = HealthOptions::default();
    chosen.selection = selection(py, options)?;
    chosen.verify = verify;
    for limit in &limits {
        chosen.limits.parse(limit).or_raise(py)?;
    }
    chosen.control = control.inner.clone();
    let open = open_options(py, storage_options)?;
    let report = run(py, &control.inner, move || reshard::health(&Checkpoint::open_with(&path, &open)?, &chosen))?;
    json(py, &report.or_raise(py)?)
}

/// A run's steps side by side.
#[pyfunction]
#[pyo3(signature = (folder, options, numbers, control, storage_options=None))]
pub(crate) fn trend(
    py: Python<'_>,
    folder: String,
    options: &Bound<'_, PyDict>,
    numbers: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let mut chosen = TrendOptions::default();
    chosen.selection = selection(py, options)?;
    chosen.numbers = numbers;
    chosen.steps.store = store_options(py, storage_options)?;
    chosen.control = control.inner.clone();
    let report = run(py, &control.inner, move || reshard::trend(&folder, &chosen))?;
    json(py, &report.or_raise(py)?)
}

/// `.metadata` from data files.
#[pyfunction]
#[pyo3(signature = (path, replace, accept_absent_ranks, undo_edits, dry_run, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn recover(
    py: Python<'_>,
    path: String,
    replace: bool,
    accept_absent_ranks: bool,
    undo_edits: bool,
    dry_run: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let mut chosen = RecoverOptions::default();
    chosen.replace = replace;
    chosen.accept_absent_ranks = accept_absent_ranks;
    chosen.undo_edits = undo_edits;
    chosen.dry_run = dry_run;
    chosen.control = control.inner.clone();
    let store = store_options(py, storage_options)?;
    let report = run(py, &control.inner, move || reshard::recover(&store_with(&path, &store)?, &chosen))?;
    json(py, &report.or_raise(py)?)
}

/// Removes old steps of a folder.
#[pyfunction]
#[pyo3(signature = (folder, keep_last, keep_every, keep_best, keep_younger, grace, abandoned, deep, dry_run, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn prune(
    py: Python<'_>,
    folder: String,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    keep_best: Option<(String, bool, usize)>,
    keep_younger: Option<f64>,
    grace: f64,
    abandoned: bool,
    deep: bool,
    dry_run: bool,
    control: &Control,
    storage_options: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
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
    retention.grace = age(grace)?;
    retention.abandoned = abandoned;
    let mut options = StepsOptions::default();
    options.store = store_options(py, storage_options)?;
    options.deep = deep;
    options.control = control.inner.clone();
    let report = run(py, &control.inner, move || reshard::prune(&folder, &retention, dry_run, &options))?;
    json(py, &report.or_raise(py)?)
}
