//! Saving: agree on who writes what, write, publish.
//!
//! [`save()`] and [`save_with`] return when the checkpoint is durable, [`AsyncSaver`] when a copy of the state is made.
//!
//! ```
//! use reshard::storage::{Address, StoreOptions};
//! use reshard::{SaveOptions, SaveState, Solo, save_with};
//!
//! let store = reshard::storage::open(&Address::parse("memory://doc-save")?, &StoreOptions::default())?;
//! let mut state = SaveState::new();
//! state.value("step", 100)?;
//! let mut options = SaveOptions::default();
//! options.overwrite = true; // the old checkpoint stays readable until the new one is complete
//! println!("{:?}", save_with(&Solo, &state, &store, &options)?.phases.total());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
// `prepare` is the only step in which ranks plan together; `write` moves bytes and talks to nobody; `finish` gathers what was
// written, waits until all of it is durable and has the planning rank commit it. A background save runs the same three, with
// a copy in between.

mod background;
mod blocks;
pub(crate) mod finish;
pub(crate) mod jobs;
mod options;
pub(crate) mod prepare;
mod simulate;
pub(crate) mod write;

use std::sync::Arc;

pub use background::{AsyncSaver, SaveHandle};
pub use options::SaveOptions;
use reshard_storage::{Address, Store, StoreOptions};
pub use simulate::{SimulatedPlan, simulate_plan};

use crate::error::{Result, StorageContext};
use crate::group::{Group, together};
use crate::leaf::SaveState;
pub use crate::packed::Compression;
pub use crate::plan::cache::PlanCache;
use crate::report::PhaseClock;
pub use crate::report::{Phases, SaveReport, Slowest};
pub use crate::staging::StagingPool;
use crate::workers::Workers;

/// Saves a state dict to a path, as [`save_with`] does with its defaults: synced, with checksums, refusing to overwrite.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("step-100").to_str().unwrap().to_owned();
/// let weight = [1.0f32, 2.0, 3.0, 4.0];
/// let mut state = reshard::SaveState::new();
/// state.tensor("model.weight", &[2, 2], &weight)?;
/// state.value("step", 100)?;
/// reshard::save(&reshard::Solo, &path, &state)?;
/// assert_eq!(reshard::Checkpoint::open(&path)?.read::<f32>("model.weight")?, weight);
/// # Ok::<(), reshard::Error>(())
/// ```
pub fn save(group: &dyn Group, path: &str, state: &SaveState<'_>) -> Result<SaveReport> {
    let store = Address::parse(path).and_then(|address| reshard_storage::open(&address, &StoreOptions::default()));
    // A rank that cannot open its path must not leave the others waiting.
    let store = together(group, store.doing(|| format!("opening {path}")))?;
    save_with(group, state, &store, &SaveOptions::default())
}

/// Saves a state dict that the ranks of `group` hold together. Every rank calls it with its own pieces.
///
/// When it returns, the checkpoint is complete and durable; when it fails, on any rank, every rank gets the error and what
/// lay at the path before is still there, untouched.
pub fn save_with(group: &dyn Group, state: &SaveState<'_>, store: &Arc<dyn Store>, options: &SaveOptions) -> Result<SaveReport> {
    let span = tracing::info_span!("save", rank = group.rank(), path = store.describe());
    let _entered = span.enter();
    let mut clock = PhaseClock::new();
    clock.enter("plan");
    let mut prepared = prepare::prepare(group, state, store.as_ref(), options)?;
    clock.enter("write");
    let workers = Workers::normal();
    let written = jobs::jobs(state, &prepared, options.files_per_rank).and_then(|jobs| {
        let writing = write::Writing::open(&jobs, &prepared, store.as_ref(), options)?;
        writing.fill(&jobs, 0..jobs.tensors.len(), &prepared, store.as_ref(), options, workers)
    });
    let outcome = finish::finish(group, &mut prepared, written, store.as_ref(), options, workers, &mut clock);
    finish::report(outcome, &prepared, clock.finish(), store.as_ref())
}
