//! `reshard verify PATH`: is it whole?

use reshard::checkpoint::Format;
use reshard::health::{HealthLimits, HealthOptions, HealthReport, health};
use reshard::verify::{Severity, VerifyOptions, VerifyReport, verify_path};
use serde::Serialize;

use super::stats::findings;
use crate::args::VerifyArgs;
use crate::failure::Result;
use crate::human;
use crate::printer::{Paint, Printer};
use crate::progress::Progress;
use crate::verbs::{Context, Outcome, not_opened};

#[derive(Debug, Serialize)]
struct Verified<'a> {
    schema: u32,
    sound: bool,
    #[serde(flatten)]
    report: &'a VerifyReport,
    /// What the numbers say, when they were looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    numbers: Option<&'a HealthReport>,
}

/// Findings that are listed without being asked to.
const MOST: usize = 40;

pub(crate) fn run(context: &mut Context, args: &VerifyArgs) -> Result<Outcome> {
    let open = context.open_through(&args.view)?;
    let mut options = VerifyOptions::default();
    options.data = !args.quick;
    let report = {
        let _bar = Progress::watch(&context.printer, "verify", &options.control);
        verify_path(&args.path, &open, &options).map_err(|error| not_opened(&args.path, error))?
    };
    // What is not sound has no numbers to speak of.
    let numbers = match args.numbers && report.is_sound() {
        true => Some(numbers(context, args)?),
        false => None,
    };
    let sound = report.is_sound() && !numbers.as_ref().is_some_and(HealthReport::has_errors);
    if args.output.json {
        let told = Verified { schema: 1, sound, report: &report, numbers: numbers.as_ref() };
        context.told(|printer| printer.json(&told))?;
    } else {
        context.told(|printer| {
            print(printer, &report, args)?;
            numbers.as_ref().map_or(Ok(()), |numbers| findings(printer, numbers, args.all))
        })?;
    }
    Ok(if sound { Outcome::Fine } else { Outcome::Bad })
}

fn numbers(context: &Context, args: &VerifyArgs) -> Result<HealthReport> {
    let mut options = HealthOptions::default();
    options.limits = HealthLimits::of_texts(&args.limit)?;
    let checkpoint = context.open_seen(&args.path, &args.view)?;
    let _bar = Progress::watch(&context.printer, "numbers", &options.control);
    let mut report = health(&checkpoint, &options)?;
    (report.checked.structure, report.checked.checksums) = (true, true);
    Ok(report)
}

fn print(printer: &mut Printer, report: &VerifyReport, args: &VerifyArgs) -> Result<()> {
    let shown = if args.all { report.findings.len() } else { report.findings.len().min(MOST) };
    for finding in &report.findings[..shown] {
        let (label, paint) = match finding.severity {
            Severity::Error => ("error", Paint::Bad),
            _ => ("warning", Paint::Warn),
        };
        let mut place = Vec::new();
        place.extend(finding.key.as_deref().map(human::printable));
        place.extend(match (&finding.file, finding.offset) {
            (Some(file), Some(offset)) => Some(format!("{} at byte {offset}", human::printable(file))),
            (Some(file), None) => Some(human::printable(file)),
            _ => None,
        });
        let place = if place.is_empty() { String::new() } else { format!("{}: ", place.join(", ")) };
        let label = printer.paint(paint, label);
        printer.line(format!("{label}: {place}{}", human::printable(&finding.what)))?;
    }
    if shown < report.findings.len() {
        let more = human::exact((report.findings.len() - shown) as u64);
        printer.line(printer.paint(Paint::Dim, format!("and {more} more findings; --all lists them")))?;
    }
    let errors = report.errors() as u64;
    let warnings = report.findings.len() as u64 - errors;
    let verdict = match (errors, warnings) {
        (0, 0) => printer.paint(Paint::Good, "sound"),
        (0, n) => printer.paint(Paint::Good, format!("sound, {}", human::count(n, "warning"))),
        (n, 0) => printer.paint(Paint::Bad, format!("damaged, {}", human::count(n, "error"))),
        (n, m) => printer.paint(Paint::Bad, format!("damaged, {} and {}", human::count(n, "error"), human::count(m, "warning"))),
    };
    let title = printer.paint(Paint::Bold, human::printable(&report.path));
    printer.line(format!("{title}: {verdict}"))?;
    let mut facts = vec![
        human::count(report.keys, "key"),
        format!("{} in {}", human::count(report.records, "record"), human::count(report.files, "file")),
    ];
    if args.quick {
        facts.push("no data read".to_owned());
    } else {
        facts.push(format!("{} read", human::bytes(report.bytes)));
        facts.push(format!("{} compared", human::count(report.checked, "checksum")));
        if report.unchecked > 0 {
            facts.push(format!("{} without a checksum", human::count(report.unchecked, "record")));
        }
    }
    printer.line(format!("  {}", facts.join(" · ")))?;
    let (done, left) = scope(report, args.numbers);
    if !done.is_empty() {
        printer.line(format!("  checked: {}", done.join(", ")))?;
    }
    if !left.is_empty() {
        printer.line(format!("  not checked: {}", left.join(", ")))?;
    }
    if report.seconds >= 1.0 {
        let rate = human::bytes((report.bytes as f64 / report.seconds) as u64);
        printer.note(format!("{:.1} s, {rate}/s", report.seconds));
    }
    Ok(())
}

/// Classes that are named before the rest is only counted.
const MOST_CLASSES: usize = 4;

/// What the verdict covers, and what it does not.
fn scope(report: &VerifyReport, numbers: bool) -> (Vec<String>, Vec<String>) {
    let (mut done, mut left) = (Vec::new(), Vec::new());
    let Some(format) = report.format else { return (done, left) };
    done.push("structure and coverage".to_owned());
    done.push(format!("lengths of {}", human::count(report.files, "file")));
    if report.indexes > 0 {
        done.push(format!("keys and regions against the indexes in {}", human::count(report.indexes, "file")));
    }
    if report.checked > 0 {
        done.push(human::count(report.checked, "checksum"));
    }
    if report.values > 0 {
        done.push(human::count(report.values, "value"));
    }
    if !report.data {
        left.push("data".to_owned());
    } else if report.unchecked > 0 {
        left.push(format!("data of {}, which have no checksum", human::count(report.unchecked, "record")));
    }
    if report.data && !report.opaque.is_empty() {
        let count = human::count(report.opaque.values().sum(), "opaque value");
        let classes: Vec<String> = report.opaque.keys().take(MOST_CLASSES).map(|class| human::printable(class)).collect();
        let more = match report.opaque.len().saturating_sub(MOST_CLASSES) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        left.push(format!("content of {count} ({}{more})", classes.join(", ")));
    }
    if !numbers {
        left.push("numbers (--numbers looks at them)".to_owned());
    } else if !report.is_sound() {
        left.push("numbers, which are only looked at where nothing is damaged".to_owned());
    }
    if format == Format::Dcp && report.indexes < report.files {
        let files = human::count(report.files - report.indexes, "file");
        left.push(format!("keys and regions of {files} without an index"));
    }
    (done, left)
}
