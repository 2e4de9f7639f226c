//! Direct I/O: whole blocks bypass the page cache, through aligned buffers of a small pool where the caller's memory
//! is not aligned itself. The unaligned ends of a write go through the page cache: a block is either covered by one
//! write or shared by several, so the two ways never meet in one block.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::system;
use super::transfer::{retry, write_full};
use crate::store::Window;
use crate::{Operation, PerProcess, Result, StorageError};

/// Offsets, lengths and memory addresses of direct I/O are multiples of this.
pub const DIRECT_ALIGNMENT: usize = 4096;

const ALIGNMENT: u64 = DIRECT_ALIGNMENT as u64;
const BUFFER: usize = 4 << 20;
/// Buffers start where a large page could: a request to a disk has room for a few hundred addresses, so that one into memory of small
/// pages is cut into many small ones.
const LARGE_PAGE: usize = 2 << 20;
/// How many idle buffers are kept.
const POOL: usize = 8;

static IDLE: PerProcess<Mutex<Vec<Aligned>>> = PerProcess::new();

fn idle() -> MutexGuard<'static, Vec<Aligned>> {
    IDLE.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer whose used part starts at a multiple of [`LARGE_PAGE`], and so of [`DIRECT_ALIGNMENT`].
#[derive(Debug)]
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new() -> Aligned {
        let bytes = vec![0; BUFFER + LARGE_PAGE];
        let start = bytes.as_ptr().align_offset(LARGE_PAGE).min(LARGE_PAGE);
        let mut buffer = Aligned { bytes, start };
        system::prefer_large_pages(buffer.get_mut());
        buffer
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + BUFFER]
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.start..self.start + BUFFER]
    }
}

/// Lends a buffer of the pool to `work`.
fn with_buffer<T>(work: impl FnOnce(&mut [u8]) -> T) -> T {
    let kept = idle().pop();
    let mut buffer = kept.unwrap_or_else(Aligned::new);
    let done = work(buffer.get_mut());
    give_back(Some(buffer));
    done
}

fn give_back(buffer: Option<Aligned>) {
    let mut pool = idle();
    if pool.len() < POOL {
        pool.extend(buffer);
    }
}

