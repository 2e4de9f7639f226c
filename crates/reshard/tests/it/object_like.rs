//! A store that behaves as object stores do: bytes in order only, whole objects or none, no second names, and a way to go for
//! every request.

use std::io::IoSlice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reshard::storage::memory::MemoryStore;
use reshard::storage::{
    Capabilities, FileInfo, Linked, Origin, Publish, PublishObserver, RangeRead, Reader, Result, Store, Version, WriteOptions,
    Writer,
};

#[derive(Debug, Default)]
pub(crate) struct Ordered {
    pub(crate) inner: Arc<MemoryStore>,
    /// How long every read takes.
    pub(crate) away: Duration,
    pub(crate) reads: Arc<Reads>,
}

/// The reads that a store has seen.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    pub(crate) all: AtomicUsize,
    running: AtomicUsize,
    pub(crate) most_at_once: AtomicUsize,
}

#[derive(Debug)]
struct FarReader {
    inner: Arc<dyn Reader>,
    away: Duration,
    reads: Arc<Reads>,
}

impl Reader for FarReader {
    fn path(&self) -> &str {
        self.inner.path()
    }
    fn len(&self) -> u64 {
        self.inner.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_ranges(&mut [RangeRead { offset, buf }])
    }
    fn read_ranges(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        self.reads.all.fetch_add(1, Ordering::SeqCst);
        let running = self.reads.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.reads.most_at_once.fetch_max(running, Ordering::SeqCst);
        std::thread::sleep(self.away);
        let done = self.inner.read_ranges(ranges);
        self.reads.running.fetch_sub(1, Ordering::SeqCst);
        done
    }
}

#[derive(Debug)]
struct OrderedWriter {
    store: Arc<MemoryStore>,
    path: String,
    length: Option<u64>,
    bytes: Mutex<Vec<u8>>,
}

impl Store for Ordered {
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { ordered_writes: true, hard_links: false, remote: true, locks: false, ..self.inner.capabilities() }
    }
    fn prepare(&self) -> Result<()> {
        self.inner.prepare()
    }
    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>> {
        self.inner.list(prefix)
    }
    fn list_children(&self) -> Result<Vec<String>> {
        self.inner.list_children()
    }
    fn size(&self, path: &str) -> Result<u64> {
        self.inner.size(path)
    }
    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        self.inner.read(path, limit)
    }
    fn version(&self, path: &str) -> Result<Option<Version>> {
        self.inner.version(path)
    }
    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>> {
        Ok(Arc::new(FarReader { inner: self.inner.open_reader(path)?, away: self.away, reads: Arc::clone(&self.reads) }))
    }
    fn create_writer(&self, path: &str, options: &WriteOptions) -> Result<Box<dyn Writer>> {
        let (store, path) = (Arc::clone(&self.inner), path.to_owned());
        Ok(Box::new(OrderedWriter { store, path, length: options.length, bytes: Mutex::default() }))
    }
    fn publish_observed(&self, path: &str, bytes: &[u8], mode: Publish, observer: &dyn PublishObserver) -> Result<()> {
        self.inner.publish_observed(path, bytes, mode, observer)
    }
    fn delete(&self, path: &str) -> Result<()> {
        self.inner.delete(path)
    }
    fn delete_root(&self) -> Result<()> {
        self.inner.delete_root()
    }
    fn delete_empty_root(&self) -> Result<()> {
        self.inner.delete_empty_root()
    }
    fn origin(&self, path: &str) -> Result<Origin> {
        self.inner.origin(path)
    }
    fn adopt(&self, _origin: &Origin, _to: &str) -> Result<Option<Linked>> {
        Ok(None)
    }
    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }
}

impl Writer for OrderedWriter {
    fn path(&self) -> &str {
        &self.path
    }
    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let mut bytes = self.bytes.lock().unwrap();
        assert_eq!(offset, bytes.len() as u64, "{}: out of order", self.path);
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        Ok(())
    }
    fn finish(self: Box<Self>, _sync: bool) -> Result<()> {
        let bytes = self.bytes.into_inner().unwrap();
        assert!(self.length.is_none_or(|length| length == bytes.len() as u64), "{}: another length than promised", self.path);
        self.store.publish(&self.path, &bytes, Publish::Create)
    }
    fn abort(self: Box<Self>) {}
}
