//! One writer at a time: a lock on the root folder itself, which leaves no file behind and ends with the process.

use std::os::fd::OwnedFd;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::root::Root;
use super::transfer::retry;
use crate::claims::claim;
use crate::{Operation, Result, StorageError, WriteLock};

/// A locked folder.
struct Locked(OwnedFd);

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing is not enough: a process forked meanwhile has the folder open too, and would keep the lock.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Claims the root. Network file systems keep such locks on this machine alone, or have none: then the claim is this process's.
pub(super) fn lock(root: &Root) -> Result<WriteLock> {
    let shown = root.shown("");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let locked = retry(|| rustix::fs::open(root.path(), flags, Mode::empty()))
        .and_then(|folder| retry(|| rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive)).map(|()| folder));
    match locked {
        Ok(folder) => Ok(WriteLock::new(Locked(folder))),
        Err(Errno::WOULDBLOCK) => Err(StorageError::Busy { path: shown }),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK | Errno::INVAL | Errno::BADF | Errno::ACCESS) => {
            let path = std::fs::canonicalize(root.path()).unwrap_or_else(|_| root.path().to_owned());
            claim(path.display().to_string(), shown)
        }
        Err(error) => Err(root.error(Operation::Lock, "", error)),
    }
}
