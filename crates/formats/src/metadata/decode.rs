//! From a pickle to proven metadata: the whole, its planner data and its storage meta.

use super::entries::{Names, read_entries};
use super::error::MetadataError;
use super::fields::{Fields, describe, required, state_of, wrong_type};
use super::storage::read_storage;
use super::types::{ExtraFields, Metadata, PlannerData, StorageMeta};
use crate::pickle::{Document, GlobalId, Node, Policy, View, decode};
use crate::value::{PathClass, Value};
use crate::{KeyPath, PathSegment};

type Result<T> = std::result::Result<T, MetadataError>;

const MODULE: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

impl Metadata {
    /// Decodes and proves a `.metadata` file. Nothing in it is run. Objects of classes that are not known to be data are
    /// carried along unopened where they lie in fields that are not known either (Megatron keeps its plans there); in the
    /// place of data, or if they are known to act when they are called, they are an error that names them.
    pub fn decode(bytes: &[u8]) -> Result<Metadata> {
        let document = decode(bytes, Policy::metadata())?;
        read_metadata(&document)
    }
}

/// The numbers that this pickle has given to the classes of torch.
pub(super) struct Classes {
    pub(super) metadata: Option<GlobalId>,
    pub(super) tensor: Option<GlobalId>,
    pub(super) bytes: Option<GlobalId>,
    pub(super) chunk: Option<GlobalId>,
    pub(super) properties: [Option<GlobalId>; 2],
    pub(super) index: Option<GlobalId>,
    pub(super) storage_info: Option<GlobalId>,
    pub(super) storage_meta: Option<GlobalId>,
}

