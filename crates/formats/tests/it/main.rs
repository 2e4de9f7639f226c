//! Whole files in, proven types out: what torch, safetensors and people with bad intentions wrote.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod corpus;
mod metadata;
mod own;
mod pickle_hostile;
mod record_hostile;
mod record_read;
mod record_write;
mod safetensors;
mod support;
mod torch_file;
mod values;
