//! `reshard demo`: what `make demo` runs.

use crate::args::DemoArgs;
use crate::demo;
use crate::failure::Result;
use crate::verbs::{Context, Outcome};

pub(crate) fn run(context: &mut Context, args: &DemoArgs) -> Result<Outcome> {
    match demo::run(context.printer.out(), &args.output, &context.program)? {
        true => Ok(Outcome::Fine),
        false => Ok(Outcome::Bad),
    }
}
