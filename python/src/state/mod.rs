//! State of models and optimizers: what Python describes once (modules, wrappers, parameters, flat parameters, optimizers
//! by their own ids) goes to the state crate, which decides names, groups, keys and copies; handles of tensors come back as
//! the tensors they stand for.

mod errors;
mod model;
mod objects;
mod optimizer;
mod options;
mod transfer;

pub(crate) use model::{Assigned, FlatPart, FlatPiece, ModelEntry, NamedParameter, StateModel, flat_pieces};
pub(crate) use objects::{SlotPart, TensorDescription};
pub(crate) use optimizer::{
    BoxCopy, BuiltSlot, KeptSlot, OptimizerLoad, OptimizerPlan, PlannedSlot, SlotPlan, optimizer_state, optimizer_to_load,
    plan_slots, rekey_optimizer,
};
pub(crate) use transfer::{GatherPlan, TransferPart, TransferStep, ValueSource, broadcast_steps, gather_plan};
