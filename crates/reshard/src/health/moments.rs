//! What an optimizer's moments say about a run: per parameter its step, how large its next update will be, and whether a
//! gradient reaches it.

use std::collections::{BTreeMap, HashSet};

use indexmap::IndexMap;
use serde::Serialize;

use super::HealthFinding;
use super::names::{is_bias, is_buffer};
use super::rules::HealthLimits;
use super::state_keys::{by_param, is_own};
use super::summary::{OptimizerGroup, OptimizerSummary, small_number};
use crate::checkpoint::{CatalogKind, Checkpoint};
use crate::numbers::TensorStats;
use crate::select::is_float;

/// Slots that hold a mean of squared gradients, by optimizers that are known.
const SECOND_MOMENTS: &[&str] = &[
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "acc_delta",
    "row_var",
    "col_var",
    "variance",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "exp_inf",
];
/// Parameters whose options are read, each a small record.
const MOST_PARAMS: usize = 20_000;
/// No optimizer has more groups than a reader takes in.
const MOST_GROUPS: usize = 32;
/// Keys named in one finding.
const MOST_NAMES: usize = 3;

/// The health of an optimizer's state.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct OptimizerHealth {
    /// What all its keys start with.
    pub root: String,
    /// The optimizer's name, where its slots tell.
    pub name: Option<&'static str>,
    /// Its param groups: learning rate and weight decay at a glance.
    pub groups: Vec<GroupHealth>,
    /// Its parameters, in the order of the checkpoint.
    pub params: Vec<ParamHealth>,
}

/// A param group.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct GroupHealth {
    /// Its number, or `all`.
    pub name: String,
    /// How many parameters it names, where it does.
    pub params: Option<u64>,
    /// The learning rate.
    pub lr: Option<f64>,
    /// The weight decay.
    pub weight_decay: Option<f64>,
    /// What keeps a division from being by zero.
    pub eps: Option<f64>,
    /// The decay of the first and the second moment.
    pub betas: Option<(f64, f64)>,
}

/// A parameter that has state.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
#[non_exhaustive]
pub struct ParamHealth {
    /// Its name in the optimizer.
    pub param: String,
    /// The key of its weights, where there is one of its name.
    pub weights: Option<String>,
    /// The group that it is in, by its place among the groups.
    pub group: Option<usize>,
    /// Steps that it has taken.
    pub step: Option<f64>,
    /// The root mean square of its first moment.
    pub first_moment_rms: Option<f64>,
    /// The largest element of its second moment.
    pub second_moment_max: Option<f64>,
    /// The next update as a share of the weights, estimated as lr · rms(m) / (√mean(v) + eps) / rms(w), with the moments'
    /// bias corrected as Adam does.
    pub update_ratio: Option<f64>,
}

fn number(group: &OptimizerGroup, option: &str) -> Option<f64> {
    group.options.iter().find(|(name, _)| name == option)?.1.parse().ok()
}

fn group_health(group: &OptimizerGroup) -> GroupHealth {
    let betas = group.options.iter().find(|(name, _)| name == "betas").and_then(|(_, text)| {
        let mut numbers = text.trim_matches(['(', ')', '[', ']']).split(',').map(|part| part.trim().parse().ok());
        Some((numbers.next()??, numbers.next()??))
    });
    GroupHealth {
        name: group.name.clone(),
        params: group.params.as_ref().map(|params| params.len() as u64),
        lr: number(group, "lr"),
        weight_decay: number(group, "weight_decay"),
        eps: number(group, "eps"),
        betas,
    }
}

