//! Upload of one object: ordered writes are collected into parts, parts travel at once under a byte budget, and the
//! object appears when the last of them has arrived.

use std::io::IoSlice;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use object_store::path::Path as Key;
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::classify;
use super::runtime::{handle, wait};
use crate::{Operation, Result, StorageError, StoreOptions, Writer};

/// S3's least size of a part (except the last), and its largest number of parts.
const MIN_PART: u64 = 5 << 20;
const MAX_PARTS: u64 = 10_000;

#[derive(Debug)]
pub(super) struct ObjectWriter {
    client: Arc<dyn ObjectStore>,
    key: Key,
    path: String,
    declared: Option<u64>,
    has_multipart: bool,
    budget: u64,
    part_size: u64,
    state: Mutex<State>,
    flight: Arc<Flight>,
}

#[derive(Debug)]
struct State {
    /// The next byte that is expected.
    next: u64,
    /// The part being collected.
    part: Vec<u8>,
    sent_parts: u64,
    upload: Option<Box<dyn MultipartUpload>>,
}

/// What is on its way.
#[derive(Debug, Default)]
struct Flight {
    now: Mutex<InFlight>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct InFlight {
    bytes: u64,
    parts: u64,
    failure: Option<StorageError>,
}

impl Flight {
    /// Waits until `length` more bytes fit the budget (one part always fits), and counts them in.
    fn enter(&self, length: u64, budget: u64) -> Result<()> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        while now.failure.is_none() && now.parts > 0 && now.bytes + length > budget {
            now = self.changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(failure) = now.failure.take() {
            return Err(failure);
        }
        now.bytes += length;
        now.parts += 1;
        Ok(())
    }

    fn leave(&self, length: u64, done: Result<()>) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.bytes -= length;
        now.parts -= 1;
        if let Err(error) = done {
            // The first failure is the cause; what follows it is noise.
            now.failure.get_or_insert(error);
        }
        self.changed.notify_all();
    }

    /// Waits until nothing is on its way.
    fn land(&self) -> Result<()> {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        while now.parts > 0 {
            now = self.changed.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
        now.failure.take().map_or(Ok(()), Err)
    }
}

/// Counts a part out again whatever ends its task, a panic included.
struct Landing {
    flight: Arc<Flight>,
    length: u64,
    path: String,
    done: Option<Result<()>>,
}

impl Landing {
    fn finish(&mut self, done: Result<()>) {
        self.done = Some(done);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let done = self.done.take().unwrap_or_else(|| Err(super::runtime::lost(Operation::Write, &self.path)));
        self.flight.leave(self.length, done);
    }
}

impl ObjectWriter {
    pub(super) fn new(
        client: Arc<dyn ObjectStore>,
        key: Key,
        path: String,
        declared: Option<u64>,
        has_multipart: bool,
        options: &StoreOptions,
    ) -> ObjectWriter {
        ObjectWriter {
            client,
            key,
            path,
            declared,
            has_multipart,
            budget: options.upload_budget,
            part_size: first_part_size(options.part_size, declared),
            state: Mutex::new(State { next: 0, part: Vec::new(), sent_parts: 0, upload: None }),
            flight: Arc::default(),
        }
    }

    /// How large the next part gets. Of a file whose length nobody declared, later parts are larger, so that 10,000 of
    /// them always suffice.
    fn next_part_size(&self, sent_parts: u64) -> u64 {
        if self.declared.is_some() { self.part_size } else { self.part_size << (sent_parts / 1000).min(6) }
    }

    /// Sends the collected part on its way.
    fn send_part(&self, state: &mut State) -> Result<()> {
        if !self.has_multipart {
            return Err(StorageError::Unsupported {
                path: self.path.clone(),
                operation: Operation::Write,
                reason: format!("this service takes files of at most {} bytes (the upload budget)", self.budget),
            });
        }
        let part = std::mem::take(&mut state.part);
        let length = part.len() as u64;
        self.flight.enter(length, self.budget)?;
        let mut landing = Landing { flight: self.flight.clone(), length, path: self.path.clone(), done: None };
        let upload = match &mut state.upload {
            Some(upload) => upload,
            None => match self.start() {
                Ok(upload) => state.upload.insert(upload),
                Err(error) => {
                    landing.finish(Ok(()));
                    return Err(error);
                }
            },
        };
        let sending = upload.put_part(PutPayload::from(part));
        handle()?.spawn(async move {
            let done = sending.await.map_err(|error| classify(Operation::Write, &landing.path, error));
            landing.finish(done);
        });
        state.sent_parts += 1;
        Ok(())
    }

