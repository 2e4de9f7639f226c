//! Whether a checkpoint's numbers look like those of a run that is well: rules with limits that can be set, over numbers
//! from one pass. Every finding names its rule, the number that broke it and the limit.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::health::{HealthOptions, health};
//!
//! let report = health(&reshard::Checkpoint::open(path)?, &HealthOptions::default())?;
//! for finding in &report.findings {
//!     println!("{}: {} ({})", finding.key, finding.what, finding.rule);
//! }
//! # Ok::<(), reshard::Error>(())
//! ```

mod alike;
mod moments;
mod names;
mod plain;
mod rules;
mod state_keys;
mod summary;

use indexmap::IndexMap;
use serde::Serialize;

pub use self::moments::{GroupHealth, OptimizerHealth, ParamHealth};
use self::names::{is_buffer, is_mask, starts_at_zero};
pub use self::rules::{HEALTH_RULES, HealthLimits, HealthRule};
pub use self::summary::{OptimizerGroup, OptimizerSummary, SlotShare, optimizer_summary, small_integer};
use crate::checkpoint::Checkpoint;
use crate::control::Control;
use crate::error::Result;
use crate::numbers::{ScanOptions, TensorStats, scan};
use crate::select::{Selection, is_float};
use crate::verify::Severity;

/// Tells which keys of a checkpoint are an optimizer's own.
pub(crate) fn optimizer_keys(checkpoint: &Checkpoint) -> impl Fn(&str) -> bool + use<> {
    let roots = state_keys::roots(checkpoint.catalog().entries.keys().map(String::as_str));
    move |key| roots.as_ref().is_some_and(|roots| state_keys::is_own(key, &roots.all))
}

/// What to look at.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct HealthOptions {
    /// Which keys. Their names stay as they are.
    pub selection: Selection,
    /// The rules' limits.
    pub limits: HealthLimits,
    /// A histogram of this many equal steps for each tensor.
    pub bins: usize,
    /// Compare stored checksums on the way.
    pub verify: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HealthReport {
    /// The checkpoint.
    pub path: String,
    /// What was looked at.
    pub checked: Checked,
    /// What rules found, errors first.
    pub findings: Vec<HealthFinding>,
    /// The optimizer, where there is one.
    pub optimizer: Option<OptimizerHealth>,
    /// Numbers about every tensor, by key.
    pub tensors: IndexMap<String, TensorStats>,
}

/// What a verdict rests on: nothing is healthy that was not looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Default)]
#[non_exhaustive]
pub struct Checked {
    /// Keys, shapes, coverage, files and their lengths.
    pub structure: bool,
    /// Stored checksums against the data.
    pub checksums: bool,
    /// The elements' values.
    pub numbers: bool,
}

impl Checked {
    /// What was looked at, and what was not, in words.
    pub fn words(self) -> (Vec<&'static str>, Vec<&'static str>) {
        let all = [(self.structure, "structure"), (self.checksums, "checksums"), (self.numbers, "numbers")];
        let of = |done: bool| all.iter().filter(|(looked, _)| *looked == done).map(|(_, word)| *word).collect();
        (of(true), of(false))
    }
}

/// A rule that is broken.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HealthFinding {
    /// The rule's name.
    pub rule: &'static str,
    /// How grave it is.
    pub severity: Severity,
    /// The key or parameter.
    pub key: String,
    /// What was found.
    pub what: String,
    /// The number that broke the rule.
    pub value: Option<f64>,
    /// The rule's limit.
    pub limit: Option<f64>,
}

impl HealthFinding {
    fn add(
        found: &mut Vec<HealthFinding>,
        limits: &HealthLimits,
        rule: &'static str,
        key: &str,
        value: Option<f64>,
        what: String,
    ) {
        if !limits.is_on(rule) {
            return;
        }
        let severity = HEALTH_RULES.iter().find(|known| known.name == rule).map_or(Severity::Error, |known| known.severity);
        let limit = Some(limits.of(rule)).filter(|limit| limit.is_finite());
        found.push(HealthFinding { rule, severity, key: key.to_owned(), what, value, limit });
    }
}

