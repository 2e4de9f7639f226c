//! Folders of `torch_checkpointing`: `metadata.pkl`, plain dicts that say which file of which rank holds each item and how
//! DTensors are cut, and those files: `torch.save`, safetensors or JSON. Items keep the names that the user gave them.

use std::collections::{BTreeMap, HashSet};

use rayon::prelude::*;
use reshard_formats::Value;
use reshard_formats::pickle::read_value;
use reshard_layout::{Mesh, Placement};
use reshard_state::{Dict, Key, Opaque, Tree};

use super::folder::Folder;
use super::ranks::{has_parts, join, partial};
use super::tensors::{self, Disagrees, Parts};
use super::values::{field, from_json, integer, integers, text};
use crate::checkpoint::{Catalog, Checkpoint, Format, MAX_METADATA_BYTES};
use crate::error::{Error, Result, StorageContext};
use crate::workers::Workers;

const METADATA: &str = "metadata.pkl";
/// A JSON item is configuration.
const MAX_JSON_BYTES: u64 = 256 << 20;
/// More ranks than any job has.
const MAX_RANKS: u64 = 1 << 20;

/// A rank's file of an item.
#[derive(Clone)]
struct ItemFile {
    path: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Torch,
    Safetensors,
    Json,
    /// Bytes that the user made.
    Raw,
}

/// How a DTensor lies on its mesh.
struct Sharding {
    mesh: Mesh,
    placements: Vec<Placement>,
    shape: Vec<u64>,
}

/// An item: its files by rank, and the DTensors in them by their flattened names.
#[derive(Default)]
struct Item {
    files: BTreeMap<u64, ItemFile>,
    sharded: BTreeMap<String, Vec<(Vec<u64>, Sharding)>>,
}

pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if !folder.has(METADATA)? {
        return Ok(None);
    }
    let bytes = folder.store.read(METADATA, MAX_METADATA_BYTES).doing(|| format!("reading {METADATA}"))?;
    let metadata = match read_value(&bytes) {
        Ok(value) => value,
        // Another program's file of the same name.
        Err(_) if !folder.top()?.any(|name| name.ends_with("_0.pt")) => return Ok(None),
        Err(error) => return Err(Error::format(&folder.path, METADATA, "metadata of torch_checkpointing", error)),
    };
    let (Some(items), Some(world)) = (field(&metadata, "metadata"), field(&metadata, "world_size")) else { return Ok(None) };
    let Some(world) = integer(world).filter(|world| (1..=MAX_RANKS).contains(world)) else {
        return Err(invalid(folder, METADATA, format!("it is of {} ranks", world.python_repr())));
    };
    let version = field(&metadata, "version").and_then(text).unwrap_or("1.0");
    let items = match version {
        "1.0" => first_version(folder, items, field(&metadata, "rank_to_layout_info_mappings"), world)?,
        "2.0" => second_version(folder, items, world)?,
        other => {
            let detail = format!(
                "it is of version {other:?}; known are 1.0 and 2.0. Update reshard, or convert it with torch_checkpointing"
            );
            return Err(invalid(folder, METADATA, detail));
        }
    };
    let mut items = items;
    unlisted(folder, world, &mut items)?;
    let mut files = Vec::new();
    let mut tree: Dict<Parts> = Dict::new();
    for (name, item) in items {
        let state = read_item(folder, &name, &item, world, &mut files)?;
        tree.insert(Key::from(name.as_str()), state);
    }
    let entries = tensors::entries(Tree::Dict(tree), &folder.path, METADATA)?;
    let writer = format!("torch_checkpointing, {world} rank{}", if world == 1 { "" } else { "s" });
    let catalog = Catalog::new(Format::TorchCheckpointing, files, entries, writer);
    Ok(Some(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, None)))
}

fn pairs<'v>(folder: &Folder, value: Option<&'v Value>, what: &str) -> Result<&'v [(Value, Value)]> {
    match value {
        Some(Value::Dict(pairs) | Value::OrderedDict(pairs)) => Ok(pairs),
        _ => Err(invalid(folder, METADATA, format!("its {what} is not a dict"))),
    }
}

