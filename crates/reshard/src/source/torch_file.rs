//! A `torch.save` file as a catalog: its tree flattened by DCP's rules, every tensor a chunk at a known position.

use std::sync::Arc;

use indexmap::IndexMap;
use reshard_formats::Tree as StoredTree;
use reshard_formats::record::{Content, StoredTensor};
use reshard_formats::{TorchArchive, Value};
use reshard_layout::Region;
use reshard_state::{Dict, Key, Opaque, Tree, flatten, key_of};
use reshard_storage::Store;

use super::folder::Folder;
use super::is_torch;
use crate::checkpoint::{
    Catalog, CatalogEntry, CatalogTensor, Checkpoint, ChunkPlace, DataPlace, Format, StoredChunk, StoredCrc, StoredFile,
    ValuePlace,
};
use crate::error::{Error, Result, StorageContext};

/// The key of a file that holds one thing and no tree.
const ONLY: &str = "value";

/// A folder with one such file.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    match folder.top()?.filter(|name| is_torch(name)).collect::<Vec<_>>()[..] {
        [only] => open(folder.store.clone(), only).map(Some),
        _ => Ok(None),
    }
}

pub(super) fn open(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
    let path = format!("{}/{name}", store.describe());
    let reader = store.open_reader(name).doing(|| format!("opening {name}"))?;
    let invalid = |e| Error::format(&path, name, "torch.save file", e);
    let file = StoredFile(reader.as_ref());
    let archive = TorchArchive::open_file(&file).map_err(invalid)?;
    let tree = match archive.content().map_err(invalid)? {
        Content::Tensor(tensor) => Tree::Tensor(tensor),
        Content::Value(value) => opened(value),
        Content::Tree(tree) => converted(tree),
        Content::Opaque { class } => Tree::Opaque(Opaque { class, handle: 0 }),
        _ => return Err(Error::unsupported(format!("{path} holds something this version does not know"))),
    };
    let object = match &tree {
        Tree::Opaque(opaque) => Some(opaque.class.clone()),
        _ => None,
    };
    let tree = match tree {
        Tree::Dict(dict) => dict,
        other => Dict::from_iter([(Key::from(ONLY), other)]),
    };
    let flat = flatten(tree).map_err(|e| Error::format(&path, name, "state dict", e))?;
    let mut entries = IndexMap::with_capacity(flat.len());
    for (key, leaf) in flat {
        let entry = match leaf.leaf {
            Tree::Tensor(tensor) => CatalogEntry::tensor(Some(leaf.path), stored(tensor)?),
            Tree::Opaque(opaque) => CatalogEntry::value(Some(leaf.path), ValuePlace::Opaque { class: opaque.class }),
            other => match other.to_value() {
                Some(value) => CatalogEntry::value(Some(leaf.path), ValuePlace::Inline(value)),
                None => {
                    let class = opaque_in(&other).unwrap_or("a tuple with tensors").to_owned();
                    CatalogEntry::value(Some(leaf.path), ValuePlace::Opaque { class })
                }
            },
        };
        entries.insert(key, entry);
    }
    let catalog = Catalog {
        format: Format::Torch,
        files: vec![name.to_owned()],
        entries,
        save_id: None,
        dcp_version: None,
        writer: "torch.save".into(),
        notes: IndexMap::new(),
    };
    drop(archive);
    let mut checkpoint = Checkpoint::new(store, path, catalog, None);
    checkpoint.object = object;
    Ok(checkpoint)
}

/// The first class in a tree that only its own library can read.
fn opaque_in(tree: &Tree<StoredTensor>) -> Option<&str> {
    match tree {
        Tree::Opaque(opaque) => Some(&opaque.class),
        Tree::List(items) | Tree::Tuple(items) => items.iter().find_map(opaque_in),
        Tree::Dict(dict) => dict.iter().find_map(|(_, below)| opaque_in(below)),
        _ => None,
    }
}

fn stored(tensor: StoredTensor) -> Result<CatalogTensor> {
    let crc = tensor.storage.crc32.map(|crc32| StoredCrc { offset: tensor.storage.offset, length: tensor.storage.length, crc32 });
    let data = DataPlace { layout: tensor.layout, form: tensor.form, checksum: crc };
    let chunk = StoredChunk { region: Region::whole(&tensor.shape)?, file: 0, place: ChunkPlace::Data(Box::new(data)) };
    Ok(CatalogTensor::new(tensor.dtype, tensor.shape, tensor.requires_grad, vec![chunk]))
}

/// Stored trees keep plain parts as one value; flattening looks into dicts, so they are opened here.
fn converted(tree: StoredTree<StoredTensor>) -> Tree<StoredTensor> {
    match tree {
        StoredTree::Tensor(tensor) => Tree::Tensor(tensor),
        StoredTree::Value(value) => opened(value),
        StoredTree::Dict(pairs) | StoredTree::OrderedDict(pairs) => {
            Tree::Dict(pairs.into_iter().map(|(key, below)| (key_of(key), converted(below))).collect())
        }
        StoredTree::List(items) => Tree::List(items.into_iter().map(converted).collect()),
        StoredTree::Tuple(items) => Tree::Tuple(items.into_iter().map(converted).collect()),
        StoredTree::Opaque { class } => Tree::Opaque(Opaque { class, handle: 0 }),
        _ => Tree::Opaque(Opaque { class: "unknown".into(), handle: 0 }),
    }
}

/// A plain value as a tree, opened as far as flattening looks into it: tuples, and what is in them, stay what they are.
fn opened(value: Value) -> Tree<StoredTensor> {
    match value {
        Value::List(items) => Tree::List(items.into_iter().map(opened).collect()),
        Value::Dict(pairs) | Value::OrderedDict(pairs) => {
            Tree::Dict(pairs.into_iter().map(|(key, value)| (key_of(key), opened(value))).collect())
        }
        other => Tree::Value(other),
    }
}
