//! `reshard stats PATH`: what the numbers look like, and which rules of health they break.

use reshard::Checkpoint;
use reshard::health::{HEALTH_RULES, HealthLimits, HealthOptions, HealthReport, HealthRule, OptimizerHealth, health};
use reshard::numbers::TensorStats;
use reshard::select::Selection;
use reshard::verify::Severity;
use serde::Serialize;

use crate::args::{StatsArgs, StatsSort};
use crate::failure::{Failure, Result};
use crate::human;
use crate::meaning;
use crate::printer::{Paint, Printer};
use crate::progress::Progress;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

/// Rows and findings that are listed without being asked to.
const MOST: usize = 40;
const MOST_FINDINGS: usize = 20;

#[derive(Debug, Serialize)]
struct Told<'a> {
    schema: u32,
    healthy: bool,
    #[serde(flatten)]
    report: &'a HealthReport,
}

pub(crate) fn run(context: &mut Context, args: &StatsArgs) -> Result<Outcome> {
    let limits = HealthLimits::of_texts(&args.limit)?;
    if args.rules {
        return rules(&mut context.printer, &limits, args.output.json);
    }
    let Some(path) = &args.path else { return Err(Failure::new("no checkpoint is given").hint("reshard stats PATH")) };
    let checkpoint = context.open_seen(path, &args.view)?;
    let mut options = HealthOptions::default();
    options.selection = Selection::globs(&args.key)?;
    meaning::all_used(&checkpoint, &options.selection)?;
    options.limits = limits;
    options.verify = args.verify;
    let report = looked(context, &checkpoint, &options)?;
    if args.output.json {
        context.told(|printer| printer.json(&Told { schema: 1, healthy: report.is_healthy(), report: &report }))?;
    } else {
        context.told(|printer| print(printer, &report, args))?;
    }
    Ok(if report.has_errors() { Outcome::Bad } else { Outcome::Fine })
}

fn looked(context: &Context, checkpoint: &Checkpoint, options: &HealthOptions) -> Result<HealthReport> {
    let _bar = Progress::watch(&context.printer, "stats", &options.control);
    Ok(health(checkpoint, options)?)
}

#[derive(Debug, Serialize)]
struct ToldRule {
    name: &'static str,
    severity: Severity,
    says: &'static str,
    limit: Option<f64>,
    off: bool,
}

fn rules(printer: &mut Printer, limits: &HealthLimits, json: bool) -> Result<Outcome> {
    if json {
        let told = |rule: &'static HealthRule| {
            let limit = limits.shown(rule);
            let HealthRule { name, severity, says, .. } = *rule;
            ToldRule { name, severity, says, limit: limit.flatten(), off: limit.is_none() }
        };
        let rules: Vec<ToldRule> = HEALTH_RULES.iter().map(told).collect();
        printer.json(&serde_json::json!({ "schema": 1, "rules": rules }))?;
        return Ok(Outcome::Fine);
    }
    let mut table =
        Table::new(&[Side::Left, Side::Left, Side::Right, Side::Left]).head(&["RULE", "SEVERITY", "LIMIT", "BROKEN WHEN"]);
    for rule in HEALTH_RULES {
        let (severity, paint) = severity(rule.severity);
        let limit = limits.shown(rule).map_or_else(|| "off".to_owned(), |limit| limit.map(human::number).unwrap_or_default());
        let says = rule.says.replace("{limit}", "the limit");
        table.painted([rule.name.to_owned(), severity.to_owned(), limit, says].into_iter().zip([None, Some(paint), None, None]));
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    printer.note("--limit RULE=NUMBER sets a limit, --limit RULE=off turns a rule off");
    Ok(Outcome::Fine)
}

fn severity(severity: Severity) -> (&'static str, Paint) {
    match severity {
        Severity::Error => ("error", Paint::Bad),
        Severity::Warning => ("warning", Paint::Warn),
    }
}

