//! The engine's tests: whole saves and loads, and everything offline.
// Clippy knows test functions, not what they call.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod asynchronous;
mod comparing;
mod compressed;
mod converting;
mod corpus;
mod crashes;
mod device_memory;
mod digests;
mod editing;
mod for_trainers;
mod foreign;
mod health;
mod killed;
mod layouts;
mod loading;
mod matrix;
mod mutations;
mod object_like;
mod read_faults;
mod recovering;
mod relayouts;
mod remote;
mod round_trip;
mod s3_faults;
mod samples;
mod saving;
mod scaled;
mod sick_runs;
mod steps;
mod strided;
mod tracing;
mod trainer_steps;
mod typed;
mod verifying;
mod views;
mod wholes;
mod writers;
// The S3 server that the storage crate tests with.
#[path = "../../../storage/tests/it/server.rs"]
#[allow(dead_code, reason = "the storage crate looks into its folder")]
mod server;
