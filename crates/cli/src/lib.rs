//! What the `reshard` binary is made of, as a library, so that examples and tests can use its parts.

pub mod demo;
pub mod report;
