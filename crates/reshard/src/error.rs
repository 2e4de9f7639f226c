//! What can go wrong, by what a caller would do about it.
//!
//! An error that arose on another rank arrives here as [`Error::Remote`] with the original's kind and text, so that
//! every rank of a group can branch on the same thing.

use reshard_formats::MetadataError;
use reshard_layout::LayoutError;
use reshard_storage::StorageError;
use serde::{Deserialize, Serialize};

use crate::mismatch::Mismatch;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a handler would do: the same classes that the Python exceptions have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no checkpoint, file or key of that name.
    NotFound,
    /// Something is there already and overwriting was not asked for.
    AlreadyExists,
    /// A checkpoint that was never finished, or that lost files.
    Incomplete,
    /// Bytes differ from what was written, or are not what the format allows.
    Corrupt,
    /// What is wanted differs from what is stored.
    Mismatch,
    /// Reading it would need to run code from the file.
    Untrusted,
    /// The disk or the object store failed.
    Storage,
    /// Ranks could not talk to each other.
    Group,
    /// The caller asked for something that cannot be done.
    Invalid,
    /// Memory, threads or another resource of this machine ran out.
    Exhausted,
    /// A bug in reshard.
    Internal,
    /// The caller cancelled it.
    Cancelled,
}

/// An error of the engine. The message speaks of the engine's layer; the cause is the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing that can be opened lies at the path.
    #[error("no checkpoint at {path}: {detail}")]
    NotFound {
        /// The address.
        path: String,
        /// What was looked for.
        detail: String,
    },
    /// Several checkpoints lie beside each other, and nothing says which is meant.
    #[error("{path} holds several checkpoints: {}; name one of them", .candidates.join(", "))]
    Several {
        /// The address.
        path: String,
        /// Files and folders below it, any of which may be opened.
        candidates: Vec<String>,
    },
    /// The checkpoint has no such key.
    #[error("no key {key:?} in {path}{}", near_names(.near))]
    NoSuchKey {
        /// The key asked for.
        key: String,
        /// The address.
        path: String,
        /// Keys with similar names.
        near: Vec<String>,
    },
    /// Megatron's distributed optimizer saved its buffers as they are, and state was asked for by parameter.
    #[error(
        "no key {key:?} in {path}: the optimizer's state is in flat buffers (dp_reshardable), and no file says which parameters lie \
         in them; a map of parameters is needed, which names for each bucket its parameters, their shapes and where they start"
    )]
    NeedsParameterMap {
        /// The key asked for.
        key: String,
        /// The address.
        path: String,
    },
    /// A checkpoint lies there and overwriting was not asked for.
    #[error("Checkpoint already exists: {path}")]
    AlreadyExists {
        /// The address.
        path: String,
    },
    /// A model of another format lies there, which a checkpoint in the same folder would hide, and overwriting was not asked for.
    #[error("{path} holds {file:?}, a model of another format: a checkpoint in the same folder would be found in its place")]
    OtherModel {
        /// The address.
        path: String,
        /// The file by which the model is known.
        file: String,
    },
    /// Another writer is at work at the path, or was since this one began.
    #[error("{path} has another writer: {detail}")]
    Conflict {
        /// The address.
        path: String,
        /// What it does or did, and what to do.
        detail: String,
    },
    /// A checkpoint that lacks files or was never finished.
    #[error("the checkpoint at {path} is incomplete: {detail}")]
    Incomplete {
        /// The address.
        path: String,
        /// What is missing.
        detail: String,
    },
    /// Bytes that are not what was written.
    #[error("{} in {path}: {detail}", corrupt_subject(.key, .file, *.offset))]
    Corrupt {
        /// The address.
        path: String,
        /// The key concerned, when known.
        key: Option<String>,
        /// The file concerned.
        file: String,
        /// Where in the file.
        offset: u64,
        /// What was found, with expected and actual checksums where there are any.
        detail: String,
    },
    /// What is wanted differs from what is stored; every difference at once.
    #[error("{0}")]
    Mismatch(Box<Mismatch>),
    /// A value that only unpickling could bring back.
    #[error("the value of {key:?} in {path} is not plain data ({class}): loading it would execute code")]
    Untrusted {
        /// The address.
        path: String,
        /// The key.
        key: String,
        /// The class that unpickling would import.
        class: String,
    },
    /// Keys that would take far more than the bytes that are stored of them.
    #[error("{path} expands beyond what it stores: {detail}; twice that and {limit} bytes are allowed")]
    Expands {
        /// The address.
        path: String,
        /// The largest of the keys.
        key: String,
        /// How much they take, and how much is stored of them.
        detail: String,
        /// The limit.
        limit: u64,
    },
    /// The storage failed.
    #[error("storage failed while {doing}")]
    Storage {
        /// The engine's own step.
        doing: String,
        /// What the storage said.
        #[source]
        source: StorageError,
    },
    /// A file is not what its format demands.
    #[error("{file} in {path} is not a valid {what}")]
    Format {
        /// The address.
        path: String,
        /// The file concerned.
        file: String,
        /// What it should have been.
        what: &'static str,
        /// Why it is not.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The ranks could not agree or could not talk.
    #[error("the group of ranks failed while {doing}: {detail}")]
    Group {
        /// The engine's own step.
        doing: String,
        /// What went wrong.
        detail: String,
        /// The ranks concerned, when known.
        ranks: Vec<usize>,
    },
    /// An error of other ranks, with their own words.
    #[error("{}", remote_text(.failures))]
    Remote {
        /// What failed where; never empty, sorted by rank.
        failures: Vec<RankFailure>,
    },
    /// The caller's mistake: input that is not valid.
    #[error("{detail}")]
    Invalid {
        /// What is wrong and what to do.
        detail: String,
    },
    /// A shape, region, mesh or placement of the caller's that is not valid. Geometry of files that is not valid is
    /// [`Error::Corrupt`] or [`Error::Format`], and geometry that was proven before is [`Error::Internal`].
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Nothing is wrong, but it cannot be done with what is stored: a type without numbers, a cast that there is not.
    #[error("{detail}")]
    Unsupported {
        /// What cannot be done, and with what.
        detail: String,
    },
    /// A format that has no such element type.
    #[error("{format} has no type for {key:?}, which is {dtype}")]
    UnsupportedDType {
        /// The key.
        key: String,
        /// Its type.
        dtype: &'static str,
        /// The format that was to be written.
        format: &'static str,
    },
    /// A destination whose name does not tell which format to write, and none was asked for.
    #[error("cannot infer the format from the name {destination:?}")]
    UnknownTarget {
        /// The destination.
        destination: String,
    },
    /// Memory, threads or another resource ran out, or a limit of the format was reached.
    #[error("{detail}")]
    Exhausted {
        /// What ran out, and for what.
        detail: String,
    },
    /// A bug in reshard: ranks or steps that do not agree with each other. Please report it.
    #[error("{detail}; this is a bug in reshard")]
    Internal {
        /// What should never have happened.
        detail: String,
    },
    /// The caller cancelled the work.
    #[error("cancelled while {doing}; nothing was published")]
    Cancelled {
        /// The step at which it stopped.
        doing: String,
    },
}

