//! Metadata to a pickle that every torch loads.
//!
//! What occurs once per chunk is written from prepared byte strings: classes and field names have memo slots below
//! 256, so that referring to one takes two bytes. They get them in a prelude that leaves nothing on the stack.

use super::error::MetadataError;
use super::types::{
    EntryKind, ExtraFields, FileId, Metadata, PlannerData, StorageInfo, StorageMeta, TensorEntry, TensorProperties,
};
use crate::PathSegment;
use crate::pickle::opcode as op;
use crate::pickle::{BATCH, Encoder, Slot};
use crate::value::{PathValue, Value};

type Result<T> = std::result::Result<T, MetadataError>;

const MODULE: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";
/// Protocol that torch uses.
const PROTOCOL: u8 = 4;
/// A little more than a chunk with its storage info takes.
const BYTES_PER_CHUNK: usize = 96;
const BYTES_PER_ENTRY: usize = 256;

impl Metadata {
    /// The bytes of a `.metadata` file.
    ///
    /// Torch 2.5 to 2.15 load it with `pickle.load`. An error if the metadata refers to files it doesn't list,
    /// or lists one that doesn't stay inside the checkpoint.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check_storage()?;
        let capacity = 4096 + self.chunk_count() * BYTES_PER_CHUNK + self.entries.len() * BYTES_PER_ENTRY;
        let mut writer = Writer::new(Encoder::with_capacity(PROTOCOL, capacity)?);
        writer.metadata(self)?;
        Ok(writer.encoder.finish())
    }

    /// Proves the other way round what decoding proves.
    fn check_storage(&self) -> Result<()> {
        for path in &self.files {
            if let Some(reason) = super::proof::path_problem(path) {
                return Err(MetadataError::PathEscapes { key: "files".into(), path: path.clone(), reason });
            }
        }
        let check = |key: &str, storage: &StorageInfo| {
            if storage.file.0 as usize >= self.files.len() {
                return Err(MetadataError::File { key: key.into(), file: storage.file.0 });
            }
            let (offset, length) = (storage.offset, storage.length);
            match offset.checked_add(length) {
                Some(_) => Ok(()),
                None => Err(MetadataError::Range { key: key.into(), offset, length }),
            }
        };
        for (key, entry) in &self.entries {
            match &entry.kind {
                EntryKind::Bytes(storage) => check(key, storage)?,
                EntryKind::Tensor(tensor) => {
                    for (number, chunk) in tensor.chunks.iter().enumerate() {
                        check(key, &chunk.storage)?;
                        let inside = chunk.region.check_inside(&tensor.shape);
                        inside.map_err(|source| MetadataError::Chunk { key: key.clone(), chunk: number, source })?;
                    }
                }
            }
        }
        self.unreferenced.iter().try_for_each(|it| check(&it.key, &it.storage))
    }
}

/// Byte strings that repeat, with memo slots filled in.
struct Prepared {
    size: Slot,
    /// `ChunkStorageMetadata()`, up to the value of `offsets`.
    chunk: Vec<u8>,
    /// The field `sizes`.
    sizes: Vec<u8>,
    /// `MetadataIndex()`, up to the value of `fqn`.
    index: Vec<u8>,
    /// The field `index` of the index.
    index_hint: Vec<u8>,
    /// The field `offset`, of the index as of the storage info.
    offset: Vec<u8>,
    /// `_StorageInfo()`, up to the value of `relative_path`.
    info: Vec<u8>,
    /// The field `length` of the storage info.
    length: Vec<u8>,
}

/// Ends the fields of an object.
const END_FIELDS: &[u8] = &[op::SETITEMS, op::BUILD];

struct Writer {
    encoder: Encoder,
    prepared: Prepared,
    /// Slot of each entry's key, in order.
    keys: Vec<Slot>,
    /// Slot of each chunk's offsets, in order over all tensors.
    offsets: Vec<Slot>,
    files: Vec<Option<Slot>>,
    layout: Option<Slot>,
}

