//! `reshard inspect PATH`: one screen.

mod json;

use reshard::Checkpoint;
use reshard::checkpoint::Format;
use reshard::health::OptimizerSummary;

use crate::args::InspectArgs;
use crate::catalog::format_name;
use crate::failure::Result;
use crate::human;
use crate::printer::{Paint, Printer};
use crate::summary::{FileShare, Share, Summary};
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

/// Rows of a block before the rest becomes one line.
const MOST_PARTS: usize = 6;
const MOST_CUTS: usize = 6;
const MOST_FILES: usize = 6;
const MOST_TROUBLES: usize = 5;
const BAR: usize = 20;

pub(crate) fn run(context: &mut Context, args: &InspectArgs) -> Result<Outcome> {
    let checkpoint = context.open_seen(&args.path, &args.view)?;
    let summary = Summary::of(&checkpoint);
    if args.output.json {
        context.printer.json(&json::Inspected::new(&checkpoint, &summary))?;
    } else {
        print(&mut context.printer, &checkpoint, &summary)?;
    }
    Ok(Outcome::Fine)
}

fn print(printer: &mut Printer, checkpoint: &Checkpoint, summary: &Summary) -> Result<()> {
    heading(printer, checkpoint, summary)?;
    shares(printer, "parts", &summary.parts)?;
    shares(printer, "dtypes", &summary.dtypes)?;
    cuts(printer, summary)?;
    for optimizer in &summary.optimizers {
        print_optimizer(printer, optimizer, summary.optimizers.len() > 1)?;
    }
    files(printer, &summary.files)?;
    health(printer, checkpoint, summary)
}

fn heading(printer: &mut Printer, checkpoint: &Checkpoint, summary: &Summary) -> Result<()> {
    let catalog = checkpoint.catalog();
    let title = printer.paint(Paint::Bold, human::printable(checkpoint.path()));
    printer.line(title)?;
    let mut facts = vec![format_name(catalog.format).to_owned()];
    if catalog.writer != format_name(catalog.format) {
        facts.push(format!("written by {}", human::printable(&catalog.writer)));
    }
    if let Some(ranks) = summary.ranks.filter(|_| !catalog.writer.contains("rank")) {
        facts.push(human::count(ranks, "rank"));
    }
    facts.push(human::count(summary.files.len() as u64, "file"));
    if let Some(step) = summary.step {
        facts.push(format!("step {}", step));
    }
    facts.extend(summary.saved.and_then(human::date));
    printer.line(format!("  {}", facts.join(" · ")))?;
    let total = &summary.total;
    let stored: Option<u64> = summary.files.iter().map(|file| file.size).sum();
    let stored = stored.map(|bytes| format!(" ({} stored)", human::bytes(bytes))).unwrap_or_default();
    let numbers = [
        human::count(total.tensors + total.values, "key"),
        human::count(total.tensors, "tensor"),
        human::count(total.values, "value"),
        human::count(summary.chunks, "chunk"),
        format!("{} elements", human::amount(total.elements)),
        format!("{}{stored}", human::bytes(total.bytes)),
    ];
    printer.line(format!("  {}", numbers.join(" · ")))?;
    for remark in catalog.remarks() {
        let remark = printer.paint(Paint::Dim, format!("  note: {remark}"));
        printer.line(remark)?;
    }
    Ok(())
}

fn block(printer: &mut Printer, name: &str, table: &Table, more: Option<String>) -> Result<()> {
    printer.line("")?;
    let name = printer.paint(Paint::Bold, name);
    printer.line(name)?;
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    if let Some(more) = more {
        let more = printer.paint(Paint::Dim, format!("  {more}"));
        printer.line(more)?;
    }
    Ok(())
}

