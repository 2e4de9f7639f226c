//! The `reshard` command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    reshard_cli::main()
}
