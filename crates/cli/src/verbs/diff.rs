//! `reshard diff A B`: what differs.

use reshard::Checkpoint;
use reshard::diff::{DiffOptions, DiffReport, KeyDifference, ModuleChange, Tolerance, ValueDifference, diff};
use reshard::select::{Selection, Unmatched};
use serde::Serialize;

use super::stats::short;
use crate::args::DiffArgs;
use crate::failure::{Failure, Result};
use crate::human;
use crate::meaning;
use crate::printer::{Paint, Printer};
use crate::progress::Progress;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

/// Differences of one kind that are listed without being asked to.
const MOST: usize = 40;

#[derive(Debug, Serialize)]
struct Compared<'a> {
    schema: u32,
    equal: bool,
    tolerance: Tolerance,
    elements_compared: bool,
    #[serde(flatten)]
    report: &'a DiffReport,
    modules: Vec<ModuleChange>,
}

/// Modules that are listed.
const MOST_MODULES: usize = 10;

pub(crate) fn run(context: &mut Context, args: &DiffArgs) -> Result<Outcome> {
    let mut options = DiffOptions::default();
    let mut selection = Selection::globs(&args.include)?;
    selection.exclude = Selection::globs(&args.exclude)?.include;
    options.second = selection.clone();
    selection.renames = meaning::renames(&args.rename, None)?;
    options.first = selection;
    options.elements = !args.shapes_only;
    options.tolerance = tolerance(args.tolerance, args.absolute, args.relative)?;
    let (first, second) = (context.open_seen(&args.first, &args.view)?, context.open(&args.second)?);
    meaning::used(&first, options.first.unmatched(&first).into_iter().filter(|unused| in_neither(unused, &second)).collect())?;
    let report = {
        let _bar = Progress::watch(&context.printer, "diff", &options.control);
        diff(&first, &second, &options)?
    };
    if args.output.json {
        context.printer.json(&Compared {
            schema: 1,
            equal: report.is_same(),
            tolerance: options.tolerance,
            elements_compared: options.elements,
            report: &report,
            modules: report.modules(),
        })?;
    } else {
        print(&mut context.printer, &report, args)?;
    }
    Ok(if report.is_same() { Outcome::Fine } else { Outcome::Bad })
}

/// Whether a pattern that fits no key of the first fits none of the second either.
fn in_neither(unused: &Unmatched, second: &Checkpoint) -> bool {
    Selection::globs(&[&unused.pattern]).map_or(true, |selection| !second.keys().any(|key| selection.wants(key)))
}

/// The tolerance that options mean.
pub(crate) fn tolerance(both: Option<f64>, absolute: Option<f64>, relative: Option<f64>) -> Result<Tolerance> {
    let mut tolerance = Tolerance::both(both.unwrap_or(0.0));
    tolerance.absolute = absolute.unwrap_or(tolerance.absolute);
    tolerance.relative = relative.unwrap_or(tolerance.relative);
    match [tolerance.absolute, tolerance.relative].iter().all(|t| t.is_finite() && *t >= 0.0) {
        true => Ok(tolerance),
        false => Err(Failure::new("a tolerance is a number that is not negative")),
    }
}

fn print(printer: &mut Printer, report: &DiffReport, args: &DiffArgs) -> Result<()> {
    let most = if args.all { usize::MAX } else { MOST };
    for (mark, paint, keys, place) in
        [("-", Paint::Bad, &report.only_first, &report.first), ("+", Paint::Good, &report.only_second, &report.second)]
    {
        for key in keys.iter().take(most) {
            let mark = printer.paint(paint, mark);
            printer.line(format!("{mark} {}", human::printable(key)))?;
        }
        more(printer, keys.len(), most, &format!("keys only in {}", human::printable(place)))?;
    }
    for differing in report.gravest_first().into_iter().take(most) {
        let paint = if differing.is_broken() { Paint::Bad } else { Paint::Warn };
        let mark = printer.paint(paint, "~");
        let key = human::printable(&differing.key);
        printer.line(format!("{mark} {key}  {}", human::printable(&words(&differing.difference))))?;
    }
    more(printer, report.different.len(), most, "keys that differ")?;
    modules(printer, &report.modules(), args.all)?;
    let count = |n: usize, what: &str| if n > 0 { Some(format!("{} {what}", human::exact(n as u64))) } else { None };
    let mut facts: Vec<String> = vec![format!("{} the same", human::exact(report.same))];
    facts.extend(count(report.different.len(), "different"));
    facts.extend(count(report.only_first.len(), "only in the first"));
    facts.extend(count(report.only_second.len(), "only in the second"));
    printer.line(facts.join(", "))
}

