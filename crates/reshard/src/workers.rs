//! The threads that move bytes: one pool for work that someone waits for, one of low priority for work in the background, and
//! one of threads that mostly wait for a service's answers.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use reshard_storage::{PerProcess, Store};

use crate::error::{Error, Result};

/// Threads that read from a service, as many as requests of one process run at once by default.
const REMOTE_THREADS: usize = 32;

/// Threads that read a disk, each with memory of its own for what it reads.
const SCANNING_THREADS: usize = 64;

/// A pool of threads.
#[derive(Debug)]
pub(crate) struct Workers {
    threads: usize,
    pool: std::result::Result<ThreadPool, String>,
}

impl Workers {
    /// For work that someone waits for.
    pub(crate) fn normal() -> &'static Workers {
        static POOL: PerProcess<Workers> = PerProcess::new();
        POOL.get(|| Workers::new("reshard", processors(), false))
    }

    /// For reading from a store. A disk is busy with a thread for each processor; of those that read from a service, most
    /// wait for an answer at any time.
    pub(crate) fn reading(store: &dyn Store) -> &'static Workers {
        Workers::reading_any([store])
    }

    /// For reading from several stores, of which the slowest decides.
    pub(crate) fn reading_any<'s>(stores: impl IntoIterator<Item = &'s dyn Store>) -> &'static Workers {
        static POOL: PerProcess<Workers> = PerProcess::new();
        match stores.into_iter().any(|store| store.capabilities().remote) {
            true => POOL.get(|| Workers::new("reshard-remote", REMOTE_THREADS, false)),
            false => Workers::normal(),
        }
    }

    /// For a pass over whole files that computes on what it reads: most threads wait for the disk, which gives more the more it is
    /// asked for at once, while the others compute. Of what is in memory already nobody waits for anything.
    pub(crate) fn scanning(store: &dyn Store, in_memory: bool) -> &'static Workers {
        static POOL: PerProcess<Workers> = PerProcess::new();
        match store.capabilities().remote || in_memory {
            true => Workers::reading(store),
            false => {
                let threads = || given_threads().unwrap_or_else(|| (processors() * 8).min(SCANNING_THREADS));
                POOL.get(|| Workers::new("reshard-scan", threads(), false))
            }
        }
    }

    /// For asynchronous saves: yields the processor and the disk to training.
    pub(crate) fn background() -> &'static Workers {
        static POOL: PerProcess<Workers> = PerProcess::new();
        POOL.get(|| Workers::new("reshard-background", processors(), true))
    }

    fn new(name: &'static str, threads: usize, low_priority: bool) -> Workers {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |i| format!("{name}-{i}"))
            .start_handler(move |_| {
                if low_priority {
                    lower_priority();
                }
            })
            .build()
            .map_err(|error| error.to_string());
        Workers { threads, pool }
    }

    /// How many threads there are.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Does all of `work`, each begun in its order by the next thread that is free: what is first is done first, and threads read
    /// a disk near each other. After an error nothing more is begun.
    pub(crate) fn in_order<T: Sync>(&self, work: &[T], each: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
        let next = AtomicUsize::new(0);
        let one = |_| {
            while let Some(item) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                each(item).inspect_err(|_| next.store(work.len(), Ordering::Relaxed))?;
            }
            Ok(())
        };
        self.run(|| (0..self.threads.min(work.len())).into_par_iter().with_max_len(1).try_for_each(one))?
    }

    /// Runs `work` with rayon's iterators using this pool.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        match &self.pool {
            Ok(pool) => Ok(pool.install(work)),
            Err(detail) => Err(Error::exhausted(format!("no threads could be started: {detail}"))),
        }
    }
}

fn given_threads() -> Option<usize> {
    std::env::var("RESHARD_THREADS").ok().and_then(|n| n.parse().ok()).filter(|&n| n > 0)
}

fn processors() -> usize {
    given_threads().unwrap_or_else(|| std::thread::available_parallelism().map_or(2, |n| n.get().min(16)))
}

/// Lets everything else on the machine go first. Best effort: a system that refuses still writes the checkpoint.
pub(crate) fn lower_priority() {
    #[cfg(target_os = "linux")]
    {
        // On Linux the nice value is per thread; the I/O priority follows it unless set otherwise.
        let _ = rustix::process::nice(10);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn work_is_begun_in_its_order_and_no_more_of_it_after_an_error() {
        let work: Vec<usize> = (0..500).collect();
        for threads in [1, 3] {
            let workers = Workers::new("test", threads, false);
            let begun = Mutex::new(Vec::new());
            let failing_from = |bad: usize| {
                workers.in_order(&work, |item| {
                    begun.lock().unwrap().push(*item);
                    if *item < bad { Ok(()) } else { Err(Error::internal("no")) }
                })
            };
            failing_from(usize::MAX).unwrap();
            let mut all = std::mem::take(&mut *begun.lock().unwrap());
            if threads > 1 {
                all.sort_unstable();
            }
            assert_eq!(all, work);
            failing_from(100).unwrap_err();
            assert!(begun.lock().unwrap().len() <= 100 + threads);
            workers.in_order(&[] as &[usize], |_| Err(Error::internal("nothing to do"))).unwrap();
        }
    }
}
