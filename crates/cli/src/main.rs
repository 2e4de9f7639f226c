//! The `reshard` command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let program = arguments.next().map_or_else(|| "reshard".to_owned(), |name| reshard_cli::shell_word(&name.to_string_lossy()));
    ExitCode::from(reshard_cli::run(&program, arguments))
}
