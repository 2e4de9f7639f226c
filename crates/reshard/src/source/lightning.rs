//! Lightning's folders: a DCP checkpoint with `meta.pt` beside it, which has what is no tensor of the model or an optimizer:
//! counters, loops, callbacks, hyperparameters, schedulers, and what the user gave along.

use reshard_formats::Value;
use reshard_state::{Key, Tree};

use super::folder::Folder;
use super::{dcp, parts, tensors};
use crate::checkpoint::{Checkpoint, Format};
use crate::error::Result;
use crate::layout_names::META_FILE;

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
