//! `reshard verify PATH`: is it whole?

use reshard::{Format, Severity, VerifyOptions, VerifyReport, verify_path};
use serde::Serialize;

use crate::args::VerifyArgs;
use crate::failure::Result;
use crate::human;
use crate::printer::Paint;
use crate::progress::Progress;
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Verified<'a> {
    schema: u32,
    sound: bool,
    #[serde(flatten)]
    report: &'a VerifyReport,
}

pub(crate) fn run(context: &mut Context, args: &VerifyArgs) -> Result<Outcome> {
    let open = context.open_through(&args.view)?;
    let mut options = VerifyOptions::default();
    options.data = !args.quick;
    let report = {
        let _bar = Progress::watch(&context.printer, "verify", &options.control);
        verify_path(&args.path, &open, &options)?
    };
    if args.output.json {
        context.printer.json(&Verified { schema: 1, sound: report.is_sound(), report: &report })?;
    } else {
        print(context, &report, args.quick)?;
    }
    Ok(if report.is_sound() { Outcome::Fine } else { Outcome::Bad })
}

fn print(context: &mut Context, report: &VerifyReport, quick: bool) -> Result<()> {
    let printer = &mut context.printer;
    for finding in &report.findings {
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
    if quick {
        facts.push("no data read".to_owned());
    } else {
        facts.push(format!("{} read", human::bytes(report.bytes)));
        facts.push(format!("{} compared", human::count(report.checked, "checksum")));
        if report.unchecked > 0 {
            facts.push(format!("{} without a checksum", human::count(report.unchecked, "record")));
        }
    }
    printer.line(format!("  {}", facts.join(" · ")))?;
    let (done, left) = scope(report);
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
fn scope(report: &VerifyReport) -> (Vec<String>, Vec<String>) {
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
    if format == Format::Dcp && report.indexes < report.files {
        let files = human::count(report.files - report.indexes, "file");
        left.push(format!("keys and regions of {files} without an index"));
    }
    (done, left)
}
