//! Local files: positioned parallel reads and writes, preallocation, optional direct I/O, and an honest sync of files
//! and folders. Paths are resolved by the kernel below the root, so neither `..` nor a symbolic link leads out.

mod direct;
mod link;
mod lock;
mod reader;
mod root;
mod staged;
mod system;
mod transfer;
mod writer;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::listing;
use crate::{
    Capabilities, FileInfo, Linked, Operation, Origin, Publish, PublishObserver, Reader, Result, StorageError, Store,
    StoreOptions, Version, WriteLock, WriteOptions, Writer, check_relative,
};
use root::Root;

pub use direct::DIRECT_ALIGNMENT;

/// A store on the local file system.
#[derive(Debug)]
pub struct LocalStore {
    root: Root,
    /// Folders whose entries changed since the last sync, as full paths.
    dirty: Mutex<BTreeSet<PathBuf>>,
    direct_io: bool,
    preallocate: bool,
    early_writeback: bool,
}

impl LocalStore {
    /// The store rooted at a folder, which need not exist yet.
    pub fn new(path: &Path, options: &StoreOptions) -> Result<LocalStore> {
        // A later change of the working directory must not move the store.
        let path = std::path::absolute(path)
            .map_err(|error| StorageError::from_io(Operation::Open, path.display().to_string(), error))?;
        Ok(LocalStore {
            root: Root::new(path, options.follow_symlinks),
            dirty: Mutex::default(),
            direct_io: options.direct_io,
            preallocate: options.preallocate,
            early_writeback: options.early_writeback,
        })
    }

    fn mark_dirty(&self, folder: PathBuf) {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner).insert(folder);
    }

    /// Remembers that the entry of `path` changed, and those of folders that may have been made for it.
    fn mark_entry(&self, path: &str) {
        let mut dirty = self.dirty.lock().unwrap_or_else(PoisonError::into_inner);
        let mut folder = crate::path::split(path).0;
        loop {
            dirty.insert(self.root.full(folder));
            if folder.is_empty() {
                return;
            }
            folder = crate::path::split(folder).0;
        }
    }

    fn open_file(&self, operation: Operation, path: &str) -> Result<(File, u64)> {
        // Without O_NONBLOCK, a FIFO put in place of a file would hang the reader forever.
        let fd = self.root.open(operation, path, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?;
        let size = self.regular_size(operation, path, &fd)?;
        Ok((File::from(fd), size))
    }

    fn regular_size(&self, operation: Operation, path: &str, fd: &OwnedFd) -> Result<u64> {
        let stat = rustix::fs::fstat(fd).map_err(|error| self.root.error(operation, path, error))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(StorageError::from_io(operation, self.root.shown(path), source));
        }
        Ok(stat.st_size as u64)
    }
}

