//! The engine's tests: whole saves and loads, and everything offline.
// Clippy knows test functions, not what they call.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod around;
mod around_files;
mod asynchronous;
mod comparing;
mod converting;
mod corpus;
mod crashes;
mod digests;
mod health;
mod killed;
mod layouts;
mod matrix;
mod mutations;
mod ordered;
mod read_faults;
mod relayouts;
mod remote;
mod round_trip;
mod s3_faults;
mod strided;
mod typed;
mod verifying;
mod views;
mod writers;
// The S3 server that the storage crate tests with.
#[path = "../../../storage/tests/it/server.rs"]
#[allow(dead_code, reason = "the storage crate looks into its folder")]
mod server;
