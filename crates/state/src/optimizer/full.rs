//! The plan of a full state: whole tensors, one at a time, from what all ranks tell of theirs.

use indexmap::IndexMap;
use reshard_formats::{DType, Value};
use reshard_layout::{Dims, Region};

use super::groups::value_text;
use crate::transfer::{HeldTensor, TransferPlan, gather_plan};
use crate::{Recipients, StateError, Tree, numel};

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
