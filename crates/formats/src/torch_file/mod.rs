//! Whole `.pt` files: a state dict, or any tree of containers, with many tensors.
//!
//! Reading is [`TorchArchive::content`](crate::TorchArchive::content), which gives a [`Tree`](crate::Tree);
//! [`TorchFileWriter`] lays out a file for a tree, so that tensors go straight from memory to their place.

mod writer;

pub use writer::{FileTensor, TorchFileWriter};