/// Turns the refusal of a file system to open for direct I/O into `None`.
pub(super) fn or_refused(opened: Result<OwnedFd>) -> Result<Option<OwnedFd>> {
    match opened {
        Ok(fd) => Ok(Some(fd)),
        Err(StorageError::Io { source, .. }) if refuses(source.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

fn refuses(code: Option<i32>) -> bool {
    [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS].iter().any(|errno| code == Some(errno.raw_os_error()))
}

fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(DIRECT_ALIGNMENT)
}

/// Fills `buf` without the page cache; `false` if the file system refuses, and the caller reads another way.
pub(super) fn read(file: &File, offset: u64, buf: &mut [u8], path: &str, size: u64) -> Result<bool> {
    let (mut offset, mut buf) = (offset, buf);
    while !buf.is_empty() {
        let skip = offset % ALIGNMENT;
        let whole = buf.len() - buf.len() % DIRECT_ALIGNMENT;
        let count = if skip == 0 && whole > 0 && is_aligned(buf) {
            retry(|| rustix::io::pread(file, &mut buf[..whole], offset))
        } else {
            with_buffer(|buffer| {
                let wanted = buf.len().saturating_add(skip as usize).min(BUFFER);
                let wanted = wanted.next_multiple_of(DIRECT_ALIGNMENT);
                let count = retry(|| rustix::io::pread(file, &mut buffer[..wanted], offset - skip))?;
                let usable = count.saturating_sub(skip as usize).min(buf.len());
                buf[..usable].copy_from_slice(&buffer[skip as usize..skip as usize + usable]);
                Ok(usable)
            })
        };
        match count {
            Ok(0) => return Err(short(file, offset, buf.len(), path, size)),
            Ok(count) => {
                buf = &mut buf[count..];
                offset += count as u64;
            }
            Err(error) if refuses(Some(error.raw_os_error())) => return Ok(false),
            Err(error) => {
                return Err(StorageError::from_io(Operation::Read, path, io::Error::from(error)));
            }
        }
    }
    Ok(true)
}

/// What was read of a file at once. A disk answers so many requests a second, whatever their size up to a limit: a window is as large
/// as one can be, and none is made for a few bytes at an end.
#[derive(Debug)]
pub(super) struct DirectWindow {
    buffer: Option<Aligned>,
    /// Where in the file it starts.
    start: u64,
    length: usize,
}

impl DirectWindow {
    /// Reads what comes next in a pass that ends at `end`, without the page cache; `None` if the file system refuses, and the caller
    /// reads another way.
    pub(super) fn read(file: &File, offset: u64, end: u64, path: &str, size: u64) -> Result<Option<DirectWindow>> {
        let start = offset - offset % ALIGNMENT;
        let left = end.saturating_sub(start);
        // As few as can be, and those of one size.
        let wanted = left.div_ceil(left.div_ceil(BUFFER as u64).max(1)).next_multiple_of(ALIGNMENT);
        let kept = idle().pop();
        let mut window = DirectWindow { buffer: None, start, length: 0 };
        let buffer = window.buffer.insert(kept.unwrap_or_else(Aligned::new));
        match retry(|| rustix::io::pread(file, &mut buffer.get_mut()[..wanted as usize], start)) {
            Ok(count) => window.length = count,
            Err(error) if refuses(Some(error.raw_os_error())) => return Ok(None),
            Err(error) => return Err(StorageError::from_io(Operation::Read, path, io::Error::from(error))),
        }
        match window.held(offset, end) {
            [] => Err(short(file, offset, end.saturating_sub(offset) as usize, path, size)),
            _ => Ok(Some(window)),
        }
    }
}

impl Window for DirectWindow {
    fn held(&self, offset: u64, end: u64) -> &[u8] {
        let held = self.buffer.as_ref().map_or(&[][..], |buffer| &buffer.get()[..self.length]);
        let Some(from) = offset.checked_sub(self.start).filter(|from| *from < held.len() as u64) else { return &[] };
        let to = end.saturating_sub(self.start).clamp(from, held.len() as u64);
        &held[from as usize..to as usize]
    }
}

impl Drop for DirectWindow {
    fn drop(&mut self) {
        give_back(self.buffer.take());
    }
}

/// The file ends before.
fn short(file: &File, offset: u64, length: usize, path: &str, size: u64) -> StorageError {
    let size = file.metadata().map_or(size, |metadata| metadata.len());
    StorageError::OutOfRange { path: path.to_owned(), offset, length: length as u64, size }
}

/// Writes all parts from `offset`: whole blocks by `direct`, the rest (and everything, if the file system refuses)
/// by `cached`, which is the same file.
pub(super) fn write(direct: &File, cached: &File, offset: u64, parts: &[IoSlice<'_>], path: &str) -> Result<()> {
    let mut source = Parts { parts, part: 0, at: 0, left: crate::store::total(parts) };
    let mut offset = offset;
    // Up to the first block boundary.
    let head = ((ALIGNMENT - offset % ALIGNMENT) % ALIGNMENT).min(source.left);
    offset = write_cached(cached, offset, &mut source, head, path)?;
    while source.left >= ALIGNMENT {
        let here = source.contiguous();
        let whole = here.len() - here.len() % DIRECT_ALIGNMENT;
        if whole > 0 && is_aligned(here) {
            write_blocks(direct, cached, offset, &here[..whole], path)?;
            source.skip(whole);
            offset += whole as u64;
            continue;
        }
        offset += with_buffer(|buffer| {
            let length = (source.left - source.left % ALIGNMENT).min(BUFFER as u64) as usize;
            source.fill(&mut buffer[..length]);
            write_blocks(direct, cached, offset, &buffer[..length], path).map(|()| length as u64)
        })?;
    }
    let tail = source.left;
    write_cached(cached, offset, &mut source, tail, path).map(|_| ())
}

fn write_cached(cached: &File, offset: u64, source: &mut Parts<'_>, length: u64, path: &str) -> Result<u64> {
    let mut bytes = [0; DIRECT_ALIGNMENT];
    let bytes = &mut bytes[..length as usize];
    source.fill(bytes);
    write_full(cached, offset, bytes, path)?;
    Ok(offset + length)
}

fn write_blocks(direct: &File, cached: &File, mut offset: u64, mut bytes: &[u8], path: &str) -> Result<()> {
    while !bytes.is_empty() {
        match retry(|| rustix::io::pwrite(direct, bytes, offset)) {
            Ok(count) if count > 0 && count.is_multiple_of(DIRECT_ALIGNMENT) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            // A refusal, or a write cut off inside a block: the page cache takes the rest.
            Ok(count) => return write_full(cached, offset + count as u64, &bytes[count..], path),
            Err(error) if refuses(Some(error.raw_os_error())) => {
                return write_full(cached, offset, bytes, path);
            }
            Err(error) => {
                return Err(StorageError::from_io(Operation::Write, path, io::Error::from(error)));
            }
        }
    }
    Ok(())
}

/// A cursor over the parts of a vectored write.
struct Parts<'a> {
    parts: &'a [IoSlice<'a>],
    part: usize,
    at: usize,
    left: u64,
}

impl<'a> Parts<'a> {
    /// What is left of the current part (never empty while bytes are left).
    fn contiguous(&mut self) -> &'a [u8] {
        while let Some(part) = self.parts.get(self.part) {
            if self.at < part.len() {
                return &part[self.at..];
            }
            self.part += 1;
            self.at = 0;
        }
        &[]
    }

    fn skip(&mut self, count: usize) {
        self.at += count;
        self.left -= count as u64;
    }

    fn fill(&mut self, mut buffer: &mut [u8]) {
        while !buffer.is_empty() {
            let here = self.contiguous();
            let count = here.len().min(buffer.len());
            if count == 0 {
                return;
            }
            buffer[..count].copy_from_slice(&here[..count]);
            buffer = &mut buffer[count..];
            self.skip(count);
        }
    }
}
