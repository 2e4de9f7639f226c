//! `reshard inspect --json`; docs/cli-json.md has the schema.

use reshard::Checkpoint;
use reshard::checkpoint::Format;
use reshard::health::OptimizerSummary;
use serde::Serialize;

use crate::human;
use crate::summary::{self, Summary};

#[derive(Debug, Serialize)]
pub(super) struct Inspected<'a> {
    schema: u32,
    path: &'a str,
    format: Format,
    writer: &'a str,
    save_id: Option<&'a str>,
    saved: Option<String>,
    step: Option<i64>,
    keys: u64,
    tensors: u64,
    values: u64,
    chunks: u64,
    elements: u64,
    bytes: u64,
    stored_bytes: Option<u64>,
    ranks: Option<u64>,
    checksums: bool,
    parts: Vec<Part<'a>>,
    dtypes: Vec<Part<'a>>,
    layouts: Vec<Layout<'a>>,
    files: Vec<File<'a>>,
    optimizers: Vec<Optimizer<'a>>,
    health: Health<'a>,
}

#[derive(Debug, Serialize)]
struct Part<'a> {
    name: &'a str,
    tensors: u64,
    values: u64,
    elements: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Layout<'a> {
    label: &'a str,
    layout: &'static str,
    grid: Option<&'a [u64]>,
    tensors: u64,
    chunks: u64,
    bytes: u64,
    example: &'a str,
}

#[derive(Debug, Serialize)]
struct File<'a> {
    path: &'a str,
    bytes: Option<u64>,
    rank: Option<u32>,
    chunks: u64,
    tensor_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Optimizer<'a> {
    root: &'a str,
    name: Option<&'a str>,
    step: Option<i64>,
    params: u64,
    slots: Vec<Slot<'a>>,
    groups: Vec<Group<'a>>,
}

#[derive(Debug, Serialize)]
struct Slot<'a> {
    name: &'a str,
    tensors: u64,
    bytes: u64,
    dtypes: Vec<&'a str>,
}

#[derive(Debug, Serialize)]
struct Group<'a> {
    name: &'a str,
    params: Option<usize>,
    options: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, Serialize)]
struct Health<'a> {
    state: &'static str,
    checked: &'a str,
    findings: Vec<Finding<'a>>,
}

#[derive(Debug, Serialize)]
struct Finding<'a> {
    severity: &'static str,
    what: &'a str,
    key: Option<&'a str>,
    file: Option<&'a str>,
}

fn parts(shares: &[summary::Share]) -> Vec<Part<'_>> {
    let part = |s: &'_ summary::Share| -> (u64, u64, u64, u64) { (s.tensors, s.values, s.elements, s.bytes) };
    let named = |share| {
        let (tensors, values, elements, bytes) = part(share);
        Part { name: &share.name, tensors, values, elements, bytes }
    };
    shares.iter().map(named).collect()
}

impl<'a> Inspected<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, summary: &'a Summary) -> Inspected<'a> {
        let catalog = checkpoint.catalog();
        let total = &summary.total;
        let layouts = summary.cuts.iter().map(|cut| Layout {
            label: &cut.label,
            layout: cut.cut.kind(),
            grid: cut.cut.parts(),
            tensors: cut.tensors,
            chunks: cut.chunks,
            bytes: cut.bytes,
            example: &cut.example,
        });
        let files = summary.files.iter().map(|file| File {
            path: &file.path,
            bytes: file.size,
            rank: file.rank,
            chunks: file.chunks,
            tensor_bytes: file.tensor_bytes,
        });
        let health = &summary.health;
        let findings = health.troubles.iter().map(|trouble| Finding {
            severity: if trouble.bad { "error" } else { "warning" },
            what: &trouble.text,
            key: trouble.key.as_deref(),
            file: trouble.file.as_deref(),
        });
        Inspected {
            schema: 1,
            path: checkpoint.path(),
            format: catalog.format,
            writer: &catalog.writer,
            save_id: catalog.save_id.as_deref(),
            saved: summary.saved.and_then(human::date),
            step: summary.step,
            keys: total.tensors + total.values,
            tensors: total.tensors,
            values: total.values,
            chunks: summary.chunks,
            elements: total.elements,
            bytes: total.bytes,
            stored_bytes: summary.files.iter().map(|file| file.size).sum(),
            ranks: summary.ranks,
            checksums: checkpoint.has_sidecar(),
            parts: parts(&summary.parts),
            dtypes: parts(&summary.dtypes),
            layouts: layouts.collect(),
            files: files.collect(),
            optimizers: summary.optimizers.iter().map(optimizer).collect(),
            health: Health {
                state: match (health.bad, health.troubles.is_empty()) {
                    (0, true) => "whole",
                    (0, false) => "warning",
                    _ => "damaged",
                },
                checked: &health.checked,
                findings: findings.collect(),
            },
        }
    }
}

fn optimizer(found: &OptimizerSummary) -> Optimizer<'_> {
    let slots = found.slots.iter().map(|slot| Slot {
        name: &slot.name,
        tensors: slot.tensors,
        bytes: slot.bytes,
        dtypes: slot.dtypes.iter().copied().collect(),
    });
    let groups = found.groups.iter().map(|group| Group {
        name: &group.name,
        params: group.params.as_ref().map(Vec::len),
        options: group.options.iter().map(|(option, text)| (option.clone(), text.clone().into())).collect(),
    });
    Optimizer {
        root: &found.root,
        name: found.name,
        step: found.step,
        params: found.params,
        slots: slots.collect(),
        groups: groups.collect(),
    }
}