impl Store for LocalStore {
    fn describe(&self) -> String {
        self.root.path().display().to_string()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ordered_writes: false,
            atomic_replace: true,
            put_if_absent: true,
            hard_links: true,
            remote: false,
            visible_is_durable: false,
            locks: true,
        }
    }

    fn local_root(&self) -> Option<&Path> {
        Some(self.root.path())
    }

    fn prepare(&self) -> Result<()> {
        let root = self.root.path();
        // Every folder that gets a new entry must be synced for the root to survive.
        let mut missing = root;
        while !missing.exists() {
            let Some(parent) = missing.parent() else {
                break;
            };
            self.mark_dirty(parent.to_owned());
            missing = parent;
        }
        std::fs::create_dir_all(root).map_err(|error| StorageError::from_io(Operation::Prepare, self.describe(), error))
    }

    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>> {
        // A link is listed only when it may be opened, that is, when it stays inside the root.
        let linked = |path: &str| self.open_file(Operation::List, path).ok().map(|(file, _)| file.metadata());
        listing::files(self.root.path(), prefix, &linked)
    }

    fn list_children(&self) -> Result<Vec<String>> {
        listing::folders(self.root.path(), |kind, _| kind.is_dir())
    }

    fn list_links(&self) -> Result<Vec<String>> {
        listing::folders(self.root.path(), |kind, path| kind.is_symlink() && path.is_dir())
    }

    fn size(&self, path: &str) -> Result<u64> {
        let fd = self.root.open(Operation::Size, path, system::PATH, Mode::empty())?;
        self.regular_size(Operation::Size, path, &fd)
    }

    fn version(&self, path: &str) -> Result<Option<Version>> {
        staged::version(&self.root, path)
    }

    fn lock(&self) -> Result<WriteLock> {
        lock::lock(&self.root)
    }

    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let (file, size) = self.open_file(Operation::Read, path)?;
        if size > limit {
            return Err(StorageError::TooLarge { path: self.root.shown(path), size, limit });
        }
        let mut bytes = vec![0; size as usize];
        transfer::read_full(&file, 0, &mut bytes, &self.root.shown(path), size)?;
        Ok(bytes)
    }

    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>> {
        let (file, size) = self.open_file(Operation::OpenReader, path)?;
        let direct = if self.direct_io {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | system::DIRECT;
            direct::or_refused(self.root.open(Operation::OpenReader, path, flags, Mode::empty()))?
        } else {
            None
        };
        Ok(Arc::new(reader::LocalReader::new(self.root.shown(path), file, direct.map(File::from), size)))
    }

    fn create_writer(&self, path: &str, options: &WriteOptions) -> Result<Box<dyn Writer>> {
        let file = self.root.create(Operation::Create, path)?;
        self.mark_entry(path);
        let how = writer::How { preallocate: self.preallocate, direct_io: self.direct_io, early_writeback: self.early_writeback };
        let made = writer::LocalWriter::new(&self.root, path, file, options, how);
        match made {
            Ok(writer) => Ok(Box::new(writer)),
            Err(error) => {
                // Nobody else can know this file yet; the first error is the one that counts.
                let _ = self.root.unlink(Operation::Abort, path);
                Err(error)
            }
        }
    }

    fn publish_observed(&self, path: &str, bytes: &[u8], mode: Publish, observer: &dyn PublishObserver) -> Result<()> {
        staged::publish(&self.root, path, bytes, &mode, observer)?;
        self.mark_entry(path);
        observer.before(Operation::SyncFolder, path)?;
        self.sync()
    }

    fn rename(&self, from: &str, to: &str, mode: Publish) -> Result<()> {
        staged::rename(&self.root, from, to, &mode)?;
        self.mark_entry(from);
        self.mark_entry(to);
        Ok(())
    }

    fn delete(&self, path: &str) -> Result<()> {
        match self.root.unlink(Operation::Delete, path) {
            Ok(()) => {
                self.mark_dirty(self.root.full(crate::path::split(path).0));
                Ok(())
            }
            Err(StorageError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn delete_root(&self) -> Result<()> {
        let root = self.root.path();
        match std::fs::remove_dir_all(root) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                return Err(StorageError::from_io(Operation::DeleteRoot, self.describe(), error));
            }
        }
        if let Some(parent) = root.parent() {
            self.mark_dirty(parent.to_owned());
        }
        self.sync()
    }

    fn delete_empty_root(&self) -> Result<()> {
        let root = self.root.path();
        match std::fs::remove_dir(root) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => return Ok(()),
            Err(error) => return Err(StorageError::from_io(Operation::DeleteRoot, self.describe(), error)),
        }
        if let Some(parent) = root.parent() {
            self.mark_dirty(parent.to_owned());
        }
        self.sync()
    }

    fn origin(&self, path: &str) -> Result<Origin> {
        let fd = self.root.open(Operation::Link, path, system::PATH, Mode::empty())?;
        self.regular_size(Operation::Link, path, &fd)?;
        Ok(Origin::File(self.root.full(path)))
    }

    fn adopt(&self, origin: &Origin, to: &str) -> Result<Option<Linked>> {
        check_relative(to)?;
        let Origin::File(from) = origin else {
            return Ok(None);
        };
        let linked = link::link_or_clone(&self.root, from, to)?;
        if linked.is_some() {
            self.mark_entry(to);
        }
        Ok(linked)
    }

    fn sync(&self) -> Result<()> {
        let folders = std::mem::take(&mut *self.dirty.lock().unwrap_or_else(PoisonError::into_inner));
        let mut rest = folders.into_iter();
        while let Some(folder) = rest.next() {
            if let Err(error) = sync_folder(&folder) {
                // Not durable yet: a later sync must try again.
                self.mark_dirty(folder);
                rest.for_each(|folder| self.mark_dirty(folder));
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Makes a folder's entries durable. A folder that is gone has nothing to lose.
fn sync_folder(folder: &Path) -> Result<()> {
    let failed =
        |error: Errno| StorageError::from_io(Operation::SyncFolder, folder.display().to_string(), io::Error::from(error));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::empty()) {
        Ok(fd) => match transfer::retry(|| system::sync_all(&fd)) {
            // Some network file systems have no sync of folders; there is nothing more to be had from them.
            Ok(()) | Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(failed(error)),
        },
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// `unlinkat` of one entry of an open folder.
fn unlink_at(folder: &OwnedFd, name: &str) -> rustix::io::Result<()> {
    rustix::fs::unlinkat(folder, name, AtFlags::empty())
}
