//! One [`Store`] trait over local files, object stores and memory.
//!
//! A store is rooted at an [`Address`]: one checkpoint's folder, or a folder of checkpoints. Everything inside is
//! named by a relative path with `/` between its parts, and no such path can reach outside the root. The API is
//! synchronous; backends that need an async runtime hide one inside.
//!
//! ```
//! use reshard_storage::{Address, Publish, StoreOptions};
//!
//! let address = Address::parse("memory://example")?;
//! let store = reshard_storage::open(&address, &StoreOptions::default())?;
//! store.prepare()?;
//! store.publish(".metadata", b"bytes", Publish::Create)?;
//! assert_eq!(store.read(".metadata", 1 << 20)?, b"bytes");
//! # Ok::<(), reshard_storage::StorageError>(())
//! ```
// One system call (see `local::writeback`) has no safe wrapper.
#![deny(unsafe_code)]

mod address;
mod claims;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
mod error;
pub mod faulty;
mod listing;
#[cfg(unix)]
pub mod local;
#[cfg(not(unix))]
#[path = "local_reading.rs"]
pub mod local;
// Compared with the other one; public where it takes its place.
#[cfg(all(test, unix))]
#[allow(unreachable_pub)]
mod local_reading;
pub mod memory;
#[cfg(feature = "object")]
pub mod object;
mod open;
mod options;
mod path;
mod process;
mod redact;
mod store;

pub use address::{Address, Scheme};
pub use error::{Operation, Result, StorageError};
pub use open::open;
pub use options::{Retry, StoreOptions};
pub use path::{STAGED_SUFFIX, check_relative, is_staged};
pub use process::PerProcess;
pub use redact::redacted;
pub use store::{
    Capabilities, FileInfo, Linked, NoObserver, Origin, Pass, Publish, PublishObserver, RangeRead, Reader, Store, Version,
    WriteLock, WriteOptions, Writer,
};
