//! The description of a model, as Python hands it over once, and every question about names that it answers.
//!
//! A module is `(wrapper, parameters, buffers, extra_state, manages, children)`:
//! - wrapper: None, a name, or a dict of name modifiers
//! - parameters: `(name, identity, requires_grad, dtype or None, shape, flat or None)`
//! - buffers: `(name, identity, persistent)`
//! - manages: the flat parameter behind original parameters, or None
//! - children: `(name, module)`
//!
//! A flat parameter is `(name, dtype, members, extents, strategy, rank, world, use_orig_params)` with members
//! `(name, shape, requires_grad, aliases)` and extents `(member or None, numel)`.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use reshard::layout::Dims;
use reshard::state::{
    Buffer, Extent, FlatMember, FlatModel, FlatParameter, FlatSharding, Identity, LeafKind, MemberSlice, ModelEntry, ModuleTree,
    Names, Parameter, ShardingStrategy, StateError, TensorFacts, Wrapper, canonical_below, get_model_state, set_model_state,
};

use super::errors::RaiseState;
use super::objects::tuple;
use super::options::options_of;
use crate::errors::invalid;
use crate::leaves::{dims, dtype_of};

/// A model's modules, wrappers, parameters and flat parameters.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct StateModel {
    pub(super) tree: ModuleTree,
    pub(super) names: Names,
    pub(super) flats: FlatModel,
}

#[pymethods]
impl StateModel {
    #[new]
    fn new(py: Python<'_>, module: &Bound<'_, PyTuple>) -> PyResult<StateModel> {
        let tree = module_tree(module)?;
        let names = Names::of(&tree).or_raise_state(py)?;
        let flats = FlatModel::of(&tree).or_raise_state(py)?;
        Ok(StateModel { tree, names, flats })
    }

    /// The canonical forms of names in the live model.
    fn canonical(&self, names: Vec<String>) -> Vec<String> {
        names.iter().map(|name| canonical_below(&self.tree, name)).collect()
    }

    /// All parameters: `(name, identity, flat or None)`, aliases included, flat as in [`StateModel::entries`].
    fn parameters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for leaf in self.names.leaves().filter(|leaf| leaf.kind == LeafKind::Parameter) {
            list.append((&leaf.name, leaf.identity.map(|identity| identity.0), self.flat_of(py, &leaf.name)?))?;
        }
        Ok(list)
    }

    /// The name under which a parameter is stored, whichever of its names is given.
    fn primary(&self, name: &str) -> String {
        self.names.primary(name).to_owned()
    }

    /// The name most like one that is not there.
    fn nearest(&self, name: &str) -> Option<String> {
        self.names.nearest(name)
    }

    /// The entries of the state dict: `(key, name, raw, kind, identity, alias_of, flat)`. Kinds are "parameter", "buffer" and
    /// "extra". `flat` is None or `(flat parameter, member, shape, pieces)` with pieces `(offsets, sizes, start in the shard)`.
    fn entries<'py>(&self, py: Python<'py>, submodules: Vec<String>, options: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let submodules: Vec<&str> = submodules.iter().map(String::as_str).collect();
        let plan = get_model_state(&self.tree, &submodules, &options_of(options)?).or_raise_state(py)?;
        let list = PyList::empty(py);
        for entry in plan.entries.values() {
            list.append(self.entry(py, entry)?)?;
        }
        Ok(list)
    }

    /// Which given key goes to which entry: `(assignments, missing, unexpected)`. Given are `(key, dtype or None, shape)`.
    fn assign<'py>(
        &self,
        py: Python<'py>,
        given: Vec<(String, Option<usize>, Vec<u64>)>,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let mut facts = std::collections::HashMap::new();
        for (key, dtype, shape) in &given {
            if let Some(dtype) = dtype {
                facts.insert(key.as_str(), TensorFacts::new(dtype_of(py, *dtype)?, shape));
            }
        }
        let keys = given.iter().map(|(key, ..)| key.as_str());
        // A tensor of another element type is cast when it is set, as PyTorch does: only shapes are compared.
        let known = |key: &str| {
            let mut found = facts.get(key).cloned()?;
            if let Some(wanted) = self.names.get(key).and_then(|leaf| leaf.facts.as_ref()) {
                found.dtype = wanted.dtype;
            }
            Some(found)
        };
        let set = set_model_state(&self.tree, keys, known, &options_of(options)?).or_raise_state(py)?;
        let assignments = PyList::empty(py);
        for (key, entry) in &set.assignments {
            assignments.append((key, self.entry(py, entry)?))?;
        }
        (assignments, set.differences.missing, set.differences.unexpected).into_pyobject(py)
    }

    /// The regions of a member of a flat parameter that a rank of its group holds, this one by default:
    /// `(offsets, sizes, start in the shard)`.
    #[pyo3(signature = (name, rank=None))]
    fn member_pieces<'py>(&self, py: Python<'py>, name: &str, rank: Option<u64>) -> PyResult<Bound<'py, PyList>> {
        match self.flats.of_member(name) {
            Some((flat, member)) => pieces(py, flat, member, rank.unwrap_or(flat.sharding().rank)),
            None => Err(invalid(py, format!("{name:?} is not a member of a flat parameter"))),
        }
    }
}

