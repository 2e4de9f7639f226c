//! What a save or a load did, in numbers.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

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

    /// How long the last phase took that has ended.
    pub(crate) fn last(&self) -> Duration {
        self.phases.steps.last().map_or(Duration::ZERO, |(_, time)| *time)
    }

    pub(crate) fn finish(mut self) -> Phases {
        self.leave();
        std::mem::take(&mut self.phases)
    }
}

/// The rank that the others waited for: the one whose own work, without any waiting, took longest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Slowest {
    /// Its number.
    pub rank: usize,
    /// What it was busy with most of that time.
    pub phase: String,
    /// How long it worked, in seconds.
    pub seconds: f64,
}

impl Slowest {
    /// Of what all ranks say of their work: phases and seconds.
    pub(crate) fn of(ranks: &[Vec<(&str, f64)>]) -> Option<Slowest> {
        let work = |phases: &Vec<(&str, f64)>| phases.iter().map(|(_, seconds)| seconds).sum::<f64>();
        let (rank, phases) = ranks.iter().enumerate().max_by(|(_, a), (_, b)| work(a).total_cmp(&work(b)))?;
        let (phase, _) = phases.iter().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        Some(Slowest { rank, phase: (*phase).to_owned(), seconds: work(phases) })
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
    /// The rank that took longest to write and sync its part.
    pub slowest: Option<Slowest>,
    /// Leftovers that could not be removed after publishing, and why.
    pub warnings: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_is_the_one_that_worked_longest_and_its_phase_the_longest_of_its_own() {
        let ranks =
            [vec![("write", 1.0), ("sync", 2.0)], vec![("write", 3.0), ("sync", 0.5)], vec![("write", 0.0), ("sync", 3.2)]];
        let slowest = Slowest { rank: 1, phase: "write".into(), seconds: 3.5 };
        assert_eq!(Slowest::of(&ranks), Some(slowest));
        assert_eq!(Slowest::of(&[]), None);
    }
}
