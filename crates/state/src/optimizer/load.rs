//! Optimizer state by names into what this rank's optimizer loads: flat tensors of its own shard, or its part of every
//! original parameter. The result says how each tensor is made; whoever holds the memory makes it.

use indexmap::{IndexMap, IndexSet};
use reshard_formats::{DType, Value};
use reshard_layout::Dims;

use super::groups::{match_groups, share_user_state, value_text};
use super::slot::copies_for;
use super::state::same_tensor;
use crate::{
    BoxCopy, Dict, FlatModel, FlatParameter, Identity, Key, LiveOptimizer, Names, OptimizerState, ParamGroup, SlotTensor,
    StateDictOptions, StateError, TensorLike, Tree, numel,
};

/// What the loading optimizer calls its parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadTarget {
    /// Ids: `torch.optim`.
    #[default]
    Ids,
    /// Names as the live model has them: `NamedOptimizer`, `KeyedOptimizer`. Those want every slot of every parameter,
    /// so parameters of which this rank holds nothing get empty ones.
    Names,
}

/// How one slot is made.
#[derive(Clone, Debug)]
pub enum LoadSlot<T> {
    /// A new tensor: zeros, and then these copies.
    Build {
        /// Element type.
        dtype: DType,
        /// Shape.
        shape: Dims,
        /// What goes where; elements are counted row-major.
        copies: Vec<BoxCopy<T>>,
    },
    /// Taken as it is.
    Keep(Tree<SlotTensor<T>>),
}

/// What this rank's optimizer loads.
#[derive(Clone, Debug)]
pub struct OptimizerLoad<T> {
    /// Slots by this rank's own key for the parameter.
    pub state: IndexMap<Key, IndexMap<Key, LoadSlot<T>>>,
    /// State that belongs to no parameter.
    pub user_state: Dict<SlotTensor<T>>,
    /// Groups in this rank's order.
    pub param_groups: Vec<ParamGroup<Key, SlotTensor<T>>>,
}

/// How the given state met this rank's optimizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OptimizerReport {
    /// Parameters of this rank's optimizer that the given state does not know.
    pub missing: Vec<String>,
    /// Parameters that had no state when it was made.
    pub absent: Vec<String>,
    /// Parameters of the given state that this rank's optimizer does not train.
    pub unexpected: Vec<String>,
    /// Members without state whose part of a flat slot is zeros: parameter and slot.
    pub zero_filled: Vec<(String, String)>,
    /// Live groups (optimizer, group) that have no counterpart; they keep their options.
    pub unmatched_groups: Vec<(usize, usize)>,
}

