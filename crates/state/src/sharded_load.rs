//! Loading optimizer state by the model's own layout: from the checkpoint's keys and the layouts of the parameters to the
//! regions of every slot that this rank reads. An optimizer that has no state yet is no obstacle, and no tensor is ever
//! whole unless it is meant to be.

use indexmap::{IndexMap, IndexSet};
use reshard_formats::{DType, KeyPath, PathSegment};
use reshard_layout::{Dims, LayoutError, LocalRegion, Mesh, Placement, Region, local_regions, local_shape};

use crate::optimizer::STATE;
use crate::slot::copies_for;
use crate::{
    Dict, FlatParameter, FlatSlot, OptimizerState, SlotPiece, SlotTensor, StateError, TensorLike, Tree, dotted, numel,
    unflatten_entries,
};

/// How a rank holds a tensor: the shape of its memory, and which region of the whole lies where in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamLayout {
    /// Shape of the whole.
    pub shape: Dims,
    /// Shape of this rank's memory.
    pub local_shape: Dims,
    /// Its parts; the source of each is nothing but a place.
    pub pieces: Vec<SlotPiece<()>>,
}

impl ParamLayout {
    /// Whole on every rank.
    pub fn replicated(shape: &[u64]) -> Result<ParamLayout, LayoutError> {
        let pieces = vec![SlotPiece::contiguous((), 0, Region::whole(shape)?)];
        Ok(ParamLayout { shape: Dims::from_slice(shape), local_shape: Dims::from_slice(shape), pieces })
    }

    /// Parts of a local tensor.
    pub fn from_regions(shape: &[u64], local_shape: &[u64], regions: Vec<LocalRegion>) -> Result<ParamLayout, LayoutError> {
        let local = Dims::from_slice(local_shape);
        let mut pieces = Vec::with_capacity(regions.len());
        for region in regions {
            region.global.check_inside(shape)?;
            let box_in_memory = Region::new(&region.local, region.global.sizes())?;
            box_in_memory.check_inside(local_shape)?;
            pieces.push(SlotPiece { source: (), start: 0, within: local.clone(), at: region.local, region: region.global });
        }
        Ok(ParamLayout { shape: Dims::from_slice(shape), local_shape: local, pieces })
    }

    /// Placed on a mesh, as a DTensor is.
    pub fn placed(mesh: &Mesh, placements: &[Placement], shape: &[u64], rank: u64) -> Result<ParamLayout, LayoutError> {
        let local = local_shape(mesh, placements, shape, rank)?;
        ParamLayout::from_regions(shape, &local, local_regions(mesh, placements, shape, rank)?)
    }

    /// This rank's part of a member of a flat parameter: one dimension, in the order of the flat parameter.
    pub fn flat_member(flat: &FlatParameter, member: usize) -> Result<ParamLayout, StateError> {
        let rank = flat.sharding().rank;
        let shape = flat.members().get(member).map(|member| member.whole_shape().clone()).unwrap_or_default();
        let pieces: Vec<SlotPiece<()>> = flat
            .member_regions(member, rank)?
            .into_iter()
            .map(|piece| SlotPiece::contiguous((), piece.start, piece.region))
            .collect();
        let length = pieces.iter().map(|piece| piece.region.volume()).sum();
        Ok(ParamLayout { shape, local_shape: Dims::from_slice(&[length]), pieces })
    }

    /// A layout of a slice of a larger tensor: nested sharding, such as FSDP inside of tensor parallelism.
    pub fn inside(self, whole: &[u64], slice: &Region) -> Result<ParamLayout, LayoutError> {
        slice.check_inside(whole)?;
        if slice.sizes() != self.shape.as_slice() {
            // Let the region itself say how it does not fit.
            Region::whole(&self.shape)?.check_inside(slice.sizes())?;
            Region::whole(slice.sizes())?.check_inside(&self.shape)?;
        }
        let mut pieces = self.pieces;
        for piece in &mut pieces {
            piece.region = piece.region.translated(slice.offsets())?;
        }
        Ok(ParamLayout { shape: Dims::from_slice(whole), local_shape: self.local_shape, pieces })
    }

