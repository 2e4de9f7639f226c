//! A local file being written: straight from the caller's memory, by many threads at once.

use std::fs::File;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};

use super::root::Root;
use super::transfer::{retry, write_vectored};
use super::{direct, system};
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
    early_writeback: bool,
    /// How many bytes went to the page cache so far.
    cached: AtomicU64,
}

/// How much goes to the page cache between two starts of writing it back: small enough that a save of some ten megabytes
/// gains from it, large enough that starting costs nothing.
const WRITEBACK_STEP: u64 = 8 << 20;

/// The store's settings for its writers.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) preallocate: bool,
    pub(super) direct_io: bool,
    pub(super) early_writeback: bool,
}

impl LocalWriter {
    pub(super) fn new(root: &Root, relative: &str, file: File, options: &WriteOptions, how: How) -> Result<LocalWriter> {
        if let (true, Some(length)) = (how.preallocate, options.length) {
            system::reserve(&file, length).map_err(|error| root.error(Operation::Preallocate, relative, error))?;
        }
        let direct = if how.direct_io {
            let flags = OFlags::RDWR | system::DIRECT;
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
            early_writeback: how.early_writeback,
            cached: AtomicU64::new(0),
        })
    }
}

impl LocalWriter {
    /// Once per [`WRITEBACK_STEP`] bytes, by whichever thread crosses it.
    fn start_writeback(&self, length: u64) {
        if self.early_writeback {
            let before = self.cached.fetch_add(length, Ordering::Relaxed);
            if before / WRITEBACK_STEP != (before + length) / WRITEBACK_STEP {
                system::start_writeback(&self.file);
            }
        }
    }
}

impl Writer for LocalWriter {
    fn path(&self) -> &str {
        &self.path
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let end = offset.checked_add(total(parts)).filter(|end| i64::try_from(*end).is_ok());
        let Some(end) = end else {
            let source = io::ErrorKind::FileTooLarge.into();
            return Err(StorageError::from_io(Operation::Write, self.path.as_str(), source));
        };
        match &self.direct {
            Some(direct) => direct::write(direct, &self.file, offset, parts, &self.path)?,
            None => {
                write_vectored(&self.file, offset, parts, &self.path)?;
                self.start_writeback(end - offset);
            }
        }
        self.end.fetch_max(end, Ordering::Relaxed);
        Ok(())
    }

    fn finish(self: Box<Self>, sync: bool) -> Result<()> {
        let written = self.end.load(Ordering::Relaxed);
        if let Some(declared) = self.declared
            && declared != written
        {
            return Err(StorageError::WrongLength { path: self.path, declared, written });
        }
        if sync {
            // Never repeated after a failure: the kernel may have dropped the pages, and a second call would then
            // report success for data that is lost.
            retry(|| system::sync_data(&self.file)).map_err(|error| self.root.error(Operation::Finish, &self.relative, error))?;
        }
        Ok(())
    }

    fn abort(self: Box<Self>) {
        if let Err(error) = self.root.unlink(Operation::Abort, &self.relative) {
            tracing::warn!(path = %self.path, %error, "could not remove an unfinished file");
        }
    }
}