impl StateModel {
    fn entry<'py>(&self, py: Python<'py>, entry: &ModelEntry) -> PyResult<Bound<'py, PyTuple>> {
        let kind = match entry.kind {
            LeafKind::Parameter => "parameter",
            LeafKind::Buffer => "buffer",
            LeafKind::ExtraState => "extra",
        };
        let identity = entry.identity.map(|identity| identity.0);
        let flat = match entry.kind {
            LeafKind::Parameter => self.flat_of(py, &entry.name)?,
            _ => None,
        };
        (&entry.key, &entry.name, &entry.raw, kind, identity, &entry.alias_of, flat).into_pyobject(py)
    }

    fn flat_of<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some((flat, member)) = self.flats.of_member(name) else { return Ok(None) };
        let shape = flat.members().get(member).map(|member| member.whole_shape().to_vec()).unwrap_or_default();
        let pieces = pieces(py, flat, member, flat.sharding().rank)?;
        Ok(Some((flat.name(), member, tuple(py, &shape)?, pieces).into_pyobject(py)?))
    }
}

fn pieces<'py>(py: Python<'py>, flat: &FlatParameter, member: usize, rank: u64) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    if let Some(held) = flat.member_range(member, rank) {
        for piece in flat.member_regions(member, rank).or_raise_state(py)? {
            let (offsets, sizes) = (tuple(py, piece.region.offsets())?, tuple(py, piece.region.sizes())?);
            list.append((offsets, sizes, held.in_shard + piece.start))?;
        }
    }
    Ok(list)
}

fn module_tree(module: &Bound<'_, PyTuple>) -> PyResult<ModuleTree> {
    let py = module.py();
    let mut tree = ModuleTree::new();
    tree.wrapper = wrapper(&module.get_item(0)?)?;
    for parameter in module.get_item(1)?.cast::<PyList>()?.iter() {
        let parameter = parameter.cast_into::<PyTuple>()?;
        let name: String = parameter.get_item(0)?.extract()?;
        let mut described = Parameter::new(parameter.get_item(1)?.extract()?);
        described.requires_grad = parameter.get_item(2)?.is_truthy()?;
        if let Some(dtype) = parameter.get_item(3)?.extract::<Option<usize>>()? {
            described.facts = Some(TensorFacts::new(dtype_of(py, dtype)?, &dims(&parameter.get_item(4)?)?));
        }
        described.flat = flat(&parameter.get_item(5)?)?.map(Box::new);
        tree.parameters.insert(name, described);
    }
    for buffer in module.get_item(2)?.cast::<PyList>()?.iter() {
        let (name, identity, persistent): (String, u64, bool) = buffer.extract()?;
        tree.buffers.insert(name, Buffer { identity: Identity(identity), persistent, facts: None });
    }
    tree.extra_state = module.get_item(3)?.is_truthy()?;
    tree.manages = flat(&module.get_item(4)?)?.map(Box::new);
    for child in module.get_item(5)?.cast::<PyList>()?.iter() {
        let child = child.cast_into::<PyTuple>()?;
        let name: String = child.get_item(0)?.extract()?;
        tree.children.insert(name, module_tree(child.get_item(1)?.cast::<PyTuple>()?)?);
    }
    Ok(tree)
}

