//! Keys, chunks and their places, the same for every format.

use std::sync::{Arc, OnceLock};

use indexmap::IndexMap;
use reshard_formats::{DType, ElementForm, KeyPath, Value};
use reshard_layout::{ByteLayout, ChunkIndex, Dims, LayoutError, Region};
use serde::Serialize;

use super::computed::Computed;

/// How a checkpoint is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Format {
    /// A folder that `torch.distributed.checkpoint` or reshard wrote.
    Dcp,
    /// One safetensors file, or several with an index.
    Safetensors,
    /// A `torch.save` file.
    Torch,
    /// A folder that DeepSpeed wrote: ZeRO partitions of each rank.
    DeepSpeed,
    /// A universal checkpoint of DeepSpeed: a folder for each parameter.
    Universal,
    /// A folder that Megatron core wrote.
    Megatron,
    /// `torch.save` files of each rank, with DTensors in them.
    Ranks,
    /// Model, optimizer and more beside each other, as accelerate and the Trainer write them.
    Accelerate,
    /// A DCP folder of Lightning, with `meta.pt` beside it.
    Lightning,
    /// A folder that nanotron wrote.
    Nanotron,
    /// A folder that `torch_checkpointing` wrote.
    #[serde(rename = "torch_checkpointing")]
    TorchCheckpointing,
}

impl Format {
    /// As in `--to`.
    pub fn name(self) -> &'static str {
        match self {
            Format::Dcp => "dcp",
            Format::Safetensors => "safetensors",
            Format::Torch => "torch",
            Format::DeepSpeed => "deepspeed",
            Format::Universal => "universal",
            Format::Megatron => "megatron",
            Format::Ranks => "ranks",
            Format::Accelerate => "accelerate",
            Format::Lightning => "lightning",
            Format::Nanotron => "nanotron",
            Format::TorchCheckpointing => "torch_checkpointing",
        }
    }

    /// Whether it is a folder that its `.metadata`, published last, makes a checkpoint.
    pub fn is_dcp(self) -> bool {
        matches!(self, Format::Dcp | Format::Lightning)
    }
}

/// What is missing where Megatron's distributed optimizer saved its buffers as they are, and how to come by it.
pub(crate) const NEEDS_MAP: &str = "the optimizer's state is in flat buffers (dp_reshardable), and no file says which parameters \
    lie in them: give a map of parameters (--parameter-map FILE, parameter_map=), which \
    reshard.integrations.megatron.save_parameter_map writes inside Megatron; or have Megatron save the state by name, with \
    distrib_optim_sharding_type=fully_reshardable";

/// What the keys of Megatron's flat buffers start with; where several optimizers are chained, behind the number of each
/// (`chained_0.`).
pub(crate) const BUFFER_GROUP: &str = "optimizer.distributed.dp_group_idx_";
/// The keys of their buckets have this in them.
pub(crate) const BUFFER_BUCKET: &str = ".bucket_idx_";

/// Whether an entry is a flat buffer, a bucket of one, or what one rank gathered of them.
pub(crate) fn is_flat_buffer(key: &str, entry: &CatalogEntry) -> bool {
    let named = key.contains(BUFFER_GROUP) && (key.contains(BUFFER_BUCKET) || key.contains(".param_state."));
    let older = || key.split('.').take(2).any(|word| word == "distrib_optim");
    (named || older()) && matches!(&entry.kind, CatalogKind::Tensor(tensor) if tensor.shape.len() == 1)
}

/// Everything a checkpoint holds.
#[derive(Debug)]
#[non_exhaustive]
pub struct Catalog {
    /// How it is stored.
    pub format: Format,
    /// Data files, by number.
    pub files: Vec<String>,
    /// By key, in the file's order.
    pub entries: IndexMap<String, CatalogEntry>,
    /// The id of the save, where it has one.
    pub save_id: Option<String>,
    /// The version of DCP that its metadata names (torch 2.7 and later).
    pub dcp_version: Option<String>,
    /// Who wrote it, as far as can be told.
    pub writer: String,
    /// Free-form metadata of the file (safetensors).
    pub notes: IndexMap<String, String>,
}

impl Catalog {
    pub(crate) fn new(
        format: Format,
        files: Vec<String>,
        entries: IndexMap<String, CatalogEntry>,
        writer: impl Into<String>,
    ) -> Catalog {
        let (writer, notes) = (writer.into(), IndexMap::new());
        Catalog { format, files, entries, save_id: None, dcp_version: None, writer, notes }
    }

    /// Whether there are flat buffers of Megatron's distributed optimizer, in which parameters lie.
    pub(crate) fn has_flat_buffers(&self) -> bool {
        self.entries.iter().any(|(key, entry)| is_flat_buffer(key, entry))
    }

