//! `state_dict_metadata`: keys with their tensors' properties, shapes and chunks.

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use reshard_layout::{Dims, Region};

use super::decode::Classes;
use super::error::MetadataError;
use super::fields::{Fields, describe, plain_instance, state_of, wrong_type};
use super::types::{
    Chunk, Entry, EntryKind, ExtraFields, FileId, MemoryFormat, StorageInfo, TensorEntry, TensorExtra, TensorProperties,
};
use crate::DType;
use crate::pickle::{Document, Node, View};

type Result<T> = std::result::Result<T, MetadataError>;

/// Number of an entry by the bytes of its key.
pub(super) type Names<'d> = HashMap<&'d [u8], u32, foldhash::quality::RandomState>;

/// Numbers of the entries that are tensors by the metadata and objects to us: their records are filed under offsets.
pub(super) type Odd = HashSet<u32>;

/// The entries, their storage infos still unset.
pub(super) fn read_entries<'d>(
    document: &'d Document<'_>,
    classes: &Classes,
    node: Node,
) -> Result<(IndexMap<String, Entry>, Names<'d>, Odd)> {
    let place = || "`state_dict_metadata`".to_owned();
    let pairs = document.as_dict(node).ok_or_else(|| wrong_type(document, node, place, "a dict"))?;
    let mut reader = EntryReader {
        document,
        classes,
        tensor_fields: Fields::new(["properties", "size", "chunks"]),
        chunk_fields: Fields::new(["offsets", "sizes"]),
        offsets: Dims::new(),
        sizes: Dims::new(),
        odd: Odd::new(),
    };
    let mut entries = IndexMap::with_capacity(pairs.len());
    let mut names = Names::with_capacity_and_hasher(pairs.len(), foldhash::quality::RandomState::default());
    for [key_node, value] in pairs {
        let Some(key) = document.as_str(*key_node) else {
            return Err(wrong_type(document, *key_node, || "key of `state_dict_metadata`".into(), "a str"));
        };
        let number = u32::try_from(entries.len());
        let number = number.map_err(|_| MetadataError::Limit { what: "keys", limit: u64::from(u32::MAX) })?;
        if names.insert(document.raw(*key_node), number).is_some() {
            return Err(MetadataError::DuplicateKey { key: key.into(), place: place() });
        }
        let kind = reader.entry(key, number, *value)?;
        entries.insert(key.to_owned(), Entry { path: None, kind });
    }
    Ok((entries, names, reader.odd))
}

struct EntryReader<'d, 'a> {
    document: &'d Document<'a>,
    classes: &'d Classes,
    tensor_fields: Fields<3>,
    chunk_fields: Fields<2>,
    offsets: Dims,
    sizes: Dims,
    odd: Odd,
}

impl EntryReader<'_, '_> {
    fn entry(&mut self, key: &str, number: u32, node: Node) -> Result<EntryKind> {
        let unset = StorageInfo::new(FileId::UNSET, 0, 0);
        if plain_instance(self.document, node, self.classes.bytes).is_some() {
            return Ok(EntryKind::Bytes(unset));
        }
        let place = || format!("`{key}`");
        let expected = "an instance of `TensorStorageMetadata` or `BytesStorageMetadata`";
        let state = state_of(self.document, node, self.classes.tensor);
        let state = state.ok_or_else(|| wrong_type(self.document, node, place, expected))?;
        let mut extra = TensorExtra::default();
        let [properties, size, chunks] = self.tensor_fields.read(self.document, state, place, &mut extra.tensor)?;
        for (node, field) in [(properties, "properties"), (size, "size"), (chunks, "chunks")] {
            if node == Node::ABSENT {
                return Err(MetadataError::MissingField { place: place(), field });
            }
        }
        let properties = match self.properties(key, properties) {
            // A sparse or a quantised tensor in one record is an object to be read by torch; it does not hide the others.
            Err(MetadataError::DType { .. } | MetadataError::Layout { .. }) if self.is_whole(chunks) => {
                self.odd.insert(number);
                return Ok(EntryKind::Bytes(unset));
            }
            properties => properties?,
        };
        let mut shape = Dims::new();
        if !read_dims(self.document, size, &mut shape) {
            return Err(wrong_type(self.document, size, || format!("`{key}`, `size`"), SIZES));
        }
        Region::whole(&shape).map_err(|source| MetadataError::Shape { key: key.into(), source })?;
        let chunks = self.chunks(key, chunks, &shape, &mut extra)?;
        let extra = (extra != TensorExtra::default()).then(|| Box::new(extra));
        Ok(EntryKind::Tensor(TensorEntry { properties, shape, chunks, extra }))
    }

