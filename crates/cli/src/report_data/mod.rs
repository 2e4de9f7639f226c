//! From a checkpoint to what the report page knows of it.

mod compare;
mod live;
mod names;
mod numbers;

use std::collections::HashMap;

use reshard::checkpoint::{CatalogKind, LoadedValue};
use reshard::health::{OptimizerSummary, SlotShare};
use reshard::layout::Region;
use reshard::verify::{Finding as Found, Severity, VerifyOptions, verify};
use reshard::{Checkpoint, Control};

pub(crate) use compare::Comparison;
pub(crate) use live::Live;

use crate::catalog::{format_name, location};
use crate::failure::Result;
use crate::human;
use crate::limits::Limits;
use crate::printer::Printer;
use crate::progress::Progress;
use crate::report::{
    Check, CheckState, Checkpoint as Page, Checks, ChunkInput, Finding, Health, HealthState, Optimizer, ParamGroup, PlainValue,
    ReportBuilder, ReportData, Slot, TensorInput,
};
use crate::summary::Summary;

/// Values are small records, but each is a read: a page shows no more than this many.
const MOST_VALUES: usize = 2000;
/// A plain value's text is cut to this many characters.
const MOST_TEXT: usize = 2000;

/// What to put on the page beyond what metadata tells.
pub(crate) struct Wanted {
    /// What the numbers look like, judged by these limits.
    pub(crate) numbers: Option<Limits>,
    /// Every checksum.
    pub(crate) verify: bool,
    /// What differs from another.
    pub(crate) comparison: Option<Comparison>,
    /// Whether to leave comparing to a server behind the page.
    pub(crate) compare_later: bool,
}

/// What was collected.
pub(crate) struct Collected {
    /// What the page knows.
    pub(crate) data: ReportData,
    /// The numbers of tensors on the page, by key.
    pub(crate) places: HashMap<String, u32>,
}

/// Collects everything.
pub(crate) fn collect(checkpoint: &Checkpoint, printer: &Printer, wanted: &Wanted) -> Result<Collected> {
    let summary = Summary::of(checkpoint);
    let mut health = looked_at(checkpoint, &summary, wanted.verify, printer)?;
    let mut builder = ReportBuilder::new(page(checkpoint, &summary));
    let mut other_health = None;
    if let Some(Comparison { other, .. }) = &wanted.comparison {
        let summary = Summary::of(other);
        other_health = Some(looked_at(other, &summary, wanted.verify, printer)?);
        if let Some(optimizer) = optimizer_page(other, &summary.optimizers) {
            builder.other_optimizer(optimizer);
        }
    }
    let files: Vec<u32> =
        summary.files.iter().map(|file| builder.file(&file.path, file.size.unwrap_or(file.used), file.rank)).collect();
    let mut places = HashMap::new();
    let mut values = 0;
    for (key, entry) in &checkpoint.catalog().entries {
        match &entry.kind {
            CatalogKind::Tensor(tensor) => {
                let chunks: Vec<ChunkInput<'_>> = tensor
                    .chunks
                    .iter()
                    .map(|chunk| ChunkInput {
                        offsets: chunk.region.offsets(),
                        sizes: chunk.region.sizes(),
                        file: files.get(chunk.file as usize).copied().unwrap_or(0),
                        location: Some(location(&chunk.location)),
                    })
                    .collect();
                let (dtype, shape, bytes) = (tensor.dtype.name(), &tensor.shape[..], tensor.bytes());
                places.insert(key.clone(), builder.tensor(TensorInput { key, dtype, shape, bytes, chunks: &chunks }));
            }
            CatalogKind::Value(_) => {
                values += 1;
                if values <= MOST_VALUES {
                    builder.value(plain(checkpoint, key));
                }
            }
            _ => {}
        }
    }
    builder.values_found(values as u64);
    if let Some(optimizer) = optimizer_page(checkpoint, &summary.optimizers) {
        builder.optimizer(optimizer);
    }
    // What is damaged has no numbers to speak of.
    if let Some(limits) = wanted.numbers.as_ref().filter(|_| health.state != HealthState::Damaged) {
        let control = Control::new();
        let _bar = Progress::watch(printer, "numbers", &control);
        let is_whole = other_health.as_ref().is_some_and(|other| other.state != HealthState::Damaged);
        let other = wanted.comparison.as_ref().filter(|_| is_whole).map(|comparison| &*comparison.other);
        match numbers::look(checkpoint, other, &places, limits, &control) {
            Ok(found) => {
                builder.numbers(found.numbers);
                health = health.with_numbers(found.judged);
                other_health = match (other_health, found.other) {
                    (Some(other), Some(judged)) => Some(other.with_numbers(judged)),
                    (other, _) => other,
                };
            }
            Err(error @ reshard::Error::Cancelled { .. }) => return Err(error.into()),
            // A page about what cannot be read is worth more than none.
            Err(error) => health = health.with_numbers(numbers::unreadable(&error)),
        }
    }
    builder.health(health);
    if let Some(other) = other_health {
        builder.other_health(other);
    }
    if let Some(comparison) = &wanted.comparison {
        let control = Control::new();
        let _bar = Progress::watch(printer, "diff", &control);
        let compared = if wanted.compare_later {
            Ok(comparison.outline(checkpoint))
        } else {
            comparison.page(checkpoint, &places, &control)
        };
        let diff = match compared {
            Ok(diff) => diff,
            Err(error @ reshard::Error::Cancelled { .. }) => return Err(error.into()),
            // As above.
            Err(error) => {
                builder.not_compared(human::printable(&error.full_text()));
                comparison.outline(checkpoint)
            }
        };
        builder.diff(diff);
    }
    let comparing = wanted.compare_later && wanted.comparison.is_some();
    Ok(Collected { data: ReportData { comparing, ..builder.finish() }, places })
}

