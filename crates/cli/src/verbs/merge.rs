//! `reshard merge A B… -o DST`: the average.

use reshard::Checkpoint;
use reshard::convert::{Destination, Target};
use reshard::merge::{MergeReport, merge};
use serde::Serialize;

use crate::args::{FormatArg, MergeArgs};
use crate::failure::Result;
use crate::human;
use crate::interrupt;
use crate::meaning;
use crate::progress::Progress;
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Merged<'a> {
    schema: u32,
    #[serde(flatten)]
    report: &'a MergeReport,
}

pub(crate) fn run(context: &mut Context, args: &MergeArgs) -> Result<Outcome> {
    let options = meaning::convert_options(&args.keys, &[], &args.write)?;
    let sources = args.sources.iter().map(|path| context.open(path)).collect::<Result<Vec<Checkpoint>>>()?;
    if let Some(first) = sources.first() {
        meaning::all_used(first, &options.selection)?;
    }
    let first = sources.first().map(|source| source.catalog().format);
    let target = Target::choose(args.to.map(FormatArg::name), &args.output, first, Some(args.ranks), None)?;
    let destination = Destination::parse(&args.output, target, &context.open.store)?;
    let report = {
        interrupt::cancels(&options.control);
        let _bar = Progress::watch(&context.printer, "merge", &options.control);
        merge(&sources.iter().collect::<Vec<_>>(), &args.weights, &destination, target, &options)?
    };
    if args.json.json {
        context.printer.json(&Merged { schema: 1, report: &report })?;
        return Ok(Outcome::Fine);
    }
    let printer = &mut context.printer;
    if !report.taken_from_first.is_empty() {
        let names: Vec<String> = report.taken_from_first.iter().take(5).map(|key| human::printable(key)).collect();
        let more = if report.taken_from_first.len() > 5 { ", …" } else { "" };
        let count = human::count(report.taken_from_first.len() as u64, "key");
        printer.note(format!("{count} differ and have no average, so the first one's were taken: {}{more}", names.join(", ")));
    }
    let total: f64 = report.weights.iter().sum();
    let weights: Vec<String> = report.weights.iter().map(|weight| human::number(weight / total)).collect();
    printer.note(format!(
        "averaged {} of {} checkpoints, weights {}",
        human::count(report.averaged, "tensor"),
        sources.len(),
        weights.join(", ")
    ));
    super::convert::print(printer, &report.written)?;
    Ok(Outcome::Fine)
}