impl Classes {
    fn of(document: &Document<'_>) -> Classes {
        let find = |name| document.find_global(MODULE, name);
        Classes {
            // Megatron core 0.15 pickles a class of its own, which has one field more.
            metadata: find("Metadata")
                .or_else(|| document.find_global("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")),
            tensor: find("TensorStorageMetadata"),
            bytes: find("BytesStorageMetadata"),
            chunk: find("ChunkStorageMetadata"),
            properties: [
                find("TensorProperties"),
                document.find_global("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
            ],
            index: find("MetadataIndex"),
            storage_info: document.find_global(FILESYSTEM, "_StorageInfo"),
            storage_meta: find("StorageMeta"),
        }
    }
}

fn read_metadata(document: &Document<'_>) -> Result<Metadata> {
    let classes = Classes::of(document);
    let place = || "metadata".to_owned();
    let root = state_of(document, document.root(), classes.metadata);
    let root = root.ok_or_else(|| wrong_type(document, document.root(), place, "an instance of `Metadata`"))?;
    let mut fields = Fields::new(["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]);
    let mut extra = ExtraFields::new();
    let [entries, planner, storage, meta, version] = fields.read(document, root, place, &mut extra)?;

    // Torch 2.5 writes no `version`, and before 2.3 no `storage_meta`; the others have always been there.
    let entries = required(entries, place, "state_dict_metadata")?;
    let planner = required(planner, place, "planner_data")?;
    let storage = required(storage, place, "storage_data")?;
    let mut metadata = Metadata { version: None, extra, ..Metadata::new() };
    let (entries, names, odd) = read_entries(document, &classes, entries)?;
    metadata.entries = entries;
    read_storage(document, &classes, storage, &names, &odd, &mut metadata)?;
    read_planner_data(document, planner, &names, &mut metadata)?;
    metadata.storage_meta = read_storage_meta(document, &classes, meta)?;
    metadata.version = optional_str(document, version, || "metadata, `version`".into())?;
    Ok(metadata)
}

fn read_planner_data(document: &Document<'_>, node: Node, names: &Names<'_>, metadata: &mut Metadata) -> Result<()> {
    let pairs = match document.view(node) {
        View::None => {
            metadata.planner_data = PlannerData::None;
            return Ok(());
        }
        View::Dict(pairs) => pairs,
        _ => {
            metadata.planner_data = PlannerData::Other(document.carry(node)?);
            return Ok(());
        }
    };
    metadata.planner_data = PlannerData::Paths;
    let mut unstored = std::collections::HashSet::new();
    for [key_node, path] in pairs {
        let place = || "key of `planner_data`".to_owned();
        let key = document.as_str(*key_node).ok_or_else(|| wrong_type(document, *key_node, place, "a str"))?;
        let path = read_path(document, key, *path)?;
        let duplicate = || MetadataError::DuplicateKey { key: key.into(), place: "`planner_data`".into() };
        let number = names.get(document.raw(*key_node));
        match number.and_then(|number| metadata.entries.get_index_mut(*number as usize)) {
            Some((_, entry)) if entry.path.is_some() => return Err(duplicate()),
            Some((_, entry)) => entry.path = Some(path),
            None if unstored.insert(key) => metadata.unstored_paths.push((key.to_owned(), path)),
            None => return Err(duplicate()),
        }
    }
    Ok(())
}

fn read_path(document: &Document<'_>, key: &str, node: Node) -> Result<KeyPath> {
    let place = || format!("`{key}`, path in `planner_data`");
    let segments = document.as_tuple(node).ok_or_else(|| wrong_type(document, node, place, "a tuple"))?;
    let segments = segments.iter().enumerate().map(|(position, segment)| {
        if let Some(name) = document.as_str(*segment) {
            return Ok(PathSegment::Key(name.to_owned()));
        }
        document.as_i64(*segment).map(PathSegment::Index).ok_or_else(|| {
            let found = describe(document, *segment);
            MetadataError::PathSegment { key: key.into(), position, found }
        })
    });
    segments.collect()
}

fn read_storage_meta(document: &Document<'_>, classes: &Classes, node: Node) -> Result<Option<StorageMeta>> {
    if node == Node::ABSENT || matches!(document.view(node), View::None) {
        return Ok(None);
    }
    let place = || "`storage_meta`".to_owned();
    let state = state_of(document, node, classes.storage_meta);
    let state = state.ok_or_else(|| wrong_type(document, node, place, "an instance of `StorageMeta`"))?;
    let mut fields = Fields::new(["checkpoint_id", "save_id", "load_id", "modules"]);
    let mut meta = StorageMeta::default();
    let [id, save_id, load_id, modules] = fields.read(document, state, place, &mut meta.extra)?;
    let id = required(id, place, "checkpoint_id")?;
    (meta.checkpoint_id, meta.checkpoint_id_class) = read_checkpoint_id(document, id)?;
    let save_id = required(save_id, place, "save_id")?;
    meta.save_id = optional_str(document, save_id, || "`storage_meta`, `save_id`".into())?;
    let load_id = required(load_id, place, "load_id")?;
    meta.load_id = optional_str(document, load_id, || "`storage_meta`, `load_id`".into())?;
    // The first versions had none.
    if modules != Node::ABSENT {
        let place = || "`storage_meta`, `modules`".to_owned();
        meta.modules = strings(document, modules).ok_or_else(|| wrong_type(document, modules, place, "a list of str"))?;
    }
    Ok(Some(meta))
}

fn read_checkpoint_id(document: &Document<'_>, node: Node) -> Result<(Option<String>, Option<PathClass>)> {
    match document.to_value(node)? {
        Value::None => Ok((None, None)),
        Value::Str(text) => Ok((Some(text), None)),
        Value::Path(path) => Ok((Some(path.text), Some(path.class))),
        _ => {
            let place = || "`storage_meta`, `checkpoint_id`".to_owned();
            Err(wrong_type(document, node, place, "a str or a path"))
        }
    }
}

fn optional_str(document: &Document<'_>, node: Node, place: impl Fn() -> String) -> Result<Option<String>> {
    match (node == Node::ABSENT, document.view(node)) {
        (true, _) | (_, View::None) => Ok(None),
        (_, View::Str(text)) => Ok(Some(text.to_owned())),
        _ => Err(wrong_type(document, node, place, "a str or None")),
    }
}

/// A list or tuple of strings.
pub(super) fn strings(document: &Document<'_>, node: Node) -> Option<Vec<String>> {
    match document.view(node) {
        View::List(elements) | View::Tuple(elements) => elements.iter().map(|n| document.as_str(*n).map(str::to_owned)).collect(),
        _ => None,
    }
}