fn page(checkpoint: &Checkpoint, summary: &Summary) -> Page {
    let catalog = checkpoint.catalog();
    let location = checkpoint.path().to_owned();
    let mut facts = Vec::new();
    if let Some(ranks) = summary.ranks {
        facts.push(("Ranks".to_owned(), human::exact(ranks)));
    }
    let layouts: Vec<String> =
        summary.cuts.iter().take(4).map(|cut| format!("{} ({})", cut.label, human::count(cut.tensors, "tensor"))).collect();
    if !layouts.is_empty() {
        let more = if summary.cuts.len() > 4 { ", …" } else { "" };
        facts.push(("Layout".to_owned(), format!("{}{more}", layouts.join(", "))));
    }
    if let Some(id) = &catalog.save_id {
        facts.push(("Save".to_owned(), id.clone()));
    }
    Page {
        name: names::title(&location),
        format: format_name(catalog.format).to_owned(),
        writer: Some(catalog.writer.clone()).filter(|writer| !writer.is_empty()),
        saved: summary.saved.and_then(human::date),
        step: summary.step.or_else(|| summary.optimizers.first().and_then(|optimizer| optimizer.step)),
        health: Health::default(),
        facts,
        location,
    }
}

/// The verdict without numbers.
fn looked_at(checkpoint: &Checkpoint, summary: &Summary, everything: bool, printer: &Printer) -> Result<Health> {
    let (checks, findings) = if everything { verified(checkpoint, printer)? } else { glanced(summary) };
    Ok(Health::of(checks, findings))
}

fn numbers_unchecked() -> Check {
    Check::new(CheckState::Unchecked, "not looked at")
}

/// What metadata and a listing tell.
fn glanced(summary: &Summary) -> (Checks, Vec<Finding>) {
    let health = &summary.health;
    let finding = |t: &crate::summary::Trouble| Finding {
        text: t.text.clone(),
        bad: t.bad,
        key: t.key.clone(),
        file: t.file.clone(),
        ..Finding::default()
    };
    let structure = match (health.bad, health.troubles.is_empty()) {
        (0, true) => Check::new(CheckState::Fine, health.checked.clone()),
        (0, false) => Check::new(CheckState::Warning, health.checked.clone()),
        (n, _) => Check::new(CheckState::Bad, format!("{} in metadata and file sizes", human::count(n, "problem"))),
    };
    let checksums = Check::new(CheckState::Unchecked, "not compared; --verify compares them");
    (Checks { structure, checksums, numbers: numbers_unchecked() }, health.troubles.iter().map(finding).collect())
}

/// What reading everything tells.
fn verified(checkpoint: &Checkpoint, printer: &Printer) -> Result<(Checks, Vec<Finding>)> {
    let options = VerifyOptions::default();
    let report = {
        let _bar = Progress::watch(printer, "verify", &options.control);
        verify(checkpoint, &options)?
    };
    let findings = report.findings.iter().map(|found| Finding {
        text: found.what.clone(),
        bad: found.severity == Severity::Error,
        key: found.key.clone(),
        file: found.file.clone(),
        offset: found.offset,
        ..Finding::default()
    });
    // Data that differs from its checksum says nothing against the structure.
    let errors = |of_checksums: bool| {
        let is_one = |found: &&Found| found.severity == Severity::Error && found.is_checksum == of_checksums;
        report.findings.iter().filter(is_one).count() as u64
    };
    let (problems, wrong) = (errors(false), errors(true));
    let state = |errors: u64| match (errors, report.findings.iter().any(|found| found.severity != Severity::Error)) {
        (0, false) => CheckState::Fine,
        (0, true) => CheckState::Warning,
        _ => CheckState::Bad,
    };
    let told = match problems {
        0 => "every element is stored exactly once, files are whole".to_owned(),
        n => format!("{} found", human::count(n, "problem")),
    };
    // Where the structure is no good, not every checksum could be compared.
    let of_checksums = if wrong == 0 && problems > 0 { CheckState::Warning } else { state(wrong) };
    let mut compared = format!("{} read, {} compared", human::bytes(report.bytes), human::count(report.checked, "checksum"));
    if wrong > 0 {
        compared = format!("{} wrong: {compared}", human::exact(wrong));
    }
    if report.unchecked > 0 {
        compared.push_str(&format!(", {} without one", human::count(report.unchecked, "record")));
    }
    let checksums = match (report.checked, report.unchecked, of_checksums) {
        (0, _, CheckState::Fine) => Check::new(CheckState::Unchecked, "none are stored"),
        // Part of the data has nothing to be compared with.
        (_, 1.., CheckState::Fine) => Check::new(CheckState::Warning, compared),
        _ => Check::new(of_checksums, compared),
    };
    Ok((Checks { structure: Check::new(state(problems), told), checksums, numbers: numbers_unchecked() }, findings.collect()))
}

