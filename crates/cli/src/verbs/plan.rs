//! `reshard plan PATH --mesh … --rule …`: what a load would read, without reading.

use reshard::relayout::{LoadEstimate, estimate_load};
use serde::Serialize;

use crate::args::PlanArgs;
use crate::failure::Result;
use crate::human;
use crate::meaning;
use crate::printer::{Paint, Printer};
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

/// Ranks that are listed without being asked to.
const MOST: usize = 16;

#[derive(Debug, Serialize)]
struct Planned<'a> {
    schema: u32,
    path: &'a str,
    #[serde(flatten)]
    estimate: &'a LoadEstimate,
}

pub(crate) fn run(context: &mut Context, args: &PlanArgs) -> Result<Outcome> {
    let layout = meaning::layout(&mut context.printer, &args.layout)?;
    let selection = meaning::selection(&args.keys)?;
    let checkpoint = context.open_seen(&args.path, &args.view)?;
    meaning::all_used(&checkpoint, &selection)?;
    meaning::used(&checkpoint, layout.unmatched(&selection, &checkpoint))?;
    let estimate = estimate_load(&checkpoint, &layout, &selection)?;
    if args.output.json {
        context.printer.json(&Planned { schema: 1, path: checkpoint.path(), estimate: &estimate })?;
    } else {
        print(&mut context.printer, &estimate, args.all)?;
    }
    Ok(Outcome::Fine)
}

fn print(printer: &mut Printer, estimate: &LoadEstimate, all: bool) -> Result<()> {
    let mut table = Table::new(&[Side::Right; 8]).head(&["RANK", "TENSORS", "WANTED", "READ", "REQUESTS", "FILES", "MEMORY", ""]);
    let most = estimate.ranks.iter().map(|rank| rank.bytes_read).max().unwrap_or(0);
    let shown = if all { estimate.ranks.len() } else { estimate.ranks.len().min(MOST) };
    for rank in &estimate.ranks[..shown] {
        let bar = human::bar(rank.bytes_read, most, 12);
        let cells = [
            rank.rank.to_string(),
            human::exact(rank.tensors),
            human::bytes(rank.bytes),
            human::bytes(rank.bytes_read),
            human::exact(rank.reads),
            human::exact(rank.files),
            human::bytes(rank.peak_memory),
            format!("{bar:<12}"),
        ];
        table.painted(cells.into_iter().zip([None, None, None, None, None, None, None, Some(Paint::Accent)]));
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    if shown < estimate.ranks.len() {
        let more = printer.paint(
            Paint::Dim,
            format!("and {} more; --all lists them", human::count((estimate.ranks.len() - shown) as u64, "rank")),
        );
        printer.line(more)?;
    }
    printer.line("")?;
    let stored = human::bytes(estimate.stored_bytes);
    let mut facts = Table::new(&[Side::Left, Side::Left]);
    facts.row(["stored", &stored]);
    facts.row(["wanted by all ranks", &human::bytes(estimate.bytes)]);
    facts.row(["read by all ranks", &human::bytes(estimate.bytes_read)]);
    facts.row(["read amplification", &format!("{:.3}", estimate.read_amplification)]);
    facts.row(["imbalance", &format!("{:.3} (most wanted by a rank over the mean)", estimate.imbalance)]);
    facts.row(["peak memory of a rank", &human::bytes(estimate.peak_memory)]);
    for line in facts.lines(printer) {
        printer.line(line)?;
    }
    Ok(())
}
