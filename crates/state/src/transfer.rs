//! Moving whole tensors between ranks one at a time, so that no rank ever holds more than the largest of them beside what
//! it keeps. The order of steps is the same on every rank by construction.

use indexmap::IndexMap;
use reshard_formats::DType;
use reshard_layout::{Dims, Mesh, Placement, Region, coverage, holders};

use crate::{Recipients, StateError, numel};

/// A tensor and which ranks hold which regions of it. Several may hold the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldTensor {
    /// Its key.
    pub key: String,
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole.
    pub shape: Dims,
    /// Rank and region.
    pub held: Vec<(u64, Region)>,
}

impl HeldTensor {
    /// A tensor placed on a mesh: who holds what follows from the mesh alone.
    pub fn placed(
        key: &str,
        dtype: DType,
        mesh: &Mesh,
        placements: &[Placement],
        shape: &[u64],
    ) -> Result<HeldTensor, StateError> {
        let holders = holders(mesh, placements, shape).map_err(StateError::layout(key))?;
        let held =
            holders.into_iter().flat_map(|(region, ranks)| ranks.into_iter().map(move |rank| (rank, region.clone()))).collect();
        Ok(HeldTensor { key: key.to_owned(), dtype, shape: Dims::from_slice(shape), held })
    }
}

/// A region that a rank sends or receives in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPart {
    /// The rank.
    pub rank: u64,
    /// The region, in the coordinates of the whole tensor.
    pub region: Region,
}

/// One tensor on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferStep {
    /// Its key: ranks match steps by it.
    pub key: String,
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole.
    pub shape: Dims,
    /// Who sends what.
    pub from: Vec<TransferPart>,
    /// Who receives what; for whole tensors see the plan's recipients.
    pub to: Vec<TransferPart>,
}

/// Steps in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferPlan {
    /// One step per tensor.
    pub steps: Vec<TransferStep>,
    /// Who receives whole tensors.
    pub recipients: Recipients,
    /// Bytes of the largest tensor: what a rank needs beside what it keeps.
    pub peak_bytes: u64,
}

fn peak(steps: &[TransferStep]) -> u64 {
    steps.iter().map(|step| numel(&step.shape).saturating_mul(step.dtype.size())).max().unwrap_or(0)
}

/// Plans gathering tensors. Of ranks that hold the same region the one that has sent the least so far sends it.
pub fn gather_plan(tensors: Vec<HeldTensor>, recipients: Recipients) -> Result<TransferPlan, StateError> {
    let mut sent: IndexMap<u64, u64> = IndexMap::new();
    let mut steps = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let mut holders: IndexMap<Region, Vec<u64>> = IndexMap::new();
        for (rank, region) in tensor.held {
            if !region.is_empty() {
                holders.entry(region).or_default().push(rank);
            }
        }
        let regions: Vec<Region> = holders.keys().cloned().collect();
        let covered = coverage(&tensor.shape, &regions).map_err(StateError::layout(&tensor.key))?;
        if let Some(gap) = covered.gaps.first() {
            let region = gap.to_string();
            return Err(StateError::Uncovered { key: tensor.key, region });
        }
        let mut from = Vec::with_capacity(holders.len());
        for (region, ranks) in holders {
            let Some(rank) = ranks.into_iter().min_by_key(|rank| (sent.get(rank).copied().unwrap_or(0), *rank)) else {
                continue;
            };
            *sent.entry(rank).or_default() += region.volume().saturating_mul(tensor.dtype.size());
            from.push(TransferPart { rank, region });
        }
        steps.push(TransferStep { key: tensor.key, dtype: tensor.dtype, shape: tensor.shape, from, to: Vec::new() });
    }
    let peak_bytes = peak(&steps);
    Ok(TransferPlan { steps, recipients, peak_bytes })
}

/// Plans distributing the tensors that one rank alone has. Steps follow the owner's keys in the owner's order, which it
/// has sent to everybody; keys that nobody wants are skipped by all, and what is wanted but not there is returned.
pub fn broadcast_plan(
    owner: u64,
    offered: &IndexMap<String, (DType, Dims)>,
    wanted: &IndexMap<String, Vec<(u64, Region)>>,
) -> Result<(TransferPlan, Vec<String>), StateError> {
    let mut steps = Vec::new();
    for (key, (dtype, shape)) in offered {
        let Some(receivers) = wanted.get(key) else {
            continue;
        };
        let whole = Region::whole(shape).map_err(StateError::layout(key))?;
        let mut to = Vec::with_capacity(receivers.len());
        for (rank, region) in receivers {
            region.check_inside(shape).map_err(StateError::layout(key))?;
            to.push(TransferPart { rank: *rank, region: region.clone() });
        }
        let from = vec![TransferPart { rank: owner, region: whole }];
        steps.push(TransferStep { key: key.clone(), dtype: *dtype, shape: shape.clone(), from, to });
    }
    let missing = wanted.keys().filter(|key| !offered.contains_key(*key)).cloned().collect();
    let peak_bytes = peak(&steps);
    Ok((TransferPlan { steps, recipients: Recipients::Own, peak_bytes }, missing))
}
