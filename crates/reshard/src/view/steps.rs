//! A rule's steps, carried out on the tensors of one group of names.

use std::collections::BTreeMap;

use reshard_formats::DType;

use super::pattern::Captures;
use super::rules::{Action, PadValue, Rule, Sizes, Step};
use crate::checkpoint::{CatalogTensor, ChunkLocation, Input};
use crate::scaled;
use crate::seen::{self, Outcome, dimension};

/// No step makes more tensors.
const MOST_TENSORS: u64 = 1 << 22;

/// A tensor on its way through a rule, or a place for one where only names count.
#[derive(Debug)]
pub(super) struct Piece {
    /// Which of the rule's names it has.
    pub(super) part: usize,
    pub(super) captures: Captures,
    pub(super) tensor: Option<CatalogTensor>,
    /// The positions of the entries that it is made from.
    pub(super) sources: Vec<usize>,
    /// What it is called in messages: the key of the first of them.
    pub(super) key: Option<String>,
}

/// Carries out all steps of a rule.
pub(super) fn run(rule: &Rule, mut pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    for (number, step) in rule.steps.iter().enumerate() {
        let parts = parts_before(rule, number);
        pieces = one(rule, step, parts, pieces).map_err(|why| match step.at.line {
            0 => format!("{}: {why}", step.action.word()),
            line => format!("{} (line {line}): {why}", step.action.word()),
        })?;
    }
    Ok(pieces)
}

/// How many names a rule's tensors have before a step.
pub(super) fn parts_before(rule: &Rule, step: usize) -> usize {
    rule.steps.iter().take(step).fold(rule.from.len(), |parts, step| match step.action {
        Action::Concat { .. } | Action::Dequantise { .. } | Action::Lora { .. } => 1,
        Action::Split { .. } | Action::Quantise { .. } => rule.to.len(),
        _ => parts,
    })
}

fn one(rule: &Rule, step: &Step, parts: usize, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    match &step.action {
        Action::Stack { capture, dim } => stacked(capture, *dim, pieces),
        Action::Unstack { capture, dim } => unstacked(capture, *dim, pieces),
        Action::Concat { dim, sizes, groups } => joined(*dim, sizes.as_ref(), *groups, parts, pieces),
        Action::Split { dim, sizes, groups } => split(*dim, sizes.as_ref(), *groups, rule.to.len(), pieces),
        Action::Dequantise { to, block, from } => dequantised(*to, block.as_deref(), *from, pieces),
        Action::Quantise { to, block, from } => quantised(*to, block, *from, pieces),
        Action::Lora { scale, transposed } => low_rank(*scale, *transposed, pieces),
        action => pieces
            .into_iter()
            .map(|mut piece| {
                if step.of.as_ref().is_none_or(|of| of.contains(&piece.part)) {
                    piece.tensor = piece.tensor.map(|tensor| changed(action, tensor)).transpose()?;
                }
                Ok(piece)
            })
            .collect(),
    }
}

