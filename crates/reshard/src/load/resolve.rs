//! From wanted keys to stored ones, and every difference between them.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};

use reshard_formats::{DType, PathSegment};
use reshard_layout::{Region, coverage, moves};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::options::{CastPolicy, LoadOptions};
use crate::cast::{can_cast, holds_values};
use crate::checkpoint::{CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, ScaledWeight};
use crate::error::Result;
use crate::group::{Group, agree, decode, encode};
use crate::leaf::{LoadEntry, LoadLeaf, LoadState, LoadTensor, Scope, per_rank_key};
use crate::mismatch::{Difference, is_narrowing, near_names};
use crate::scaled::may_be_codes;

/// A wanted leaf that can be loaded.
pub(super) struct Resolved<'c> {
    /// Position in the wanted state.
    pub(super) wanted: usize,
    /// The checkpoint's key.
    pub(super) key: &'c str,
    pub(super) stored: &'c CatalogEntry,
}

/// A cast that the policy allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cast {
    /// The wanted key.
    pub key: String,
    /// The stored element type.
    pub from: String,
    /// The wanted element type.
    pub to: String,
    /// Whether values may have been lost.
    pub narrowing: bool,
}

pub(super) struct Resolution<'c> {
    pub(super) found: Vec<Resolved<'c>>,
    /// Everything but unexpected keys.
    pub(super) differences: Vec<Difference>,
    pub(super) casts: Vec<Cast>,
    /// By position in the catalog, whether this rank wants the entry.
    used: Vec<bool>,
    /// Entries that this rank does not want, in those parts of the tree of which it wants something.
    unwanted: Vec<usize>,
}

/// Compares what is wanted with what is stored.
pub(super) fn resolve<'c>(
    checkpoint: &'c Checkpoint,
    state: &LoadState<'_>,
    rank: usize,
    options: &LoadOptions,
) -> Resolution<'c> {
    let entries = &checkpoint.catalog.entries;
    let mut resolution = Resolution {
        found: Vec::with_capacity(state.leaves.len()),
        differences: Vec::new(),
        casts: Vec::new(),
        used: vec![false; entries.len()],
        unwanted: Vec::new(),
    };
    for (wanted, (key, entry)) in state.leaves.iter().enumerate() {
        let Some(name) = stored_name(key, entry, rank, options) else { continue };
        let found = entries.get_full(name.as_ref());
        if let Some(weight) = scaled_weight(checkpoint, entry, &name, found.map(|(_, _, stored)| stored)) {
            resolution.weight(checkpoint, wanted, key, entry, weight);
            continue;
        }
        if let Some(difference) = found.and_then(|(_, name, stored)| packed_codes(checkpoint, key, entry, name, stored)) {
            resolution.differences.push(difference);
            continue;
        }
        let Some((position, name, stored)) = found else {
            let near = near_names(&name, entries.keys().map(String::as_str));
            resolution.differences.push(Difference::Missing { key: key.clone(), near });
            continue;
        };
        resolution.used[position] = true;
        match difference(key, entry, stored, options, &mut resolution.casts) {
            Some(difference) => resolution.differences.push(difference),
            None => resolution.found.push(Resolved { wanted, key: name, stored }),
        }
    }
    if resolution.used.contains(&false) {
        resolution.unwanted = unwanted(checkpoint, state, &resolution.used, options);
    }
    resolution
}

/// A block-scaled weight and its name.
type Weight<'c> = (&'c str, &'c std::result::Result<ScaledWeight, String>);

/// The block-scaled weight that is wanted under a name: one that is stored under it in codes and wanted in another type, or one of
/// which only codes and scales have names.
fn scaled_weight<'c>(
    checkpoint: &'c Checkpoint,
    entry: &LoadEntry<'_>,
    name: &str,
    stored: Option<&CatalogEntry>,
) -> Option<Weight<'c>> {
    let LoadLeaf::Tensor(wanted) = &entry.leaf else { return None };
    if let Some(stored) = stored {
        let CatalogKind::Tensor(stored) = &stored.kind else { return None };
        if stored.dtype == wanted.dtype || !may_be_codes(stored.dtype) {
            return None;
        }
    }
    let (_, name, weight) = checkpoint.scaled_weights().get_full(name)?;
    Some((name, weight))
}