/// One rank's failure, as it travels between ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// The rank on which it happened.
    pub rank: usize,
    /// Its class.
    pub kind: ErrorKind,
    /// Its full text, causes included.
    pub message: String,
    /// Keys concerned.
    pub keys: Vec<String>,
    /// Files concerned.
    pub files: Vec<String>,
}

impl Error {
    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::NotFound { .. } | Error::NoSuchKey { .. } => ErrorKind::NotFound,
            Error::AlreadyExists { .. } | Error::OtherModel { .. } => ErrorKind::AlreadyExists,
            Error::Incomplete { .. } => ErrorKind::Incomplete,
            Error::Corrupt { .. } | Error::Format { .. } => ErrorKind::Corrupt,
            Error::Mismatch(_) => ErrorKind::Mismatch,
            Error::Untrusted { .. } => ErrorKind::Untrusted,
            Error::Storage { source: StorageError::NotFound { .. }, .. } => ErrorKind::NotFound,
            Error::Storage { .. } | Error::Conflict { .. } => ErrorKind::Storage,
            Error::Group { .. } => ErrorKind::Group,
            Error::Remote { failures } => failures.first().map_or(ErrorKind::Group, |f| f.kind),
            Error::Invalid { .. }
            | Error::NeedsParameterMap { .. }
            | Error::Layout(_)
            | Error::Several { .. }
            | Error::Unsupported { .. }
            | Error::UnknownTarget { .. }
            | Error::UnsupportedDType { .. } => ErrorKind::Invalid,
            Error::Exhausted { .. } | Error::Expands { .. } => ErrorKind::Exhausted,
            Error::Internal { .. } => ErrorKind::Internal,
            Error::Cancelled { .. } => ErrorKind::Cancelled,
        }
    }

    /// The keys concerned.
    pub fn keys(&self) -> Vec<String> {
        match self {
            Error::NoSuchKey { key, .. }
            | Error::NeedsParameterMap { key, .. }
            | Error::Untrusted { key, .. }
            | Error::Expands { key, .. }
            | Error::UnsupportedDType { key, .. } => vec![key.clone()],
            Error::Corrupt { key, .. } => key.iter().cloned().collect(),
            Error::Mismatch(m) => m.keys(),
            Error::Remote { failures } => failures.iter().flat_map(|f| f.keys.iter().cloned()).collect(),
            _ => Vec::new(),
        }
    }

    /// The files concerned.
    pub fn files(&self) -> Vec<String> {
        match self {
            Error::Corrupt { file, .. } | Error::Format { file, .. } | Error::OtherModel { file, .. } => vec![file.clone()],
            Error::Remote { failures } => failures.iter().flat_map(|f| f.files.iter().cloned()).collect(),
            _ => Vec::new(),
        }
    }

    /// The ranks concerned.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Error::Remote { failures } => failures.iter().map(|f| f.rank).collect(),
            Error::Group { ranks, .. } => ranks.clone(),
            _ => Vec::new(),
        }
    }

    /// What to do about it, in one sentence, where there is something to say; in the words of the Rust library.
    pub fn hint(&self) -> Option<String> {
        self.hint_for(Caller::Rust)
    }

    /// What to do about it, in the words of whoever called: the options that they have, by the names that they know.
    pub fn hint_for(&self, caller: Caller) -> Option<String> {
        let text = match self {
            Error::Storage { source, .. } => match source {
                StorageError::NoSpace { .. } => "free some space or choose another path; what was there before is unchanged",
                StorageError::PermissionDenied { .. } => "check the permissions of the path, or the credentials for the store",
                StorageError::NotFound { .. } => address_hint(caller),
                StorageError::NotBuilt { .. } => match caller {
                    Caller::Command => "build the command with `--features cloud` to reach object stores",
                    Caller::Rust => "enable the feature `cloud` of the crate",
                    Caller::Python => "build the package with the feature `cloud`",
                },
                _ => return None,
            },
            Error::Remote { failures } => match failures.first()? {
                // A key that is not there is no matter of the address.
                RankFailure { kind: ErrorKind::NotFound, keys, .. } if !keys.is_empty() => keys_hint(caller),
                RankFailure { kind: ErrorKind::AlreadyExists, files, .. } if !files.is_empty() => beside_hint(caller),
                failure => kind_hint(failure.kind, caller)?,
            },
            Error::NoSuchKey { .. } => keys_hint(caller),
            Error::OtherModel { .. } => beside_hint(caller),
            Error::Expands { .. } => return Some(expanded_hint(caller)),
            Error::NeedsParameterMap { .. } => return Some(map_hint(caller)),
            Error::UnknownTarget { .. } => match caller {
                Caller::Rust => "name the format, such as \"dcp\", \"safetensors\" or \"torch\"",
                Caller::Python => "pass to=\"dcp\", to=\"safetensors\" or to=\"torch\"",
                Caller::Command => "pass --to, such as --to dcp, --to safetensors or --to torch",
            },
            Error::UnsupportedDType { .. } => match caller {
                Caller::Rust => "leave it out, cast it with `CastRules`, or write `convert::Target::Torch`",
                Caller::Python => "leave it out with exclude=, cast it with cast=, or write a .pt file",
                Caller::Command => "leave it out with --exclude, cast it with --cast KEY=DTYPE, or write --to torch",
            },
            _ => kind_hint(self.kind(), caller)?,
        };
        Some(text.to_owned())
    }

    /// This error and its causes in one line, for other ranks and for logs.
    pub fn full_text(&self) -> String {
        chain(self)
    }

    /// As it travels to other ranks.
    pub(crate) fn to_failures(&self, rank: usize) -> Vec<RankFailure> {
        if let Error::Remote { failures } = self {
            return failures.clone();
        }
        vec![RankFailure { rank, kind: self.kind(), message: self.full_text(), keys: self.keys(), files: self.files() }]
    }

    pub(crate) fn invalid(detail: impl Into<String>) -> Error {
        Error::Invalid { detail: detail.into() }
    }

    pub(crate) fn unsupported(detail: impl Into<String>) -> Error {
        Error::Unsupported { detail: detail.into() }
    }

    pub(crate) fn exhausted(detail: impl Into<String>) -> Error {
        Error::Exhausted { detail: detail.into() }
    }

    pub(crate) fn internal(detail: impl Into<String>) -> Error {
        Error::Internal { detail: detail.into() }
    }

    pub(crate) fn format(
        path: &str,
        file: &str,
        what: &'static str,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Error {
        Error::Format { path: path.into(), file: file.into(), what, source: Box::new(source) }
    }
}

