//! Every backend against the one suite, alone and inside the fault-injecting wrapper; and the faults themselves.
// Clippy knows test functions, not what they call.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod backends;
mod faults;
mod http;
mod local;
mod s3;
mod server;
