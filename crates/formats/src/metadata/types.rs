//! The proven types: what a `.metadata` says, with everything checked.

use std::sync::Arc;

use indexmap::IndexMap;
use reshard_layout::{Dims, Region};

use crate::pickle::Carried;
use crate::value::PathClass;
use crate::{DType, KeyPath};

/// Fields that this version doesn't know, kept as they were.
pub type ExtraFields = Vec<(String, Carried)>;

/// The index of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Metadata {
    /// What the checkpoint holds by flattened key, in the file's order.
    pub entries: IndexMap<String, Entry>,
    /// Data files as relative paths that are proven to stay inside the checkpoint.
    pub files: Vec<String>,
    /// Who saved the checkpoint.
    pub storage_meta: Option<StorageMeta>,
    /// Version of the metadata's format; older torch writes none.
    pub version: Option<String>,
    /// Where the paths of [`Entry::path`] come from.
    pub planner_data: PlannerData,
    /// Storage infos for what no entry mentions; torch ignores them.
    pub unreferenced: Vec<Unreferenced>,
    /// Paths of keys that no entry mentions.
    pub unstored_paths: Vec<(String, KeyPath)>,
    /// Unknown fields of the whole.
    pub extra: ExtraFields,
}

impl Default for Metadata {
    fn default() -> Self {
        Metadata {
            entries: IndexMap::new(),
            files: Vec::new(),
            storage_meta: None,
            version: Some(Metadata::VERSION.to_owned()),
            planner_data: PlannerData::Paths,
            unreferenced: Vec::new(),
            unstored_paths: Vec::new(),
            extra: Vec::new(),
        }
    }
}

impl Metadata {
    /// The version that torch writes today.
    pub const VERSION: &'static str = "1.0.0";

    /// Metadata of an empty checkpoint.
    pub fn new() -> Metadata {
        Metadata::default()
    }

    /// The path of a data file.
    pub fn file(&self, id: FileId) -> Option<&str> {
        self.files.get(id.0 as usize).map(String::as_str)
    }

    /// How many chunks all tensors have together.
    pub fn chunk_count(&self) -> usize {
        let chunks = self.entries.values().map(|entry| match &entry.kind {
            EntryKind::Tensor(tensor) => tensor.chunks.len(),
            EntryKind::Bytes(_) => 0,
        });
        chunks.sum()
    }
}

/// What the planner of the save left: how flattened keys nest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannerData {
    /// Nothing: the planner did not flatten.
    None,
    /// A path per key, in [`Entry::path`].
    Paths,
    /// Something else, of a planner that is not torch's.
    Other(Carried),
}

/// One key.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Where in the nested state dict it belongs; `None` where the planner left no path.
    pub path: Option<KeyPath>,
    /// What it is.
    pub kind: EntryKind,
}

/// What a key stands for.
#[derive(Debug, Clone, PartialEq)]
pub enum EntryKind {
    /// A tensor in chunks.
    Tensor(TensorEntry),
    /// Any other value, as one record.
    Bytes(StorageInfo),
}

/// A tensor and its chunks.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    /// Element type and flags.
    pub properties: TensorProperties,
    /// The full shape.
    pub shape: Dims,
    /// The stored parts, in the file's order. Each lies inside the shape; whether they cover it is what
    /// [`Metadata::check_coverage`] tells.
    pub chunks: Vec<Chunk>,
    /// Unknown fields of the tensor, and of single chunks by their number.
    pub extra: Option<Box<TensorExtra>>,
}

/// Unknown fields of a tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorExtra {
    /// Of the tensor.
    pub tensor: ExtraFields,
    /// Of single chunks, by number.
    pub chunks: Vec<(usize, ExtraFields)>,
}

/// A stored part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Which elements.
    pub region: Region,
    /// Where they are.
    pub storage: StorageInfo,
}

/// Number of a data file in [`Metadata::files`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

impl FileId {
    /// No file yet; never in metadata that was decoded.
    pub(super) const UNSET: FileId = FileId(u32::MAX);
}

/// Where a record is: `length` bytes at `offset` of a file; `offset + length` fits 64 bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageInfo {
    /// The file.
    pub file: FileId,
    /// Where the record starts.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
    /// What was done to the bytes, and unknown fields; rarely anything.
    pub transforms: Option<Arc<Transforms>>,
}

impl StorageInfo {
    /// A record whose bytes are as they are.
    pub fn new(file: FileId, offset: u64, length: u64) -> StorageInfo {
        StorageInfo { file, offset, length, transforms: None }
    }
}

/// The rare parts of a storage info.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transforms {
    /// Stream transforms such as compression, outermost first; `None` where the file has no such field.
    pub descriptors: Option<Vec<String>>,
    /// Unknown fields of the storage info.
    pub extra: ExtraFields,
    /// Unknown fields of the index that the storage info is found by.
    pub index_extra: ExtraFields,
}

/// A storage info that no entry mentions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreferenced {
    /// The key it is filed under.
    pub key: String,
    /// The offsets of the chunk it is filed under; `None` for other values.
    pub offsets: Option<Dims>,
    /// The record.
    pub storage: StorageInfo,
}

/// What a tensor is, beside its shape. The layout is strided; others are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorProperties {
    /// Element type.
    pub dtype: DType,
    /// Whether it takes part in differentiation.
    pub requires_grad: bool,
    /// Order of its dimensions in memory.
    pub memory_format: MemoryFormat,
    /// Whether its memory was pinned.
    pub pin_memory: bool,
    /// Strides, which torch 2.15 adds. They are not written, so that every version can read what is.
    pub strides: Option<Dims>,
}

impl TensorProperties {
    /// A contiguous tensor without gradient.
    pub fn new(dtype: DType) -> TensorProperties {
        let memory_format = MemoryFormat::Contiguous;
        TensorProperties { dtype, requires_grad: false, memory_format, pin_memory: false, strides: None }
    }
}

/// Torch's memory formats, with the numbers that torch stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryFormat {
    /// `torch.contiguous_format`.
    Contiguous = 0,
    /// `torch.channels_last`.
    ChannelsLast = 1,
    /// `torch.preserve_format`.
    Preserve = 2,
}

/// Who saved the checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StorageMeta {
    /// Where it was saved to.
    pub checkpoint_id: Option<String>,
    /// The class of the path, where `checkpoint_id` was given as one instead of as a string.
    pub checkpoint_id_class: Option<PathClass>,
    /// Identity of the save.
    pub save_id: Option<String>,
    /// Identity of the load.
    pub load_id: Option<String>,
    /// Names of modules.
    pub modules: Vec<String>,
    /// Unknown fields.
    pub extra: ExtraFields,
}
