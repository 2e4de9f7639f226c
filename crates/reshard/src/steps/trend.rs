//! A run's steps side by side: the metrics stored with them, how far weights moved, and since when a tensor is bad.

use std::cell::Cell;

use indexmap::{IndexMap, IndexSet};
use reshard_formats::Value;
use serde::Serialize;

use super::{Step, StepState, StepsOptions, linked_steps, open, steps};
use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue};
use crate::control::Control;
use crate::diff::{DiffOptions, KeyDifference, diff};
use crate::error::{Error, ErrorKind, Result};
use crate::health::{HealthLimits, bad_by_themselves};
use crate::numbers::{ScanOptions, TensorStats, scan};
use crate::select::{Glob, Selection};
use crate::verify::Severity;

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
    /// The limits of the rules by which a tensor is bad.
    pub limits: HealthLimits,
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
    /// `nan`, `inf`, `large`, `negative`, `zero` or `dead`: what it is at the first step at which it is bad. (Infinite elements often
    /// become NaN later.)
    pub what: &'static str,
    /// How grave that is, by the rules of health.
    pub severity: Severity,
    /// The first step at which it is bad.
    pub first: String,
    /// The last step before that, if it was read there and found fine.
    pub fine: Option<String>,
    /// The last step before that, if the tensor was bad there in another way, or `absent`.
    pub before: Option<Before>,
}

/// What a tensor was before it became what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Before {
    /// The step.
    pub step: String,
    /// `absent`, or one of the words of [`FirstBad::what`].
    pub what: &'static str,
}

/// Looks at a run. Unless numbers are asked for, only the newest step is read whole; since when a tensor is bad is found by
/// halving the steps in question, which reads that tensor alone. That a tensor stays bad is taken for granted. A step whose data turn
/// out to be damaged is left out.
pub fn trend(folder: &str, options: &TrendOptions) -> Result<Trend> {
    let link = "a symbolic link, which is followed only when asked to (`--follow-symlinks`)";
    let mut skipped: Vec<(String, String)> =
        linked_steps(folder, &options.steps)?.into_iter().map(|name| (name, link.to_owned())).collect();
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
    let mut run = Run { steps: valid, options, read: Cell::new(0) };
    if let Some(newest) = (0..run.steps.len()).rev().find_map(|step| run.open(step).ok()) {
        options.selection.check_used(&newest)?;
    }
    let mut found: Vec<TrendStep> = Vec::with_capacity(run.steps.len());
    let mut before: Option<Checkpoint> = None;
    while let Some(step) = run.steps.get(found.len()) {
        options.control.check("looking at steps")?;
        match run.look(found.len(), before.as_ref()) {
            Ok((checkpoint, metrics, tensors, modules)) => {
                let (name, path) = (step.name.clone(), step.path.clone());
                let (number, modified) = (step.number, step.modified);
                found.push(TrendStep { name, number, path, modified, metrics, tensors, modules });
                before = Some(checkpoint);
            }
            Err(error) => skipped.push(run.left_out(found.len(), error)?),
        }
    }
    let bad = loop {
        match run.bad() {
            Ok(bad) => break bad,
            Err(error) => {
                let damaged = run.read.get();
                skipped.push(run.left_out(damaged, error)?);
                found.remove(damaged);
            }
        }
    };
    if run.steps.is_empty() {
        let left_out: Vec<String> = skipped.iter().map(|(name, why)| format!("; {name} is left out: {why}")).collect();
        let detail = format!("{folder} holds no complete step: give the folder that holds a folder for each step");
        return Err(Error::invalid(format!("{detail}{}", left_out.concat())));
    }
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

/// What a tensor is that has not been given numbers yet, or gets none any more; no step on the way to NaN.
fn is_zero(what: &str) -> bool {
    matches!(what, "zero" | "dead")
}

/// A tensor that is bad at a step that is known, and what it was at the last step that was read before.
struct Bad {
    what: &'static str,
    severity: Severity,
    was: Option<&'static str>,
}

/// What one step says.
type Looked = (Checkpoint, IndexMap<String, f64>, IndexMap<String, TrendTensor>, IndexMap<String, f64>);

struct Run<'r> {
    steps: Vec<Step>,
    options: &'r TrendOptions,
    /// The step that was opened last.
    read: Cell<usize>,
}

