//! The traits that every backend implements and every wrapper forwards, and the small types they speak in.

use std::fmt::Debug;
use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::{Operation, Result, StorageError};

/// What a backend can do, for code that chooses a way of working by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// [`Writer::write_at`] must be called with ascending offsets and without gaps (object stores).
    pub ordered_writes: bool,
    /// [`Publish::Replace`] leaves the old content or the new, never neither.
    pub atomic_replace: bool,
    /// [`Publish::Create`] is decided by the backend itself, so that two writers cannot both win.
    pub put_if_absent: bool,
    /// [`Store::link_or_copy`] can make a second name for the same bytes.
    pub hard_links: bool,
    /// Every request travels to a service and back: few and large ones are best, many of them at once.
    pub remote: bool,
    /// What can be read is durable. (Of local files only what was synced is.)
    pub visible_is_durable: bool,
    /// [`Store::lock`] keeps other writers away.
    pub locks: bool,
}

/// One file of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileInfo {
    /// Relative to the store's root, `/` between its parts.
    pub path: String,
    /// In bytes.
    pub size: u64,
    /// When it was last changed, where the backend knows.
    pub modified: Option<SystemTime>,
}

/// How [`Store::publish`] treats a file that is there already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Publish {
    /// Fail with [`StorageError::AlreadyExists`].
    Create,
    /// Replace it atomically.
    Replace,
    /// Replace it atomically if it is still the one that [`Store::version`] saw; else fail with [`StorageError::Changed`].
    /// Object stores decide it by themselves where they can; on local files hold [`Store::lock`].
    Update(Version),
}

/// What tells one content of a file from those that it had before and will have later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Differs between any two contents, as far as the backend can tell.
    pub(crate) mark: String,
    /// An object's entity tag, where it has a strong one.
    pub(crate) e_tag: Option<String>,
    /// A number of the object store's own.
    pub(crate) generation: Option<String>,
}

impl Version {
    pub(crate) fn new(mark: String) -> Version {
        Version { mark, e_tag: None, generation: None }
    }
}

/// The right to write below a root, given back when dropped, or by the operating system when the process dies.
pub struct WriteLock(Option<Box<dyn std::any::Any + Send + Sync>>);

impl WriteLock {
    /// Held for as long as `guard` lives.
    pub fn new(guard: impl std::any::Any + Send + Sync) -> WriteLock {
        WriteLock(Some(Box::new(guard)))
    }

    /// Of a store that has no locks.
    pub fn none() -> WriteLock {
        WriteLock(None)
    }
}

impl Debug for WriteLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "WriteLock(held)" } else { "WriteLock(none)" })
    }
}

/// How [`Store::link_or_copy`] did its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linked {
    /// A second name for the same bytes.
    HardLink,
    /// Copied by the file system or the server, without passing through this process (reflink, server-side copy).
    ServerCopy,
    /// Copied through this process.
    Copied,
}

/// Where a file physically is, so that two stores of one kind can link or copy without moving bytes through here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// A file of the local file system.
    File(PathBuf),
    /// An entry of an in-process memory file system.
    Memory {
        /// Which one.
        space: u64,
        /// Its full path there.
        key: String,
    },
    /// An object.
    Object {
        /// Which service, endpoint and bucket.
        service: String,
        /// Its full key there.
        key: String,
    },
}

/// What is known about a new file when it is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// The final length, where it is known: space is reserved, and [`Writer::finish`] checks it.
    pub length: Option<u64>,
}

impl WriteOptions {
    /// For a file of exactly this many bytes.
    pub fn with_length(length: u64) -> WriteOptions {
        WriteOptions { length: Some(length) }
    }
}

/// Called before each step of an atomic publication; an error stops it there.
pub trait PublishObserver {
    /// The step about to happen, and the path it happens to (that of the temporary file until it is renamed).
    fn before(&self, operation: Operation, path: &str) -> Result<()>;
}

/// Watches nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoObserver;

impl PublishObserver for NoObserver {
    fn before(&self, _operation: Operation, _path: &str) -> Result<()> {
        Ok(())
    }
}

/// A place that holds files under relative paths.
///
/// Paths are checked by [`crate::check_relative`]; every method that takes one refuses a path that leads outside
/// the root, also by way of symbolic links.
pub trait Store: Send + Sync + Debug {
    /// The address, for messages.
    fn describe(&self) -> String;

    /// What this backend can do.
    fn capabilities(&self) -> Capabilities;

    /// The root folder, on local files.
    fn local_root(&self) -> Option<&Path> {
        None
    }

    /// Creates the root folder where there are folders. Fine if it is there.
    fn prepare(&self) -> Result<()>;

    /// All files, in all folders, whose path starts with `prefix` (plain text; `""` for all), sorted by path.
    /// A missing root is an empty list.
    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>>;

