//! safetensors files: single, sharded with an index, and DCP's sharded variant.
//!
//! A file's header is read and written without its data. What a header says is proven by the safetensors
//! crate's own rules; DCP's saved offsets make each tensor of a file a region of a larger one.

mod dtype;
mod error;
mod header;
mod index;
mod notes;
mod shards;
mod write;

pub use error::SafetensorsError;
pub use header::{SHARDING_INFO, SafetensorsFile, SafetensorsTensor};
pub use index::{INDEX_FILE, SafetensorsIndex, dcp_shard_file, model_file};
pub use notes::{Notes, NotesError};
pub use shards::{SafetensorsChunk, ShardedTensor, sharded_tensors};
pub use write::{SafetensorsHeader, SafetensorsSpec};
