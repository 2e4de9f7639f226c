//! Whole tensors between ranks: who sends what, planned alike on every rank from what all of them told.

use indexmap::IndexMap;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use reshard::Value;
use reshard::state::{Inventory, SlotFacts, TransferPart as Part, broadcast_plan, full_optim_state};

use super::errors::RaiseState;
use super::model::tuple;
use super::options::recipients_of;
use crate::checkpoint::code;
use crate::geometry::region;

use crate::leaves::{Code, Numbers};
use crate::value::plain;

/// Offsets and sizes.
type Region = (Numbers, Numbers);

/// What a rank tells of a leaf: an object of the package with the attributes of one of these.
#[derive(FromPyObject)]
pub(crate) enum HeldLeaf<'py> {
    /// Regions of a tensor.
    Regions { dtype: Code, shape: Numbers, regions: Vec<Region> },
    /// A tensor that is the same on every rank; its content where that is to be compared.
    Same { dtype: Code, shape: Numbers, content: Option<Vec<u8>> },
    /// A plain value.
    Plain { value: Bound<'py, PyAny> },
    /// Anything else.
    Other {
        #[expect(dead_code, reason = "it is what tells this kind from the others")]
        class_name: String,
    },
}

impl HeldLeaf<'_> {
    fn facts(self, py: Python<'_>) -> PyResult<SlotFacts> {
        Ok(match self {
            HeldLeaf::Regions { dtype, shape, regions } => {
                let regions = regions.iter().map(|(offsets, sizes)| region(py, &offsets.0, &sizes.0));
                SlotFacts::Regions { dtype: dtype.0, shape: shape.0, regions: regions.collect::<PyResult<_>>()? }
            }
            HeldLeaf::Same { dtype, shape, content } => SlotFacts::Same { dtype: dtype.0, shape: shape.0, scalar: content },
            HeldLeaf::Plain { value } => SlotFacts::Plain(plain(&value)?.unwrap_or(Value::None)),
            HeldLeaf::Other { .. } => SlotFacts::Other("an opaque value"),
        })
    }
}

/// A region that a rank sends or receives.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct TransferPart {
    rank: u64,
    offsets: Py<PyTuple>,
    sizes: Py<PyTuple>,
}

/// A tensor on its way, whole or in parts.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct TransferStep {
    key: String,
    /// The slot, of an optimizer's.
    slot: String,
    dtype: usize,
    shape: Py<PyTuple>,
    parts: Vec<Py<TransferPart>>,
}

/// The rank that tells a value.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct ValueSource {
    key: String,
    slot: String,
    rank: u64,
}

/// How a full state is gathered.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct GatherPlan {
    steps: Vec<Py<TransferStep>>,
    values: Vec<Py<ValueSource>>,
}

fn parts(py: Python<'_>, parts: &[Part]) -> PyResult<Vec<Py<TransferPart>>> {
    let part = |part: &Part| {
        let offsets = PyTuple::new(py, part.region.offsets())?.unbind();
        let sizes = PyTuple::new(py, part.region.sizes())?.unbind();
        Py::new(py, TransferPart { rank: part.rank, offsets, sizes })
    };
    parts.iter().map(part).collect()
}

/// The plan of a full state from every rank's leaves, by parameter and slot. `ranks` receive whole tensors; None: all.
#[pyfunction]
pub(crate) fn gather_plan(
    py: Python<'_>,
    inventories: Vec<Bound<'_, PyDict>>,
    ranks: Option<Vec<u64>>,
    cpu_offload: bool,
) -> PyResult<GatherPlan> {
    let slots = |slots: Bound<'_, PyAny>| {
        let slots = slots.cast::<PyDict>()?;
        let held = slots.iter().map(|(slot, held)| Ok((slot.extract()?, held.extract::<HeldLeaf<'_>>()?.facts(py)?)));
        held.collect::<PyResult<IndexMap<String, SlotFacts>>>()
    };
    let inventory = |leaves: Bound<'_, PyDict>| {
        leaves.iter().map(|(name, below)| Ok((name.extract()?, slots(below)?))).collect::<PyResult<Inventory>>()
    };
    let inventories = inventories.into_iter().map(inventory).collect::<PyResult<Vec<_>>>()?;
    let plan = full_optim_state(&inventories, recipients_of(ranks), cpu_offload).or_raise_state(py)?;
    let step = |(step, (key, slot)): (&reshard::state::TransferStep, &(String, String))| {
        let (shape, parts) = (tuple(py, &step.shape)?, parts(py, &step.from)?);
        Py::new(py, TransferStep { key: key.clone(), slot: slot.clone(), dtype: code(step.dtype), shape, parts })
    };
    let steps = plan.tensors.steps.iter().zip(&plan.slots).map(step).collect::<PyResult<_>>()?;
    let value = |(key, slot, rank): (String, String, u64)| Py::new(py, ValueSource { key, slot, rank });
    Ok(GatherPlan { steps, values: plan.values.into_iter().map(value).collect::<PyResult<_>>()? })
}

/// A tensor that one rank has whole.
#[derive(FromPyObject)]
pub(crate) struct OfferedTensor {
    key: String,
    dtype: Code,
    shape: Numbers,
}

/// What a rank wants of a tensor.
#[derive(FromPyObject)]
pub(crate) struct WantedTensor {
    key: String,
    regions: Vec<Region>,
}

/// Who gets what of the tensors that one rank has, one step for each tensor in the order offered. `wanted` is every rank's.
#[pyfunction]
pub(crate) fn broadcast_steps(
    py: Python<'_>,
    owner: u64,
    offered: Vec<OfferedTensor>,
    wanted: Vec<Vec<WantedTensor>>,
) -> PyResult<Vec<TransferStep>> {
    let offered = offered.into_iter().map(|tensor| (tensor.key, (tensor.dtype.0, tensor.shape.0))).collect();
    let mut by_key: IndexMap<String, Vec<(u64, reshard::layout::Region)>> = IndexMap::new();
    for (rank, wanted) in (0_u64..).zip(wanted) {
        for WantedTensor { key, regions } in wanted {
            let entry = by_key.entry(key).or_default();
            for (offsets, sizes) in regions {
                entry.push((rank, region(py, &offsets.0, &sizes.0)?));
            }
        }
    }
    let (plan, _) = broadcast_plan(owner, &offered, &by_key).or_raise_state(py)?;
    let step = |step: &reshard::state::TransferStep| {
        let (shape, parts) = (tuple(py, &step.shape)?, parts(py, &step.to)?);
        Ok(TransferStep { key: step.key.clone(), slot: String::new(), dtype: code(step.dtype), shape, parts })
    };
    plan.steps.iter().map(step).collect()
}
