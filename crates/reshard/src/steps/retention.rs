//! Which steps stay, and the removal of those that no rule keeps.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reshard_formats::Value;
use reshard_storage::{FileInfo, StorageError, Store};
use serde::Serialize;

use super::remove::{checkpoint_files, leftovers, remove, remove_beside, under_way};
use super::trainer::members;
use super::{Step, StepState, StepsOptions, judge, judged_steps, open, seconds, steps};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};

/// Keep the best by a number that each checkpoint holds.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Best {
    /// The key of a plain number, such as `metrics.loss`.
    pub key: String,
    /// Whether large is good.
    pub largest: bool,
    /// How many to keep.
    pub count: usize,
}

impl Best {
    /// The `count` best by the number under `key`.
    pub fn new(key: impl Into<String>, largest: bool, count: usize) -> Best {
        Best { key: key.into(), largest, count }
    }

    /// Parses `metrics.loss:min` or `metrics.accuracy:max:3`.
    pub fn parse(text: &str) -> Result<Best> {
        let parsed = || {
            let (rest, last) = text.rsplit_once(':')?;
            let (key, order, count) = match last.parse::<usize>() {
                Ok(count) => rest.rsplit_once(':').map(|(key, order)| (key, order, count))?,
                Err(_) => (rest, last, 1),
            };
            let largest = match order {
                "max" => true,
                "min" => false,
                _ => return None,
            };
            (!key.is_empty()).then(|| Best::new(key, largest, count))
        };
        let wrong =
            || format!("invalid rule {text:?} for the best steps: write it like metrics.loss:min or metrics.accuracy:max:3");
        parsed().ok_or_else(|| Error::invalid(wrong()))
    }
}

/// Which steps to keep. A step that any rule keeps stays; without a rule nothing is removed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Retention {
    /// The last so many valid ones.
    pub last: Option<usize>,
    /// Those whose number is a multiple of this.
    pub every: Option<u64>,
    /// The best by a metric.
    pub best: Option<Best>,
    /// Those that are younger than this.
    pub younger_than: Option<Duration>,
    /// No more bytes than this in all steps together: of what the other rules keep, the oldest go first, the best last. The
    /// newest valid one stays even if it is larger.
    pub budget: Option<u64>,
    /// Before anything valid goes, read a step whole, the newest first, until one is sound. It stays, whatever the rules say,
    /// until a newer one is found to be sound; a step whose data is damaged no longer counts as valid.
    pub fallback: bool,
    /// Leftovers that were changed within this time may belong to a save under way and stay.
    pub grace: Duration,
    /// Also remove incomplete steps that are newer than the newest valid one. Only when no job saves here: what a job saves
    /// right now looks like that, and on an object store a long upload leaves no trace of being under way.
    pub abandoned: bool,
}

impl Default for Retention {
    fn default() -> Retention {
        let grace = Duration::from_secs(3600);
        let (budget, fallback) = (None, false);
        Retention { last: None, every: None, best: None, younger_than: None, budget, fallback, grace, abandoned: false }
    }
}

/// What was decided about one step.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Decision {
    /// The step.
    pub step: Step,
    /// Whether it stays.
    pub keep: bool,
    /// Why.
    pub why: Vec<String>,
}

/// What pruning did, or would do.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PruneReport {
    /// Every step, oldest first.
    pub steps: Vec<Decision>,
    /// Leftover files inside steps that stay.
    pub leftovers: Vec<String>,
    /// Bytes set free.
    pub bytes: u64,
    /// What could not be removed, and why.
    pub failed: Vec<String>,
    /// Whether nothing was touched.
    pub dry_run: bool,
}

