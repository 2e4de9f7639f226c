//! Laying out a `.pt` file with many tensors.
//!
//! All positions are known before any data is: a caller may write storages in parallel, or one after the
//! other as `head`, then for each storage `before`, its data and `after`, then `tail`.

use std::collections::HashMap;

use reshard_layout::Dims;

use crate::pickle::{Encoder, MAX_DEPTH, PickleError};
use crate::record::RecordError;
use crate::record::envelope::{Closing, PREAMBLE, combine, push_preamble};
use crate::record::frame::data_len;
use crate::record::zip_write::{Align, ZipEntry};
use crate::{DType, Dict, Tree};

/// Elements that one instruction adds to a container at most, as in Python's own pickler.
const BATCH: usize = 1000;

/// A tensor that a file is to hold, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: Dims,
    /// Torch's `requires_grad`.
    pub requires_grad: bool,
    /// Whether it is to be loaded as a `torch.nn.Parameter`.
    pub parameter: bool,
    /// Any number that tells storages apart. Tensors with the same number share one storage, as tied
    /// weights do, and must then have as many bytes each.
    pub storage: u64,
}

#[derive(Clone, Copy)]
struct Storage {
    index: usize,
    length: u64,
}

/// Where everything goes in a `.pt` file.
#[derive(Clone, Debug)]
pub struct TorchFileWriter {
    head: Vec<u8>,
    /// The entries of the preamble, then one for each storage.
    entries: Vec<ZipEntry<String>>,
    storages: Vec<u64>,
    closing: Closing,
    note: Option<Vec<u8>>,
}

impl TorchFileWriter {
    /// Lays out a file for `tree`. The note is as in [`RecordSpec`](crate::RecordSpec).
    pub fn new(tree: &Tree<FileTensor>, note: Option<&[u8]>) -> Result<TorchFileWriter, RecordError> {
        let mut pickler =
            Pickler { encoder: Encoder::new(2).map_err(RecordError::Pickle)?, storages: HashMap::new(), order: Vec::new() };
        pickler.tree(tree, 0)?;
        let pickle = pickler.encoder.finish();
        let mut head = Vec::with_capacity(pickle.len() + 1024);
        let preamble = push_preamble(&mut head, &pickle);
        let mut entries: Vec<ZipEntry<String>> = preamble.iter().map(owned).collect();
        let mut cursor = head.len() as u64;
        for (index, (_, length)) in pickler.order.iter().enumerate() {
            let entry = ZipEntry { name: format!("archive/data/{index}"), header: cursor, size: *length, crc32: 0 };
            cursor = entry.end(Align::Padded);
            if cursor > i64::MAX as u64 / 2 {
                return Err(RecordError::malformed("a file past 2^62 bytes", cursor));
            }
            entries.push(entry);
        }
        Ok(TorchFileWriter {
            head,
            entries,
            storages: pickler.order.into_iter().map(|(id, _)| id).collect(),
            closing: Closing::new(cursor, note),
            note: note.map(<[u8]>::to_vec),
        })
    }

    /// The numbers of the storages, in the order that they have in the file.
    pub fn storages(&self) -> &[u64] {
        &self.storages
    }

    /// Position and length of the data of each storage, in the same order.
    pub fn placements(&self) -> Vec<(u64, u64)> {
        self.storage_entries().iter().map(|entry| (entry.data_offset(Align::Padded), entry.size)).collect()
    }

    /// The bytes at the file's start.
    pub fn head(&self) -> &[u8] {
        &self.head
    }

    /// The bytes right before the data of a storage, and their position.
    pub fn before(&self, storage: usize) -> Option<(u64, Vec<u8>)> {
        let entry = self.storage_entries().get(storage)?;
        let mut out = Vec::with_capacity(160);
        entry.push_local(&mut out, Align::Padded);
        Some((entry.header, out))
    }

    /// The bytes right behind the data of a storage, and their position.
    pub fn after(&self, storage: usize, crc32: u32) -> Option<(u64, Vec<u8>)> {
        let mut entry = self.storage_entries().get(storage)?.clone();
        entry.crc32 = crc32;
        let mut out = Vec::with_capacity(24);
        entry.push_descriptor(&mut out);
        Some((entry.data_offset(Align::Padded) + entry.size, out))
    }

    /// The bytes at the file's end, and their position, given the CRC-32 of every storage's data.
    pub fn tail(&self, crc32s: &[u32]) -> Result<(u64, Vec<u8>), RecordError> {
        if crc32s.len() != self.storages.len() {
            return Err(RecordError::malformed(format!("{} checksums for {} storages", crc32s.len(), self.storages.len()), 0));
        }
        let mut entries = self.entries.clone();
        for (entry, &crc32) in entries.iter_mut().skip(PREAMBLE).zip(crc32s) {
            entry.crc32 = if entry.size == 0 { 0 } else { crc32 };
        }
        let names = entries.iter().fold(0, |hash, entry| {
            let crc32 = crc32fast::hash(entry.name.as_bytes());
            combine(hash, u64::from(crc32))
        });
        let mut out = Vec::with_capacity(1024 + 80 * entries.len());
        self.closing.push(&mut out, &entries, names, self.note.as_deref());
        Ok((self.closing.start(), out))
    }

    /// The file's length.
    pub fn total_len(&self) -> u64 {
        self.closing.total_len(self.entries.iter().map(ZipEntry::central_len).sum())
    }

