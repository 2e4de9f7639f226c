//! Positioned reads of a local file. Ranges that touch each other in the file become one `preadv`.

use std::fs::File;
use std::io::IoSliceMut;

use super::direct;
use super::system;
use super::transfer::{MAX_PARTS, read_full, read_vectored};
use crate::store::check_range;
use crate::{RangeRead, Reader, Result};

#[derive(Debug)]
pub(super) struct LocalReader {
    path: String,
    file: File,
    direct: Option<File>,
    len: u64,
}

impl LocalReader {
    pub(super) fn new(path: String, file: File, direct: Option<File>, len: u64) -> LocalReader {
        LocalReader { path, file, direct, len }
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
