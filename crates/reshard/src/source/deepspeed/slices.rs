//! Joining what tensor parallel ranks hold. Which dimension a parameter is cut in is said by patterns of names, the ones
//! that `ds_to_universal` goes by; without them nothing says it, and nothing is guessed.

use regex::Regex;
use reshard_formats::Value;
use reshard_layout::Region;
use reshard_state::{Dict, Tree};

use super::zero::Parameter;
use super::{ModelRank, disagree};
use crate::error::{Error, Result};
use crate::source::folder::Folder;
use crate::source::tensors::{self, Disagrees, Parts};
use crate::source::values::integer;

/// How the ranks' tensors make up one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// All hold the same.
    Replicated,
    /// End to end along a dimension.
    Along(usize),
    /// Two tensors in one, each cut along the first dimension: gate and up of a gated layer.
    Halves,
    /// Each trained its own, and a mean is meant.
    Averaged,
}

/// Patterns of names, and what they say.
struct Rules {
    rules: Vec<(Regex, Cut)>,
    vocabulary: Vec<Regex>,
    vocabulary_size: Option<u64>,
}

const RULES: &[(&str, Cut)] = &[
    ("tp_replicated_parameter_patterns", Cut::Replicated),
    ("parameter_to_average_patterns", Cut::Averaged),
    ("parameter_with_2_sub_params_cat_dim_0", Cut::Halves),
    ("parameter_with_row_parallelism_patterns", Cut::Along(1)),
];

/// All parameters, in the first rank's order, as one tensor each.
pub(super) fn join(folder: &Folder, ranks: &mut [ModelRank]) -> Result<Vec<(String, Parameter)>> {
    let mut all: Vec<_> = ranks.iter_mut().map(|rank| std::mem::take(&mut rank.parameters.by_name)).collect();
    if let [only] = all.as_mut_slice() {
        return Ok(std::mem::take(only).into_iter().collect());
    }
    let rules = Rules::read(folder, ranks)?;
    let buffers = match ranks.first().and_then(|rank| rank.model.get("buffer_names")?.to_value()) {
        Some(Value::List(names)) => names,
        _ => Vec::new(),
    };
    let mut joined = Vec::new();
    for (name, first) in &all[0] {
        let mut each = vec![first];
        for (rank, others) in all.iter().enumerate().skip(1) {
            let Some(other) = others.get(name) else {
                let detail = format!("tensor parallel rank {rank} has no parameter {name:?}, which rank 0 has");
                return Err(Error::Incomplete { path: folder.path.clone(), detail });
            };
            each.push(other);
        }
        let is_buffer = buffers.iter().any(|buffer| matches!(buffer, Value::Str(buffer) if buffer == name));
        let cut = if is_buffer { Cut::Replicated } else { rules.of(name) };
        joined.push((name.clone(), parameter(folder, &rules, name, cut, &each)?));
    }
    Ok(joined)
}

fn parameter(folder: &Folder, rules: &Rules, name: &str, cut: Cut, each: &[&Parameter]) -> Result<Parameter> {
    let tensors: Option<Vec<&Parts>> = each.iter().map(|parameter| parameter.weight.as_ref()).collect();
    let weight = tensors.map(|tensors| rules.tensor(folder, name, cut, &tensors)).transpose()?;
    let mut slots = Dict::new();
    for (key, first) in &each[0].slots {
        let of_rank = |parameter: &&Parameter| parameter.slots.get(key).and_then(Tree::as_tensor).cloned();
        let tensors: Option<Vec<Parts>> = each.iter().map(of_rank).collect();
        let value = match (first, tensors) {
            (Tree::Tensor(one), Some(tensors)) if !one.shape.is_empty() => {
                Tree::Tensor(rules.tensor(folder, name, cut, &tensors.iter().collect::<Vec<_>>())?)
            }
            _ => first.clone(),
        };
        slots.insert(key.clone(), value);
    }
    Ok(Parameter { weight, slots })
}

impl Rules {
    fn read(folder: &Folder, ranks: &[ModelRank]) -> Result<Rules> {
        let info = ranks.first().and_then(|rank| rank.model.get("universal_checkpoint_info"));
        let Some(info) = info.filter(|info| info.as_dict().is_some()) else {
            return Err(Error::unsupported(format!(
                "{} was written by {} tensor parallel ranks, and its mp_rank files have no universal_checkpoint_info, which says \
                 how each parameter is cut over them; save again with it in client_state (the patterns that DeepSpeed's \
                 ds_to_universal needs), or open the folder of one rank's files alone",
                folder.path,
                ranks.len()
            )));
        };
        let patterns = |key: &str| -> Result<Vec<Regex>> {
            let Some(Value::List(patterns) | Value::Tuple(patterns)) = info.get(key).and_then(Tree::to_value) else {
                return Ok(Vec::new());
            };
            let regex = |pattern: &Value| match pattern {
                // Python's `re.match`: anchored at the start alone.
                Value::Str(text) => Regex::new(&format!("^(?:{text})")).map_err(|e| {
                    disagree(folder, "universal_checkpoint_info", format!("invalid pattern {text:?} in {key}: {e}"))
                }),
                _ => Err(disagree(folder, "universal_checkpoint_info", format!("a pattern in {key} is not a string"))),
            };
            patterns.iter().map(regex).collect()
        };
        let mut rules = Vec::new();
        for (key, cut) in RULES {
            rules.extend(patterns(key)?.into_iter().map(|regex| (regex, *cut)));
        }
        for key in ["parameter_with_sub_params", "affine_map"] {
            if info.get(key).is_some_and(|value| !tensors::is_vacant(value)) {
                return Err(Error::unsupported(format!(
                    "{} has tensors whose tensor parallel ranks are cut by {key}, which is not supported; convert the checkpoint \
                     with DeepSpeed's ds_to_universal and open the result",
                    folder.path
                )));
            }
        }
        let vocabulary_size = info.get("original_vocab_size").and_then(Tree::to_value).as_ref().and_then(integer);
        Ok(Rules { rules, vocabulary: patterns("vocabulary_parameter_patterns")?, vocabulary_size })
    }

