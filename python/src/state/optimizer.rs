//! Optimizers: their state by names, a given state by their own ids, the plan of a full state, and the shape of a state
//! that only a checkpoint knows yet.

use std::collections::HashMap;

use indexmap::IndexMap;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use reshard::layout::{Dims, LocalRegion, Region};
use reshard::state::{
    BoxCopy, CheckpointEntry, EntryFacts, FlatLoad, FlatLoadReport, FlatSlot, Identity, Inventory, LiveOptimizer, LoadTarget,
    OddSlots, OptimizerState, OptimizerTree, ParamGroup, ParamLayout, PhaseTimings, RawOptimizer, SlotFacts, SlotTensor,
    adopt_layouts, broadcast_plan, combine, flatten_optimizer, full_optim_state, inventory, optim_state_to_load,
    plan_sharded_optimizer, read_optimizer_state, rekey, set_optimizer_tree, sharded_optim_state,
};
use reshard::{KeyPath, Value};

use super::errors::RaiseState;
use super::model::StateModel;
use super::objects::{Handle, Objects, code, tuple, value_of, whole, whole_dict};
use super::options::{options_of, recipients_of};
use crate::errors::invalid;
use crate::leaves::dtype_of;
use crate::tree::{key_from, key_object, key_path};
use crate::value::to_python;

type Live = LiveOptimizer<Handle>;
/// Offsets, sizes, and offsets in the rank's memory.
type Part = (Vec<u64>, Vec<u64>, Vec<u64>);
/// Shape of the whole, shape of the rank's memory, and its parts.
type Layout = (Vec<u64>, Vec<u64>, Vec<Part>);

/// The state of optimizers by names. An optimizer is `(state_dict, live groups)`, a live group `(identities, options)`.
/// `layouts` are those of sharded parameters whose slots may be plain tensors of the local shape.
///
/// Gives `(state dict, inventory, seconds by phase)`: the inventory is what other ranks need to know to gather it.
#[pyfunction]
pub(crate) fn optimizer_state<'py>(
    py: Python<'py>,
    model: &StateModel,
    optimizers: &Bound<'py, PyList>,
    describe: &Bound<'py, PyAny>,
    sharded: &Bound<'py, PyAny>,
    layouts: HashMap<String, Layout>,
    options: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let options = options_of(options)?;
    options.check().or_raise_state(py)?;
    let mut objects = Objects::new(describe);
    let mut timings = PhaseTimings::default();
    let mut states = Vec::new();
    for optimizer in optimizers.iter() {
        let optimizer = optimizer.cast_into::<PyTuple>()?;
        let raw = match objects.tree(&optimizer.get_item(0)?).map(whole)? {
            Some(raw) => RawOptimizer::from_tree(raw).or_raise_state(py)?,
            None => return Err(invalid(py, "an optimizer's own state can not be in pieces")),
        };
        let live = live_optimizer(&optimizer.get_item(1)?, &mut objects)?;
        states.push(sharded_optim_state(raw, &live, &model.names, &model.flats, &mut timings).or_raise_state(py)?);
    }
    let mut state = combine(states).or_raise_state(py)?;
    if !layouts.is_empty() {
        let layouts = layouts.into_iter().map(|(name, parts)| Ok((name, layout(py, parts)?))).collect::<PyResult<_>>()?;
        adopt_layouts(&mut state, &layouts);
    }
    let facts = inventory_object(py, &inventory(&state))?;
    let object = match options.flatten_optimizer_state_dict {
        true => {
            let flat = flatten_optimizer(&state).or_raise_state(py)?;
            let built = PyDict::new(py);
            for (key, value) in &flat {
                built.set_item(key, objects.object(value, sharded)?)?;
            }
            built
        }
        false => objects.object(&state.into_tree(), sharded)?.cast_into::<PyDict>()?,
    };
    (object, facts, timings_object(py, &timings)?).into_pyobject(py)
}