    /// The names of the folders directly below the root, sorted. A missing root is an empty list.
    fn list_children(&self) -> Result<Vec<String>>;

    /// The names of links to folders directly below the root, sorted; none where there are no links.
    fn list_links(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// The size of a file.
    fn size(&self, path: &str) -> Result<u64>;

    /// What tells the file's present content from any other; `None` when it does not exist.
    fn version(&self, path: &str) -> Result<Option<Version>>;

    /// Claims the root, which must exist, for one writer: a second claim, by this process or another, fails at once with
    /// [`StorageError::Busy`]. Readers need no lock. Where there are no locks ([`Capabilities::locks`]) everyone gets one.
    fn lock(&self) -> Result<WriteLock> {
        Ok(WriteLock::none())
    }

    /// Whether a file is there.
    fn exists(&self, path: &str) -> Result<bool> {
        match self.size(path) {
            Ok(_) => Ok(true),
            Err(StorageError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A whole file of at most `limit` bytes; a larger one is [`StorageError::TooLarge`].
    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>>;

    /// Opens a file for positioned reads.
    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>>;

    /// Creates a new file, and the folders above it; fails with [`StorageError::AlreadyExists`] if it is there
    /// (object stores may notice at the end only).
    fn create_writer(&self, path: &str, options: &WriteOptions) -> Result<Box<dyn Writer>>;

    /// Writes a small file atomically and durably: a reader sees nothing or the old content, or all of the new, and
    /// when this returns a crash cannot undo it.
    fn publish(&self, path: &str, bytes: &[u8], mode: Publish) -> Result<()> {
        self.publish_observed(path, bytes, mode, &NoObserver)
    }

    /// [`Store::publish`], with a look (and a veto) before each of its steps.
    fn publish_observed(&self, path: &str, bytes: &[u8], mode: Publish, observer: &dyn PublishObserver) -> Result<()>;

    /// Gives a finished file the name `to` in one step: a reader sees what was there before, or all of the new. Durable after
    /// [`Store::sync`]. Only where there are second names ([`Capabilities::hard_links`]).
    fn rename(&self, from: &str, to: &str, mode: Publish) -> Result<()> {
        let _ = (from, mode);
        let reason = "files cannot be renamed here".to_owned();
        Err(StorageError::Unsupported { path: to.to_owned(), operation: Operation::Publish, reason })
    }

    /// Deletes a file. A missing one is fine.
    fn delete(&self, path: &str) -> Result<()>;

    /// Deletes everything below the root, and the root folder itself. A missing root is fine.
    fn delete_root(&self) -> Result<()>;

    /// Deletes the root folder if nothing lies in it, where there are folders; one that holds something stays.
    fn delete_empty_root(&self) -> Result<()> {
        Ok(())
    }

    /// Where a file physically is.
    fn origin(&self, path: &str) -> Result<Origin>;

    /// Makes `to` a link to or a copy of `origin` without moving bytes through this process, or says that it
    /// cannot by `None`. Fails with [`StorageError::AlreadyExists`] if `to` is there.
    fn adopt(&self, origin: &Origin, to: &str) -> Result<Option<Linked>>;

    /// Makes `to` in `to_store` a link to or a copy of `from`, by the cheapest way there is. The content is durable
    /// when this returns; the name is after [`Store::sync`]. Fails if `to` is there.
    fn link_or_copy(&self, from: &str, to_store: &dyn Store, to: &str) -> Result<Linked> {
        if let Some(linked) = to_store.adopt(&self.origin(from)?, to)? {
            return Ok(linked);
        }
        copy_through(self.open_reader(from)?.as_ref(), to_store, to)?;
        Ok(Linked::Copied)
    }

    /// Makes every name created, replaced or deleted through this store durable.
    fn sync(&self) -> Result<()>;
}

/// One range of [`Reader::read_ranges`]: `buf.len()` bytes at `offset`.
#[derive(Debug)]
pub struct RangeRead<'a> {
    /// Where in the file.
    pub offset: u64,
    /// Filled completely.
    pub buf: &'a mut [u8],
}

/// Positioned reads of one file, by many threads at once.
pub trait Reader: Send + Sync + Debug {
    /// The file, for messages.
    fn path(&self) -> &str;

    /// Its size when it was opened.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Fills `buf` from `offset`; a file that ends before is [`StorageError::OutOfRange`].
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// Some of the bytes of a pass from `offset` on, whole elements and at least one unless there are none, lent as the reader has
    /// them. Nobody needs them again soon: where they are not in memory anyway, they do not drive out what is.
    fn lend<'p>(&self, offset: u64, pass: &'p mut Pass) -> Result<&'p [u8]> {
        pass.fill(offset, LENT, |buf| self.read_at(offset, buf))
    }

    /// Whether a byte is known to be in memory already, so that reading it waits for nothing.
    fn is_in_memory(&self, offset: u64) -> bool {
        let _ = offset;
        false
    }

    /// Fills many buffers. Sorted ranges are cheapest: neighbours become one request.
    fn read_ranges(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        for range in ranges {
            self.read_at(range.offset, range.buf)?;
        }
        Ok(())
    }

    /// Says that a stretch will be read soon, so that a disk can bring it while something else is done. Reads nothing, cannot
    /// fail, and costs little where there is nothing to bring.
    fn will_read(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }
}

/// What a reader lends at a time unless it has a better measure: as much as is well asked of a service at once.
const LENT: u64 = 2 << 20;

/// One pass over a stretch of a file, by one reader, in order: where it ends, and what the reader keeps between loans.
#[derive(Debug)]
pub struct Pass {
    end: u64,
    element: u64,
    /// Memory of the reader's.
    pub(crate) window: Option<Box<dyn Window>>,
    buffer: Vec<u8>,
}

/// What a reader has of a file, in memory of its own.
pub(crate) trait Window: Send + Debug {
    /// The bytes from `offset` up to `end` that are here; none unless the first one is.
    fn held(&self, offset: u64, end: u64) -> &[u8];
}

impl Pass {
    /// Nothing is wanted from the byte `end` on; what is before are elements of so many bytes, which are not cut.
    pub fn until(end: u64, element: u64) -> Pass {
        Pass { end, element: element.max(1), window: None, buffer: Vec::new() }
    }

