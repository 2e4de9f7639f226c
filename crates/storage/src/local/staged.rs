//! The one place that owns stage → write → sync → rename. (The sync of the folder follows in the store, which knows
//! every folder that changed.)

use std::io::IoSlice;

use rustix::fs::{AtFlags, Mode, RenameFlags};
use rustix::io::Errno;

use super::root::Root;
use super::system;
use super::transfer::{retry, write_vectored};
use crate::path::{split, staged_name};
use crate::{Operation, Publish, PublishObserver, Result, StorageError, Version, check_relative};

/// Puts `bytes` at `path` so that a reader sees what was there before, or all of them, whatever stops this and wherever.
///
/// 1. A fresh file beside `path` (same folder, so the same file system), whose name [`crate::is_staged`] knows.
/// 2. All bytes are written to it.
/// 3. It is synced, *before* it gets its name: else a crash could leave the name on an empty file.
/// 4. It is renamed to `path`: with [`Publish::Create`] only if nothing is there, decided by the kernel.
/// 5. The caller syncs the folder; until then a crash may bring back the old state, whole.
///
/// After a failure the staged file is removed; after a crash it stays, and the next sweep removes it.
pub(super) fn publish(root: &Root, path: &str, bytes: &[u8], mode: &Publish, observer: &dyn PublishObserver) -> Result<()> {
    check_relative(path)?;
    let staged = staged_name(path);
    observer.before(Operation::Stage, &staged)?;
    let file = root.create(Operation::Stage, &staged)?;
    let done = (|| {
        observer.before(Operation::WriteStaged, &staged)?;
        write_vectored(&file, 0, &[IoSlice::new(bytes)], &root.shown(&staged))?;
        observer.before(Operation::SyncStaged, &staged)?;
        retry(|| system::sync_all(&file)).map_err(|error| root.error(Operation::SyncStaged, &staged, error))?;
        observer.before(Operation::Publish, path)?;
        rename(root, &staged, path, mode)
    })();
    if let Err(error) = &done
        && !error.is_crash()
    {
        // The first error is the one that counts; a leftover is swept later.
        let _ = root.unlink(Operation::Stage, &staged);
    }
    done
}

/// Which content a file has: by its inode, size and time of change. (The time of the inode's own change would differ after
/// someone made a second name for it.)
pub(super) fn version(root: &Root, path: &str) -> Result<Option<Version>> {
    let fd = match root.open(Operation::Size, path, system::PATH, Mode::empty()) {
        Ok(fd) => fd,
        Err(StorageError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let stat = rustix::fs::fstat(&fd).map_err(|error| root.error(Operation::Size, path, error))?;
    let tag = format!("{}-{}-{}.{:09}", stat.st_ino, stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
    Ok(Some(Version::new(tag)))
}

/// Gives a file another name in one step.
pub(super) fn rename(root: &Root, from: &str, path: &str, mode: &Publish) -> Result<()> {
    let operation = Operation::Publish;
    check_relative(from)?;
    check_relative(path)?;
    let (from_folder, from_name) = split(from);
    let (folder, name) = split(path);
    let from_folder = root.folder(operation, from_folder, false)?;
    let folder = root.folder(operation, folder, false)?;
    let renamed = match mode {
        Publish::Replace => rustix::fs::renameat(&from_folder, from_name, &folder, name),
        Publish::Update(seen) => {
            if version(root, path)?.as_ref() != Some(seen) {
                return Err(StorageError::Changed { path: root.shown(path), operation });
            }
            rustix::fs::renameat(&from_folder, from_name, &folder, name)
        }
        Publish::Create => {
            match rustix::fs::renameat_with(&from_folder, from_name, &folder, name, RenameFlags::NOREPLACE) {
                // File systems without the flag (NFS among them) can make a second name, and that fails if it is taken.
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    rustix::fs::linkat(&from_folder, from_name, &folder, name, AtFlags::empty())
                        .and_then(|()| super::unlink_at(&from_folder, from_name))
                }
                done => done,
            }
        }
    };
    renamed.map_err(|error| root.error(operation, path, error))
}
