//! One `torch.save` file for each rank, with DTensors or ShardedTensors in them: what verl (`model_world_size_4_rank_0.pt`) and
//! accelerate without DCP (`pytorch_model_fsdp_0_rank0.bin`) write. Each of them says which regions its rank holds; together the files
//! are one checkpoint.

use std::collections::{BTreeMap, HashSet};

use rayon::prelude::*;
use reshard_state::{Dict, Key, Tree};

use super::folder::Folder;
use super::tensors::{self, Disagrees, Parts};
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::{Error, Result};
use crate::workers::Workers;

/// The files of one part, by rank.
#[derive(Debug, Default)]
struct Series {
    /// How many ranks its names promise; 0 where they promise none.
    world: u64,
    files: BTreeMap<u64, String>,
}

/// What a file's name says: its part, how many ranks there are, and which one wrote it.
fn parsed(name: &str) -> Option<(&str, u64, u64)> {
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    if let Some(stem) = name.strip_suffix(".pt") {
        let (before, rank) = stem.rsplit_once("_rank_")?;
        let (part, world) = before.rsplit_once("_world_size_")?;
        return Some((part, number(world)?, number(rank)?));
    }
    let (part, rank) = name.strip_suffix(".bin")?.rsplit_once("_rank")?;
    Some((part, 0, number(rank)?))
}

/// What a part is called in the whole.
fn key_of_part(part: &str) -> &str {
    match part {
        "optimizer_0" | "optimizer" => "optim",
        "pytorch_model_fsdp_0" | "pytorch_model_fsdp" => "model",
        other => other,
    }
}

pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    let mut all: BTreeMap<&str, Series> = BTreeMap::new();
    for name in folder.top()? {
        let Some((part, world, rank)) = parsed(name) else { continue };
        let series = all.entry(part).or_default();
        if series.world != 0 && world != series.world {
            let detail = format!("it is of {world} ranks, and there are files of {}: files of two saves are mixed", series.world);
            return Err(invalid(folder, name, detail));
        }
        series.world = world;
        series.files.insert(rank, name.to_owned());
    }
    if !all.keys().any(|part| key_of_part(part) == "model") {
        return Ok(None);
    }
    let world = all.values().map(|series| series.world.max(series.files.keys().last().map_or(0, |last| last + 1))).max();
    let world = world.unwrap_or(0);
    let mut files: Vec<String> = Vec::new();
    let mut tree: Dict<Parts> = Dict::new();
    for (part, series) in &all {
        if let Some(missing) = (0..world).find(|rank| !series.files.contains_key(rank)) {
            let name = match series.world {
                0 => format!("{part}_rank{missing}.bin"),
                world => format!("{part}_world_size_{world}_rank_{missing}.pt"),
            };
            let detail = format!(
                "the file of rank {missing}, {name}, is missing; the checkpoint was written by {world} ranks, and all their files are needed"
            );
            return Err(Error::Incomplete { path: folder.path.clone(), detail });
        }
        let names: Vec<&String> = series.files.values().collect();
        let first = files.len();
        files.extend(names.iter().map(|name| (*name).clone()));
        let (store, path) = (folder.store.as_ref(), folder.path.as_str());
        let trees = Workers::reading(store).run(|| {
            let read = |(i, name): (usize, &&String)| tensors::read_file(store, path, name, (first + i) as u32);
            names.par_iter().enumerate().with_max_len(1).map(read).collect::<Result<Vec<_>>>()
        })??;
        check_steps(folder, &names, &trees)?;
        let key = key_of_part(part);
        let sharded = trees.iter().any(has_parts);
        if !sharded && key == "model" {
            check_alike(folder, &names, &trees)?;
        }
        // Random states and the like: each rank's own.
        let joined = if sharded || key == "model" {
            let mut ranks = trees.into_iter();
            let mut joined = ranks.next().unwrap_or_else(Tree::dict);
            for (rank, other) in ranks.enumerate() {
                join(&mut joined, other).map_err(|what| invalid(folder, names[rank + 1], what))?;
            }
            if let Some(key) = partial(&joined, key) {
                let last = names.last().map_or("", |name| name.as_str());
                let detail = format!(
                    "the files of {part} up to {last} hold only parts of {key:?}: the file of a rank is missing, or has another's \
                     content; all files of the save are needed"
                );
                return Err(Error::Incomplete { path: folder.path.clone(), detail });
            }
            joined
        } else {
            Tree::Dict(
                trees.into_iter().enumerate().map(|(rank, tree)| (Key::from(format!("rank_{rank}").as_str()), tree)).collect(),
            )
        };
        tree.insert(Key::from(key), joined);
    }
    let name = files.first().cloned().unwrap_or_default();
    let entries = tensors::entries(Tree::Dict(tree), &folder.path, &name)?;
    let writer = format!("torch.save, {world} rank{}", if world == 1 { "" } else { "s" });
    let catalog = Catalog::new(Format::Ranks, files, entries, writer);
    Ok(Some(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, None)))
}

pub(super) fn has_parts(tree: &Tree<Parts>) -> bool {
    match tree {
        Tree::Tensor(tensor) => tensor.part,
        Tree::Dict(dict) => dict.values().any(has_parts),
        Tree::List(items) | Tree::Tuple(items) => items.iter().any(has_parts),
        _ => false,
    }
}

