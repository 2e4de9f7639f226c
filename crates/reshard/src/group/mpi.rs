//! Ranks as MPI processes: many machines without Python.
//!
//! Every exchange is one or more non-blocking collectives that are polled until they are done or the timeout is over, so
//! that a rank that died is an error and not a hang. A collective cannot be taken back: after a timeout its buffers are
//! left to MPI for good and the group refuses further work.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mpi::Count;
use mpi::collective::{CommunicatorCollectives, Root};
use mpi::datatype::{Partition, PartitionMut};
use mpi::request::{Request, StaticScope};
use mpi::topology::{Communicator, SimpleCommunicator};

use super::Group;
use crate::error::{Error, Result};

/// A group over a communicator of its own. MPI must have been started with at least `Threading::Serialized`.
pub struct Mpi {
    rank: usize,
    size: usize,
    timeout: Duration,
    communicator: Mutex<Owned>,
    broken: AtomicBool,
}

/// The communicator, which the group alone uses.
struct Owned(SimpleCommunicator);

// SAFETY: a communicator is a handle of the MPI library; `Threading::Serialized` allows calls from any thread, one at a
// time, which the mutex around it ensures.
unsafe impl Send for Owned {}

impl Mpi {
    /// A group of all ranks of a communicator. Collective: every rank of it calls this.
    pub fn new(communicator: &SimpleCommunicator, timeout: Duration) -> Mpi {
        let own = communicator.duplicate();
        Mpi {
            rank: own.rank() as usize,
            size: own.size() as usize,
            timeout,
            communicator: Mutex::new(Owned(own)),
            broken: AtomicBool::new(false),
        }
    }

