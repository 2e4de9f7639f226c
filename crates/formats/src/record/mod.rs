//! Torch records: the zip archives that `torch.save` writes.
//!
//! [`RecordFrame`] gives the bytes around a tensor's data, so that the data goes straight from memory to
//! the file. [`TorchArchive`] reads an archive through positioned reads, never its data unless asked.

mod archive;
mod envelope;
mod error;
mod frame;
mod tensor_pickle;
mod zip_read;
mod zip_write;

pub use archive::{MAX_NOTE_LEN, MAX_PICKLE_LEN, TorchArchive, crc32_at};
pub use error::RecordError;
pub use frame::{RecordFrame, RecordSpec, pickle_record};
pub use zip_read::{ArchiveEntry, MAX_DIRECTORY_LEN};
