//! Folders of steps: which is the newest checkpoint that can be loaded, and which may go.
//!
//! A step is a folder directly below; its number is the last one in its name (`step_1000`, `checkpoint-1000`,
//! `epoch=3-step=500`). Nothing is ever removed that leaves the folder without its newest valid checkpoint.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reshard_formats::Value;
use reshard_storage::{Address, Store, StoreOptions, is_staged};
use serde::Serialize;

use crate::checkpoint::{Checkpoint, Format};
use crate::checksums::sidecar_name;
use crate::control::Control;
use crate::edit::note_name;
use crate::error::{Error, ErrorKind, Result, StorageContext};
use crate::layout_names::{METADATA_FILE, is_save_file};
use crate::verify::{Severity, VerifyOptions, verify};

/// How to look at a folder of steps.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StepsOptions {
    /// How to reach the store.
    pub store: StoreOptions,
    /// Read all data of a checkpoint before calling it valid; else its structure, files and their sizes decide.
    pub deep: bool,
    /// To watch and to cancel.
    pub control: Control,
}

/// What a step is worth.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state")]
#[non_exhaustive]
pub enum StepState {
    /// A complete checkpoint.
    Valid,
    /// Never finished, or damaged.
    Incomplete {
        /// Why.
        why: String,
    },
    /// Something else: not a checkpoint and no leftover of one.
    Other,
}

/// One step of a folder.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Step {
    /// The folder's name.
    pub name: String,
    /// Its number, where its name has one.
    pub number: Option<u64>,
    /// Its address.
    pub path: String,
    /// What it is worth.
    #[serde(flatten)]
    pub state: StepState,
    /// When one of its files was last changed, in seconds since 1970, where the store knows.
    pub modified: Option<u64>,
    /// Bytes of all its files.
    pub bytes: u64,
}

/// All steps of a folder, oldest first.
pub fn steps(folder: &str, options: &StepsOptions) -> Result<Vec<Step>> {
    let mut steps = listed(folder, options)?;
    for step in &mut steps {
        step.state = state(&step.path, options)?;
    }
    Ok(steps)
}

/// The newest valid checkpoint of a folder. When steps have numbers, the number decides; else the time of change.
pub fn latest(folder: &str, options: &StepsOptions) -> Result<Option<Step>> {
    let steps = listed(folder, options)?;
    let numbered = steps.iter().any(|step| step.number.is_some());
    for mut step in steps.into_iter().rev().filter(|step| step.number.is_some() || !numbered) {
        step.state = state(&step.path, options)?;
        if step.state == StepState::Valid {
            return Ok(Some(step));
        }
    }
    Ok(None)
}

