//! What a checkpoint is, in numbers: taken from its catalog and a listing, without reading its data.

pub(crate) mod cut;
mod files;
mod health;

use std::collections::HashMap;
use std::time::SystemTime;

use reshard::Checkpoint;
use reshard::checkpoint::CatalogKind;
use reshard::formats::PathSegment;
use reshard::health::{OptimizerSummary, optimizer_summaries, small_integer};

pub(crate) use cut::Cut;
pub(crate) use files::FileShare;
pub(crate) use health::{Health, Trouble};

/// A part of the whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Share {
    /// Its name.
    pub(crate) name: String,
    /// Tensors in it.
    pub(crate) tensors: u64,
    /// Plain values in it.
    pub(crate) values: u64,
    /// Elements of its tensors.
    pub(crate) elements: u64,
    /// Bytes of its tensors.
    pub(crate) bytes: u64,
}

/// Tensors that are cut alike.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CutShare {
    /// How they are cut, in words.
    pub(crate) label: String,
    /// How they are cut.
    pub(crate) cut: Cut,
    /// Tensors.
    pub(crate) tensors: u64,
    /// Their chunks.
    pub(crate) chunks: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// One of them: the largest.
    pub(crate) example: String,
    example_bytes: u64,
}

/// Everything at a glance.
#[derive(Debug)]
pub(crate) struct Summary {
    /// All together.
    pub(crate) total: Share,
    /// Stored chunks.
    pub(crate) chunks: u64,
    /// By top-level part, largest first.
    pub(crate) parts: Vec<Share>,
    /// By element type, largest first.
    pub(crate) dtypes: Vec<Share>,
    /// By way of cutting, largest first.
    pub(crate) cuts: Vec<CutShare>,
    /// Data files, in the checkpoint's order.
    pub(crate) files: Vec<FileShare>,
    /// Ranks that wrote files, where names tell.
    pub(crate) ranks: Option<u64>,
    /// When it was published.
    pub(crate) saved: Option<SystemTime>,
    /// The training step, where a plain value of that name tells.
    pub(crate) step: Option<i64>,
    /// The state of optimizers.
    pub(crate) optimizers: Vec<OptimizerSummary>,
    /// Whether it looks whole.
    pub(crate) health: Health,
}

/// Plain values that name the training step, best first.
const STEP_KEYS: &[&str] = &["step", "global_step", "iteration", "trainer.step", "train_state.step", "app.step", "meta.step"];

impl Summary {
    /// Looks at a checkpoint.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Summary {
        let catalog = checkpoint.catalog();
        let mut total = Share { name: "all".to_owned(), ..Share::default() };
        let mut parts: HashMap<&str, Share> = HashMap::new();
        let mut dtypes: HashMap<&str, Share> = HashMap::new();
        let mut cuts: HashMap<String, CutShare> = HashMap::new();
        let mut chunks = 0;
        let mut health = Health::default();
        let listing = files::list(checkpoint);
        let mut files = listing.shares(checkpoint);
        for (key, entry) in &catalog.entries {
            let part = parts.entry(part_of(key, entry.path.as_deref())).or_default();
            match &entry.kind {
                CatalogKind::Tensor(tensor) => {
                    let (elements, bytes) = (tensor.elements(), tensor.bytes());
                    let dtype = dtypes.entry(tensor.dtype.name()).or_default();
                    for share in [&mut total, part, dtype] {
                        share.tensors += 1;
                        share.elements = share.elements.saturating_add(elements);
                        share.bytes = share.bytes.saturating_add(bytes);
                    }
                    chunks += tensor.chunks.len() as u64;
                    let cut = Cut::of(tensor);
                    health.tensor(key, &cut);
                    let label = cut.label();
                    let group = cuts.entry(label).or_insert_with_key(|label| CutShare {
                        label: label.clone(),
                        cut,
                        tensors: 0,
                        chunks: 0,
                        bytes: 0,
                        example: String::new(),
                        example_bytes: 0,
                    });
                    group.tensors += 1;
                    group.chunks += tensor.chunks.len() as u64;
                    group.bytes = group.bytes.saturating_add(bytes);
                    if group.example.is_empty() || bytes > group.example_bytes {
                        (group.example, group.example_bytes) = (key.clone(), bytes);
                    }
                }
                CatalogKind::Value(_) => {
                    total.values += 1;
                    part.values += 1;
                }
                _ => {}
            }
        }
        health.files(checkpoint, &listing, &mut files);
        let optimizers = optimizer_summaries(checkpoint);
        Summary {
            total,
            chunks,
            parts: sorted(parts),
            dtypes: sorted(dtypes),
            cuts: {
                let mut cuts: Vec<CutShare> = cuts.into_values().collect();
                cuts.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.label.cmp(&b.label)));
                cuts
            },
            ranks: files::ranks(&files),
            saved: listing.published(checkpoint),
            step: step(checkpoint),
            files,
            optimizers,
            health,
        }
    }
}

/// The top-level part that a key belongs to: the first container above it, or a name for those that stand alone.
pub(crate) fn part_of<'a>(key: &'a str, path: Option<&'a [PathSegment]>) -> &'a str {
    match path {
        Some([PathSegment::Key(first), _, ..]) => first,
        Some([_]) => "(top level)",
        _ => key.split_once('.').map_or("(top level)", |(first, _)| first),
    }
}

fn sorted(shares: HashMap<&str, Share>) -> Vec<Share> {
    let mut shares: Vec<Share> = shares.into_iter().map(|(name, share)| Share { name: name.to_owned(), ..share }).collect();
    shares.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    shares
}

fn step(checkpoint: &Checkpoint) -> Option<i64> {
    STEP_KEYS.iter().find_map(|key| small_integer(checkpoint, key))
}
