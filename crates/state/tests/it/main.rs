//! Tests of the whole crate: one binary, one module per subject.

mod fixtures;
mod flat;
mod host;
mod names;
mod optimizer;
mod properties;
mod sharded;
mod traps;
mod trees;
