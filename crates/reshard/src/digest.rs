//! What a checkpoint holds, independent of how: for every key its dtype, shape and the sha256 of its bytes, or its value.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::digest::{DigestOptions, digest};
//!
//! let digest = digest(&reshard::Checkpoint::open(path)?, &DigestOptions::default())?;
//! println!("{:?}", digest.entries["model.embed.weight"]);
//! # Ok::<(), reshard::Error>(())
//! ```

use std::sync::Mutex;

use indexmap::IndexMap;
use reshard_formats::Value;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue};
use crate::control::Control;
use crate::error::Result;
use crate::select::Selection;
use crate::stream::{TensorStream, check_covered, for_each_block};
use crate::workers::Workers;

/// How to digest.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DigestOptions {
    /// Which keys, and under which names.
    pub selection: Selection,
    /// Compare stored checksums on the way, so that damage is an error and not another digest.
    pub verify: bool,
    /// To watch and to cancel.
    pub control: Control,
}

impl Default for DigestOptions {
    fn default() -> DigestOptions {
        DigestOptions { selection: Selection::default(), verify: true, control: Control::new() }
    }
}

/// The digest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Digest {
    /// By key, in the order of the checkpoint.
    pub entries: IndexMap<String, DigestEntry>,
}

/// The digest of one key.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum DigestEntry {
    /// A tensor.
    Tensor {
        /// Element type.
        dtype: String,
        /// Shape.
        shape: Vec<u64>,
        /// Of the whole tensor's contiguous little-endian bytes, in hexadecimal.
        sha256: String,
    },
    /// A plain value, as JSON; what JSON has no word for as Python's `repr`.
    Value {
        /// The value.
        value: serde_json::Value,
    },
    /// An object that only unpickling could bring back.
    Opaque {
        /// Its class.
        class: String,
    },
}

/// Digests a checkpoint: streaming, in bounded memory, all threads at once.
pub fn digest(checkpoint: &Checkpoint, options: &DigestOptions) -> Result<Digest> {
    let span = tracing::info_span!("digest", path = checkpoint.path());
    let _entered = span.enter();
    let selected = options.selection.to_read(checkpoint)?;
    let mut work: Vec<(usize, u64)> = Vec::new();
    for (i, item) in selected.iter().enumerate() {
        if let CatalogKind::Tensor(tensor) = &item.entry.kind {
            check_covered(checkpoint, item.stored, tensor)?;
            options.control.expect(tensor.bytes());
            work.push((i, tensor.bytes()));
        }
    }
    // Large ones first, so that no thread is left alone with one at the end.
    work.sort_by_key(|&(i, bytes)| (std::cmp::Reverse(bytes), i));
    let sums: Mutex<Vec<Option<String>>> = Mutex::new(vec![None; selected.len()]);
    Workers::reading(checkpoint.store.as_ref()).in_order(&work, |&(i, _)| {
        let hex = sha256(checkpoint, selected[i].stored, options)?;
        sums.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[i] = Some(hex);
        Ok(())
    })?;
    let sums = sums.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut entries = IndexMap::with_capacity(selected.len());
    for (item, sum) in selected.into_iter().zip(sums) {
        match &item.entry.kind {
            CatalogKind::Tensor(tensor) => {
                let (dtype, shape) = (tensor.dtype.name().to_owned(), tensor.shape.to_vec());
                entries.insert(item.key, DigestEntry::Tensor { dtype, shape, sha256: sum.unwrap_or_default() });
            }
            CatalogKind::Value(_) => match checkpoint.read_value(item.stored)? {
                LoadedValue::Plain(value) => add_value(item.key, &value, &mut entries),
                LoadedValue::Opaque { class, .. } => {
                    entries.insert(item.key, DigestEntry::Opaque { class });
                }
            },
        }
    }
    Ok(Digest { entries })
}

/// Adds a value; dicts, and lists that hold containers, element by element. Formats differ in how far they take such
/// values apart, so this is what makes digests of the same state equal.
fn add_value(key: String, value: &Value, entries: &mut IndexMap<String, DigestEntry>) {
    match value {
        Value::Dict(pairs) | Value::OrderedDict(pairs) if !pairs.is_empty() => {
            for (name, below) in pairs {
                let name = match name {
                    Value::Str(text) => text.clone(),
                    other => other.python_repr(),
                };
                add_value(format!("{key}.{name}"), below, entries);
            }
        }
        Value::List(items) if items.iter().any(is_container) => {
            for (i, below) in items.iter().enumerate() {
                add_value(format!("{key}.{i}"), below, entries);
            }
        }
        value => {
            entries.insert(key, DigestEntry::Value { value: value.to_json() });
        }
    }
}

fn is_container(value: &Value) -> bool {
    matches!(value, Value::Dict(_) | Value::OrderedDict(_) | Value::List(_))
}

fn sha256(checkpoint: &Checkpoint, key: &str, options: &DigestOptions) -> Result<String> {
    let bytes = checkpoint.tensor(key)?.bytes();
    let mut stream = TensorStream::whole(checkpoint, key, options.verify)?;
    let mut hasher = Sha256::new();
    for_each_block(&mut stream, bytes, |block| {
        options.control.check("digesting")?;
        hasher.update(block);
        options.control.advance(block.len() as u64);
        Ok(())
    })?;
    Ok(hasher.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
