//! The binary as people run it: whole commands, their exit codes and what they print.
// Clippy knows test functions, not what they call.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod broken;
mod command;
mod conversions;
mod corpus;
mod demo;
mod foreign;
mod interrupt;
mod numbers;
mod python;
#[cfg(feature = "cloud")]
mod s3;
mod scale;
mod schema;
mod steps;
mod views;
#[cfg(feature = "cloud")]
mod web;
// The S3 server that the storage crate tests with.
#[cfg(feature = "cloud")]
#[path = "../../../storage/tests/it/server.rs"]
#[allow(dead_code, reason = "the storage crate gives its settings in code")]
mod server;