impl Writer {
    fn new(mut encoder: Encoder) -> Writer {
        let mut prelude = |write: &dyn Fn(&mut Encoder)| {
            write(&mut encoder);
            let slot = encoder.memoize();
            encoder.raw(&[op::POP]);
            let mut reference = Encoder::reference(slot);
            reference.shrink_to_fit();
            (slot, reference)
        };
        let mut class = |module: &'static str, name: &'static str| {
            let (slot, mut start) = prelude(&|e| e.global_once(module, name));
            start.extend_from_slice(&[op::EMPTY_TUPLE, op::NEWOBJ, op::EMPTY_DICT, op::MARK]);
            (slot, start)
        };
        let (size, _) = class("torch", "Size");
        let (_, mut chunk) = class(MODULE, "ChunkStorageMetadata");
        let (_, mut index) = class(MODULE, "MetadataIndex");
        let (_, mut info) = class(FILESYSTEM, "_StorageInfo");
        let mut field = |name: &'static str| prelude(&|e| e.str_once(name)).1;
        chunk.extend(field("offsets"));
        index.extend(field("fqn"));
        info.extend(field("relative_path"));
        let (sizes, index_hint, offset, length) = (field("sizes"), field("index"), field("offset"), field("length"));
        let prepared = Prepared { size, chunk, sizes, index, index_hint, offset, info, length };
        Writer { encoder, prepared, keys: Vec::new(), offsets: Vec::new(), files: Vec::new(), layout: None }
    }

    fn metadata(&mut self, metadata: &Metadata) -> Result<()> {
        self.files = vec![None; metadata.files.len()];
        self.object(MODULE, "Metadata");
        self.encoder.str("state_dict_metadata");
        self.entries(metadata)?;
        self.encoder.str("planner_data");
        self.planner_data(metadata)?;
        self.encoder.str("storage_data");
        self.storage(metadata)?;
        self.encoder.str("storage_meta");
        match &metadata.storage_meta {
            Some(meta) => self.storage_meta(meta)?,
            None => self.encoder.none(),
        }
        if let Some(version) = &metadata.version {
            self.encoder.str("version");
            self.encoder.str(version);
        }
        self.extra(&metadata.extra)?;
        self.encoder.raw(END_FIELDS);
        Ok(())
    }

    /// Starts an object whose fields follow.
    fn object(&mut self, module: &str, name: &str) {
        self.encoder.global(module, name);
        self.encoder.raw(&[op::EMPTY_TUPLE, op::NEWOBJ, op::EMPTY_DICT, op::MARK]);
    }

    fn extra(&mut self, extra: &ExtraFields) -> Result<()> {
        for (name, value) in extra {
            self.encoder.str(name);
            self.encoder.carried(value)?;
        }
        Ok(())
    }

    fn entries(&mut self, metadata: &Metadata) -> Result<()> {
        self.encoder.empty_dict();
        self.keys.reserve(metadata.entries.len());
        self.offsets.reserve(metadata.chunk_count());
        let mut batch = Batch::new();
        for (key, entry) in &metadata.entries {
            batch.next(&mut self.encoder);
            self.encoder.str_once(key);
            let slot = self.encoder.memoize();
            self.keys.push(slot);
            match &entry.kind {
                EntryKind::Tensor(tensor) => self.tensor(tensor)?,
                EntryKind::Bytes(_) => {
                    self.encoder.global(MODULE, "BytesStorageMetadata");
                    self.encoder.raw(&[op::EMPTY_TUPLE, op::NEWOBJ]);
                }
            }
        }
        batch.end(&mut self.encoder);
        Ok(())
    }

    fn tensor(&mut self, tensor: &TensorEntry) -> Result<()> {
        self.object(MODULE, "TensorStorageMetadata");
        self.encoder.str("properties");
        self.properties(&tensor.properties);
        self.encoder.str("size");
        self.size(&tensor.shape);
        self.encoder.str("chunks");
        self.encoder.empty_list();
        let mut extra = tensor.extra.iter().flat_map(|extra| &extra.chunks).peekable();
        // Chunks of one tensor mostly have the same sizes.
        let mut last: Option<(&[u64], Slot)> = None;
        for (number, chunk) in tensor.chunks.iter().enumerate() {
            if number % BATCH == 0 {
                if number > 0 {
                    self.encoder.append_items();
                }
                self.encoder.mark();
            }
            self.encoder.frame_break();
            self.encoder.raw(&self.prepared.chunk);
            self.size(chunk.region.offsets());
            let slot = self.encoder.memoize();
            self.offsets.push(slot);
            self.encoder.raw(&self.prepared.sizes);
            match last {
                Some((sizes, slot)) if sizes == chunk.region.sizes() => self.encoder.get(slot),
                _ => {
                    self.size(chunk.region.sizes());
                    last = Some((chunk.region.sizes(), self.encoder.memoize()));
                }
            }
            while let Some((_, fields)) = extra.next_if(|(n, _)| *n <= number) {
                self.extra(fields)?;
            }
            self.encoder.raw(END_FIELDS);
        }
        if !tensor.chunks.is_empty() {
            self.encoder.append_items();
        }
        if let Some(extra) = &tensor.extra {
            self.extra(&extra.tensor)?;
        }
        self.encoder.raw(END_FIELDS);
        Ok(())
    }

