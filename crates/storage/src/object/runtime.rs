//! The one private async runtime of a process, made when first needed. Callers wait on a plain channel, so they may
//! themselves be inside any other runtime.

use std::future::Future;
use std::sync::mpsc;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::{Operation, PerProcess, Result, StorageError};

/// It lives as long as the process: dropping it would block, and may not happen inside another runtime.
static RUNTIME: PerProcess<Runtime> = PerProcess::new();

/// The handle of this process's runtime.
pub(super) fn handle() -> Result<Handle> {
    let make = || {
        let mut builder = Builder::new_multi_thread();
        let made = builder.worker_threads(2).thread_name("reshard-object").enable_all().build();
        made.map_err(|error| StorageError::from_io(Operation::Open, "the async runtime", error))
    };
    Ok(RUNTIME.get_or_try(make)?.handle().clone())
}

/// Runs a future on the private runtime and waits for it.
pub(super) fn wait<T: Send + 'static>(
    operation: Operation,
    path: &str,
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    handle()?.spawn(async move {
        // The receiver is gone only if the caller is.
        let _ = sender.send(future.await);
    });
    receiver.recv().unwrap_or_else(|_| Err(lost(operation, path)))
}

/// A task ended without an answer: it panicked.
pub(super) fn lost(operation: Operation, path: &str) -> StorageError {
    StorageError::Object { path: path.to_owned(), operation, source: "the request's task ended without an answer".into() }
}