    fn storage_entries(&self) -> &[ZipEntry<String>] {
        self.entries.get(PREAMBLE..).unwrap_or_default()
    }
}

fn owned(entry: &ZipEntry<&'static str>) -> ZipEntry<String> {
    ZipEntry { name: entry.name.to_owned(), header: entry.header, size: entry.size, crc32: entry.crc32 }
}

struct Pickler {
    encoder: Encoder,
    storages: HashMap<u64, Storage>,
    /// Number and length of each storage, in order of first appearance.
    order: Vec<(u64, u64)>,
}

impl Pickler {
    fn tree(&mut self, tree: &Tree<FileTensor>, depth: usize) -> Result<(), RecordError> {
        if depth > MAX_DEPTH {
            return Err(RecordError::Pickle(PickleError::Limit { what: "levels of nesting", limit: MAX_DEPTH as u64, at: 0 }));
        }
        match tree {
            Tree::Tensor(tensor) => self.tensor(tensor),
            Tree::Value(value) => self.encoder.value(value).map_err(RecordError::Pickle),
            Tree::Dict(dict) => {
                self.encoder.empty_dict();
                self.pairs(dict, depth)
            }
            Tree::List(items) => {
                self.encoder.empty_list();
                for batch in items.chunks(BATCH) {
                    self.encoder.mark();
                    for item in batch {
                        self.tree(item, depth + 1)?;
                    }
                    self.encoder.append_items();
                }
                Ok(())
            }
            Tree::Tuple(items) => {
                if items.len() > 3 {
                    self.encoder.mark();
                }
                for item in items {
                    self.tree(item, depth + 1)?;
                }
                self.encoder.tuple(items.len());
                Ok(())
            }
            Tree::Opaque(opaque) => Err(RecordError::Unsupported {
                key: opaque.class.clone(),
                what: "an object of a class that is not known to be data".to_owned(),
            }),
        }
    }

    fn pairs(&mut self, dict: &Dict<FileTensor>, depth: usize) -> Result<(), RecordError> {
        for batch in dict.iter().collect::<Vec<_>>().chunks(BATCH) {
            self.encoder.mark();
            for (key, below) in batch {
                self.encoder.value(&key.to_value()).map_err(RecordError::Pickle)?;
                self.tree(below, depth + 1)?;
            }
            self.encoder.set_items();
        }
        Ok(())
    }

    fn ordered_dict(&mut self) {
        self.encoder.global("collections", "OrderedDict");
        self.encoder.tuple(0);
        self.encoder.reduce();
    }

    fn tensor(&mut self, tensor: &FileTensor) -> Result<(), RecordError> {
        if tensor.parameter {
            self.encoder.global("torch._utils", "_rebuild_parameter");
        }
        let storage = self.storage(tensor)?;
        let class = tensor.dtype.storage_class();
        let (function, module, length) = match class {
            Some(_) => ("_rebuild_tensor_v2", "torch", storage.length / tensor.dtype.size()),
            None => ("_rebuild_tensor_v3", "torch.storage", storage.length),
        };
        let encoder = &mut self.encoder;
        encoder.global("torch._utils", function);
        encoder.mark();
        encoder.mark();
        encoder.str("storage");
        encoder.global(module, class.unwrap_or("UntypedStorage"));
        encoder.str(&storage.index.to_string());
        encoder.str("cpu");
        encoder.uint(length);
        encoder.tuple(5);
        // BINPERSID: the tuple refers to something outside of the pickle.
        encoder.raw(b"Q");
        encoder.int(0);
        push_numbers(encoder, &tensor.shape);
        push_numbers(encoder, &contiguous_strides(&tensor.shape));
        // A parameter's own flag is an argument of the parameter.
        encoder.bool(tensor.requires_grad && !tensor.parameter);
        self.ordered_dict();
        let mut arguments = 6;
        if class.is_none() {
            self.encoder.global("torch", tensor.dtype.name());
            arguments += 1;
        }
        self.encoder.tuple(arguments);
        self.encoder.reduce();
        if tensor.parameter {
            self.encoder.bool(tensor.requires_grad);
            self.ordered_dict();
            self.encoder.tuple(3);
            self.encoder.reduce();
        }
        Ok(())
    }

    fn storage(&mut self, tensor: &FileTensor) -> Result<Storage, RecordError> {
        let length = data_len(tensor.dtype, &tensor.shape)?;
        let index = self.order.len();
        let storage = *self.storages.entry(tensor.storage).or_insert(Storage { index, length });
        if storage.index == index {
            self.order.push((tensor.storage, length));
        }
        if storage.length != length {
            return Err(RecordError::BadTensor {
                key: format!("storage {}", tensor.storage),
                reason: format!("tensors of {} and of {length} bytes can't share a storage", storage.length),
            });
        }
        Ok(storage)
    }
}

fn push_numbers(encoder: &mut Encoder, numbers: &[u64]) {
    if numbers.len() > 3 {
        encoder.mark();
    }
    numbers.iter().for_each(|&number| encoder.uint(number));
    encoder.tuple(numbers.len());
}

/// Torch's strides of a contiguous tensor: an empty dimension counts as if it had one element.
fn contiguous_strides(shape: &[u64]) -> Dims {
    let mut stride: u64 = shape.iter().map(|&size| size.max(1)).product();
    let strides = shape.iter().map(|&size| {
        stride /= size.max(1);
        stride
    });
    strides.collect()
}
