//! Nested state: trees, their keys and paths.

mod flatten;
mod key_types;
mod paths;

pub use flatten::{Flattened, FlattenedLeaf, flatten};
pub use key_types::KeyTypes;
pub(crate) use paths::{below, join};
pub use paths::{dotted, unflatten_entries};
pub use reshard_formats::{Dict, Key, Opaque, Tree, key_of};

/// The most levels a tree may have; deeper ones are refused rather than risking the stack.
pub const MAX_DEPTH: usize = 256;