/// Removes steps that no rule keeps, and leftovers of killed saves. The newest valid step always stays, and so does, unless
/// told otherwise, whatever a job may be saving right now. Of a step that goes, only the checkpoint's own files do.
pub fn prune(folder: &str, retention: &Retention, dry_run: bool, options: &StepsOptions) -> Result<PruneReport> {
    // What a link points to is somebody else's.
    let mut found = judged_steps(folder, options, false)?;
    let now = seconds(SystemTime::now());
    let metrics = match &retention.best {
        Some(best) => found.iter().map(|step| metric(step, best, options)).collect::<Result<Vec<_>>>()?,
        None => vec![None; found.len()],
    };
    let would_go = |decisions: &[Decision]| decisions.iter().any(|d| !d.keep && d.step.state == StepState::Valid);
    let mut decisions = decide(&found, &metrics, retention, None, now);
    if retention.fallback && would_go(&decisions) {
        let sound = newest_sound(&mut found, options)?;
        decisions = decide(&found, &metrics, retention, sound, now);
        if sound.is_none() {
            for decision in decisions.iter_mut().filter(|d| !d.keep) {
                decision.keep = true;
                decision.why = vec!["no step is sound: nothing is removed".to_owned()];
            }
        }
    }
    let mut report = PruneReport { steps: decisions, leftovers: Vec::new(), bytes: 0, failed: Vec::new(), dry_run };
    for decision in &mut report.steps {
        options.control.check("pruning")?;
        let step = &decision.step;
        let members = members(step, options)?;
        if decision.keep {
            if step.state == StepState::Valid && step.removable {
                for (store, member) in &members {
                    let (own, names) = checkpoint_files(store)?;
                    for file in leftovers(&own, &names, &member.files, retention.grace, now) {
                        report.bytes += file.size;
                        report.leftovers.push(format!("{}/{}", member.name, file.path));
                        if !dry_run && let Err(error) = store.delete(&file.path) {
                            report.failed.push(format!("{}/{}: {error}", member.name, file.path));
                        }
                    }
                }
            }
            continue;
        }
        // A job may have begun to save here again since the folder was looked at; while this holds the locks, none can.
        let mut locks = Vec::new();
        let mut busy = false;
        for (store, member) in &members {
            let lock = if dry_run { Ok(None) } else { store.lock().map(Some) };
            match lock {
                Err(StorageError::Busy { .. }) => busy = true,
                lock => locks.push(lock),
            }
            busy = busy || under_way(store, member, retention.grace)?;
        }
        if busy {
            decision.keep = true;
            decision.why = vec!["a save is under way".to_owned()];
            continue;
        }
        report.bytes += step.bytes;
        if !dry_run {
            match remove_all(step, &members, options) {
                Ok(left) if left.is_empty() => {}
                Ok(left) => decision.why.push(format!("other files stay: {}", left.join(", "))),
                Err(error) => report.failed.push(format!("{}: {}", step.name, error.full_text())),
            }
        }
    }
    Ok(report)
}

/// Removes the checkpoints of a step, and then a trainer's files beside them. Returns the files that are none of its own and stay.
fn remove_all(step: &Step, members: &[(Arc<dyn Store>, Step)], options: &StepsOptions) -> Result<Vec<String>> {
    if let [(store, member)] = members
        && member.path == step.path
    {
        return remove(store, step);
    }
    let mut left = Vec::new();
    for (store, member) in members {
        let folder = member.path.rsplit('/').next().unwrap_or_default();
        left.extend(remove(store, member)?.into_iter().map(|file| format!("{folder}/{file}")));
    }
    let beside: Vec<&FileInfo> =
        step.files.iter().filter(|file| !members.iter().any(|(_, member)| is_below(file, step, member))).collect();
    left.extend(remove_beside(&open(&step.path, options)?, step, &beside, left.is_empty())?);
    Ok(left)
}

