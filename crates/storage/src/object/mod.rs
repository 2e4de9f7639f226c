//! Object stores, by the `object_store` crate. An object appears whole or not at all, so nothing needs to be staged or
//! synced; there are no folders, no rename and no writes out of order.

mod connect;
mod read;
mod runtime;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{CopyOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};

use crate::{
    Address, Capabilities, FileInfo, Linked, Operation, Origin, PerProcess, Publish, PublishObserver, Reader, Result, Scheme,
    StorageError, Store, StoreOptions, Version, WriteOptions, Writer, check_relative,
};
use runtime::wait;

/// The largest object that S3 copies in one request.
const MAX_SERVER_COPY: u64 = 5 << 30;

/// A store of objects below a prefix of one bucket.
#[derive(Debug)]
pub struct ObjectBackend {
    link: Arc<Link>,
    address: Address,
    service: String,
    options: StoreOptions,
    /// Whether the service decides conditions ("only if absent", "only if unchanged") itself; corrected when it turns out that
    /// it cannot.
    put_if_absent: AtomicBool,
}

/// How a process reaches the service. A forked one makes connections of its own.
#[derive(Debug)]
struct Link {
    address: Address,
    options: StoreOptions,
    made: PerProcess<Connection>,
}

#[derive(Debug)]
struct Connection {
    client: Arc<dyn ObjectStore>,
    limits: read::Limits,
}

impl Link {
    fn get(&self) -> Result<&Connection> {
        self.made.get_or_try(|| {
            // Clients start tasks of their own when made.
            let handle = runtime::handle()?;
            let _inside = handle.enter();
            let client = connect::connect(&self.address, &self.options)?;
            Ok(Connection { client, limits: read::Limits::new(&self.options) })
        })
    }

    fn client(&self) -> Result<Arc<dyn ObjectStore>> {
        Ok(Arc::clone(&self.get()?.client))
    }
}

impl ObjectBackend {
    /// Makes a client; nothing is asked of the service yet.
    pub fn open(address: &Address, options: &StoreOptions) -> Result<ObjectBackend> {
        let link = Link { address: address.clone(), options: options.clone(), made: PerProcess::new() };
        link.get()?;
        let service =
            format!("{:?}:{}:{}", address.scheme(), address.authority(), options.endpoint.as_deref().unwrap_or_default());
        Ok(ObjectBackend {
            link: Arc::new(link),
            address: address.clone(),
            service,
            options: options.clone(),
            put_if_absent: AtomicBool::new(address.scheme() != Scheme::Http),
        })
    }

    fn key(&self, path: &str) -> Result<Key> {
        check_relative(path)?;
        Key::parse(crate::path::join(self.address.key(), path))
            .map_err(|_| StorageError::BadPath { path: path.to_owned(), reason: "it is not a valid object key" })
    }

    fn shown(&self, path: &str) -> String {
        format!("{}/{path}", self.address)
    }

    /// The prefix of everything below the root, or below one of its folders.
    fn prefix(&self, folder: &str) -> Result<Option<Key>> {
        let text = match (self.address.key(), folder) {
            ("", "") => return Ok(None),
            (root, "") => root.to_owned(),
            (root, folder) => crate::path::join(root, folder),
        };
        Key::parse(text)
            .map(Some)
            .map_err(|_| StorageError::BadPath { path: folder.to_owned(), reason: "it is not a valid object key" })
    }

    /// The path below the root of a key of a listing.
    fn relative(&self, key: &Key) -> Option<String> {
        let root = self.address.key();
        let below = if root.is_empty() { key.as_ref() } else { key.as_ref().strip_prefix(root)?.strip_prefix('/')? };
        (!below.is_empty()).then(|| below.to_owned())
    }

    fn head(&self, operation: Operation, path: &str) -> Result<object_store::ObjectMeta> {
        let (client, key, shown) = (self.link.client()?, self.key(path)?, self.shown(path));
        let task_path = shown.clone();
        wait(operation, &shown, async move { client.head(&key).await.map_err(|error| classify(operation, &task_path, error)) })
    }

    fn put(&self, path: &str, bytes: &[u8], mode: PutMode) -> Result<()> {
        let (client, key, shown) = (self.link.client()?, self.key(path)?, self.shown(path));
        let payload = PutPayload::from(bytes.to_vec());
        let task_path = shown.clone();
        wait(Operation::Publish, &shown, async move {
            let options = PutOptions { mode, ..PutOptions::default() };
            let put = client.put_opts(&key, payload, options).await;
            put.map(|_| ()).map_err(|error| match error {
                object_store::Error::Precondition { .. } => {
                    StorageError::Changed { path: task_path, operation: Operation::Publish }
                }
                error => classify(Operation::Publish, &task_path, error),
            })
        })
    }

