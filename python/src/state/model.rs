//! The description of a model, as Python hands it over once, and every question about names that it answers.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use reshard::layout::{self, Dims};
use reshard::state::{
    Buffer, Extent, FlatMember, FlatModel, FlatParameter, FlatSharding, Identity, LeafKind, MemberSlice, ModelEntry as Planned,
    ModuleTree, Names, Parameter, ShardingStrategy, StateError, TensorFacts, Wrapper, canonical_below, get_model_state,
    set_model_state,
};

use super::errors::{RaiseState, raised};
use super::options::options_of;
use crate::errors::invalid;
use crate::geometry::in_layout;
use crate::leaves::{Code, Numbers};

/// A module, with what lies directly in it. An object of the package with these attributes, as are all of these.
#[derive(FromPyObject)]
pub(crate) struct ModuleDescription {
    wrapper: WrapperDescription,
    parameters: Vec<ParameterDescription>,
    buffers: Vec<BufferDescription>,
    extra_state: bool,
    /// The flat parameter behind its original parameters.
    manages: Option<FlatDescription>,
    children: Vec<ChildDescription>,
}

#[derive(FromPyObject)]
struct ChildDescription {
    name: String,
    module: ModuleDescription,
}

#[derive(FromPyObject)]
struct ParameterDescription {
    name: String,
    identity: u64,
    requires_grad: bool,
    /// None where it has no shape of its own.
    dtype: Option<Code>,
    shape: Numbers,
    flat: Option<FlatDescription>,
}

#[derive(FromPyObject)]
struct BufferDescription {
    name: String,
    identity: u64,
    persistent: bool,
}

/// A flat parameter of FSDP.
#[derive(FromPyObject)]
struct FlatDescription {
    name: String,
    dtype: Code,
    members: Vec<MemberDescription>,
    extents: Vec<ExtentDescription>,
    strategy: String,
    rank: u64,
    world: u64,
    use_orig_params: bool,
}

#[derive(FromPyObject)]
struct MemberDescription {
    name: String,
    shape: Numbers,
    requires_grad: bool,
    aliases: Vec<String>,
    /// Where tensor parallelism leaves this rank one slice of it.
    slice: Option<SliceDescription>,
}

#[derive(FromPyObject)]
struct SliceDescription {
    whole: Numbers,
    offsets: Numbers,
}

/// A stretch of a flat parameter: of a member, or padding.
#[derive(FromPyObject)]
struct ExtentDescription {
    member: Option<usize>,
    numel: u64,
}

/// None, the name of a wrapper, or a dict of name modifiers.
struct WrapperDescription(Wrapper);

impl<'py> FromPyObject<'_, 'py> for WrapperDescription {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<WrapperDescription> {
        if object.is_none() {
            return Ok(WrapperDescription(Wrapper::None));
        }
        if let Ok(modifiers) = object.cast::<PyDict>() {
            let pairs = modifiers.iter().map(|(k, v)| Ok((k.extract()?, v.extract()?))).collect::<PyResult<_>>()?;
            return Ok(WrapperDescription(Wrapper::Custom(pairs)));
        }
        let name: String = object.extract()?;
        Ok(WrapperDescription(match name.as_str() {
            "ddp" => Wrapper::Ddp,
            "fsdp1" => Wrapper::Fsdp1,
            "fsdp2" => Wrapper::Fsdp2,
            "compiled" => Wrapper::Compiled,
            "checkpoint" => Wrapper::ActivationCheckpoint,
            other => return Err(invalid(object.py(), format!("unknown wrapper {other:?}"))),
        }))
    }
}

/// A region of a member of a flat parameter, and the element of this rank's shard at which it begins.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct FlatPiece {
    offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
    start: u64,
}

impl FlatPiece {
    fn new(py: Python<'_>, piece: &layout::FlatPiece, before: u64) -> PyResult<Py<FlatPiece>> {
        let offsets = PyTuple::new(py, piece.region.offsets())?.unbind();
        let sizes = PyTuple::new(py, piece.region.sizes())?.unbind();
        Py::new(py, FlatPiece { offsets, sizes, start: before + piece.start })
    }
}

