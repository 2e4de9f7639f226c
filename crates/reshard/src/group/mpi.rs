//! Ranks as MPI processes: many machines without Python.
//!
//! Every exchange is one or more non-blocking collectives that are polled until they are done or the timeout is over, so
//! that a rank that died is an error and not a hang. A collective cannot be taken back: after a timeout its buffers are
//! left to MPI for good and the group refuses further work.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mpi::Count;
use mpi::collective::CommunicatorCollectives;
use mpi::datatype::PartitionMut;
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

    fn failed(&self, detail: String) -> Error {
        Error::Group { doing: "exchanging over MPI".into(), detail, ranks: Vec::new() }
    }

    /// Everyone's bytes, where rank `i` gives `counts[i]`.
    fn round(&self, communicator: &SimpleCommunicator, send: &[u8], counts: Vec<Count>) -> Result<Vec<u8>> {
        let mut displacements = Vec::with_capacity(counts.len());
        let mut total: Count = 0;
        for count in &counts {
            displacements.push(total);
            total += count;
        }
        // The buffers must outlive the request, also when it never ends: they are given away and taken back.
        let send: *mut [u8] = Box::into_raw(send.to_vec().into_boxed_slice());
        let receive: *mut [u8] = Box::into_raw(vec![0u8; total as usize].into_boxed_slice());
        // SAFETY: both come from Box::into_raw just above and nothing else refers to them.
        let (send_ref, receive_ref) = unsafe { (&*send, &mut *receive) };
        let partition = Box::into_raw(Box::new(PartitionMut::new(receive_ref, counts, displacements)));
        // SAFETY: as above.
        let partition_ref = unsafe { &mut *partition };
        let request = communicator.immediate_all_gather_varcount_into(StaticScope, send_ref, partition_ref);
        self.wait(request)?;
        // SAFETY: the collective is done, so MPI no longer uses the buffers and no reference to them is left.
        unsafe {
            drop(Box::from_raw(partition));
            drop(Box::from_raw(send));
            Ok(Box::from_raw(receive).into_vec())
        }
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
        if self.broken.load(Ordering::Relaxed) {
            return Err(self.failed("an earlier exchange never ended".into()));
        }
        let owned = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let communicator = &owned.0;
        let lengths = self.round(communicator, &(bytes.len() as u64).to_le_bytes(), vec![8; self.size])?;
        let lengths: Vec<usize> =
            lengths.as_chunks::<8>().0.iter().map(|l| usize::try_from(u64::from_le_bytes(*l)).unwrap_or(usize::MAX)).collect();
        // MPI counts with 32 bits: what is longer goes in several rounds.
        let most = (Count::MAX as usize / self.size.max(1)).max(1);
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|_| Vec::new()).collect();
        let rounds = lengths.iter().max().copied().unwrap_or(0).div_ceil(most);
        for round in 0..rounds {
            let part = |length: usize| length.saturating_sub(round * most).min(most);
            let counts: Vec<Count> = lengths.iter().map(|&l| part(l) as Count).collect();
            let start = (round * most).min(bytes.len());
            let received = self.round(communicator, &bytes[start..start + part(bytes.len())], counts)?;
            let mut rest = received.as_slice();
            for (mine, &length) in all.iter_mut().zip(&lengths) {
                let (now, after) = rest.split_at(part(length));
                mine.extend_from_slice(now);
                rest = after;
            }
        }
        Ok(all)
    }
}
