//! Torch records: the zip archives that `torch.save` writes.
//!
//! [`RecordFrame`] gives the bytes around a tensor's data, so that the data goes straight from memory to
//! the file. [`TorchArchive`] reads an archive through positioned reads, never its data unless asked.

mod archive;
mod content;
mod dtensor;
pub(crate) mod envelope;
mod error;
pub(crate) mod frame;
mod tensor;
mod tensor_pickle;
mod zip_read;
pub(crate) mod zip_write;

pub use archive::{MAX_NOTE_LEN, MAX_PICKLE_LEN, TorchArchive, crc32_at};
pub use content::Content;
pub use dtensor::TensorSharding;
pub use error::RecordError;
pub use frame::{RecordFrame, RecordSpec, pickle_record, value_record};
pub use tensor::{StorageEntry, StoredTensor};
pub use zip_read::{ArchiveEntry, MAX_DIRECTORY_LEN};