/// Grouped by item.
fn second_version(folder: &Folder, items: &Value, world: u64) -> Result<BTreeMap<String, Item>> {
    let mut all = BTreeMap::new();
    for (name, stored) in pairs(folder, Some(items), "metadata")? {
        let name = text(name).ok_or_else(|| invalid(folder, METADATA, "an item has no name".into()))?;
        let mut item = Item::default();
        for (rank, layout) in pairs(folder, field(stored, "rank_to_layout_info"), "rank_to_layout_info")? {
            let rank = rank_of(rank).filter(|rank| *rank < world);
            let rank = rank.ok_or_else(|| invalid(folder, METADATA, format!("a layout of {name:?} is of no rank")))?;
            item.files.insert(rank, layout_of(folder, name, rank, layout)?);
        }
        for (path, groups) in pairs(folder, field(stored, "nested_path_to_metadata"), "nested_path_to_metadata")? {
            let path = text(path).and_then(nested);
            let path = path.ok_or_else(|| invalid(folder, METADATA, format!("a path in {name:?} is not a list of keys")))?;
            item.sharded.insert(path, groups_of(folder, groups)?);
        }
        all.insert(name.to_owned(), item);
    }
    Ok(all)
}

/// By path, the item first.
fn first_version(folder: &Folder, paths: &Value, layouts: Option<&Value>, world: u64) -> Result<BTreeMap<String, Item>> {
    let mut all: BTreeMap<String, Item> = BTreeMap::new();
    for (rank, of_rank) in pairs(folder, layouts, "rank_to_layout_info_mappings")? {
        let rank = rank_of(rank).filter(|rank| *rank < world);
        let rank = rank.ok_or_else(|| invalid(folder, METADATA, "a layout is of no rank".into()))?;
        for (name, layout) in pairs(folder, Some(of_rank), "layout")? {
            let name = text(name).ok_or_else(|| invalid(folder, METADATA, "an item has no name".into()))?;
            let layout = layout_of(folder, name, rank, layout)?;
            all.entry(name.to_owned()).or_default().files.insert(rank, layout);
        }
    }
    for (path, groups) in pairs(folder, Some(paths), "metadata")? {
        let wrong = || invalid(folder, METADATA, format!("{} is not the path of an item", path.python_repr()));
        let path: Vec<serde_json::Value> = text(path).and_then(|path| serde_json::from_str(path).ok()).ok_or_else(wrong)?;
        let (item, nested) = match path.as_slice() {
            [serde_json::Value::String(item), serde_json::Value::Array(nested)] => (item, nested.as_slice()),
            [serde_json::Value::String(item), nested @ ..] => (item, nested),
            _ => return Err(wrong()),
        };
        let item = all.get_mut(item).ok_or_else(wrong)?;
        item.sharded.insert(joined(nested).ok_or_else(wrong)?, groups_of(folder, groups)?);
    }
    Ok(all)
}

/// Items that nothing has to cut are not in the metadata; their files are named after them.
fn unlisted(folder: &Folder, world: u64, items: &mut BTreeMap<String, Item>) -> Result<()> {
    let listed: HashSet<String> = items.values().flat_map(|item| item.files.values().map(|file| file.path.clone())).collect();
    let mut found: BTreeMap<&str, BTreeMap<u64, ItemFile>> = BTreeMap::new();
    for path in folder.top()?.filter(|path| !listed.contains(*path)) {
        let Some((stem, kind)) = path.rsplit_once('.') else { continue };
        let kind = match kind {
            "pt" => Kind::Torch,
            "json" => Kind::Json,
            "safetensors" => Kind::Safetensors,
            _ => continue,
        };
        let Some((name, rank)) = stem.rsplit_once('_') else { continue };
        let plain = rank.bytes().all(|b| b.is_ascii_digit());
        let Some(rank) = rank.parse().ok().filter(|rank| plain && *rank < world) else { continue };
        found.entry(name).or_default().insert(rank, ItemFile { path: path.to_owned(), kind });
    }
    for (name, files) in found {
        items.entry(name.to_owned()).or_insert_with(|| Item { files, ..Item::default() });
    }
    Ok(())
}

fn rank_of(value: &Value) -> Option<u64> {
    integer(value).or_else(|| text(value)?.parse().ok())
}

/// A path of keys and indices as JSON, as the flattened key it stands for.
fn nested(path: &str) -> Option<String> {
    joined(&serde_json::from_str::<Vec<serde_json::Value>>(path).ok()?)
}