/// What each optimizer loads of a given state dict, nested or flattened, by names or by ids: `(loads, report)`. A load is
/// `(slots by own key, user state, groups)`, a slot `(0, dtype, shape, copies)` or `(1, value)`, and a copy
/// `(tensor, start, box, at, sizes, start, box, at)`, source first.
#[expect(clippy::too_many_arguments, reason = "one argument for each argument of the Python function")]
#[pyfunction]
pub(crate) fn optimizer_to_load<'py>(
    py: Python<'py>,
    model: &StateModel,
    given: &Bound<'py, PyDict>,
    live: &Bound<'py, PyList>,
    describe: &Bound<'py, PyAny>,
    sharded: &Bound<'py, PyAny>,
    by_names: bool,
    options: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let options = options_of(options)?;
    let mut objects = Objects::new(describe);
    let live: Vec<Live> = live.iter().map(|groups| live_optimizer(&groups, &mut objects)).collect::<PyResult<_>>()?;
    let target = if by_names { LoadTarget::Names } else { LoadTarget::Ids };
    let (loads, report) = if given.contains("state")? || given.contains("param_groups")? {
        let raw = RawOptimizer::from_tree(objects.tree(given.as_any())?).or_raise_state(py)?;
        options.check_given(None, Some(raw.state.len() + raw.param_groups.len()), false).or_raise_state(py)?;
        let state = model.read(raw, &live).or_raise_state(py)?;
        optim_state_to_load(state, &live, &model.names, &model.flats, target, &options).or_raise_state(py)?
    } else {
        let mut flat = IndexMap::new();
        for (key, value) in given.iter() {
            flat.insert(key.extract::<String>()?, objects.tree(&value)?);
        }
        set_optimizer_tree(&model.tree, OptimizerTree::Flattened(flat), &live, target, &options).or_raise_state(py)?
    };
    let list = PyList::empty(py);
    for load in &loads {
        list.append(load_object(py, load, &objects, sharded)?)?;
    }
    (list, report_object(py, &report)?).into_pyobject(py)
}

/// An optimizer's state with other names for its parameters, by a mapping from the names it has.
#[pyfunction]
pub(crate) fn rekey_optimizer<'py>(
    py: Python<'py>,
    state: &Bound<'py, PyDict>,
    mapping: &Bound<'py, PyDict>,
    describe: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut objects = Objects::new(describe);
    let Some(raw) = whole(objects.tree(state.as_any())?) else {
        return Err(invalid(py, "an optimizer's state can only be given other names where it is whole"));
    };
    let mapping = mapping.iter().map(|(from, to)| Ok((key_from(&from)?, key_from(&to)?))).collect::<PyResult<_>>()?;
    let rekeyed = RawOptimizer::from_tree(raw).and_then(|raw| rekey(raw, &mapping)).or_raise_state(py)?;
    // Whole tensors need nothing to make parts with.
    objects.object(&rekeyed.into_tree().map(&mut SlotTensor::Whole), describe)
}

impl StateModel {
    /// Reads any given state: ids mean what they mean to the live optimizer.
    fn read(
        &self,
        raw: RawOptimizer<SlotTensor<Handle>>,
        live: &[Live],
    ) -> Result<OptimizerState<SlotTensor<Handle>>, reshard::state::StateError> {
        if !raw.is_keyed_by_id() {
            return OptimizerState::from_named(raw, &self.names);
        }
        let lifted: Vec<LiveOptimizer<SlotTensor<Handle>>> = live
            .iter()
            .map(|optimizer| LiveOptimizer {
                param_groups: optimizer
                    .param_groups
                    .iter()
                    .map(|group| ParamGroup {
                        params: group.params.clone(),
                        options: group.options.iter().map(|(k, v)| (k.clone(), v.clone().map(&mut SlotTensor::Whole))).collect(),
                    })
                    .collect(),
            })
            .collect();
        read_optimizer_state(raw, &lifted, &self.names)
    }
}