/// Steps that change a tensor by itself.
fn changed(action: &Action, tensor: CatalogTensor) -> Outcome<CatalogTensor> {
    let ndim = tensor.shape.len();
    let dim_of = |dim: &i64| dimension(*dim, ndim);
    match action {
        Action::Transpose(a, b) => {
            let mut order: Vec<usize> = (0..ndim).collect();
            order.swap(dim_of(a)?, dim_of(b)?);
            seen::permuted(&tensor, &order)
        }
        Action::Permute(order) => {
            let order = order.iter().map(dim_of).collect::<Outcome<Vec<_>>>()?;
            seen::permuted(&tensor, &order)
        }
        Action::Reshape { to, from } => {
            if let Some(from) = from {
                let expected = filled(from, tensor.elements())?;
                if expected != tensor.shape.as_slice() {
                    return Err(format!("it is said to have shape {expected:?}, and has {:?}", &tensor.shape[..]));
                }
            }
            seen::reshaped(&tensor, &filled(to, tensor.elements())?)
        }
        Action::Unflatten { dim, sizes } => unflattened(&tensor, dim_of(dim)?, sizes),
        Action::Flatten { start, end, sizes } => {
            let (start, end) = (dim_of(start)?, dim_of(end)?);
            if start > end {
                return Err(format!("dimension {start} does not come before {end}"));
            }
            let joined = &tensor.shape[start..=end];
            let product = product(joined)?;
            if let Some(sizes) = sizes {
                let expected = filled(sizes, product)?;
                if expected != joined {
                    return Err(format!("dimensions {start} to {end} are said to be {expected:?}, and are {joined:?}"));
                }
            }
            let mut shape = tensor.shape[..start].to_vec();
            shape.push(product);
            shape.extend_from_slice(&tensor.shape[end + 1..]);
            seen::reshaped(&tensor, &shape)
        }
        Action::Slice { dim, start, stop } => {
            let dim = dim_of(dim)?;
            let stop = stop.unwrap_or(tensor.shape[dim]);
            let length = stop.checked_sub(*start).ok_or_else(|| format!("invalid range {start}:{stop}"))?;
            seen::sliced(&tensor, dim, *start, length)
        }
        Action::Truncate { dim, size } => seen::sliced(&tensor, dim_of(dim)?, 0, *size),
        Action::Pad { dim, size, value, from } => {
            let dim = dim_of(dim)?;
            if let Some(from) = from.filter(|from| *from != tensor.shape[dim]) {
                return Err(format!("dimension {dim} is said to have {from} indices, and has {}", tensor.shape[dim]));
            }
            let location = match value {
                PadValue::Live => ChunkLocation::Live,
                PadValue::Number(number) => {
                    let mut element = vec![0; tensor.dtype.size() as usize];
                    let wide = number.to_le_bytes();
                    crate::cast::cast(DType::Float64, &wide, tensor.dtype, &mut element).map_err(|error| error.to_string())?;
                    ChunkLocation::Fill(element.into_boxed_slice())
                }
            };
            seen::padded(tensor, dim, *size, location)
        }
        Action::Cast { to, from } => match from {
            Some(from) if *from != tensor.dtype => {
                Err(format!("it is said to be {}, and is {}", from.name(), tensor.dtype.name()))
            }
            _ => seen::cast(tensor, *to),
        },
        // Steps that change several at once.
        Action::Stack { .. }
        | Action::Unstack { .. }
        | Action::Concat { .. }
        | Action::Split { .. }
        | Action::Dequantise { .. }
        | Action::Quantise { .. }
        | Action::Lora { .. } => Ok(tensor),
    }
}

/// The number of indices of several dimensions; beside one of none, others may be of any size.
fn product(sizes: &[u64]) -> Outcome<u64> {
    let product = sizes.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
    product.ok_or_else(|| format!("dimensions of {sizes:?} indices are too many for one"))
}

/// Sizes of which one may be left over.
fn filled(sizes: &[i64], elements: u64) -> Outcome<Vec<u64>> {
    let wrong = || format!("{sizes:?} are not the sizes of {elements} elements");
    let mut known = 1u64;
    for size in sizes.iter().filter(|size| **size != -1) {
        known = u64::try_from(*size).ok().and_then(|size| known.checked_mul(size)).ok_or_else(wrong)?;
    }
    let left = match sizes.iter().filter(|size| **size == -1).count() {
        0 => 1,
        1 if known > 0 && elements.is_multiple_of(known) => elements / known,
        _ => return Err(wrong()),
    };
    if known.checked_mul(left) != Some(elements) {
        return Err(wrong());
    }
    Ok(sizes.iter().map(|size| if *size == -1 { left } else { size.unsigned_abs() }).collect())
}

fn unflattened(tensor: &CatalogTensor, dim: usize, sizes: &[i64]) -> Outcome<CatalogTensor> {
    let mut shape = tensor.shape[..dim].to_vec();
    shape.extend(filled(sizes, tensor.shape[dim]).map_err(|why| format!("dimension {dim}: {why}"))?);
    shape.extend_from_slice(&tensor.shape[dim + 1..]);
    seen::reshaped(tensor, &shape)
}

