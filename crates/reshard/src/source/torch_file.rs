//! A `torch.save` file as a catalog: its tree flattened by DCP's rules, every tensor a chunk at a known position.

use std::sync::Arc;

use reshard_state::Tree;
use reshard_storage::Store;

use super::folder::Folder;
use super::{lightning, tensors};
use crate::checkpoint::{Catalog, Checkpoint, Format};
use crate::error::Result;
use crate::layout_names::is_torch;

/// A folder with one such file. Lightning's `meta.pt` is there before the checkpoint that it belongs to.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if lightning::is_unfinished(folder)? {
        return Ok(None);
    }
    match folder.top()?.filter(|name| is_torch(name)).collect::<Vec<_>>()[..] {
        [only] => open(folder.store.clone(), only).map(Some),
        _ => Ok(None),
    }
}

pub(super) fn open(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
    let path = format!("{}/{name}", store.describe());
    let tree = tensors::read_whole(store.as_ref(), &path, name)?;
    let object = match &tree {
        Tree::Opaque(opaque) => Some(opaque.class.clone()),
        _ => None,
    };
    let entries = tensors::entries(tree, &path, name)?;
    let catalog = Catalog::new(Format::Torch, vec![name.to_owned()], entries, "torch.save");
    let mut checkpoint = Checkpoint::new(store, path, catalog, None);
    checkpoint.object = object;
    Ok(checkpoint)
}
