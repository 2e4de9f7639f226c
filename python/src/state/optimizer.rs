//! Optimizers: their state by names, a given state by their own ids, and the shape of a state that only a checkpoint knows yet.

use std::collections::HashMap;

use indexmap::IndexMap;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use reshard::formats::KeyPath;
use reshard::state::{
    self, Identity, LiveOptimizer, LoadSlot, LoadTarget, OptimizerState, ParamGroup, ParamLayout, RawOptimizer, SlotTensor,
    StateError, adopt_layouts, combine, dotted, flatten_optimizer, optim_state_to_load, read_optimizer_state, rekey,
    sharded_optim_state, unflatten_optimizer, with_whole_options,
};

use super::errors::RaiseState;
use super::model::{StateModel, tuple};
use super::objects::{Handle, Objects, whole, whole_dict};
use super::options::options_of;
use crate::checkpoint::code;
use crate::errors::invalid;
use crate::geometry::in_layout;
use crate::layout::ShardLayout;
use crate::leaves::{Code, Numbers};
use crate::reports::built;
use crate::tree::{key_from, key_object, key_path, path_tuple};

type Live = LiveOptimizer<Handle>;

/// A param_group of a live optimizer: members by identity, and everything else.
#[derive(FromPyObject)]
pub(crate) struct LiveGroup<'py> {
    params: Vec<u64>,
    options: Bound<'py, PyDict>,
}

/// An optimizer: its own state dict, and its groups.
#[derive(FromPyObject)]
pub(crate) struct OptimizerDescription<'py> {
    state_dict: Bound<'py, PyDict>,
    groups: Vec<LiveGroup<'py>>,
}

/// The layout of a sharded parameter, and the shape of what this rank holds of it.
#[derive(FromPyObject)]
pub(crate) struct LocalLayout<'py> {
    layout: PyRef<'py, ShardLayout>,
    local_shape: Numbers,
}

/// The state of optimizers by names. `layouts` are those of sharded parameters whose slots may be plain tensors of the local
/// shape.
#[pyfunction]
pub(crate) fn optimizer_state<'py>(
    py: Python<'py>,
    model: &StateModel,
    optimizers: Vec<OptimizerDescription<'py>>,
    describe: &Bound<'py, PyAny>,
    sharded: &Bound<'py, PyAny>,
    layouts: HashMap<String, LocalLayout<'py>>,
    options: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = options_of(options)?;
    options.check().or_raise_state(py)?;
    let mut objects = Objects::new(describe);
    let mut states = Vec::new();
    for optimizer in optimizers {
        let raw = match objects.tree(optimizer.state_dict.as_any()).map(whole)? {
            Some(raw) => RawOptimizer::from_tree(raw).or_raise_state(py)?,
            None => return Err(invalid(py, "an optimizer's own state can not be in pieces")),
        };
        let live = live_optimizer(py, optimizer.groups, &mut objects)?;
        states.push(sharded_optim_state(raw, &live, &model.names, &model.flats).or_raise_state(py)?);
    }
    let mut state = combine(states).or_raise_state(py)?;
    if !layouts.is_empty() {
        let layout = |local: LocalLayout<'_>| {
            ParamLayout::from_regions(&local.layout.shape, &local.local_shape.0, local.layout.regions.clone())
        };
        let layouts = layouts.into_iter().map(|(name, local)| Ok((name, in_layout(py, layout(local))?)));
        adopt_layouts(&mut state, &layouts.collect::<PyResult<_>>()?);
    }
    if !options.flatten_optimizer_state_dict {
        return Ok(objects.object(&state.into_tree(), sharded)?.cast_into::<PyDict>()?);
    }
    let flat = PyDict::new(py);
    for (key, value) in &flatten_optimizer(&state).or_raise_state(py)? {
        flat.set_item(key, objects.object(value, sharded)?)?;
    }
    Ok(flat)
}

/// What optimizers load.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct OptimizerPlan {
    loads: Vec<Py<OptimizerLoad>>,
    /// How the given state met them.
    report: Py<PyAny>,
}

/// What one optimizer loads.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct OptimizerLoad {
    /// Slots by the optimizer's own keys and by name, each a `KeptSlot` or a `BuiltSlot`.
    state: Py<PyDict>,
    user_state: Py<PyDict>,
    groups: Py<PyList>,
}