/// Plans loading optimizer state into optimizers over a model, flat parameters or not. One plan per optimizer.
pub fn optim_state_to_load<T: TensorLike>(
    given: OptimizerState<SlotTensor<T>>,
    live: &[LiveOptimizer<T>],
    names: &Names,
    flats: &FlatModel,
    target: LoadTarget,
    options: &StateDictOptions,
) -> Result<(Vec<OptimizerLoad<T>>, OptimizerReport), StateError> {
    options.check()?;
    let mut report = OptimizerReport::default();
    let given_state: IndexMap<String, &Dict<SlotTensor<T>>> =
        given.state.iter().map(|(name, slots)| (names.primary(name).to_owned(), slots)).collect();
    let listed: IndexSet<&str> =
        given.param_groups.iter().flat_map(|group| &group.params).map(|name| names.primary(name)).collect();
    let mut loads = Vec::new();
    let mut members: Vec<Vec<Vec<String>>> = Vec::new();
    let mut keys: Vec<Vec<Key>> = Vec::new();
    for optimizer in live {
        let mut load = OptimizerLoad { state: IndexMap::new(), user_state: Dict::new(), param_groups: Vec::new() };
        let mut own_members = Vec::new();
        let mut own_keys = Vec::new();
        for (id, identity) in (0_i64..).zip(optimizer.members()) {
            let param = LiveParam::find(id, identity, names, flats, target)?;
            for name in &param.names {
                // A frozen parameter may never have been in an optimizer: nothing is missing.
                let frozen = names.get(name).is_some_and(|leaf| !leaf.requires_grad);
                match given_state.contains_key(name) {
                    true => {}
                    false if frozen || listed.contains(name.as_str()) => report.absent.push(name.clone()),
                    false => report.missing.push(name.clone()),
                }
            }
            let slots = match param.flat {
                Some((flat, None)) => flatten_members(flat, &given_state, &mut report)?,
                Some((flat, Some(member))) => shard_member(flat, member, &given_state, target)?,
                None => {
                    let own = param.names.first().and_then(|name| given_state.get(name));
                    let keep = |(slot, value): (&Key, &Tree<SlotTensor<T>>)| (slot.clone(), LoadSlot::Keep(value.clone()));
                    own.map(|slots| slots.iter().map(keep).collect()).unwrap_or_default()
                }
            };
            if !slots.is_empty() {
                load.state.insert(param.key.clone(), slots);
            }
            own_members.push(param.names);
            own_keys.push(param.key);
        }
        loads.push(load);
        members.push(own_members);
        keys.push(own_keys);
    }
    let known: IndexSet<&str> = members.iter().flatten().flatten().map(|name| names.primary(name)).collect();
    // An optimizer that had not run has no slots that could be missing. Pipeline stages that saved their groups under one key
    // have left those of one stage, which lists its own parameters.
    if given_state.is_empty() && known.iter().any(|name| listed.contains(name)) {
        report.absent.append(&mut report.missing);
    }
    let extra: IndexSet<&str> = given_state.keys().map(String::as_str).chain(listed.iter().copied()).collect();
    report.unexpected = extra.into_iter().filter(|name| !known.contains(name)).map(str::to_owned).collect();
    if options.strict && !report.missing.is_empty() {
        let (missing, unexpected) = (report.missing.clone(), report.unexpected.clone());
        crate::Differences { missing, unexpected, ..Default::default() }.into_result(true)?;
    }
    let (user_states, unclaimed) = share_user_state(given.user_state, given.owned_state, &members, names);
    report.unexpected.extend(unclaimed);
    for (load, user_state) in loads.iter_mut().zip(user_states) {
        load.user_state = user_state;
    }
    let whole: Vec<LiveOptimizer<SlotTensor<T>>> = live.iter().map(with_whole_options).collect();
    let (groups, unmatched) = match_groups(&given.param_groups, &whole, &members, names)?;
    report.unmatched_groups = unmatched;
    for (((load, optimizer), groups), keys) in loads.iter_mut().zip(live).zip(groups).zip(keys) {
        let mut keys = keys.into_iter();
        for (group, options) in optimizer.param_groups.iter().zip(groups) {
            let params = keys.by_ref().take(group.params.len()).collect();
            load.param_groups.push(ParamGroup { params, options });
        }
    }
    Ok((loads, report))
}

/// A parameter of a live optimizer: what it is called and which flat parameter it is or belongs to.
struct LiveParam<'a> {
    key: Key,
    names: Vec<String>,
    flat: Option<(&'a FlatParameter, Option<usize>)>,
}

impl<'a> LiveParam<'a> {
    fn find(
        id: i64,
        identity: Identity,
        names: &Names,
        flats: &'a FlatModel,
        target: LoadTarget,
    ) -> Result<LiveParam<'a>, StateError> {
        let whole = flats.of_identity(identity);
        let own: Vec<String> = match whole {
            Some(flat) => flat.members().iter().map(|member| member.name.clone()).collect(),
            None => names.of_identity(identity).into_iter().map(str::to_owned).collect(),
        };
        let Some(first) = own.first() else {
            let reason = format!("parameter {id} of the optimizer is not a parameter of the model");
            return Err(StateError::InvalidOptimizerState { reason });
        };
        let key = match target {
            LoadTarget::Ids => Key::Int(id),
            LoadTarget::Names => Key::from(names.get(first).map_or(first.as_str(), |leaf| leaf.raw.as_str())),
        };
        let member = flats.of_member(first).map(|(flat, member)| (flat, Some(member)));
        Ok(LiveParam { key, flat: whole.map(|flat| (flat, None)).or(member), names: own })
    }
}

/// A live optimizer as one whose tensors may come in parts: all of them are whole.
pub fn with_whole_options<T: Clone>(live: &LiveOptimizer<T>) -> LiveOptimizer<SlotTensor<T>> {
    let whole = |(key, value): (&Key, &Tree<T>)| (key.clone(), value.clone().map(&mut SlotTensor::Whole));
    let groups = live.param_groups.iter();
    let groups =
        groups.map(|group| ParamGroup { params: group.params.clone(), options: group.options.iter().map(whole).collect() });
    LiveOptimizer { param_groups: groups.collect() }
}

fn is_none<T>(tree: &Tree<T>) -> bool {
    matches!(tree, Tree::Value(Value::None))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Tensor,
    Scalar,
    Plain,
}

