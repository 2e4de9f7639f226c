//! The older format `torch`: `mp_rank_00[_000][_000]/model_optim_rng.pt` of each model parallel rank, by tensor parallel rank,
//! pipeline stage and expert; beside it `distrib_optim.pt` with the buffers of the distributed optimizer.

use std::collections::BTreeSet;

use reshard_formats::Value;
use reshard_state::{Dict, Key, Tree};

use super::invalid;
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::{Error, Result};
use crate::source::folder::Folder;
use crate::source::parts;
use crate::source::tensors::{self, Parts};

const MODEL: &str = "model_optim_rng.pt";
const OPTIMIZER: &str = "distrib_optim.pt";
/// The part of the tree that the optimizer's file becomes.
const OPTIMIZER_KEY: &str = "distrib_optim";

/// A rank's folder, `mp_rank_01_002`: its numbers, each with as many digits as it is written.
fn numbers(folder: &str) -> Option<Vec<(u64, usize)>> {
    let numbers = folder.strip_prefix("mp_rank_")?.split('_');
    numbers.map(|text| Some((text.parse().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()))?, text.len()))).collect()
}

/// Nothing says how the tensors of model parallel ranks make up one, so each rank's stay apart where there are several.
pub(super) fn open(folder: &Folder, prefix: &str) -> Result<Option<Checkpoint>> {
    let mut ranks: BTreeSet<&str> = BTreeSet::new();
    let mut optimizers: BTreeSet<&str> = BTreeSet::new();
    for path in folder.files()? {
        let Some((rank, file)) = path.strip_prefix(prefix).and_then(|path| path.split_once('/')) else { continue };
        match file {
            _ if numbers(rank).is_none() => {}
            MODEL => drop(ranks.insert(rank)),
            OPTIMIZER => drop(optimizers.insert(rank)),
            _ => {}
        }
    }
    if ranks.is_empty() {
        return Ok(None);
    }
    check_complete(folder, prefix, &ranks, &optimizers)?;
    let mut files = Vec::new();
    let mut tree: Dict<Parts> = Dict::new();
    let mut first: Option<(Value, String)> = None;
    for rank in &ranks {
        let name = format!("{prefix}{rank}/{MODEL}");
        let mut below = parts::read_or_opaque(folder, &name, rank, files.len() as u32)?;
        check_step(folder, &name, &below, &mut first)?;
        files.push(name);
        if optimizers.contains(rank) {
            let name = format!("{prefix}{rank}/{OPTIMIZER}");
            let state = parts::read_or_opaque(folder, &name, OPTIMIZER_KEY, files.len() as u32)?;
            files.push(name);
            below.insert(Key::from(OPTIMIZER_KEY), Tree::Dict(state));
        }
        if ranks.len() == 1 {
            tree = below;
        } else {
            tree.insert(Key::from(*rank), Tree::Dict(below));
        }
    }
    let entries = tensors::entries(Tree::Dict(tree), &folder.path, &files[0])?;
    let catalog = Catalog::new(Format::Megatron, files, entries, "Megatron, one file a rank");
    Ok(Some(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, None)))
}

/// The ranks are a whole grid, and all of them have an optimizer's file or none has.
fn check_complete(folder: &Folder, prefix: &str, ranks: &BTreeSet<&str>, optimizers: &BTreeSet<&str>) -> Result<()> {
    let missing = |file: String| {
        let count = ranks.len();
        let detail =
            format!("the file {file} is missing; there are those of {count} model parallel ranks, and all ranks' are needed");
        Error::Incomplete { path: folder.path.clone(), detail }
    };
    if let Some(rank) = ranks.symmetric_difference(optimizers).next().filter(|_| !optimizers.is_empty()) {
        let file = if ranks.contains(rank) { OPTIMIZER } else { MODEL };
        return Err(missing(format!("{prefix}{rank}/{file}")));
    }
    let all: Vec<Vec<(u64, usize)>> = ranks.iter().filter_map(|rank| numbers(rank)).collect();
    let Some(like) = all.first() else { return Ok(()) };
    if let Some(odd) = ranks.iter().find(|rank| numbers(rank).is_none_or(|numbers| numbers.len() != like.len())) {
        let detail = format!("{odd} and the folders beside it name ranks in different ways: two saves are mixed");
        return Err(invalid(folder, odd, detail));
    }
    let largest = |dim: usize| all.iter().map(|numbers| numbers[dim].0).max().unwrap_or(0);
    let grid: Vec<u64> = (0..like.len()).map(largest).collect();
    // Only as many combinations are looked at as there are folders, and one more.
    let mut at = vec![0; grid.len()];
    for _ in 0..=ranks.len() {
        let named: Vec<String> = at.iter().zip(like).map(|(number, (_, digits))| format!("{number:0digits$}")).collect();
        let rank = format!("mp_rank_{}", named.join("_"));
        if !ranks.contains(rank.as_str()) {
            return Err(missing(format!("{prefix}{rank}/{MODEL}")));
        }
        let Some(dim) = (0..grid.len()).rev().find(|dim| at[*dim] < grid[*dim]) else { return Ok(()) };
        at[dim] += 1;
        at[dim + 1..].fill(0);
    }
    Ok(())
}

/// All files are of one iteration.
fn check_step(folder: &Folder, name: &str, tree: &Dict<Parts>, first: &mut Option<(Value, String)>) -> Result<()> {
    let Some(step) = tree.get(&Key::from("iteration")).and_then(Tree::to_value) else { return Ok(()) };
    match first {
        Some((other, file)) if *other != step => {
            let (step, other) = (step.python_repr(), other.python_repr());
            let detail = format!(
                "it is of iteration {step}, and {file} of {other}: files of two saves are mixed; open an iteration whose files \
                 are of one"
            );
            Err(invalid(folder, name, detail))
        }
        Some(_) => Ok(()),
        None => {
            *first = Some((step, name.to_owned()));
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn folders_name_ranks() {
        assert_eq!(numbers("mp_rank_01"), Some(vec![(1, 2)]));
        assert_eq!(numbers("mp_rank_01_002_003"), Some(vec![(1, 2), (2, 3), (3, 3)]));
        for name in ["mp_rank_", "mp_rank_a", "mp_rank_+1", "mp_rank_01_", "rank_01"] {
            assert_eq!(numbers(name), None, "{name}");
        }
    }
}