/// The parameters of an optimizer, from numbers that are known.
pub(super) fn optimizer_health(
    checkpoint: &Checkpoint,
    summary: &OptimizerSummary,
    all: &[OptimizerSummary],
    stats: &IndexMap<String, TensorStats>,
) -> OptimizerHealth {
    let mut params: IndexMap<&str, ParamHealth> = IndexMap::new();
    let mut groups: Vec<GroupHealth> = summary.groups.iter().map(group_health).collect();
    let mut group_of: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, group) in summary.groups.iter().enumerate() {
        group_of.extend(group.params.iter().flatten().map(|param| (param.as_str(), number)));
    }
    let entries = &checkpoint.catalog().entries;
    let keys = by_param(entries.keys().map(String::as_str), &summary.root);
    if let Some(told) = told_apart(checkpoint, summary, keys.keys().copied()) {
        groups = told.iter().map(|(group, _)| group.clone()).collect();
        group_of = told.iter().enumerate().flat_map(|(number, (_, of))| of.iter().map(move |param| (*param, number))).collect();
    }
    for (param, slots) in &keys {
        let known = params.entry(param).or_insert_with(|| ParamHealth {
            param: (*param).to_owned(),
            group: group_of.get(param).copied().or((groups.len() == 1).then_some(0)),
            ..ParamHealth::default()
        });
        for (slot, key) in slots {
            match *slot {
                "step" => {
                    let counted = stats.get(*key).filter(|found| found.min == found.max).and_then(|found| found.min);
                    known.step = counted.or_else(|| small_number(checkpoint, key, entries.get(*key)?));
                }
                "exp_avg" => known.first_moment_rms = stats.get(*key).and_then(|found| found.rms),
                slot if SECOND_MOMENTS.contains(&slot) => {
                    if let Some(largest) = stats.get(*key).and_then(|found| found.max) {
                        known.second_moment_max = Some(known.second_moment_max.map_or(largest, |known| known.max(largest)));
                    }
                }
                _ => {}
            }
        }
    }
    let before = weights_before(checkpoint, summary, all, &params.keys().copied().collect::<Vec<_>>());
    for (param, known) in &mut params {
        let weights = before.as_ref().map(|before| format!("{before}{param}")).filter(|key| entries.contains_key(key));
        let moment = |slot: &str| stats.get(keys.get(param)?.iter().find(|(name, _)| *name == slot)?.1);
        let group = known.group.and_then(|group| groups.get(group));
        if let (Some(weights), Some(group), Some(m), Some(v)) = (&weights, group, moment("exp_avg"), moment("exp_avg_sq")) {
            known.update_ratio = update_ratio(group, known.step, m, v, stats.get(weights));
        }
        known.weights = weights;
    }
    let params = params.into_values().collect();
    OptimizerHealth { root: summary.root.clone(), name: summary.name, groups, params }
}

/// A group and its parameters.
type Told<'p> = Vec<(GroupHealth, Vec<&'p str>)>;

/// Groups that were flattened away, each parameter carrying its options: parameters of the same ones are a group again.
fn told_apart<'p>(
    checkpoint: &Checkpoint,
    summary: &OptimizerSummary,
    params: impl Iterator<Item = &'p str>,
) -> Option<Told<'p>> {
    let [flat] = &summary.groups[..] else { return None };
    if flat.name != "all" {
        return None;
    }
    let entries = &checkpoint.catalog().entries;
    let mut told: Told<'p> = Vec::new();
    for param in params.take(MOST_PARAMS) {
        let option = |name: &str| {
            let key = format!("{}param_groups.{param}.{name}", summary.root);
            small_number(checkpoint, &key, entries.get(&key)?)
        };
        let (lr, weight_decay) = (option("lr"), option("weight_decay"));
        match told.iter_mut().find(|(group, _)| (group.lr, group.weight_decay) == (lr, weight_decay)) {
            Some((_, of)) => of.push(param),
            None => told.push((GroupHealth { lr, weight_decay, ..group_health(flat) }, vec![param])),
        }
        // Options of each parameter's own are no groups.
        if told.len() > MOST_GROUPS {
            return None;
        }
    }
    if told.len() < 2 {
        return None;
    }
    for (number, (group, of)) in told.iter_mut().enumerate() {
        (group.name, group.params) = (number.to_string(), Some(of.len() as u64));
    }
    Some(told)
}

