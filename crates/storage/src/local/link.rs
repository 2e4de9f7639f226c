//! A second name for the same bytes, or a copy that the file system makes by itself.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD};
use rustix::io::Errno;

use super::root::Root;
use super::system;
use super::transfer::retry;
use crate::path::split;
use crate::{Linked, Operation, Result, StorageError, check_relative};

/// Hard link, else reflink, else `copy_file_range`; `None` if the file system can do none of them.
pub(super) fn link_or_clone(root: &Root, from: &Path, to: &str) -> Result<Option<Linked>> {
    check_relative(to)?;
    let source_failed = |error: io::Error| StorageError::from_io(Operation::Link, from.display().to_string(), error);
    let source = File::open(from).map_err(source_failed)?;
    let (folder, name) = split(to);
    let folder = root.folder(Operation::Link, folder, true)?;
    // A link to a symbolic link would be one more symbolic link.
    match rustix::fs::linkat(CWD, from, &folder, name, AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => {
            // The bytes may be fresh; a link promises as much as a copy does.
            retry(|| system::sync_data(&source)).map_err(|error| source_failed(error.into()))?;
            return Ok(Some(Linked::HardLink));
        }
        // Another file system, too many links, or a file system (or a rule of the kernel) that has none.
        Err(Errno::XDEV | Errno::MLINK | Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::ACCESS) => {}
        Err(error) => return Err(root.error(Operation::Link, to, error)),
    }
    let target = root.create(Operation::Link, to)?;
    let cloned = system::clone(&source, &target).and_then(|cloned| {
        if cloned {
            retry(|| system::sync_data(&target))?;
        }
        Ok(cloned)
    });
    if !matches!(cloned, Ok(true)) {
        // The caller copies by hand, into a new file; or fails, and the first error counts.
        let _ = root.unlink(Operation::Link, to);
    }
    match cloned {
        Ok(cloned) => Ok(cloned.then_some(Linked::ServerCopy)),
        Err(error) => Err(root.error(Operation::Link, to, error)),
    }
}
