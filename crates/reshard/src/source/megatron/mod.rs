//! Megatron core's folders: `iter_0000100` with a DCP checkpoint (`torch_dist`) and `common.pt` beside it, or with a file
//! for each model parallel rank (`torch`, the older format).
//!
//! Keys are Megatron's own. Of the optimizer's state, `fully_reshardable` and `fsdp_dtensor` have the parameters' shapes, those
//! of `fully_sharded_model_space` are restored ([`flattened`]); `dp_reshardable` is flat buffers, whose parameters nothing in
//! the checkpoint names: a map does ([`ParameterMap`]).

mod buffers;
mod flattened;
mod objects;
mod parameter_map;
mod ranks;

pub(super) use flattened::shapes;
pub use parameter_map::ParameterMap;
use reshard_state::Tree;
use reshard_storage::StorageError;

use super::folder::Folder;
use super::values::integer;
use super::{dcp, parts, tensors};
use crate::checkpoint::{CatalogKind, Checkpoint, Format, ValueLocation};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::METADATA_FILE;

/// Names the newest iteration.
const LATEST: &str = "latest_checkpointed_iteration.txt";
/// Says which backend wrote a folder.
const CONFIG: &str = "metadata.json";
const MAX_TEXT_BYTES: u64 = 1 << 20;
/// What is the same on all ranks, before 0.19.
const COMMON: &str = "common.pt";

/// A root whose `latest_checkpointed_iteration.txt` names an iteration, or an iteration of the older format.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if folder.has(LATEST)? {
        let text = folder.store.read(LATEST, MAX_TEXT_BYTES).doing(|| format!("reading {LATEST}"))?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        let name = match text.parse::<u64>() {
            Ok(number) => format!("iter_{number:07}"),
            Err(_) if text == "release" => text,
            Err(_) => return Err(invalid(folder, LATEST, format!("it should name an iteration, and says {text:?}"))),
        };
        let prefix = format!("{name}/");
        if let Some(checkpoint) = beside(folder, &prefix)? {
            return Ok(Some(checkpoint));
        }
        if let Some(checkpoint) = ranks::open(folder, &prefix)? {
            return Ok(Some(checkpoint));
        }
        let detail = format!("{LATEST} names {name}, which holds no checkpoint");
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    if folder.has(METADATA_FILE)? {
        return Ok(None);
    }
    ranks::open(folder, "")
}

/// A DCP folder below `prefix`, with what lies beside it.
fn beside(folder: &Folder, prefix: &str) -> Result<Option<Checkpoint>> {
    if !folder.has(&format!("{prefix}{METADATA_FILE}"))? {
        return Ok(None);
    }
    let mut read = dcp::read(folder.store.as_ref(), &folder.path, prefix, METADATA_FILE)?;
    // By way of the root it is Megatron's whatever else it says.
    read.catalog.format = Format::Megatron;
    finish(folder, prefix, read).map(Some)
}

/// A DCP folder whose metadata has more than PyTorch itself writes, with what Megatron put beside and into it.
pub(super) fn finish(folder: &Folder, prefix: &str, mut read: dcp::Read) -> Result<Checkpoint> {
    add_common(folder, prefix, &mut read)?;
    let dcp::Read { catalog, side, shapes, .. } = read;
    let stored = Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, side);
    if stored.catalog.format != Format::Megatron {
        return Ok(stored);
    }
    let objects = objects::opened(&stored)?;
    check_iteration(folder, prefix, &stored, &objects)?;
    if shapes.is_empty() && objects.is_empty() {
        return Ok(stored);
    }
    let mut entries = flattened::restored(&stored.catalog, &stored.path, &shapes)?;
    objects.put(&mut entries);
    Ok(stored.seen_as(entries))
}

/// Adds what all ranks share to a DCP folder's catalog, if Megatron wrote it: its `metadata.json` says so.
fn add_common(folder: &Folder, prefix: &str, read: &mut dcp::Read) -> Result<()> {
    let name = format!("{prefix}{CONFIG}");
    let config = match folder.store.read(&name, MAX_TEXT_BYTES) {
        Ok(config) => config,
        Err(StorageError::NotFound { .. }) => return Ok(()),
        Err(source) => return Err(Error::Storage { doing: format!("reading {name}"), source }),
    };
    let config = serde_json::from_slice::<serde_json::Value>(&config).unwrap_or_default();
    let said = |name: &str| config.get(name).and_then(serde_json::Value::as_str);
    match said("sharded_backend") {
        Some("torch_dist") => {}
        Some(other) => {
            return Err(Error::unsupported(format!(
                "{} was written by Megatron's backend {other:?}, which is not supported; of its backends torch_dist is",
                folder.path
            )));
        }
        None => return Ok(()),
    }
    let catalog = &mut read.catalog;
    catalog.format = Format::Megatron;
    if read.side.is_none() {
        catalog.writer = "Megatron core".into();
    }
    let common = format!("{prefix}{COMMON}");
    if folder.has(&common)? {
        let number = catalog.files.len() as u32;
        catalog.files.push(common.clone());
        let tree = parts::read_or_opaque(folder, &common, "common", number)?;
        for (key, entry) in tensors::entries(Tree::Dict(tree), &folder.path, &common)? {
            catalog.entries.entry(key).or_insert(entry);
        }
    } else if said("common_backend").is_some() && !catalog.entries.contains_key(objects::COMMON) {
        let detail = format!(
            "{common}, which {name} promises and which has the state that all ranks share, is missing; copy it from where the \
             checkpoint was written"
        );
        return Err(Error::Incomplete { path: folder.path.clone(), detail });
    }
    Ok(())
}

/// The state that all ranks share is of the iteration that its folder is named after, and not of one that lies beside it. A folder
/// may be called by another number than the one that was saved in it; files of two of a run's iterations may not be mixed.
fn check_iteration(folder: &Folder, prefix: &str, stored: &Checkpoint, objects: &objects::Objects) -> Result<()> {
    const ITERATION: &str = "iteration";
    let name = prefix.trim_end_matches('/');
    let Some(expected) = name.strip_prefix("iter_").and_then(|number| number.parse::<u64>().ok()) else { return Ok(()) };
    let entry = stored.catalog.entries.get(ITERATION).or_else(|| objects.entry(ITERATION));
    let Some(CatalogKind::Value(ValueLocation::Inline(value))) = entry.map(|entry| &entry.kind) else { return Ok(()) };
    let Some(found) = integer(value).filter(|found| *found != expected) else { return Ok(()) };
    let other = format!("iter_{found:07}");
    if !folder.has(&format!("{other}/{METADATA_FILE}"))? {
        return Ok(());
    }
    let detail =
        format!("it says iteration {found}, and lies in {name} beside {other}: files of two saves are mixed; copy {name} again");
    Err(invalid(folder, &format!("{prefix}{COMMON}"), detail))
}

fn invalid(folder: &Folder, file: &str, detail: String) -> Error {
    Error::format(&folder.path, file, "file of a Megatron checkpoint", tensors::Disagrees(detail))
}