fn modules(printer: &mut Printer, modules: &[ModuleChange], all: bool) -> Result<()> {
    if modules.len() < 2 {
        return Ok(());
    }
    printer.line("")?;
    let shown = if all { modules.len() } else { modules.len().min(MOST_MODULES) };
    let mut table =
        Table::new(&[Side::Left, Side::Right, Side::Right, Side::Left]).head(&["MODULE", "TENSORS", "‖Δw‖/‖w‖", ""]).fit(0);
    for module in &modules[..shown] {
        let name = if module.module.is_empty() { "(top level)" } else { &module.module };
        let moved = module.relative_change.map_or_else(|| "-".to_owned(), short);
        let mut odd = Vec::new();
        if module.new_nans > 0 {
            odd.push(format!("{} new NaN", human::exact(module.new_nans)));
        }
        if module.newly_zero > 0 {
            odd.push(format!("{} newly zero", human::count(module.newly_zero, "tensor")));
        }
        let cells = [name.to_owned(), human::exact(module.tensors), moved, odd.join(", ")];
        table.painted(cells.into_iter().zip([None, None, None, Some(Paint::Bad)]));
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    more(printer, modules.len(), shown, "modules")?;
    printer.line("")
}

fn more(printer: &mut Printer, all: usize, most: usize, what: &str) -> Result<()> {
    if all > most {
        let text = printer.paint(Paint::Dim, format!("  and {} more {what}; --all lists them", all - most));
        printer.line(text)?;
    }
    Ok(())
}

fn words(difference: &KeyDifference) -> String {
    match difference {
        KeyDifference::Kind { first, second } => format!("a {first} here, a {second} there"),
        KeyDifference::Shape { first, second } => format!("shape {} → {}", human::shape(first), human::shape(second)),
        KeyDifference::DType { first, second, elements } => match elements {
            Some(found) => format!("dtype {first} → {second}, {}", distance(found)),
            None => format!("dtype {first} → {second}"),
        },
        KeyDifference::Elements(found) => distance(found),
        KeyDifference::Value { first, second } => {
            format!("{} → {}", human::shortened(&first.to_string(), 60), human::shortened(&second.to_string(), 60))
        }
        _ => "differs".to_owned(),
    }
}

fn distance(found: &ValueDifference) -> String {
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), human::number);
    let mut odd = String::new();
    if found.new_nans > 0 {
        odd.push_str(&format!("{} new NaN, ", human::exact(found.new_nans)));
    }
    if found.new_infinities > 0 {
        odd.push_str(&format!("{} newly infinite, ", human::exact(found.new_infinities)));
    }
    if found.newly_zero {
        odd.push_str("now all zero, ");
    }
    let moved = match (found.relative_change, found.cosine) {
        (Some(change), Some(cosine)) => format!("‖Δ‖/‖w‖ {}, cosine {}, ", short(change), human::number(cosine)),
        (Some(change), None) => format!("‖Δ‖/‖w‖ {}, ", short(change)),
        _ => String::new(),
    };
    format!(
        "{odd}{moved}{} of {} differ, absolute max {} mean {}, relative max {} mean {}, first at {:?}",
        human::exact(found.different),
        human::exact(found.elements),
        number(found.max_absolute),
        number(found.mean_absolute),
        number(found.max_relative),
        number(found.mean_relative),
        found.first_index,
    )
}
