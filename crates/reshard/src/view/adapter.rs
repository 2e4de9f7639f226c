//! A LoRA adapter as a view: its base seen with the updates added, each `W + scale · B · A`, computed slice by slice while the
//! weight is read. The folder is what PEFT writes: `adapter_config.json` and the factors beside it.

use std::collections::BTreeMap;
use std::sync::Arc;

use indexmap::IndexMap;
use regex::Regex;
use reshard_formats::KeyPath;
use serde::Deserialize;

use super::apply::{Made, RuleReport, ViewReport};
use crate::checkpoint::{CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, Input};
use crate::error::{Error, Result, StorageContext};
use crate::seen;
use crate::select::{MODEL_PARTS, new_path};

/// The file that makes a folder one of an adapter.
pub(super) const CONFIG: &str = "adapter_config.json";
/// No such file is larger.
const MOST_BYTES: u64 = 16 << 20;
/// What PEFT puts before the names of a model's modules.
const WRAPPED: &str = "base_model.model.";

/// What PEFT says of an adapter, as far as it changes what is added.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    #[serde(default)]
    peft_type: Option<String>,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    lora_bias: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    /// In the file's order: the first that matches counts.
    #[serde(default)]
    alpha_pattern: Option<IndexMap<String, f64>>,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    /// How the factors began; some ways take what they hold out of the base.
    #[serde(default)]
    init_lora_weights: serde_json::Value,
    /// Settings of which each means another sum.
    #[serde(flatten)]
    more: BTreeMap<String, serde_json::Value>,
}

/// Settings that make an adapter something else than a product of A and B for each weight.
const OTHERS: &[&str] =
    &["layer_replication", "target_parameters", "alora_invocation_tokens", "arrow_config", "use_qalora", "use_bdlora"];
/// Ways to begin that leave the base as it is.
const BEGINNINGS: &[&str] = &["gaussian", "orthogonal", "eva"];

/// An adapter, by its address.
#[derive(Debug, Clone)]
pub(super) struct Adapter {
    path: String,
}

/// The factors of one update.
#[derive(Default)]
struct Factors {
    a: Option<String>,
    b: Option<String>,
    embedding: bool,
}

/// What an adapter makes of a base.
pub(super) struct Merged {
    pub(super) report: ViewReport,
    /// Entries of the base by key, new.
    entries: IndexMap<String, CatalogEntry>,
    adapter: Checkpoint,
}

impl Adapter {
    pub(super) fn new(path: &str) -> Adapter {
        Adapter { path: path.to_owned() }
    }

    pub(super) fn origin(&self) -> String {
        format!("the adapter {}", self.path)
    }

    fn config(&self, adapter: &Checkpoint) -> Result<Config> {
        let wrong = |why: String| Error::unsupported(format!("{CONFIG} of {}: {why}", self.origin()));
        let bytes = adapter.store().read(CONFIG, MOST_BYTES).doing(|| format!("reading {CONFIG}"))?;
        let config: Config =
            serde_json::from_slice(&bytes).map_err(|e| Error::format(&self.path, CONFIG, "configuration of an adapter", e))?;
        let kind = config.peft_type.as_deref().unwrap_or("LORA");
        match () {
            () if !kind.eq_ignore_ascii_case("LORA") => Err(wrong(format!("peft_type is {kind:?}; LORA can be merged"))),
            () if config.use_dora => Err(wrong("use_dora: magnitudes (DoRA) cannot be merged".to_owned())),
            () if config.lora_bias => Err(wrong("lora_bias: biases of the factors cannot be merged".to_owned())),
            () => match (config.other(), config.init_lora_weights.as_str()) {
                (Some(other), _) => Err(wrong(format!("{other}: only products of A and B for each weight can be merged"))),
                (None, Some(way)) if !BEGINNINGS.contains(&way.to_ascii_lowercase().as_str()) => {
                    let hint = "let PEFT convert the adapter (path_initial_model_for_weight_conversion), or merge";
                    let what = format!("init_lora_weights is {way:?}, which changes the base before training");
                    Err(wrong(format!("{what}; {hint}")))
                }
                (None, _) => Ok(config),
            },
        }
    }

