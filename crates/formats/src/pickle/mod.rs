//! Inert pickle, protocols 0 to 5: decoding never runs anything.
//!
//! [`decode`] gives a [`Document`], a flat arena to look around in with [`Document::view`]. Which classes may
//! occur is a [`Policy`]; instances are data ([`Object`]).

mod decode;
mod document;
mod error;
mod fill;
mod globals;
mod limits;
mod memo;
mod node;
mod opcode;
mod text;

pub use decode::{decode, decode_with_limits};
pub use document::{Document, Global, GlobalId, Made, Object, View};
pub use error::PickleError;
pub use globals::{Policy, Unknown, modern_module};
pub use limits::{
    Limits, MAX_DEPTH, MAX_INPUT_BYTES, MAX_INT_BYTES, MAX_INT_DIGITS, MAX_MEMO, MAX_OBJECTS,
    MAX_TREE_VALUES, MAX_TUPLE_LEN,
};
pub use node::Node;