/// Whose fault geometry that is not valid is. `?` alone would say that it is the caller's, so that the engine names one
/// of these; what a file says is mapped to an error that names the file.
pub(crate) trait Geometry<T> {
    /// It was checked before: an error is a bug of ours.
    fn proven(self) -> Result<T>;
    /// The caller gave it.
    fn given(self) -> Result<T>;
}

impl<T> Geometry<T> for std::result::Result<T, LayoutError> {
    fn proven(self) -> Result<T> {
        self.map_err(|error| Error::internal(error.to_string()))
    }

    fn given(self) -> Result<T> {
        self.map_err(Error::Layout)
    }
}

impl From<MetadataError> for Error {
    fn from(error: MetadataError) -> Error {
        Error::unsupported(format!("the metadata of this save cannot be written: {error}"))
    }
}

/// Who reads a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A program that uses the Rust library.
    Rust,
    /// A program that uses the Python package.
    Python,
    /// A person at the command line.
    Command,
}

/// Raises the limit of [`Error::Expands`] for a process: a number of bytes.
pub(crate) const EXPANDED_LIMIT_VARIABLE: &str = "RESHARD_EXPANDED_LIMIT";

fn address_hint(caller: Caller) -> &'static str {
    match caller {
        Caller::Rust | Caller::Python => "check the path; a DCP folder holds a `.metadata` file",
        Caller::Command => {
            "give a DCP folder (it holds `.metadata`), a safetensors file or folder, or a .pt file; for a folder of steps, \
             `reshard latest`"
        }
    }
}

