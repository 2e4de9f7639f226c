//! A compressed record as a file of its own.
//!
//! A decoder goes forwards only. Those that stand somewhere in a record wait in a pool until someone reads on from there; who
//! reads from before any of them starts anew. The pool is bounded, whatever the number of records.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use reshard_formats::ReadAt;
use reshard_storage::{Operation, Reader, StorageError};
use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

/// Compressed bytes are read in parts of this size.
const INPUT: usize = 128 << 10;
/// Bytes that are not wanted are decompressed in parts of this size.
const SKIPPED: usize = 64 << 10;
/// What is kept of both ends of a record while its archive is looked into: the pickle is at its start, the directory at its end.
const END: usize = 64 << 10;
/// No frame looks back further (128 MiB, the most that `zstd` makes without being told to): it is memory that a file asks for.
const WINDOW_LOG: u32 = 27;
/// Idle decoders take at most so many bytes, and are at most so many.
const IDLE_BYTES: usize = 256 << 20;
const IDLE: usize = 128;

/// Why a record could not be decompressed.
#[derive(Debug)]
pub(crate) enum Broken {
    /// It could not be read.
    Storage(StorageError),
    /// It is not what a compressor wrote.
    Damaged(String),
    /// It has more bytes than there may be.
    TooLarge(u64),
    /// There is no memory to decompress it.
    Exhausted,
}

/// Reads a part of the compressed record.
type Fetch<'f> = &'f dyn Fn(u64, &mut [u8]) -> Result<(), StorageError>;

/// A decoder somewhere in a record.
pub(crate) struct Unpacking {
    context: DCtx<'static>,
    input: Box<[u8]>,
    used: usize,
    filled: usize,
    /// Compressed bytes that were read.
    taken: u64,
    /// Decompressed bytes that were given.
    position: u64,
    /// Whether a frame has begun and not ended.
    inside: bool,
}

impl fmt::Debug for Unpacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unpacking").field("position", &self.position).finish_non_exhaustive()
    }
}

impl Unpacking {
    pub(crate) fn new() -> Result<Unpacking, Broken> {
        let mut context = DCtx::try_create().ok_or(Broken::Exhausted)?;
        context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG)).map_err(named)?;
        let input = vec![0; INPUT].into_boxed_slice();
        Ok(Unpacking { context, input, used: 0, filled: 0, taken: 0, position: 0, inside: false })
    }

    /// Fills `out`, less only at the record's end. `length` is that of the compressed record.
    pub(crate) fn fill(&mut self, length: u64, fetch: Fetch<'_>, out: &mut [u8]) -> Result<usize, Broken> {
        let wanted = out.len();
        let mut output = OutBuffer::around(out);
        while output.pos() < wanted {
            if self.used == self.filled && self.taken < length {
                let part = (length - self.taken).min(INPUT as u64) as usize;
                fetch(self.taken, &mut self.input[..part]).map_err(Broken::Storage)?;
                (self.used, self.filled) = (0, part);
                self.taken += part as u64;
            }
            let exhausted = self.used == self.filled;
            if exhausted && !self.inside {
                break;
            }
            let mut input = InBuffer::around(&self.input[self.used..self.filled]);
            let before = output.pos();
            let hint = self.context.decompress_stream(&mut output, &mut input).map_err(named)?;
            let consumed = input.pos();
            self.used += consumed;
            self.inside = hint != 0;
            if consumed == 0 && output.pos() == before {
                let what = if exhausted { "it is cut off: its last frame does not end" } else { "it does not decompress" };
                return Err(Broken::Damaged(what.into()));
            }
        }
        let given = output.pos();
        self.position += given as u64;
        Ok(given)
    }
}

fn named(code: zstd_safe::ErrorCode) -> Broken {
    Broken::Damaged(format!("it does not decompress: {}", zstd_safe::get_error_name(code)))
}

/// A whole record, of at most so many bytes.
pub(crate) fn unpack(record: &[u8], most: u64) -> Result<Vec<u8>, Broken> {
    let fetch = |at: u64, part: &mut [u8]| {
        let at = at as usize;
        part.copy_from_slice(&record[at..at + part.len()]);
        Ok(())
    };
    let mut unpacking = Unpacking::new()?;
    let mut bytes = Vec::new();
    loop {
        let start = bytes.len();
        bytes.resize(start + SKIPPED, 0);
        let given = unpacking.fill(record.len() as u64, &fetch, &mut bytes[start..])?;
        bytes.truncate(start + given);
        if bytes.len() as u64 > most {
            return Err(Broken::TooLarge(most));
        }
        if given < SKIPPED {
            return Ok(bytes);
        }
    }
}