fn live_optimizer<'py>(groups: &Bound<'py, PyAny>, objects: &mut Objects<'py>) -> PyResult<Live> {
    let mut param_groups = Vec::new();
    for group in groups.cast::<PyList>()?.iter() {
        let group = group.cast_into::<PyTuple>()?;
        let identities: Vec<u64> = group.get_item(0)?.extract()?;
        let options = objects.dict(group.get_item(1)?.cast::<PyDict>()?)?;
        let options =
            whole_dict(options).ok_or_else(|| invalid(groups.py(), "an option of a param_group can not be in pieces"))?;
        param_groups.push(ParamGroup { params: identities.into_iter().map(Identity).collect(), options });
    }
    Ok(LiveOptimizer { param_groups })
}

fn layout(py: Python<'_>, (shape, local, parts): Layout) -> PyResult<ParamLayout> {
    let problem = |error: reshard::layout::LayoutError| invalid(py, error.to_string());
    let mut regions = Vec::new();
    for (offsets, sizes, at) in parts {
        let global = Region::new(&offsets, &sizes).map_err(problem)?;
        regions.push(LocalRegion { global, local: Dims::from_vec(at) });
    }
    ParamLayout::from_regions(&shape, &local, regions).map_err(problem)
}

fn load_object<'py>(
    py: Python<'py>,
    load: &FlatLoad<Handle>,
    objects: &Objects<'py>,
    sharded: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyTuple>> {
    let state = PyDict::new(py);
    for (key, slots) in &load.state {
        let made = PyDict::new(py);
        for (slot, value) in slots {
            let described = match value {
                FlatSlot::Keep(tree) => (1, objects.object(tree, sharded)?).into_pyobject(py)?.into_any(),
                FlatSlot::Build { dtype, shape, copies } => {
                    let list = PyList::empty(py);
                    for copy in copies {
                        list.append(copy_object(py, copy)?)?;
                    }
                    (0, code(*dtype), tuple(py, shape)?, list).into_pyobject(py)?.into_any()
                }
            };
            made.set_item(key_object(py, slot)?, described)?;
        }
        state.set_item(key_object(py, key)?, made)?;
    }
    let groups = PyList::empty(py);
    for group in &load.param_groups {
        let options = objects.dict_object(&group.options, sharded)?;
        let params = group.params.iter().map(|key| key_object(py, key)).collect::<PyResult<Vec<_>>>()?;
        options.set_item("params", PyList::new(py, params)?)?;
        groups.append(options)?;
    }
    (state, objects.dict_object(&load.user_state, sharded)?, groups).into_pyobject(py)
}

fn copy_object<'py>(py: Python<'py>, copy: &BoxCopy<Handle>) -> PyResult<Bound<'py, PyTuple>> {
    let source = copy.source.object(py);
    let (from, at) = (tuple(py, &copy.source_shape)?, tuple(py, &copy.source_at)?);
    let (to, to_at) = (tuple(py, &copy.dest_shape)?, tuple(py, &copy.dest_at)?);
    (source, copy.source_start, from, at, tuple(py, &copy.sizes)?, copy.dest_start, to, to_at).into_pyobject(py)
}

fn report_object<'py>(py: Python<'py>, report: &FlatLoadReport) -> PyResult<Bound<'py, PyDict>> {
    let object = PyDict::new(py);
    object.set_item("missing", &report.missing)?;
    object.set_item("absent", &report.absent)?;
    object.set_item("unexpected", &report.unexpected)?;
    object.set_item("zero_filled", &report.zero_filled)?;
    object.set_item("unmatched_groups", &report.unmatched_groups)?;
    object.set_item("seconds", timings_object(py, &report.timings)?)?;
    Ok(object)
}

fn timings_object<'py>(py: Python<'py>, timings: &PhaseTimings) -> PyResult<Bound<'py, PyDict>> {
    let object = PyDict::new(py);
    object.set_item("preprocess", timings.preprocess.as_secs_f64())?;
    object.set_item("gather", timings.gather.as_secs_f64())?;
    object.set_item("reshard", timings.reshard.as_secs_f64())?;
    object.set_item("flatten", timings.flatten.as_secs_f64())?;
    object.set_item("rekey", timings.rekey.as_secs_f64())?;
    Ok(object)
}

