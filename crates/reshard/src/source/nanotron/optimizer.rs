//! nanotron's optimizer: a `torch.save` file for each rank, its state by number and the numbers' names beside it. With ZeRO-1
//! every data parallel rank has a range of each flattened parameter; the ranges are as even as they can be, the first ones
//! longer by one.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use rayon::prelude::*;
use reshard_formats::Value;
use reshard_state::{Dict, Key, Tree};

use super::names::{RankFile, optimizer_file, optimizer_name};
use super::{Local, Weight, invalid, slices};
use crate::error::{Error, Result};
use crate::source::folder::Folder;
use crate::source::tensors::{self, Parts};
use crate::source::values::text;
use crate::workers::Workers;

/// The part of a rank's file that holds the weights in float32.
const MASTER: &str = "gradient_accumulator";
/// What its entries are called as a slot.
const MASTER_SLOT: &str = "fp32";

/// The slots of a parameter, by name; each of them of all ranks.
type Slots = IndexMap<String, IndexMap<String, Tree<Parts>>>;

/// The optimizer's state, where there is any: `state` by parameter, and `param_groups`.
pub(super) fn read(
    folder: &Folder,
    prefix: &str,
    weights: &IndexMap<String, Weight>,
    files: &mut Vec<String>,
) -> Result<Option<Tree<Parts>>> {
    let mut found: BTreeMap<RankFile, String> = BTreeMap::new();
    for path in folder.files()? {
        if let Some(rank) = path.strip_prefix(prefix).and_then(optimizer_file) {
            found.insert(rank, path.clone());
        }
    }
    if found.is_empty() {
        return Ok(None);
    }
    check_complete(folder, prefix, &found)?;
    let first = files.len();
    files.extend(found.values().cloned());
    let (store, path, listed) = (folder.store.as_ref(), folder.path.as_str(), &files[first..]);
    let trees = Workers::reading(store).run(|| {
        let read = |(i, name): (usize, &String)| tensors::read_file(store, path, name, (first + i) as u32);
        listed.par_iter().enumerate().with_max_len(1).map(read).collect::<Result<Vec<_>>>()
    })??;
    let mut state = Slots::new();
    let mut steps: Option<(f64, &str)> = None;
    for ((rank, file), tree) in found.iter().zip(&trees) {
        check_step(folder, file, tree, &mut steps)?;
        let wrong = |detail: String| invalid(folder, file, detail);
        for (name, slot, value) in named(tree).map_err(wrong)? {
            let Some(weight) = weights.get(&name) else {
                return Err(invalid(
                    folder,
                    file,
                    format!("it has state of {name:?}, and there is no such weight in {prefix}model/"),
                ));
            };
            let into = state.entry(name.clone()).or_default();
            let Tree::Tensor(tensor) = value else {
                into.entry(slot).or_insert_with(|| value.clone());
                continue;
            };
            if tensor.shape.is_empty() {
                into.entry(slot).or_insert_with(|| value.clone());
                continue;
            }
            let new = || Tree::Tensor(Parts::new(tensor.dtype, &weight.whole.shape));
            let Tree::Tensor(whole) = into.entry(slot).or_insert_with(new) else { continue };
            let wrong = |detail: String| invalid(folder, file, format!("{name:?}: {detail}"));
            place(whole, weight, rank, tensor).map_err(wrong)?;
        }
    }
    for (name, slots) in &state {
        for (slot, value) in slots {
            let Tree::Tensor(tensor) = value else { continue };
            slices::check_whole(tensor).map_err(|what| {
                let detail = format!("the optimizer's files {what} of {slot} of {name:?}");
                Error::Incomplete { path: folder.path.clone(), detail }
            })?;
        }
    }
    let groups = groups(&trees).into_iter().map(Tree::Dict).collect();
    let slots = |slots: IndexMap<String, Tree<Parts>>| Tree::dict_of(slots);
    let state = Tree::dict_of(state.into_iter().map(|(name, of_name)| (name, slots(of_name))));
    Ok(Some(Tree::dict_of([("state", state), ("param_groups", Tree::List(groups))])))
}

