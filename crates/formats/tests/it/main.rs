//! Whole files in, proven types out: what torch, safetensors and people with bad intentions wrote.

mod corpus;
mod record_hostile;
mod record_read;
mod record_write;
mod safetensors;
mod support;
mod torch_file;
