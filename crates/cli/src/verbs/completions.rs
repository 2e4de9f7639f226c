//! `reshard completions SHELL`.

use crate::args::{self, CompletionsArgs};
use crate::failure::Result;
use crate::verbs::{Context, Outcome};

pub(crate) fn run(context: &mut Context, args: &CompletionsArgs) -> Result<Outcome> {
    use std::io::Write;
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut args::command(), "reshard", &mut script);
    context.printer.out().write_all(&script)?;
    Ok(Outcome::Fine)
}