fn shares(printer: &mut Printer, name: &str, shares: &[Share]) -> Result<()> {
    if shares.is_empty() {
        return Ok(());
    }
    let whole: u64 = shares.iter().map(|share| share.bytes).fold(0, u64::saturating_add);
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Right, Side::Right, Side::Right, Side::Left]).indent(2).fit(0);
    for share in shares.iter().take(MOST_PARTS) {
        let values = if share.values > 0 { human::count(share.values, "value") } else { String::new() };
        let cells = [
            human::shortened(&share.name, 32),
            human::bar(share.bytes, whole, BAR),
            human::percent(share.bytes, whole),
            human::bytes(share.bytes),
            if share.tensors > 0 { human::count(share.tensors, "tensor") } else { String::new() },
            values,
        ];
        table.painted(cells.into_iter().zip([None, Some(Paint::Accent), None, None, Some(Paint::Dim), Some(Paint::Dim)]));
    }
    let rest = &shares[shares.len().min(MOST_PARTS)..];
    let more = (!rest.is_empty()).then(|| {
        let bytes = rest.iter().map(|share| share.bytes).fold(0, u64::saturating_add);
        format!("and {} more, {}", rest.len(), human::bytes(bytes))
    });
    block(printer, name, &table, more)
}

fn cuts(printer: &mut Printer, summary: &Summary) -> Result<()> {
    if summary.cuts.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(&[Side::Left, Side::Right, Side::Right, Side::Right, Side::Left]).indent(2).fit(4);
    let room = printer.width.saturating_sub(62).max(24);
    for cut in summary.cuts.iter().take(MOST_CUTS) {
        let paint = if cut.cut.kind() == "broken" { Some(Paint::Bad) } else { None };
        let cells = [
            cut.label.clone(),
            human::count(cut.tensors, "tensor"),
            human::count(cut.chunks, "chunk"),
            human::bytes(cut.bytes),
            human::shortened(&format!("{}{}", cut.example, if cut.tensors > 1 { ", …" } else { "" }), room),
        ];
        table.painted(cells.into_iter().zip([paint, None, Some(Paint::Dim), None, Some(Paint::Dim)]));
    }
    let more = summary.cuts.len().saturating_sub(MOST_CUTS);
    block(printer, "layout", &table, (more > 0).then(|| format!("and {more} more ways; `reshard ls` shows each tensor's")))
}

fn print_optimizer(printer: &mut Printer, optimizer: &OptimizerSummary, one_of_several: bool) -> Result<()> {
    let mut title: Vec<String> =
        one_of_several.then(|| human::printable(optimizer.root.trim_end_matches('.'))).into_iter().collect();
    title.push(optimizer.name.unwrap_or("optimizer").to_owned());
    if optimizer.params > 0 {
        title.push(human::count(optimizer.params, "parameter"));
    }
    title.extend(optimizer.step.map(|step| format!("step {step}")));
    let mut table = Table::new(&[Side::Left, Side::Right, Side::Right, Side::Left]).indent(2);
    let mut slots: Vec<_> = optimizer.slots.iter().collect();
    slots.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    for slot in slots.iter().take(MOST_PARTS) {
        let dtypes = slot.dtypes.iter().copied().collect::<Vec<_>>().join(", ");
        table.row([slot.name.clone(), human::count(slot.tensors, "tensor"), human::bytes(slot.bytes), dtypes]);
    }
    let more = slots.len().saturating_sub(MOST_PARTS);
    block(printer, &format!("optimizer  {}", title.join(" · ")), &table, (more > 0).then(|| format!("and {more} more slots")))?;
    const TELLING: &[&str] = &["lr", "betas", "momentum", "weight_decay", "eps", "alpha", "nesterov", "amsgrad", "initial_lr"];
    for group in optimizer.groups.iter().take(MOST_PARTS) {
        let mut words: Vec<String> = TELLING
            .iter()
            .filter_map(|name| group.options.iter().find(|(option, _)| option == name))
            .filter(|(option, text)| !(matches!(option.as_str(), "amsgrad" | "nesterov") && text == "False"))
            .map(|(option, text)| format!("{option}={}", human::shortened(&human::printable(text), 40)))
            .collect();
        let params = group.params.as_ref().map(|params| human::count(params.len() as u64, "parameter"));
        words.splice(0..0, params);
        printer.line(format!("  group {}  {}", human::printable(&group.name), words.join("  ")))?;
    }
    Ok(())
}

