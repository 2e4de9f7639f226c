//! State of models and optimizers: what Python describes once (modules, wrappers, parameters, flat parameters, optimizers
//! by their own ids) goes to the state crate, which decides names, groups, keys and copies; handles of tensors come back as
//! the tensors they stand for.

mod errors;
mod model;
mod objects;
mod optimizer;
mod options;

pub(crate) use model::StateModel;
pub(crate) use optimizer::{broadcast_steps, full_slots, optimizer_state, optimizer_to_load, plan_optimizer, rekey_optimizer};