    /// Memory to lend, to be used again.
    pub fn with_memory(self, buffer: Vec<u8>) -> Pass {
        Pass { buffer, ..self }
    }

    /// Its memory, when it is over.
    pub fn into_memory(self) -> Vec<u8> {
        self.buffer
    }

    /// Where it ends.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// The bytes that are left of it.
    pub(crate) fn left(&self, offset: u64) -> u64 {
        self.end.saturating_sub(offset)
    }

    /// The elements from `offset` on that the reader's window holds whole.
    pub(crate) fn held(&self, offset: u64) -> &[u8] {
        let held = self.window.as_ref().map_or(&[][..], |window| window.held(offset, self.end));
        &held[..held.len() - held.len() % self.element as usize]
    }

    /// Fills its own memory with about `most` bytes of whole elements, and lends it.
    pub(crate) fn fill(&mut self, offset: u64, most: u64, read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<&[u8]> {
        let length = self.left(offset).min((most - most % self.element).max(self.element)) as usize;
        self.buffer.resize(self.buffer.len().max(length), 0);
        read(&mut self.buffer[..length])?;
        Ok(&self.buffer[..length])
    }
}

/// A new file being written.
///
/// Dropping a writer without [`Writer::finish`] or [`Writer::abort`] leaves what a crash would leave.
pub trait Writer: Send + Sync + Debug {
    /// The file, for messages.
    fn path(&self) -> &str;

    /// Writes all parts, one after the other, from `offset` on. Many threads may write at once, unless
    /// [`Capabilities::ordered_writes`].
    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()>;

    /// Closes the file, after making its content durable if `sync`. (Its name is durable after [`Store::sync`].)
    fn finish(self: Box<Self>, sync: bool) -> Result<()>;

    /// Gives up and removes what was written, as far as possible.
    fn abort(self: Box<Self>);
}

/// Copies a whole file through this process, in bounded memory, and syncs it.
pub(crate) fn copy_through(from: &dyn Reader, to_store: &dyn Store, to: &str) -> Result<()> {
    const STEP: u64 = 8 << 20;
    let length = from.len();
    let writer = to_store.create_writer(to, &WriteOptions::with_length(length))?;
    let mut buffer = vec![0; length.min(STEP) as usize];
    let mut offset = 0;
    while offset < length {
        let part = &mut buffer[..(length - offset).min(STEP) as usize];
        let step = from.read_at(offset, part).and_then(|()| writer.write_at(offset, &[IoSlice::new(part)]));
        if let Err(error) = step {
            if !error.is_crash() {
                writer.abort();
            }
            return Err(error);
        }
        offset += part.len() as u64;
    }
    writer.finish(true)
}

/// Proves that a read lies inside a file.
pub(crate) fn check_range(path: &str, offset: u64, length: usize, size: u64) -> Result<()> {
    let length = length as u64;
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(StorageError::OutOfRange { path: path.to_owned(), offset, length, size }),
    }
}

/// The bytes of all parts together.
pub(crate) fn total(parts: &[IoSlice<'_>]) -> u64 {
    parts.iter().map(|part| part.len() as u64).sum()
}