    #[inline]
    fn size(&mut self, dims: &[u64]) {
        self.encoder.get(self.prepared.size);
        if Encoder::tuple_needs_mark(dims.len()) {
            self.encoder.mark();
        }
        dims.iter().for_each(|d| self.encoder.uint(*d));
        self.encoder.tuple(dims.len());
        self.encoder.raw(&[op::TUPLE1, op::REDUCE]);
    }

    /// The five values that every version reads; strides would make a sixth that only 2.15 knows.
    fn properties(&mut self, properties: &TensorProperties) {
        let encoder = &mut self.encoder;
        encoder.global(MODULE, "TensorProperties");
        encoder.raw(&[op::EMPTY_TUPLE, op::NEWOBJ, op::MARK]);
        encoder.global("torch", properties.dtype.name());
        match self.layout {
            Some(slot) => encoder.get(slot),
            None => {
                encoder.global("torch.serialization", "_get_layout");
                encoder.str("torch.strided");
                encoder.raw(&[op::TUPLE1, op::REDUCE]);
                self.layout = Some(encoder.memoize());
            }
        }
        encoder.bool(properties.requires_grad);
        encoder.global(MODULE, "_MEM_FORMAT_ENCODING");
        encoder.int(properties.memory_format as i64);
        encoder.raw(&[op::TUPLE1, op::REDUCE]);
        encoder.bool(properties.pin_memory);
        encoder.raw(&[op::TUPLE, op::BUILD]);
    }

    fn planner_data(&mut self, metadata: &Metadata) -> Result<()> {
        match &metadata.planner_data {
            PlannerData::None => {
                self.encoder.none();
                return Ok(());
            }
            PlannerData::Other(carried) => return Ok(self.encoder.carried(carried)?),
            PlannerData::Paths => {}
        }
        self.encoder.empty_dict();
        let mut batch = Batch::new();
        for (number, entry) in metadata.entries.values().enumerate() {
            if let (Some(path), Some(key)) = (&entry.path, self.keys.get(number)) {
                batch.next(&mut self.encoder);
                self.encoder.get(*key);
                self.path(path);
            }
        }
        for (key, path) in &metadata.unstored_paths {
            batch.next(&mut self.encoder);
            self.encoder.str(key);
            self.path(path);
        }
        batch.end(&mut self.encoder);
        Ok(())
    }

    fn path(&mut self, path: &[PathSegment]) {
        if Encoder::tuple_needs_mark(path.len()) {
            self.encoder.mark();
        }
        for segment in path {
            match segment {
                PathSegment::Key(key) => self.encoder.str(key),
                PathSegment::Index(index) => self.encoder.int(*index),
            }
        }
        self.encoder.tuple(path.len());
    }

    fn storage(&mut self, metadata: &Metadata) -> Result<()> {
        self.encoder.empty_dict();
        let keys = std::mem::take(&mut self.keys);
        let offsets = std::mem::take(&mut self.offsets);
        let mut offsets = offsets.into_iter();
        let mut batch = Batch::new();
        for (key, entry) in keys.into_iter().zip(metadata.entries.values()) {
            match &entry.kind {
                EntryKind::Bytes(storage) => {
                    batch.next(&mut self.encoder);
                    self.index(key, None, index_extra(storage))?;
                    self.info(metadata, storage)?;
                }
                EntryKind::Tensor(tensor) => {
                    for (number, (chunk, offset)) in tensor.chunks.iter().zip(&mut offsets).enumerate() {
                        if is_repeated(tensor, number) {
                            continue;
                        }
                        batch.next(&mut self.encoder);
                        self.index(key, Some((number, offset)), index_extra(&chunk.storage))?;
                        self.info(metadata, &chunk.storage)?;
                    }
                }
            }
        }
        for it in &metadata.unreferenced {
            batch.next(&mut self.encoder);
            self.encoder.raw(&self.prepared.index);
            self.encoder.str(&it.key);
            if let Some(offsets) = &it.offsets {
                self.encoder.raw(&self.prepared.offset);
                self.size(offsets);
            }
            self.extra(index_extra(&it.storage))?;
            self.encoder.raw(END_FIELDS);
            self.info(metadata, &it.storage)?;
        }
        batch.end(&mut self.encoder);
        Ok(())
    }