fn print(printer: &mut Printer, report: &HealthReport, args: &StatsArgs) -> Result<()> {
    let mut rows: Vec<(&String, &TensorStats)> = report.tensors.iter().collect();
    let key = |stats: &TensorStats| match args.sort {
        StatsSort::None => 0.0,
        StatsSort::Bad => stats.nans as f64 + stats.infinities as f64,
        StatsSort::Zeros => stats.zeros as f64 / stats.elements.max(1) as f64,
        StatsSort::Rms => stats.rms.unwrap_or(0.0),
        StatsSort::Absmax => stats.absmax.unwrap_or(0.0),
    };
    rows.sort_by(|a, b| key(b.1).total_cmp(&key(a.1)));
    let shown = if args.all { rows.len() } else { rows.len().min(MOST) };
    let sides = [Side::Left, Side::Right, Side::Right, Side::Right, Side::Right, Side::Right, Side::Right, Side::Right];
    let mut table = Table::new(&sides).head(&["KEY", "NAN", "INF", "ZERO", "RMS", "MEAN", "MIN", "MAX"]).fit(0);
    for (key, stats) in &rows[..shown] {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
        let count = |n: u64| if n == 0 { String::new() } else { human::exact(n) };
        let bad = |n: u64| (n > 0).then_some(Paint::Bad);
        let zeros = if stats.zeros == 0 { String::new() } else { human::percent(stats.zeros, stats.elements) };
        let all_zero = (stats.zeros == stats.elements && stats.elements > 0).then_some(Paint::Warn);
        let cells = [
            ((*key).clone(), None),
            (count(stats.nans), bad(stats.nans)),
            (count(stats.infinities), bad(stats.infinities)),
            (zeros, all_zero),
            (number(stats.rms), None),
            (number(stats.mean), None),
            (number(stats.min), None),
            (number(stats.max), None),
        ];
        table.painted(cells);
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    if shown < rows.len() {
        let more = human::exact((rows.len() - shown) as u64);
        printer.line(printer.paint(Paint::Dim, format!("and {more} more tensors; --all lists them, --key GLOB chooses")))?;
    }
    for optimizer in &report.optimizers {
        print_optimizer(printer, optimizer, report.optimizers.len() > 1)?;
    }
    printer.line("")?;
    findings(printer, report, args.all)
}

/// What rules found, and what the verdict rests on.
pub(super) fn findings(printer: &mut Printer, report: &HealthReport, all: bool) -> Result<()> {
    let shown = if all { report.findings.len() } else { report.findings.len().min(MOST_FINDINGS) };
    for finding in &report.findings[..shown] {
        let (label, paint) = severity(finding.severity);
        let label = printer.paint(paint, label);
        let limit = finding.limit.map(|limit| format!(", limit {}", human::number(limit))).unwrap_or_default();
        let what = human::printable(&finding.what);
        printer.line(format!("{label}: {}: {} ({what}{limit})", human::printable(&finding.key), finding.rule))?;
    }
    if shown < report.findings.len() {
        let more = human::exact((report.findings.len() - shown) as u64);
        printer.line(printer.paint(Paint::Dim, format!("and {more} more findings; --all lists them")))?;
    }
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error).count() as u64;
    let warnings = report.findings.len() as u64 - errors;
    let verdict = match (errors, warnings) {
        (0, 0) => printer.paint(Paint::Good, "no rule is broken"),
        (0, n) => printer.paint(Paint::Warn, human::count(n, "warning")),
        (n, 0) => printer.paint(Paint::Bad, human::count(n, "error")),
        (n, m) => printer.paint(Paint::Bad, format!("{} and {}", human::count(n, "error"), human::count(m, "warning"))),
    };
    let title = printer.paint(Paint::Bold, "numbers");
    printer.line(format!("{title}: {verdict} in {}", human::count(report.tensors.len() as u64, "tensor")))?;
    let (done, left) = report.checked.words();
    let left = if left.is_empty() { String::new() } else { format!("; not checked: {}", left.join(", ")) };
    let done = if done.is_empty() { "nothing".to_owned() } else { done.join(", ") };
    printer.line(printer.paint(Paint::Dim, format!("  checked: {done}{left}")))?;
    let Some((key, what)) = report.unread.first() else { return Ok(()) };
    let count = human::count(report.unread.len() as u64, "value");
    let such = format!("such as {} ({})", human::printable(key), human::printable(what));
    printer.line(printer.paint(Paint::Dim, format!("  not looked at: {count} that only unpickling could bring back, {such}")))
}

fn print_optimizer(printer: &mut Printer, optimizer: &OptimizerHealth, one_of_several: bool) -> Result<()> {
    printer.line("")?;
    let root = if one_of_several {
        format!("optimizer {}", human::printable(optimizer.root.trim_end_matches('.')))
    } else {
        "optimizer".to_owned()
    };
    let name = printer.paint(Paint::Bold, root);
    let kind = optimizer.name.map(|name| format!("  {name}")).unwrap_or_default();
    printer.line(format!("{name}{kind}, {}", human::count(optimizer.params.len() as u64, "parameter")))?;
    let mut table = Table::new(&[Side::Left, Side::Right, Side::Right, Side::Right]).indent(2);
    for group in &optimizer.groups {
        let option = |name: &str, value: Option<f64>| value.map(|value| format!("{name} {}", short(value))).unwrap_or_default();
        let params = group.params.map(|n| human::count(n, "parameter")).unwrap_or_default();
        let cells = [format!("group {}", group.name), params, option("lr", group.lr), option("weight decay", group.weight_decay)];
        table.row(cells);
    }
    for line in table.lines(printer) {
        printer.line(line)?;
    }
    let mut ratios: Vec<(f64, &str)> =
        optimizer.params.iter().filter_map(|param| Some((param.update_ratio?, param.param.as_str()))).collect();
    ratios.sort_by(|a, b| a.0.total_cmp(&b.0));
    if let (Some(least), Some(most)) = (ratios.first(), ratios.last()) {
        let middle = ratios[ratios.len() / 2].0;
        let (low, mid, high) = (short(least.0), short(middle), short(most.0));
        let name = human::printable(most.1);
        printer.line(format!("  next update over weights, estimated: {low} to {high}, median {mid}; largest {name}"))?;
    }
    Ok(())
}

/// Three digits.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || (size < 1000.0 && value.fract() == 0.0) {
        return format!("{value:.0}");
    }
    if (1e-2..1e4).contains(&size) {
        let decimals = (2 - size.log10().floor() as i32).clamp(0, 4) as usize;
        return format!("{value:.decimals$}");
    }
    format!("{value:.1e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (1.0, "1"),
            (-0.02345, "-0.0234"),
            (123.456, "123"),
            (1234.5, "1234"),
            (3.2e-9, "3.2e-9"),
            (1e30, "1.0e30"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
