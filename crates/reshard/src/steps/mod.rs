//! Folders of steps: which is the newest checkpoint that can be loaded, and which may go.
//!
//! A step is a folder directly below; its number is the last one in its name (`step_1000`, `checkpoint-1000`,
//! `epoch=3-step=500.ckpt`), or what follows a given prefix. Folders that trainers fill with several checkpoints are steps too. A step counts when its structure, its files and their lengths, and
//! everything that is stored twice were checked. Nothing is removed that is not proven to be a checkpoint, or an abandoned
//! save, and never the newest one that can be loaded.
//!
//! ```no_run
//! use reshard::steps::{StepsOptions, latest};
//!
//! if let Some(step) = latest("checkpoints", &StepsOptions::default())? {
//!     println!("resume from {}", step.path);
//! }
//! # Ok::<(), reshard::Error>(())
//! ```

mod remove;
mod retention;
mod trainer;
mod trend;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use reshard_storage::{Address, FileInfo, Store, StoreOptions};
use serde::Serialize;

pub use self::retention::{Best, Decision, PruneReport, Retention, best, prune};
pub use self::trend::{Before, FirstBad, Trend, TrendOptions, TrendStep, TrendTensor, trend};
use crate::checkpoint::{Checkpoint, Format};
use crate::control::Control;
use crate::error::{ErrorKind, Result, StorageContext};
use crate::verify::{Severity, VerifyOptions, verify};

/// How to look at a folder of steps.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StepsOptions {
    /// How to reach the store. Where it follows links, links to folders are steps, too; they are never removed.
    pub store: StoreOptions,
    /// Read all data of a checkpoint before calling it valid; else its structure, files, their lengths and indexes decide.
    pub deep: bool,
    /// Only folders named by this and a number are steps.
    pub prefix: Option<String>,
    /// Only checkpoints that hold this key may be removed: the mark of whoever keeps the folder.
    pub marker: Option<String>,
    /// Remembers what was checked, for as long as a step's files do not change.
    pub memory: Option<StepsMemory>,
    /// To watch and to cancel.
    pub control: Control,
}

/// What is known of steps that were looked at before, so that a folder that is looked at often is not read again and again.
#[derive(Debug, Clone, Default)]
pub struct StepsMemory(Arc<Mutex<HashMap<(String, bool), Remembered>>>);

/// A step's files when it was looked at, and what it was found to be.
type Remembered = (Vec<FileInfo>, Judged);

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
    /// How it is stored, where that could be told.
    #[serde(skip)]
    pub format: Option<Format>,
    /// Whether its names and contents prove that it is a DCP checkpoint, or an abandoned save of one.
    #[serde(skip)]
    pub removable: bool,
    #[serde(skip)]
    files: Vec<FileInfo>,
}

/// What a look at a step's files gave.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Judged {
    state: StepState,
    format: Option<Format>,
    removable: bool,
}

/// All steps of a folder, oldest first.
pub fn steps(folder: &str, options: &StepsOptions) -> Result<Vec<Step>> {
    judged_steps(folder, options, options.store.follow_symlinks)
}

fn judged_steps(folder: &str, options: &StepsOptions, links: bool) -> Result<Vec<Step>> {
    let mut steps = listed(folder, options, links)?;
    for step in &mut steps {
        judge(step, options)?;
    }
    Ok(steps)
}

/// The newest valid checkpoint of a folder. When steps have numbers, the number decides; else the time of change.
pub fn latest(folder: &str, options: &StepsOptions) -> Result<Option<Step>> {
    let steps = listed(folder, options, options.store.follow_symlinks)?;
    let numbered = steps.iter().any(|step| step.number.is_some());
    for mut step in steps.into_iter().rev().filter(|step| step.number.is_some() || !numbered) {
        judge(&mut step, options)?;
        if step.state == StepState::Valid {
            return Ok(Some(step));
        }
    }
    Ok(None)
}

/// The names of links to folders that are called like steps and are left out, since the store does not follow links.
pub fn linked_steps(folder: &str, options: &StepsOptions) -> Result<Vec<String>> {
    let address = Address::parse(folder).doing(|| "opening a folder of steps".into())?;
    let store = reshard_storage::open(&address, &options.store).doing(|| format!("opening {address}"))?;
    let mut names = store.list_links().doing(|| format!("listing {address}"))?;
    names.retain(|name| !options.store.follow_symlinks && number(name).is_some());
    Ok(names)
}