/// Packed codes that are wanted in another type: what they stand for has another name.
fn packed_codes(
    checkpoint: &Checkpoint,
    key: &str,
    entry: &LoadEntry<'_>,
    name: &str,
    stored: &CatalogEntry,
) -> Option<Difference> {
    let (LoadLeaf::Tensor(wanted), CatalogKind::Tensor(stored)) = (&entry.leaf, &stored.kind) else { return None };
    let weight = name.strip_suffix("_blocks").filter(|_| stored.dtype == DType::UInt8 && wanted.dtype != DType::UInt8)?;
    let detail = match checkpoint.scaled_weights().get(weight)? {
        Ok(_) => format!("codes of four bits; {weight:?} is the weight"),
        Err(why) => why.clone(),
    };
    let (stored, wanted) = (stored.dtype.name().to_owned(), wanted.dtype.name().to_owned());
    Some(Difference::Scaled { key: key.to_owned(), stored, wanted, detail })
}

impl<'c> Resolution<'c> {
    /// A wanted weight that is stored in codes: its values are codes times scales.
    fn weight(&mut self, checkpoint: &'c Checkpoint, wanted: usize, key: &str, entry: &LoadEntry<'_>, (name, found): Weight<'c>) {
        let entries = &checkpoint.catalog.entries;
        let LoadLeaf::Tensor(tensor) = &entry.leaf else { return };
        let to = tensor.dtype.name().to_owned();
        let scaled =
            |stored: String, detail: String| Difference::Scaled { key: key.to_owned(), stored, wanted: to.clone(), detail };
        let weight = match found {
            Ok(weight) => weight,
            Err(why) => {
                entries.get_index_of(name).into_iter().for_each(|position| self.used[position] = true);
                let stored = entries.get(name).map_or("packed", |entry| entry.dtype_name());
                return self.differences.push(scaled(stored.to_owned(), why.clone()));
            }
        };
        for key in [&weight.codes, &weight.scales] {
            entries.get_index_of(key.as_str()).into_iter().for_each(|position| self.used[position] = true);
        }
        let from = entries.get(&weight.codes).map_or("packed", |entry| entry.dtype_name()).to_owned();
        if !holds_values(tensor.dtype) {
            let detail = format!("codes scaled by {:?}, whose values need a float of 16 bits or more", weight.scales);
            return self.differences.push(scaled(from, detail));
        }
        let Some(stored) = weight.tensor() else { return };
        if tensor.shape != stored.shape {
            let (stored, wanted) = (stored.shape.to_vec(), tensor.shape.to_vec());
            return self.differences.push(Difference::Shape { key: key.to_owned(), stored, wanted });
        }
        match coverage_difference(key, tensor, stored) {
            Some(difference) => self.differences.push(difference),
            None => {
                self.casts.push(Cast { key: key.to_owned(), from: format!("{from}, scaled"), to, narrowing: false });
                self.found.push(Resolved { wanted, key: name, stored: &weight.entry });
            }
        }
    }
}

/// What one rank says of its differences.
#[derive(Serialize, Deserialize)]
struct Outline {
    /// Whether it has others than entries that it does not want.
    differs: bool,
    /// Entries that it does not want.
    unwanted: Vec<usize>,
}