    fn is_whole(&self, chunks: Node) -> bool {
        matches!(self.document.view(chunks), View::List([_]) | View::Tuple([_]))
    }

    fn chunks(&mut self, key: &str, node: Node, shape: &Dims, extra: &mut TensorExtra) -> Result<Vec<Chunk>> {
        let document = self.document;
        let place = || format!("`{key}`, `chunks`");
        let list = match document.view(node) {
            View::List(list) | View::Tuple(list) => list,
            _ => return Err(wrong_type(document, node, place, "a list")),
        };
        let mut chunks = Vec::with_capacity(list.len());
        let mut unknown = ExtraFields::new();
        for (number, node) in list.iter().enumerate() {
            let place = || format!("`{key}`, chunk {number}");
            let state = state_of(document, *node, self.classes.chunk);
            let state = state.ok_or_else(|| wrong_type(document, *node, place, "an instance of `ChunkStorageMetadata`"))?;
            let [offsets, sizes] = self.chunk_fields.read(document, state, place, &mut unknown)?;
            for (node, field, dims) in [(offsets, "offsets", &mut self.offsets), (sizes, "sizes", &mut self.sizes)] {
                if !read_dims(document, node, dims) {
                    if node == Node::ABSENT {
                        return Err(MetadataError::MissingField { place: place(), field });
                    }
                    return Err(wrong_type(document, node, || format!("{}, `{field}`", place()), SIZES));
                }
            }
            let region = Region::new(&self.offsets, &self.sizes)
                .and_then(|region| region.check_inside(shape).map(|()| region))
                .map_err(|source| MetadataError::Chunk { key: key.into(), chunk: number, source })?;
            let storage = StorageInfo::new(FileId::UNSET, 0, 0);
            chunks.push(Chunk { region, storage });
            if !unknown.is_empty() {
                extra.chunks.push((number, std::mem::take(&mut unknown)));
            }
        }
        Ok(chunks)
    }

    fn properties(&self, key: &str, node: Node) -> Result<TensorProperties> {
        let document = self.document;
        let place = || format!("`{key}`, `properties`");
        let wrong = || wrong_type(document, node, place, "an instance of `TensorProperties` with its five or six values");
        let classes = self.classes.properties.iter();
        let object = classes.filter_map(|class| plain_instance(document, node, Some((*class)?))).next();
        let state = object.and_then(|object| document.as_tuple(object.state?)).ok_or_else(wrong)?;
        let (dtype, layout, requires_grad, format, pin_memory, strides) = match *state {
            [dtype, layout, grad, format, pin] => (dtype, layout, grad, format, pin, None),
            [dtype, layout, grad, format, pin, strides] => (dtype, layout, grad, format, pin, Some(strides)),
            _ => return Err(wrong()),
        };
        let flag = |node: Node, what: &str| match document.view(node) {
            View::Bool(value) => Ok(value),
            _ => Err(wrong_type(document, node, || format!("{}, `{what}`", place()), "a bool")),
        };
        self.check_layout(key, layout)?;
        Ok(TensorProperties {
            dtype: self.dtype(key, dtype)?,
            requires_grad: flag(requires_grad, "requires_grad")?,
            memory_format: self.memory_format(format).ok_or_else(|| {
                let place = || format!("{}, `memory_format`", place());
                wrong_type(document, format, place, "one of torch's memory formats")
            })?,
            pin_memory: flag(pin_memory, "pin_memory")?,
            strides: match strides {
                None => None,
                Some(node) if matches!(document.view(node), View::None) => None,
                Some(node) => {
                    let mut strides = Dims::new();
                    if !read_dims(document, node, &mut strides) {
                        return Err(wrong_type(document, node, || format!("{}, `strides`", place()), SIZES));
                    }
                    Some(strides)
                }
            },
        })
    }