fn wrapper(object: &Bound<'_, PyAny>) -> PyResult<Wrapper> {
    if object.is_none() {
        return Ok(Wrapper::None);
    }
    if let Ok(modifiers) = object.cast::<PyDict>() {
        return Ok(Wrapper::Custom(modifiers.iter().map(|(k, v)| Ok((k.extract()?, v.extract()?))).collect::<PyResult<_>>()?));
    }
    let name: String = object.extract()?;
    Ok(match name.as_str() {
        "ddp" => Wrapper::Ddp,
        "fsdp1" => Wrapper::Fsdp1,
        "fsdp2" => Wrapper::Fsdp2,
        "compiled" => Wrapper::Compiled,
        "checkpoint" => Wrapper::ActivationCheckpoint,
        other => return Err(invalid(object.py(), format!("{other:?} is no wrapper that reshard knows"))),
    })
}

fn flat(object: &Bound<'_, PyAny>) -> PyResult<Option<FlatParameter>> {
    if object.is_none() {
        return Ok(None);
    }
    let py = object.py();
    let parts = object.cast::<PyTuple>()?;
    let name: String = parts.get_item(0)?.extract()?;
    let dtype = dtype_of(py, parts.get_item(1)?.extract()?)?;
    let mut members = Vec::new();
    for member in parts.get_item(2)?.cast::<PyList>()?.iter() {
        let member = member.cast_into::<PyTuple>()?;
        let slice: Option<(Vec<u64>, Vec<u64>)> = member.get_item(4)?.extract()?;
        members.push(FlatMember {
            name: member.get_item(0)?.extract()?,
            shape: dims(&member.get_item(1)?)?,
            slice: slice.map(|(whole, offsets)| MemberSlice { whole: Dims::from_vec(whole), offsets: Dims::from_vec(offsets) }),
            requires_grad: member.get_item(2)?.is_truthy()?,
            aliases: member.get_item(3)?.extract()?,
        });
    }
    let extents: Vec<(Option<usize>, u64)> = parts.get_item(3)?.extract()?;
    let extents: Vec<Extent> = extents.into_iter().map(|(member, numel)| Extent { member, numel }).collect();
    let strategy = match parts.get_item(4)?.extract::<String>()?.as_str() {
        "FULL_SHARD" => ShardingStrategy::FullShard,
        "SHARD_GRAD_OP" => ShardingStrategy::ShardGradOp,
        "NO_SHARD" => ShardingStrategy::NoShard,
        "HYBRID_SHARD" => ShardingStrategy::HybridShard,
        "_HYBRID_SHARD_ZERO2" => ShardingStrategy::HybridShardZero2,
        other => {
            let reason = format!("{other} is no sharding strategy that reshard knows");
            return Err(super::errors::raised(py, &StateError::InvalidFlatParameter { name, reason }));
        }
    };
    let sharding = FlatSharding { strategy, rank: parts.get_item(5)?.extract()?, world: parts.get_item(6)?.extract()? };
    let use_orig_params = parts.get_item(7)?.is_truthy()?;
    FlatParameter::from_extents(&name, dtype, members, &extents, sharding, use_orig_params).or_raise_state(py).map(Some)
}