    /// What it makes of a base, from metadata alone.
    pub(super) fn merged(&self, base: &Checkpoint) -> Result<Merged> {
        let adapter = Checkpoint::open(&self.path)?;
        let config = self.config(&adapter)?;
        let wrong = |why: String| Error::invalid(format!("{} on {}: {why}", self.origin(), base.path()));
        let first = base.catalog().files.len() as u32;
        let mut factors: BTreeMap<String, Factors> = BTreeMap::new();
        let mut entries: IndexMap<String, CatalogEntry> = IndexMap::new();
        let mut made = Vec::new();
        for (key, entry) in &adapter.catalog().entries {
            let name = key.strip_prefix(WRAPPED).unwrap_or(key);
            let CatalogKind::Tensor(tensor) = &entry.kind else { continue };
            if let Some((module, factor, embedding)) = factor(name) {
                let found = factors.entry(module.to_owned()).or_default();
                found.embedding = embedding;
                let place = if factor == 'A' { &mut found.a } else { &mut found.b };
                if let Some(other) = place.replace(key.clone()) {
                    return Err(wrong(format!("{other:?} and {key:?} are the same factor; one adapter is merged at a time")));
                }
                continue;
            }
            if name.contains(".lora_") {
                return Err(wrong(format!("{key:?} is not a factor A or B, and cannot be merged")));
            }
            // A module that was trained whole.
            let saved = |module: &String| name.split('.').any(|word| word == module);
            let trained = config.modules_to_save.iter().flatten().any(saved);
            let name = name.replace(".modules_to_save.default", "").replace(".base_layer.", ".");
            let target = found(base, &name);
            if target.is_none() && !trained {
                return Err(wrong(format!("{key:?} is nothing of the base: it has no {name:?}")));
            }
            // A vocabulary may have grown since the base was saved; then embeddings and head are in the adapter as they are now.
            let alike = |stored: &CatalogTensor| {
                let rows = stored.shape.len() == 2 && stored.shape.get(1) == tensor.shape.get(1) && is_vocabulary(&name);
                stored.shape == tensor.shape || (rows && tensor.shape.len() == 2)
            };
            if let Some((target, stored)) = target.filter(|(_, stored)| !alike(stored)) {
                let (own, other) = (&tensor.shape[..], &stored.shape[..]);
                return Err(wrong(format!("{key:?} has shape {own:?}, and {target:?} of the base {other:?}")));
            }
            let (new, path) = match target {
                Some((target, _)) => (target.to_owned(), base.entry(target)?.path.clone()),
                None => beside(base, &adapter, &name),
            };
            let mut copy = entry.copied();
            copy.renumber(first);
            copy.path = path;
            made.push(note(&new, tensor, vec![key.clone()]));
            entries.insert(new, copy);
        }
        for (module, factors) in factors {
            let weight = format!("{module}.weight");
            let (Some(a), Some(b)) = (factors.a, factors.b) else {
                return Err(wrong(format!("{module:?} has only one of its factors A and B")));
            };
            // An updated weight that the adapter has whole, too, such as a head that grew, is that one.
            let whole = found_in(&entries, &weight).or_else(|| found(base, &weight));
            let Some((target, stored)) = whole else {
                let hint = "; where the embeddings are the head, too, an update of one alone is not defined";
                let hint = if is_vocabulary(&weight) { hint } else { "" };
                return Err(wrong(format!("{a:?} is an update of {weight:?}, which the base does not have{hint}")));
            };
            let factor = |key: &str| -> Result<Input> {
                let mut entry = adapter.entry(key)?.copied();
                entry.renumber(first);
                match entry.kind {
                    CatalogKind::Tensor(tensor) => Ok(Input { key: key.to_owned(), tensor }),
                    CatalogKind::Value(_) => Err(wrong(format!("{key:?} is not a tensor"))),
                }
            };
            let inputs = vec![Input { key: target.to_owned(), tensor: stored.copied() }, factor(&a)?, factor(&b)?];
            let rank = adapter.tensor(&a)?.shape.first().copied().unwrap_or(0);
            let scale = config.scale(&module, rank).map_err(&wrong)?;
            let (rows, columns) = (adapter.tensor(&b)?.shape.first(), adapter.tensor(&a)?.shape.get(1));
            // Where the shapes allow one way only it is that: PEFT corrects the setting layer by layer.
            let transposed = factors.embedding
                || match (stored.shape.first() == rows && stored.shape.get(1) == columns, stored.shape.first() == columns) {
                    (true, false) => false,
                    (false, true) => true,
                    _ => config.fan_in_fan_out,
                };
            let tensor = seen::low_rank(inputs, scale, transposed).map_err(&wrong)?;
            made.push(note(target, &tensor, vec![target.to_owned(), a, b]));
            let target = target.to_owned();
            let path = entries.get(&target).or_else(|| base.catalog().entries.get(&target)).and_then(|entry| entry.path.clone());
            entries.insert(target, CatalogEntry::tensor(path, tensor));
        }
        let taken = made.iter().map(|made| made.from.len() as u64).sum();
        let replaced = entries.keys().filter(|key| base.catalog().entries.contains_key(*key)).count() as u64;
        let kept = base.catalog().entries.len() as u64 - replaced;
        let report = ViewReport { rules: vec![RuleReport { rule: self.origin(), taken, made }], kept, dropped: Vec::new() };
        Ok(Merged { report, entries, adapter })
    }
}

