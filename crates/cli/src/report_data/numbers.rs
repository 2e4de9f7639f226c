//! What the numbers of a checkpoint look like, as the page shows them.

use std::collections::{BTreeMap, HashMap, HashSet};

use reshard::health::{HealthFinding, HealthOptions, HealthReport, health};
use reshard::numbers::TensorStats;
use reshard::verify::Severity;
use reshard::{Checkpoint, Control};

use crate::human;
use crate::limits::Limits;
use crate::report::{Check, CheckState, Finding, Flag, Histogram, Magnitudes, Numbers, Stats};

/// Bins of a histogram.
pub(super) const BINS: usize = 48;
/// Tensors of which a page holds histograms and percentiles: those that break rules, then the largest. The others' numbers are a few
/// words each.
const MOST_SHAPES: usize = 4000;
/// Fewer elements than this have no distribution to speak of.
const FEW: u64 = 16;

/// What rules say of a checkpoint's numbers: in short, and one by one.
pub(super) type Judged = (Check, Vec<Finding>);

/// What a scan found.
pub(super) struct Looked {
    pub(super) numbers: Numbers,
    pub(super) judged: Judged,
    /// The same of what it is compared with.
    pub(super) other: Option<Judged>,
}

/// Reads every tensor once, and those of what it is compared with. That those cannot be read is a finding about them alone.
pub(super) fn look(
    checkpoint: &Checkpoint,
    other: Option<&Checkpoint>,
    places: &HashMap<String, u32>,
    limits: &Limits,
    control: &Control,
) -> reshard::Result<Looked> {
    let mut options = HealthOptions::default();
    options.bins = BINS;
    options.limits = limits.limits.clone();
    options.control = control.clone();
    let report = health(checkpoint, &options)?;
    let place = |key: &str| places.get(key).copied();
    let flags_of = flags(&report.findings, place);
    let mut numbers = Numbers {
        stats: by_place(&report.tensors, place, &flags_of),
        flags: flags_of,
        updates: updates(&report, place),
        ..Numbers::default()
    };
    let other = match other.map(|other| health(other, &options)) {
        None => None,
        Some(Ok(report)) => {
            numbers.other_flags = flags(&report.findings, place);
            numbers.other = by_place(&report.tensors, place, &numbers.other_flags);
            numbers.other_updates = updates(&report, place);
            let new = |key: &str| (place(key).is_none() && report.tensors.contains_key(key)).then(|| key.to_owned());
            numbers.new_flags = flags(&report.findings, new);
            Some(judged(&report, limits))
        }
        Some(Err(error @ reshard::Error::Cancelled { .. })) => return Err(error),
        Some(Err(error)) => Some(unreadable(&error)),
    };
    numbers.other_check = other.as_ref().map(|(check, _)| check.clone());
    Ok(Looked { numbers, judged: judged(&report, limits), other })
}

/// The next update of each weight, by its place.
fn updates(report: &HealthReport, place: impl Fn(&str) -> Option<u32>) -> BTreeMap<u32, f64> {
    let params = report.optimizers.iter().flat_map(|optimizer| &optimizer.params);
    params.filter_map(|param| Some((place(param.weights.as_deref()?)?, brief(param.update_ratio?)))).collect()
}

fn judged(report: &HealthReport, limits: &Limits) -> Judged {
    let told = |finding: &HealthFinding| Finding {
        text: format!("{}: {}", finding.rule, finding.what),
        bad: finding.severity == Severity::Error,
        rule: Some(finding.rule.to_owned()),
        key: Some(finding.key.clone()),
        ..Finding::default()
    };
    (check(&report.findings, report.tensors.len(), limits), report.findings.iter().map(told).collect())
}

/// The rules that tensors break, by their places.
fn flags<P: Ord>(findings: &[HealthFinding], place: impl Fn(&str) -> Option<P>) -> BTreeMap<P, Flag> {
    let mut flags: BTreeMap<P, Flag> = BTreeMap::new();
    for finding in findings {
        if let Some(place) = place(&finding.key) {
            let flag = flags.entry(place).or_default();
            flag.bad |= finding.severity == Severity::Error;
            flag.rules.push(finding.rule.to_owned());
        }
    }
    flags
}

/// What to say of numbers that could not be read, and why.
pub(super) fn unreadable(error: &reshard::Error) -> Judged {
    let text = human::printable(&error.full_text());
    (Check::new(CheckState::Bad, "could not be read"), vec![Finding { text, bad: true, ..Finding::default() }])
}

/// The check, in words: how many tensors break which rule, and which rules were left out or had other limits.
fn check(findings: &[HealthFinding], tensors: usize, limits: &Limits) -> Check {
    if tensors == 0 && findings.is_empty() {
        return Check::new(CheckState::Unchecked, "no tensors");
    }
    let mut rules: BTreeMap<(bool, &str), HashSet<&str>> = BTreeMap::new();
    for finding in findings {
        rules.entry((finding.severity != Severity::Error, finding.rule)).or_default().insert(&finding.key);
    }
    let state = match rules.keys().next() {
        None if limits.off.is_empty() => CheckState::Fine,
        None => CheckState::Partial,
        Some((false, _)) => CheckState::Bad,
        Some((true, _)) => CheckState::Warning,
    };
    let mut words: Vec<String> =
        rules.iter().map(|((_, rule), keys)| format!("{} {rule}", human::exact(keys.len() as u64))).collect();
    let more = words.len().saturating_sub(4);
    words.truncate(4);
    if more > 0 {
        words.push(format!("{more} more rules"));
    }
    let mut note = match words.is_empty() {
        true if limits.off.is_empty() => format!("no rule is broken in {}", human::count(tensors as u64, "tensor")),
        true => format!("no rule that is on is broken in {}", human::count(tensors as u64, "tensor")),
        false => words.join(", "),
    };
    if !limits.off.is_empty() {
        note.push_str(&format!("; off: {}", limits.off.join(", ")));
    }
    if !limits.other.is_empty() {
        note.push_str(&format!("; other limits: {}", limits.other.join(", ")));
    }
    Check::new(state, note)
}

