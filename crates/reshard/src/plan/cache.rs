//! Plans kept between saves of the same layout.

use std::sync::{Arc, Mutex, PoisonError};

use super::global::{Assigned, GlobalPlan};

/// Keeps the plan of the last save, so that the next save of the same layout exchanges almost nothing. Share one between
/// the saves of one training run, on each rank. A save that fails empties it.
#[derive(Debug, Default)]
pub struct PlanCache {
    kept: Mutex<Option<Arc<CachedPlan>>>,
}

#[derive(Debug)]
pub(crate) struct CachedPlan {
    /// The hash of this rank's own part.
    pub(crate) local_hash: u128,
    /// The hash over all ranks' parts: equal on all ranks that took part.
    pub(crate) id: u128,
    /// The option under which it was made that changes who writes what.
    pub(crate) split_above: u64,
    /// What this rank was told to write; the planning rank has it in the whole plan.
    pub(crate) told: Vec<Assigned>,
    /// On the planning rank: all of it, and every rank's hash.
    pub(crate) global: Option<(Vec<u128>, Arc<GlobalPlan>)>,
}

impl CachedPlan {
    /// What this rank writes.
    pub(crate) fn assigned(&self) -> &[Assigned] {
        match &self.global {
            Some((_, global)) => global.assigned.first().map_or(&[], Vec::as_slice),
            None => &self.told,
        }
    }
}

impl PlanCache {
    /// An empty cache.
    pub fn new() -> PlanCache {
        PlanCache::default()
    }

    pub(crate) fn get(&self, local_hash: u128, split_above: u64) -> Option<Arc<CachedPlan>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.as_ref().filter(|plan| plan.local_hash == local_hash && plan.split_above == split_above).cloned()
    }

    pub(crate) fn put(&self, plan: Arc<CachedPlan>) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(plan);
    }

    /// Forgets the plan.
    pub fn clear(&self) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