/// The regions of the elements from `start` up to `end` of a flattened tensor, in order.
#[pyfunction]
pub(crate) fn flat_pieces(py: Python<'_>, shape: Numbers, start: u64, end: u64) -> PyResult<Vec<Py<FlatPiece>>> {
    let pieces = in_layout(py, layout::flat_pieces(&shape.0, start, end))?;
    pieces.iter().map(|piece| FlatPiece::new(py, piece, 0)).collect()
}

/// What this rank holds of a member of a flat parameter.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct FlatPart {
    /// The name of the flat parameter.
    flat: String,
    /// The number of the member.
    member: usize,
    /// The shape of the whole member.
    shape: Py<PyTuple>,
    pieces: Vec<Py<FlatPiece>>,
}

/// A parameter by one of its names.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct NamedParameter {
    name: String,
    identity: Option<u64>,
    flat: Option<Py<FlatPart>>,
}

/// One entry of a model's state dict.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct ModelEntry {
    key: String,
    /// The canonical name.
    name: String,
    /// The name in the live model.
    raw: String,
    /// "parameter", "buffer" or "extra".
    kind: &'static str,
    identity: Option<u64>,
    flat: Option<Py<FlatPart>>,
}

/// A given tensor, or another value without a dtype.
#[derive(FromPyObject)]
pub(crate) struct GivenEntry {
    key: String,
    dtype: Option<Code>,
    shape: Numbers,
}

/// Which given key goes to which entry.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct Assigned {
    entries: Py<PyDict>,
    missing: Vec<String>,
    unexpected: Vec<String>,
}

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
    fn new(py: Python<'_>, module: ModuleDescription) -> PyResult<StateModel> {
        let tree = module_tree(py, module)?;
        let names = Names::of(&tree).or_raise_state(py)?;
        let flats = FlatModel::of(&tree).or_raise_state(py)?;
        Ok(StateModel { tree, names, flats })
    }

    /// The canonical forms of names in the live model.
    fn canonical(&self, names: Vec<String>) -> Vec<String> {
        names.iter().map(|name| canonical_below(&self.tree, name)).collect()
    }

    /// All parameters, under every name that they have.
    fn parameters(&self, py: Python<'_>) -> PyResult<Vec<NamedParameter>> {
        let parameters = self.names.leaves().filter(|leaf| leaf.kind == LeafKind::Parameter);
        let named = |leaf: &reshard::state::NamedLeaf| {
            let identity = leaf.identity.map(|identity| identity.0);
            Ok(NamedParameter { name: leaf.name.clone(), identity, flat: self.flat_of(py, &leaf.name)? })
        };
        parameters.map(named).collect()
    }

    /// The name under which a parameter is stored, whichever of its names is given.
    fn primary(&self, name: &str) -> String {
        self.names.primary(name).to_owned()
    }

    /// The entries of the state dict, of submodules if any are named.
    fn entries(&self, py: Python<'_>, submodules: Vec<String>, options: &Bound<'_, PyAny>) -> PyResult<Vec<ModelEntry>> {
        let submodules: Vec<&str> = submodules.iter().map(String::as_str).collect();
        let plan = get_model_state(&self.tree, &submodules, &options_of(options)?).or_raise_state(py)?;
        plan.entries.values().map(|entry| self.entry(py, entry)).collect()
    }

    /// Where given keys go.
    fn assign(&self, py: Python<'_>, given: Vec<GivenEntry>, options: &Bound<'_, PyAny>) -> PyResult<Assigned> {
        let mut facts = std::collections::HashMap::new();
        for GivenEntry { key, dtype, shape } in &given {
            if let Some(dtype) = dtype {
                facts.insert(key.as_str(), TensorFacts::new(dtype.0, &shape.0));
            }
        }
        let keys = given.iter().map(|entry| entry.key.as_str());
        // A tensor of another element type is cast when it is set, as PyTorch does: only shapes are compared.
        let known = |key: &str| {
            let mut found = facts.get(key).cloned()?;
            if let Some(wanted) = self.names.get(key).and_then(|leaf| leaf.facts.as_ref()) {
                found.dtype = wanted.dtype;
            }
            Some(found)
        };
        let set = set_model_state(&self.tree, keys, known, &options_of(options)?).or_raise_state(py)?;
        let entries = PyDict::new(py);
        for (key, entry) in &set.assignments {
            entries.set_item(key, self.entry(py, entry)?)?;
        }
        let (missing, unexpected) = (set.differences.missing, set.differences.unexpected);
        Ok(Assigned { entries: entries.unbind(), missing, unexpected })
    }
}

