//! Roots that this process writes to, for stores that no lock of the operating system guards.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::{Result, StorageError, WriteLock};

static CLAIMED: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

struct Claim(String);

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Claims what `name` stands for within this process; `shown` is for the message.
pub(crate) fn claim(name: String, shown: String) -> Result<WriteLock> {
    match CLAIMED.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
        true => Ok(WriteLock::new(Claim(name))),
        false => Err(StorageError::Busy { path: shown }),
    }
}
