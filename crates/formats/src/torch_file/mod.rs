//! Whole `.pt` files: a state dict, or any tree of containers, with many tensors.
//!
//! Reading is [`TorchArchive::content`](crate::TorchArchive::content), which gives a [`Tree`];
//! [`TorchFileWriter`] lays out a file for a tree, so that tensors go straight from memory to their place.

mod tree;
mod writer;

pub use tree::{Tree, TreeLeaf};
pub use writer::{FileTensor, TorchFileWriter};