    #[inline]
    fn index(&mut self, key: Slot, chunk: Option<(usize, Slot)>, extra: &ExtraFields) -> Result<()> {
        self.encoder.raw(&self.prepared.index);
        self.encoder.get(key);
        self.encoder.raw(&self.prepared.index_hint);
        match chunk {
            Some((number, offsets)) => {
                self.encoder.uint(number as u64);
                self.encoder.raw(&self.prepared.offset);
                self.encoder.get(offsets);
            }
            None => self.encoder.none(),
        }
        self.extra(extra)?;
        self.encoder.raw(END_FIELDS);
        Ok(())
    }

    #[inline]
    fn info(&mut self, metadata: &Metadata, storage: &StorageInfo) -> Result<()> {
        self.encoder.raw(&self.prepared.info);
        self.file(metadata, storage.file);
        self.encoder.raw(&self.prepared.offset);
        self.encoder.uint(storage.offset);
        self.encoder.raw(&self.prepared.length);
        self.encoder.uint(storage.length);
        if let Some(rare) = &storage.transforms {
            if let Some(descriptors) = &rare.descriptors {
                self.encoder.str("transform_descriptors");
                self.list_of_str(descriptors);
            }
            self.extra(&rare.extra)?;
        }
        self.encoder.raw(END_FIELDS);
        Ok(())
    }

    #[inline]
    fn file(&mut self, metadata: &Metadata, file: FileId) {
        let number = file.0 as usize;
        match self.files.get(number) {
            Some(Some(slot)) => self.encoder.get(*slot),
            _ => {
                self.encoder.str_once(metadata.files.get(number).map_or("", String::as_str));
                let slot = self.encoder.memoize();
                if let Some(known) = self.files.get_mut(number) {
                    *known = Some(slot);
                }
            }
        }
    }

    fn list_of_str(&mut self, texts: &[String]) {
        self.encoder.empty_list();
        for batch in texts.chunks(BATCH) {
            self.encoder.mark();
            batch.iter().for_each(|text| self.encoder.str(text));
            self.encoder.append_items();
        }
    }

    fn storage_meta(&mut self, meta: &StorageMeta) -> Result<()> {
        self.object(MODULE, "StorageMeta");
        self.encoder.str("checkpoint_id");
        match (&meta.checkpoint_id, meta.checkpoint_id_class) {
            (Some(text), Some(class)) => {
                let text = text.clone();
                self.encoder.value(&Value::Path(PathValue { class, text }))?;
            }
            (text, _) => self.optional_str(text.as_deref()),
        }
        self.encoder.str("save_id");
        self.optional_str(meta.save_id.as_deref());
        self.encoder.str("load_id");
        self.optional_str(meta.load_id.as_deref());
        self.encoder.str("modules");
        self.list_of_str(&meta.modules);
        self.extra(&meta.extra)?;
        self.encoder.raw(END_FIELDS);
        Ok(())
    }

    fn optional_str(&mut self, text: Option<&str>) {
        match text {
            Some(text) => self.encoder.str(text),
            None => self.encoder.none(),
        }
    }
}

/// Whether an earlier chunk has the same offsets: then its storage info is filed under the same index already.
/// Only empty chunks can share offsets without overlapping, and those stand next to each other.
fn is_repeated(tensor: &TensorEntry, number: usize) -> bool {
    let Some(chunk) = tensor.chunks.get(number) else {
        return false;
    };
    let before = number.checked_sub(1).and_then(|before| tensor.chunks.get(before));
    before.is_some_and(|before| before.region.offsets() == chunk.region.offsets())
}

fn index_extra(storage: &StorageInfo) -> &ExtraFields {
    static NOTHING: ExtraFields = Vec::new();
    storage.transforms.as_deref().map_or(&NOTHING, |rare| &rare.index_extra)
}

/// Items of a dict in batches of [`BATCH`], as CPython writes them.
struct Batch {
    open: usize,
}

impl Batch {
    fn new() -> Batch {
        Batch { open: 0 }
    }

    #[inline]
    fn next(&mut self, encoder: &mut Encoder) {
        if self.open == BATCH {
            encoder.set_items();
            self.open = 0;
        }
        if self.open == 0 {
            encoder.mark();
        }
        encoder.frame_break();
        self.open += 1;
    }

    fn end(self, encoder: &mut Encoder) {
        if self.open > 0 {
            encoder.set_items();
        }
    }
}
