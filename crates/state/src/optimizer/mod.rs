//! Optimizers: reading their state by names, planning what they load, and the forms in between.

mod checkpoint;
mod flattened;
mod full;
mod groups;
mod layout;
mod load;
mod read;
mod rekey;
mod slot;
mod state;

pub use checkpoint::{PlannedSlot, SlotPlan, StoredSlot, plan_slots};
pub use flattened::{FlattenedOptimizer, Leftovers, flatten_optimizer, unflatten_optimizer};
pub use full::{FullOptimState, Inventory, SlotFacts, full_optim_state};
pub use groups::read_optimizer_state;
pub use layout::{ParamLayout, adopt_layouts};
pub use load::{LoadSlot, LoadTarget, OptimizerLoad, OptimizerReport, optim_state_to_load, with_whole_options};
pub use read::sharded_optim_state;
pub use rekey::rekey;
pub use slot::{BoxCopy, SlotPiece, SlotTensor};
pub use state::{LiveOptimizer, OptimizerState, ParamGroup, RawOptimizer, combine};