fn update_ratio(
    group: &GroupHealth,
    step: Option<f64>,
    m: &TensorStats,
    v: &TensorStats,
    w: Option<&TensorStats>,
) -> Option<f64> {
    let corrected = |beta: f64| step.map_or(1.0, |step| 1.0 - beta.powf(step.max(1.0)));
    let (first, second) = group.betas.map_or((1.0, 1.0), |(one, two)| (corrected(one), corrected(two)));
    let (m, v, w) = (m.rms? / first, v.mean? / second, w?.rms?);
    let ratio = group.lr? * m / (v.max(0.0).sqrt() + group.eps.unwrap_or(1e-8)) / w;
    ratio.is_finite().then_some(ratio)
}

/// What stands before parameters' names in the keys of their weights. Where several optimizers train parameters of the same names, it is
/// what the optimizer is called after (`optim_gen`: `gen.`); where nothing tells, nobody knows.
fn weights_before(
    checkpoint: &Checkpoint,
    summary: &OptimizerSummary,
    all: &[OptimizerSummary],
    params: &[&str],
) -> Option<String> {
    let first = params.first()?;
    let is_weight = |key: &str| !all.iter().any(|other| is_own(key, &other.root));
    let candidates = checkpoint.keys().filter(|key| is_weight(key)).filter_map(|key| {
        let before = key.strip_suffix(first)?;
        (before.is_empty() || before.ends_with('.')).then_some(before)
    });
    if all.len() < 2 {
        return candidates.map(str::to_owned).next();
    }
    let has_all = |before: &&str| params.iter().all(|param| checkpoint.tensor(&format!("{before}{param}")).is_ok());
    let fitting: Vec<&str> = candidates.filter(has_all).collect();
    let words: Vec<&str> = summary.root.split(['.', '_']).filter(|word| !word.is_empty()).collect();
    let called_after = |before: &&&str| before.split(['.', '_']).any(|word| !word.is_empty() && words.contains(&word));
    match &fitting[..] {
        [only] => Some((*only).to_owned()),
        several => {
            let mut named = several.iter().filter(called_after);
            named.next().filter(|_| named.next().is_none()).map(|before| (*before).to_owned())
        }
    }
}

/// The keys of all weights that optimizers train, where every one of them names its parameters.
pub(super) fn trained(summaries: &[OptimizerSummary], optimizers: &[OptimizerHealth]) -> Option<HashSet<String>> {
    let mut found = HashSet::new();
    for (summary, health) in summaries.iter().zip(optimizers) {
        let before = health.params.iter().find_map(|param| param.weights.as_ref()?.strip_suffix(param.param.as_str()))?;
        for group in &summary.groups {
            found.extend(group.params.as_ref()?.iter().map(|param| format!("{before}{param}")));
        }
    }
    (!found.is_empty()).then_some(found)
}

