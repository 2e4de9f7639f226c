//! Faults on purpose: a wrapper around any store that counts every operation and makes chosen ones fail, stop short,
//! wait, corrupt a bit, or stop the world as a crash would, with or without what a power failure loses.
//!
//! ```
//! use std::sync::Arc;
//! use reshard_storage::faulty::Faults;
//! use reshard_storage::memory::MemoryStore;
//! use reshard_storage::{Publish, Store};
//!
//! // A first run only counts; then one run per step, each stopped there.
//! let save = |store: &dyn Store| store.publish("a", b"1", Publish::Create);
//! let counting = Faults::new();
//! save(&*counting.wrap(Arc::new(MemoryStore::new())))?;
//! for step in 0..counting.steps() {
//!     let store = Arc::new(MemoryStore::new());
//!     assert!(save(&*Faults::crash_at(step).wrap(store.clone())).is_err());
//!     assert!(store.list("")?.is_empty());
//! }
//! # Ok::<(), reshard_storage::StorageError>(())
//! ```

mod loss;
mod store;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::{Operation, Result, StorageError, Store};
use loss::Tracker;
use store::Faulty;

/// What Unix calls a failing device, and one that is full.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

pub use loss::Loss;

/// One counted operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Counted from 0 over all stores that share the faults.
    pub number: u64,
    /// What was about to be done.
    pub operation: Operation,
    /// To what, relative to its store's root (empty for the root).
    pub path: String,
    /// How many bytes it wrote or read, where that is known before.
    pub bytes: u64,
}

/// Which operations a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// The step of this number.
    Step(u64),
    /// The `nth` (from 0) of the steps that do this to a path with this text in it.
    Nth {
        /// Which operation; any, if `None`.
        operation: Option<Operation>,
        /// Part of the path; `""` for any.
        path: String,
        /// Which of them, from 0.
        nth: u64,
    },
    /// Every step.
    Always,
}

/// An error to fail with. It is what the real thing would look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// `EIO`: the device failed.
    Device,
    /// `ENOSPC`: the disk is full.
    NoSpace,
    /// [`StorageError::Injected`], which no real backend gives.
    Marked,
}

/// What happens at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It fails, and nothing is done.
    Fail(Failure),
    /// It is done, and fails all the same: the answer got lost.
    FailLate(Failure),
    /// The first half of the bytes is written, then it fails. (Where no bytes are written: it fails.)
    ShortWrite,
    /// The first half of the bytes is written, and success is reported.
    LostWrite,
    /// It takes so much longer.
    Delay(Duration),
    /// The world stops before it: this and every later operation fails with [`StorageError::Crashed`].
    Crash,
    /// The world stops in the middle of it: half of the bytes are written.
    CrashInside,
    /// The bit of this number (modulo the number of bits) is flipped in what is written or read.
    FlipBit(u64),
}

/// A fault and when it happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// When.
    pub when: When,
    /// What.
    pub fault: Fault,
}

/// Faults shared by any number of wrapped stores: one step counter, one log, one crash.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    tracker: Mutex<Tracker>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<(Rule, u64)>,
    log: Vec<Step>,
    crashed: Option<u64>,
    only_mutating: bool,
    loss: Loss,
}

/// What to do at one step, besides the operation itself.
#[derive(Debug, Default)]
struct Decision {
    number: u64,
    late: Option<Failure>,
    half: Option<Half>,
    flip: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Fail,
    Pretend,
    Crash,
}

impl Faults {
    /// No faults yet: operations are counted and logged.
    pub fn new() -> Faults {
        Faults::default()
    }

    /// One fault, at one step.
    pub fn at(step: u64, fault: Fault) -> Faults {
        let faults = Faults::new();
        faults.add(Rule { when: When::Step(step), fault });
        faults
    }

    /// A crash before one step.
    pub fn crash_at(step: u64) -> Faults {
        Faults::at(step, Fault::Crash)
    }

    /// A failure at one step.
    pub fn fail_at(step: u64, failure: Failure) -> Faults {
        Faults::at(step, Fault::Fail(failure))
    }

    /// Adds a rule.
    pub fn add(&self, rule: Rule) {
        self.state().rules.push((rule, 0));
    }

    /// What a crash loses; [`Loss::Nothing`] unless told.
    pub fn losing(self, loss: Loss) -> Faults {
        self.state().loss = loss;
        self
    }

    /// Counts only what changes the store. (After a crash, reads fail too.)
    pub fn only_mutating(self) -> Faults {
        self.state().only_mutating = true;
        self
    }