/// A record, decompressed once: its length and its ends. That every byte of it decompresses is known then.
pub(crate) struct Measured {
    pub(crate) len: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

/// Where a compressed record lies.
#[derive(Debug, Clone)]
pub(crate) struct PackedLocation {
    pub(crate) file: Arc<dyn Reader>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl PackedLocation {
    fn fill(&self, unpacking: &mut Unpacking, out: &mut [u8]) -> Result<usize, Broken> {
        unpacking.fill(self.length, &|at, part| self.file.read_at(self.offset + at, part), out)
    }

    /// Decompresses it to see how long it is; at most so many bytes.
    pub(crate) fn measure(&self, most: u64) -> Result<Measured, Broken> {
        let mut unpacking = Unpacking::new()?;
        let mut block = vec![0; SKIPPED];
        let (mut len, mut head, mut tail) = (0u64, Vec::new(), Vec::new());
        loop {
            let given = self.fill(&mut unpacking, &mut block)?;
            let part = &block[..given];
            len += given as u64;
            if len > most {
                return Err(Broken::TooLarge(most));
            }
            if head.len() < END {
                head.extend_from_slice(&part[..given.min(END - head.len())]);
            }
            tail.extend_from_slice(part);
            if tail.len() > 4 * END {
                tail.drain(..tail.len() - END);
            }
            if given < block.len() {
                return Ok(Measured { len, head, tail });
            }
        }
    }
}

/// A measured record as the formats read it: its ends without decompressing it again.
pub(crate) struct Ends<'r> {
    pub(crate) measured: Measured,
    pub(crate) rest: &'r dyn Reader,
}

impl ReadAt for Ends<'_> {
    fn len(&self) -> u64 {
        self.measured.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        let Measured { len, head, tail } = &self.measured;
        let start = len - tail.len() as u64;
        let within = |bytes: &[u8], at: u64| {
            let at = usize::try_from(at).ok()?;
            bytes.get(at..at.checked_add(buf.len())?).map(<[u8]>::to_vec)
        };
        let found = within(head, offset).or_else(|| within(tail, offset.checked_sub(start)?));
        match found {
            Some(bytes) => buf.copy_from_slice(&bytes),
            None => self.rest.read_at(offset, buf).map_err(std::io::Error::other)?,
        }
        Ok(())
    }
}

/// Decoders that wait for someone to read on, the one used last at the end.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    idle: Mutex<Vec<(u32, Unpacking)>>,
}

impl Pool {
    /// The decoder of a record that stands closest before a position.
    fn take(&self, record: u32, position: u64) -> Option<Unpacking> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let before = idle.iter().enumerate().filter(|(_, (of, waiting))| *of == record && waiting.position <= position);
        let closest = before.max_by_key(|(_, (_, waiting))| waiting.position).map(|(at, _)| at)?;
        Some(idle.remove(closest).1)
    }

    fn give(&self, record: u32, unpacking: Unpacking) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push((record, unpacking));
        let mut bytes: usize = idle.iter().map(|(_, waiting)| waiting.context.sizeof() + INPUT).sum();
        while idle.len() > IDLE || bytes > IDLE_BYTES {
            bytes -= idle.remove(0).1.context.sizeof() + INPUT;
        }
    }
}

/// The bytes of a compressed record, as they were before.
#[derive(Debug)]
pub(crate) struct Unpacked {
    place: PackedLocation,
    len: u64,
    record: u32,
    pool: Arc<Pool>,
}

impl Unpacked {
    /// A record that was measured, under a number by which its decoders wait in a pool.
    pub(crate) fn new(place: PackedLocation, len: u64, record: u32, pool: Arc<Pool>) -> Unpacked {
        Unpacked { place, len, record, pool }
    }
}

impl Reader for Unpacked {
    fn path(&self) -> &str {
        self.place.file.path()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), StorageError> {
        let failed = |broken: Broken| match broken {
            Broken::Storage(error) => error,
            Broken::Exhausted => {
                let what = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
                StorageError::from_io(Operation::Read, self.path(), what)
            }
            // Every byte of it was decompressed when it was measured.
            Broken::Damaged(_) | Broken::TooLarge(_) => {
                let what = std::io::Error::other("a compressed record was changed while it was read");
                StorageError::from_io(Operation::Read, self.path(), what)
            }
        };
        let out_of_range = || {
            let (path, length) = (self.path().to_owned(), buf.len() as u64);
            StorageError::OutOfRange { path, offset, length, size: self.len }
        };
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.len) {
            return Err(out_of_range());
        }
        let mut unpacking = match self.pool.take(self.record, offset) {
            Some(waiting) => waiting,
            None => Unpacking::new().map_err(failed)?,
        };
        let mut skipped = vec![0; (offset - unpacking.position).min(SKIPPED as u64) as usize];
        while unpacking.position < offset {
            let part = (offset - unpacking.position).min(SKIPPED as u64) as usize;
            if self.place.fill(&mut unpacking, &mut skipped[..part]).map_err(failed)? < part {
                return Err(failed(Broken::TooLarge(0)));
            }
        }
        if self.place.fill(&mut unpacking, buf).map_err(failed)? < buf.len() {
            return Err(failed(Broken::TooLarge(0)));
        }
        if unpacking.position < self.len {
            self.pool.give(self.record, unpacking);
        }
        Ok(())
    }
}