    fn dtype(&self, key: &str, node: Node) -> Result<DType> {
        match self.document.as_global(node) {
            Some(global) if global.module() == "torch" => {
                DType::from_name(global.name()).ok_or_else(|| MetadataError::DType { key: key.into(), dtype: global.path() })
            }
            _ => Err(wrong_type(self.document, node, || format!("`{key}`, `dtype`"), "a torch dtype")),
        }
    }

    fn check_layout(&self, key: &str, node: Node) -> Result<()> {
        let name = self.document.as_object(node).and_then(|object| {
            let function = self.document.global(object.class);
            let args = self.document.as_tuple(object.args)?;
            let known = function.is("torch.serialization", "_get_layout");
            known.then_some(())?;
            args.first().and_then(|name| self.document.as_str(*name))
        });
        match name {
            Some("torch.strided") => Ok(()),
            Some(other) => Err(MetadataError::Layout { key: key.into(), layout: other.into() }),
            None => Err(MetadataError::Layout { key: key.into(), layout: describe(self.document, node) }),
        }
    }

    /// `_MEM_FORMAT_ENCODING(0)`; some Pythons write an enum as `getattr(_MEM_FORMAT_ENCODING, "…")`.
    fn memory_format(&self, node: Node) -> Option<MemoryFormat> {
        let document = self.document;
        let object = document.as_object(node)?;
        let function = document.global(object.class);
        let args = document.as_tuple(object.args)?;
        let is_encoding = |name: &str| matches!(name, "_MEM_FORMAT_ENCODING" | "MEM_FORMAT_ENCODING");
        match args {
            [number] if is_encoding(function.name()) => match document.as_i64(*number)? {
                0 => Some(MemoryFormat::Contiguous),
                1 => Some(MemoryFormat::ChannelsLast),
                2 => Some(MemoryFormat::Preserve),
                _ => None,
            },
            [class, name] if function.is("builtins", "getattr") => {
                is_encoding(document.as_global(*class)?.name()).then_some(())?;
                match document.as_str(*name)? {
                    "TORCH_CONTIGUOUS_FORMAT" => Some(MemoryFormat::Contiguous),
                    "TORCH_CHANNELS_LAST" => Some(MemoryFormat::ChannelsLast),
                    "TORCH_PRESERVE_FORMAT" => Some(MemoryFormat::Preserve),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

pub(super) const SIZES: &str = "a torch.Size of integers of at most 63 bits, none negative";

/// Reads a `torch.Size`, tuple or list of non-negative integers; false for anything else.
#[inline]
pub(super) fn read_dims(document: &Document<'_>, node: Node, dims: &mut Dims) -> bool {
    dims.clear();
    let Some(elements) = dims_of(document, node) else {
        return false;
    };
    for element in elements {
        match document.as_i64(*element).map(u64::try_from) {
            Some(Ok(value)) => dims.push(value),
            _ => return false,
        }
    }
    true
}

#[inline]
pub(super) fn dims_of<'d>(document: &'d Document<'_>, node: Node) -> Option<&'d [Node]> {
    document.as_dims(node).or_else(|| match document.view(node) {
        View::List(elements) => Some(elements),
        _ => None,
    })
}