fn flattened(tensor: &CatalogTensor, dim: usize) -> Outcome<CatalogTensor> {
    let mut shape = tensor.shape[..dim].to_vec();
    shape.push(product(&tensor.shape[dim..dim + 2])?);
    shape.extend_from_slice(&tensor.shape[dim + 2..]);
    seen::reshaped(tensor, &shape)
}

/// Pieces that differ in one thing only.
fn grouped<K: Ord>(pieces: Vec<Piece>, key: impl Fn(&Piece) -> K) -> BTreeMap<K, Vec<Piece>> {
    let mut groups: BTreeMap<K, Vec<Piece>> = BTreeMap::new();
    for piece in pieces {
        groups.entry(key(&piece)).or_default().push(piece);
    }
    groups
}

fn stacked(capture: &str, dim: i64, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let without = |piece: &Piece| {
        let mut captures = piece.captures.clone();
        captures.remove(capture);
        (piece.part, captures)
    };
    let mut made = Vec::new();
    for ((part, captures), group) in grouped(pieces, without) {
        let mut numbered = Vec::with_capacity(group.len());
        for piece in group {
            let text = piece.captures.get(capture).cloned().unwrap_or_default();
            let number: u64 = text.parse().map_err(|_| format!("{{{capture}}} is {text:?}, which is not an integer"))?;
            numbered.push((number, piece));
        }
        numbered.sort_by_key(|(number, _)| *number);
        if let Some((expected, _)) = (0u64..).zip(&numbered).find(|(expected, (number, _))| expected != number) {
            let last = numbered.last().map_or(0, |(number, _)| *number);
            return Err(format!("{{{capture}}} = {expected} is missing, though numbers go up to {last}"));
        }
        made.push(together(part, captures, numbered.into_iter().map(|(_, piece)| piece).collect(), |tensors| {
            let ndim = tensors.first().map_or(0, |tensor| tensor.shape.len()) + 1;
            let dim = dimension(dim, ndim)?;
            let tensors = tensors.iter().map(|tensor| seen::with_dim(tensor, dim)).collect::<Outcome<_>>()?;
            seen::concatenated(tensors, dim)
        })?);
    }
    Ok(made)
}

/// One piece of several; a place for a tensor where they are places.
fn together(
    part: usize,
    captures: Captures,
    pieces: Vec<Piece>,
    join: impl FnOnce(Vec<CatalogTensor>) -> Outcome<CatalogTensor>,
) -> Outcome<Piece> {
    let mut sources = Vec::new();
    let mut tensors = Vec::new();
    let (count, key) = (pieces.len(), pieces.first().and_then(|piece| piece.key.clone()));
    for piece in pieces {
        sources.extend(piece.sources);
        tensors.extend(piece.tensor);
    }
    let tensor = if tensors.len() == count { Some(join(tensors)?) } else { None };
    Ok(Piece { part, captures, tensor, sources, key })
}

fn unstacked(capture: &str, dim: i64, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let mut made = Vec::new();
    for piece in pieces {
        let Some(tensor) = piece.tensor else {
            return Err(format!("no tensor tells how many {{{capture}}} there are"));
        };
        let dim = dimension(dim, tensor.shape.len())?;
        // Each index reads the chunks of all, and has a name.
        let work = tensor.shape[dim].saturating_mul(tensor.chunks.len().max(1) as u64);
        if work.saturating_add(made.len() as u64) > MOST_TENSORS {
            let shape = &tensor.shape[..];
            return Err(format!("dimension {dim} of shape {shape:?} falls apart into more tensors than {MOST_TENSORS}"));
        }
        for index in 0..tensor.shape[dim] {
            let mut captures = piece.captures.clone();
            captures.insert(capture.to_owned(), index.to_string());
            let row = seen::without_dim(&seen::sliced(&tensor, dim, index, 1)?, dim)?;
            let (part, sources, key) = (piece.part, piece.sources.clone(), piece.key.clone());
            made.push(Piece { part, captures, tensor: Some(row), sources, key });
        }
    }
    Ok(made)
}

