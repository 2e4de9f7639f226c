//! From wanted keys to stored ones, and every difference between them.

use std::collections::HashSet;

use reshard_formats::PathSegment;
use reshard_layout::{Region, coverage, moves};

use super::options::{CastPolicy, LoadOptions};
use crate::cast::can_cast;
use crate::checkpoint::{CatalogEntry, CatalogKind, CatalogTensor, Checkpoint};
use crate::leaf::{LoadEntry, LoadLeaf, LoadState, LoadTensor, Scope, per_rank_key};
use crate::mismatch::{Difference, is_narrowing, near_names};

/// A wanted leaf that can be loaded.
pub(super) struct Resolved<'c> {
    /// Position in the wanted state.
    pub(super) wanted: usize,
    /// The checkpoint's key.
    pub(super) key: &'c str,
    pub(super) stored: &'c CatalogEntry,
}

/// A cast that the policy allowed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
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
    pub(super) differences: Vec<Difference>,
    pub(super) casts: Vec<Cast>,
}

/// Compares what is wanted with what is stored.
pub(super) fn resolve<'c>(
    checkpoint: &'c Checkpoint,
    state: &LoadState<'_>,
    rank: usize,
    options: &LoadOptions,
) -> Resolution<'c> {
    let entries = &checkpoint.catalog.entries;
    let mut resolution = Resolution { found: Vec::new(), differences: Vec::new(), casts: Vec::new() };
    let mut used: HashSet<&str> = HashSet::new();
    for (wanted, (key, entry)) in state.leaves.iter().enumerate() {
        let Some(name) = stored_name(key, entry, rank, options) else { continue };
        let Some((name, stored)) = entries.get_key_value(&name) else {
            let near = near_names(&name, entries.keys().map(String::as_str));
            resolution.differences.push(Difference::Missing { key: key.clone(), near });
            continue;
        };
        used.insert(name);
        match difference(key, entry, stored, options, &mut resolution.casts) {
            Some(difference) => resolution.differences.push(difference),
            None => resolution.found.push(Resolved { wanted, key: name, stored }),
        }
    }
    let parts: HashSet<String> = used.iter().filter_map(|key| entries.get(*key).map(|e| part(key, e))).collect();
    for (key, entry) in entries {
        let counts = options.expected.as_ref().is_none_or(|expected| expected(key));
        if !used.contains(key.as_str()) && counts && parts.contains(&part(key, entry)) && !other_ranks(entry, state) {
            resolution.differences.push(Difference::Unexpected { key: key.clone() });
        }
    }
    resolution
}

fn stored_name(key: &str, entry: &LoadEntry<'_>, rank: usize, options: &LoadOptions) -> Option<String> {
    let name = match &options.key_map {
        Some(map) => map(key)?,
        None => key.to_owned(),
    };
    Some(match entry.scope {
        Scope::Shared => name,
        Scope::PerRank => per_rank_key(&name, rank),
    })
}

/// The top-level part of the tree in which a key sits. A key that is a part by itself stands for itself alone.
fn part(key: &str, entry: &CatalogEntry) -> String {
    match entry.path.as_deref() {
        Some([PathSegment::Key(first), _, ..]) => format!("{first}."),
        _ => key.to_owned(),
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
        let local: Result<Vec<Region>, _> = found.iter().map(|m| m.region.within(&piece.region)).collect();
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