fn inventory_object<'py>(py: Python<'py>, inventory: &Inventory) -> PyResult<Bound<'py, PyDict>> {
    let object = PyDict::new(py);
    for (name, slots) in inventory {
        let own = PyDict::new(py);
        for (slot, facts) in slots {
            let described = match facts {
                SlotFacts::Regions { dtype, shape, regions } => {
                    let regions: Vec<(Vec<u64>, Vec<u64>)> =
                        regions.iter().map(|region| (region.offsets().to_vec(), region.sizes().to_vec())).collect();
                    ("regions", code(*dtype), shape.to_vec(), regions).into_pyobject(py)?.into_any()
                }
                SlotFacts::Same { dtype, shape, scalar } => {
                    let scalar = scalar.as_ref().map(|bytes| PyBytes::new(py, bytes));
                    ("same", code(*dtype), shape.to_vec(), scalar).into_pyobject(py)?.into_any()
                }
                SlotFacts::Plain(value) => ("plain", to_python(py, value)?).into_pyobject(py)?.into_any(),
                SlotFacts::Other(kind) => ("other", *kind).into_pyobject(py)?.into_any(),
            };
            own.set_item(slot, described)?;
        }
        object.set_item(name, own)?;
    }
    Ok(object)
}

fn inventory_from(object: &Bound<'_, PyDict>) -> PyResult<Inventory> {
    let py = object.py();
    let mut inventory = Inventory::new();
    for (name, slots) in object.iter() {
        let mut own = IndexMap::new();
        for (slot, facts) in slots.cast::<PyDict>()?.iter() {
            let facts = facts.cast_into::<PyTuple>()?;
            let kind: String = facts.get_item(0)?.extract()?;
            let described = match kind.as_str() {
                "regions" => {
                    let regions: Vec<(Vec<u64>, Vec<u64>)> = facts.get_item(3)?.extract()?;
                    let region = |(offsets, sizes): &(Vec<u64>, Vec<u64>)| {
                        Region::new(offsets, sizes).map_err(|error| invalid(py, error.to_string()))
                    };
                    SlotFacts::Regions {
                        dtype: dtype_of(py, facts.get_item(1)?.extract()?)?,
                        shape: Dims::from_vec(facts.get_item(2)?.extract()?),
                        regions: regions.iter().map(region).collect::<PyResult<_>>()?,
                    }
                }
                "same" => SlotFacts::Same {
                    dtype: dtype_of(py, facts.get_item(1)?.extract()?)?,
                    shape: Dims::from_vec(facts.get_item(2)?.extract()?),
                    scalar: facts.get_item(3)?.extract::<Option<Vec<u8>>>()?,
                },
                "plain" => SlotFacts::Plain(value_of(&facts.get_item(1)?)?.unwrap_or(Value::None)),
                _ => SlotFacts::Other("an opaque value"),
            };
            own.insert(slot.extract()?, described);
        }
        inventory.insert(name.extract()?, own);
    }
    Ok(inventory)
}

/// The plan of a full state from every rank's inventory: `(steps, values)`, a step `(name, slot, dtype, shape, parts)` with
/// parts `(rank, offsets, sizes)`, a value `(name, slot, rank)`. `ranks` receive whole tensors; None: all.
#[pyfunction]
pub(crate) fn full_slots<'py>(
    py: Python<'py>,
    inventories: Vec<Bound<'py, PyDict>>,
    ranks: Option<Vec<u64>>,
    cpu_offload: bool,
) -> PyResult<Bound<'py, PyTuple>> {
    let inventories: Vec<Inventory> = inventories.iter().map(inventory_from).collect::<PyResult<_>>()?;
    let plan = full_optim_state(&inventories, recipients_of(ranks), cpu_offload).or_raise_state(py)?;
    let steps = PyList::empty(py);
    for (step, (name, slot)) in plan.tensors.steps.iter().zip(&plan.slots) {
        let parts: Vec<(u64, Vec<u64>, Vec<u64>)> =
            step.from.iter().map(|part| (part.rank, part.region.offsets().to_vec(), part.region.sizes().to_vec())).collect();
        steps.append((name, slot, code(step.dtype), tuple(py, &step.shape)?, parts))?;
    }
    (steps, plan.values).into_pyobject(py)
}

