//! Bytes to proven types and back: inert pickle, torch records, DCP metadata, safetensors, and the files that reshard adds.
//!
//! Everything here is pure: bytes, or a [`ReadAt`], in; types that need no further checks out. Nothing in
//! a file is ever executed, and no length found in a file is believed before it is checked.
#![forbid(unsafe_code)]

mod dtype;
pub mod metadata;
pub mod own;
mod path;
pub mod pickle;
mod read_at;
pub mod record;
pub mod safetensors;
pub mod torch_file;
mod tree;
mod value;

pub use dtype::{DType, ElementForm, swap_bytes};
pub use metadata::{
    Chunk, Entry, EntryKind, FileId, MemoryFormat, Metadata, MetadataError, StorageInfo, StorageMeta, TensorEntry,
    TensorProperties,
};
pub use path::{KeyPath, PathSegment};
pub use read_at::ReadAt;
pub use record::{
    Content, RecordError, RecordFrame, RecordSpec, StorageEntry, StoredTensor, TorchArchive, pickle_record, value_record,
};
pub use safetensors::{SafetensorsError, SafetensorsFile, SafetensorsHeader, SafetensorsIndex, SafetensorsSpec};
pub use torch_file::{FileTensor, TorchFileWriter};
pub use tree::{Dict, Key, Opaque, Tree, TreeLeaf, key_of};
pub use value::{
    BUILTIN_CLASSES, Instance, Int, LAYOUTS, MEMORY_FORMATS, NumpyArray, NumpyScalar, PathClass, PathValue, PlainClass, Value,
};
