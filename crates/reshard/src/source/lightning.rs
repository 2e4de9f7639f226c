//! Lightning's folders: a DCP checkpoint with `meta.pt` beside it, which has what is not a tensor of the model or an optimizer:
//! counters, loops, callbacks, hyperparameters, schedulers, and what the user gave along.

use reshard_formats::Value;
use reshard_state::{Key, Tree};

use super::folder::Folder;
use super::{dcp, parts, tensors};
use crate::checkpoint::{Checkpoint, Format};
use crate::error::Result;
use crate::layout_names::{DATA_SUFFIX, META_FILE};

/// Whether a folder without `.metadata` is one of Lightning's whose save was never finished: `meta.pt` beside data files, or in a folder
/// with the name of a checkpoint.
pub(super) fn is_unfinished(folder: &Folder) -> Result<bool> {
    let top: Vec<&str> = folder.top()?.collect();
    let named = folder.path.trim_end_matches('/').ends_with(".ckpt");
    Ok(top.contains(&META_FILE) && (named || top.iter().any(|name| name.ends_with(DATA_SUFFIX))))
}

/// A DCP folder with `meta.pt`, as one checkpoint.
pub(super) fn finish(folder: &Folder, read: dcp::Read) -> Result<Checkpoint> {
    let dcp::Read { mut catalog, side, .. } = read;
    let number = catalog.files.len() as u32;
    catalog.files.push(META_FILE.to_owned());
    let tree = parts::read_or_opaque(folder, META_FILE, "meta", number)?;
    catalog.format = Format::Lightning;
    if side.is_none() {
        catalog.writer = match tree.get(&Key::from("pytorch-lightning_version")) {
            Some(Tree::Value(Value::Str(version))) => format!("Lightning {version}"),
            _ => "Lightning".into(),
        };
    }
    for (key, entry) in tensors::entries(Tree::Dict(tree), &folder.path, META_FILE)? {
        catalog.entries.entry(key).or_insert(entry);
    }
    Ok(Checkpoint::new(folder.store.clone(), folder.path.clone(), catalog, side))
}
