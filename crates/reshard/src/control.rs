//! Watching and stopping work that runs for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Shared between whoever does the work and whoever watches it: a count of bytes, and a wish to stop.
#[derive(Debug, Clone, Default)]
pub struct Control {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    total: AtomicU64,
    done: AtomicU64,
    to_sync: AtomicU64,
    synced: AtomicU64,
    cancelled: AtomicBool,
}

/// What work is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Phase {
    /// Bytes are read or written.
    Moving,
    /// Bytes are made durable.
    Syncing,
    /// All bytes are where they belong: names are published.
    Finishing,
}

/// How far a whole job is: bytes that are moved, and again those that are synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// What the work is at.
    pub phase: Phase,
    /// Bytes moved and synced so far.
    pub done: u64,
    /// Bytes to move and to sync, as far as known; never less than `done`.
    pub total: u64,
}

impl Control {
    /// Nothing done, nothing to do.
    pub fn new() -> Control {
        Control::default()
    }

    /// Bytes to move in all, as far as known.
    pub fn total(&self) -> u64 {
        self.inner.total.load(Ordering::Relaxed)
    }

    /// Bytes moved so far.
    pub fn done(&self) -> u64 {
        self.inner.done.load(Ordering::Relaxed)
    }

    /// Bytes that have to be made durable after they were moved, as far as known.
    pub fn to_sync(&self) -> u64 {
        self.inner.to_sync.load(Ordering::Relaxed)
    }

    /// Bytes made durable so far.
    pub fn synced(&self) -> u64 {
        self.inner.synced.load(Ordering::Relaxed)
    }

    /// How far the whole job is. Bytes that have to be made durable count twice: what was moved is not yet safe.
    pub fn progress(&self) -> Progress {
        let (moved, synced) = (self.done(), self.synced());
        let (total, done) = (self.total() + self.to_sync(), moved + synced);
        let phase = match () {
            () if total == 0 || moved < self.total() => Phase::Moving,
            () if synced < self.to_sync() => Phase::Syncing,
            () => Phase::Finishing,
        };
        Progress { phase, done, total: total.max(done) }
    }

    /// Asks the work to stop at its next step.
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether stopping was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.inner.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, bytes: u64) {
        self.inner.done.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn expect_sync(&self, bytes: u64) {
        self.inner.to_sync.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn advance_sync(&self, bytes: u64) {
        self.inner.synced.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn check(&self, doing: &str) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled { doing: doing.into() }) } else { Ok(()) }
    }
}