/// Regions by key, each as offsets and sizes.
type WantedRegions = Vec<(String, Vec<(Vec<u64>, Vec<u64>)>)>;

/// Who gets what of the tensors that one rank has, one step for each tensor in the order offered: `(steps, missing)`, a
/// step `(key, dtype, shape, parts)` with parts `(rank, offsets, sizes)`. `offered` are `(key, dtype, shape)`, `wanted` is
/// every rank's `(key, regions)`.
#[pyfunction]
pub(crate) fn broadcast_steps<'py>(
    py: Python<'py>,
    owner: u64,
    offered: Vec<(String, usize, Vec<u64>)>,
    wanted: Vec<WantedRegions>,
) -> PyResult<Bound<'py, PyTuple>> {
    let offered = offered.into_iter().map(|(key, dtype, shape)| Ok((key, (dtype_of(py, dtype)?, Dims::from_vec(shape)))));
    let offered = offered.collect::<PyResult<IndexMap<_, _>>>()?;
    let mut by_key: IndexMap<String, Vec<(u64, Region)>> = IndexMap::new();
    for (rank, wanted) in (0_u64..).zip(wanted) {
        for (key, regions) in wanted {
            let entry = by_key.entry(key).or_default();
            for (offsets, sizes) in regions {
                entry.push((rank, Region::new(&offsets, &sizes).map_err(|error| invalid(py, error.to_string()))?));
            }
        }
    }
    let (plan, missing) = broadcast_plan(owner, &offered, &by_key).or_raise_state(py)?;
    let steps = PyList::empty(py);
    for step in &plan.steps {
        let parts: Vec<(u64, Vec<u64>, Vec<u64>)> =
            step.to.iter().map(|part| (part.rank, part.region.offsets().to_vec(), part.region.sizes().to_vec())).collect();
        steps.append((&step.key, code(step.dtype), tuple(py, &step.shape)?, parts))?;
    }
    (steps, missing).into_pyobject(py)
}

/// Key, path below the optimizer, dtype, and shape.
type StoredEntry<'py> = (String, Bound<'py, PyTuple>, Option<usize>, Vec<u64>);

/// What an optimizer's slots are, from a checkpoint's keys and the shapes of the parameters: a list of
/// `(key, path, parameter or None, dtype or None, shape, by parameter)`. Without a dtype it is a value; "by parameter" says
/// that the slot has the layout of its parameter. Entries are `(key, path below the optimizer, dtype or None, shape)`.
#[pyfunction]
pub(crate) fn plan_optimizer<'py>(
    py: Python<'py>,
    params: HashMap<String, Vec<u64>>,
    entries: Vec<StoredEntry<'py>>,
) -> PyResult<Bound<'py, PyTuple>> {
    let layouts = params
        .into_iter()
        .map(|(name, shape)| {
            let shape = Dims::from_vec(shape);
            (name, ParamLayout { local_shape: shape.clone(), shape, pieces: Vec::new() })
        })
        .collect();
    let paths: Vec<KeyPath> = entries.iter().map(|(_, path, ..)| key_path(path)).collect::<PyResult<_>>()?;
    let mut facts = Vec::new();
    for ((key, _, dtype, shape), path) in entries.iter().zip(&paths) {
        let facts_of = match dtype {
            Some(dtype) => EntryFacts::Tensor { dtype: dtype_of(py, *dtype)?, shape: Dims::from_slice(shape) },
            None => EntryFacts::Bytes,
        };
        facts.push(CheckpointEntry { key, path, facts: facts_of });
    }
    let plan = plan_sharded_optimizer(&layouts, "", facts, OddSlots::Whole, &IndexMap::new()).or_raise_state(py)?;
    let list = PyList::empty(py);
    for (key, path, dtype, shape) in &entries {
        match plan.tensors.get(key) {
            Some(target) => list.append((key, path, &target.param, dtype, tuple(py, shape)?, !target.replicated))?,
            None => list.append((key, path, None::<String>, None::<usize>, tuple(py, &[])?, false))?,
        }
    }
    (list, plan.unknown_params).into_pyobject(py)
}