    fn of(&self, name: &str) -> Cut {
        self.rules.iter().find(|(regex, _)| regex.is_match(name)).map_or(Cut::Along(0), |(_, cut)| *cut)
    }

    fn tensor(&self, folder: &Folder, name: &str, cut: Cut, each: &[&Parts]) -> Result<Parts> {
        let first = each[0];
        let whole = match cut {
            Cut::Replicated => first.clone(),
            Cut::Along(dim) => along(name, folder, each, dim)?,
            Cut::Halves => halves(name, folder, each)?,
            Cut::Averaged => {
                return Err(Error::unsupported(format!(
                    "the parameter {name:?} in {} is the mean of what its tensor parallel ranks hold, which is not supported; \
                     convert the checkpoint with DeepSpeed's ds_to_universal and open the result",
                    folder.path
                )));
            }
        };
        let padded = self.vocabulary.iter().any(|regex| regex.is_match(name));
        match (self.vocabulary_size, whole.shape.first()) {
            (Some(size), Some(rows)) if padded && size < *rows => {
                let mut shape = whole.shape.clone();
                shape[0] = size;
                let mut cut = Parts::new(whole.dtype, &shape);
                let region = Region::whole(&shape).map_err(|error| disagreeing(folder, name)(error.into()))?;
                cut.add_cut(&whole, &region, &vec![0; shape.len()]).map_err(disagreeing(folder, name))?;
                Ok(cut)
            }
            _ => Ok(whole),
        }
    }
}

/// Says whose shapes give regions that cannot be.
fn disagreeing(folder: &Folder, name: &str) -> impl Fn(Disagrees) -> Error {
    move |error| disagree(folder, "param_shapes", format!("{name:?}: {error}"))
}

/// End to end along a dimension.
fn along(name: &str, folder: &Folder, each: &[&Parts], dim: usize) -> Result<Parts> {
    let first = each[0];
    let fits = |part: &&Parts| {
        part.shape.len() == first.shape.len()
            && part.dtype == first.dtype
            && part.shape.iter().zip(&first.shape).enumerate().all(|(d, (a, b))| d == dim || a == b)
    };
    if dim >= first.shape.len() || !each.iter().all(fits) {
        let shapes: Vec<_> = each.iter().map(|part| part.shape.as_slice()).collect();
        let detail = format!("the tensor parallel parts of {name:?}, {shapes:?}, do not fit end to end along dimension {dim}");
        return Err(disagree(folder, "param_shapes", detail));
    }
    let mut shape = first.shape.clone();
    shape[dim] = each.iter().try_fold(0u64, |sum, part| sum.checked_add(part.shape[dim])).unwrap_or(u64::MAX);
    let mut whole = Parts::new(first.dtype, &shape);
    let mut to = vec![0; shape.len()];
    for part in each {
        let region = Region::whole(&part.shape).map_err(|error| disagreeing(folder, name)(error.into()))?;
        whole.add_cut(part, &region, &to).map_err(disagreeing(folder, name))?;
        to[dim] += part.shape[dim];
    }
    Ok(whole)
}

/// The first halves end to end, then the second ones.
fn halves(name: &str, folder: &Folder, each: &[&Parts]) -> Result<Parts> {
    let all = along(name, folder, each, 0)?;
    if each.iter().any(|part| !part.shape[0].is_multiple_of(2)) {
        return Err(disagree(
            folder,
            "param_shapes",
            format!("a part of {name:?} has an odd number of rows and should have two halves"),
        ));
    }
    let mut whole = Parts::new(all.dtype, &all.shape);
    let mut row = 0;
    for half in 0..2 {
        for part in each {
            let rows = part.shape[0] / 2;
            let mut offsets = vec![0; part.shape.len()];
            offsets[0] = half * rows;
            let mut sizes = part.shape.to_vec();
            sizes[0] = rows;
            let mut to = vec![0; part.shape.len()];
            to[0] = row;
            let region = Region::new(&offsets, &sizes).map_err(|error| disagreeing(folder, name)(error.into()))?;
            whole.add_cut(part, &region, &to).map_err(disagreeing(folder, name))?;
            row += rows;
        }
    }
    Ok(whole)
}
