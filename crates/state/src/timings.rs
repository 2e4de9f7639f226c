//! How long each phase of a conversion took: what PyTorch logs from its profiler, as a value.

use std::time::{Duration, Instant};

/// A phase of turning optimizer state into another form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Names, ids and checks before anything is converted.
    Preprocess,
    /// Moving tensors between ranks.
    Gather,
    /// Working out which part goes where.
    Reshard,
    /// Laying members into flat tensors or taking them out.
    Flatten,
    /// Exchanging ids and names.
    Rekey,
}

/// Time per phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTimings {
    /// See [`Phase::Preprocess`].
    pub preprocess: Duration,
    /// See [`Phase::Gather`].
    pub gather: Duration,
    /// See [`Phase::Reshard`].
    pub reshard: Duration,
    /// See [`Phase::Flatten`].
    pub flatten: Duration,
    /// See [`Phase::Rekey`].
    pub rekey: Duration,
}

impl PhaseTimings {
    /// Runs `work` and adds its time to a phase.
    pub fn measure<R>(&mut self, phase: Phase, work: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = work();
        self.add(phase, begin.elapsed());
        result
    }

    /// Adds time that was measured elsewhere, such as by whoever moved the tensors.
    pub fn add(&mut self, phase: Phase, time: Duration) {
        let total = match phase {
            Phase::Preprocess => &mut self.preprocess,
            Phase::Gather => &mut self.gather,
            Phase::Reshard => &mut self.reshard,
            Phase::Flatten => &mut self.flatten,
            Phase::Rekey => &mut self.rekey,
        };
        *total += time;
    }

    /// The sum of all phases.
    pub fn total(&self) -> Duration {
        self.preprocess + self.gather + self.reshard + self.flatten + self.rekey
    }
}
