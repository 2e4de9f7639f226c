//! Optimizer state by names: every slot of every member of a flat parameter as regions over this rank's own memory, with nothing
//! sent and nothing copied.

use indexmap::IndexMap;

use super::state::id_of;
use crate::{
    Dict, FlatModel, FlatParameter, Key, LiveOptimizer, Names, OptimizerState, ParamGroup, RawOptimizer, SlotPiece, SlotTensor,
    StateError, TensorLike, Tree, numel,
};

/// What a key of an optimizer's state stands for.
enum Owner<'a> {
    Flat(&'a FlatParameter),
    Member(&'a FlatParameter, usize),
    Plain(String),
    Unknown,
}

fn owner<'a>(
    key: &Key,
    members: &[crate::Identity],
    by_id: bool,
    names: &Names,
    flats: &'a FlatModel,
) -> Result<Owner<'a>, StateError> {
    let of_name = |name: &str| match flats.of_member(name) {
        Some((flat, member)) => Owner::Member(flat, member),
        None => Owner::Plain(name.to_owned()),
    };
    if let (true, Some(id)) = (by_id, id_of(key)) {
        let unknown = || StateError::InvalidOptimizerState { reason: format!("unknown parameter id {id}") };
        let identity = *members.get(id).ok_or_else(unknown)?;
        if let Some(flat) = flats.of_identity(identity) {
            return Ok(Owner::Flat(flat));
        }
        let found = names.of_identity(identity);
        let name = found.first().ok_or_else(|| StateError::InvalidOptimizerState {
            reason: format!("parameter {id} of the optimizer is not a parameter of the model"),
        })?;
        return Ok(of_name(name));
    }
    let Some(text) = key.as_str() else {
        return Ok(Owner::Unknown);
    };
    if let Some(flat) = flats.of_raw(text) {
        return Ok(Owner::Flat(flat));
    }
    if names.get(text).is_some() {
        return Ok(of_name(names.primary(text)));
    }
    Ok(match names.canonical(text) {
        [only] => of_name(names.primary(only)),
        _ => Owner::Unknown,
    })
}

/// Optimizer state by names, with every slot as regions over the tensors that this rank's optimizer holds. State that
/// belongs to no parameter is carried through.
pub fn sharded_optim_state<T: TensorLike>(
    raw: RawOptimizer<T>,
    live: &LiveOptimizer<T>,
    names: &Names,
    flats: &FlatModel,
) -> Result<OptimizerState<SlotTensor<T>>, StateError> {
    let (members, by_id) = (live.members().collect::<Vec<_>>(), raw.is_keyed_by_id());
    let mut result = OptimizerState { owned_state: owned_as_parts(raw.owned_state), ..OptimizerState::default() };
    for (key, value) in raw.state {
        let owner = owner(&key, &members, by_id, names, flats)?;
        match (owner, value) {
            (Owner::Flat(flat), Tree::Dict(slots)) => {
                for index in 0..flat.members().len() {
                    let slots = member_slots(flat, index, &slots, false)?;
                    result.insert_slots(flat.members()[index].name.clone(), slots)?;
                }
            }
            (Owner::Member(flat, index), Tree::Dict(slots)) => {
                let slots = member_slots(flat, index, &slots, true)?;
                result.insert_slots(flat.members()[index].name.clone(), slots)?;
            }
            (Owner::Plain(name), Tree::Dict(slots)) => {
                let slots = slots.into_iter().map(|(slot, value)| (slot, value.map(&mut SlotTensor::Whole)));
                result.insert_slots(name, slots.collect())?;
            }
            (_, value) => {
                result.user_state.insert(key, value.map(&mut SlotTensor::Whole));
            }
        }
    }
    for group in raw.param_groups {
        let mut params = Vec::new();
        for key in &group.params {
            match owner(key, &members, by_id, names, flats)? {
                Owner::Flat(flat) => params.extend(flat.members().iter().map(|member| member.name.clone())),
                Owner::Member(flat, index) => params.push(flat.members()[index].name.clone()),
                Owner::Plain(name) => params.push(name),
                Owner::Unknown => {
                    let nearest = names.nearest(&key.to_string());
                    return Err(StateError::UnknownName { name: key.to_string(), nearest });
                }
            }
        }
        let options = group.options.into_iter().map(|(key, value)| (key, value.map(&mut SlotTensor::Whole)));
        result.param_groups.push(ParamGroup { params, options: options.collect() });
    }
    Ok(result)
}

fn owned_as_parts<T>(owned: IndexMap<String, Dict<T>>) -> IndexMap<String, Dict<SlotTensor<T>>> {
    let parts = |own: Dict<T>| own.into_iter().map(|(key, value)| (key, value.map(&mut SlotTensor::Whole))).collect();
    owned.into_iter().map(|(name, own)| (name, parts(own))).collect()
}

/// The slots of one member. `own` says whether the slots are the member's own or those of the whole flat parameter.
fn member_slots<T: TensorLike>(
    flat: &FlatParameter,
    index: usize,
    slots: &Dict<T>,
    own: bool,
) -> Result<Dict<SlotTensor<T>>, StateError> {
    let rank = flat.sharding().rank;
    let member = &flat.members()[index];
    let held = flat.member_range(index, rank);
    let regions = flat.member_regions(index, rank)?;
    let held_len = held.as_ref().map_or(0, |held| held.range.end - held.range.start);
    let expected = if own { held_len } else { flat.shard_len() };
    let base = if own { 0 } else { held.as_ref().map_or(0, |held| held.in_shard) };
    let mut result = Dict::new();
    for (slot, value) in slots {
        let value = match value {
            // Of a parameter that is whole here a slot may be anything, and is whole too.
            Tree::Tensor(tensor) if own && !flat.is_sharded() && tensor.shape() != member.shape.as_slice() => {
                Tree::Tensor(SlotTensor::Whole(tensor.clone()))
            }
            // A tensor that is as large as what it belongs to is its slot; a single element stands for all of it.
            Tree::Tensor(tensor) if !tensor.shape().is_empty() && tensor.numel() == expected => {
                let piece = |piece: &reshard_layout::FlatPiece| {
                    SlotPiece::contiguous(tensor.clone(), base + piece.start, piece.region.clone())
                };
                Tree::Tensor(SlotTensor::Sharded {
                    dtype: tensor.dtype(),
                    shape: member.whole_shape().clone(),
                    pieces: regions.iter().map(piece).collect(),
                })
            }
            Tree::Tensor(tensor) if tensor.numel() == 1 => Tree::Tensor(SlotTensor::Whole(tensor.clone())),
            Tree::Tensor(tensor) => {
                return Err(StateError::SlotShape {
                    param: member.name.clone(),
                    slot: slot.to_string(),
                    found: tensor.shape().to_vec(),
                    expected: vec![expected],
                });
            }
            // Nested state and plain values belong to the flat parameter as a whole.
            other => other.clone().map(&mut SlotTensor::Whole),
        };
        result.insert(slot.clone(), value);
    }
    // An optimizer that makes its state up front has a `step` for a parameter of which this rank holds nothing, and it
    // never moves. The ranks that hold something know better, so here only the (empty) regions count. Of a parameter without
    // elements nobody holds anything, and all know the same.
    let sharded = |value: &Tree<SlotTensor<T>>| matches!(value, Tree::Tensor(SlotTensor::Sharded { .. }));
    if own && held.is_none() && numel(member.whole_shape()) > 0 && result.values().any(sharded) {
        result.retain(|_, value| sharded(value));
    }
    Ok(result)
}
