//! What a save or a load did, in numbers.

use std::time::{Duration, Instant};

use serde::Serialize;

/// How long each step took, in order.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Phases {
    /// Name and duration.
    pub steps: Vec<(&'static str, Duration)>,
}

impl Phases {
    /// All steps together.
    pub fn total(&self) -> Duration {
        self.steps.iter().map(|(_, time)| *time).sum()
    }
}

/// Measures phases one after the other, each also a tracing span.
pub(crate) struct PhaseClock {
    phases: Phases,
    current: Option<(&'static str, Instant, tracing::span::EnteredSpan)>,
}

impl PhaseClock {
    pub(crate) fn new() -> PhaseClock {
        PhaseClock { phases: Phases::default(), current: None }
    }

    pub(crate) fn enter(&mut self, name: &'static str) {
        self.leave();
        self.current = Some((name, Instant::now(), tracing::info_span!("phase", name).entered()));
    }

    fn leave(&mut self) {
        if let Some((name, start, span)) = self.current.take() {
            drop(span);
            self.phases.steps.push((name, start.elapsed()));
        }
    }

    pub(crate) fn finish(mut self) -> Phases {
        self.leave();
        std::mem::take(&mut self.phases)
    }
}

/// What a save did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct SaveReport {
    /// The address.
    pub path: String,
    /// The id under which it was published.
    pub save_id: String,
    /// Times on this rank.
    pub phases: Phases,
    /// Bytes of tensor data that this rank wrote.
    pub bytes: u64,
    /// Bytes of tensor data that all ranks wrote.
    pub total_bytes: u64,
    /// Records that this rank wrote.
    pub records: u64,
    /// Files of all ranks.
    pub files: u64,
    /// The most loaded rank's bytes over the mean; 1 when perfectly even.
    pub imbalance: f64,
    /// Whether the plan of an earlier save was used.
    pub plan_cached: bool,
    /// Leftovers that could not be removed after publishing, and why.
    pub warnings: Vec<String>,
}