/// Compares the ranks' differences: unexpected is what no rank of the group wants. Whether any rank has a difference.
pub(super) fn compare(group: &dyn Group, checkpoint: &Checkpoint, resolution: &mut Resolution<'_>) -> Result<bool> {
    let unwanted = std::mem::take(&mut resolution.unwanted);
    let outline = Outline { differs: !resolution.differences.is_empty(), unwanted };
    let (differs, doubtful) = match group.size() {
        1 => (outline.differs, outline.unwanted.clone()),
        _ => {
            let outlines: Vec<Outline> = exchanged(group, &outline)?;
            let doubtful: BTreeSet<usize> = outlines.iter().flat_map(|outline| outline.unwanted.iter().copied()).collect();
            let doubtful: Vec<usize> = doubtful.into_iter().collect();
            (outlines.iter().any(|outline| outline.differs), nobodys(group, doubtful, &resolution.used)?)
        }
    };
    let doubtful: HashSet<usize> = doubtful.into_iter().collect();
    let unexpected = outline.unwanted.iter().filter(|position| doubtful.contains(position));
    let keys = unexpected.filter_map(|position| checkpoint.catalog.entries.get_index(*position));
    resolution.differences.extend(keys.map(|(key, _)| Difference::Unexpected { key: key.clone() }));
    Ok(differs || !doubtful.is_empty())
}

/// Of entries that some rank does not want, those that none wants.
fn nobodys(group: &dyn Group, mut doubtful: Vec<usize>, used: &[bool]) -> Result<Vec<usize>> {
    // All ranks know the same list, and so whether there is anything to ask.
    if doubtful.is_empty() {
        return Ok(doubtful);
    }
    let own: Vec<bool> = doubtful.iter().map(|position| used.get(*position).copied().unwrap_or(false)).collect();
    let answers: Vec<Vec<bool>> = exchanged(group, &own)?;
    let mut at = 0..;
    doubtful.retain(|_| {
        let index = at.next().unwrap_or(usize::MAX);
        !answers.iter().any(|answer| answer.get(index).copied().unwrap_or(false))
    });
    Ok(doubtful)
}

/// Every rank's message.
fn exchanged<T: Serialize + DeserializeOwned>(group: &dyn Group, message: &T) -> Result<Vec<T>> {
    agree(group, encode(message))?.iter().map(|bytes| decode(bytes)).collect()
}

/// Stored keys that are not wanted, in those parts of the tree of which something is.
fn unwanted(checkpoint: &Checkpoint, state: &LoadState<'_>, used: &[bool], options: &LoadOptions) -> Vec<usize> {
    let entries = &checkpoint.catalog.entries;
    let mut parts: HashSet<Part<'_>> =
        entries.iter().zip(used).filter(|(_, used)| **used).map(|((key, e), _)| part(key, e)).collect();
    parts.extend(options.parts.iter().map(|name| Part::Below(name)));
    let unused = entries.iter().zip(used).enumerate().filter(|(_, (_, used))| !**used);
    unused
        .filter(|(_, ((key, _), _))| options.expected.as_ref().is_none_or(|expected| expected(key)))
        .filter(|(_, ((key, entry), _))| parts.contains(&part(key, entry)) && !other_ranks(entry, state))
        .map(|(position, _)| position)
        .collect()
}

fn stored_name<'k>(key: &'k str, entry: &LoadEntry<'_>, rank: usize, options: &LoadOptions) -> Option<Cow<'k, str>> {
    let name = match &options.key_map {
        Some(map) => Cow::Owned(map(key)?),
        None => Cow::Borrowed(key),
    };
    Some(match entry.scope {
        Scope::Shared => name,
        Scope::PerRank => Cow::Owned(per_rank_key(&name, rank)),
    })
}