fn by_place<'a>(
    tensors: impl IntoIterator<Item = (&'a String, &'a TensorStats)>,
    place: impl Fn(&str) -> Option<u32>,
    flags: &BTreeMap<u32, Flag>,
) -> BTreeMap<u32, Stats> {
    let mut found: Vec<(u32, &TensorStats)> = tensors.into_iter().filter_map(|(key, stats)| Some((place(key)?, stats))).collect();
    found.sort_by_key(|(place, stats)| (!flags.contains_key(place), std::cmp::Reverse(stats.elements)));
    found.into_iter().enumerate().map(|(i, (place, stats))| (place, page(stats, i < MOST_SHAPES))).collect()
}

/// Six digits are enough to look at, and a third of the bytes.
fn brief(number: f64) -> f64 {
    format!("{number:.5e}").parse().unwrap_or(number)
}

/// Statistics as the page wants them.
pub(super) fn page(found: &TensorStats, shape: bool) -> Stats {
    let short = |number: Option<f64>| number.map(brief);
    let shape = shape && found.elements >= FEW;
    Stats {
        min: short(found.min),
        max: short(found.max),
        mean: short(found.mean),
        std: short(found.std),
        rms: short(found.rms),
        count: found.elements,
        zeros: found.zeros,
        nans: found.nans,
        infs: found.infinities,
        subnormals: found.subnormals,
        percentiles: match found.percentiles.filter(|_| shape) {
            Some(p) => [p.p1, p.p5, p.p25, p.p50, p.p75, p.p95, p.p99].map(brief).to_vec(),
            None => Vec::new(),
        },
        magnitudes: magnitudes(&found.magnitudes).filter(|_| shape),
        histogram: match (found.min, found.max, shape && !found.histogram.is_empty()) {
            (Some(low), Some(high), true) => Some(Histogram { low, high, counts: found.histogram.clone() }),
            _ => None,
        },
    }
}

fn magnitudes(counts: &[(i32, u64)]) -> Option<Magnitudes> {
    let (low, high) = (counts.iter().map(|(e, _)| *e).min()?, counts.iter().map(|(e, _)| *e).max()?);
    let mut all = vec![0; usize::try_from(high - low).ok()? + 1];
    for (exponent, count) in counts {
        all[usize::try_from(exponent - low).ok()?] += count;
    }
    Some(Magnitudes { low, counts: all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_have_no_holes() {
        assert_eq!(magnitudes(&[(-3, 2), (0, 5)]), Some(Magnitudes { low: -3, counts: vec![2, 0, 0, 5] }));
        assert_eq!(magnitudes(&[]), None);
    }

    #[test]
    fn no_tensors_are_not_fine_numbers() {
        assert_eq!(check(&[], 0, &Limits::default()), Check::new(CheckState::Unchecked, "no tensors"));
        assert_eq!(check(&[], 1, &Limits::default()).state, CheckState::Fine);
    }

    #[test]
    fn rules_that_are_off_are_named_and_never_fine() {
        let limits = Limits::parse(&["nan=off".to_owned(), "large-weight=1e3".to_owned()]).unwrap();
        let found = check(&[], 1, &limits);
        assert_eq!(found.state, CheckState::Partial);
        assert_eq!(found.note, "no rule that is on is broken in 1 tensor; off: nan; other limits: large-weight=1000");
        let limits = Limits::parse(&["large-weight=1e3".to_owned()]).unwrap();
        assert_eq!(check(&[], 1, &limits).state, CheckState::Fine);
    }

    #[test]
    fn what_breaks_rules_has_a_histogram_however_small() {
        let stats = |elements| {
            let mut stats = TensorStats::default();
            (stats.elements, stats.magnitudes) = (elements, vec![(0, elements)]);
            stats
        };
        let mut tensors: BTreeMap<String, TensorStats> = (0..MOST_SHAPES).map(|n| (n.to_string(), stats(1000))).collect();
        tensors.insert("sick".to_owned(), stats(16));
        let place = |key: &str| key.parse().ok().or(Some(u32::MAX));
        let flags = BTreeMap::from([(u32::MAX, Flag::default())]);
        let has_one = |flags| by_place(&tensors, place, flags)[&u32::MAX].magnitudes.is_some();
        assert!(has_one(&flags) && !has_one(&BTreeMap::new()));
    }

    #[test]
    fn numbers_are_brief() {
        assert_eq!(brief(0.123_456_789), 0.123_457);
        assert_eq!(brief(-3.0), -3.0);
    }
}
