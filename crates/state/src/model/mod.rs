//! A model: its modules and wrappers, the names of what is in them, its state, and its flat parameters.

mod flats;
mod module;
mod names;
mod state;

pub use flats::FlatModel;
pub use module::{Buffer, Identity, ModuleTree, Parameter, Wrapper};
pub use names::{LeafKind, NamedLeaf, Names, canonical_below};
pub use state::{ModelEntry, ModelState, SetModel, get_model_state, set_model_state};
