//! Torch records: the zip archives that `torch.save` writes.
//!
//! [`RecordFrame`] gives the bytes around a tensor's data, so that the data goes straight from memory to
//! the file.

mod envelope;
mod error;
mod frame;
mod tensor_pickle;
mod zip_write;

pub use error::RecordError;
pub use frame::{RecordFrame, RecordSpec, pickle_record};
