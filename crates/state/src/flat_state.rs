//! Optimizer state of a model with flat parameters, by the names of the members. Sharded: every slot of every member as
//! regions over this rank's own memory, with nothing sent and nothing copied. Full: the plan of one tensor at a time.

use indexmap::IndexMap;
use reshard_formats::{DType, Value};
use reshard_layout::{Dims, Region};

use crate::optimizer::id_of;
use crate::optimizer_load::value_text;
use crate::stream::{HeldTensor, TransferPlan, gather_plan};
use crate::{
    Dict, FlatModel, FlatParameter, Key, LiveOptimizer, Names, OptimizerState, ParamGroup, Phase, PhaseTimings, RawOptimizer,
    Recipients, SlotPiece, SlotTensor, StateError, TensorLike, Tree, numel,
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
        let unknown = || StateError::InvalidOptimizerState { reason: format!("there is no parameter with the id {id}") };
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
    timings: &mut PhaseTimings,
) -> Result<OptimizerState<SlotTensor<T>>, StateError> {
    let (members, by_id) = timings.measure(Phase::Preprocess, || (live.members().collect::<Vec<_>>(), raw.is_keyed_by_id()));
    let mut result = OptimizerState { owned_state: owned_as_parts(raw.owned_state), ..OptimizerState::default() };
    timings.measure(Phase::Flatten, || -> Result<(), StateError> {
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
        Ok(())
    })?;
    timings.measure(Phase::Rekey, || -> Result<(), StateError> {
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
        Ok(())
    })?;
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

/// What one rank tells the others about a slot.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotFacts {
    /// Regions of a tensor.
    Regions {
        /// Element type.
        dtype: DType,
        /// Shape of the whole.
        shape: Dims,
        /// What the rank holds.
        regions: Vec<Region>,
    },
    /// A tensor that is the same on every rank.
    Same {
        /// Element type.
        dtype: DType,
        /// Its shape.
        shape: Dims,
        /// Its only element, if it has only one.
        scalar: Option<Vec<u8>>,
    },
    /// A plain value.
    Plain(Value),
    /// Something that can not be compared.
    Other(&'static str),
}

/// What one rank tells the others about its optimizer state: a few bytes per slot, no tensor.
pub type Inventory = IndexMap<String, IndexMap<String, SlotFacts>>;

/// Makes the inventory of this rank.
pub fn inventory<T: TensorLike>(state: &OptimizerState<SlotTensor<T>>) -> Inventory {
    let facts = |value: &Tree<SlotTensor<T>>| match value {
        Tree::Tensor(SlotTensor::Sharded { dtype, shape, pieces }) => SlotFacts::Regions {
            dtype: *dtype,
            shape: shape.clone(),
            regions: pieces.iter().map(|piece| piece.region.clone()).collect(),
        },
        Tree::Tensor(SlotTensor::Whole(tensor)) => SlotFacts::Same {
            dtype: tensor.dtype(),
            shape: Dims::from_slice(tensor.shape()),
            scalar: tensor.scalar().map(<[u8]>::to_vec),
        },
        other => match other.to_value() {
            Some(value) => SlotFacts::Plain(value),
            None => SlotFacts::Other(other.kind()),
        },
    };
    let slots = |slots: &Dict<SlotTensor<T>>| slots.iter().map(|(slot, value)| (slot.to_string(), facts(value))).collect();
    state.state.iter().map(|(name, dict)| (name.clone(), slots(dict))).collect()
}

/// The plan of a full state: whole tensors one after the other, and which rank's value counts for everything else.
#[derive(Clone, Debug, PartialEq)]
pub struct FullOptimState {
    /// Tensors that are gathered, in the order in which all ranks gather them. Keys are `(parameter, slot)` joined by a dot.
    pub tensors: TransferPlan,
    /// Parameter and slot of each step of `tensors`.
    pub slots: Vec<(String, String)>,
    /// Values taken from one rank: parameter, slot, rank.
    pub values: Vec<(String, String, u64)>,
    /// Whether tensors go to the CPU as they arrive.
    pub cpu_offload: bool,
}

/// Plans the full optimizer state from the inventories of all ranks of the sharding group, in rank order. Ranks that hold
/// nothing of a parameter have no say in its scalars; those that do must agree.
pub fn full_optim_state(
    inventories: &[Inventory],
    recipients: Recipients,
    cpu_offload: bool,
) -> Result<FullOptimState, StateError> {
    // Names in the order in which ranks, from the first on, bring them: the same on every rank.
    let mut slots: IndexMap<(String, String), Vec<(u64, &SlotFacts)>> = IndexMap::new();
    for (rank, inventory) in (0_u64..).zip(inventories) {
        for (name, own) in inventory {
            // Of a tensor without elements every rank holds all there is.
            let regions = own.values().filter_map(|facts| match facts {
                SlotFacts::Regions { shape, regions, .. } => Some(numel(shape) > 0 && regions.iter().all(Region::is_empty)),
                _ => None,
            });
            let holds_nothing = regions.clone().next().is_some() && regions.into_iter().all(|empty| empty);
            for (slot, facts) in own {
                if holds_nothing && !matches!(facts, SlotFacts::Regions { .. }) {
                    continue;
                }
                slots.entry((name.clone(), slot.clone())).or_default().push((rank, facts));
            }
        }
    }
    slots.sort_keys();
    let mut tensors = Vec::new();
    let mut gathered = Vec::new();
    let mut values = Vec::new();
    for ((param, slot), facts) in slots {
        let disagree = |reason: String| Err(StateError::RankDisagreement { param: param.clone(), slot: slot.clone(), reason });
        let mut held = Vec::new();
        let mut whole: Option<(DType, Dims)> = None;
        let mut value: Option<(u64, &SlotFacts)> = None;
        for (rank, facts) in facts {
            match facts {
                SlotFacts::Regions { dtype, shape, regions } => {
                    match &whole {
                        Some((known, of)) if known != dtype || of != shape => {
                            return disagree(format!(
                                "rank {rank} has {} {:?}, others {} {:?}",
                                dtype.name(),
                                shape.as_slice(),
                                known.name(),
                                of.as_slice()
                            ));
                        }
                        _ => whole = Some((*dtype, shape.clone())),
                    }
                    held.extend(regions.iter().map(|region| (rank, region.clone())));
                }
                facts => match value {
                    Some((first, other)) if other != facts => {
                        return disagree(format!("rank {first} has {}, rank {rank} has {}", text(other), text(facts)));
                    }
                    Some(_) => {}
                    None => value = Some((rank, facts)),
                },
            }
        }
        match (whole, value) {
            (Some(_), Some((rank, facts))) => {
                return disagree(format!("rank {rank} has {}, others have regions", text(facts)));
            }
            (Some((dtype, shape)), None) => {
                tensors.push(HeldTensor { key: format!("{param}.{slot}"), dtype, shape, held });
                gathered.push((param, slot));
            }
            (None, Some((rank, _))) => values.push((param, slot, rank)),
            (None, None) => {}
        }
    }
    let tensors = gather_plan(tensors, recipients)?;
    Ok(FullOptimState { tensors, slots: gathered, values, cpu_offload })
}

fn text(facts: &SlotFacts) -> String {
    match facts {
        SlotFacts::Regions { dtype, shape, .. } => {
            format!("regions of {} {:?}", dtype.name(), shape.as_slice())
        }
        SlotFacts::Same { dtype, shape, scalar } => match scalar {
            Some(bytes) => format!("{} {}", dtype.name(), hex(bytes)),
            None => format!("{} of {} elements", dtype.name(), numel(shape)),
        },
        SlotFacts::Plain(value) => value_text::<()>(&Tree::Value(value.clone())),
        SlotFacts::Other(kind) => (*kind).to_owned(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::from("0x"), |text, byte| format!("{text}{byte:02x}"))
}
