//! Local files where only reading is supported: systems without the calls that an honest save needs (files opened relative to
//! open folders, folders that are synced). Everything that reads works; everything that writes is an error that says so.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use crate::store::check_range;
use crate::{
    Capabilities, FileInfo, Linked, Operation, Origin, Publish, PublishObserver, Reader, Result, StorageError, Store,
    StoreOptions, Version, WriteOptions, Writer, check_relative, listing,
};

/// A store on the local file system, to read from.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
    follow_symlinks: bool,
}

impl LocalStore {
    /// The store rooted at a folder, which need not exist.
    pub fn new(path: &Path, options: &StoreOptions) -> Result<LocalStore> {
        let root = std::path::absolute(path)
            .map_err(|error| StorageError::from_io(Operation::Open, path.display().to_string(), error))?;
        Ok(LocalStore { root, follow_symlinks: options.follow_symlinks })
    }

    fn shown(&self, path: &str) -> String {
        self.root.join(path).display().to_string()
    }

    /// A regular file below the root, wherever links lead.
    fn open_file(&self, operation: Operation, path: &str) -> Result<(File, u64)> {
        check_relative(path)?;
        // What separates folders or names a drive elsewhere is a part of a name here.
        if path.contains(['\\', ':']) {
            return Err(StorageError::BadPath { path: path.to_owned(), reason: "it contains `\\` or `:`" });
        }
        let failed = |error| StorageError::from_io(operation, self.shown(path), error);
        let full = self.root.join(path).canonicalize().map_err(failed)?;
        if !self.follow_symlinks && !full.starts_with(self.root.canonicalize().map_err(failed)?) {
            return Err(StorageError::BadPath { path: path.to_owned(), reason: "a link leads out of the folder" });
        }
        // Before it is opened: to open a pipe is to wait for its other end.
        if !full.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let file = File::open(&full).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        Ok((file, size))
    }

    fn unsupported<T>(&self, operation: Operation, path: &str) -> Result<T> {
        let reason = "on this system reshard reads local files and does not write them; write to an object store".to_owned();
        Err(StorageError::Unsupported { path: self.shown(path), operation, reason })
    }
}