fn is_below(file: &FileInfo, step: &Step, member: &Step) -> bool {
    let folder = member.path.strip_prefix(step.path.trim_end_matches('/')).and_then(|rest| rest.strip_prefix('/'));
    folder.is_some_and(|folder| file.path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')))
}

/// The newest step of which all data was read and is sound. What is found to be damaged on the way is no longer valid.
fn newest_sound(found: &mut [Step], options: &StepsOptions) -> Result<Option<usize>> {
    let deep = StepsOptions { deep: true, ..options.clone() };
    for (i, step) in found.iter_mut().enumerate().rev() {
        if step.state == StepState::Valid && step.removable {
            judge(step, &deep)?;
            if step.state == StepState::Valid {
                return Ok(Some(i));
            }
        }
    }
    Ok(None)
}

/// The valid steps that hold a number, best first.
pub fn best(folder: &str, rule: &Best, options: &StepsOptions) -> Result<Vec<Step>> {
    let found = steps(folder, options)?;
    let metrics = found.iter().map(|step| metric(step, rule, options)).collect::<Result<Vec<_>>>()?;
    let order = ranked((0..found.len()).collect(), &metrics, rule);
    Ok(order.into_iter().take(rule.count).filter_map(|i| found.get(i).cloned()).collect())
}

/// Those with a number, best first; of equals the newest.
fn ranked(mut steps: Vec<usize>, metrics: &[Option<f64>], rule: &Best) -> Vec<usize> {
    steps.retain(|&i| metrics.get(i).is_some_and(Option::is_some));
    steps.sort_by(|&a, &b| {
        let order = metrics[a].partial_cmp(&metrics[b]).unwrap_or(std::cmp::Ordering::Equal);
        let order = if rule.largest { order.reverse() } else { order };
        order.then(b.cmp(&a))
    });
    steps
}

/// Decides from facts alone; steps are oldest first.
fn decide(steps: &[Step], metrics: &[Option<f64>], retention: &Retention, fallback: Option<usize>, now: u64) -> Vec<Decision> {
    let no_rules =
        retention.last.is_none() && retention.every.is_none() && retention.best.is_none() && retention.younger_than.is_none();
    let numbered = steps.iter().any(|step| step.number.is_some());
    let counts = |step: &Step| step.state == StepState::Valid && step.removable && (step.number.is_some() || !numbered);
    let valid: Vec<usize> = (0..steps.len()).filter(|&i| counts(&steps[i])).collect();
    let best = match &retention.best {
        Some(rule) => ranked(valid.clone(), metrics, rule).into_iter().take(rule.count).collect(),
        None => Vec::new(),
    };
    let last = retention.last.unwrap_or(0);
    let recent = &valid[valid.len().saturating_sub(last)..];
    let mut decisions = Vec::with_capacity(steps.len());
    for (i, step) in steps.iter().enumerate() {
        let mut why: Vec<String> = Vec::new();
        let age = step.modified.map(|modified| now.saturating_sub(modified));
        match &step.state {
            StepState::Other => why.push("no checkpoint".into()),
            StepState::Valid if !step.removable => why.push("no DCP checkpoint of this folder's own: never removed".into()),
            StepState::Valid if !counts(step) => why.push("its name has no number".into()),
            StepState::Valid => {
                if valid.last() == Some(&i) {
                    why.push("the newest valid checkpoint".into());
                }
                if fallback == Some(i) {
                    why.push("the newest that was read whole and is sound".into());
                }
                if no_rules {
                    why.push(if retention.budget.is_some() { "within the budget" } else { "no rule was given" }.into());
                }
                if recent.contains(&i) {
                    why.push(format!("one of the last {last}"));
                }
                if let (Some(every), Some(number)) = (retention.every.filter(|&e| e > 0), step.number)
                    && number.is_multiple_of(every)
                {
                    why.push(format!("a multiple of {every}"));
                }
                if best.contains(&i) {
                    why.push("one of the best".into());
                }
                if let Some(limit) = retention.younger_than
                    && age.is_none_or(|age| age < limit.as_secs())
                {
                    why.push("young".into());
                }
            }
            StepState::Incomplete { .. } => {
                if !step.removable {
                    why.push("incomplete, and not proven to be an abandoned save".into());
                } else if age.is_none_or(|age| age < retention.grace.as_secs()) {
                    why.push("incomplete, but changed lately: a save may be under way".into());
                } else if valid.is_empty() {
                    why.push("incomplete, but the only one; it may be recoverable".into());
                } else if !retention.abandoned && valid.last().is_some_and(|&newest| newest < i) {
                    why.push("incomplete, but newer than the newest valid checkpoint: a save may be under way".into());
                }
            }
        }
        let keep = !why.is_empty();
        if !keep {
            why.push(match &step.state {
                StepState::Incomplete { why } => format!("left over: {why}"),
                _ => "no rule keeps it".into(),
            });
        }
        decisions.push(Decision { step: step.clone(), keep, why });
    }
    if let Some(budget) = retention.budget {
        let stays = |i: usize| valid.last() == Some(&i) || fallback == Some(i);
        let mut order: Vec<usize> = valid.iter().copied().filter(|&i| decisions[i].keep && !stays(i)).collect();
        order.sort_by_key(|i| best.contains(i));
        let mut bytes: u64 = decisions.iter().filter(|d| d.keep).map(|d| d.step.bytes).fold(0, u64::saturating_add);
        for i in order {
            if bytes <= budget {
                break;
            }
            let decision = &mut decisions[i];
            decision.keep = false;
            decision.why = vec!["beyond the budget".to_owned()];
            bytes = bytes.saturating_sub(decision.step.bytes);
        }
    }
    decisions
}

fn metric(step: &Step, best: &Best, options: &StepsOptions) -> Result<Option<f64>> {
    if step.state != StepState::Valid {
        return Ok(None);
    }
    let checkpoint = Checkpoint::open_store(open(&step.path, options)?)?;
    if !checkpoint.catalog().entries.contains_key(&best.key) {
        return Ok(None);
    }
    let number = match checkpoint.value(&best.key) {
        Ok(Value::Float(number)) => number,
        Ok(value) => match value.to_json().as_f64() {
            Some(number) => number,
            None => return Err(Error::invalid(format!("{:?} of {} is not a number", best.key, step.name))),
        },
        Err(error) => return Err(error),
    };
    Ok(Some(number).filter(|n| !n.is_nan()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_have_a_key_and_an_order() {
        let found = Best::parse("metrics.loss:min:3").unwrap();
        assert_eq!((found.key.as_str(), found.largest, found.count), ("metrics.loss", false, 3));
        assert!(Best::parse("accuracy:max").unwrap().largest);
        for text in ["loss", "loss:most", ":min", "loss:3"] {
            assert!(Best::parse(text).is_err(), "{text}");
        }
    }

    fn step(number: u64, valid: bool, modified: u64) -> Step {
        let state = if valid { StepState::Valid } else { StepState::Incomplete { why: "cut".into() } };
        let name = format!("step_{number}");
        let (format, files) = (None, Vec::new());
        Step {
            number: Some(number),
            path: name.clone(),
            name,
            state,
            modified: Some(modified),
            bytes: 1,
            format,
            removable: true,
            files,
        }
    }

    fn kept(steps: &[Step], metrics: &[Option<f64>], retention: &Retention) -> Vec<u64> {
        let decisions = decide(steps, metrics, retention, None, 10_000);
        decisions.into_iter().filter(|d| d.keep).filter_map(|d| d.step.number).collect()
    }

    #[test]
    fn rules_keep_and_the_newest_valid_one_always_stays() {
        let steps: Vec<Step> = (1..=6).map(|n| step(n * 100, n != 6, n * 1000)).collect();
        let none = vec![None; 6];
        let rules = |set: &dyn Fn(&mut Retention)| {
            let mut rules = Retention { abandoned: true, ..Retention::default() };
            set(&mut rules);
            rules
        };
        assert_eq!(kept(&steps, &none, &rules(&|_| {})), [100, 200, 300, 400, 500]);
        assert_eq!(kept(&steps, &none, &rules(&|r| r.last = Some(2))), [400, 500]);
        assert_eq!(kept(&steps, &none, &rules(&|r| r.last = Some(0))), [500]);
        assert_eq!(kept(&steps, &none, &rules(&|r| r.every = Some(200))), [200, 400, 500]);
        assert_eq!(kept(&steps, &none, &rules(&|r| r.younger_than = Some(Duration::from_secs(6500)))), [400, 500]);
        let loss: Vec<Option<f64>> = [0.5, 0.1, 0.9, 0.2, 0.7, 0.0].map(Some).to_vec();
        assert_eq!(kept(&steps, &loss, &rules(&|r| r.best = Some(Best::new("loss", false, 2)))), [200, 400, 500]);
        assert_eq!(kept(&steps, &loss, &rules(&|r| r.best = Some(Best::new("loss", true, 1)))), [300, 500]);
        // The incomplete one is young under a longer grace: a save may be under way.
        let rules = rules(&|r| {
            r.last = Some(1);
            r.grace = Duration::from_secs(5000);
        });
        assert_eq!(kept(&steps, &none, &rules), [500, 600]);
    }

    #[test]
    fn a_budget_takes_the_oldest_first_and_the_best_last_and_never_the_newest() {
        let steps: Vec<Step> = (1..=5).map(|n| Step { bytes: 10, ..step(n * 100, true, n) }).collect();
        let within = |budget: u64, last: Option<usize>, best: Option<Best>| {
            let rules = Retention { budget: Some(budget), last, best, ..Retention::default() };
            let metrics = [Some(0.0), Some(1.0), Some(2.0), Some(3.0), Some(4.0)];
            kept(&steps, &metrics, &rules)
        };
        assert_eq!(within(50, None, None), [100, 200, 300, 400, 500]);
        assert_eq!(within(30, None, None), [300, 400, 500]);
        assert_eq!(within(0, None, None), [500]);
        assert_eq!(within(1000, Some(2), None), [400, 500]);
        assert_eq!(within(20, Some(3), Some(Best::new("loss", false, 1))), [100, 500]);
    }

    #[test]
    fn the_fallback_stays_whatever_the_rules_say() {
        let steps: Vec<Step> = (1..=3).map(|n| Step { bytes: 10, ..step(n * 100, true, n) }).collect();
        let rules = Retention { last: Some(1), budget: Some(0), ..Retention::default() };
        let decisions = decide(&steps, &[None; 3], &rules, Some(0), 10_000);
        let kept: Vec<u64> = decisions.into_iter().filter(|d| d.keep).filter_map(|d| d.step.number).collect();
        assert_eq!(kept, [100, 300]);
    }

    #[test]
    fn an_incomplete_step_newer_than_the_newest_valid_one_stays_until_it_is_called_abandoned() {
        let steps = [step(100, false, 1), step(200, true, 2), step(300, false, 3)];
        let mut rules = Retention { last: Some(1), grace: Duration::ZERO, ..Retention::default() };
        assert_eq!(kept(&steps, &[None; 3], &rules), [200, 300]);
        rules.abandoned = true;
        assert_eq!(kept(&steps, &[None; 3], &rules), [200]);
    }

    #[test]
    fn nothing_incomplete_is_removed_while_nothing_is_valid() {
        let steps = [step(1, false, 0), step(2, false, 0)];
        let rules = Retention { last: Some(1), ..Retention::default() };
        assert_eq!(kept(&steps, &[None, None], &rules), [1, 2]);
    }

    #[test]
    fn what_is_not_proven_to_be_ours_stays_and_does_not_count() {
        let mut steps = [step(100, true, 1), step(200, true, 2), step(300, true, 3), step(400, false, 4), step(500, true, 5)];
        steps[2].removable = false;
        steps[3].removable = false;
        let rules = Retention { last: Some(2), grace: Duration::ZERO, ..Retention::default() };
        assert_eq!(kept(&steps, &[None; 5], &rules), [200, 300, 400, 500]);
    }
}
