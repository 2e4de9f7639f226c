//! The wrapper itself: every method of the store, its readers and its writers is one counted step and forwards.

use std::io::IoSlice;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Decision, Failure, Faults, Half, flip, short_write};
use crate::store::total;
use crate::{
    Capabilities, FileInfo, Linked, Operation, Origin, Publish, PublishObserver, RangeRead, Reader, Result, Store, Version,
    WriteLock, WriteOptions, Writer,
};

#[derive(Debug)]
pub(super) struct Faulty {
    inner: Arc<dyn Store>,
    faults: Faults,
}

impl Faulty {
    pub(super) fn new(inner: Arc<dyn Store>, faults: Faults) -> Faulty {
        Faulty { inner, faults }
    }
}

impl Store for Faulty {
    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn local_root(&self) -> Option<&Path> {
        self.inner.local_root()
    }

    fn prepare(&self) -> Result<()> {
        self.faults.run(Operation::Prepare, "", || self.inner.prepare())
    }

    fn list(&self, prefix: &str) -> Result<Vec<FileInfo>> {
        self.faults.run(Operation::List, prefix, || self.inner.list(prefix))
    }

    fn list_children(&self) -> Result<Vec<String>> {
        self.faults.run(Operation::List, "", || self.inner.list_children())
    }

    fn list_links(&self) -> Result<Vec<String>> {
        self.faults.run(Operation::List, "", || self.inner.list_links())
    }

    fn size(&self, path: &str) -> Result<u64> {
        self.faults.run(Operation::Size, path, || self.inner.size(path))
    }

    fn version(&self, path: &str) -> Result<Option<Version>> {
        self.faults.run(Operation::Size, path, || self.inner.version(path))
    }

    fn lock(&self) -> Result<WriteLock> {
        self.faults.run(Operation::Lock, "", || self.inner.lock())
    }

    fn exists(&self, path: &str) -> Result<bool> {
        self.faults.run(Operation::Size, path, || self.inner.exists(path))
    }

    fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>> {
        let decision = self.faults.decide(Operation::Read, path, 0)?;
        let mut bytes = self.inner.read(path, limit)?;
        if let Some(bit) = decision.flip {
            flip(&mut bytes, bit);
        }
        self.faults.settle(&decision, Operation::Read, path)?;
        Ok(bytes)
    }

    fn open_reader(&self, path: &str) -> Result<Arc<dyn Reader>> {
        let inner = self.faults.run(Operation::OpenReader, path, || self.inner.open_reader(path))?;
        Ok(Arc::new(FaultyReader { inner, relative: path.to_owned(), faults: self.faults.clone() }))
    }

    fn create_writer(&self, path: &str, options: &WriteOptions) -> Result<Box<dyn Writer>> {
        let inner = self.faults.run(Operation::Create, path, || {
            let writer = self.inner.create_writer(path, options)?;
            self.faults.tracker().created(&self.inner, path, false);
            Ok(writer)
        })?;
        Ok(Box::new(FaultyWriter { inner, store: self.inner.clone(), relative: path.to_owned(), faults: self.faults.clone() }))
    }

    fn publish_observed(&self, path: &str, bytes: &[u8], mode: Publish, observer: &dyn PublishObserver) -> Result<()> {
        let watcher = Watcher { store: self, length: bytes.len() as u64, outer: observer, seen: Mutex::default() };
        let done = self.inner.publish_observed(path, bytes, mode, &watcher);
        let seen = watcher.seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = done {
            if !error.is_crash()
                && let Some(staged) = &seen.staged
            {
                self.faults.tracker().forget(&*self.inner, staged);
            }
            return Err(error);
        }
        self.faults.check_alive(Operation::Publish, path)?;
        self.faults.tracker().names_synced(&*self.inner);
        if let Some(bit) = seen.flip {
            let mut flipped = bytes.to_vec();
            flip(&mut flipped, bit);
            self.inner.publish(path, &flipped, Publish::Replace)?;
        }
        match seen.late {
            Some((failure, operation, step)) => Err(failure.error(operation, path, step)),
            None => Ok(()),
        }
    }

    fn rename(&self, from: &str, to: &str, mode: Publish) -> Result<()> {
        self.faults.run(Operation::Publish, to, || {
            self.inner.rename(from, to, mode)?;
            self.faults.tracker().renamed(&self.inner, from, to);
            Ok(())
        })
    }

    fn delete(&self, path: &str) -> Result<()> {
        self.faults.run(Operation::Delete, path, || {
            self.inner.delete(path)?;
            self.faults.tracker().forget(&*self.inner, path);
            Ok(())
        })
    }

    fn delete_root(&self) -> Result<()> {
        self.faults.run(Operation::DeleteRoot, "", || {
            self.inner.delete_root()?;
            self.faults.tracker().root_deleted(&*self.inner);
            Ok(())
        })
    }

    fn delete_empty_root(&self) -> Result<()> {
        self.faults.run(Operation::DeleteRoot, "", || self.inner.delete_empty_root())
    }

    fn origin(&self, path: &str) -> Result<Origin> {
        self.faults.check_alive(Operation::Link, path)?;
        self.inner.origin(path)
    }