fn joined(dim: i64, sizes: Option<&Sizes>, groups: u64, parts: usize, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let mut made = Vec::new();
    for (captures, mut group) in grouped(pieces, |piece| piece.captures.clone()) {
        group.sort_by_key(|piece| piece.part);
        if group.len() != parts || group.iter().enumerate().any(|(part, piece)| piece.part != part) {
            return Err(format!("{} of the {parts} tensors are there for {captures:?}", group.len()));
        }
        made.push(together(0, captures, group, |tensors| {
            let dim = dimension(dim, tensors.first().map_or(0, |tensor| tensor.shape.len()))?;
            if let Some(sizes) = sizes {
                let found: Vec<u64> = tensors.iter().filter_map(|tensor| tensor.shape.get(dim).copied()).collect();
                let total = found.iter().fold(0u64, |total, size| total.saturating_add(*size));
                let expected = shares(sizes, parts, total)?;
                if expected != found {
                    return Err(format!("dimension {dim} of them should be {expected:?}, and is {found:?}"));
                }
            }
            if groups == 1 {
                return seen::concatenated(tensors, dim);
            }
            let grouped = tensors.iter().map(|tensor| unflattened(tensor, dim, &[groups as i64, -1])).collect::<Outcome<_>>()?;
            flattened(&seen::concatenated(grouped, dim + 1)?, dim)
        })?);
    }
    Ok(made)
}

/// How a dimension of so many indices is shared.
fn shares(sizes: &Sizes, parts: usize, total: u64) -> Outcome<Vec<u64>> {
    let list = match sizes {
        Sizes::Exact(list) | Sizes::Ratio(list) => list,
    };
    if list.len() != parts {
        return Err(format!("{list:?} share a dimension between {}, and there are {parts}", list.len()));
    }
    let sum = list.iter().try_fold(0u64, |sum, size| sum.checked_add(*size)).filter(|sum| *sum > 0);
    let sum = sum.ok_or_else(|| format!("{list:?} are not shares"))?;
    match sizes {
        Sizes::Exact(list) if sum == total => Ok(list.clone()),
        Sizes::Exact(list) => Err(format!("the sizes {list:?} make {sum}, the dimension has {total}")),
        Sizes::Ratio(list) if total.is_multiple_of(sum) => Ok(list.iter().map(|share| share * (total / sum)).collect()),
        Sizes::Ratio(list) => Err(format!("{total} cannot be shared in the ratio {list:?}")),
    }
}

fn split(dim: i64, sizes: Option<&Sizes>, groups: u64, parts: usize, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let equal = Sizes::Ratio(vec![1; parts]);
    let sizes = sizes.unwrap_or(&equal);
    let mut made = Vec::new();
    for piece in pieces {
        let mut cut: Vec<Option<CatalogTensor>> = (0..parts).map(|_| None).collect();
        if let Some(tensor) = &piece.tensor {
            let dim = dimension(dim, tensor.shape.len())?;
            let whole = tensor.shape[dim];
            let list = shares(sizes, parts, whole)?;
            let (source, along) = match groups {
                1 => (None, dim),
                groups => (Some(unflattened(tensor, dim, &[groups as i64, -1])?), dim + 1),
            };
            let mut start = 0;
            for (slot, size) in cut.iter_mut().zip(&list) {
                if !size.is_multiple_of(groups) {
                    return Err(format!("{size} of dimension {dim} cannot be shared between {groups} groups"));
                }
                let part = seen::sliced(source.as_ref().unwrap_or(tensor), along, start, size / groups)?;
                start += size / groups;
                *slot = Some(if groups == 1 { part } else { flattened(&part, dim)? });
            }
        }
        for (part, tensor) in cut.into_iter().enumerate() {
            let (captures, sources, key) = (piece.captures.clone(), piece.sources.clone(), piece.key.clone());
            made.push(Piece { part, captures, tensor, sources, key });
        }
    }
    Ok(made)
}

/// One piece for those of a group, where only names count.
fn only_names(group: &[Piece]) -> Option<Piece> {
    let first = group.first().filter(|_| group.iter().any(|piece| piece.tensor.is_none()))?;
    let sources = group.iter().flat_map(|piece| piece.sources.iter().copied()).collect();
    Some(Piece { part: 0, captures: first.captures.clone(), tensor: None, sources, key: first.key.clone() })
}

