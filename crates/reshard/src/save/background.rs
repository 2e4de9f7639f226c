//! Saving in the background: plan and copy while the caller waits, write and publish while it goes on.
#![allow(unsafe_code)]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use rayon::prelude::*;
use reshard_layout::{ByteLayout, Dims, Run, runs};
use reshard_storage::Store;

use super::SaveOptions;
use super::finish;
use super::jobs::{self, Jobs};
use super::prepare::{Prepared, prepare};
use super::write::Writing;
use crate::control::Control;
use crate::error::{Error, Geometry, RankFailure, Result};
use crate::group::Group;
use crate::leaf::SaveState;
use crate::memory::{Source, split_for_copy};
use crate::plan::cache::PlanCache;
use crate::report::{PhaseClock, Phases, SaveReport};
use crate::staging::StagingPool;
use crate::workers::{Workers, lower_priority};

/// Saves in the background, one save at a time, with memory and plans that it keeps. Make one for a training run.
///
/// [`AsyncSaver::save`] returns when the state has been copied: training may go on and change it. The handle tells when
/// the checkpoint is durable. A failure is given by the handle and, if nobody asked it, by the next save.
#[derive(Debug)]
pub struct AsyncSaver {
    pool: Arc<StagingPool>,
    plans: Arc<PlanCache>,
    last: Mutex<Option<SaveHandle>>,
    /// Who made it. Memory that is lent to a save under way is never given back in a process forked meanwhile.
    process: u32,
}

/// A save under way. Clones are the same save.
#[derive(Debug, Clone)]
pub struct SaveHandle {
    shared: Arc<Shared>,
    /// How long the caller was kept from training.
    stall: Duration,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    control: Control,
    rank: usize,
    /// Where the save runs; its end is not heard of in a process forked meanwhile.
    process: u32,
}

#[derive(Debug)]
enum State {
    Running,
    Done(Box<SaveReport>),
    Failed(Error),
    /// The error was given to whoever asked first; the others get what would travel to another rank.
    Told(Vec<RankFailure>),
}

impl AsyncSaver {
    /// Stages at most `budget` bytes; what is beyond is written before [`AsyncSaver::save`] returns.
    pub fn new(budget: u64) -> AsyncSaver {
        let (pool, plans) = (Arc::new(StagingPool::new(budget)), Arc::new(PlanCache::new()));
        AsyncSaver { pool, plans, last: Mutex::new(None), process: std::process::id() }
    }

    /// The memory it stages into.
    pub fn pool(&self) -> &StagingPool {
        &self.pool
    }

    /// Plans and copies now, writes and publishes in the background. Waits for the save before it, whose failure, if
    /// nobody has seen it, is returned instead of starting another.
    pub fn save(
        &self,
        group: Arc<dyn Group>,
        state: &SaveState<'_>,
        store: Arc<dyn Store>,
        mut options: SaveOptions,
    ) -> Result<SaveHandle> {
        if self.process != std::process::id() {
            let detail = "this process was forked from the one that made this AsyncSaver; make another one";
            return Err(Error::Invalid { detail: detail.into() });
        }
        self.settle()?;
        let start = Instant::now();
        options.plan_cache = Some(Arc::clone(&self.plans));
        let mut clock = PhaseClock::new();
        clock.enter("plan");
        let prepared = prepare(&group, state, store.as_ref(), &options)?;
        clock.enter("stage");
        let staged = stage(state, &prepared, store.as_ref(), &options, &self.pool);
        let phases = clock.finish();
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Running),
            changed: Condvar::new(),
            control: options.control.clone(),
            rank: group.rank(),
            process: std::process::id(),
        });
        let handle = SaveHandle { shared: Arc::clone(&shared), stall: start.elapsed() };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle.clone());
        let pool = Arc::clone(&self.pool);
        // Whoever traces the caller traces what goes on for it.
        let trace = tracing::dispatcher::get_default(tracing::Dispatch::clone);
        let work = move || {
            lower_priority();
            let guard = Unwinding(&shared);
            let result = tracing::dispatcher::with_default(&trace, || {
                write_and_publish(group.as_ref(), prepared, staged, store.as_ref(), &options, &pool, phases)
            });
            drop(trace);
            std::mem::forget(guard);
            shared.set(match result {
                Ok(report) => State::Done(Box::new(report)),
                Err(error) => State::Failed(error),
            });
        };
        let spawned = std::thread::Builder::new().name("reshard-save".into()).spawn(work);
        if let Err(error) = spawned {
            let failure = Error::exhausted(format!("no thread for a background save: {error}"));
            handle.shared.set(State::Failed(failure));
        }
        Ok(handle)
    }

    /// Waits for the save under way; its error if nobody has seen it.
    pub fn settle(&self) -> Result<()> {
        if self.process != std::process::id() {
            // Whatever is under way is the other process's.
            return Ok(());
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        match last.map(|handle| handle.shared.wait_untold()) {
            Some(Some(error)) => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::error!(%error, "a background save failed and nobody asked for its outcome");
        }
    }
}