/// The files are a whole grid of ranks.
fn check_complete(folder: &Folder, prefix: &str, found: &BTreeMap<RankFile, String>) -> Result<()> {
    let Some((like, _)) = found.iter().next() else { return Ok(()) };
    for (rank, file) in found {
        let sizes = |rank: &RankFile| (rank.stages, rank.tensors, rank.experts, rank.replicas);
        if sizes(rank) != sizes(like) {
            let detail = format!("{} lies beside it: files of two saves are mixed", optimizer_name(like));
            return Err(invalid(folder, file, detail));
        }
    }
    let most = found.len() as u64 + 1;
    for stage in 0..like.stages.min(most) {
        for tensor in 0..like.tensors.min(most) {
            for expert in 0..like.experts.min(most) {
                for data in 0..like.replicas.clamp(1, most) {
                    let rank = RankFile { stage, tensor, expert, data, ..*like };
                    if !found.contains_key(&rank) {
                        let detail = format!(
                            "the file {prefix}{} is missing; the optimizer's files of all ranks are needed",
                            optimizer_name(&rank)
                        );
                        return Err(Error::Incomplete { path: folder.path.clone(), detail });
                    }
                }
            }
        }
    }
    Ok(())
}

/// All files are of one step.
fn check_step<'f>(folder: &Folder, file: &'f str, tree: &Tree<Parts>, first: &mut Option<(f64, &'f str)>) -> Result<()> {
    let states = tree.get("state").and_then(Tree::as_dict);
    let step = states.and_then(|states| states.values().find_map(|slots| slots.get("step")?.as_tensor()));
    let Some(step) = step.map(|step| step.scalar(folder.store.as_ref(), file)).transpose()?.flatten() else { return Ok(()) };
    match first {
        Some((other, name)) if *other != step => {
            let detail = format!("it is of optimizer step {step}, and {name} of {other}: files of two saves are mixed");
            Err(invalid(folder, file, detail))
        }
        Some(_) => Ok(()),
        None => {
            *first = Some((step, file));
            Ok(())
        }
    }
}

/// Parameter, slot and value.
type Named<'t> = (String, String, &'t Tree<Parts>);

/// What a rank's file holds.
fn named(tree: &Tree<Parts>) -> std::result::Result<Vec<Named<'_>>, String> {
    let (Some(states), Some(names)) = (tree.get("state").and_then(Tree::as_dict), tree.get("names").and_then(Tree::as_dict))
    else {
        return Err("it has no state and names, which say whose state it is: an optimizer of unknown form".into());
    };
    let plain = |name: &str| name.strip_prefix("module.").unwrap_or(name).to_owned();
    let mut all = Vec::new();
    for (number, slots) in states {
        let Some(Tree::Value(name)) = names.get(number) else { return Err(format!("it does not name parameter {number}")) };
        let name = text(name).ok_or_else(|| format!("the name of parameter {number} is not text"))?;
        for (slot, value) in slots.as_dict().into_iter().flatten() {
            all.push((plain(name), slot.to_string(), value));
        }
    }
    for (name, value) in tree.get(MASTER).and_then(Tree::as_dict).into_iter().flatten() {
        all.push((plain(&name.to_string()), MASTER_SLOT.to_owned(), value));
    }
    Ok(all)
}