fn plain(checkpoint: &Checkpoint, key: &str) -> PlainValue {
    let (kind, text) = match checkpoint.read_value(key) {
        Ok(LoadedValue::Plain(value)) => (kind_of(&value), value.python_repr()),
        Ok(LoadedValue::Opaque { class, .. }) => ("object", format!("<{class}>")),
        Ok(_) => ("object", String::new()),
        Err(error) => ("unreadable", error.full_text()),
    };
    let text = if text.chars().count() > MOST_TEXT { human::shortened(&text, MOST_TEXT) } else { text };
    PlainValue { key: key.to_owned(), kind: kind.to_owned(), text }
}

fn kind_of(value: &reshard::Value) -> &'static str {
    use reshard::Value;
    match value {
        Value::None => "None",
        Value::Bool(_) => "bool",
        Value::Int(_) => "int",
        Value::Float(_) => "float",
        Value::Complex(..) => "complex",
        Value::Str(_) => "str",
        Value::Bytes(_) | Value::ByteArray(_) => "bytes",
        Value::List(_) => "list",
        Value::Tuple(_) => "tuple",
        Value::Dict(_) | Value::OrderedDict(_) => "dict",
        Value::Set(_) | Value::FrozenSet(_) => "set",
        Value::Size(_) => "torch.Size",
        Value::DType(_) => "dtype",
        Value::Device(_) => "device",
        Value::Path(_) => "path",
        _ => "value",
    }
}

/// The first optimizer of those that there are; that it is one of several is said.
fn optimizer_page(checkpoint: &Checkpoint, all: &[OptimizerSummary]) -> Option<Optimizer> {
    let mut shown = one_optimizer(checkpoint, all.first()?);
    if all.len() > 1 {
        let name = shown.name.as_deref().unwrap_or("optimizer");
        let root = shown.root.trim_end_matches('.');
        shown.name = Some(format!("{name}, {root}, of {} optimizers; `reshard stats` tells of all", all.len()));
    }
    Some(shown)
}

fn one_optimizer(checkpoint: &Checkpoint, found: &OptimizerSummary) -> Optimizer {
    let entries = &checkpoint.catalog().entries;
    let keys: HashMap<(&str, &str), &str> =
        entries.keys().filter_map(|key| Some((found.param_and_slot(key)?, key.as_str()))).collect();
    let slot_names: Vec<&str> = found.slots.iter().map(|slot| slot.name.as_str()).collect();
    let groups = found.groups.iter().map(|group| {
        let mut slots = Vec::new();
        // Only named parameters can be told apart; one group has them all.
        match (&group.params, found.groups.len()) {
            (Some(params), 2..) => {
                for name in &slot_names {
                    let mut slot = Slot { name: (*name).to_owned(), ..Slot::default() };
                    for param in params {
                        if let Some(entry) = keys.get(&(param.as_str(), *name)).and_then(|key| entries.get(*key)) {
                            slot.tensors += 1;
                            if let CatalogKind::Tensor(tensor) = &entry.kind {
                                slot.bytes = slot.bytes.saturating_add(tensor.bytes());
                                let dtype = tensor.dtype.name();
                                if !slot.dtypes.iter().any(|known| known == dtype) {
                                    slot.dtypes.push(dtype.to_owned());
                                }
                            }
                        }
                    }
                    slots.push(slot);
                }
            }
            _ => slots = found.slots.iter().map(whole_slot).collect(),
        }
        let params = group.params.as_ref().map_or(found.params, |params| params.len() as u64);
        ParamGroup { name: group.name.clone(), params, options: group.options.clone(), slots }
    });
    let mut groups: Vec<ParamGroup> = groups.collect();
    if groups.is_empty() && !found.slots.is_empty() {
        let slots = found.slots.iter().map(whole_slot).collect();
        groups.push(ParamGroup { name: "all".to_owned(), params: found.params, options: Vec::new(), slots });
    }
    Optimizer { name: found.name.map(str::to_owned), root: found.root.clone(), groups }
}

fn whole_slot(slot: &SlotShare) -> Slot {
    let dtypes = slot.dtypes.iter().map(|dtype| (*dtype).to_owned()).collect();
    Slot { name: slot.name.clone(), tensors: slot.tensors, bytes: slot.bytes, dtypes }
}

/// The whole of a tensor.
fn whole(shape: &[u64]) -> Option<Region> {
    Region::whole(shape).ok()
}