/// A slot that is taken as it is given.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct KeptSlot {
    value: Py<PyAny>,
}

/// A slot that is put together from parts of what is given.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct BuiltSlot {
    dtype: usize,
    shape: Py<PyTuple>,
    copies: Vec<Py<BoxCopy>>,
}

/// A copy of a box from one tensor into another. On each side it is a part of a row-major box that begins at an element.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct BoxCopy {
    source: Py<PyAny>,
    sizes: Py<PyTuple>,
    source_start: u64,
    source_box: Py<PyTuple>,
    source_at: Py<PyTuple>,
    target_start: u64,
    target_box: Py<PyTuple>,
    target_at: Py<PyTuple>,
}

/// What each optimizer loads of a given state dict, nested or flattened, by names or by ids.
#[expect(clippy::too_many_arguments, reason = "one argument for each argument of the Python function")]
#[pyfunction]
pub(crate) fn optimizer_to_load<'py>(
    py: Python<'py>,
    model: &StateModel,
    given: &Bound<'py, PyDict>,
    live: Vec<Vec<LiveGroup<'py>>>,
    describe: &Bound<'py, PyAny>,
    sharded: &Bound<'py, PyAny>,
    by_names: bool,
    options: &Bound<'py, PyAny>,
) -> PyResult<OptimizerPlan> {
    let options = options_of(options)?;
    let mut objects = Objects::new(describe);
    let live: Vec<Live> = live.into_iter().map(|groups| live_optimizer(py, groups, &mut objects)).collect::<PyResult<_>>()?;
    let target = if by_names { LoadTarget::Names } else { LoadTarget::Ids };
    let (state, left) = if given.contains("state")? || given.contains("param_groups")? {
        let raw = RawOptimizer::from_tree(objects.tree(given.as_any())?).or_raise_state(py)?;
        options.check_given(None, Some(raw.state.len() + raw.param_groups.len()), false).or_raise_state(py)?;
        (model.read(raw, &live).or_raise_state(py)?, Vec::new())
    } else {
        let mut flat = IndexMap::new();
        for (key, value) in given.iter() {
            flat.insert(key.extract::<String>()?, objects.tree(&value)?);
        }
        options.check_given(None, Some(flat.len()), false).or_raise_state(py)?;
        let whole: Vec<_> = live.iter().map(with_whole_options).collect();
        let (state, left) = unflatten_optimizer(&flat, &whole, &model.names).or_raise_state(py)?;
        (state, left.unexpected)
    };
    let (loads, mut report) =
        optim_state_to_load(state, &live, &model.names, &model.flats, target, &options).or_raise_state(py)?;
    report.unexpected.extend(left);
    let load = |load: &state::OptimizerLoad<Handle>| Py::new(py, load_object(py, load, &objects, sharded)?);
    let loads = loads.iter().map(load).collect::<PyResult<_>>()?;
    Ok(OptimizerPlan { loads, report: report_object(py, &report)?.unbind() })
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
    ) -> Result<OptimizerState<SlotTensor<Handle>>, StateError> {
        if !raw.is_keyed_by_id() {
            return OptimizerState::from_named(raw, &self.names);
        }
        let lifted: Vec<_> = live.iter().map(with_whole_options).collect();
        read_optimizer_state(raw, &lifted, &self.names)
    }
}

fn live_optimizer<'py>(py: Python<'py>, groups: Vec<LiveGroup<'py>>, objects: &mut Objects<'py>) -> PyResult<Live> {
    let mut param_groups = Vec::new();
    for group in groups {
        let options = whole_dict(objects.dict(&group.options)?);
        let options = options.ok_or_else(|| invalid(py, "an option of a param_group can not be in pieces"))?;
        param_groups.push(ParamGroup { params: group.params.into_iter().map(Identity).collect(), options });
    }
    Ok(LiveOptimizer { param_groups })
}