/// The steps without a look at their worth, oldest first.
fn listed(folder: &str, options: &StepsOptions) -> Result<Vec<Step>> {
    let address = Address::parse(folder).doing(|| format!("opening {folder}"))?;
    let store = reshard_storage::open(&address, &options.store).doing(|| format!("opening {folder}"))?;
    let mut steps = Vec::new();
    for name in store.list_children().doing(|| format!("listing {folder}"))? {
        options.control.check("looking at steps")?;
        let path = address.join(&name).doing(|| format!("opening {name}"))?;
        let below = reshard_storage::open(&path, &options.store).doing(|| format!("opening {path}"))?;
        let files = below.list("").doing(|| format!("listing {path}"))?;
        let modified = files.iter().filter_map(|f| f.modified).max().map(seconds);
        let bytes = files.iter().map(|f| f.size).sum();
        steps.push(Step { number: number(&name), name, path: path.to_string(), state: StepState::Other, modified, bytes });
    }
    steps.sort_by(|a, b| (a.number, a.modified, &a.name).cmp(&(b.number, b.modified, &b.name)));
    Ok(steps)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The last number in a name.
fn number(name: &str) -> Option<u64> {
    let digits = |c: char| c.is_ascii_digit();
    let end = name.rfind(digits)? + 1;
    let start = name[..end].rfind(|c| !digits(c)).map_or(0, |i| i + 1);
    name[start..end].parse().ok()
}

fn open(path: &str, options: &StepsOptions) -> Result<std::sync::Arc<dyn Store>> {
    let address = Address::parse(path).doing(|| format!("opening {path}"))?;
    reshard_storage::open(&address, &options.store).doing(|| format!("opening {path}"))
}

fn state(path: &str, options: &StepsOptions) -> Result<StepState> {
    let store = open(path, options)?;
    let checkpoint = match Checkpoint::open_store(store.clone()) {
        Ok(checkpoint) => checkpoint,
        Err(error) => match error.kind() {
            ErrorKind::Incomplete | ErrorKind::Corrupt => return Ok(StepState::Incomplete { why: error.full_text() }),
            ErrorKind::NotFound => {
                let files = store.list("").doing(|| format!("listing {path}"))?;
                let leftover = files.iter().any(|f| is_save_file(&f.path) || is_staged(&f.path));
                let why = "only leftovers of a save that was never finished".to_owned();
                return Ok(if leftover { StepState::Incomplete { why } } else { StepState::Other });
            }
            ErrorKind::Untrusted => return Ok(StepState::Other),
            _ => return Err(error),
        },
    };
    let how = VerifyOptions { data: options.deep, control: options.control.clone() };
    let report = verify(&checkpoint, &how)?;
    let first = report.findings.iter().find(|f| f.severity == Severity::Error);
    Ok(match first {
        None => StepState::Valid,
        Some(finding) => {
            let file = finding.file.as_ref().map_or_else(String::new, |file| format!("{file}: "));
            StepState::Incomplete { why: format!("{file}{}", finding.what) }
        }
    })
}

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
    /// Leftovers that were changed within this time may belong to a save under way and stay.
    pub grace: Duration,
    /// Also remove incomplete steps that are newer than the newest valid one. Only when no job saves here: what a job saves
    /// right now looks like that, and on an object store a long upload leaves no trace of being under way.
    pub abandoned: bool,
}