impl HealthReport {
    /// Whether no rule of gravity is broken.
    pub fn is_healthy(&self) -> bool {
        !self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

/// Looks at a checkpoint's numbers.
pub fn health(checkpoint: &Checkpoint, options: &HealthOptions) -> Result<HealthReport> {
    let scanned = ScanOptions {
        selection: options.selection.clone(),
        bins: options.bins,
        verify: options.verify,
        control: options.control.clone(),
    };
    let tensors = scan(checkpoint, &scanned)?;
    let summary = optimizer_summary(checkpoint);
    let optimizer = summary.as_ref().map(|summary| moments::optimizer_health(checkpoint, summary, &tensors));
    let mut findings = Vec::new();
    let of_optimizer = |key: &str| summary.as_ref().is_some_and(|summary| state_keys::is_own(key, &summary.root));
    for (key, stats) in &tensors {
        tensor(checkpoint, key, stats, of_optimizer(key), &options.limits, &mut findings);
    }
    let weights = tensors.iter().map(|(key, stats)| (key.as_str(), stats)).filter(|(key, _)| !of_optimizer(key));
    alike::judge(checkpoint, weights, &options.limits, &mut findings);
    plain::judge(checkpoint, options, &mut findings)?;
    for (name, weight) in checkpoint.scaled_weights() {
        let codes = [name.clone(), format!("{name}_blocks")].into_iter().find(|key| tensors.contains_key(key));
        if let (Some(key), Err(why)) = (codes, weight) {
            HealthFinding::add(&mut findings, &options.limits, "no-scales", &key, None, why.clone());
        }
    }
    if let (Some(summary), Some(optimizer)) = (&summary, &optimizer) {
        moments::judge(checkpoint, optimizer, summary, &tensors, &options.limits, &mut findings);
    }
    findings.sort_by_key(|finding| finding.severity);
    let checked = Checked { structure: false, checksums: options.verify, numbers: !tensors.is_empty() };
    Ok(HealthReport { path: checkpoint.path().to_owned(), checked, findings, optimizer, tensors })
}

/// What rules say of one tensor.
fn tensor(
    checkpoint: &Checkpoint,
    key: &str,
    stats: &TensorStats,
    of_optimizer: bool,
    limits: &HealthLimits,
    found: &mut Vec<HealthFinding>,
) {
    let Ok(tensor) = checkpoint.values(key) else { return };
    if !(is_float(tensor.dtype) || tensor.dtype.is_complex()) || stats.elements == 0 {
        return;
    }
    let share = |count: u64| format!("{count} of {} elements", stats.elements);
    let mut add = |rule, value: Option<f64>, what| HealthFinding::add(found, limits, rule, key, value, what);
    if stats.nans > 0 {
        add("nan", Some(stats.nans as f64), share(stats.nans));
    }
    // A callback's best score before the first one is infinite in every run, and so is what a mask takes away.
    let is_score = tensor.shape.is_empty() && key.starts_with("callbacks.");
    let masks = is_mask(key) && stats.positive_infinities == 0;
    if stats.infinities > 0 && !is_score && !masks {
        add("inf", Some(stats.infinities as f64), share(stats.infinities));
    }
    if of_optimizer || is_buffer(key) {
        return;
    }
    if let Some(most) = stats.absmax.filter(|most| *most > limits.of("large-weight") && stats.elements > 1) {
        add("large-weight", Some(most), format!("the largest magnitude is {most:.3e}"));
    }
    let part = |count: u64| count as f64 / stats.elements as f64;
    if part(stats.subnormals) > limits.of("subnormal") {
        add("subnormal", Some(part(stats.subnormals)), share(stats.subnormals));
    }
    // Biases and scales of norms are zero or one in every fresh model; see `alike`.
    if tensor.shape.len() < 2 || stats.elements < 2 || starts_at_zero(key) {
        return;
    }
    if stats.zeros == stats.elements {
        add("zero-weight", None, format!("all {} elements", stats.elements));
    } else if part(stats.zeros) > limits.of("mostly-zero") {
        add("mostly-zero", Some(part(stats.zeros)), share(stats.zeros));
    } else if let (Some(min), true) = (stats.min, stats.min == stats.max && stats.finite() == stats.elements) {
        add("constant-weight", Some(min), format!("all {} elements are {min:e}", stats.elements));
    }
}
