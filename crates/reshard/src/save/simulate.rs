//! A save's coordination without the save: what planning costs for many ranks, measured in one process.

use std::time::{Duration, Instant};

use super::SaveOptions;
use super::finish::offline_metadata;
use super::prepare::{offline_parts, offline_plan};
use crate::error::Result;
use crate::leaf::SaveState;

/// What coordinating a save of many ranks costs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SimulatedPlan {
    /// Each rank's own part, the slowest rank.
    pub local: Duration,
    /// Bytes that the planning rank receives, the first time and when plans are cached.
    pub received: u64,
    /// See `received`.
    pub received_cached: u64,
    /// The planning rank: decode, assign, answer.
    pub global: Duration,
    /// The planning rank: assemble and encode `.metadata` and the sidecar.
    pub commit: Duration,
    /// Records to be written.
    pub records: u64,
    /// The size of `.metadata`.
    pub metadata_bytes: u64,
    /// The most loaded rank's bytes over the mean.
    pub imbalance: f64,
}

/// Plans a save of these ranks' states, everything but the writing and the network.
pub fn simulate_plan(states: &[SaveState<'_>], options: &SaveOptions) -> Result<SimulatedPlan> {
    let mut local = Duration::ZERO;
    let mut parts = Vec::with_capacity(states.len());
    let mut first_table = None;
    let mut received_cached = 0;
    for (rank, state) in states.iter().enumerate() {
        let start = Instant::now();
        let (hello, part, table_hash) = offline_parts(state, rank, first_table)?;
        local = local.max(start.elapsed());
        first_table.get_or_insert(table_hash);
        received_cached += hello;
        parts.push(part);
    }
    let received = parts.iter().map(|p| p.len() as u64).sum::<u64>() + received_cached;
    let start = Instant::now();
    let plan = offline_plan(&parts, options)?;
    let global = start.elapsed();
    let start = Instant::now();
    let metadata_bytes = offline_metadata(&plan, options)?;
    let commit = start.elapsed();
    let records = plan.assigned.iter().map(|a| a.len() as u64).sum();
    let total: u64 = plan.loads.iter().sum();
    let most = plan.loads.iter().copied().max().unwrap_or(0) as f64;
    let imbalance = if total > 0 { most * plan.loads.len() as f64 / total as f64 } else { 1.0 };
    Ok(SimulatedPlan { local, received, received_cached, global, commit, records, metadata_bytes, imbalance })
}