fn joined(path: &[serde_json::Value]) -> Option<String> {
    let words = path.iter().map(|word| match word {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    });
    Some(words.collect::<Option<Vec<String>>>()?.join("."))
}

fn layout_of(folder: &Folder, item: &str, rank: u64, layout: &Value) -> Result<ItemFile> {
    if matches!(layout, Value::None) {
        return Ok(ItemFile { path: format!("{item}_{rank}.pt"), kind: Kind::Torch });
    }
    let path = field(layout, "file_path").and_then(text);
    let format = field(layout, "serialization_format").and_then(|format| field(format, "type")).and_then(text);
    let (Some(path), Some(format)) = (path, format) else {
        return Err(invalid(folder, METADATA, format!("the layout of {item:?} for rank {rank} names no file")));
    };
    let kind = match format {
        "TorchSerialization" => Kind::Torch,
        "SafetensorsSerialization" => Kind::Safetensors,
        "JsonSerialization" => Kind::Json,
        "RawSerialization" => Kind::Raw,
        other => return Err(invalid(folder, METADATA, format!("{item:?} is stored by {other}, which is not known"))),
    };
    Ok(ItemFile { path: path.to_owned(), kind })
}

/// The ways in which groups of ranks hold a tensor.
fn groups_of(folder: &Folder, groups: &Value) -> Result<Vec<(Vec<u64>, Sharding)>> {
    let Value::List(groups) = groups else {
        return Err(invalid(folder, METADATA, "the groups of ranks of a tensor are not a list".into()));
    };
    groups.iter().filter_map(|group| group_of(folder, group).transpose()).collect()
}

fn group_of(folder: &Folder, group: &Value) -> Result<Option<(Vec<u64>, Sharding)>> {
    let unknown = || invalid(folder, METADATA, "how a tensor is cut is not understood".into());
    let ranks = field(group, "ranks").and_then(integers).ok_or_else(unknown)?;
    let packed = field(group, "sharding_metadata").ok_or_else(unknown)?;
    if field(packed, "type").and_then(text) != Some("DTensorShardingMetadata") {
        return Ok(None);
    }
    let data = field(packed, "data").ok_or_else(unknown)?;
    let shape = field(data, "global_shape").and_then(integers).ok_or_else(unknown)?;
    let mesh = field(data, "mesh_spec").ok_or_else(unknown)?;
    let numbers = |name: &str| field(mesh, name).and_then(integers).ok_or_else(unknown);
    let mesh = Mesh::with_ranks(&numbers("mesh_shape")?, &numbers("mesh_data")?);
    let Some(Value::List(listed) | Value::Tuple(listed)) = field(data, "placements") else { return Err(unknown()) };
    let placements = listed.iter().map(placement).collect::<Option<Vec<_>>>().ok_or_else(unknown)?;
    let mesh = mesh.map_err(|error| Error::format(&folder.path, METADATA, "metadata of torch_checkpointing", error))?;
    Ok(Some((ranks, Sharding { mesh, placements, shape })))
}

fn placement(stored: &Value) -> Option<Placement> {
    let number = |name| field(stored, name).and_then(integer);
    let dim = || number("dim").and_then(|dim| usize::try_from(dim).ok());
    match field(stored, "type").and_then(text)? {
        "Replicate" => Some(Placement::Replicate),
        "Shard" => Some(Placement::Shard(dim()?)),
        "StridedShard" => Some(Placement::StridedShard { dim: dim()?, split_factor: number("split_factor")? }),
        _ => None,
    }
}

