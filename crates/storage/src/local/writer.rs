//! A local file being written: straight from the caller's memory, by many threads at once.

use std::fs::File;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::direct;
use super::root::Root;
use super::transfer::{retry, write_vectored};
use crate::store::total;
use crate::{Operation, Result, StorageError, WriteOptions, Writer};

#[derive(Debug)]
pub(super) struct LocalWriter {
    root: Root,
    relative: String,
    path: String,
    file: File,
    direct: Option<File>,
    declared: Option<u64>,
    /// One past the last byte written so far.
    end: AtomicU64,
}

impl LocalWriter {
    pub(super) fn new(
        root: &Root,
        relative: &str,
        file: File,
        options: &WriteOptions,
        preallocate: bool,
        direct_io: bool,
    ) -> Result<LocalWriter> {
        if let (true, Some(length)) = (preallocate, options.length) {
            reserve(&file, length)
                .map_err(|error| root.error(Operation::Preallocate, relative, error))?;
        }
        let direct = if direct_io {
            let flags = OFlags::RDWR | OFlags::DIRECT;
            direct::or_refused(root.open(Operation::Create, relative, flags, Mode::empty()))?
        } else {
            None
        };
        Ok(LocalWriter {
            root: root.clone(),
            relative: relative.to_owned(),
            path: root.shown(relative),
            file,
            direct: direct.map(File::from),
            declared: options.length,
            end: AtomicU64::new(0),
        })
    }
}

/// Takes the space now, so that a full disk is noticed before hours of writing, and so that the file is not scattered.
fn reserve(file: &File, length: u64) -> rustix::io::Result<()> {
    if length == 0 {
        return Ok(());
    }
    match retry(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)) {
        // Not every file system can; the writes then allocate as they come.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(error),
    }
}

impl Writer for LocalWriter {
    fn path(&self) -> &str {
        &self.path
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let end = offset
            .checked_add(total(parts))
            .filter(|end| i64::try_from(*end).is_ok());
        let Some(end) = end else {
            let source = io::ErrorKind::FileTooLarge.into();
            return Err(StorageError::from_io(
                Operation::Write,
                self.path.as_str(),
                source,
            ));
        };
        match &self.direct {
            Some(direct) => direct::write(direct, &self.file, offset, parts, &self.path)?,
            None => write_vectored(&self.file, offset, parts, &self.path)?,
        }
        self.end.fetch_max(end, Ordering::Relaxed);
        Ok(())
    }

    fn finish(self: Box<Self>, sync: bool) -> Result<()> {
        let written = self.end.load(Ordering::Relaxed);
        if let Some(declared) = self.declared
            && declared != written
        {
            return Err(StorageError::WrongLength {
                path: self.path,
                declared,
                written,
            });
        }
        if sync {
            // Never repeated after a failure: the kernel may have dropped the pages, and a second call would then
            // report success for data that is lost.
            retry(|| rustix::fs::fdatasync(&self.file))
                .map_err(|error| self.root.error(Operation::Finish, &self.relative, error))?;
        }
        Ok(())
    }

    fn abort(self: Box<Self>) {
        if let Err(error) = self.root.unlink(Operation::Abort, &self.relative) {
            tracing::warn!(path = %self.path, %error, "could not remove an unfinished file");
        }
    }
}
