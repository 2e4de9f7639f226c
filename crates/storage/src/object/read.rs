//! Range reads of one object: wanted ranges that lie close together become one request, long ones become several, and
//! all of them run at once. Bytes are copied into the caller's memory as they come. How many requests run and how many bytes
//! wait to be copied is bounded for all readers of a store together.

use std::ops::Range;
use std::sync::{Arc, mpsc};

use bytes::Bytes;
use futures::StreamExt;
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectStore};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::runtime::{handle, lost};
use super::{Link, classify};
use crate::store::check_range;
use crate::{Operation, RangeRead, Reader, Result, Retry, StorageError, StoreOptions};

/// Longer requests are split, so that several connections share the work.
const MAX_REQUEST: u64 = 8 << 20;
/// How many bytes may have arrived without having been copied to where they are wanted, of one store.
const IN_HAND: usize = 64 << 20;

#[derive(Debug)]
pub(super) struct ObjectReader {
    link: Arc<Link>,
    key: Key,
    path: String,
    len: u64,
    /// The version that was opened; an object replaced since is an error, not a mixture.
    tag: Option<String>,
    coalesce_gap: u64,
    retry: Retry,
}

/// What all readers of one store share.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    requests: Arc<Semaphore>,
    /// Of bytes that have arrived and are not yet where they are wanted.
    in_hand: Arc<Semaphore>,
}

impl Limits {
    pub(super) fn new(options: &StoreOptions) -> Limits {
        let requests = options.read_concurrency.clamp(1, Semaphore::MAX_PERMITS);
        Limits { requests: Arc::new(Semaphore::new(requests)), in_hand: Arc::new(Semaphore::new(IN_HAND)) }
    }
}

impl ObjectReader {
    pub(super) fn new(
        link: Arc<Link>,
        key: Key,
        path: String,
        len: u64,
        tag: Option<String>,
        options: &StoreOptions,
    ) -> ObjectReader {
        ObjectReader { link, key, path, len, tag, coalesce_gap: options.coalesce_gap, retry: options.retry.clone() }
    }

    /// Fetches all requests at once and gives each piece that arrives, with its position, to `take`.
    fn fetch(&self, requests: Vec<Range<u64>>, mut take: impl FnMut(u64, &[u8])) -> Result<()> {
        let (sender, receiver) = mpsc::channel();
        let mut left: u64 = requests.iter().map(|range| range.end - range.start).sum();
        let connection = self.link.get()?;
        let source = Arc::new(Source {
            client: Arc::clone(&connection.client),
            key: self.key.clone(),
            path: self.path.clone(),
            tag: self.tag.clone(),
            retry: self.retry.clone(),
            limits: connection.limits.clone(),
        });
        let task = handle()?.spawn(async move {
            futures::stream::iter(requests)
                .for_each_concurrent(None, |range| {
                    let (source, sender) = (source.clone(), sender.clone());
                    async move {
                        if let Err(error) = source.send(range, &sender).await {
                            let _ = sender.send(Err(error));
                        }
                    }
                })
                .await;
        });
        while left > 0 {
            match receiver.recv() {
                Ok(Ok(piece)) => {
                    take(piece.position, &piece.bytes);
                    left = left.saturating_sub(piece.bytes.len() as u64);
                }
                Ok(Err(error)) => {
                    task.abort();
                    return Err(error);
                }
                Err(_) => return Err(lost(Operation::Read, &self.path)),
            }
        }
        Ok(())
    }
}

/// Some bytes of an object, which count as in hand until they are dropped.
struct Piece {
    position: u64,
    bytes: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

type Arrival = Result<Piece>;

struct Source {
    client: Arc<dyn ObjectStore>,
    key: Key,
    path: String,
    tag: Option<String>,
    retry: Retry,
    limits: Limits,
}

impl Source {
    /// Sends one range piece by piece, and goes on where it stopped when the connection breaks.
    async fn send(&self, range: Range<u64>, sender: &mpsc::Sender<Arrival>) -> Result<()> {
        // The semaphores are never closed.
        let _turn = self.limits.requests.acquire().await.ok();
        let mut at = range.start;
        let mut tries = 0;
        loop {
            let before = at;
            let Err(error) = self.send_some(&mut at, range.end, sender).await else {
                return Ok(());
            };
            if at > before {
                tries = 0;
            }
            if tries >= self.retry.max_retries || !matches!(error, StorageError::Object { .. }) {
                return Err(error);
            }
            tokio::time::sleep(pause(&self.retry, tries)).await;
            tries += 1;
        }
    }

