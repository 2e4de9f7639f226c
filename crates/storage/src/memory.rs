//! Files in memory, for tests and for embedding: every store opened with the same name sees the same files.

use std::collections::{BTreeMap, HashMap};
use std::io::IoSlice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};
use std::time::SystemTime;

use crate::store::{check_range, total};
use crate::{
    Capabilities, FileInfo, Linked, Operation, Origin, Publish, PublishObserver, Reader, Result, StorageError, Store, Version,
    WriteLock, WriteOptions, Writer, check_relative,
};

static SHARED: LazyLock<Mutex<HashMap<String, Arc<Space>>>> = LazyLock::new(Mutex::default);

/// One memory file system.
#[derive(Debug)]
struct Space {
    id: u64,
    files: RwLock<BTreeMap<String, Arc<File>>>,
}

#[derive(Debug)]
struct File {
    /// No two files have the same.
    id: u64,
    bytes: RwLock<Vec<u8>>,
    created: SystemTime,
}

impl File {
    fn new(bytes: Vec<u8>) -> Arc<File> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(File { id, bytes: RwLock::new(bytes), created: SystemTime::now() })
    }

    fn version(&self) -> Version {
        Version::new(self.id.to_string())
    }

    fn len(&self) -> u64 {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner).len() as u64
    }
}

impl Space {
    fn new() -> Arc<Space> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Space { id: NEXT.fetch_add(1, Ordering::Relaxed), files: RwLock::default() })
    }
}

/// A store in memory.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    space: Arc<Space>,
    name: String,
    root: String,
}

/// Forgets the shared memory of this name; stores opened before keep it.
pub fn forget(name: &str) {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
}

impl MemoryStore {
    /// A store that nobody else sees.
    pub fn new() -> MemoryStore {
        let space = Space::new();
        MemoryStore { name: format!("private-{}", space.id), space, root: String::new() }
    }

    /// The store below `root` in the memory that this process shares by `name`.
    pub fn shared(name: &str, root: &str) -> MemoryStore {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let space = shared.entry(name.to_owned()).or_insert_with(Space::new).clone();
        MemoryStore { space, name: name.to_owned(), root: root.to_owned() }
    }

    fn key(&self, path: &str) -> Result<String> {
        check_relative(path)?;
        Ok(crate::path::join(&self.root, path))
    }

    /// What every key below the root starts with.
    fn folder(&self) -> String {
        if self.root.is_empty() { String::new() } else { format!("{}/", self.root) }
    }

    fn shown(&self, path: &str) -> String {
        format!("{}/{path}", self.describe())
    }

    fn file(&self, operation: Operation, path: &str) -> Result<Arc<File>> {
        let key = self.key(path)?;
        let files = self.space.files.read().unwrap_or_else(PoisonError::into_inner);
        files.get(&key).cloned().ok_or_else(|| StorageError::NotFound { path: self.shown(path), operation })
    }

    fn insert_new(&self, operation: Operation, path: &str, file: Arc<File>) -> Result<()> {
        let mut files = self.space.files.write().unwrap_or_else(PoisonError::into_inner);
        self.put(&mut files, operation, path, file, &Publish::Create)
    }

    fn put(
        &self,
        files: &mut BTreeMap<String, Arc<File>>,
        operation: Operation,
        path: &str,
        file: Arc<File>,
        mode: &Publish,
    ) -> Result<()> {
        let key = self.key(path)?;
        let there = files.get(&key);
        match mode {
            Publish::Create if there.is_some() => return Err(StorageError::AlreadyExists { path: self.shown(path), operation }),
            Publish::Update(seen) if there.is_none_or(|there| there.version() != *seen) => {
                return Err(StorageError::Changed { path: self.shown(path), operation });
            }
            _ => {}
        }
        files.insert(key, file);
        Ok(())
    }
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new()
    }
}