fn load_object<'py>(
    py: Python<'py>,
    load: &state::OptimizerLoad<Handle>,
    objects: &Objects<'py>,
    sharded: &Bound<'py, PyAny>,
) -> PyResult<OptimizerLoad> {
    let state = PyDict::new(py);
    for (key, slots) in &load.state {
        let made = PyDict::new(py);
        for (slot, value) in slots {
            let slot = key_object(py, slot)?;
            match value {
                LoadSlot::Keep(tree) => made.set_item(slot, KeptSlot { value: objects.object(tree, sharded)?.unbind() })?,
                LoadSlot::Build { dtype, shape, copies } => {
                    let copies = copies.iter().map(|copy| Py::new(py, copy_object(py, copy)?)).collect::<PyResult<_>>()?;
                    made.set_item(slot, BuiltSlot { dtype: code(*dtype), shape: tuple(py, shape)?, copies })?;
                }
            }
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
    let user_state = objects.dict_object(&load.user_state, sharded)?.unbind();
    Ok(OptimizerLoad { state: state.unbind(), user_state, groups: groups.unbind() })
}

fn copy_object(py: Python<'_>, copy: &state::BoxCopy<Handle>) -> PyResult<BoxCopy> {
    Ok(BoxCopy {
        source: copy.source.object(py).unbind(),
        sizes: tuple(py, &copy.sizes)?,
        source_start: copy.source_start,
        source_box: tuple(py, &copy.source_shape)?,
        source_at: tuple(py, &copy.source_at)?,
        target_start: copy.dest_start,
        target_box: tuple(py, &copy.dest_shape)?,
        target_at: tuple(py, &copy.dest_at)?,
    })
}

fn report_object<'py>(py: Python<'py>, report: &state::OptimizerReport) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    fields.set_item("missing", &report.missing)?;
    fields.set_item("absent", &report.absent)?;
    fields.set_item("unexpected", &report.unexpected)?;
    fields.set_item("zero_filled", report.zero_filled.iter().map(|(name, slot)| format!("{name}.{slot}")).collect::<Vec<_>>())?;
    fields.set_item("unmatched_groups", report.unmatched_groups.iter().map(|&(a, b)| vec![a, b]).collect::<Vec<_>>())?;
    built(py, "OptimizerReport", &fields)
}

/// An entry of a checkpoint below an optimizer.
#[derive(FromPyObject)]
pub(crate) struct StoredSlot<'py> {
    /// Its path below the optimizer.
    path: Bound<'py, PyTuple>,
    /// None for a value.
    dtype: Option<Code>,
    shape: Numbers,
}

/// What becomes of an entry of a checkpoint below an optimizer.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct PlannedSlot {
    key: String,
    path: Py<PyTuple>,
    /// The parameter it is a slot of.
    parameter: Option<String>,
    /// None for a value.
    dtype: Option<usize>,
    shape: Py<PyTuple>,
    /// Whether it has the layout of its parameter.
    by_parameter: bool,
}

/// What an optimizer's slots are, from a checkpoint's entries and the shapes of the parameters.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct SlotPlan {
    slots: Vec<Py<PlannedSlot>>,
    /// Names that are no parameters here.
    unknown: Vec<String>,
}

/// Plans slots.
#[pyfunction]
pub(crate) fn plan_slots(py: Python<'_>, params: HashMap<String, Numbers>, entries: Vec<StoredSlot<'_>>) -> PyResult<SlotPlan> {
    let params = params.into_iter().map(|(name, shape)| (name, shape.0)).collect();
    let paths: Vec<KeyPath> = entries.iter().map(|entry| key_path(&entry.path)).collect::<PyResult<_>>()?;
    let stored = entries.iter().zip(&paths).map(|(entry, path)| {
        let shape = entry.dtype.as_ref().map(|_| entry.shape.0.as_slice());
        state::StoredSlot { path, shape }
    });
    let plan = state::plan_slots(&params, stored);
    let mut slots = Vec::with_capacity(entries.len());
    for ((entry, path), slot) in entries.into_iter().zip(&paths).zip(plan.slots) {
        let planned = PlannedSlot {
            key: dotted(path),
            path: path_tuple(py, path)?.unbind(),
            parameter: slot.param,
            dtype: entry.dtype.map(|dtype| code(dtype.0)),
            shape: tuple(py, &entry.shape.0)?,
            by_parameter: slot.by_parameter,
        };
        slots.push(Py::new(py, planned)?);
    }
    Ok(SlotPlan { slots, unknown: plan.unknown_params })
}
