//! The `reshard` command, for the script that pip installs and for `python -m reshard`.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with these arguments; returns the exit code. It writes to the process's own stdout and stderr, past
/// `sys.stdout`. `program` is what a shell would call it by.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, program: &str, arguments: Vec<OsString>) -> u8 {
    py.detach(|| reshard_cli::run(program, arguments))
}