fn class<T: TensorLike>(value: &Tree<SlotTensor<T>>, member: &[u64]) -> Class {
    match value {
        Tree::Tensor(tensor) if tensor.shape().is_empty() => Class::Scalar,
        // One element for a parameter that has more: a scalar that happens to have a dimension.
        Tree::Tensor(tensor) if tensor.numel() == 1 && tensor.shape() != member => Class::Scalar,
        Tree::Tensor(_) => Class::Tensor,
        _ => Class::Plain,
    }
}

/// The slots of a flat parameter from those of its members.
fn flatten_members<T: TensorLike>(
    flat: &FlatParameter,
    given: &IndexMap<String, &Dict<SlotTensor<T>>>,
    report: &mut OptimizerReport,
) -> Result<IndexMap<Key, LoadSlot<T>>, StateError> {
    let states: Vec<Option<&Dict<SlotTensor<T>>>> =
        flat.members().iter().map(|member| given.get(&member.name).copied().filter(|slots| !slots.is_empty())).collect();
    let mut with_state = flat.members().iter().zip(&states).filter_map(|(member, state)| Some((member, (*state)?)));
    let Some((first, slots)) = with_state.next() else {
        return Ok(IndexMap::new());
    };
    let differ =
        |slot: &str, reason: String| StateError::FlatMembers { flat: flat.name().to_owned(), slot: slot.to_owned(), reason };
    for (member, other) in with_state {
        let lacking = |a: &Dict<SlotTensor<T>>, b: &Dict<SlotTensor<T>>| a.keys().find(|slot| !b.contains_key(*slot)).cloned();
        if let Some(slot) = lacking(slots, other) {
            return Err(differ(&slot.to_string(), format!("'{}' has it and '{}' has not", first.name, member.name)));
        }
        if let Some(slot) = lacking(other, slots) {
            return Err(differ(&slot.to_string(), format!("'{}' has it and '{}' has not", member.name, first.name)));
        }
    }
    let mut result = IndexMap::new();
    for slot in slots.keys() {
        let values: Vec<Option<&Tree<SlotTensor<T>>>> =
            states.iter().map(|state| state.and_then(|state| state.get(slot)).filter(|value| !is_none(value))).collect();
        result.insert(slot.clone(), flatten_slot(flat, &slot.to_string(), &values, &differ, report)?);
    }
    Ok(result)
}

fn flatten_slot<T: TensorLike>(
    flat: &FlatParameter,
    slot: &str,
    values: &[Option<&Tree<SlotTensor<T>>>],
    differ: &dyn Fn(&str, String) -> StateError,
    report: &mut OptimizerReport,
) -> Result<LoadSlot<T>, StateError> {
    let present: Vec<(usize, &Tree<SlotTensor<T>>)> =
        values.iter().enumerate().filter_map(|(index, value)| Some((index, (*value)?))).collect();
    let name = |index: usize| flat.members().get(index).map_or("", |member| member.name.as_str());
    let Some((first, value)) = present.first().copied() else {
        return Ok(LoadSlot::Keep(Tree::Value(Value::None)));
    };
    let kind = |index: usize, value: &Tree<SlotTensor<T>>| class(value, flat.members()[index].whole_shape());
    let any_tensor = present.iter().any(|(index, value)| kind(*index, value) == Class::Tensor);
    // A parameter without dimensions has slots without dimensions; beside others it is one element of a flat slot.
    let kind = |index: usize, value: &Tree<SlotTensor<T>>| match kind(index, value) {
        Class::Scalar if any_tensor && flat.members()[index].whole_shape().is_empty() => Class::Tensor,
        other => other,
    };
    let expected = kind(first, value);
    if let Some((other, _)) = present.iter().find(|(index, value)| kind(*index, value) != expected) {
        return Err(differ(slot, format!("it is of one kind for '{}' and of another for '{}'", name(first), name(*other))));
    }
    if expected != Class::Tensor {
        let differ =
            |slot: &str, reason: String| StateError::FlatScalars { flat: flat.name().to_owned(), slot: slot.to_owned(), reason };
        let missing: Vec<&str> = (0..values.len()).filter(|index| values[*index].is_none()).map(name).collect();
        if !missing.is_empty() {
            // No value and some value are not the same: for Adam, no step means the most bias correction.
            return Err(differ(slot, format!("'{}' has a value and {} have none", name(first), quoted(&missing))));
        }
        if let Some((other, second)) = present.iter().find(|(_, other)| !other.same_as(value, &same_tensor)) {
            let (a, b) = (scalar_text(value), scalar_text(second));
            return Err(differ(slot, format!("it is {a} for '{}' and {b} for '{}'", name(first), name(*other))));
        }
        return Ok(LoadSlot::Keep(value.clone()));
    }
    let mut dtype: Option<(DType, usize)> = None;
    let mut copies = Vec::new();
    for (index, member) in flat.members().iter().enumerate() {
        let Some(Tree::Tensor(tensor)) = values[index] else {
            report.zero_filled.push((member.name.clone(), slot.to_owned()));
            continue;
        };
        if tensor.shape() != member.whole_shape().as_slice() {
            return Err(StateError::SlotShape {
                param: member.name.clone(),
                slot: slot.to_owned(),
                found: tensor.shape().to_vec(),
                expected: member.whole_shape().to_vec(),
            });
        }
        match dtype {
            Some((known, other)) if known != tensor.dtype() => {
                let (a, b) = (known.name(), tensor.dtype().name());
                return Err(differ(slot, format!("it is {a} for '{}' and {b} for '{}'", name(other), member.name)));
            }
            _ => dtype = Some((tensor.dtype(), index)),
        }
        let rank = flat.sharding().rank;
        let Some(held) = flat.member_range(index, rank) else {
            continue;
        };
        let pieces = tensor.pieces().map_err(StateError::layout(&member.name))?;
        for piece in flat.member_regions(index, rank)? {
            copies.extend(copies_for((&member.name, slot), &pieces, &piece.region, held.in_shard + piece.start)?);
        }
    }
    let dtype = dtype.map_or(flat.dtype(), |(dtype, _)| dtype);
    Ok(LoadSlot::Build { dtype, shape: Dims::from_slice(&[flat.shard_len()]), copies })
}

