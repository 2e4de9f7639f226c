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

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use serde::Serialize;

pub use self::moments::{GroupHealth, OptimizerHealth, ParamHealth};
use self::names::{is_buffer, is_called_weight, is_mask, starts_at_zero};
pub use self::rules::{HEALTH_RULES, HealthLimits, HealthRule};
pub use self::summary::{OptimizerGroup, OptimizerSummary, SlotShare, optimizer_summaries, small_integer};
use crate::checkpoint::Checkpoint;
use crate::control::Control;
use crate::error::Result;
use crate::numbers::{ScanOptions, TensorStats, scan};
use crate::select::{Selection, is_float};
use crate::verify::Severity;

/// Tells which keys of a checkpoint are an optimizer's own.
pub(crate) fn optimizer_keys(checkpoint: &Checkpoint) -> impl Fn(&str) -> bool + use<> {
    let roots = state_keys::roots(checkpoint.keys());
    move |key| roots.iter().any(|roots| state_keys::is_own(key, &roots.all))
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
    /// The optimizers that there are.
    pub optimizers: Vec<OptimizerHealth>,
    /// Numbers about every tensor, by key.
    pub tensors: IndexMap<String, TensorStats>,
    /// Selected keys whose numbers nobody looked at, with what they are: sparse and quantised tensors, arrays and objects that only
    /// unpickling could bring back.
    pub unread: IndexMap<String, String>,
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
    /// Whether numbers were looked at, and no rule of severity error is broken.
    pub fn is_healthy(&self) -> bool {
        self.checked.numbers && !self.has_errors()
    }

    /// Whether a rule of severity error is broken.
    pub fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

/// Looks at a checkpoint's numbers.
pub fn health(checkpoint: &Checkpoint, options: &HealthOptions) -> Result<HealthReport> {
    options.selection.check_used(checkpoint)?;
    let scanned = ScanOptions {
        selection: options.selection.clone(),
        bins: options.bins,
        verify: options.verify,
        control: options.control.clone(),
    };
    let tensors = scan(checkpoint, &scanned)?;
    let (optimizers, mut findings) = judged(checkpoint, &tensors, &options.limits);
    let unread = plain::judge(checkpoint, options, &mut findings)?;
    findings.sort_by_key(|finding| finding.severity);
    let checked = Checked { structure: false, checksums: options.verify, numbers: !tensors.is_empty() };
    Ok(HealthReport { path: checkpoint.path().to_owned(), checked, findings, optimizers, tensors, unread })
}

/// What rules say of tensors whose numbers are known, and what is known of optimizers.
fn judged(
    checkpoint: &Checkpoint,
    tensors: &IndexMap<String, TensorStats>,
    limits: &HealthLimits,
) -> (Vec<OptimizerHealth>, Vec<HealthFinding>) {
    let summaries = optimizer_summaries(checkpoint);
    let one = |summary| moments::optimizer_health(checkpoint, summary, &summaries, tensors);
    let optimizers: Vec<OptimizerHealth> = summaries.iter().map(one).collect();
    let mut findings = Vec::new();
    let of_optimizer = |key: &str| summaries.iter().any(|summary| state_keys::is_own(key, &summary.root));
    let trained = moments::trained(&summaries, &optimizers);
    let is_weight = |key: &str| !of_optimizer(key) && !is_beside(key, trained.as_ref());
    for (key, stats) in tensors {
        tensor(checkpoint, key, stats, is_weight(key), limits, &mut findings);
    }
    let weights = tensors.iter().map(|(key, stats)| (key.as_str(), stats)).filter(|(key, _)| is_weight(key));
    alike::judge(checkpoint, weights, limits, &mut findings);
    for (name, weight) in checkpoint.scaled_weights() {
        let codes = [name.clone(), format!("{name}_blocks")].into_iter().find(|key| tensors.contains_key(key));
        if let (Some(key), Err(why)) = (codes, weight) {
            HealthFinding::add(&mut findings, limits, "no-scales", &key, None, why.clone());
        }
    }
    for (summary, optimizer) in summaries.iter().zip(&optimizers) {
        moments::judge(checkpoint, optimizer, summary, tensors, limits, &mut findings);
    }
    (optimizers, findings)
}

/// Rules for which one tensor is enough, the gravest first, and what a tensor is that breaks one, in a word.
const BY_ITSELF: &[(&str, &str)] = &[
    ("nan", "nan"),
    ("inf", "inf"),
    ("negative-second-moment", "negative"),
    ("large-second-moment", "large"),
    ("large-weight", "large"),
    ("zero-weight", "zero"),
    ("dead-parameter", "dead"),
];

/// Those of these tensors that are bad, whatever others are, and what each is.
pub(crate) fn bad_by_themselves(
    checkpoint: &Checkpoint,
    tensors: &IndexMap<String, TensorStats>,
    limits: &HealthLimits,
) -> IndexMap<String, (&'static str, Severity)> {
    let (_, findings) = judged(checkpoint, tensors, limits);
    let mut gravest: HashMap<&str, (usize, Severity)> = HashMap::new();
    for finding in &findings {
        let Some(rank) = BY_ITSELF.iter().position(|(rule, _)| *rule == finding.rule) else { continue };
        let known = gravest.entry(&finding.key).or_insert((rank, finding.severity));
        if rank < known.0 {
            *known = (rank, finding.severity);
        }
    }
    let bad = |key: &String| gravest.get(key.as_str()).map(|(rank, severity)| (key.clone(), (BY_ITSELF[*rank].1, *severity)));
    tensors.keys().filter_map(bad).collect()
}

/// Whether a tensor is no weight, but a buffer: by its name, or because it is none of those that are trained, where these are known.
fn is_beside(key: &str, trained: Option<&HashSet<String>>) -> bool {
    is_buffer(key) || trained.is_some_and(|trained| !trained.contains(key) && !is_called_weight(key))
}

/// What rules say of one tensor.
fn tensor(
    checkpoint: &Checkpoint,
    key: &str,
    stats: &TensorStats,
    is_weight: bool,
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
    let is_score = tensor.shape.is_empty() && (key.starts_with("callbacks.") || key.contains("best"));
    let masks = is_mask(key) && stats.positive_infinities == 0;
    if stats.infinities > 0 && !is_score && !masks {
        add("inf", Some(stats.infinities as f64), share(stats.infinities));
    }
    if !is_weight {
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