impl Run<'_> {
    fn open(&self, step: usize) -> Result<Checkpoint> {
        self.read.set(step);
        let step = self.steps.get(step).ok_or_else(|| Error::internal("a step is gone"))?;
        Checkpoint::open_store(open(&step.path, &self.options.steps)?)
    }

    fn scanned(&self, checkpoint: &Checkpoint, selection: Selection) -> Result<IndexMap<String, TensorStats>> {
        let control = self.options.control.clone();
        scan(checkpoint, &ScanOptions { selection, control, verify: true, ..ScanOptions::default() })
    }

    fn look(&self, step: usize, before: Option<&Checkpoint>) -> Result<Looked> {
        let checkpoint = self.open(step)?;
        let (tensors, modules) = match self.options.numbers {
            true => self.numbers(&checkpoint, before)?,
            false => (IndexMap::new(), IndexMap::new()),
        };
        let metrics = metrics(&checkpoint)?;
        Ok((checkpoint, metrics, tensors, modules))
    }

    /// Takes a step out whose data are damaged: its name, and why. Any other error is one.
    fn left_out(&mut self, step: usize, error: Error) -> Result<(String, String)> {
        if error.kind() != ErrorKind::Corrupt || step >= self.steps.len() {
            return Err(error);
        }
        Ok((self.steps.remove(step).name, error.to_string()))
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
    fn bad_in(&self, checkpoint: &Checkpoint, selection: Selection) -> Result<IndexMap<String, (&'static str, Severity)>> {
        Ok(bad_by_themselves(checkpoint, &self.scanned(checkpoint, selection)?, &self.options.limits))
    }

    fn bad(&self) -> Result<Vec<FirstBad>> {
        let Some(newest) = self.steps.len().checked_sub(1) else { return Ok(Vec::new()) };
        let now = self.bad_in(&self.open(newest)?, self.options.selection.clone())?;
        let mut found = Vec::new();
        let order: IndexSet<String> = now.keys().cloned().collect();
        let now = now.into_iter().map(|(key, (what, severity))| (key, Bad { what, severity, was: None })).collect();
        self.search(None, newest, now, &mut found)?;
        found.sort_by_key(|(step, bad)| (*step, order.get_index_of(&bad.key)));
        Ok(found.into_iter().map(|(_, bad)| bad).collect())
    }

    /// Finds since when keys are bad that at `last` are what is said or fine, and are bad at `bad`.
    fn search(
        &self,
        last: Option<usize>,
        bad: usize,
        keys: IndexMap<String, Bad>,
        found: &mut Vec<(usize, FirstBad)>,
    ) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        let start = last.map_or(0, |last| last + 1);
        if start == bad {
            let name = |step: usize| self.steps.get(step).map(|step| step.name.clone()).unwrap_or_default();
            found.extend(keys.into_iter().map(|(key, Bad { what, severity, was })| {
                let before = was.zip(last).map(|(what, last)| Before { step: name(last), what });
                let fine = last.filter(|_| before.is_none()).map(name);
                (bad, FirstBad { key, what, severity, first: name(bad), fine, before })
            }));
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
        for (key, known) in keys {
            match bad_there.get(&key) {
                // What starts as zeros and is NaN later is another illness.
                Some((what, severity)) if is_zero(what) == is_zero(known.what) => {
                    already.insert(key, Bad { what, severity: *severity, was: known.was })
                }
                Some((what, _)) => not_yet.insert(key, Bad { was: Some(what), ..known }),
                None => {
                    let was = checkpoint.tensor(&key).is_err().then_some("absent");
                    not_yet.insert(key, Bad { was, ..known })
                }
            };
        }
        self.search(last, middle, already, found)?;
        self.search(Some(middle), bad, not_yet, found)
    }
}