fn keys_hint(caller: Caller) -> &'static str {
    match caller {
        Caller::Rust => "`Checkpoint::catalog` lists the keys; a `KeyMap` loads them under other names",
        Caller::Python => "`reshard.open(path).keys()` lists the keys; `rename=` loads them under other names",
        Caller::Command => "`reshard ls` lists the keys",
    }
}

fn beside_hint(caller: Caller) -> &'static str {
    match caller {
        Caller::Rust => "choose another path, or set `overwrite` to write beside it; nothing of it is removed",
        Caller::Python => "choose another path, or pass overwrite=True to write beside it; nothing of it is removed",
        Caller::Command => "choose another path, or pass --overwrite to write beside it; nothing of it is removed",
    }
}

fn expanded_hint(caller: Caller) -> String {
    let variable = EXPANDED_LIMIT_VARIABLE;
    match caller {
        Caller::Rust => format!("if you trust the file, raise `OpenOptions::expanded_limit`, or {variable} in the environment"),
        Caller::Python => format!("if you trust the file, raise the limit: {variable}=<bytes> in the environment"),
        Caller::Command => {
            format!("if you trust the file, raise the limit: --expanded-limit SIZE, or {variable}=<bytes> in the environment")
        }
    }
}

fn map_hint(caller: Caller) -> String {
    let how = match caller {
        Caller::Rust => "set `OpenOptions::parameter_map`",
        Caller::Python => "pass parameter_map=FILE",
        Caller::Command => "pass --parameter-map FILE",
    };
    format!(
        "{how}; inside Megatron, `from reshard.integrations.megatron import save_parameter_map; save_parameter_map(FILE, optimizer, \
         model.sharded_state_dict())` on every rank writes it (docs/other-formats.md)"
    )
}

