//! `reshard convert SRC DST --to …`: another format.

use reshard::convert::{ConvertReport, Destination, Target, convert};
use reshard::save::Compression;
use serde::Serialize;

use crate::args::{CompressionArg, ConvertArgs, FormatArg};
use crate::failure::Result;
use crate::human;
use crate::interrupt;
use crate::meaning;
use crate::printer::{Paint, Printer};
use crate::progress::Progress;
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
pub(super) struct Converted<'a> {
    pub(super) schema: u32,
    #[serde(flatten)]
    pub(super) report: &'a ConvertReport,
}

pub(crate) fn run(context: &mut Context, args: &ConvertArgs) -> Result<Outcome> {
    let mut options = meaning::convert_options(&args.write.keys, &args.write.cast, &args.write.write)?;
    options.compression = args.compress.map(|CompressionArg::Zstd| Compression::Zstd);
    let max_shard_size = args.max_shard_size.as_deref().map(meaning::size).transpose()?;
    let to = args.to.map(FormatArg::name);
    let target = Target::choose(to, &args.destination, None, Some(args.ranks), max_shard_size)?;
    let source = context.open_seen(&args.source, &args.view)?;
    meaning::all_used(&source, &options.selection)?;
    meaning::used(&source, options.casts.unmatched(&options.selection, &source))?;
    let destination = Destination::parse(&args.destination, target, &context.open.store)?;
    let report = {
        interrupt::cancels(&options.control);
        let _bar = Progress::watch(&context.printer, "convert", &options.control);
        convert(&source, &destination, target, &options)?
    };
    if args.output.json {
        context.printer.json(&Converted { schema: 1, report: &report })?;
    } else {
        print(&mut context.printer, &report)?;
    }
    Ok(Outcome::Fine)
}

/// What was written, on one line of data and some remarks.
pub(super) fn print(printer: &mut Printer, report: &ConvertReport) -> Result<()> {
    for warning in &report.warnings {
        printer.warn(warning);
    }
    if !report.skipped.is_empty() {
        let names: Vec<String> = report.skipped.iter().take(5).map(|key| human::printable(key)).collect();
        let more = if report.skipped.len() > 5 { ", …" } else { "" };
        let count = human::count(report.skipped.len() as u64, "key");
        printer.warn(format!("left out {count} that {} cannot carry: {}{more}", report.format.name(), names.join(", ")));
    }
    let narrowing = report.casts.iter().filter(|cast| cast.narrowing).count() as u64;
    if !report.casts.is_empty() {
        let lossy = if narrowing > 0 { format!(", {narrowing} of them to a narrower type") } else { String::new() };
        printer.note(format!("cast {}{lossy}", human::count(report.casts.len() as u64, "tensor")));
    }
    let title = printer.paint(Paint::Bold, human::printable(&report.to));
    let facts = [
        report.format.name().to_owned(),
        human::count(report.tensors, "tensor"),
        human::count(report.values, "value"),
        human::bytes(report.bytes),
        human::count(report.files.len() as u64, "file"),
    ];
    printer.line(format!("{title}: {}", facts.join(" · ")))?;
    if report.seconds >= 1.0 {
        let rate = human::bytes((report.bytes as f64 / report.seconds) as u64);
        printer.note(format!("{:.1} s, {rate}/s", report.seconds));
    }
    Ok(())
}