/// The key of a tensor of which not all parts are there.
pub(super) fn partial(tree: &Tree<Parts>, key: &str) -> Option<String> {
    let below = |name: &dyn std::fmt::Display, tree: &Tree<Parts>| partial(tree, &format!("{key}.{name}"));
    match tree {
        Tree::Tensor(tensor) => (tensor.part && !tensor.is_whole()).then(|| key.to_owned()),
        Tree::Dict(dict) => dict.iter().find_map(|(name, tree)| match name {
            Key::Str(name) => below(name, tree),
            other => below(&format_args!("{other:?}"), tree),
        }),
        Tree::List(items) | Tree::Tuple(items) => items.iter().enumerate().find_map(|(i, tree)| below(&i, tree)),
        _ => None,
    }
}

/// Adds what another rank holds. What is no part of a tensor is the same on all ranks, and the first one's is taken.
pub(super) fn join(into: &mut Tree<Parts>, from: Tree<Parts>) -> std::result::Result<(), String> {
    match (into, from) {
        (Tree::Tensor(into), Tree::Tensor(from)) => {
            if !into.part && !from.part {
                return Ok(());
            }
            if into.part != from.part || into.dtype != from.dtype || into.shape != from.shape {
                return Err(format!(
                    "it has a part of a {} of shape {:?}, and the first rank of a {} of shape {:?}",
                    from.dtype.name(),
                    from.shape.as_slice(),
                    into.dtype.name(),
                    into.shape.as_slice()
                ));
            }
            // Ranks that hold the same region hold the same.
            let there: HashSet<_> = into.chunks.iter().map(|chunk| chunk.region.clone()).collect();
            into.chunks.extend(from.chunks.into_iter().filter(|chunk| !there.contains(&chunk.region)));
            Ok(())
        }
        (Tree::Dict(into), Tree::Dict(from)) => {
            for (key, below) in from {
                match into.get_mut(&key) {
                    Some(there) => join(there, below)?,
                    None => drop(into.insert(key, below)),
                }
            }
            Ok(())
        }
        // A part that cannot be read is no reason to do without it.
        (Tree::Tensor(parts), Tree::Opaque(other)) if parts.part => {
            Err(format!("it has {} where the first rank has a part of a tensor", other.class))
        }
        (Tree::Opaque(first), Tree::Tensor(parts)) if parts.part => {
            Err(format!("it has a part of a tensor where the first rank has {}", first.class))
        }
        (Tree::List(into), Tree::List(from)) => into.iter_mut().zip(from).try_for_each(|(into, from)| join(into, from)),
        _ => Ok(()),
    }
}

/// All files are of one step, as far as they say: a trainer's own counters, and those of the optimizer.
fn check_steps(folder: &Folder, names: &[&String], trees: &[Tree<Parts>]) -> Result<()> {
    let mut first: Option<(f64, &str)> = None;
    for (name, tree) in names.iter().zip(trees) {
        let Some(state) = tree.get("state").and_then(Tree::as_dict) else { continue };
        let step = state.values().find_map(|slots| slots.get("step")?.as_tensor());
        let Some(step) = step.map(|step| step.scalar(folder.store.as_ref(), name)).transpose()?.flatten() else { continue };
        match first {
            Some((other, file)) if other != step => {
                let detail = format!("it is of optimizer step {step}, and {file} of {other}: files of two saves are mixed");
                return Err(invalid(folder, name, detail));
            }
            Some(_) => {}
            None => first = Some((step, name)),
        }
    }
    Ok(())
}

/// A model of plain tensors is the same on all ranks: where it is not, nothing says how they make up one. Only what is known without
/// reading is compared, shapes and checksums.
fn check_alike(folder: &Folder, names: &[&String], trees: &[Tree<Parts>]) -> Result<()> {
    let Some((first, others)) = trees.split_first() else { return Ok(()) };
    for (name, other) in names.iter().skip(1).zip(others) {
        if let Some(key) = unlike(first, other, "model") {
            let detail = format!(
                "it has another {key:?} than {}, and neither is a DTensor or a ShardedTensor, which would say what it is a part of: these \
                 files cannot be put together without the program that wrote them",
                names[0]
            );
            return Err(invalid(folder, name, detail));
        }
    }
    Ok(())
}

/// The key of a tensor that differs.
fn unlike(first: &Tree<Parts>, other: &Tree<Parts>, key: &str) -> Option<String> {
    match (first, other) {
        (Tree::Tensor(a), Tree::Tensor(b)) => {
            let differ = a.own_checksum().zip(b.own_checksum()).is_some_and(|(a, b)| a != b);
            (a.shape != b.shape || a.dtype != b.dtype || differ).then(|| key.to_owned())
        }
        (Tree::Dict(first), Tree::Dict(other)) => first.iter().find_map(|(name, tree)| match name {
            Key::Str(text) => unlike(tree, other.get(name)?, &format!("{key}.{text}")),
            _ => None,
        }),
        _ => None,
    }
}

fn invalid(folder: &Folder, file: &str, detail: String) -> Error {
    Error::format(&folder.path, file, "file of a checkpoint with one file a rank", Disagrees(detail))
}

#[cfg(test)]
mod tests {
    use super::parsed;

    #[test]
    fn names_say_part_and_rank() {
        assert_eq!(parsed("model_world_size_4_rank_3.pt"), Some(("model", 4, 3)));
        assert_eq!(parsed("extra_state_world_size_16_rank_10.pt"), Some(("extra_state", 16, 10)));
        assert_eq!(parsed("pytorch_model_fsdp_0_rank1.bin"), Some(("pytorch_model_fsdp_0", 0, 1)));
        for name in ["model.pt", "model_rank_1.pt", "model_world_size_x_rank_1.pt", "a_rank.bin", "a_rank-1.bin"] {
            assert_eq!(parsed(name), None, "{name}");
        }
    }
}
