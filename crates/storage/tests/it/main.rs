//! Every backend against the one suite, alone and inside the fault-injecting wrapper; and the faults themselves.

mod backends;
mod faults;
mod local;
mod s3;
mod server;
