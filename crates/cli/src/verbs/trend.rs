//! `reshard trend RUN`: a run's steps side by side.

use std::time::{Duration, UNIX_EPOCH};

use indexmap::IndexMap;
use reshard::health::HealthLimits;
use reshard::select::Selection;
use reshard::steps::{FirstBad, Trend, TrendOptions, TrendTensor, trend};
use reshard::verify::Severity;
use serde::Serialize;

use super::stats::short;
use crate::args::TrendArgs;
use crate::failure::{Failure, Result};
use crate::human;
use crate::paths;
use crate::printer::{Paint, Printer};
use crate::progress::Progress;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

/// Rows that are listed without being asked to.
const MOST_STEPS: usize = 20;
const MOST_METRICS: usize = 4;
const MOST_ROWS: usize = 40;
const MOST_MODULES: usize = 15;

#[derive(Debug, Serialize)]
struct Told<'a> {
    schema: u32,
    #[serde(flatten)]
    trend: &'a Trend,
}

pub(crate) fn run(context: &mut Context, args: &TrendArgs) -> Result<Outcome> {
    let mut options = TrendOptions::default();
    options.steps.store = context.open.store.clone();
    options.selection = Selection::globs(&args.key)?;
    options.numbers = args.numbers;
    options.limits = HealthLimits::of_texts(&args.limit)?;
    let found = {
        let _bar = Progress::watch(&context.printer, "trend", &options.control);
        trend(&args.folder, &options).map_err(|error| paths::no_run(&args.folder).unwrap_or_else(|| Failure::from(error)))?
    };
    if args.output.json {
        context.told(|printer| printer.json(&Told { schema: 1, trend: &found }))?;
    } else {
        context.told(|printer| print(printer, &found, args.all))?;
    }
    let is_error = |bad: &FirstBad| bad.severity == Severity::Error;
    Ok(if found.bad.iter().any(is_error) { Outcome::Bad } else { Outcome::Fine })
}

