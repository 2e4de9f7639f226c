//! Memory that asynchronous saves copy the state into, kept and reused from one save to the next.

use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use crate::error::{Error, Result};

/// Reused staging memory: one stretch as large as the largest save so far needed, within a budget.
#[derive(Debug)]
pub struct StagingPool {
    budget: u64,
    free: Mutex<Option<MmapMut>>,
}

impl StagingPool {
    /// A pool that never holds more than `budget` bytes.
    pub fn new(budget: u64) -> StagingPool {
        StagingPool { budget, free: Mutex::default() }
    }

    /// The most it may hold.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Allocates and touches memory for a save of `bytes` ahead of time, so that the first save is as fast as the others.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let mut memory = self.take(bytes.min(self.budget))?;
        // A page exists once it was written.
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
        self.give(memory);
        Ok(())
    }

    /// Memory of at least `bytes`, which must be within the budget.
    pub(crate) fn take(&self, bytes: u64) -> Result<MmapMut> {
        let mut free = self.lock();
        if let Some(memory) = free.take_if(|memory| memory.len() as u64 >= bytes) {
            return Ok(memory);
        }
        // Too small: let go of it before making a larger one, so that both never exist at once.
        *free = None;
        let length = usize::try_from(bytes.max(1)).map_err(|_| Error::exhausted("the state does not fit into memory"))?;
        let memory = MmapMut::map_anon(length).map_err(|e| Error::exhausted(format!("no memory to stage {bytes} bytes: {e}")))?;
        // Fewer page faults where the system has huge pages; without them it is merely slower once.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Ok(memory)
    }

    /// Gives memory back for the next save.
    pub(crate) fn give(&self, memory: MmapMut) {
        *self.lock() = Some(memory);
    }

    fn lock(&self) -> MutexGuard<'_, Option<MmapMut>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