impl Merged {
    /// The base with the updates added.
    pub(super) fn over(self, base: Checkpoint) -> Checkpoint {
        let mut all: IndexMap<String, CatalogEntry> =
            base.catalog().entries.iter().map(|(key, entry)| (key.clone(), entry.copied())).collect();
        all.extend(self.entries);
        base.seen_beside(all, Arc::new(self.adapter))
    }
}

impl Config {
    /// A setting by which updates are no products.
    fn other(&self) -> Option<&'static str> {
        use serde_json::Value;
        let set = |name: &&&str| match self.more.get(**name) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(_) => true,
        };
        OTHERS.iter().find(set).copied()
    }

    fn scale(&self, module: &str, rank: u64) -> std::result::Result<f32, String> {
        let mut alpha = self.lora_alpha;
        for (pattern, own) in self.alpha_pattern.iter().flatten() {
            let regex = Regex::new(&format!("^(?:.*\\.)?(?:{pattern})$"));
            let regex = regex.map_err(|error| format!("alpha_pattern has {pattern:?}, no regular expression: {error}"))?;
            if regex.is_match(module) {
                alpha = *own;
                break;
            }
        }
        if rank == 0 {
            return Err(format!("the factors of {module:?} have rank 0"));
        }
        let rank = rank as f64;
        Ok((if self.use_rslora { alpha / rank.sqrt() } else { alpha / rank }) as f32)
    }
}

/// The module of which a key is a factor, which one, and whether the module is an embedding.
fn factor(name: &str) -> Option<(&str, char, bool)> {
    let marks =
        [(".lora_A.", 'A', false), (".lora_B.", 'B', false), (".lora_embedding_A", 'A', true), (".lora_embedding_B", 'B', true)];
    marks.into_iter().find_map(|(mark, factor, embedding)| {
        let (module, rest) = name.rsplit_once(mark)?;
        // `weight`, or an adapter's own name before it.
        let weight = rest.rsplit('.').next() == Some("weight") && rest.split('.').count() <= 2;
        (weight || embedding).then_some((module, factor, embedding))
    })
}

/// Whether a name is of embeddings or a head, whose rows are the vocabulary.
fn is_vocabulary(name: &str) -> bool {
    let words = ["embed_tokens", "lm_head", "embeddings", "embed_in", "embed_out", "wte", "output_layer", "tok_embeddings"];
    name.split('.').any(|word| words.contains(&word))
}

/// Where a module that the base does not have lies in it: beside the first that an adapter changes and that it has.
fn beside(base: &Checkpoint, adapter: &Checkpoint, name: &str) -> (String, Option<KeyPath>) {
    let of = |key: &String| {
        let own = key.strip_prefix(WRAPPED).unwrap_or(key);
        let own = factor(own).map_or_else(|| own.to_owned(), |(module, ..)| format!("{module}.weight"));
        let (target, _) = found(base, &own)?;
        Some((target, target.strip_suffix(own.as_str())?))
    };
    let Some((sibling, prefix)) = adapter.catalog().entries.keys().find_map(of) else { return (name.to_owned(), None) };
    let new = format!("{prefix}{name}");
    let path = base.catalog().entries.get(sibling).and_then(|entry| entry.path.as_ref());
    let path = path.map(|path| new_path(sibling, Some(path), &new, None));
    (new, path)
}

/// A tensor of the base by a model's own name for it.
fn found<'b>(base: &'b Checkpoint, name: &str) -> Option<(&'b str, &'b CatalogTensor)> {
    found_in(&base.catalog().entries, name)
}

fn found_in<'b>(entries: &'b IndexMap<String, CatalogEntry>, name: &str) -> Option<(&'b str, &'b CatalogTensor)> {
    let prefixed = MODEL_PARTS.iter().map(|part| format!("{part}.{name}"));
    let keys = std::iter::once(name.to_owned()).chain(prefixed);
    keys.into_iter().find_map(|key| match entries.get_full(key.as_str())? {
        (_, key, CatalogEntry { kind: CatalogKind::Tensor(tensor), .. }) => Some((key.as_str(), tensor)),
        _ => None,
    })
}

fn note(key: &str, tensor: &CatalogTensor, from: Vec<String>) -> Made {
    let (shape, dtype) = (Some(tensor.shape.to_vec()), Some(tensor.dtype.name().to_owned()));
    Made { key: key.to_owned(), shape, dtype, from }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_told_by_their_names() {
        assert_eq!(factor("model.layers.0.q_proj.lora_A.weight"), Some(("model.layers.0.q_proj", 'A', false)));
        assert_eq!(factor("q.lora_B.default.weight"), Some(("q", 'B', false)));
        assert_eq!(factor("embed.lora_embedding_A"), Some(("embed", 'A', true)));
        assert_eq!(factor("embed.lora_embedding_B.default"), Some(("embed", 'B', true)));
        assert_eq!(factor("q.lora_A.bias"), None);
        assert_eq!(factor("q.weight"), None);
    }
}
