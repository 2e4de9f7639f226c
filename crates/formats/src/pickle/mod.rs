//! Inert pickle, protocols 0 to 5: decoding never runs anything.
//!
//! [`decode`] gives a [`Document`], a flat arena to look around in with [`Document::view`]. Which classes may
//! occur is a [`Policy`]; instances are data ([`Object`]). [`read_value`] and [`write_value`] are the way to and from
//! plain values.

mod carried;
mod decode;
mod document;
mod encode;
mod error;
mod fill;
mod globals;
mod known;
mod limits;
mod memo;
mod node;
pub(crate) mod opcode;
mod read_value;
mod text;
mod uncommon;
mod write_value;

pub use carried::Carried;
pub use decode::{decode, decode_with_limits};
pub use document::{Document, Global, GlobalId, Made, Object, View};
pub(crate) use encode::BATCH;
pub use encode::{Encoder, Slot};
pub use error::PickleError;
pub use globals::{Policy, Unknown, acts, modern_module};
pub use limits::{
    Limits, MAX_DEPTH, MAX_INPUT_BYTES, MAX_INT_BYTES, MAX_INT_DIGITS, MAX_MEMO, MAX_OBJECTS, MAX_TUPLE_LEN, TREE_BYTES_FLOOR,
    TREE_BYTES_PER_INPUT_BYTE,
};
pub use node::Node;
pub(crate) use read_value::key_token;
pub use read_value::read_value;
pub use write_value::write_value;
