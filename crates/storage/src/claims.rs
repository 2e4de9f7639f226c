//! Roots that this process writes to, for stores that no lock of the operating system guards.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{PerProcess, Result, StorageError, WriteLock};

static CLAIMED: PerProcess<Mutex<HashSet<String>>> = PerProcess::new();

fn claimed() -> MutexGuard<'static, HashSet<String>> {
    CLAIMED.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

struct Claim(String);

impl Drop for Claim {
    fn drop(&mut self) {
        claimed().remove(&self.0);
    }
}

/// Claims what `name` stands for within this process; `shown` is for the message.
pub(crate) fn claim(name: String, shown: String) -> Result<WriteLock> {
    match claimed().insert(name.clone()) {
        true => Ok(WriteLock::new(Claim(name))),
        false => Err(StorageError::Busy { path: shown }),
    }
}