    fn start(&self) -> Result<Box<dyn MultipartUpload>> {
        let (client, key, path) = (self.client.clone(), self.key.clone(), self.path.clone());
        wait(Operation::Create, &self.path, async move {
            client.put_multipart(&key).await.map_err(|error| classify(Operation::Create, &path, error))
        })
    }

    fn give_up(&self, upload: Option<Box<dyn MultipartUpload>>) {
        // Parts that still travel would be charged for after the abort.
        let _ = self.flight.land();
        let Some(mut upload) = upload else { return };
        let path = self.path.clone();
        let aborted = wait(Operation::Abort, &self.path, async move {
            upload.abort().await.map_err(|error| classify(Operation::Abort, &path, error))
        });
        if let Err(error) = aborted {
            tracing::warn!(path = %self.path, %error, "could not abort an upload");
        }
    }

    fn complete(&self, state: &mut State) -> Result<()> {
        if let Some(declared) = self.declared
            && declared != state.next
        {
            return Err(StorageError::WrongLength { path: self.path.clone(), declared, written: state.next });
        }
        if state.upload.is_none() {
            return self.put_whole(std::mem::take(&mut state.part));
        }
        if !state.part.is_empty() {
            self.send_part(state)?;
        }
        self.flight.land()?;
        let Some(mut upload) = state.upload.take() else {
            return Ok(());
        };
        let path = self.path.clone();
        wait(Operation::Finish, &self.path, async move {
            let done = upload.complete().await;
            done.map(|_| ()).map_err(|error| classify(Operation::Finish, &path, error))
        })
    }

    /// A file that fits one part needs no parts.
    fn put_whole(&self, bytes: Vec<u8>) -> Result<()> {
        let (client, key, path) = (self.client.clone(), self.key.clone(), self.path.clone());
        wait(Operation::Finish, &self.path, async move {
            let options = PutOptions { mode: PutMode::Overwrite, ..PutOptions::default() };
            let done = client.put_opts(&key, PutPayload::from(bytes), options).await;
            done.map(|_| ()).map_err(|error| classify(Operation::Finish, &path, error))
        })
    }
}

/// At least what S3 takes, and large enough for a file of the declared length.
fn first_part_size(wanted: u64, declared: Option<u64>) -> u64 {
    let enough = declared.unwrap_or(0).div_ceil(MAX_PARTS).next_multiple_of(1 << 20);
    wanted.max(MIN_PART).max(enough)
}

impl Writer for ObjectWriter {
    fn path(&self) -> &str {
        &self.path
    }

    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if offset != state.next {
            return Err(StorageError::OutOfOrder { path: self.path.clone(), offset, expected: state.next });
        }
        for bytes in parts {
            let mut rest: &[u8] = bytes;
            while !rest.is_empty() {
                let limit = if self.has_multipart { self.next_part_size(state.sent_parts) } else { self.budget };
                if state.part.len() as u64 >= limit {
                    self.send_part(&mut state)?;
                    continue;
                }
                if state.part.capacity() == 0 {
                    let left = self.declared.map_or(limit, |declared| declared.saturating_sub(state.next));
                    state.part.reserve_exact(limit.min(left.max(rest.len() as u64)) as usize);
                }
                let count = rest.len().min((limit - state.part.len() as u64) as usize);
                state.part.extend_from_slice(&rest[..count]);
                state.next += count as u64;
                rest = &rest[count..];
            }
        }
        Ok(())
    }

    fn finish(self: Box<Self>, _sync: bool) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = self.complete(&mut state);
        if done.is_err() {
            self.give_up(state.upload.take());
        }
        done
    }

    fn abort(self: Box<Self>) {
        let upload = self.state.lock().unwrap_or_else(PoisonError::into_inner).upload.take();
        self.give_up(upload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_large_enough_for_ten_thousand_of_them() {
        assert_eq!(first_part_size(1, None), MIN_PART);
        assert_eq!(first_part_size(8 << 20, Some(1 << 30)), 8 << 20);
        let five_tb = 5 << 40;
        assert!(first_part_size(8 << 20, Some(five_tb)) * MAX_PARTS >= five_tb);
    }
}