    /// Cut along the first dimension the way `torch.chunk` cuts. A rank with nothing is at the end of the dimension.
    pub fn chunked(shape: &[u64], rank: u64, world: u64) -> Result<ParamLayout, LayoutError> {
        let Some(rows) = shape.first().copied().filter(|_| world > 0) else {
            return ParamLayout::replicated(shape);
        };
        let per_rank = rows.div_ceil(world);
        let start = per_rank.saturating_mul(rank).min(rows);
        let end = start.saturating_add(per_rank).min(rows);
        let mut offsets = Dims::from_elem(0, shape.len());
        let mut sizes = Dims::from_slice(shape);
        (offsets[0], sizes[0]) = (start, end - start);
        let region = Region::new(&offsets, &sizes)?;
        Ok(ParamLayout { shape: Dims::from_slice(shape), local_shape: sizes, pieces: vec![SlotPiece::contiguous((), 0, region)] })
    }
}

/// What a checkpoint says of one of its keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryFacts {
    /// A tensor.
    Tensor {
        /// Element type.
        dtype: DType,
        /// Shape of the whole.
        shape: Dims,
    },
    /// Anything else.
    Bytes,
}

/// One key of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointEntry<'a> {
    /// The key.
    pub key: &'a str,
    /// Its place in the tree it was saved from.
    pub path: &'a KeyPath,
    /// What it is.
    pub facts: EntryFacts,
}

/// What to do with a slot that has more than one element and not the shape of its parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OddSlots {
    /// Every rank loads it whole.
    #[default]
    Whole,
    /// Cut along its first dimension over a group.
    Chunked {
        /// This rank in the group.
        rank: u64,
        /// Size of the group.
        world: u64,
    },
}

/// What this rank reads of one slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotTarget {
    /// Key in the checkpoint.
    pub key: String,
    /// The parameter it belongs to, if it belongs to one.
    pub param: Option<String>,
    /// Element type, as saved.
    pub dtype: DType,
    /// Where its parts go. Replicated slots have one part, the whole.
    pub layout: ParamLayout,
    /// Whether every rank has all of it.
    pub replicated: bool,
}

/// What this rank reads of an optimizer.
#[derive(Clone, Debug, Default)]
pub struct ShardedOptimizerPlan {
    /// Tensors, by key.
    pub tensors: IndexMap<String, SlotTarget>,
    /// Keys that are read as values.
    pub values: Vec<String>,
    /// Parameters of the checkpoint that the model does not have; their slots are handled as odd ones.
    pub unknown_params: Vec<String>,
    /// Keys whose shape is not their parameter's.
    pub odd: Vec<String>,
    paths: IndexMap<String, KeyPath>,
}

impl ShardedOptimizerPlan {
    /// The nested tree, in the checkpoint's structure, with a leaf for every key that `leaf` gives one for.
    pub fn tree<T>(&self, mut leaf: impl FnMut(&str) -> Option<Tree<T>>) -> Result<Dict<T>, StateError> {
        let entries = self.paths.iter().filter_map(|(key, path)| Some((key.clone(), path.clone(), leaf(key)?)));
        unflatten_entries(entries.collect::<Vec<_>>())
    }
}

/// Plans loading the optimizer that a checkpoint keeps under `optimizer_key` (empty: at the root) into the layouts of the
/// model's parameters. `own_layouts` are slots with a layout of their own, by parameter and slot.
pub fn plan_sharded_optimizer<'a>(
    params: &IndexMap<String, ParamLayout>,
    optimizer_key: &str,
    checkpoint: impl IntoIterator<Item = CheckpointEntry<'a>>,
    odd_slots: OddSlots,
    own_layouts: &IndexMap<(String, String), ParamLayout>,
) -> Result<ShardedOptimizerPlan, StateError> {
    let known: IndexSet<&str> = params.keys().map(String::as_str).collect();
    let mut plan = ShardedOptimizerPlan::default();
    let mut unknown: IndexSet<String> = IndexSet::new();
    for entry in checkpoint {
        let Some(rest) = below_optimizer(entry.path, optimizer_key) else {
            continue;
        };
        plan.paths.insert(entry.key.to_owned(), entry.path.clone());
        let EntryFacts::Tensor { dtype, shape } = entry.facts else {
            plan.values.push(entry.key.to_owned());
            continue;
        };
        let owner = owner(rest, &known);
        if let Some((name, _)) = owner.as_ref().filter(|(name, _)| !known.contains(name.as_str())) {
            unknown.insert(name.clone());
        }
        let own = owner.as_ref().and_then(|owner| own_layouts.get(owner));
        let param = owner.as_ref().and_then(|(name, _)| params.get(name));
        let wrong = StateError::layout(entry.key);
        let (layout, replicated) = match (own, param) {
            (Some(own), _) if own.shape == shape => (own.clone(), false),
            // A tensor without dimensions is a scalar of its own even where the parameter has none either.
            (_, Some(param)) if param.shape == shape && !shape.is_empty() => (param.clone(), false),
            _ if numel(&shape) == 1 => (ParamLayout::replicated(&shape).map_err(wrong)?, true),
            (_, param) => {
                if param.is_some() {
                    plan.odd.push(entry.key.to_owned());
                }
                match odd_slots {
                    OddSlots::Whole => (ParamLayout::replicated(&shape).map_err(wrong)?, true),
                    OddSlots::Chunked { rank, world } => (ParamLayout::chunked(&shape, rank, world).map_err(wrong)?, false),
                }
            }
        };
        let param = owner.map(|(name, _)| name);
        let target = SlotTarget { key: entry.key.to_owned(), param, dtype, layout, replicated };
        plan.tensors.insert(entry.key.to_owned(), target);
    }
    plan.unknown_params = unknown.into_iter().collect();
    Ok(plan)
}

