//! The binary as people run it: whole commands, their exit codes and what they print.
// Clippy knows test functions, not what they call.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod broken;
mod command;
mod conversions;
mod corpus;
mod interrupt;
mod python;
#[cfg(feature = "cloud")]
mod s3;
mod scale;
mod schema;
#[cfg(feature = "cloud")]
mod server;
mod steps;
mod views;
