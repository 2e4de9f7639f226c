//! Tests of the whole crate: one binary, one module per subject.

// The allowance for tests covers test functions; what they share lies beside them.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod fixtures;
mod flat;
mod host;
mod names;
mod optimizer;
mod properties;
mod slots;
mod traps;
mod trees;