fn below_optimizer<'a>(path: &'a [PathSegment], optimizer_key: &str) -> Option<&'a [PathSegment]> {
    if optimizer_key.is_empty() {
        return Some(path);
    }
    match path.split_first() {
        Some((PathSegment::Key(first), rest)) if first == optimizer_key => Some(rest),
        _ => None,
    }
}

/// The parameter and the slot that a path below the optimizer belongs to: `state`, name, slot; or all of it in one
/// segment, where the optimizer was saved flattened.
fn owner(path: &[PathSegment], known: &IndexSet<&str>) -> Option<(String, String)> {
    match path {
        [PathSegment::Key(state), name, slot @ ..] if state == STATE && !slot.is_empty() => {
            Some((dotted(std::slice::from_ref(name)), dotted(slot)))
        }
        [PathSegment::Key(flat)] => {
            let rest = flat.strip_prefix("state.")?;
            let splits = || rest.rmatch_indices('.').map(|(dot, _)| (&rest[..dot], &rest[dot + 1..]));
            // Without a known name the slot is taken to be the last segment.
            let (name, slot) = splits().find(|(name, _)| known.contains(name)).or_else(|| splits().next())?;
            Some((name.to_owned(), slot.to_owned()))
        }
        _ => None,
    }
}

/// How this rank makes its part of a slot from what is at hand of it, in the layout of its parameter: a full tensor that
/// every rank has, or parts in another layout. A slot of another shape than its parameter's is kept as it is.
pub fn place_slot<T: TensorLike>(
    (param, slot): (&str, &str),
    given: &SlotTensor<T>,
    layout: &ParamLayout,
) -> Result<FlatSlot<T>, StateError> {
    if given.shape() != layout.shape.as_slice() || given.shape().is_empty() {
        return Ok(FlatSlot::Keep(Tree::Tensor(given.clone())));
    }
    let pieces = given.pieces().map_err(StateError::layout(param))?;
    let mut copies = Vec::new();
    for target in &layout.pieces {
        for mut copy in copies_for((param, slot), &pieces, &target.region, target.start)? {
            copy.dest_at = copy.dest_at.iter().zip(&target.at).map(|(inside, at)| inside + at).collect();
            copy.dest_shape = target.within.clone();
            copies.push(copy);
        }
    }
    Ok(FlatSlot::Build { dtype: given.dtype(), shape: layout.local_shape.clone(), copies })
}

/// Gives slots that an optimizer made as plain tensors beside sharded parameters the layout of their parameters. Such a
/// slot has the shape of the rank's part; taken for the whole it would be saved once instead of once per part. Returns
/// which slots those were.
pub fn adopt_layouts<T: TensorLike>(
    state: &mut OptimizerState<SlotTensor<T>>,
    params: &IndexMap<String, ParamLayout>,
) -> Vec<(String, String)> {
    let mut adopted = Vec::new();
    for (name, slots) in &mut state.state {
        let Some(layout) = params.get(name).filter(|layout| layout.local_shape != layout.shape) else { continue };
        for (slot, value) in slots {
            let local = match value {
                Tree::Tensor(SlotTensor::Whole(tensor)) if tensor.shape() == layout.local_shape.as_slice() => tensor.clone(),
                _ => continue,
            };
            let piece = |place: &SlotPiece<()>| SlotPiece {
                source: local.clone(),
                start: place.start,
                within: place.within.clone(),
                at: place.at.clone(),
                region: place.region.clone(),
            };
            let pieces = layout.pieces.iter().map(piece).collect();
            *value = Tree::Tensor(SlotTensor::Sharded { dtype: local.dtype(), shape: layout.shape.clone(), pieces });
            adopted.push((name.clone(), slot.to_string()));
        }
    }
    adopted
}
