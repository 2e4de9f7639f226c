//! `reshard digest PATH [GLOB]`: what a checkpoint holds, independent of how.

use reshard::digest::{DigestOptions, digest};
use reshard::select::Selection;

use crate::args::DigestArgs;
use crate::failure::Result;
use crate::meaning;
use crate::progress::Progress;
use crate::verbs::{Context, Outcome};

pub(crate) fn run(context: &mut Context, args: &DigestArgs) -> Result<Outcome> {
    let mut options = DigestOptions::default();
    options.selection = Selection::globs(args.glob.as_slice())?;
    options.verify = !args.no_verify;
    let checkpoint = context.open_seen(&args.path, &args.view)?;
    meaning::all_used(&checkpoint, &options.selection)?;
    let found = {
        let _bar = Progress::watch(&context.printer, "digest", &options.control);
        digest(&checkpoint, &options)?
    };
    context.printer.json(&found)?;
    Ok(Outcome::Fine)
}