/// This rank's part of the slots of an original parameter.
fn shard_member<T: TensorLike>(
    flat: &FlatParameter,
    index: usize,
    given: &IndexMap<String, &Dict<SlotTensor<T>>>,
    target: LoadTarget,
) -> Result<IndexMap<Key, LoadSlot<T>>, StateError> {
    let member = &flat.members()[index];
    let mut result = IndexMap::new();
    let Some(slots) = given.get(&member.name) else {
        return Ok(result);
    };
    let rank = flat.sharding().rank;
    let held = flat.member_range(index, rank);
    // Of a parameter without elements every rank holds all there is.
    if held.is_none() && numel(member.whole_shape()) > 0 && target == LoadTarget::Ids {
        return Ok(result);
    }
    let length = held.map_or(0, |held| held.range.end - held.range.start);
    for (slot, value) in *slots {
        let made = match value {
            Tree::Tensor(tensor) if !tensor.shape().is_empty() && tensor.shape() == member.whole_shape().as_slice() => {
                let pieces = tensor.pieces().map_err(StateError::layout(&member.name))?;
                let regions = flat.member_regions(index, rank)?;
                let mut copies = Vec::new();
                for piece in &regions {
                    copies.extend(copies_for((&member.name, &slot.to_string()), &pieces, &piece.region, piece.start)?);
                }
                let shape = if flat.is_sharded() { Dims::from_slice(&[length]) } else { member.shape.clone() };
                LoadSlot::Build { dtype: tensor.dtype(), shape, copies }
            }
            Tree::Tensor(tensor) if tensor.numel() != 1 && flat.is_sharded() => {
                return Err(StateError::SlotShape {
                    param: member.name.clone(),
                    slot: slot.to_string(),
                    found: tensor.shape().to_vec(),
                    expected: member.whole_shape().to_vec(),
                });
            }
            other => LoadSlot::Keep(other.clone()),
        };
        result.insert(slot.clone(), made);
    }
    Ok(result)
}

fn quoted(names: &[&str]) -> String {
    crate::error::list(names, |name| format!("'{name}'"))
}

/// A scalar for a message, read as what it most likely is.
fn scalar_text<T: TensorLike>(value: &Tree<SlotTensor<T>>) -> String {
    let Tree::Tensor(tensor) = value else {
        return value_text(value);
    };
    let number = match (tensor.dtype(), tensor.scalar()) {
        (DType::Float32, Some(bytes)) => bytes.try_into().ok().map(f32::from_le_bytes).map(|number| number.to_string()),
        (DType::Float64, Some(bytes)) => bytes.try_into().ok().map(f64::from_le_bytes).map(|number| number.to_string()),
        (DType::Int64, Some(bytes)) => bytes.try_into().ok().map(i64::from_le_bytes).map(|number| number.to_string()),
        (_, Some(bytes)) => Some(format!("{bytes:02x?}")),
        _ => None,
    };
    format!("{} ({})", number.unwrap_or_else(|| "a tensor".to_owned()), tensor.dtype().name())
}
