//! State of training, independent of wrappers, ranks and parameter ids.
//!
//! A wrapped and sharded model and its optimizers become one tree of names, and such a tree becomes again what each of
//! them loads. Everything here is planning: it is generic over the tensor type, takes descriptions and returns
//! descriptions, and never touches a tensor's bytes, nor any file, nor another rank.
//!
//! Each room knows only those above it:
//!
//! - [`tree`]: [`Tree`], keys that are not text ([`KeyTypes`]), to dotted keys ([`flatten`]) and back
//!   ([`unflatten_entries`])
//! - [`flat`]: [`FlatParameter`], several parameters end to end in one tensor of which a rank has a range, as FSDP1 keeps them
//! - [`model`]: [`ModuleTree`], [`Names`], [`get_model_state`], [`set_model_state`]
//! - [`optimizer`]: [`sharded_optim_state`] reads, [`optim_state_to_load`] plans a load; [`flatten_optimizer`] and
//!   [`unflatten_optimizer`] for the form with one level; [`plan_slots`] for slots that only a checkpoint knows;
//!   [`full_optim_state`] for whole tensors
//! - [`transfer`]: who sends what to whom
#![forbid(unsafe_code)]

mod error;
pub mod flat;
pub mod model;
mod near;
pub mod optimizer;
mod options;
mod tensor;
pub mod transfer;
pub mod tree;

pub use error::{Differences, GroupDisagreement, StateError};
pub use flat::{Extent, FlatMember, FlatParameter, FlatSharding, MemberRange, MemberSlice, ShardingStrategy};
pub use model::{
    Buffer, FlatModel, Identity, LeafKind, ModelEntry, ModelState, ModuleTree, NamedLeaf, Names, Parameter, SetModel, Wrapper,
    canonical_below, get_model_state, set_model_state,
};
pub use optimizer::{
    BoxCopy, FlattenedOptimizer, FullOptimState, Inventory, Leftovers, LiveOptimizer, LoadSlot, LoadTarget, OptimizerLoad,
    OptimizerReport, OptimizerState, ParamGroup, ParamLayout, PlannedSlot, RawOptimizer, SlotFacts, SlotPiece, SlotPlan,
    SlotTensor, StoredSlot, adopt_layouts, combine, flatten_optimizer, full_optim_state, optim_state_to_load, plan_slots,
    read_optimizer_state, rekey, sharded_optim_state, unflatten_optimizer, with_whole_options,
};
pub use options::{Recipients, StateDictOptions};
pub use tensor::{DeviceKind, TensorFacts, TensorLike, WithFacts, numel};
pub use transfer::{HeldTensor, TransferPart, TransferPlan, TransferStep, broadcast_plan, gather_plan};
pub use tree::{
    Dict, Flattened, FlattenedLeaf, Key, KeyTypes, MAX_DEPTH, Opaque, Tree, dotted, flatten, key_of, unflatten_entries,
};