    fn adopt(&self, origin: &Origin, to: &str) -> Result<Option<Linked>> {
        self.faults.run(Operation::Link, to, || {
            let linked = self.inner.adopt(origin, to)?;
            if linked.is_some() {
                self.faults.tracker().created(&self.inner, to, true);
            }
            Ok(linked)
        })
    }

    // `link_or_copy` is the trait's own: it goes through `origin`, `adopt`, readers and writers, and so is counted,
    // whichever of the two stores is wrapped.

    fn sync(&self) -> Result<()> {
        self.faults.run(Operation::SyncFolder, "", || {
            self.inner.sync()?;
            self.faults.tracker().names_synced(&*self.inner);
            Ok(())
        })
    }
}

/// Counts the steps inside an atomic publication.
struct Watcher<'a> {
    store: &'a Faulty,
    length: u64,
    outer: &'a dyn PublishObserver,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    staged: Option<String>,
    flip: Option<u64>,
    late: Option<(Failure, Operation, u64)>,
}

impl PublishObserver for Watcher<'_> {
    fn before(&self, operation: Operation, path: &str) -> Result<()> {
        let writes = matches!(operation, Operation::WriteStaged | Operation::Publish);
        let faults = &self.store.faults;
        let decision = faults.decide(operation, path, if writes { self.length } else { 0 })?;
        if decision.half == Some(Half::Fail) {
            return Err(short_write(operation, path));
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.flip = seen.flip.or(decision.flip);
        seen.late = seen.late.or(decision.late.map(|failure| (failure, operation, decision.number)));
        let inner = &self.store.inner;
        match operation {
            Operation::Stage => {
                seen.staged = Some(path.to_owned());
                faults.tracker().created(inner, path, false);
            }
            Operation::Publish => {
                // From here on the staged file has its final name, its content synced before.
                if let Some(staged) = &seen.staged {
                    faults.tracker().forget(&**inner, staged);
                }
                faults.tracker().forget(&**inner, path);
            }
            _ => {}
        }
        drop(seen);
        self.outer.before(operation, path)
    }
}

#[derive(Debug)]
struct FaultyReader {
    inner: Arc<dyn Reader>,
    relative: String,
    faults: Faults,
}

impl Reader for FaultyReader {
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
        let wanted = ranges.iter().map(|range| range.buf.len() as u64).sum();
        let decision = self.faults.decide(Operation::Read, &self.relative, wanted)?;
        match &mut *ranges {
            // What a single read is for the backend stays one.
            [only] => self.inner.read_at(only.offset, only.buf)?,
            many => self.inner.read_ranges(many)?,
        }
        if let Some(bit) = decision.flip
            && wanted > 0
        {
            let mut bit = bit % (wanted * 8);
            for range in ranges {
                let bits = range.buf.len() as u64 * 8;
                if bit < bits {
                    flip(range.buf, bit);
                    break;
                }
                bit -= bits;
            }
        }
        self.faults.settle(&decision, Operation::Read, &self.relative)
    }

    fn will_read(&self, offset: u64, length: u64) {
        self.inner.will_read(offset, length);
    }
}

#[derive(Debug)]
struct FaultyWriter {
    inner: Box<dyn Writer>,
    store: Arc<dyn Store>,
    relative: String,
    faults: Faults,
}

impl FaultyWriter {
    fn write_changed(&self, decision: &Decision, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let mut bytes: Vec<u8> = Vec::new();
        parts.iter().for_each(|part| bytes.extend_from_slice(part));
        if let Some(bit) = decision.flip {
            flip(&mut bytes, bit);
        }
        let Some(half) = decision.half else {
            return self.inner.write_at(offset, &[IoSlice::new(&bytes)]);
        };
        self.inner.write_at(offset, &[IoSlice::new(&bytes[..bytes.len() / 2])])?;
        match half {
            Half::Pretend => Ok(()),
            Half::Fail => Err(short_write(Operation::Write, &self.relative)),
            Half::Crash => {
                self.faults.stop_at(decision.number);
                self.faults.check_alive(Operation::Write, &self.relative)
            }
        }
    }
}

impl Writer for FaultyWriter {
    fn path(&self) -> &str {
        self.inner.path()
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let decision = self.faults.decide(Operation::Write, &self.relative, total(parts))?;
        if decision.half.is_some() || decision.flip.is_some() {
            self.write_changed(&decision, offset, parts)?;
        } else {
            self.inner.write_at(offset, parts)?;
        }
        self.faults.settle(&decision, Operation::Write, &self.relative)
    }

    fn finish(self: Box<Self>, sync: bool) -> Result<()> {
        let FaultyWriter { inner, store, relative, faults } = *self;
        faults.run(Operation::Finish, &relative, || {
            inner.finish(sync)?;
            if sync {
                faults.tracker().synced(&*store, &relative);
            }
            Ok(())
        })
    }

    fn abort(self: Box<Self>) {
        let FaultyWriter { inner, store, relative, faults } = *self;
        // After a crash nobody is there to clean up; a failed abort leaves its file, too.
        let _ = faults.run(Operation::Abort, &relative, || {
            inner.abort();
            faults.tracker().forget(&*store, &relative);
            Ok(())
        });
    }
}
