//! State of training, independent of wrappers, ranks and parameter ids.
//!
//! A wrapped and sharded model and its optimizers become one tree of names, and such a tree becomes again what each of
//! them loads. Everything here is planning: it is generic over the tensor type, takes descriptions and returns
//! descriptions, and never touches a tensor's bytes, nor any file, nor another rank.
//!
//! - trees: [`Tree`], [`flatten`], [`unflatten`], [`Renames`], [`merge`], [`match_template`]
//! - names: [`ModuleTree`], [`Names`]
//! - the calls: [`StateDictOptions`], [`get_model_state`], [`set_model_state`], [`get_optimizer_state`],
//!   [`set_optimizer_state`], [`get_state`], [`set_state`]
//! - optimizer state: [`OptimizerState`], [`RawOptimizer`], [`LiveOptimizer`], [`flatten_optimizer`]
//! - FSDP flat parameters: [`FlatParameter`], [`sharded_optim_state`], [`optim_state_to_load`]
//! - loading by the model's own layout: [`plan_sharded_optimizer`]
#![forbid(unsafe_code)]

mod calls;
mod differences;
mod edit;
mod error;
mod flat_load;
mod flat_model;
mod flat_param;
mod flat_state;
mod flatten;
mod key_types;
mod model_state;
mod module;
mod names;
mod optimizer;
mod optimizer_flat_form;
mod optimizer_load;
mod options;
mod rekey;
mod sharded_load;
mod slot;
mod stream;
mod template;
mod tensor;
mod timings;
mod tree;

pub use calls::{OptimizerTree, SetState, StateGiven, StatePlan, get_optimizer_state, get_state, set_optimizer_tree, set_state};
pub use differences::Differences;
pub use edit::{Renames, filter, merge};
pub use error::{GroupDisagreement, MergeConflict, StateError};
pub use flat_load::{FlatLoad, FlatLoadReport, FlatSlot, LoadTarget, optim_state_to_load};
pub use flat_model::FlatModel;
pub use flat_param::{Extent, FlatMember, FlatParameter, FlatSharding, MemberRange, MemberSlice, ShardingStrategy};
pub use flat_state::{FullOptimState, Inventory, SlotFacts, full_optim_state, inventory, sharded_optim_state};
pub use flatten::{
    Flat, FlatLeaf, FlattenRules, MAX_LIST_GAPS, dotted, flatten, flatten_by, is_leaf, path_text, unflatten, unflatten_entries,
};
pub use key_types::KeyTypes;
pub use model_state::{ModelEntry, ModelState, SetModel, get_model_state, set_model_state, with_submodule_prefix};
pub use module::{Buffer, Identity, ModuleTree, Parameter, Wrapper};
pub use names::{EXTRA_STATE, LeafKind, NamedLeaf, Names, canonical_below, nearest};
pub use optimizer::{
    LiveOptimizer, OptimizerState, PARAM_GROUPS, PARAM_NAMES, PARAMS, ParamGroup, RawOptimizer, STATE, USER_STATE, by_ids,
    by_names, combine, names_by_id,
};
pub use optimizer_flat_form::{
    FlatLeftovers, FlatOptimizer, SLOT_KEYS, flatten_optimizer, unflatten_optimizer, unflatten_optimizer_alone,
};
pub use optimizer_load::{OptimizerLoad, OptimizerReport, read_optimizer_state, set_optimizer_state};
pub use options::{Recipients, StateDictOptions};
pub use rekey::{check_same_on_ranks, group_key, rekey};
pub use sharded_load::{
    CheckpointEntry, EntryFacts, OddSlots, ParamLayout, ShardedOptimizerPlan, SlotTarget, adopt_layouts, place_slot,
    plan_sharded_optimizer,
};
pub use slot::{BoxCopy, SlotPiece, SlotTensor, device_of_slot};
pub use stream::{HeldTensor, TransferPart, TransferPlan, TransferStep, broadcast_plan, gather_plan};
pub use template::{TemplateMatch, compare_keys, match_template, structure_of_checkpoint};
pub use tensor::{DeviceKind, TensorFacts, TensorLike, WithFacts, numel};
pub use timings::{Phase, PhaseTimings};
pub use tree::{Dict, Key, MAX_DEPTH, Opaque, Tree, key_of};