fn print(printer: &mut Printer, found: &Trend, all: bool) -> Result<()> {
    let title = printer.paint(Paint::Bold, human::printable(&found.folder));
    printer.line(format!("{title}: {}", human::count(found.steps.len() as u64, "complete step")))?;
    for (name, why) in &found.skipped {
        printer.note(format!("left out {}: {why}", human::printable(name)));
    }
    let mut names: Vec<&String> = Vec::new();
    for step in &found.steps {
        for name in step.metrics.keys() {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let columns: Vec<&String> = names.iter().take(MOST_METRICS).copied().collect();
    let mut sides = vec![Side::Left, Side::Left];
    let mut head = vec!["STEP".to_owned(), "CHANGED".to_owned()];
    for name in &columns {
        sides.push(Side::Right);
        head.push(name.to_uppercase());
    }
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let mut table = Table::new(&sides).head(&head).fit(0);
    let first = if all { 0 } else { found.steps.len().saturating_sub(MOST_STEPS) };
    for step in &found.steps[first..] {
        let mut cells = vec![step.name.clone()];
        cells.push(step.modified.and_then(|at| human::date(UNIX_EPOCH + Duration::from_secs(at))).unwrap_or_default());
        cells.extend(columns.iter().map(|name| step.metrics.get(*name).map_or_else(String::new, |value| human::number(*value))));
        table.row(cells);
    }
    if first > 0 {
        printer.line(printer.paint(Paint::Dim, format!("{first} earlier steps are not listed; --all lists them")))?;
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    metrics(printer, found, &names)?;
    modules(printer, found, all)?;
    tensors(printer, found, all)?;
    printer.line("")?;
    if found.bad.is_empty() {
        let none = printer.paint(Paint::Good, "no tensor");
        printer.line(format!("{none} of the newest step is bad: NaN, infinite, too large, a matrix of zeros or dead"))?;
    }
    let shown = if all { found.bad.len() } else { found.bad.len().min(MOST_ROWS) };
    for bad in &found.bad[..shown] {
        let paint = if bad.severity == Severity::Error { Paint::Bad } else { Paint::Warn };
        let what = printer.paint(paint, in_words(bad.what));
        let before = match (&bad.fine, &bad.before) {
            (Some(step), _) => format!("; it was fine in {}", human::printable(step)),
            (None, Some(before)) => format!("; it was {} in {}", in_words(before.what), human::printable(&before.step)),
            (None, None) => ", the first step there is".to_owned(),
        };
        printer.line(format!("{}: {what} since {}{before}", human::printable(&bad.key), human::printable(&bad.first)))?;
    }
    if shown < found.bad.len() {
        let more = human::exact((found.bad.len() - shown) as u64);
        printer.line(printer.paint(Paint::Dim, format!("and {more} more tensors; --all lists them")))?;
    }
    let read = if found.steps.iter().any(|step| !step.tensors.is_empty()) {
        "structure, checksums and numbers of every step"
    } else {
        "structure of every step; checksums and numbers of the newest, and of others only what the search for a first step read"
    };
    printer.line(printer.paint(Paint::Dim, format!("  checked: {read}")))
}

fn in_words(what: &str) -> &str {
    match what {
        "nan" => "NaN",
        "inf" => "infinite",
        "large" => "too large",
        "zero" => "all zero",
        "dead" => "dead (a second moment of zeros)",
        "absent" => "not there",
        other => other,
    }
}

fn metrics(printer: &mut Printer, found: &Trend, names: &[&String]) -> Result<()> {
    if names.is_empty() || found.steps.len() < 2 {
        return Ok(());
    }
    printer.line("")?;
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Right, Side::Right, Side::Right])
        .head(&["METRIC", "", "FIRST", "LAST", "RANGE"]);
    table = table.fit(0);
    for name in names {
        let values: Vec<Option<f64>> = found.steps.iter().map(|step| step.metrics.get(*name).copied()).collect();
        let known: Vec<f64> = values.iter().flatten().copied().filter(|value| value.is_finite()).collect();
        let (low, high) =
            known.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
        let told: Vec<f64> = values.iter().flatten().copied().collect();
        let end = |value: Option<&f64>| value.map_or_else(String::new, |value| human::number(*value));
        let best = if known.is_empty() { String::new() } else { format!("{} … {}", human::number(low), human::number(high)) };
        table.row([(*name).clone(), human::sparkline(&values), end(told.first()), end(told.last()), best]);
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    Ok(())
}

/// How far modules moved, the one that moved most of late first.
fn modules(printer: &mut Printer, found: &Trend, all: bool) -> Result<()> {
    let mut series: IndexMap<&str, Vec<Option<f64>>> = IndexMap::new();
    for (i, step) in found.steps.iter().enumerate() {
        for (module, change) in &step.modules {
            series.entry(module).or_insert_with(|| vec![None; found.steps.len()])[i] = Some(*change);
        }
    }
    if series.len() < 2 {
        return Ok(());
    }
    let last = |row: &[Option<f64>]| row.last().copied().flatten();
    series.sort_by(|_, a, _, b| last(b).unwrap_or(-1.0).total_cmp(&last(a).unwrap_or(-1.0)));
    printer.line("")?;
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Right]).head(&["MODULE", "‖Δw‖/‖w‖", "LAST"]).fit(0);
    let shown = if all { series.len() } else { series.len().min(MOST_MODULES) };
    for (module, row) in series.iter().take(shown) {
        let name = if module.is_empty() { "(top level)" } else { module };
        let cells = [name.to_owned(), human::sparkline(row), last(row).map(short).unwrap_or_default()];
        table.painted(cells.into_iter().zip([None, Some(Paint::Accent), None]));
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    if shown < series.len() {
        let more = human::exact((series.len() - shown) as u64);
        printer.line(printer.paint(Paint::Dim, format!("and {more} more modules; --all lists them")))?;
    }
    Ok(())
}

fn tensors(printer: &mut Printer, found: &Trend, all: bool) -> Result<()> {
    let mut series: IndexMap<&str, Vec<Option<&TrendTensor>>> = IndexMap::new();
    for (i, step) in found.steps.iter().enumerate() {
        for (key, tensor) in &step.tensors {
            let row = series.entry(key).or_insert_with(|| vec![None; found.steps.len()]);
            row[i] = Some(tensor);
        }
    }
    if series.is_empty() {
        return Ok(());
    }
    printer.line("")?;
    let sides = [Side::Left, Side::Left, Side::Right, Side::Left, Side::Right, Side::Right];
    let mut table = Table::new(&sides).head(&["TENSOR", "RMS", "LAST", "‖Δw‖/‖w‖", "LAST", "NAN"]).fit(0);
    let shown = if all { series.len() } else { series.len().min(MOST_ROWS) };
    let number = |value: Option<f64>| value.map(short).unwrap_or_default();
    for (key, row) in series.iter().take(shown) {
        let rms: Vec<Option<f64>> = row.iter().map(|tensor| tensor.and_then(|tensor| tensor.rms)).collect();
        let change: Vec<Option<f64>> = row.iter().map(|tensor| tensor.and_then(|tensor| tensor.change)).collect();
        let nans = row.last().copied().flatten().map_or(0, |tensor| tensor.nans);
        let cells = [
            ((*key).to_owned(), None),
            (human::sparkline(&rms), Some(Paint::Accent)),
            (number(rms.last().copied().flatten()), None),
            (human::sparkline(&change), Some(Paint::Accent)),
            (number(change.last().copied().flatten()), None),
            (if nans > 0 { human::exact(nans) } else { String::new() }, Some(Paint::Bad)),
        ];
        table.painted(cells);
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    if shown < series.len() {
        let more = human::exact((series.len() - shown) as u64);
        printer.line(printer.paint(Paint::Dim, format!("and {more} more tensors; --all lists them, --key GLOB chooses")))?;
    }
    Ok(())
}