fn files(printer: &mut Printer, files: &[FileShare]) -> Result<()> {
    let mut sorted: Vec<&FileShare> = files.iter().collect();
    let size = |file: &FileShare| file.size.unwrap_or(file.used);
    let largest = files.iter().map(size).max().unwrap_or(0);
    // Few files are shown as they come; of many, the largest and the smallest say how even they are.
    if sorted.len() > MOST_FILES {
        sorted.sort_by_key(|file| std::cmp::Reverse(size(file)));
    }
    let shown: Vec<&FileShare> = match sorted.len() > MOST_FILES {
        true => sorted[..MOST_FILES - 2].iter().chain(&sorted[sorted.len() - 1..]).copied().collect(),
        false => sorted.clone(),
    };
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Left, Side::Right, Side::Right, Side::Right]).indent(2).fit(0);
    for file in &shown {
        let (bytes, paint) = match file.size {
            Some(size) => (human::bytes(size), None),
            None => ("missing".to_owned(), Some(Paint::Bad)),
        };
        let cells = [
            human::shortened(&file.path, 40),
            file.rank.map(|rank| format!("rank {rank}")).unwrap_or_default(),
            human::bar(size(file), largest, BAR),
            bytes,
            human::count(file.chunks, "chunk"),
            if shown.len() < sorted.len() && std::ptr::eq(*file, shown[shown.len() - 1]) {
                "smallest".to_owned()
            } else {
                String::new()
            },
        ];
        table.painted(cells.into_iter().zip([
            None,
            Some(Paint::Dim),
            Some(Paint::Accent),
            paint,
            Some(Paint::Dim),
            Some(Paint::Dim),
        ]));
    }
    let more = sorted.len() - shown.len();
    let total: u64 = files.iter().map(size).fold(0, u64::saturating_add);
    let mean = total as f64 / files.len().max(1) as f64;
    let even = if mean > 0.0 { format!(", the largest is {:.2} × the mean", largest as f64 / mean) } else { String::new() };
    block(printer, "files", &table, (more > 0).then(|| format!("and {more} more{even}")))
}

fn health(printer: &mut Printer, checkpoint: &Checkpoint, summary: &Summary) -> Result<()> {
    printer.line("")?;
    let name = printer.paint(Paint::Bold, "health");
    let health = &summary.health;
    if health.bad == 0 && health.unseen {
        let mark = printer.paint(Paint::Warn, "not known");
        printer.line(format!("{name}  {mark}: {}", health.checked))?;
    } else if health.bad == 0 {
        let mark = printer.paint(Paint::Good, "looks whole");
        printer.line(format!("{name}  {mark}: {}", health.checked))?;
    } else {
        let mark = printer.paint(Paint::Bad, human::count(health.bad, "problem"));
        printer.line(format!("{name}  {mark}"))?;
    }
    for trouble in health.troubles.iter().take(MOST_TROUBLES) {
        let (label, paint) = if trouble.bad { ("bad", Paint::Bad) } else { ("note", Paint::Warn) };
        let label = printer.paint(paint, label);
        printer.line(format!("  {label}: {}", human::printable(&trouble.text)))?;
    }
    if health.troubles.len() > MOST_TROUBLES {
        let more = printer.paint(Paint::Dim, format!("  and {} more", health.troubles.len() - MOST_TROUBLES));
        printer.line(more)?;
    }
    let sums = match (checkpoint.has_sidecar(), checkpoint.catalog().format) {
        (true, _) => "checksums of every record lie beside it",
        (false, Format::Safetensors) => "safetensors carries no checksums",
        (false, _) => "its records carry CRC-32 checksums",
    };
    let hint = printer.paint(Paint::Dim, format!("  {sums}; `reshard verify` reads everything and compares"));
    printer.line(hint)
}