    async fn send_some(&self, at: &mut u64, end: u64, sender: &mpsc::Sender<Arrival>) -> Result<()> {
        let failed = |error| classify(Operation::Read, &self.path, error);
        let options =
            GetOptions { range: Some(GetRange::Bounded(*at..end)), if_match: self.tag.clone(), ..GetOptions::default() };
        let answer = self.client.get_opts(&self.key, options).await;
        let answer = answer.map_err(|error| match error {
            object_store::Error::Precondition { .. } => StorageError::Unsupported {
                path: self.path.clone(),
                operation: Operation::Read,
                reason: "it was replaced while being read".to_owned(),
            },
            error => failed(error),
        })?;
        if answer.range.start != *at {
            return Err(self.short(*at, end, answer.range.start));
        }
        let mut pieces = answer.into_stream();
        while let Some(piece) = pieces.next().await {
            let mut piece = piece.map_err(failed)?;
            piece.truncate(usize::try_from(end - *at).unwrap_or(usize::MAX));
            if piece.is_empty() {
                continue;
            }
            let permits = u32::try_from(piece.len().min(IN_HAND)).unwrap_or(u32::MAX);
            let room = self.limits.in_hand.clone().acquire_many_owned(permits).await.ok();
            let position = *at;
            *at += piece.len() as u64;
            if sender.send(Ok(Piece { position, bytes: piece, _room: room })).is_err() {
                return Ok(());
            }
        }
        if *at < end { Err(self.short(*at, end, *at)) } else { Ok(()) }
    }

    fn short(&self, at: u64, end: u64, got: u64) -> StorageError {
        let source = format!("asked for bytes {at}..{end}, the answer stopped at or started from {got}");
        StorageError::Object { path: self.path.clone(), operation: Operation::Read, source: source.into() }
    }
}

/// The pause before try number `tries`, doubling.
fn pause(retry: &Retry, tries: usize) -> std::time::Duration {
    retry.first_backoff.saturating_mul(1 << tries.min(16)).min(retry.max_backoff)
}

/// A whole object of at most `limit` bytes, in one request.
pub(super) async fn whole(client: &dyn ObjectStore, key: &Key, limit: u64, retry: &Retry, path: &str) -> Result<Vec<u8>> {
    let mut tries = 0;
    loop {
        let failed = |error| classify(Operation::Read, path, error);
        let answer = client.get_opts(key, GetOptions::default()).await.map_err(failed)?;
        let size = answer.meta.size;
        if size > limit {
            return Err(StorageError::TooLarge { path: path.to_owned(), size, limit });
        }
        match answer.bytes().await.map_err(failed) {
            Ok(bytes) => return Ok(bytes.into()),
            Err(error) if tries >= retry.max_retries => return Err(error),
            Err(_) => tokio::time::sleep(pause(retry, tries)).await,
        }
        tries += 1;
    }
}

/// The requests that fetch all wanted ranges, which are sorted by their start.
fn plan(wanted: &[Range<u64>], gap: u64) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in wanted.iter().filter(|range| range.start < range.end) {
        match merged.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => last.end = last.end.max(range.end),
            _ => merged.push(range.clone()),
        }
    }
    let mut requests = Vec::with_capacity(merged.len());
    for range in merged {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start.saturating_add(MAX_REQUEST));
            requests.push(start..end);
            start = end;
        }
    }
    requests
}

impl Reader for ObjectReader {
    fn path(&self) -> &str {
        &self.path
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_ranges(&mut [RangeRead { offset, buf }])
    }

    fn read_ranges(&self, ranges: &mut [RangeRead<'_>]) -> Result<()> {
        for range in ranges.iter() {
            check_range(&self.path, range.offset, range.buf.len(), self.len)?;
        }
        let mut order: Vec<usize> = (0..ranges.len()).collect();
        order.sort_by_key(|&index| ranges[index].offset);
        let wanted: Vec<Range<u64>> =
            order.iter().map(|&index| ranges[index].offset..ranges[index].offset + ranges[index].buf.len() as u64).collect();
        // The furthest end of all ranges up to each one: lets a lookup stop although ranges may overlap.
        let furthest: Vec<u64> = wanted
            .iter()
            .scan(0, |furthest, range| {
                *furthest = range.end.max(*furthest);
                Some(*furthest)
            })
            .collect();
        self.fetch(plan(&wanted, self.coalesce_gap), |position, bytes| {
            let end = position + bytes.len() as u64;
            let first = furthest.partition_point(|&furthest| furthest <= position);
            for slot in first..wanted.len() {
                let range = &wanted[slot];
                if range.start >= end {
                    break;
                }
                let (from, to) = (range.start.max(position), range.end.min(end));
                if from < to {
                    let source = &bytes[(from - position) as usize..(to - position) as usize];
                    let target = &mut ranges[order[slot]].buf;
                    target[(from - range.start) as usize..(to - range.start) as usize].copy_from_slice(source);
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_become_one_request_and_long_ones_several() {
        assert_eq!(plan(&[0..10, 12..20, 100..110], 5), vec![0..20, 100..110]);
        assert_eq!(plan(&[0..10, 3..5, 10..10, 9..20], 0), vec![0..20]);
        let long = plan(&[5..6, 6..6 + 2 * MAX_REQUEST], 0);
        assert_eq!(long.len(), 3);
        assert_eq!((long[0].start, long[2].end), (5, 5 + 2 * MAX_REQUEST + 1));
        assert!(plan(&[7..7, 9..9], 1).is_empty());
    }
}