    fn wait<D: ?Sized>(&self, mut request: Request<'static, D, StaticScope>) -> Result<()> {
        let start = Instant::now();
        loop {
            request = match request.test() {
                Ok(_) => return Ok(()),
                Err(pending) => pending,
            };
            let waited = start.elapsed();
            if waited > self.timeout {
                // The request would panic when dropped; MPI keeps it and its buffers.
                std::mem::forget(request);
                self.broken.store(true, Ordering::Relaxed);
                return Err(self.failed(format!("some rank did not answer within {} s", self.timeout.as_secs_f64())));
            }
            if waited > Duration::from_millis(1) {
                std::thread::sleep(Duration::from_micros(100));
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn check_root(&self, root: usize) -> Result<()> {
        match root < self.size {
            true => Ok(()),
            false => Err(Error::internal(format!("root {root} is not a rank of a group of {}", self.size))),
        }
    }

    fn failed(&self, detail: String) -> Error {
        Error::Group { doing: "exchanging over MPI".into(), detail, ranks: Vec::new() }
    }

    /// The communicator, unless an exchange never ended.
    fn lock(&self) -> Result<MutexGuard<'_, Owned>> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(self.failed("an earlier exchange never ended".into()));
        }
        Ok(self.communicator.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Everyone's bytes, where rank `i` gives `counts[i]`.
    fn all_gather_round(&self, communicator: &SimpleCommunicator, send: &[u8], counts: Vec<Count>) -> Result<Vec<u8>> {
        let (send, receive) = (LentBytes::new(send.to_vec()), LentBytes::zeroed(total(&counts)));
        let displacements = displacements(&counts);
        // SAFETY: all are lent to this one exchange; the partition, which refers to the buffer, goes before it.
        unsafe {
            let partition = Lent::new(Box::new(PartitionMut::new(receive.get(), counts, displacements)));
            self.wait(communicator.immediate_all_gather_varcount_into(StaticScope, &*send.get(), partition.get()))?;
            drop(partition.back());
            drop(send.back());
            Ok(receive.back())
        }
    }

    /// Everyone's bytes at the root, where rank `i` gives `counts[i]`; nothing elsewhere.
    fn gather_round(&self, communicator: &SimpleCommunicator, root: usize, send: &[u8], counts: Vec<Count>) -> Result<Vec<u8>> {
        let process = communicator.process_at_rank(root as Count);
        let send = LentBytes::new(send.to_vec());
        if root != self.rank {
            // SAFETY: lent just above and used by this one exchange until it is taken back.
            unsafe {
                self.wait(process.immediate_gather_varcount_into(StaticScope, &*send.get()))?;
                drop(send.back());
            }
            return Ok(Vec::new());
        }
        let receive = LentBytes::zeroed(total(&counts));
        let displacements = displacements(&counts);
        // SAFETY: as above; the partition, which refers to the buffer, goes before the buffer is taken back.
        unsafe {
            let partition = Lent::new(Box::new(PartitionMut::new(receive.get(), counts, displacements)));
            self.wait(process.immediate_gather_varcount_into_root(StaticScope, &*send.get(), partition.get()))?;
            drop(partition.back());
            drop(send.back());
            Ok(receive.back())
        }
    }

    /// The root's bytes for this rank, which are `length`; the root gives everyone's one after the other, and their lengths.
    fn scatter_round(
        &self,
        communicator: &SimpleCommunicator,
        root: usize,
        sent: Option<(Vec<u8>, Vec<Count>)>,
        length: usize,
    ) -> Result<Vec<u8>> {
        let process = communicator.process_at_rank(root as Count);
        let receive = LentBytes::zeroed(length);
        let Some((bytes, counts)) = sent else {
            // SAFETY: lent just above and used by this one exchange until it is taken back.
            unsafe {
                self.wait(process.immediate_scatter_varcount_into(StaticScope, receive.get()))?;
                return Ok(receive.back());
            }
        };
        let send = LentBytes::new(bytes);
        let displacements = displacements(&counts);
        // SAFETY: as above; the partition, which refers to the buffer, goes before the buffer is taken back.
        unsafe {
            let partition = Lent::new(Box::new(Partition::new(&*send.get(), counts, displacements)));
            self.wait(process.immediate_scatter_varcount_into_root(StaticScope, &*partition.get(), receive.get()))?;
            drop(partition.back());
            drop(send.back());
            Ok(receive.back())
        }
    }

    /// MPI counts with 32 bits: what is longer goes in several rounds of at most so many bytes a rank.
    fn most(&self) -> usize {
        (Count::MAX as usize / self.size.max(1)).max(1)
    }

    /// Everyone's lengths, everywhere.
    fn lengths(&self, communicator: &SimpleCommunicator, own: usize) -> Result<Vec<usize>> {
        let all = self.all_gather_round(communicator, &(own as u64).to_le_bytes(), vec![8; self.size])?;
        Ok(numbers(&all).collect())
    }

    /// Exchanges bytes of these lengths in rounds, and joins what each round brings of every rank.
    fn in_rounds(
        &self,
        bytes: &[u8],
        lengths: &[usize],
        mut round: impl FnMut(&[u8], Vec<Count>) -> Result<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        let most = self.most();
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|_| Vec::new()).collect();
        let rounds = lengths.iter().max().copied().unwrap_or(0).div_ceil(most);
        for number in 0..rounds {
            let counts: Vec<Count> = lengths.iter().map(|&length| part(length, number, most).len() as Count).collect();
            let received = round(&bytes[part(bytes.len(), number, most)], counts.clone())?;
            let mut rest = received.as_slice();
            for (mine, count) in all.iter_mut().zip(counts) {
                // Only the root receives anything of a gather.
                let (now, after) = rest.split_at((count as usize).min(rest.len()));
                mine.extend_from_slice(now);
                rest = after;
            }
        }
        Ok(all)
    }
}

/// The bytes of a message that go in a round.
fn part(length: usize, round: usize, most: usize) -> std::ops::Range<usize> {
    let start = (round * most).min(length);
    start..(start + most).min(length)
}

fn total(counts: &[Count]) -> usize {
    counts.iter().map(|&count| count as usize).sum()
}

fn displacements(counts: &[Count]) -> Vec<Count> {
    counts.iter().scan(0, |at, count| Some(std::mem::replace(at, *at + count))).collect()
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes.as_chunks::<8>().0.iter().map(|n| usize::try_from(u64::from_le_bytes(*n)).unwrap_or(usize::MAX))
}

/// A buffer that MPI may use as long as it likes: an exchange that never ends keeps it for good.
struct Lent<T: ?Sized>(*mut T);

impl<T: ?Sized> Lent<T> {
    fn new(owned: Box<T>) -> Lent<T> {
        Lent(Box::into_raw(owned))
    }

    /// # Safety
    /// Whatever refers to the buffer must be done with it before [`Lent::back`], and only one may write.
    #[allow(clippy::mut_from_ref, reason = "the buffer is lent, not owned")]
    unsafe fn get(&self) -> &'static mut T {
        // SAFETY: the pointer comes from a box that nobody has taken back, and the caller keeps the rest.
        unsafe { &mut *self.0 }
    }

    /// # Safety
    /// The exchange that used the buffer is done and no reference to it is left.
    unsafe fn back(self) -> Box<T> {
        // SAFETY: the pointer comes from `Box::into_raw` in `new`, and `self` is used up.
        unsafe { Box::from_raw(self.0) }
    }
}

/// Lent bytes, never at the address that an empty slice has: to MPI it means "in place".
struct LentBytes {
    lent: Lent<[u8]>,
    length: usize,
}

impl LentBytes {
    fn new(mut bytes: Vec<u8>) -> LentBytes {
        let length = bytes.len();
        bytes.resize(length.max(1), 0);
        LentBytes { lent: Lent::new(bytes.into_boxed_slice()), length }
    }

