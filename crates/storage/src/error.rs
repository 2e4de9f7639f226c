//! The crate's error type. Every variant names the path (or address) and the operation, and the variants are
//! what a caller branches on: a full disk is not a missing file is not a server that answered badly.

use std::fmt;
use std::io;

/// Shorthand for results of this crate.
pub type Result<T, E = StorageError> = std::result::Result<T, E>;

/// What was being done to a path when something went wrong (or when a fault was injected).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Operation {
    /// Opening the store itself.
    Open,
    /// Creating the root folder.
    Prepare,
    /// Claiming the root for one writer.
    Lock,
    /// Listing files or folders.
    List,
    /// Asking for a file's size.
    Size,
    /// Reading bytes.
    Read,
    /// Opening a file for reading.
    OpenReader,
    /// Creating a new file.
    Create,
    /// Reserving space.
    Preallocate,
    /// Writing bytes.
    Write,
    /// Making a file's content durable and closing it.
    Finish,
    /// Giving up a file being written.
    Abort,
    /// Creating the temporary file of an atomic publication.
    Stage,
    /// Writing the temporary file of an atomic publication.
    WriteStaged,
    /// Making the temporary file of an atomic publication durable.
    SyncStaged,
    /// Giving the temporary file its final name, or putting the object.
    Publish,
    /// Making a folder's entries durable.
    SyncFolder,
    /// Deleting a file.
    Delete,
    /// Deleting the whole root.
    DeleteRoot,
    /// Linking or copying a file into place.
    Link,
}

impl Operation {
    /// Whether the operation changes what is stored.
    pub fn is_mutating(self) -> bool {
        !matches!(
            self,
            Operation::Open | Operation::Lock | Operation::List | Operation::Size | Operation::Read | Operation::OpenReader
        )
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Open => "open",
            Operation::Prepare => "prepare",
            Operation::Lock => "lock",
            Operation::List => "list",
            Operation::Size => "size",
            Operation::Read => "read",
            Operation::OpenReader => "open for reading",
            Operation::Create => "create",
            Operation::Preallocate => "preallocate",
            Operation::Write => "write",
            Operation::Finish => "finish",
            Operation::Abort => "abort",
            Operation::Stage => "stage",
            Operation::WriteStaged => "write the staged copy",
            Operation::SyncStaged => "sync the staged copy",
            Operation::Publish => "publish",
            Operation::SyncFolder => "sync folder",
            Operation::Delete => "delete",
            Operation::DeleteRoot => "delete everything",
            Operation::Link => "link or copy",
        })
    }
}

