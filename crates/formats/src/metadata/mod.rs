//! A checkpoint's `.metadata`: keys, shapes, chunks and where each chunk's record lies.
//!
//! [`Metadata::decode`] proves once what everyone relies on afterwards: every chunk lies inside its tensor and
//! has a storage info, numbers fit 64 bits, and file paths stay inside the checkpoint.

mod decode;
mod encode;
mod entries;
mod error;
mod fields;
mod proof;
mod storage;
mod types;

pub use error::MetadataError;
pub use types::{
    Chunk, Entry, EntryKind, ExtraFields, FileId, MemoryFormat, Metadata, PlannerData, StorageInfo, StorageMeta, TensorEntry,
    TensorExtra, TensorProperties, Transforms, Unreferenced,
};
