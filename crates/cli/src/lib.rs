//! What the `reshard` binary is made of, as a library, so that the Python package has the command too,
//! and examples and tests can use its parts.
//!
//! `args` is what was typed; every file of `verbs` turns it into what it means and does it. Data goes to stdout through
//! `printer`, all the rest to stderr; `failure` is how errors are told; the exit code is 0 when fine, 1 when something
//! was checked and found bad, 2 when the command could not run.

mod args;
mod catalog;
pub mod demo;
mod elements;
mod failure;
mod human;
mod interrupt;
mod limits;
mod meaning;
mod paths;
mod printer;
mod progress;
pub mod report;
mod report_data;
mod slice;
mod summary;
mod table;
mod verbs;
mod version;

pub use args::command;
pub use human::shell_word;
pub use verbs::run;