    /// What the format cannot tell of this checkpoint, for people.
    pub fn remarks(&self) -> Vec<&'static str> {
        let any = |prefix: &str| self.entries.keys().any(|key| key.starts_with(prefix));
        match self.format {
            Format::Universal if any("optim.") => vec!["a universal checkpoint does not say which parameters a group has"],
            Format::Megatron => {
                let apart = "nothing says how the tensors of model parallel ranks make up one: each rank's keys stay apart";
                let buffers = self.has_flat_buffers();
                any("mp_rank_").then_some(apart).into_iter().chain(buffers.then_some(NEEDS_MAP)).collect()
            }
            Format::TorchCheckpointing if any("optimizer.state.0.") => {
                vec!["the optimizer's state is numbered, as it was saved, not named"]
            }
            Format::Ranks => {
                let flat = self.entries.keys().any(|key| key.ends_with("flat_param"));
                let flat = flat.then_some("parameters lie end to end and without names, as in FSDP1's LOCAL_STATE_DICT");
                let numbered = any("optim.state.0.").then_some("the optimizer's state is numbered, as it was saved, not named");
                flat.into_iter().chain(numbered).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// One key.
#[derive(Debug)]
#[non_exhaustive]
pub struct CatalogEntry {
    /// Where it sat in the tree, where the format knows.
    pub path: Option<KeyPath>,
    /// A tensor or a value.
    pub kind: CatalogKind,
}

/// What a key is.
#[derive(Debug)]
#[non_exhaustive]
// Nearly all entries are tensors: a box would cost an allocation each and save nothing.
#[allow(clippy::large_enum_variant)]
pub enum CatalogKind {
    /// A tensor in chunks.
    Tensor(CatalogTensor),
    /// Anything else.
    Value(ValueLocation),
}

/// A stored tensor.
#[derive(Debug)]
#[non_exhaustive]
pub struct CatalogTensor {
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole.
    pub shape: Dims,
    /// Whether PyTorch sees it as requiring gradients.
    pub requires_grad: bool,
    /// The stored regions.
    pub chunks: Vec<StoredChunk>,
    index: OnceLock<Result<ChunkIndex, LayoutError>>,
}

/// A stored region and its place.
#[derive(Debug, Clone)]
pub struct StoredChunk {
    /// Which part of the tensor.
    pub region: Region,
    /// Number of the file.
    pub file: u32,
    /// Where in the file.
    pub location: ChunkLocation,
}

/// Where a chunk's bytes lie.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ChunkLocation {
    /// Inside a torch record of its own.
    Record {
        /// Where the record starts.
        offset: u64,
        /// Its length.
        length: u64,
        /// The stream transforms that the record went through (`stream.zstd/1`).
        transform: Option<Box<str>>,
    },
    /// At a known position.
    Data(Box<DataLocation>),
    /// In another stored chunk: a part of it, or its elements in another order. What views make.
    Seen(Box<SeenLocation>),
    /// In no file: its elements are computed from those of other tensors while they are read.
    Computed(Arc<Computed>),
    /// In no file: every element is this one.
    Fill(Box<[u8]>),
    /// Nowhere: a load leaves these elements as they are, and nothing else can read them.
    Live,
}

/// A chunk as it is stored, and what of it is seen where.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SeenLocation {
    /// Where the stored chunk lies: in a record or at a known position.
    pub stored: ChunkLocation,
    /// The stored chunk's element type; a tensor of another is cast while it is read.
    pub dtype: DType,
    /// Where the stored chunk starts in its own tensor, and its sizes.
    pub region: Region,
    /// Where each element lies: a layout whose bytes are the numbers of the stored chunk's elements in row-major order.
    pub window: ByteLayout,
}

/// Bytes at a known position of a file.
#[derive(Debug, Clone)]
pub struct DataLocation {
    /// How the chunk's elements lie in the file, from its start.
    pub layout: ByteLayout,
    /// How the stored bytes of an element relate to its value.
    pub form: ElementForm,
    /// The stretch of the file that has a checksum, and the checksum.
    pub checksum: Option<StoredCrc>,
}

/// A CRC-32 that the format itself stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredCrc {
    /// Start of the stretch.
    pub offset: u64,
    /// Its length.
    pub length: u64,
    /// The checksum.
    pub crc32: u32,
}

/// Where a value lies.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ValueLocation {
    /// In a torch record of its own.
    Record {
        /// Number of the file.
        file: u32,
        /// Where the record starts.
        offset: u64,
        /// Its length.
        length: u64,
        /// The stream transforms that the record went through (`stream.zstd/1`).
        transform: Option<Box<str>>,
    },
    /// Read already, with the file's other structure.
    Inline(Value),
    /// An object in a larger pickle, of a class that only its own library understands.
    Opaque {
        /// The class.
        class: String,
    },
}

