//! Why a file of ours cannot be used.

/// Why a sidecar, an index or a note cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnFileError {
    /// It ends too early or starts with something else.
    #[error("it is not a reshard sidecar")]
    NotOne,
    /// It is there, but the mark that ends it is not what it was.
    #[error("the mark at its end is damaged")]
    Mark,
    /// Its own checksum is wrong.
    #[error("its own checksum is wrong: it says {expected:016x}, its bytes give {actual:016x}")]
    Damaged {
        /// As stored.
        expected: u64,
        /// As computed.
        actual: u64,
    },
    /// Its content makes no sense.
    #[error("its content cannot be decoded: {0}")]
    Content(String),
    /// It could not be read.
    #[error("it could not be read")]
    Io(#[from] std::io::Error),
}

impl OwnFileError {
    pub(super) fn content(error: postcard::Error) -> OwnFileError {
        OwnFileError::Content(error.to_string())
    }
}