impl Default for Retention {
    fn default() -> Retention {
        let grace = Duration::from_secs(3600);
        Retention { last: None, every: None, best: None, younger_than: None, grace, abandoned: false }
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
/// told otherwise, whatever a job may be saving right now.
pub fn prune(folder: &str, retention: &Retention, dry_run: bool, options: &StepsOptions) -> Result<PruneReport> {
    let found = steps(folder, options)?;
    let now = seconds(SystemTime::now());
    let metrics = match &retention.best {
        Some(best) => found.iter().map(|step| metric(step, best, options)).collect::<Result<Vec<_>>>()?,
        None => vec![None; found.len()],
    };
    let decisions = decide(found, &metrics, retention, now);
    let mut report = PruneReport { steps: decisions, leftovers: Vec::new(), bytes: 0, failed: Vec::new(), dry_run };
    for decision in &report.steps {
        options.control.check("pruning")?;
        let store = open(&decision.step.path, options)?;
        if !decision.keep {
            report.bytes += decision.step.bytes;
            if !dry_run && let Err(error) = remove(store.as_ref()) {
                report.failed.push(format!("{}: {}", decision.step.name, error.full_text()));
            }
        } else if decision.step.state == StepState::Valid {
            for (name, size) in leftovers(&store, retention.grace, now)? {
                report.bytes += size;
                report.leftovers.push(format!("{}/{name}", decision.step.name));
                if !dry_run && let Err(error) = store.delete(&name) {
                    report.failed.push(format!("{}/{name}: {error}", decision.step.name));
                }
            }
        }
    }
    Ok(report)
}

/// Decides from facts alone; steps are oldest first.
fn decide(steps: Vec<Step>, metrics: &[Option<f64>], retention: &Retention, now: u64) -> Vec<Decision> {
    let no_rules =
        retention.last.is_none() && retention.every.is_none() && retention.best.is_none() && retention.younger_than.is_none();
    let numbered = steps.iter().any(|step| step.number.is_some());
    let counts = |step: &Step| step.state == StepState::Valid && (step.number.is_some() || !numbered);
    let valid: Vec<usize> = (0..steps.len()).filter(|&i| counts(&steps[i])).collect();
    let mut best: Vec<usize> = valid.iter().copied().filter(|&i| metrics[i].is_some()).collect();
    if let Some(rule) = &retention.best {
        best.sort_by(|&a, &b| {
            let order = metrics[a].partial_cmp(&metrics[b]).unwrap_or(std::cmp::Ordering::Equal);
            let order = if rule.largest { order.reverse() } else { order };
            order.then(b.cmp(&a))
        });
        best.truncate(rule.count);
    } else {
        best.clear();
    }
    let last = retention.last.unwrap_or(0);
    let recent = &valid[valid.len().saturating_sub(last)..];
    let mut decisions = Vec::with_capacity(steps.len());
    for (i, step) in steps.iter().enumerate() {
        let mut why: Vec<String> = Vec::new();
        let age = step.modified.map(|modified| now.saturating_sub(modified));
        match &step.state {
            StepState::Other => why.push("no checkpoint".into()),
            StepState::Valid if !counts(step) => why.push("its name has no number".into()),
            StepState::Valid => {
                if valid.last() == Some(&i) {
                    why.push("the newest valid checkpoint".into());
                }
                if no_rules {
                    why.push("no rule was given".into());
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
                if age.is_none_or(|age| age < retention.grace.as_secs()) {
                    why.push("incomplete, but changed lately: a save may be under way".into());
                } else if valid.is_empty() {
                    why.push("incomplete, but there is no valid checkpoint; it may be recovered".into());
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
            None => return Err(Error::invalid(format!("{:?} of {} is no number", best.key, step.name))),
        },
        Err(error) => return Err(error),
    };
    Ok(Some(number).filter(|n| !n.is_nan()))
}

/// Removes a whole checkpoint so that, wherever this stops, what is left is not taken for one.
fn remove(store: &dyn Store) -> Result<()> {
    store.delete(METADATA_FILE).doing(|| format!("removing {}", store.describe()))?;
    store.sync().doing(|| format!("removing {}", store.describe()))?;
    store.delete_root().doing(|| format!("removing {}", store.describe()))
}

/// Files of killed saves inside a valid DCP folder.
fn leftovers(store: &std::sync::Arc<dyn Store>, grace: Duration, now: u64) -> Result<Vec<(String, u64)>> {
    let checkpoint = Checkpoint::open_store(store.clone())?;
    let catalog = checkpoint.catalog();
    if catalog.format != Format::Dcp {
        return Ok(Vec::new());
    }
    let own: Vec<String> = catalog.save_id.iter().flat_map(|id| [sidecar_name(id), note_name(id)]).collect();
    let files = store.list("").doing(|| format!("listing {}", store.describe()))?;
    let old = |modified: Option<SystemTime>| modified.is_some_and(|m| now.saturating_sub(seconds(m)) >= grace.as_secs());
    Ok(files
        .into_iter()
        .filter(|f| is_save_file(&f.path) || is_staged(&f.path))
        .filter(|f| !catalog.files.contains(&f.path) && !own.contains(&f.path) && old(f.modified))
        .map(|f| (f.path, f.size))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_of_a_name_counts() {
        for (name, wanted) in [
            ("step_1000", Some(1000)),
            ("1000", Some(1000)),
            ("epoch=3-step=500", Some(500)),
            ("checkpoint-12-final", Some(12)),
            ("latest", None),
            ("99999999999999999999999", None),
        ] {
            assert_eq!(number(name), wanted, "{name}");
        }
    }

    fn step(number: u64, valid: bool, modified: u64) -> Step {
        let state = if valid { StepState::Valid } else { StepState::Incomplete { why: "cut".into() } };
        let name = format!("step_{number}");
        Step { number: Some(number), path: name.clone(), name, state, modified: Some(modified), bytes: 1 }
    }

    fn kept(steps: &[Step], metrics: &[Option<f64>], retention: &Retention) -> Vec<u64> {
        let decisions = decide(steps.to_vec(), metrics, retention, 10_000);
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
}
