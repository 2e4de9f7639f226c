//! Objects that Megatron stores as records of their own, opened: the state that all ranks share (0.19 on), and the optimizer's
//! buffers that one rank gathered (`dp_zero_gather_scatter`). Each is the `torch.save` of a list.

use indexmap::IndexMap;
use reshard_formats::PathSegment;
use reshard_state::{Dict, Tree};

use crate::checkpoint::{CatalogEntry, CatalogKind, Checkpoint, ValueLocation};
use crate::error::Result;
use crate::source::tensors::{self, Parts};

/// What is the same on all ranks.
pub(super) const COMMON: &str = "common_state/shard_0_1";
/// The optimizer's buffers, gathered.
const GATHERED: &str = ".param_state/shard_0_1";

/// The keys of objects, and what they hold.
#[derive(Default)]
pub(super) struct Objects {
    opened: Vec<(String, IndexMap<String, CatalogEntry>)>,
}

impl Objects {
    pub(super) fn is_empty(&self) -> bool {
        self.opened.is_empty()
    }

    /// What one of them holds under a key.
    pub(super) fn entry(&self, key: &str) -> Option<&CatalogEntry> {
        self.opened.iter().find_map(|(_, inner)| inner.get(key))
    }

    /// Puts what the objects hold in their place.
    pub(super) fn put(self, entries: &mut IndexMap<String, CatalogEntry>) {
        for (key, inner) in self.opened {
            entries.shift_remove(&key);
            for (key, entry) in inner {
                entries.entry(key).or_insert(entry);
            }
        }
    }
}

/// Opens the objects of a checkpoint. The others are values like any.
pub(super) fn opened(checkpoint: &Checkpoint) -> Result<Objects> {
    let mut objects = Objects::default();
    for (key, entry) in &checkpoint.catalog.entries {
        // Behind a stream transform they stay values, which are read when they are asked for.
        let CatalogKind::Value(ValueLocation::Record { file, offset, length, transform: None }) = &entry.kind else { continue };
        let (file, offset, length) = (*file, *offset, *length);
        let below = match key.strip_suffix(GATHERED) {
            Some(group) => Some(format!("{group}.param_state")),
            None if key == COMMON => None,
            None => continue,
        };
        let name = checkpoint.file_name(file);
        let reader = checkpoint.reader(file)?.as_ref();
        let tree = tensors::read_record(reader, &checkpoint.path, name, file, offset, length)?;
        let Some(tree) = only_dict(tree) else { continue };
        let inner = tensors::entries(Tree::Dict(tree), &checkpoint.path, name)?;
        let inner = inner.into_iter().map(|(key, mut entry)| match &below {
            None => (key, entry),
            Some(below) => {
                if let Some(path) = &mut entry.path {
                    path.insert(0, PathSegment::Key(below.clone()));
                }
                (format!("{below}.{key}"), entry)
            }
        });
        objects.opened.push((key.clone(), inner.collect()));
    }
    Ok(objects)
}

/// The dict that a list of one, or the object itself, is.
fn only_dict(tree: Tree<Parts>) -> Option<Dict<Parts>> {
    match tree {
        Tree::Dict(dict) => Some(dict),
        Tree::List(items) if items.len() == 1 => items.into_iter().next().and_then(only_dict),
        _ => None,
    }
}
