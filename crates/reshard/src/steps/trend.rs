//! A run's steps side by side: the metrics stored with them, how far weights moved, and since when a tensor is bad.

use indexmap::{IndexMap, IndexSet};
use reshard_formats::Value;
use serde::Serialize;

use super::{Step, StepState, StepsOptions, open, steps};
use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue};
use crate::control::Control;
use crate::diff::{DiffOptions, KeyDifference, diff};
use crate::error::{Error, Result};
use crate::numbers::{ScanOptions, TensorStats, scan};
use crate::select::{Glob, Selection, is_float};

/// Keys of metrics start so: the manager's, and those that training loops write themselves.
const METRICS: &[&str] = &["_reshard.metrics.", "metrics."];

/// What to look at.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TrendOptions {
    /// How to look at the folder.
    pub steps: StepsOptions,
    /// Which keys.
    pub selection: Selection,
    /// Numbers about every selected tensor of every step, and how far it moved since the step before.
    pub numbers: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Trend {
    /// Its folder.
    pub folder: String,
    /// Its complete steps, oldest first.
    pub steps: Vec<TrendStep>,
    /// Folders that were left out, and why.
    pub skipped: Vec<(String, String)>,
    /// Tensors that are bad in the newest step, and since when; the first to go bad comes first.
    pub bad: Vec<FirstBad>,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TrendStep {
    /// The folder's name.
    pub name: String,
    /// Its number.
    pub number: Option<u64>,
    /// Its address.
    pub path: String,
    /// When it was last changed, in seconds since 1970.
    pub modified: Option<u64>,
    /// The metrics stored with it.
    pub metrics: IndexMap<String, f64>,
    /// Numbers about its tensors, when asked for.
    pub tensors: IndexMap<String, TrendTensor>,
    /// How far each module whose tensors changed moved since the step before, over these: ‖Δw‖ / ‖w‖.
    pub modules: IndexMap<String, f64>,
}

/// A tensor at one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TrendTensor {
    /// The root mean square.
    pub rms: Option<f64>,
    /// The largest magnitude.
    pub absmax: Option<f64>,
    /// Elements that are NaN.
    pub nans: u64,
    /// Elements that are infinite.
    pub infinities: u64,
    /// Elements that are zero.
    pub zeros: u64,
    /// How far it moved since the step before: ‖Δw‖ / ‖w‖.
    pub change: Option<f64>,
    /// The cosine of the angle between it and the step before.
    pub cosine: Option<f64>,
}

/// Since when a tensor is bad.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FirstBad {
    /// The key.
    pub key: String,
    /// `nan`, `inf` or `zero`: what it is at the first step at which it is bad. (Infinite elements often become NaN later.)
    pub what: &'static str,
    /// The first step at which it is bad.
    pub first: String,
    /// The last step before that, which was read and found fine; `None` when it was bad from the start.
    pub fine: Option<String>,
}

/// Looks at a run. Unless numbers are asked for, only the newest step is read whole; since when a tensor is bad is found by
/// halving the steps in question, which reads that tensor alone. That a tensor stays bad is taken for granted.
pub fn trend(folder: &str, options: &TrendOptions) -> Result<Trend> {
    let mut skipped = Vec::new();
    let mut valid: Vec<Step> = Vec::new();
    for step in steps(folder, &options.steps)? {
        match &step.state {
            StepState::Valid => valid.push(step),
            StepState::Incomplete { why } => skipped.push((step.name, why.clone())),
            StepState::Other => {}
        }
    }
    // A folder with a number among folders with numbers is a step; `latest` beside them is one of them again.
    if valid.iter().any(|step| step.number.is_some()) {
        valid.retain(|step| step.number.is_some());
    }
    let run = Run { steps: valid, options };
    let mut found = Vec::with_capacity(run.steps.len());
    let mut before: Option<Checkpoint> = None;
    for (i, step) in run.steps.iter().enumerate() {
        options.control.check("looking at steps")?;
        let checkpoint = run.open(i)?;
        let (mut tensors, mut modules) = (IndexMap::new(), IndexMap::new());
        if options.numbers {
            (tensors, modules) = run.numbers(&checkpoint, before.as_ref())?;
        }
        found.push(TrendStep {
            name: step.name.clone(),
            number: step.number,
            path: step.path.clone(),
            modified: step.modified,
            metrics: metrics(&checkpoint)?,
            tensors,
            modules,
        });
        before = Some(checkpoint);
    }
    let bad = match before {
        Some(newest) => run.bad(&newest)?,
        None => Vec::new(),
    };
    Ok(Trend { folder: folder.to_owned(), steps: found, skipped, bad })
}

fn metrics(checkpoint: &Checkpoint) -> Result<IndexMap<String, f64>> {
    let mut metrics = IndexMap::new();
    for (key, entry) in &checkpoint.catalog().entries {
        let Some(name) = METRICS.iter().find_map(|before| key.strip_prefix(before)) else { continue };
        if let CatalogKind::Value(_) = &entry.kind
            && let LoadedValue::Plain(value) = checkpoint.read_value(key)?
            && let Some(number) = plain_number(&value)
        {
            metrics.insert(name.to_owned(), number);
        }
    }
    Ok(metrics)
}

fn plain_number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        Value::Int(number) => number.as_i64().map(|number| number as f64),
        _ => None,
    }
}

const ZERO: &str = "zero";