/// The steps without a look at their worth, oldest first.
fn listed(folder: &str, options: &StepsOptions, links: bool) -> Result<Vec<Step>> {
    let address = Address::parse(folder).doing(|| "opening a folder of steps".into())?;
    let store = reshard_storage::open(&address, &options.store).doing(|| format!("opening {address}"))?;
    let mut steps = Vec::new();
    let mut names = store.list_children().doing(|| format!("listing {address}"))?;
    if links {
        names.extend(store.list_links().doing(|| format!("listing {address}"))?);
    }
    for name in names {
        options.control.check("looking at steps")?;
        let number = match &options.prefix {
            None => number(&name),
            Some(prefix) => match name.strip_prefix(prefix.as_str()).and_then(plain_number) {
                Some(number) => Some(number),
                None => continue,
            },
        };
        let path = address.join(&name).doing(|| format!("opening {name}"))?;
        let below = reshard_storage::open(&path, &options.store).doing(|| format!("opening {path}"))?;
        let files = below.list("").doing(|| format!("listing {path}"))?;
        let modified = files.iter().filter_map(|f| f.modified).max().map(seconds);
        let bytes = files.iter().map(|f| f.size).sum();
        let (path, state) = (path.to_string(), StepState::Other);
        steps.push(Step { number, name, path, state, modified, bytes, format: None, removable: false, files });
    }
    steps.sort_by(|a, b| (a.number, a.modified, &a.name).cmp(&(b.number, b.modified, &b.name)));
    Ok(steps)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The last number in a name. What Lightning appends to names that it has used before (`-v1`) is none.
fn number(name: &str) -> Option<u64> {
    let digits = |c: char| c.is_ascii_digit();
    let name = name.strip_suffix(".ckpt").unwrap_or(name);
    let version = name.rsplit_once("-v").filter(|(_, rest)| !rest.is_empty() && rest.chars().all(digits));
    let name = version.map_or(name, |(before, _)| before);
    let end = name.rfind(digits)? + 1;
    let start = name[..end].rfind(|c| !digits(c)).map_or(0, |i| i + 1);
    name[start..end].parse().ok()
}

/// A number as it is written by whoever counts: digits alone, no zeros before it.
fn plain_number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

fn open(path: &str, options: &StepsOptions) -> Result<Arc<dyn Store>> {
    let address = Address::parse(path).doing(|| "opening a step".into())?;
    reshard_storage::open(&address, &options.store).doing(|| format!("opening {address}"))
}

/// Looks at a step, or remembers the last look when its files are as they were.
fn judge(step: &mut Step, options: &StepsOptions) -> Result<()> {
    let memory = options.memory.as_ref().map(|memory| &memory.0);
    // What was read whole, and what was not, are remembered apart.
    let key = (step.path.clone(), options.deep);
    let known = memory.and_then(|memory| {
        let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.get(&key).filter(|(files, _)| *files == step.files).map(|(_, judged)| judged.clone())
    });
    let judged = match known {
        Some(judged) => judged,
        None => {
            let judged = look(step, options)?;
            if let Some(memory) = memory {
                let known = (step.files.clone(), judged.clone());
                memory.lock().unwrap_or_else(PoisonError::into_inner).insert(key, known);
            }
            judged
        }
    };
    (step.state, step.format, step.removable) = (judged.state, judged.format, judged.removable);
    Ok(())
}

fn look(step: &Step, options: &StepsOptions) -> Result<Judged> {
    let parts = trainer::parts(&step.files);
    if !parts.is_empty() {
        return trainer::look_at_parts(step, &parts, options);
    }
    let store = open(&step.path, options)?;
    let checkpoint = match Checkpoint::open_store(store.clone()) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return unopened(error, store.as_ref(), step),
    };
    let how = VerifyOptions { data: options.deep, control: options.control.clone() };
    let report = verify(&checkpoint, &how)?;
    let first = report.findings.iter().find(|f| f.severity == Severity::Error);
    let state = match first {
        None => trainer::lacks_rest(step).map_or(StepState::Valid, |why| StepState::Incomplete { why }),
        Some(finding) => {
            let file = finding.file.as_ref().map_or_else(String::new, |file| format!("{file}: "));
            StepState::Incomplete { why: format!("{file}{}", finding.what) }
        }
    };
    let catalog = checkpoint.catalog();
    let marked = options.marker.as_ref().is_none_or(|key| catalog.entries.contains_key(key));
    Ok(Judged { state, format: Some(catalog.format), removable: catalog.format.is_dcp() && marked })
}

/// What cannot be opened: a save that was never finished, a damaged checkpoint, or something else.
fn unopened(error: crate::Error, store: &dyn Store, step: &Step) -> Result<Judged> {
    let removable = remove::is_abandoned(store, &step.files);
    let incomplete = |why: String| Ok(Judged { state: StepState::Incomplete { why }, format: None, removable });
    match error.kind() {
        ErrorKind::Incomplete | ErrorKind::Corrupt => incomplete(error.full_text()),
        ErrorKind::NotFound if step.files.iter().any(|f| remove::is_own_name(&f.path)) => {
            incomplete("only leftovers of a save that was never finished".to_owned())
        }
        // Of several checkpoints in one folder, or of one that would run code, nobody knows which is meant.
        ErrorKind::NotFound | ErrorKind::Untrusted | ErrorKind::Invalid => {
            Ok(Judged { state: StepState::Other, format: None, removable: false })
        }
        _ => Err(error),
    }
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
            ("epoch=3-step=500-v1.ckpt", Some(500)),
            ("last-v1.ckpt", None),
            ("latest", None),
            ("99999999999999999999999", None),
        ] {
            assert_eq!(number(name), wanted, "{name}");
        }
        assert_eq!(["7", "07", "", "+7", "7a"].map(plain_number), [Some(7), None, None, None, None]);
    }
}