/// Why a storage operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// There is nothing at the path.
    #[error("cannot {operation}: {path} does not exist")]
    NotFound {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
    },
    /// Something is at the path already, and the operation must not replace it.
    #[error("cannot {operation}: {path} already exists")]
    AlreadyExists {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
    },
    /// The file is not the one that was there when the caller looked, and must not be replaced.
    #[error("cannot {operation}: {path} was changed by another writer")]
    Changed {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
    },
    /// Another writer, of this process or another, is at work there.
    #[error("another writer is at work in {path}")]
    Busy {
        /// Where.
        path: String,
    },
    /// The disk is full, or a quota is used up.
    #[error("cannot {operation}: no space left for {path}")]
    NoSpace {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The caller may not do this.
    #[error("cannot {operation}: permission denied for {path}")]
    PermissionDenied {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// The backend's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// This backend (or this build) cannot do that.
    #[error("cannot {operation} {path}: {reason}")]
    Unsupported {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// What is missing.
        reason: String,
    },
    /// This build has no client for such a store.
    #[error("cannot open {path}: this build has no client for {scheme} (feature `cloud`)")]
    NotBuilt {
        /// Where.
        path: String,
        /// What there is no client for.
        scheme: String,
    },
    /// An address that cannot be understood.
    #[error("bad address {address:?}: {reason}")]
    BadAddress {
        /// What was given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A relative path that is malformed or leads outside the root.
    #[error("bad path {path:?}: {reason}")]
    BadPath {
        /// What was given.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A file is larger than the caller was ready to read.
    #[error("{path} has {size} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Which file.
        path: String,
        /// Its size.
        size: u64,
        /// The caller's limit.
        limit: u64,
    },
    /// A read went past the end of a file.
    #[error("cannot read {length} bytes at {offset} of {path}: it has {size} bytes")]
    OutOfRange {
        /// Which file.
        path: String,
        /// Where the read started.
        offset: u64,
        /// How much was wanted.
        length: u64,
        /// The file's size.
        size: u64,
    },
    /// A write that is not the next one, on a backend that only takes bytes in order.
    #[error("cannot write at {offset} of {path}: its next byte is {expected}")]
    OutOfOrder {
        /// Which file.
        path: String,
        /// Where the write wanted to start.
        offset: u64,
        /// Where it had to start.
        expected: u64,
    },
    /// A finished file is not as long as was declared when it was created.
    #[error("{path} was declared to have {declared} bytes but {written} were written")]
    WrongLength {
        /// Which file.
        path: String,
        /// What was declared.
        declared: u64,
        /// What was written.
        written: u64,
    },
    /// The operating system failed.
    #[error("cannot {operation} {path}")]
    Io {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The object store failed.
    #[error("cannot {operation} {path}")]
    Object {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// The client's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A test made this operation fail.
    #[error("cannot {operation} {path}: injected failure at step {step}")]
    Injected {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// Which step of the run this was.
        step: u64,
    },
    /// A test stopped the world at or before this operation; nothing was done, and nothing may be cleaned up.
    #[error("cannot {operation} {path}: crashed at step {step}")]
    Crashed {
        /// Where.
        path: String,
        /// What was being done.
        operation: Operation,
        /// The step of the crash.
        step: u64,
    },
}

impl StorageError {
    /// Classifies an error of the operating system.
    pub fn from_io(operation: Operation, path: impl Into<String>, source: io::Error) -> StorageError {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::NotFound => StorageError::NotFound { path, operation },
            io::ErrorKind::AlreadyExists => StorageError::AlreadyExists { path, operation },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StorageError::NoSpace { path, operation, source },
            io::ErrorKind::PermissionDenied => StorageError::PermissionDenied { path, operation, source: Box::new(source) },
            _ => StorageError::Io { path, operation, source },
        }
    }

    /// The path or address that the error is about.
    pub fn path(&self) -> &str {
        match self {
            StorageError::NotFound { path, .. }
            | StorageError::AlreadyExists { path, .. }
            | StorageError::Changed { path, .. }
            | StorageError::Busy { path }
            | StorageError::NoSpace { path, .. }
            | StorageError::PermissionDenied { path, .. }
            | StorageError::Unsupported { path, .. }
            | StorageError::NotBuilt { path, .. }
            | StorageError::BadPath { path, .. }
            | StorageError::TooLarge { path, .. }
            | StorageError::OutOfRange { path, .. }
            | StorageError::OutOfOrder { path, .. }
            | StorageError::WrongLength { path, .. }
            | StorageError::Io { path, .. }
            | StorageError::Object { path, .. }
            | StorageError::Injected { path, .. }
            | StorageError::Crashed { path, .. } => path,
            StorageError::BadAddress { address, .. } => address,
        }
    }

    /// Whether nothing was there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, StorageError::NotFound { .. })
    }

    /// Whether something was there that must not be replaced.
    pub fn is_already_exists(&self) -> bool {
        matches!(self, StorageError::AlreadyExists { .. })
    }

    /// Whether the disk or quota is full.
    pub fn is_no_space(&self) -> bool {
        matches!(self, StorageError::NoSpace { .. })
    }

    /// Whether a test stopped the world: whoever sees this must not clean up.
    pub fn is_crash(&self) -> bool {
        matches!(self, StorageError::Crashed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disks_and_quotas_are_told_apart_from_other_failures() {
        for (code, full) in [(28, true), (122, true), (5, false)] {
            let error = StorageError::from_io(Operation::Write, "a/b", io::Error::from_raw_os_error(code));
            assert_eq!(error.is_no_space(), full, "{error:?}");
            assert_eq!(error.path(), "a/b");
            assert!(error.to_string().contains("write") && error.to_string().contains("a/b"), "{error}");
        }
    }
}
