//! Ranks as threads of one process: the embedded default, for tests, tools and the demo.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Group;
use crate::error::{Error, Result};

/// One rank of a group of threads. Dropping it tells the others that this rank has left.
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    size: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The exchanges under way, by number; a fast rank may be one ahead of a slow one.
    rounds: BTreeMap<u64, Round>,
    /// The next exchange of each rank.
    next: Vec<u64>,
    left: Vec<bool>,
}

#[derive(Debug)]
struct Round {
    given: Vec<Option<Vec<u8>>>,
    taken: usize,
}

impl Threads {
    /// How long a rank waits for the others unless told otherwise.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

    /// The ranks of a new group of `size`; give one to each thread.
    pub fn group(size: usize, timeout: Duration) -> Vec<Threads> {
        let state = State { rounds: BTreeMap::new(), next: vec![0; size], left: vec![false; size] };
        let shared = Arc::new(Shared { size, timeout, state: Mutex::new(state), changed: Condvar::new() });
        (0..size).map(|rank| Threads { rank, shared: Arc::clone(&shared) }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank that panicked while holding the lock left the map consistent: every update is one insertion.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, detail: String, ranks: Vec<usize>) -> Error {
        Error::Group { doing: "exchanging between threads".into(), detail, ranks }
    }
}

impl Group for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let size = self.shared.size;
        let deadline = Instant::now() + self.shared.timeout;
        let mut state = self.lock();
        let number = state.next[self.rank];
        state.next[self.rank] += 1;
        let round = state.rounds.entry(number).or_insert_with(|| Round { given: vec![None; size], taken: 0 });
        round.given[self.rank] = Some(bytes.to_vec());
        self.shared.changed.notify_all();
        loop {
            let Some(round) = state.rounds.get_mut(&number) else {
                return Err(self.failed("an exchange vanished".into(), Vec::new()));
            };
            if round.given.iter().all(Option::is_some) {
                let all = round.given.iter().flatten().cloned().collect();
                round.taken += 1;
                if round.taken == size {
                    state.rounds.remove(&number);
                }
                return Ok(all);
            }
            let silent: Vec<usize> = (0..size).filter(|&r| round.given[r].is_none()).collect();
            let gone: Vec<usize> = silent.iter().copied().filter(|&r| state.left[r]).collect();
            if !gone.is_empty() {
                return Err(self.failed(format!("rank {} has left the group", join(&gone)), gone));
            }
            let now = Instant::now();
            if now >= deadline {
                let waited = self.shared.timeout.as_secs_f64();
                return Err(self.failed(format!("no answer from rank {} after {waited} s", join(&silent)), silent));
            }
            (state, _) = self.shared.changed.wait_timeout(state, deadline - now).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.lock().left[self.rank] = true;
        self.shared.changed.notify_all();
    }
}

fn join(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Runs `work` on `size` ranks, a thread each, and returns what each rank returned, by rank. A rank that panics leaves the
/// group, so that the others fail with an error and do not wait; its own entry is an error too.
pub fn run_threads<T: Send>(size: usize, work: impl Fn(Threads) -> Result<T> + Sync) -> Vec<Result<T>> {
    let work = &work;
    std::thread::scope(|scope| {
        let ranks = Threads::group(size, Threads::DEFAULT_TIMEOUT);
        let handles: Vec<_> = ranks.into_iter().map(|group| scope.spawn(move || work(group))).collect();
        handles
            .into_iter()
            .enumerate()
            .map(|(rank, handle)| {
                handle.join().unwrap_or_else(|_| {
                    Err(Error::Group {
                        doing: "running a rank".into(),
                        detail: format!("rank {rank} panicked"),
                        ranks: vec![rank],
                    })
                })
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_gets_everyones_bytes() {
        let results = run_threads(5, |group| {
            let mut seen = Vec::new();
            for round in 0..50u8 {
                seen.push(group.all_gather(&[round, group.rank() as u8])?);
            }
            Ok(seen)
        });
        for result in results {
            for (round, all) in result.unwrap().into_iter().enumerate() {
                assert_eq!(all, (0..5u8).map(|rank| vec![round as u8, rank]).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_rank_that_leaves_is_named() {
        let results = run_threads(3, |group| {
            if group.rank() == 1 {
                return Ok(());
            }
            group.barrier()
        });
        for rank in [0, 2] {
            let error = results[rank].as_ref().unwrap_err();
            assert_eq!(error.ranks(), vec![1], "{error}");
        }
    }

    #[test]
    fn a_silent_rank_is_an_error_within_the_timeout() {
        let mut ranks = Threads::group(2, Duration::from_millis(50));
        let silent = ranks.pop().unwrap();
        let error = ranks[0].barrier().unwrap_err();
        assert!(error.to_string().contains("no answer from rank 1"), "{error}");
        drop(silent);
    }

    #[test]
    fn an_error_on_one_rank_is_that_error_on_all() {
        let results = run_threads(4, |group| {
            let local = if group.rank() == 2 { Err(Error::invalid("the disk of rank 2 is full")) } else { Ok(vec![]) };
            crate::group::at_root(&group, local, Ok)
        });
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("the disk of rank 2 is full"), "{error}");
            assert_eq!(error.kind(), crate::ErrorKind::Invalid);
            if rank != 2 {
                assert_eq!(error.ranks(), vec![2]);
            }
        }
    }
}
