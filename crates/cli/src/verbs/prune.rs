//! `reshard prune DIR --keep-last …`: steps that may go.

use reshard::steps::{Best, PruneReport, Retention, StepsOptions, prune};
use serde::Serialize;

use super::latest::state_words;
use crate::args::PruneArgs;
use crate::failure::{Failure, Result};
use crate::human;
use crate::meaning;
use crate::paths;
use crate::printer::{Paint, Printer};
use crate::progress::Progress;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Pruned<'a> {
    schema: u32,
    folder: &'a str,
    #[serde(flatten)]
    report: &'a PruneReport,
}

pub(crate) fn run(context: &mut Context, args: &PruneArgs) -> Result<Outcome> {
    let retention = retention(args)?;
    let mut options = StepsOptions::default();
    options.store = context.open.store.clone();
    options.deep = args.deep;
    let report = {
        let _bar = Progress::watch(&context.printer, "prune", &options.control);
        prune(&args.folder, &retention, args.dry_run, &options)?
    };
    if let (true, Some(failure)) = (report.steps.is_empty(), paths::no_run(&args.folder)) {
        return Err(failure);
    }
    if args.output.json {
        context.printer.json(&Pruned { schema: 1, folder: &args.folder, report: &report })?;
    } else {
        print(&mut context.printer, &report)?;
    }
    match report.failed.is_empty() {
        true => Ok(Outcome::Fine),
        false => {
            context.printer.finish()?;
            Err(Failure::new(format!("could not remove {}", human::count(report.failed.len() as u64, "thing")))
                .hint(report.failed.join("; ")))
        }
    }
}

fn retention(args: &PruneArgs) -> Result<Retention> {
    let mut retention = Retention::default();
    retention.last = args.keep_last;
    retention.every = args.keep_every;
    retention.younger_than = args.keep_younger.as_deref().map(meaning::age).transpose()?;
    retention.budget = args.budget.as_deref().map(meaning::size).transpose()?;
    retention.fallback = args.fallback;
    retention.grace = meaning::age(&args.grace)?;
    retention.abandoned = args.abandoned;
    retention.best = args.keep_best.as_deref().map(Best::parse).transpose()?;
    if args.keep_every == Some(0) {
        return Err(Failure::new("invalid --keep-every 0: it needs at least 1"));
    }
    Ok(retention)
}

fn print(printer: &mut Printer, report: &PruneReport) -> Result<()> {
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Left, Side::Right, Side::Left]);
    for decision in &report.steps {
        let (verdict, paint) = match (decision.keep, report.dry_run) {
            (true, _) => ("keep", Paint::Good),
            (false, true) => ("would remove", Paint::Bad),
            (false, false) => ("removed", Paint::Bad),
        };
        let (state, state_paint, _) = state_words(&decision.step.state);
        let cells = [
            verdict.to_owned(),
            decision.step.name.clone(),
            state.to_owned(),
            human::bytes(decision.step.bytes),
            decision.why.join(", "),
        ];
        table.painted(cells.into_iter().zip([Some(paint), None, Some(state_paint), None, Some(Paint::Dim)]));
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    for leftover in &report.leftovers {
        let verdict = printer.paint(Paint::Bad, if report.dry_run { "would remove" } else { "removed" });
        printer.line(format!("{verdict}  {}  leftover", human::printable(leftover)))?;
    }
    let verb = if report.dry_run { "would be set free" } else { "set free" };
    printer.note(format!("{} {verb}", human::bytes(report.bytes)));
    Ok(())
}
