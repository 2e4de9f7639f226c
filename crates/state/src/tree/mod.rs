//! Nested state: trees, their keys and paths.

mod flatten;
mod key_types;
mod node;
mod paths;

pub use flatten::{Flattened, FlattenedLeaf, flatten};
pub use key_types::KeyTypes;
pub use node::{Dict, Key, MAX_DEPTH, Opaque, Tree, key_of};
pub(crate) use paths::{below, join};
pub use paths::{dotted, unflatten_entries};
