//! The threads that move bytes: one pool for work that someone waits for, one of low priority for work in the background.

use std::sync::OnceLock;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// A pool of threads.
pub(crate) struct Workers {
    pool: std::result::Result<ThreadPool, String>,
}

impl Workers {
    /// For work that someone waits for.
    pub(crate) fn normal() -> &'static Workers {
        static POOL: OnceLock<Workers> = OnceLock::new();
        POOL.get_or_init(|| Workers::new("reshard", false))
    }

    /// For asynchronous saves: yields the processor and the disk to training.
    pub(crate) fn background() -> &'static Workers {
        static POOL: OnceLock<Workers> = OnceLock::new();
        POOL.get_or_init(|| Workers::new("reshard-background", true))
    }

    fn new(name: &'static str, low_priority: bool) -> Workers {
        let threads = std::env::var("RESHARD_THREADS")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(2, |n| n.get().min(16)));
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
        Workers { pool }
    }

    /// Runs `work` with rayon's iterators using this pool.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        match &self.pool {
            Ok(pool) => Ok(pool.install(work)),
            Err(detail) => Err(Error::invalid(format!("no threads could be started: {detail}"))),
        }
    }
}

/// Lets everything else on the machine go first. Best effort: a system that refuses still writes the checkpoint.
pub(crate) fn lower_priority() {
    #[cfg(target_os = "linux")]
    {
        // On Linux the nice value is per thread; the I/O priority follows it unless set otherwise.
        let _ = rustix::process::nice(10);
    }
}