fn kind_hint(kind: ErrorKind, caller: Caller) -> Option<&'static str> {
    Some(match (kind, caller) {
        (ErrorKind::NotFound, caller) => address_hint(caller),
        (ErrorKind::AlreadyExists, Caller::Rust) => {
            "set `overwrite` to replace it; the old checkpoint stays until the new one is complete"
        }
        (ErrorKind::AlreadyExists, Caller::Python) => {
            "pass overwrite=True to replace it; the old checkpoint stays until the new one is complete"
        }
        (ErrorKind::AlreadyExists, Caller::Command) => {
            "pass --overwrite to replace it; the old checkpoint stays until the new one is complete"
        }
        (ErrorKind::Incomplete, Caller::Rust) => {
            "`recover::recover` rebuilds `.metadata` from data files; `steps::latest` finds the newest complete one"
        }
        (ErrorKind::Incomplete, Caller::Python) => {
            "`reshard.recover(path)` rebuilds `.metadata` from data files; `reshard.latest(folder)` finds the newest complete one"
        }
        (ErrorKind::Incomplete, Caller::Command) => {
            "`reshard recover` rebuilds `.metadata` from data files; `reshard latest` finds the newest complete one"
        }
        (ErrorKind::Corrupt, Caller::Rust) => "`verify::verify_path` lists everything that is damaged",
        (ErrorKind::Corrupt, Caller::Python) => "`reshard.verify(path)` lists everything that is damaged",
        (ErrorKind::Corrupt, Caller::Command) => "`reshard verify` lists everything that is damaged",
        (ErrorKind::Mismatch, Caller::Rust) => {
            "set `Strictness::Lenient` for a report instead, `CastPolicy::Any` for other dtypes, or a `KeyMap` for other names"
        }
        (ErrorKind::Mismatch, Caller::Python) => {
            "pass strict=False for a report instead, cast=\"any\" for other dtypes, or rename= for other names"
        }
        (ErrorKind::Untrusted, Caller::Rust) => "read it as opaque bytes; only unpickling could bring the object back",
        (ErrorKind::Untrusted, Caller::Python) => "pass allow_pickle=True only if you trust whoever wrote the file",
        (ErrorKind::Untrusted, Caller::Command) => {
            "reshard never executes code from a file; load it with PyTorch if you trust whoever wrote it"
        }
        (ErrorKind::Group, _) => {
            "look at the log of the rank that is named: it failed, left, or is still busy with something else"
        }
        // The message lists every difference itself.
        (ErrorKind::Mismatch, Caller::Command)
        | (ErrorKind::Storage | ErrorKind::Invalid | ErrorKind::Cancelled | ErrorKind::Exhausted | ErrorKind::Internal, _) => {
            return None;
        }
    })
}

/// An error with its causes in one line, for a message that stands alone.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    // A client's own error may repeat a signed URL.
    reshard_storage::redacted(&text)
}

/// Names the engine's step when the storage fails.
pub(crate) trait StorageContext<T> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T> StorageContext<T> for std::result::Result<T, StorageError> {
    fn doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Storage { doing: reshard_storage::redacted(&doing()), source })
    }
}

fn near_names(near: &[String]) -> String {
    match near {
        [] => String::new(),
        names => format!(" (did you mean {}?)", names.join(", ")),
    }
}

fn corrupt_subject(key: &Option<String>, file: &str, offset: u64) -> String {
    match key {
        Some(key) => format!("{key:?} is damaged: {file} at byte {offset}"),
        None => format!("{file} is damaged at byte {offset}"),
    }
}

fn remote_text(failures: &[RankFailure]) -> String {
    let mut text = String::new();
    for (i, failure) in failures.iter().take(4).enumerate() {
        if i > 0 {
            text.push_str("; ");
        }
        text.push_str(&format!("rank {}: {}", failure.rank, failure.message));
    }
    if failures.len() > 4 {
        text.push_str(&format!("; and {} more ranks", failures.len() - 4));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_speak_of_what_is_missing() {
        let key = Error::NoSuchKey { key: "k".into(), path: "p".into(), near: Vec::new() };
        let path = Error::NotFound { path: "p".into(), detail: "it is empty".into() };
        assert!(key.hint().unwrap().contains("lists the keys") && !key.hint().unwrap().contains("path"));
        assert!(path.hint().unwrap().contains("path"));
        for (error, word) in [(&key, "lists the keys"), (&path, "path")] {
            let remote = Error::Remote { failures: error.to_failures(3) };
            assert!(remote.kind() == ErrorKind::NotFound && remote.hint().unwrap().contains(word), "{remote}");
        }
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let denied = StorageError::from_io(reshard_storage::Operation::Publish, "x".to_owned(), denied);
        let denied: Result<()> = Err(denied).doing(|| "publishing".into());
        assert!(denied.unwrap_err().hint().unwrap().contains("permissions"));
    }
}