impl Store for MemoryStore {
    fn describe(&self) -> String {
        format!("memory://{}", crate::path::join(&self.name, &self.root).trim_end_matches('/'))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ordered_writes: false,
            atomic_replace: true,
            put_if_absent: true,
            hard_links: true,
            remote: false,
            visible_is_durable: true,
            locks: true,
        }
    }

    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>> {
        let folder = self.folder();
        let start = format!("{folder}{prefix}");
        let files = self.space.files.read().unwrap_or_else(PoisonError::into_inner);
        Ok(files
            .range(start.clone()..)
            .take_while(|(key, _)| key.starts_with(&start))
            .map(|(key, file)| FileInfo { path: key[folder.len()..].to_owned(), size: file.len(), modified: Some(file.created) })
            .collect())
    }

    fn list_children(&self) -> Result<Vec<String>> {
        let mut children: Vec<String> =
            self.list("")?.iter().filter_map(|file| file.path.split_once('/').map(|(child, _)| child.to_owned())).collect();
        children.sort();
        children.dedup();
        Ok(children)
    }

    fn size(&self, path: &str) -> Result<u64> {
        Ok(self.file(Operation::Size, path)?.len())
    }

    fn version(&self, path: &str) -> Result<Option<Version>> {
        match self.file(Operation::Size, path) {
            Ok(file) => Ok(Some(file.version())),
            Err(StorageError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn lock(&self) -> Result<WriteLock> {
        crate::claims::claim(format!("memory {} {}", self.space.id, self.root), self.describe())
    }

    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let file = self.file(Operation::Read, path)?;
        let bytes = file.bytes.read().unwrap_or_else(PoisonError::into_inner);
        let size = bytes.len() as u64;
        if size > limit {
            return Err(StorageError::TooLarge { path: self.shown(path), size, limit });
        }
        Ok(bytes.clone())
    }

    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>> {
        let file = self.file(Operation::OpenReader, path)?;
        Ok(Arc::new(MemoryReader { path: self.shown(path), len: file.len(), file }))
    }

    fn create_writer(&self, path: &str, options: &WriteOptions) -> Result<Box<dyn Writer>> {
        let file = File::new(Vec::new());
        self.insert_new(Operation::Create, path, file.clone())?;
        Ok(Box::new(MemoryWriter {
            path: self.shown(path),
            file,
            declared: options.length,
            store: self.clone(),
            relative: path.to_owned(),
        }))
    }

    fn publish_observed(&self, path: &str, bytes: &[u8], mode: Publish, observer: &dyn PublishObserver) -> Result<()> {
        self.key(path)?;
        observer.before(Operation::Publish, path)?;
        let file = File::new(bytes.to_vec());
        let mut files = self.space.files.write().unwrap_or_else(PoisonError::into_inner);
        self.put(&mut files, Operation::Publish, path, file, &mode)
    }

    fn rename(&self, from: &str, to: &str, mode: Publish) -> Result<()> {
        let operation = Operation::Publish;
        let key = self.key(from)?;
        let mut files = self.space.files.write().unwrap_or_else(PoisonError::into_inner);
        let missing = || StorageError::NotFound { path: self.shown(from), operation };
        let file = files.get(&key).cloned().ok_or_else(missing)?;
        self.put(&mut files, operation, to, file, &mode)?;
        files.remove(&key);
        Ok(())
    }

    fn delete(&self, path: &str) -> Result<()> {
        let key = self.key(path)?;
        self.space.files.write().unwrap_or_else(PoisonError::into_inner).remove(&key);
        Ok(())
    }

    fn delete_root(&self) -> Result<()> {
        let folder = self.folder();
        let mut files = self.space.files.write().unwrap_or_else(PoisonError::into_inner);
        files.retain(|key, _| !key.starts_with(&folder));
        Ok(())
    }

    fn origin(&self, path: &str) -> Result<Origin> {
        Ok(Origin::Memory { space: self.space.id, key: self.key(path)? })
    }

    fn adopt(&self, origin: &Origin, to: &str) -> Result<Option<Linked>> {
        let Origin::Memory { space, key } = origin else {
            return Ok(None);
        };
        if *space != self.space.id {
            return Ok(None);
        }
        let file = {
            let files = self.space.files.read().unwrap_or_else(PoisonError::into_inner);
            files.get(key).cloned().ok_or_else(|| StorageError::NotFound {
                path: format!("memory://{}/{key}", self.name),
                operation: Operation::Link,
            })?
        };
        self.insert_new(Operation::Link, to, file)?;
        Ok(Some(Linked::HardLink))
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryReader {
    path: String,
    len: u64,
    file: Arc<File>,
}

impl Reader for MemoryReader {
    fn path(&self) -> &str {
        &self.path
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bytes = self.file.bytes.read().unwrap_or_else(PoisonError::into_inner);
        check_range(&self.path, offset, buf.len(), bytes.len() as u64)?;
        buf.copy_from_slice(&bytes[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryWriter {
    path: String,
    file: Arc<File>,
    declared: Option<u64>,
    store: MemoryStore,
    relative: String,
}

impl Writer for MemoryWriter {
    fn path(&self) -> &str {
        &self.path
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let end = offset.checked_add(total(parts)).filter(|end| isize::try_from(*end).is_ok());
        let Some(end) = end else {
            return Err(StorageError::NoSpace {
                path: self.path.clone(),
                operation: Operation::Write,
                source: std::io::ErrorKind::FileTooLarge.into(),
            });
        };
        let mut bytes = self.file.bytes.write().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() < end as usize {
            bytes.resize(end as usize, 0);
        }
        let mut at = offset as usize;
        for part in parts {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        Ok(())
    }

    fn finish(self: Box<Self>, _sync: bool) -> Result<()> {
        let written = self.file.len();
        match self.declared {
            Some(declared) if declared != written => {
                Err(StorageError::WrongLength { path: self.path.clone(), declared, written })
            }
            _ => Ok(()),
        }
    }

    fn abort(self: Box<Self>) {
        // The path was checked when the writer was made, so this cannot fail.
        let _ = self.store.delete(&self.relative);
    }
}
