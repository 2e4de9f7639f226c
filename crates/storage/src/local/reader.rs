//! Positioned reads of a local file. Ranges that touch each other in the file become one `preadv`.

use std::fs::File;
use std::io::IoSliceMut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::direct::{self, DirectWindow};
use super::system;
use super::transfer::{MAX_PARTS, read_full, read_vectored};
use crate::store::check_range;
use crate::{Pass, RangeRead, Reader, Result};

#[derive(Debug)]
pub(super) struct LocalReader {
    path: String,
    file: File,
    direct: Option<File>,
    len: u64,
    /// For what is read once, opened when it is first wanted.
    once: OnceLock<Option<File>>,
    refused: AtomicBool,
}

/// Less than this is read through the page cache, which costs less than waiting for a disk at every read.
const LEAST_ONCE: u64 = 128 << 10;
/// What is in memory is lent in parts that a core's own cache has room for.
const LENT: u64 = 512 << 10;
/// Where there is no way past the page cache, what is read once is announced so many bytes ahead.
const ONCE_AHEAD: u64 = 16 << 20;
/// So far beyond its end a file has no page, whatever the size of a page.
const BEYOND_END: u64 = 1 << 20;

impl LocalReader {
    pub(super) fn new(path: String, file: File, direct: Option<File>, len: u64) -> LocalReader {
        LocalReader { path, file, direct, len, once: OnceLock::new(), refused: AtomicBool::new(false) }
    }

    /// The file past the page cache, where there is a way, and the next bytes of a pass are better read so.
    fn past_cache(&self, offset: u64, left: u64) -> Option<&File> {
        let direct = self.direct.as_ref().or_else(|| self.once())?;
        if left < LEAST_ONCE || self.refused.load(Ordering::Relaxed) {
            return None;
        }
        // The middle tells for all: files are read, and forgotten, in long stretches. A wrong guess costs time alone.
        let is_cached = || system::is_cached(&self.file, offset + left.min(LENT) / 2);
        (self.direct.is_some() || !is_cached()).then_some(direct)
    }

    /// The file past the page cache, where the system has a way and tells what is in the cache.
    fn once(&self) -> Option<&File> {
        let open = || {
            // Of files of other users the system says that all is, also what is beyond their end.
            let beyond = self.len.saturating_add(BEYOND_END);
            if system::is_cached(&self.file, beyond) { None } else { system::open_direct(&self.file) }
        };
        self.once.get_or_init(open).as_ref()
    }
}

impl Reader for LocalReader {
    fn path(&self) -> &str {
        &self.path
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        check_range(&self.path, offset, buf.len(), self.len)?;
        if let Some(direct) = &self.direct
            && direct::read(direct, offset, buf, &self.path, self.len)?
        {
            return Ok(());
        }
        read_full(&self.file, offset, buf, &self.path, self.len)
    }

    fn lend<'p>(&self, offset: u64, pass: &'p mut Pass) -> Result<&'p [u8]> {
        let left = pass.left(offset);
        check_range(&self.path, offset, left as usize, self.len)?;
        if pass.held(offset).is_empty()
            && let Some(direct) = self.past_cache(offset, left)
        {
            // Its memory goes back before other memory is taken.
            pass.window = None;
            match DirectWindow::read(direct, offset, pass.end(), &self.path, self.len)? {
                Some(window) => pass.window = Some(Box::new(window)),
                None => self.refused.store(true, Ordering::Relaxed),
            }
        }
        if pass.held(offset).is_empty() {
            if self.direct.is_none() && (self.once().is_none() || self.refused.load(Ordering::Relaxed)) {
                system::start_reading(&self.file, offset.saturating_add(ONCE_AHEAD), LENT);
            }
            return pass.fill(offset, LENT, |buf| self.read_at(offset, buf));
        }
        Ok(pass.held(offset))
    }

    fn is_in_memory(&self, offset: u64) -> bool {
        self.direct.is_none() && self.once().is_some() && system::is_cached(&self.file, offset)
    }

    fn read_ranges(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        let mut rest = ranges;
        while let Some(first) = rest.first() {
            // How many of the next ranges continue where the one before ended.
            let (start, mut end, mut count) = (first.offset, first.offset, 0);
            for range in rest.iter().take(MAX_PARTS) {
                if range.offset != end {
                    break;
                }
                check_range(&self.path, range.offset, range.buf.len(), self.len)?;
                end = range.offset + range.buf.len() as u64;
                count += 1;
            }
            let (group, others) = rest.split_at_mut(count);
            rest = others;
            match group {
                [only] => self.read_at(start, only.buf)?,
                group if self.direct.is_some() => {
                    for range in group {
                        self.read_at(range.offset, range.buf)?;
                    }
                }
                group => {
                    let mut bufs: Vec<_> = group.iter_mut().map(|range| IoSliceMut::new(range.buf)).collect();
                    read_vectored(&self.file, start, &mut bufs, &self.path, self.len)?;
                }
            }
        }
        Ok(())
    }

    fn will_read(&self, offset: u64, length: u64) {
        // What goes around the page cache finds nothing there.
        if self.direct.is_none() {
            system::start_reading(&self.file, offset, length);
        }
    }
}