impl Store for LocalStore {
    fn describe(&self) -> String {
        self.root.display().to_string()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ordered_writes: false,
            atomic_replace: false,
            put_if_absent: false,
            hard_links: false,
            remote: false,
            visible_is_durable: false,
            locks: false,
        }
    }

    fn local_root(&self) -> Option<&Path> {
        Some(&self.root)
    }

    fn prepare(&self) -> Result<()> {
        self.unsupported(Operation::Prepare, "")
    }

    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>> {
        let linked = |path: &str| self.open_file(Operation::List, path).ok().map(|(file, _)| file.metadata());
        listing::files(&self.root, prefix, &linked)
    }

    fn list_children(&self) -> Result<Vec<String>> {
        listing::folders(&self.root, |kind, _| kind.is_dir())
    }

    fn list_links(&self) -> Result<Vec<String>> {
        listing::folders(&self.root, |kind, path| kind.is_symlink() && path.is_dir())
    }

    fn size(&self, path: &str) -> Result<u64> {
        Ok(self.open_file(Operation::Size, path)?.1)
    }

    fn version(&self, path: &str) -> Result<Option<Version>> {
        let file = match self.open_file(Operation::Size, path) {
            Ok((file, _)) => file,
            Err(StorageError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let failed = |error| StorageError::from_io(Operation::Size, self.shown(path), error);
        let metadata = file.metadata().map_err(failed)?;
        let changed = metadata.modified().map_err(failed)?.duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Some(Version::new(format!("{}-{}", metadata.len(), changed.as_nanos()))))
    }

    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let reader = self.open_reader(path)?;
        let size = reader.len();
        if size > limit {
            return Err(StorageError::TooLarge { path: self.shown(path), size, limit });
        }
        let mut bytes = vec![0; size as usize];
        reader.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>> {
        let (file, len) = self.open_file(Operation::OpenReader, path)?;
        Ok(Arc::new(FileReader { path: self.shown(path), file, len }))
    }

    fn create_writer(&self, path: &str, _: &WriteOptions) -> Result<Box<dyn Writer>> {
        self.unsupported(Operation::Create, path)
    }

    fn publish_observed(&self, path: &str, _: &[u8], _: Publish, _: &dyn PublishObserver) -> Result<()> {
        self.unsupported(Operation::Publish, path)
    }

    fn delete(&self, path: &str) -> Result<()> {
        self.unsupported(Operation::Delete, path)
    }

    fn delete_root(&self) -> Result<()> {
        self.unsupported(Operation::DeleteRoot, "")
    }

    fn origin(&self, path: &str) -> Result<Origin> {
        self.open_file(Operation::Link, path)?;
        Ok(Origin::File(self.root.join(path)))
    }

    fn adopt(&self, _: &Origin, to: &str) -> Result<Option<Linked>> {
        self.unsupported(Operation::Link, to)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct FileReader {
    path: String,
    file: File,
    len: u64,
}

impl Reader for FileReader {
    fn path(&self) -> &str {
        &self.path
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        check_range(&self.path, offset, buf.len(), self.len)?;
        let mut filled = 0;
        while filled < buf.len() {
            match read_some(&self.file, offset + filled as u64, &mut buf[filled..]) {
                // Truncated since it was opened.
                Ok(0) => {
                    let (path, length) = (self.path.clone(), buf.len() as u64);
                    return Err(StorageError::OutOfRange { path, offset, length, size: offset + filled as u64 });
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(StorageError::from_io(Operation::Read, &self.path, error)),
            }
        }
        Ok(())
    }
}

#[cfg(windows)]
fn read_some(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, buf, offset)
}

#[cfg(unix)]
fn read_some(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, buf, offset)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn stores(root: &Path) -> Result<(LocalStore, crate::local::LocalStore)> {
        let options = StoreOptions::default();
        Ok((LocalStore::new(root, &options)?, crate::local::LocalStore::new(root, &options)?))
    }

    #[test]
    fn what_is_read_is_what_the_full_store_reads() {
        let folder = std::env::temp_dir().join(format!("reshard-reading-{}", std::process::id()));
        let root = folder.join("root");
        std::fs::create_dir_all(root.join("deep/er")).unwrap();
        std::fs::write(root.join("a"), b"0123456789").unwrap();
        std::fs::write(root.join("deep/er/b"), b"b").unwrap();
        std::fs::write(folder.join("secret"), b"secret").unwrap();
        std::os::unix::fs::symlink("a", root.join("inside")).unwrap();
        std::os::unix::fs::symlink(folder.join("secret"), root.join("outside")).unwrap();
        let (reading, full) = stores(&root).unwrap();
        assert_eq!(reading.list("").unwrap(), full.list("").unwrap());
        assert_eq!(reading.list("deep/").unwrap(), full.list("deep/").unwrap());
        assert_eq!(reading.list_children().unwrap(), full.list_children().unwrap());
        for path in ["a", "deep/er/b", "inside"] {
            assert_eq!(reading.read(path, 100).unwrap(), full.read(path, 100).unwrap());
            assert_eq!(reading.size(path).unwrap(), full.size(path).unwrap());
        }
        let mut part = [0; 4];
        reading.open_reader("a").unwrap().read_at(3, &mut part).unwrap();
        assert_eq!(&part, b"3456");
        assert!(matches!(reading.open_reader("a").unwrap().read_at(8, &mut part), Err(StorageError::OutOfRange { .. })));
        assert!(matches!(reading.read("a", 9), Err(StorageError::TooLarge { .. })));
        assert!(matches!(reading.read("none", 9), Err(StorageError::NotFound { .. })));
        for path in ["outside", "../secret", "deep\\er", "C:x", "deep"] {
            assert!(reading.read(path, 100).is_err(), "{path}");
        }
        assert_eq!(reading.version("none").unwrap(), None);
        let before = reading.version("a").unwrap().unwrap();
        assert_eq!(reading.version("a").unwrap().unwrap(), before);
        std::fs::write(root.join("a"), b"01234567890").unwrap();
        assert_ne!(reading.version("a").unwrap().unwrap(), before);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_writes_is_an_error_that_says_so() {
        let (reading, _) = stores(Path::new("/nowhere")).unwrap();
        let errors = [
            reading.prepare().unwrap_err(),
            reading.publish("x", b"", Publish::Create).unwrap_err(),
            reading.create_writer("x", &WriteOptions::default()).unwrap_err(),
            reading.delete("x").unwrap_err(),
            reading.delete_root().unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, StorageError::Unsupported { .. }) && error.to_string().contains("does not write"), "{error}");
        }
    }
}