/// What is wrong with a tensor, in one word.
fn wrong(stats: &TensorStats, matrix: bool) -> Option<&'static str> {
    match stats {
        stats if stats.nans > 0 => Some("nan"),
        stats if stats.infinities > 0 => Some("inf"),
        stats if matrix && stats.elements > 1 && stats.zeros == stats.elements => Some(ZERO),
        _ => None,
    }
}

struct Run<'r> {
    steps: Vec<Step>,
    options: &'r TrendOptions,
}

impl Run<'_> {
    fn open(&self, step: usize) -> Result<Checkpoint> {
        let step = self.steps.get(step).ok_or_else(|| Error::internal("a step is gone"))?;
        Checkpoint::open_store(open(&step.path, &self.options.steps)?)
    }

    fn scanned(&self, checkpoint: &Checkpoint, selection: Selection) -> Result<IndexMap<String, TensorStats>> {
        let control = self.options.control.clone();
        scan(checkpoint, &ScanOptions { selection, control, ..ScanOptions::default() })
    }

    fn numbers(
        &self,
        checkpoint: &Checkpoint,
        before: Option<&Checkpoint>,
    ) -> Result<(IndexMap<String, TrendTensor>, IndexMap<String, f64>)> {
        let stats = self.scanned(checkpoint, self.options.selection.clone())?;
        let mut tensors: IndexMap<String, TrendTensor> = stats
            .into_iter()
            .map(|(key, found)| {
                let TensorStats { rms, absmax, nans, infinities, zeros, .. } = found;
                (key, TrendTensor { rms, absmax, nans, infinities, zeros, change: None, cosine: None })
            })
            .collect();
        let Some(before) = before else { return Ok((tensors, IndexMap::new())) };
        let options = DiffOptions {
            first: self.options.selection.clone(),
            second: self.options.selection.clone(),
            control: self.options.control.clone(),
            ..DiffOptions::default()
        };
        let report = diff(before, checkpoint, &options)?;
        let modules = report.modules().into_iter().filter_map(|module| Some((module.module, module.relative_change?))).collect();
        for (key, tensor) in &mut tensors {
            if before.tensor(key).is_ok() {
                (tensor.change, tensor.cosine) = (Some(0.0), Some(1.0));
            }
        }
        for differing in report.different {
            let Some(tensor) = tensors.get_mut(&differing.key) else { continue };
            (tensor.change, tensor.cosine) = match differing.difference {
                KeyDifference::Elements(found) | KeyDifference::DType { elements: Some(found), .. } => {
                    (found.relative_change, found.cosine)
                }
                KeyDifference::DType { elements: None, .. } => (tensor.change, tensor.cosine),
                _ => (None, None),
            };
        }
        Ok((tensors, modules))
    }

    /// Tensors of these keys that are bad in a step.
    fn bad_in(&self, checkpoint: &Checkpoint, selection: Selection) -> Result<IndexMap<String, &'static str>> {
        let mut bad = IndexMap::new();
        for (key, stats) in self.scanned(checkpoint, selection)? {
            let tensor = checkpoint.tensor(&key)?;
            let float = is_float(tensor.dtype) || tensor.dtype.is_complex();
            if let Some(what) = wrong(&stats, tensor.shape.len() > 1).filter(|_| float) {
                bad.insert(key, what);
            }
        }
        Ok(bad)
    }

    fn bad(&self, newest: &Checkpoint) -> Result<Vec<FirstBad>> {
        let now = self.bad_in(newest, self.options.selection.clone())?;
        let mut found = Vec::new();
        let order: IndexSet<String> = now.keys().cloned().collect();
        self.search(None, self.steps.len() - 1, now, &mut found)?;
        found.sort_by_key(|(step, bad)| (*step, order.get_index_of(&bad.key)));
        Ok(found.into_iter().map(|(_, bad)| bad).collect())
    }

    /// Finds since when keys are bad that are fine at `fine`, and at `bad` are what is said.
    fn search(
        &self,
        fine: Option<usize>,
        bad: usize,
        keys: IndexMap<String, &'static str>,
        found: &mut Vec<(usize, FirstBad)>,
    ) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let start = fine.map_or(0, |fine| fine + 1);
        if start == bad {
            let name = |step: usize| self.steps.get(step).map(|step| step.name.clone()).unwrap_or_default();
            let since = |(key, what)| (bad, FirstBad { key, what, first: name(bad), fine: fine.map(name) });
            found.extend(keys.into_iter().map(since));
            return Ok(());
        }
        let middle = start + (bad - start) / 2;
        let checkpoint = self.open(middle)?;
        let there = keys.keys().filter(|key| checkpoint.tensor(key).is_ok());
        let globs = there.map(|key| Glob::literal(key)).collect::<Result<Vec<Glob>>>()?;
        let bad_there = match globs.is_empty() {
            true => IndexMap::new(),
            false => self.bad_in(&checkpoint, Selection { include: globs, ..Selection::default() })?,
        };
        let (mut already, mut not_yet) = (IndexMap::new(), IndexMap::new());
        for (key, what) in keys {
            match bad_there.get(&key) {
                // What starts as zeros and is NaN later was fine in between.
                Some(before) if (*before == ZERO) == (what == ZERO) => already.insert(key, *before),
                _ => not_yet.insert(key, what),
            };
        }
        self.search(fine, middle, already, found)?;
        self.search(Some(middle), bad, not_yet, found)
    }
}