    /// The store, with these faults.
    pub fn wrap(&self, store: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(Faulty::new(store, self.clone()))
    }

    /// How many steps have been counted.
    pub fn steps(&self) -> u64 {
        self.state().log.len() as u64
    }

    /// Every step so far.
    pub fn log(&self) -> Vec<Step> {
        self.state().log.clone()
    }

    /// The step of the crash, once it happened.
    pub fn crashed(&self) -> Option<u64> {
        self.state().crashed
    }

    /// Stops the world now.
    pub fn crash(&self) {
        let step = self.steps();
        self.stop_at(step);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tracker(&self) -> std::sync::MutexGuard<'_, Tracker> {
        self.0.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop_at(&self, step: u64) {
        let loss = {
            let mut state = self.state();
            if state.crashed.is_some() {
                return;
            }
            state.crashed = Some(step);
            state.loss
        };
        self.tracker().lose(loss);
    }

    /// Fails if the world has stopped.
    fn check_alive(&self, operation: Operation, path: &str) -> Result<()> {
        match self.crashed() {
            Some(step) => Err(StorageError::Crashed { path: path.to_owned(), operation, step }),
            None => Ok(()),
        }
    }

    /// Counts a step and says what is to happen; an error is what happens.
    fn decide(&self, operation: Operation, path: &str, bytes: u64) -> Result<Decision> {
        self.check_alive(operation, path)?;
        let (number, due) = {
            let mut state = self.state();
            if state.only_mutating && !operation.is_mutating() {
                return Ok(Decision::default());
            }
            let number = state.log.len() as u64;
            state.log.push(Step { number, operation, path: path.to_owned(), bytes });
            (number, due(&mut state.rules, number, operation, path))
        };
        let mut decision = Decision { number, ..Decision::default() };
        for fault in due {
            match fault {
                Fault::Delay(time) => std::thread::sleep(time),
                Fault::Fail(failure) => return Err(failure.error(operation, path, number)),
                Fault::FailLate(failure) => decision.late = Some(failure),
                Fault::ShortWrite => decision.half = Some(Half::Fail),
                Fault::LostWrite => decision.half = Some(Half::Pretend),
                Fault::CrashInside if operation == Operation::Write => decision.half = Some(Half::Crash),
                Fault::Crash | Fault::CrashInside => {
                    self.stop_at(number);
                    return Err(StorageError::Crashed { path: path.to_owned(), operation, step: number });
                }
                Fault::FlipBit(bit) => decision.flip = Some(bit),
            }
        }
        Ok(decision)
    }

    /// One operation that neither writes nor reads bytes of its own.
    fn run<T>(&self, operation: Operation, path: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let decision = self.decide(operation, path, 0)?;
        if decision.half == Some(Half::Fail) {
            return Err(short_write(operation, path));
        }
        let done = work()?;
        self.settle(&decision, operation, path)?;
        Ok(done)
    }

    /// After an operation: whether its caller may learn that it was done.
    fn settle(&self, decision: &Decision, operation: Operation, path: &str) -> Result<()> {
        self.check_alive(operation, path)?;
        match decision.late {
            Some(failure) => Err(failure.error(operation, path, decision.number)),
            None => Ok(()),
        }
    }
}

/// The faults whose rules match this step.
fn due(rules: &mut [(Rule, u64)], number: u64, operation: Operation, path: &str) -> Vec<Fault> {
    let mut due = Vec::new();
    for (rule, hits) in rules {
        let matches = match &rule.when {
            When::Always => true,
            When::Step(step) => *step == number,
            When::Nth { operation: wanted, path: part, nth } => {
                let hit = wanted.is_none_or(|wanted| wanted == operation) && path.contains(part.as_str());
                *hits += u64::from(hit);
                hit && *hits == nth + 1
            }
        };
        if matches {
            due.push(rule.fault);
        }
    }
    due
}

impl Failure {
    fn error(self, operation: Operation, path: &str, step: u64) -> StorageError {
        let real = |code: i32| StorageError::from_io(operation, path, io::Error::from_raw_os_error(code));
        match self {
            Failure::Device => real(EIO),
            Failure::NoSpace => real(ENOSPC),
            Failure::Marked => StorageError::Injected { path: path.to_owned(), operation, step },
        }
    }
}

fn short_write(operation: Operation, path: &str) -> StorageError {
    StorageError::from_io(operation, path, io::ErrorKind::WriteZero.into())
}

/// Flips one bit, counted modulo the number of bits.
fn flip(bytes: &mut [u8], bit: u64) {
    if !bytes.is_empty() {
        let bit = bit % (bytes.len() as u64 * 8);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}