impl StoredChunk {
    /// The number of no file, for chunks that lie in none.
    pub const NO_FILE: u32 = u32::MAX;
}

impl ChunkLocation {
    /// Where the bytes lie that a chunk is made from; itself, unless it is a part of another.
    pub fn stored(&self) -> &ChunkLocation {
        match self {
            ChunkLocation::Seen(seen) => seen.stored.stored(),
            other => other,
        }
    }
}

impl CatalogTensor {
    pub(crate) fn new(dtype: DType, shape: Dims, requires_grad: bool, chunks: Vec<StoredChunk>) -> CatalogTensor {
        CatalogTensor { dtype, shape, requires_grad, chunks, index: OnceLock::new() }
    }

    /// A copy of it.
    pub(crate) fn copied(&self) -> CatalogTensor {
        CatalogTensor::new(self.dtype, self.shape.clone(), self.requires_grad, self.chunks.clone())
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.size())
    }

    /// The bytes of what it is made from: its own, or those of what it is computed from.
    pub(crate) fn needed_bytes(&self) -> u64 {
        let of = |chunk: &StoredChunk| match chunk.location.stored() {
            ChunkLocation::Computed(computed) => {
                let share = u128::from(computed.input_bytes()) * u128::from(chunk.region.volume());
                u64::try_from(share / u128::from(computed.elements().max(1))).unwrap_or(u64::MAX)
            }
            _ => chunk.region.volume().saturating_mul(self.dtype.size()),
        };
        match self.chunks.iter().any(|chunk| matches!(chunk.location.stored(), ChunkLocation::Computed(_))) {
            true => self.chunks.iter().map(of).fold(0, u64::saturating_add),
            false => self.bytes(),
        }
    }

    /// The files in which it lies, or what it is computed from; with repetitions.
    pub(crate) fn files(&self) -> Vec<u32> {
        let mut files = Vec::new();
        for chunk in &self.chunks {
            match chunk.location.stored() {
                ChunkLocation::Computed(computed) => computed.tensors().for_each(|tensor| files.extend(tensor.files())),
                _ if chunk.file == StoredChunk::NO_FILE => {}
                _ => files.push(chunk.file),
            }
        }
        files
    }

    /// The chunks, ready for overlap queries; built on first use.
    pub(crate) fn index(&self) -> Result<&ChunkIndex, LayoutError> {
        let build = || ChunkIndex::new(&self.shape, self.chunks.iter().map(|c| c.region.clone()).collect());
        self.index.get_or_init(build).as_ref().map_err(Clone::clone)
    }
}

impl CatalogEntry {
    pub(crate) fn tensor(path: Option<KeyPath>, tensor: CatalogTensor) -> CatalogEntry {
        CatalogEntry { path, kind: CatalogKind::Tensor(tensor) }
    }

    /// The element type in words; of a value, that it is one.
    pub(crate) fn dtype_name(&self) -> &'static str {
        match &self.kind {
            CatalogKind::Tensor(tensor) => tensor.dtype.name(),
            CatalogKind::Value(_) => "a value",
        }
    }

    /// A copy of it.
    pub(crate) fn copied(&self) -> CatalogEntry {
        let kind = match &self.kind {
            CatalogKind::Tensor(tensor) => CatalogKind::Tensor(tensor.copied()),
            CatalogKind::Value(location) => CatalogKind::Value(location.clone()),
        };
        CatalogEntry { path: self.path.clone(), kind }
    }

    pub(crate) fn value(path: Option<KeyPath>, location: ValueLocation) -> CatalogEntry {
        CatalogEntry { path, kind: CatalogKind::Value(location) }
    }

    /// Counts its files from `first` on: its catalog becomes a part of another.
    pub(crate) fn renumber(&mut self, first: u32) {
        match &mut self.kind {
            CatalogKind::Tensor(tensor) => tensor.chunks.iter_mut().for_each(|chunk| chunk.file += first),
            CatalogKind::Value(ValueLocation::Record { file, .. }) => *file += first,
            CatalogKind::Value(_) => {}
        }
    }
}

/// A weight that is stored as codes and scales.
#[derive(Debug)]
pub(crate) struct ScaledWeight {
    /// The keys of both.
    pub(crate) codes: String,
    pub(crate) scales: String,
    /// Codes times scales, of type float32.
    pub(crate) entry: CatalogEntry,
}

/// The block-scaled weights of a checkpoint by their names, or what is wrong with one.
pub(crate) type Weights = IndexMap<String, Result<ScaledWeight, String>>;