/// The pieces of a group, each under its name in messages.
fn inputs(pieces: Vec<Piece>, names: &[&str]) -> Outcome<(Captures, Vec<usize>, Vec<Input>)> {
    let captures = pieces.first().map(|piece| piece.captures.clone()).unwrap_or_default();
    let mut sources = Vec::new();
    let mut inputs = Vec::new();
    if pieces.len() != names.len() || pieces.iter().enumerate().any(|(part, piece)| piece.part != part) {
        return Err(format!("{} of the {} tensors are there for {captures:?}", pieces.len(), names.len()));
    }
    for (piece, name) in pieces.into_iter().zip(names) {
        let Some(tensor) = piece.tensor else { return Err(format!("the {name} are not a tensor")) };
        inputs.push(Input { key: piece.key.unwrap_or_else(|| (*name).to_owned()), tensor });
        sources.extend(piece.sources);
    }
    Ok((captures, sources, inputs))
}

fn by_captures(pieces: Vec<Piece>) -> Vec<Vec<Piece>> {
    let mut groups: Vec<Vec<Piece>> = grouped(pieces, |piece| piece.captures.clone()).into_values().collect();
    groups.iter_mut().for_each(|group| group.sort_by_key(|piece| piece.part));
    groups
}

fn dequantised(to: DType, block: Option<&[u64]>, from: Option<DType>, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let mut made = Vec::new();
    for group in by_captures(pieces) {
        if let Some(piece) = only_names(&group) {
            made.push(piece);
            continue;
        }
        let (captures, sources, inputs) = inputs(group, &["codes", "scales"])?;
        let Ok([codes, scales]) = <[Input; 2]>::try_from(inputs) else { return Err("there are no two tensors".to_owned()) };
        if let Some(from) = from.filter(|from| *from != codes.tensor.dtype) {
            return Err(format!("the codes are said to be {}, and are {}", from.name(), codes.tensor.dtype.name()));
        }
        let key = Some(codes.key.clone());
        let tensor = seen::cast(scaled::dequantised(codes, scales, block)?, to)?;
        made.push(Piece { part: 0, captures, tensor: Some(tensor), sources, key });
    }
    Ok(made)
}

fn quantised(to: DType, block: &[u64], from: Option<DType>, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let mut made = Vec::new();
    for group in by_captures(pieces) {
        if let Some(piece) = only_names(&group) {
            made.push(Piece {
                part: 1,
                captures: piece.captures.clone(),
                tensor: None,
                sources: piece.sources.clone(),
                key: None,
            });
            made.push(piece);
            continue;
        }
        let (captures, sources, inputs) = inputs(group, &["weight"])?;
        let Some(weight) = inputs.into_iter().next() else { return Err("there is not a tensor".to_owned()) };
        if let Some(from) = from.filter(|from| *from != weight.tensor.dtype) {
            return Err(format!("the weight is said to be {}, and is {}", from.name(), weight.tensor.dtype.name()));
        }
        let key = Some(weight.key.clone());
        let (codes, scales) = scaled::quantised(weight, to, block)?;
        for (part, tensor) in [codes, scales].into_iter().enumerate() {
            let (captures, sources, key) = (captures.clone(), sources.clone(), key.clone());
            made.push(Piece { part, captures, tensor: Some(tensor), sources, key });
        }
    }
    Ok(made)
}

fn low_rank(scale: f64, transposed: bool, pieces: Vec<Piece>) -> Outcome<Vec<Piece>> {
    let mut made = Vec::new();
    for group in by_captures(pieces) {
        if let Some(piece) = only_names(&group) {
            made.push(piece);
            continue;
        }
        let (captures, sources, inputs) = inputs(group, &["weight", "factor A", "factor B"])?;
        let key = inputs.first().map(|weight| weight.key.clone());
        let tensor = seen::low_rank(inputs, scale as f32, transposed)?;
        made.push(Piece { part: 0, captures, tensor: Some(tensor), sources, key });
    }
    Ok(made)
}