/// A top-level part of the tree.
#[derive(PartialEq, Eq, Hash)]
enum Part<'c> {
    /// Everything below a key of the tree.
    Below(&'c str),
    /// A key that is a part by itself stands for itself alone.
    Alone(&'c str),
}

/// The top-level part in which a key sits.
fn part<'c>(key: &'c str, entry: &'c CatalogEntry) -> Part<'c> {
    match entry.path.as_deref() {
        Some([PathSegment::Key(first), _, ..]) => Part::Below(first),
        _ => Part::Alone(key),
    }
}

/// Whether an entry is some rank's own content of a key that is wanted per rank: not unexpected, just another rank's.
fn other_ranks(entry: &CatalogEntry, state: &LoadState<'_>) -> bool {
    let Some([above @ .., PathSegment::Key(last)]) = entry.path.as_deref() else { return false };
    if last.strip_prefix("rank_").is_none_or(|n| n.parse::<usize>().is_err()) {
        return false;
    }
    let key = above
        .iter()
        .map(|segment| match segment {
            PathSegment::Key(key) => key.clone(),
            PathSegment::Index(index) => index.to_string(),
        })
        .collect::<Vec<_>>()
        .join(".");
    state.leaves.get(&key).is_some_and(|leaf| leaf.scope == Scope::PerRank)
}

fn difference(
    key: &str,
    entry: &LoadEntry<'_>,
    stored: &CatalogEntry,
    options: &LoadOptions,
    casts: &mut Vec<Cast>,
) -> Option<Difference> {
    match (&entry.leaf, &stored.kind) {
        (LoadLeaf::Value, CatalogKind::Value(_)) => None,
        (LoadLeaf::Value, CatalogKind::Tensor(_)) => {
            Some(Difference::Kind { key: key.to_owned(), stored: "a tensor", wanted: "a value" })
        }
        (LoadLeaf::Tensor(_), CatalogKind::Value(_)) => {
            Some(Difference::Kind { key: key.to_owned(), stored: "a value", wanted: "a tensor" })
        }
        (LoadLeaf::Tensor(wanted), CatalogKind::Tensor(stored)) => tensor_difference(key, wanted, stored, options, casts),
    }
}

fn tensor_difference(
    key: &str,
    wanted: &LoadTensor<'_>,
    stored: &CatalogTensor,
    options: &LoadOptions,
    casts: &mut Vec<Cast>,
) -> Option<Difference> {
    if wanted.shape != stored.shape {
        let (stored, wanted) = (stored.shape.to_vec(), wanted.shape.to_vec());
        return Some(Difference::Shape { key: key.to_owned(), stored, wanted });
    }
    if wanted.dtype != stored.dtype {
        let narrowing = is_narrowing(stored.dtype, wanted.dtype);
        let allowed = match options.cast {
            CastPolicy::Never => false,
            CastPolicy::Widening => !narrowing,
            CastPolicy::Any => true,
        };
        let (from, to) = (stored.dtype.name().to_owned(), wanted.dtype.name().to_owned());
        if !allowed || !can_cast(stored.dtype, wanted.dtype) {
            return Some(Difference::DType { key: key.to_owned(), stored: from, wanted: to, narrowing });
        }
        casts.push(Cast { key: key.to_owned(), from, to, narrowing });
    }
    coverage_difference(key, wanted, stored)
}

/// Stored chunks must give every wanted element exactly once.
fn coverage_difference(key: &str, wanted: &LoadTensor<'_>, stored: &CatalogTensor) -> Option<Difference> {
    // One chunk that holds everything: most tensors of most checkpoints.
    if let [only] = stored.chunks.as_slice()
        && wanted.pieces.iter().all(|piece| only.region.contains(&piece.region))
    {
        return None;
    }
    let complain = |detail: String| Some(Difference::Coverage { key: key.to_owned(), detail });
    let index = match stored.index() {
        Ok(index) => index,
        Err(error) => return complain(error.to_string()),
    };
    for piece in &wanted.pieces {
        let found = moves(index, std::slice::from_ref(&piece.region));
        let covered: u64 = found.iter().map(|m| m.region.volume()).fold(0, u64::saturating_add);
        if found.len() <= 1 && covered == piece.region.volume() {
            continue;
        }
        let local: std::result::Result<Vec<Region>, _> = found.iter().map(|m| m.region.within(&piece.region)).collect();
        match local.and_then(|local| coverage(piece.region.sizes(), &local)) {
            Ok(found) if found.is_exact() => {}
            Ok(found) => {
                let global = |region: &Region| region.translated(piece.region.offsets()).unwrap_or_else(|_| region.clone());
                return match (found.gaps.first(), found.overlaps.first()) {
                    (Some(gap), _) => complain(format!("no stored chunk holds {}", global(gap))),
                    (None, Some(twice)) => complain(format!("two stored chunks hold {}", global(&twice.region))),
                    (None, None) => complain(format!("the stored chunks do not tile {}", piece.region)),
                };
            }
            Err(error) => return complain(error.to_string()),
        }
    }
    None
}