/// What rules say of it.
pub(super) fn judge(
    checkpoint: &Checkpoint,
    health: &OptimizerHealth,
    summary: &OptimizerSummary,
    stats: &IndexMap<String, TensorStats>,
    limits: &HealthLimits,
    found: &mut Vec<HealthFinding>,
) {
    let state = format!("{}state", health.root);
    let keys = by_param(checkpoint.keys(), &health.root);
    // An optimizer that has not run yet, to which PyTorch gives state by a step without gradients.
    let mut second =
        keys.values().flatten().filter(|(slot, _)| SECOND_MOMENTS.contains(slot)).filter_map(|(_, key)| stats.get(*key));
    let is_fresh = second.all(|moment| moment.zeros == moment.elements)
        && health.params.iter().all(|param| param.step.is_none_or(|step| step <= 1.0));
    for param in &health.params {
        let moments = keys.get(param.param.as_str()).into_iter().flatten();
        for (slot, key) in moments.filter(|(slot, _)| SECOND_MOMENTS.contains(slot)) {
            let Some(moment) = stats.get(*key) else { continue };
            if let Some(min) = moment.min.filter(|min| *min < 0.0) {
                HealthFinding::add(found, limits, "negative-second-moment", key, Some(min), format!("the smallest is {min:.3e}"));
            }
            if let Some(max) = moment.max.filter(|max| *max > limits.of("large-second-moment")) {
                HealthFinding::add(found, limits, "large-second-moment", key, Some(max), format!("the largest is {max:.3e}"));
            }
            let stepped = param.step.is_none_or(|step| step > 0.0);
            if *slot != "max_exp_avg_sq" && stepped && !is_fresh && moment.elements > 0 && moment.zeros == moment.elements {
                let step = param.step.map_or_else(String::new, |step| format!(" after {step} steps"));
                HealthFinding::add(found, limits, "dead-parameter", key, None, format!("all of it is zero{step}"));
            }
        }
        // Biases start at zero, where every update is large.
        let judged = param.update_ratio.filter(|_| !is_bias(&param.param));
        if let Some(ratio) = judged.filter(|ratio| *ratio > limits.of("large-update")) {
            let key = param.weights.clone().unwrap_or_else(|| param.param.clone());
            HealthFinding::add(found, limits, "large-update", &key, Some(ratio), format!("about {ratio:.3} of the weights"));
        }
    }
    let mut steps: BTreeMap<i64, Vec<&str>> = BTreeMap::new();
    for param in &health.params {
        if let Some(step) = param.step {
            steps.entry(step as i64).or_default().push(&param.param);
        }
    }
    if steps.len() > 1 {
        let told: Vec<String> = steps
            .iter()
            .take(MOST_NAMES)
            .map(|(step, params)| format!("step {step}: {} (such as {:?})", params.len(), params[0]))
            .collect();
        let more = if steps.len() > MOST_NAMES { format!(", and {} more", steps.len() - MOST_NAMES) } else { String::new() };
        HealthFinding::add(found, limits, "steps-differ", &state, None, format!("{}{more}", told.join(", ")));
    }
    if health.params.is_empty() {
        return;
    }
    let with_state: HashSet<&str> = health.params.iter().map(|param| param.param.as_str()).collect();
    for param in summary.groups.iter().flat_map(|group| group.params.iter().flatten()) {
        // A number names no parameter where the state has names.
        let comparable = param.parse::<u64>().is_err() || with_state.iter().any(|other| other.parse::<u64>().is_ok());
        if comparable && !with_state.contains(param.as_str()) {
            HealthFinding::add(found, limits, "no-state", param, None, "its group names it".to_owned());
        }
    }
    if summary.groups.iter().any(|group| group.params.is_some()) {
        return;
    }
    // No group names its parameters: whatever is trained beside those that have state is expected to have it too.
    let before = health.params.iter().find_map(|param| param.weights.as_ref()?.strip_suffix(param.param.as_str()));
    let Some(before) = before else { return };
    let trained: Vec<&TensorStats> = health.params.iter().filter_map(|param| stats.get(param.weights.as_ref()?)).collect();
    // Tied weights are saved twice and trained once.
    let is_tied = |key: &str| stats.get(key).is_some_and(|own| own.l2 > Some(0.0) && trained.contains(&own));
    for (key, entry) in &checkpoint.catalog().entries {
        let Some(param) = key.strip_prefix(before) else { continue };
        if let CatalogKind::Tensor(tensor) = &entry.kind
            && !is_own(key, &health.root)
            && is_float(tensor.dtype)
            && tensor.shape.len() >= 2
            && !with_state.contains(param)
            && !is_buffer(key)
            && !is_tied(key)
        {
            HealthFinding::add(found, limits, "no-state", key, None, "others of the model have it".to_owned());
        }
    }
}