impl SaveHandle {
    /// How long the caller was kept waiting: planning and copying.
    pub fn stall(&self) -> Duration {
        self.stall
    }

    /// Whether it has ended, well or badly.
    pub fn is_done(&self) -> bool {
        !matches!(*self.shared.lock(), State::Running)
    }

    /// Progress and cancellation.
    pub fn control(&self) -> &Control {
        &self.shared.control
    }

    /// Asks the save to stop. Nothing is published then, unless it already was.
    pub fn cancel(&self) {
        self.shared.control.cancel();
    }

    /// Waits until the checkpoint is durable, or failed.
    pub fn wait(&self) -> Result<SaveReport> {
        if self.shared.process != std::process::id() {
            let detail =
                format!("the save is the process {}'s, from which this one was forked; only it can wait", self.shared.process);
            return Err(Error::Invalid { detail });
        }
        let mut state = self.shared.lock();
        while matches!(*state, State::Running) {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &mut *state {
            State::Done(report) => Ok((**report).clone()),
            State::Told(failures) => Err(Error::Remote { failures: failures.clone() }),
            failed => {
                let told = self.shared.told(failed);
                match std::mem::replace(failed, told) {
                    State::Failed(error) => Err(error),
                    _ => Err(Error::internal("a background save ended without a result")),
                }
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    /// What stays of a failure that is given away.
    fn told(&self, state: &State) -> State {
        match state {
            State::Failed(error) => State::Told(error.to_failures(self.rank)),
            _ => State::Told(Vec::new()),
        }
    }

    /// Waits; the error if it failed and nobody was told.
    fn wait_untold(&self) -> Option<Error> {
        let mut state = self.lock();
        while matches!(*state, State::Running) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &mut *state {
            failed @ State::Failed(_) => {
                let told = self.told(failed);
                match std::mem::replace(failed, told) {
                    State::Failed(error) => Some(error),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

/// Makes sure that a panic in the background is an error for whoever waits.
struct Unwinding<'s>(&'s Shared);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        self.0.set(State::Failed(Error::internal("the background save panicked; nothing was published")));
    }
}

/// A state copied out of the caller's memory.
struct Staged {
    /// Points into `memory`; the first `written` are on the disk already and point nowhere.
    jobs: Jobs<'static>,
    memory: MmapMut,
    writing: Writing,
    written: usize,
}

/// Copies what this rank writes into staging memory. What exceeds the budget is written here and now.
fn stage(
    state: &SaveState<'_>,
    prepared: &Prepared,
    store: &dyn Store,
    options: &SaveOptions,
    pool: &StagingPool,
) -> Result<Staged> {
    let jobs = jobs::jobs(state, prepared, options.files_per_rank)?;
    let mut writing = Writing::open(&jobs, prepared, store, options)?;
    let mut total: u64 = 0;
    let mut written = jobs.tensors.len();
    while written > 0 && total + aligned(jobs.tensors[written - 1].placed.data_length) <= pool.budget() {
        written -= 1;
        total += aligned(jobs.tensors[written].placed.data_length);
    }
    let copied =
        writing.put(&jobs, 0..written, store, options, Workers::normal()).and_then(|()| copy(&jobs, written, total, pool));
    match copied {
        Ok((jobs, memory)) => Ok(Staged { jobs, memory, writing, written }),
        Err(error) => {
            writing.abort();
            Err(error)
        }
    }
}

/// Staged tensors start on cache lines.
fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(64)
}

/// Copies are cut into parts of this size, so that all threads have work.
const PART: usize = 4 << 20;

fn copy(jobs: &Jobs<'_>, from: usize, total: u64, pool: &StagingPool) -> Result<(Jobs<'static>, MmapMut)> {
    let mut memory = pool.take(total)?;
    let mut rest = &mut memory[..];
    let mut targets: Vec<(usize, &mut [u8])> = Vec::new();
    for (i, job) in jobs.tensors.iter().enumerate().skip(from) {
        let (target, after) = rest.split_at_mut(aligned(job.placed.data_length) as usize);
        rest = after;
        targets.push((i, &mut target[..job.placed.data_length as usize]));
    }
    let mut staged = Vec::with_capacity(jobs.tensors.len());
    for job in &jobs.tensors[..from] {
        staged.push(job.detached(Source::new(&[])));
    }
    for (i, target) in &targets {
        // SAFETY: the mapping is returned with the jobs, kept beside them in `Staged`, and goes back to the pool only when
        // they are gone. It is written below, before anyone reads the jobs, and then no more.
        let memory = unsafe { Source::kept_alive(target) };
        staged.push(jobs.tensors[*i].detached(memory));
    }
    Workers::normal().run(|| {
        targets.into_par_iter().try_for_each(|(i, target)| {
            let job = &jobs.tensors[i];
            let packed = ByteLayout::contiguous(&job.sizes, job.dtype.size()).proven()?;
            let zero = Dims::from_elem(0, job.sizes.len());
            let all = runs(&job.sizes, &job.layout, &job.offsets, &packed, &zero).proven()?;
            let one = all.count_runs() <= 1;
            match job.memory.bytes() {
                Some(bytes) if one => {
                    for Run { src, dst, len } in all {
                        let source = &bytes[src as usize..(src + len) as usize];
                        let target = &mut target[dst as usize..(dst + len) as usize];
                        split_for_copy(source, target, PART).into_par_iter().for_each(|(s, t)| t.copy_from_slice(s));
                    }
                    Ok(())
                }
                Some(bytes) => reshard_layout::copy_runs(bytes, target, all).proven(),
                None if one => all.into_iter().try_for_each(|Run { src, dst, len }| {
                    let parts = target[dst as usize..(dst + len) as usize].par_chunks_mut(PART).enumerate();
                    parts.try_for_each(|(i, part)| job.memory.read(src + (i * PART) as u64, part))
                }),
                None => {
                    let mut rest = target;
                    job.each_block(|block| {
                        let (now, after) = std::mem::take(&mut rest).split_at_mut(block.len());
                        now.copy_from_slice(block);
                        rest = after;
                    })
                }
            }
        })
    })??;
    let jobs = Jobs { tensors: staged, values: jobs.values.clone(), ends: jobs.ends.clone() };
    Ok((jobs, memory))
}

fn write_and_publish(
    group: &dyn Group,
    mut prepared: Prepared,
    staged: Result<Staged>,
    store: &dyn Store,
    options: &SaveOptions,
    pool: &StagingPool,
    before: Phases,
) -> Result<SaveReport> {
    let mut clock = PhaseClock::new();
    clock.enter("write");
    let workers = Workers::background();
    let written = staged.and_then(|staged| {
        let Staged { jobs, memory, writing, written } = staged;
        let result = writing.fill(&jobs, written..jobs.tensors.len(), &prepared, store, options, workers);
        drop(jobs);
        pool.give(memory);
        result
    });
    let outcome = finish::finish(group, &mut prepared, written, store, options, workers, &mut clock);
    let mut phases = before;
    phases.steps.extend(clock.finish().steps);
    finish::report(outcome, &prepared, phases, store)
}