impl StateModel {
    fn entry(&self, py: Python<'_>, entry: &Planned) -> PyResult<ModelEntry> {
        let (kind, flat) = match entry.kind {
            LeafKind::Parameter => ("parameter", self.flat_of(py, &entry.name)?),
            LeafKind::Buffer => ("buffer", None),
            LeafKind::ExtraState => ("extra", None),
        };
        let (key, name, raw) = (entry.key.clone(), entry.name.clone(), entry.raw.clone());
        Ok(ModelEntry { key, name, raw, kind, identity: entry.identity.map(|identity| identity.0), flat })
    }

    fn flat_of(&self, py: Python<'_>, name: &str) -> PyResult<Option<Py<FlatPart>>> {
        let Some((flat, member)) = self.flats.of_member(name) else { return Ok(None) };
        let shape = flat.members().get(member).map(|member| member.whole_shape().to_vec()).unwrap_or_default();
        let shape = PyTuple::new(py, shape)?.unbind();
        let rank = flat.sharding().rank;
        let mut pieces = Vec::new();
        if let Some(held) = flat.member_range(member, rank) {
            for piece in flat.member_regions(member, rank).or_raise_state(py)? {
                pieces.push(FlatPiece::new(py, &piece, held.in_shard)?);
            }
        }
        Py::new(py, FlatPart { flat: flat.name().to_owned(), member, shape, pieces }).map(Some)
    }
}

fn module_tree(py: Python<'_>, module: ModuleDescription) -> PyResult<ModuleTree> {
    let mut tree = ModuleTree::new();
    tree.wrapper = module.wrapper.0;
    for parameter in module.parameters {
        let mut described = Parameter::new(parameter.identity);
        described.requires_grad = parameter.requires_grad;
        described.facts = parameter.dtype.map(|dtype| TensorFacts::new(dtype.0, &parameter.shape.0));
        described.flat = parameter.flat.map(|described| flat(py, described)).transpose()?.map(Box::new);
        tree.parameters.insert(parameter.name, described);
    }
    for BufferDescription { name, identity, persistent } in module.buffers {
        tree.buffers.insert(name, Buffer { identity: Identity(identity), persistent, facts: None });
    }
    tree.extra_state = module.extra_state;
    tree.manages = module.manages.map(|described| flat(py, described)).transpose()?.map(Box::new);
    for child in module.children {
        tree.children.insert(child.name, module_tree(py, child.module)?);
    }
    Ok(tree)
}

fn flat(py: Python<'_>, described: FlatDescription) -> PyResult<FlatParameter> {
    let name = described.name;
    let strategy = match described.strategy.as_str() {
        "FULL_SHARD" => ShardingStrategy::FullShard,
        "SHARD_GRAD_OP" => ShardingStrategy::ShardGradOp,
        "NO_SHARD" => ShardingStrategy::NoShard,
        "HYBRID_SHARD" => ShardingStrategy::HybridShard,
        "_HYBRID_SHARD_ZERO2" => ShardingStrategy::HybridShardZero2,
        other => {
            let reason = format!("unknown sharding strategy {other}");
            return Err(raised(py, &StateError::InvalidFlatParameter { name, reason }));
        }
    };
    let slice = |slice: SliceDescription| MemberSlice { whole: slice.whole.0, offsets: slice.offsets.0 };
    let member = |member: MemberDescription| FlatMember {
        name: member.name,
        shape: member.shape.0,
        slice: member.slice.map(slice),
        requires_grad: member.requires_grad,
        aliases: member.aliases,
    };
    let members = described.members.into_iter().map(member).collect();
    let extents: Vec<Extent> =
        described.extents.into_iter().map(|extent| Extent { member: extent.member, numel: extent.numel }).collect();
    let sharding = FlatSharding { strategy, rank: described.rank, world: described.world };
    FlatParameter::from_extents(&name, described.dtype.0, members, &extents, sharding, described.use_orig_params)
        .or_raise_state(py)
}

/// Numbers as a tuple.
pub(super) fn tuple(py: Python<'_>, numbers: &Dims) -> PyResult<Py<PyTuple>> {
    PyTuple::new(py, numbers).map(Bound::unbind)
}
