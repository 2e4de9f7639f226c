//! Running the engine without the interpreter's lock, such that Ctrl-C is heard.
//!
//! Python's signal handlers run on the main thread only, and only there when it holds the lock. So the work goes to a thread
//! of its own, and the caller's thread waits and looks for signals now and then. The work owns all it needs, references to
//! the caller's tensors included: should it hang in a call to another rank, the caller may leave it behind safely.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use reshard::{Control, Error, Result};

/// How often the waiting thread looks for signals.
const LOOK: Duration = Duration::from_millis(100);
/// How long work may take to notice that it was cancelled before it is left behind.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `work` on another thread. On a signal whose handler raises, the work is cancelled and the exception goes on.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    control: &Control,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<Result<T>> {
    let (sender, receiver) = channel();
    // Waiting happens without the lock, for which what is waited on has to be shareable.
    let receiver = Mutex::new(receiver);
    let spawned = std::thread::Builder::new().name("reshard-call".into()).spawn(move || {
        // Nobody listens any more when the caller left; then the result is of no use to anyone.
        let _ = sender.send(work());
    });
    if let Err(error) = spawned {
        return Ok(Err(Error::Exhausted { detail: format!("no thread could be started: {error}") }));
    }
    let mut interrupted: Option<(PyErr, Instant)> = None;
    loop {
        let received = py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK));
        match received {
            Ok(result) => return interrupted.map_or(Ok(result), |(error, _)| Err(error)),
            Err(RecvTimeoutError::Disconnected) => {
                return Ok(Err(Error::Internal { detail: "the engine panicked".into() }));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        match interrupted.take() {
            Some((error, since)) if since.elapsed() > PATIENCE => return Err(error),
            waiting @ Some(_) => interrupted = waiting,
            None => {
                if let Err(error) = py.check_signals() {
                    control.cancel();
                    interrupted = Some((error, Instant::now()));
                }
            }
        }
    }
}