    fn zeroed(length: usize) -> LentBytes {
        LentBytes::new(vec![0; length])
    }

    /// # Safety
    /// As [`Lent::get`].
    #[allow(clippy::mut_from_ref, reason = "the buffer is lent, not owned")]
    unsafe fn get(&self) -> &'static mut [u8] {
        // SAFETY: the caller keeps what `Lent::get` asks for.
        unsafe { &mut self.lent.get()[..self.length] }
    }

    /// # Safety
    /// As [`Lent::back`].
    unsafe fn back(self) -> Vec<u8> {
        // SAFETY: the caller keeps what `Lent::back` asks for.
        let mut bytes = unsafe { self.lent.back() }.into_vec();
        bytes.truncate(self.length);
        bytes
    }
}

impl Group for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let owned = self.lock()?;
        let lengths = self.lengths(&owned.0, bytes.len())?;
        self.in_rounds(bytes, &lengths, |part, counts| self.all_gather_round(&owned.0, part, counts))
    }

    fn gather(&self, root: usize, bytes: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        self.check_root(root)?;
        let owned = self.lock()?;
        let lengths = self.lengths(&owned.0, bytes.len())?;
        let all = self.in_rounds(bytes, &lengths, |part, counts| self.gather_round(&owned.0, root, part, counts))?;
        Ok((self.rank == root).then_some(all))
    }

    fn scatter(&self, root: usize, bytes: Option<Vec<Vec<u8>>>) -> Result<Vec<u8>> {
        self.check_root(root)?;
        let owned = self.lock()?;
        let parts = bytes.filter(|_| self.rank == root);
        // A root with parts for some ranks only says so to all of them, with a length that no message has.
        let wrong = parts.as_ref().is_some_and(|parts| parts.len() != self.size);
        let heads = parts.as_ref().map(|parts| {
            let longest = parts.iter().map(Vec::len).max().unwrap_or(0) as u64;
            let length = |rank: usize| if wrong { u64::MAX } else { parts[rank].len() as u64 };
            let heads = (0..self.size).flat_map(|rank| [length(rank), longest]).flat_map(u64::to_le_bytes);
            (heads.collect(), vec![16; self.size])
        });
        let head = self.scatter_round(&owned.0, root, heads, 16)?;
        let mut head = numbers(&head);
        let (length, longest) = (head.next().unwrap_or(usize::MAX), head.next().unwrap_or(0));
        if length == usize::MAX {
            return Err(self.failed(format!("the root did not scatter to all {} ranks", self.size)));
        }
        let most = self.most();
        let mut own = Vec::with_capacity(length);
        for round in 0..longest.div_ceil(most) {
            let sent = parts.as_ref().map(|parts| {
                let now = |bytes: &Vec<u8>| part(bytes.len(), round, most);
                let counts = parts.iter().map(|bytes| now(bytes).len() as Count).collect();
                (parts.iter().flat_map(|bytes| &bytes[now(bytes)]).copied().collect(), counts)
            });
            own.extend(self.scatter_round(&owned.0, root, sent, part(length, round, most).len())?);
        }
        Ok(own)
    }
}