/// Adds a rank's part of a slot.
fn place(whole: &mut Parts, weight: &Weight, rank: &RankFile, tensor: &Parts) -> std::result::Result<(), String> {
    let Some(local) = local_of(weight, rank) else {
        return Err(format!("no file of the model has the part of tensor parallel rank {}", rank.tensor));
    };
    if whole.dtype != tensor.dtype {
        return Err(format!("it is {} here and {} on another rank", tensor.dtype.name(), whole.dtype.name()));
    }
    let elements = reshard_layout::volume_of(&local.shape).map_err(|error| error.to_string())?;
    let (start, end) = range(elements, rank);
    // A rank's own range of the flattened part, or all of it.
    let flat = tensor.flat().ok_or("its state does not lie in one piece")?;
    let (start, end) = match flat.elements {
        all if all == elements && rank.replicas <= 1 => (0, elements),
        part if part == end - start => (start, end),
        // Without data parallel ranks in its name, and yet a part: the weights in float32 are whole on every rank.
        all if all == elements => (0, elements),
        part => {
            return Err(format!(
                "it has {part} of {elements} elements, where its rank should have {}: sizes disagree",
                end - start
            ));
        }
    };
    let mut part = Parts::new(tensor.dtype, &local.shape);
    part.add_flat(start, end, &flat, 0).map_err(|error| error.to_string())?;
    slices::place(whole, &part, &local.pairs)
}

/// What a rank holds of a weight; one that is not cut has one file for all.
fn local_of<'w>(weight: &'w Weight, rank: &RankFile) -> Option<&'w Local> {
    let at = |stage, tensor, expert| weight.local.get(&(stage, tensor, expert));
    let of_rank = at(rank.stage, rank.tensor, rank.expert).or_else(|| at(rank.stage, rank.tensor, 0));
    // A tied weight's file is of another stage.
    let of_tied = || weight.local.iter().find(|((_, tensor, _), _)| *tensor == rank.tensor).map(|(_, local)| local);
    of_rank.or_else(of_tied).or_else(|| weight.local.values().next().filter(|_| weight.local.len() == 1))
}

/// The elements of a flattened parameter that a data parallel rank has.
fn range(elements: u64, rank: &RankFile) -> (u64, u64) {
    let (ranks, at) = (rank.replicas.max(1), rank.data);
    let (even, longer) = (elements / ranks, elements % ranks);
    let start = at * even + at.min(longer);
    (start, start + even + u64::from(at < longer))
}

/// The groups' options, and the names of their members over all ranks.
fn groups(trees: &[Tree<Parts>]) -> Vec<Dict<Parts>> {
    let mut all: Vec<(Dict<Parts>, IndexMap<String, ()>)> = Vec::new();
    for tree in trees {
        let names = tree.get("names").and_then(Tree::as_dict);
        let Some(Tree::List(groups)) = tree.get("param_groups") else { continue };
        for (number, group) in groups.iter().enumerate() {
            let Some(options) = group.as_dict() else { continue };
            if all.len() <= number {
                all.push((options.clone(), IndexMap::new()));
            }
            let Some(Value::List(members)) = options.get(&Key::from("params")).and_then(Tree::to_value) else { continue };
            for member in members {
                let Some(Tree::Value(name)) = names.and_then(|names| names.get(&reshard_state::key_of(member))) else { continue };
                let name = text(name).unwrap_or_default();
                all[number].1.insert(name.strip_prefix("module.").unwrap_or(name).to_owned(), ());
            }
        }
    }
    let with_names = |(mut options, names): (Dict<Parts>, IndexMap<String, ()>)| {
        let names = names.into_keys().map(|name| Tree::Value(Value::Str(name))).collect();
        options.insert(Key::from("params"), Tree::List(names));
        options
    };
    all.into_iter().map(with_names).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_as_even_as_they_can_be() {
        let rank =
            |data, replicas| RankFile { stage: 0, stages: 1, tensor: 0, tensors: 1, expert: 0, experts: 1, data, replicas };
        for (elements, ranks) in [(10, 4), (3, 4), (0, 2), (8, 2), (7, 1)] {
            let mut at = 0;
            for data in 0..ranks {
                let (start, end) = range(elements, &rank(data, ranks));
                assert_eq!(start, at);
                assert!(end - start == elements / ranks || end - start == elements / ranks + 1);
                at = end;
            }
            assert_eq!(at, elements);
        }
        assert_eq!(range(10, &rank(0, 4)), (0, 3));
        assert_eq!(range(5, &rank(0, 0)), (0, 5));
    }
}
