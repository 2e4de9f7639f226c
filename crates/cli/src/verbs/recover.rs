//! `reshard recover PATH`: `.metadata` from data files.

use reshard::ErrorKind;
use reshard::recover::{RecoverOptions, RecoverReport, recover};
use serde::Serialize;

use crate::args::RecoverArgs;
use crate::failure::{Failure, Result};
use crate::human;
use crate::printer::Paint;
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Recovered<'a> {
    schema: u32,
    #[serde(flatten)]
    report: &'a RecoverReport,
}

pub(crate) fn run(context: &mut Context, args: &RecoverArgs) -> Result<Outcome> {
    let mut options = RecoverOptions::default();
    options.replace = args.replace;
    options.dry_run = args.dry_run;
    options.accept_absent_ranks = args.accept_absent_ranks;
    options.undo_edits = args.undo_edits;
    let store = context.store(&args.path)?;
    let report = recover(&store, &options).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => Failure::new(format!("the .metadata of {} is readable: nothing to recover", args.path))
            .hint("`reshard verify` checks the checkpoint; --replace rebuilds its .metadata all the same"),
        ErrorKind::Incomplete => {
            Failure::from(error).hint("only data files that reshard wrote, whole, carry what it takes to rebuild .metadata")
        }
        _ => Failure::from(error),
    })?;
    if args.output.json {
        context.printer.json(&Recovered { schema: 1, report: &report })?;
        return Ok(Outcome::Fine);
    }
    let printer = &mut context.printer;
    for unused in &report.unused {
        printer.note(format!("not used: {}: {}", human::printable(&unused.file), human::printable(&unused.why)));
    }
    for warning in &report.warnings {
        printer.warn(human::printable(warning));
    }
    let title = printer.paint(Paint::Bold, human::printable(&report.path));
    let verdict = if report.published { "recovered" } else { "would be recovered" };
    let facts = [
        human::count(report.keys, "key"),
        human::count(report.records, "record"),
        human::count(report.files.len() as u64, "file"),
        human::count(u64::from(report.ranks), "rank"),
        format!("save {}", report.save_id),
    ];
    printer.line(format!("{title}: {verdict}: {}", facts.join(" · ")))?;
    Ok(Outcome::Fine)
}