/// What all ranks hold of an item.
fn read_item(folder: &Folder, name: &str, item: &Item, world: u64, files: &mut Vec<String>) -> Result<Tree<Parts>> {
    let listed = folder.files()?;
    for rank in 0..world {
        let path = item.files.get(&rank).map_or_else(|| format!("{name}_{rank}.pt"), |file| file.path.clone());
        if listed.binary_search(&path).is_err() {
            let detail = format!(
                "the file of rank {rank} for {name:?}, {path}, is missing; the checkpoint was written by {world} ranks, and all \
                 their files are needed"
            );
            return Err(Error::Incomplete { path: folder.path.clone(), detail });
        }
    }
    let first = files.len();
    let each: Vec<(u64, ItemFile)> = item.files.iter().map(|(rank, file)| (*rank, file.clone())).collect();
    // What a file of plain text holds is in the catalog itself; only those with tensors are read again.
    let has_tensors = |file: &ItemFile| matches!(file.kind, Kind::Torch | Kind::Safetensors);
    if each.iter().all(|(_, file)| has_tensors(file)) {
        files.extend(each.iter().map(|(_, file)| file.path.clone()));
    } else if let Some((_, file)) = each.iter().find(|(_, file)| has_tensors(file)) {
        return Err(invalid(folder, &file.path, format!("other ranks have {name:?} in another format")));
    }
    let mut trees = Workers::reading(folder.store.as_ref()).run(|| {
        let read = |(i, (rank, file)): (usize, &(u64, ItemFile))| read_file(folder, item, *rank, file, (first + i) as u32);
        each.par_iter().enumerate().with_max_len(1).map(read).collect::<Result<Vec<_>>>()
    })??;
    // Weights that no DTensor cuts are the same on all ranks; other state is each rank's own, unless it is the same.
    let same = || match trees.iter().map(Tree::to_value).collect::<Option<Vec<Value>>>() {
        Some(values) => values.windows(2).all(|pair| pair[0] == pair[1]),
        None => name == "model" || name.starts_with("optim"),
    };
    if !trees.iter().any(has_parts) && !same() {
        let of_rank = |(rank, tree)| (Key::from(format!("rank_{rank}").as_str()), tree);
        return Ok(Tree::Dict(trees.into_iter().enumerate().map(of_rank).collect()));
    }
    let rest = trees.split_off(1.min(trees.len()));
    let mut whole = trees.pop().unwrap_or_else(Tree::dict);
    for (i, other) in rest.into_iter().enumerate() {
        join(&mut whole, other).map_err(|what| invalid(folder, &each[i + 1].1.path, what))?;
    }
    if let Some(key) = partial(&whole, name) {
        let last = each.last().map_or("", |(_, file)| file.path.as_str());
        let detail = format!(
            "the files of {name:?} up to {last} hold only parts of {key:?}: one of them has another rank's content; all files of the \
             save are needed"
        );
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    Ok(whole)
}

fn read_file(folder: &Folder, item: &Item, rank: u64, file: &ItemFile, number: u32) -> Result<Tree<Parts>> {
    let (store, path, name) = (folder.store.as_ref(), folder.path.as_str(), file.path.as_str());
    match file.kind {
        Kind::Torch => match tensors::read_file(store, path, name, number) {
            Err(Error::Untrusted { class, .. }) => Ok(Tree::Opaque(Opaque { class, handle: 0 })),
            read => read,
        },
        Kind::Json => {
            let bytes = store.read(name, MAX_JSON_BYTES).doing(|| format!("reading {name}"))?;
            let json = serde_json::from_slice(&bytes).map_err(|error| Error::format(path, name, "JSON file", error))?;
            Ok(Tree::from_value(from_json(json)))
        }
        Kind::Raw => {
            let bytes = store.read(name, MAX_JSON_BYTES).doing(|| format!("reading {name}"))?;
            Ok(Tree::Value(Value::Bytes(bytes)))
        }
        Kind::Safetensors => {
            let (tensors, _) = tensors::read_safetensors(store, path, name, number)?;
            let mut tree = Dict::new();
            for (key, mut local) in tensors {
                let groups = item.sharded.get(&key).into_iter().flatten();
                let mut found = groups.filter(|(ranks, _)| ranks.contains(&rank));
                if let Some((_, sharding)) = found.next() {
                    let Sharding { mesh, placements, shape } = sharding;
                    let cut = Parts::of_rank(local, mesh, placements, shape, rank);
                    local = cut.map_err(|error| invalid(folder, name, format!("{key:?}: {error}")))?;
                }
                tree.insert(Key::from(key.as_str()), Tree::Tensor(local));
            }
            Ok(Tree::Dict(tree))
        }
    }
}

fn invalid(folder: &Folder, file: &str, detail: String) -> Error {
    Error::format(&folder.path, file, "file of a torch_checkpointing checkpoint", Disagrees(detail))
}