    /// A put under a condition. The answer to the first try may get lost; the client tries again, and the condition then fails
    /// because of the object that the first try put. So a refusal is believed only when the object is another one.
    fn put_if(&self, path: &str, bytes: &[u8], condition: PutMode) -> Result<()> {
        match self.put(path, bytes, condition) {
            Err(error @ (StorageError::AlreadyExists { .. } | StorageError::Changed { .. })) => {
                match self.read(path, bytes.len() as u64) {
                    Ok(found) if found == bytes => Ok(()),
                    _ => Err(error),
                }
            }
            done => done,
        }
    }

    fn refuse_changed(&self, path: &str, seen: &Version) -> Result<()> {
        match self.version(path)? {
            Some(version) if version == *seen => Ok(()),
            _ => Err(StorageError::Changed { path: self.shown(path), operation: Operation::Publish }),
        }
    }

    fn refuse_existing(&self, operation: Operation, path: &str) -> Result<()> {
        match self.head(operation, path) {
            Ok(_) => Err(StorageError::AlreadyExists { path: self.shown(path), operation }),
            Err(StorageError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Store for ObjectBackend {
    fn describe(&self) -> String {
        self.address.to_string()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ordered_writes: true,
            atomic_replace: self.address.scheme() != Scheme::Http,
            put_if_absent: self.put_if_absent.load(Ordering::Relaxed),
            hard_links: false,
            remote: true,
            visible_is_durable: true,
            locks: false,
        }
    }

    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>> {
        let operation = Operation::List;
        let folder = prefix.rsplit_once('/').map_or("", |(folder, _)| folder);
        let (client, key, shown) = (self.link.client()?, self.prefix(folder)?, self.describe());
        let task_path = shown.clone();
        let found: Vec<_> = wait(operation, &shown, async move {
            let listing = client.list(key.as_ref()).try_collect().await;
            listing.map_err(|error| classify(operation, &task_path, error))
        })
        .or_else(empty_if_missing)?;
        let mut files: Vec<FileInfo> = found
            .into_iter()
            .filter_map(|meta| {
                let path = self.relative(&meta.location)?;
                path.starts_with(prefix).then(|| FileInfo { path, size: meta.size, modified: Some(meta.last_modified.into()) })
            })
            .collect();
        files.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(files)
    }

    fn list_children(&self) -> Result<Vec<String>> {
        let operation = Operation::List;
        let (client, key, shown) = (self.link.client()?, self.prefix("")?, self.describe());
        let task_path = shown.clone();
        let folders = wait(operation, &shown, async move {
            let listing = client.list_with_delimiter(key.as_ref()).await;
            listing.map(|listing| listing.common_prefixes).map_err(|error| classify(operation, &task_path, error))
        })
        .or_else(empty_if_missing)?;
        let mut children: Vec<String> = folders.iter().filter_map(|folder| self.relative(folder)).collect();
        children.sort();
        Ok(children)
    }

    fn size(&self, path: &str) -> Result<u64> {
        Ok(self.head(Operation::Size, path)?.size)
    }

    fn version(&self, path: &str) -> Result<Option<Version>> {
        match self.head(Operation::Size, path) {
            Ok(meta) => {
                let mark = format!("{:?}-{}-{}", meta.e_tag, meta.last_modified, meta.size);
                let e_tag = meta.e_tag.filter(|tag| !tag.starts_with("W/"));
                Ok(Some(Version { mark, e_tag, generation: meta.version }))
            }
            Err(StorageError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let (client, key, shown) = (self.link.client()?, self.key(path)?, self.shown(path));
        let task_path = shown.clone();
        let retries = self.options.retry.clone();
        wait(Operation::Read, &shown, async move { read::whole(&*client, &key, limit, &retries, &task_path).await })
    }

    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>> {
        let meta = self.head(Operation::OpenReader, path)?;
        // A weak or missing tag cannot be matched; a web server's is too often weak behind a proxy.
        let tag = meta.e_tag.filter(|tag| !tag.starts_with("W/") && self.address.scheme() != Scheme::Http);
        Ok(Arc::new(read::ObjectReader::new(
            Arc::clone(&self.link),
            self.key(path)?,
            self.shown(path),
            meta.size,
            tag,
            &self.options,
        )))
    }

    fn create_writer(&self, path: &str, options: &WriteOptions) -> Result<Box<dyn Writer>> {
        let key = self.key(path)?;
        self.refuse_existing(Operation::Create, path)?;
        let has_multipart = self.address.scheme() != Scheme::Http;
        Ok(Box::new(write::ObjectWriter::new(
            self.link.client()?,
            key,
            self.shown(path),
            options.length,
            has_multipart,
            &self.options,
        )))
    }

    fn publish_observed(&self, path: &str, bytes: &[u8], mode: Publish, observer: &dyn PublishObserver) -> Result<()> {
        check_relative(path)?;
        observer.before(Operation::Publish, path)?;
        let (condition, known) = match &mode {
            Publish::Replace => return self.put(path, bytes, PutMode::Overwrite),
            Publish::Create => (PutMode::Create, true),
            Publish::Update(seen) => {
                let version = UpdateVersion { e_tag: seen.e_tag.clone(), version: seen.generation.clone() };
                (PutMode::Update(version), seen.e_tag.is_some())
            }
        };
        if known && self.put_if_absent.load(Ordering::Relaxed) {
            match self.put_if(path, bytes, condition) {
                Err(StorageError::Unsupported { reason, .. }) => {
                    tracing::warn!(store = %self.address, reason, "no conditional put: asking first instead");
                    self.put_if_absent.store(false, Ordering::Relaxed);
                }
                done => return done,
            }
        }
        match &mode {
            Publish::Update(seen) => self.refuse_changed(path, seen)?,
            _ => self.refuse_existing(Operation::Publish, path)?,
        }
        self.put(path, bytes, PutMode::Overwrite)
    }

    fn delete(&self, path: &str) -> Result<()> {
        let operation = Operation::Delete;
        let (client, key, shown) = (self.link.client()?, self.key(path)?, self.shown(path));
        let task_path = shown.clone();
        let deleted =
            wait(
                operation,
                &shown,
                async move { client.delete(&key).await.map_err(|error| classify(operation, &task_path, error)) },
            );
        match deleted {
            Err(StorageError::NotFound { .. }) => Ok(()),
            done => done,
        }
    }

    fn delete_root(&self) -> Result<()> {
        let operation = Operation::DeleteRoot;
        let Some(prefix) = self.prefix("")? else {
            return Err(StorageError::Unsupported {
                path: self.describe(),
                operation,
                reason: "a whole bucket is never deleted".to_owned(),
            });
        };
        let (client, shown) = (self.link.client()?, self.describe());
        let task_path = shown.clone();
        wait(operation, &shown, async move {
            let found = client.list(Some(&prefix)).map_ok(|meta| meta.location).boxed();
            let mut deleted = client.delete_stream(found);
            while let Some(done) = deleted.next().await {
                match done {
                    Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(classify(operation, &task_path, error)),
                }
            }
            Ok(())
        })
    }

    fn origin(&self, path: &str) -> Result<Origin> {
        Ok(Origin::Object { service: self.service.clone(), key: self.key(path)?.to_string() })
    }

    fn adopt(&self, origin: &Origin, to: &str) -> Result<Option<Linked>> {
        let operation = Operation::Link;
        let Origin::Object { service, key } = origin else {
            return Ok(None);
        };
        if *service != self.service || self.address.scheme() == Scheme::Http {
            return Ok(None);
        }
        let (target, shown) = (self.key(to)?, self.shown(to));
        self.refuse_existing(operation, to)?;
        let client = self.link.client()?;
        let (task_path, key) = (shown.clone(), key.clone());
        wait(operation, &shown, async move {
            let source =
                Key::parse(&key).map_err(|_| StorageError::BadPath { path: key, reason: "it is not a valid object key" })?;
            let failed = |error| classify(operation, &task_path, error);
            if client.head(&source).await.map_err(failed)?.size > MAX_SERVER_COPY {
                return Ok(None);
            }
            match client.copy_opts(&source, &target, CopyOptions::default()).await.map_err(failed) {
                Ok(()) => Ok(Some(Linked::ServerCopy)),
                Err(StorageError::Unsupported { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

fn empty_if_missing<T>(error: StorageError) -> Result<Vec<T>> {
    if error.is_not_found() { Ok(Vec::new()) } else { Err(error) }
}

/// Sorts a client's error by what a caller would do about it.
fn classify(operation: Operation, path: &str, error: object_store::Error) -> StorageError {
    use object_store::Error;
    let path = path.to_owned();
    match error {
        Error::NotFound { .. } => StorageError::NotFound { path, operation },
        Error::AlreadyExists { .. } => StorageError::AlreadyExists { path, operation },
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            StorageError::PermissionDenied { path, operation, source: Box::new(error) }
        }
        Error::NotSupported { .. } | Error::NotImplemented { .. } => {
            StorageError::Unsupported { path, operation, reason: error.to_string() }
        }
        error => {
            // Services have no common code for a full disk; these are those of WebDAV, MinIO and Ceph.
            let text = error.to_string();
            let full = ["507 Insufficient Storage", "StorageFull", "QuotaExceeded"];
            if full.iter().any(|mark| text.contains(mark)) {
                let source = std::io::Error::new(std::io::ErrorKind::StorageFull, error);
                return StorageError::NoSpace { path, operation, source };
            }
            // A server that does not know a conditional header may say so by 501.
            if text.contains("501 Not Implemented") {
                return StorageError::Unsupported { path, operation, reason: text };
            }
            StorageError::Object { path, operation, source: Box::new(error) }
        }
    }
}
