//! A DCP folder as a catalog.

use std::sync::Arc;

use indexmap::IndexMap;
use reshard_formats::metadata::Transforms;
use reshard_formats::own::{MAX_OWN_BYTES, Sidecar};
use reshard_formats::{EntryKind, Metadata};
use reshard_storage::{StorageError, Store};

use super::folder::Folder;
use crate::checkpoint::{
    Catalog, CatalogEntry, CatalogTensor, Checkpoint, ChunkPlace, Format, MAX_METADATA_BYTES, StoredChunk, ValuePlace,
};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{METADATA_FILE, sidecar_name};
use crate::workers::Workers;

/// A folder with `.metadata`.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if !folder.has(METADATA_FILE)? {
        return Ok(None);
    }
    open_as(folder.store.clone(), METADATA_FILE).map(Some)
}

impl Checkpoint {
    /// Opens a DCP folder by metadata of another name: without coordination PyTorch writes `__<rank>.metadata` for each rank.
    pub fn open_metadata(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
        open_as(store, name)
    }
}

fn open_as(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
    let path = store.describe();
    let bytes = store.read(name, MAX_METADATA_BYTES).doing(|| format!("reading {name}"))?;
    let metadata = Metadata::decode(&bytes).map_err(|e| Error::format(&path, name, "DCP metadata", e))?;
    drop(bytes);
    let save_id = metadata.storage_meta.as_ref().and_then(|m| m.save_id.clone());
    let id = save_id.clone();
    let side = || id.map_or(Ok(None), |id| read_side_file(store.as_ref(), &id));
    let writer = "torch.distributed.checkpoint".into();
    let (mut catalog, side) = Workers::normal().run(|| rayon::join(|| catalog(metadata, save_id, writer), side))?;
    let side = side?;
    if let Some(side) = &side {
        catalog.writer = format!("reshard, {} rank{}", side.ranks, if side.ranks == 1 { "" } else { "s" });
    }
    Ok(Checkpoint::new(store, path, catalog, side))
}

/// An id comes from a file: one that is no plain word of ours names no file beside it.
pub(crate) fn is_plain_id(save_id: &str) -> bool {
    !save_id.is_empty() && save_id.len() <= 64 && save_id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// The sidecar of a save; its absence is fine, its damage is not.
fn read_side_file(store: &dyn Store, save_id: &str) -> Result<Option<Sidecar>> {
    if !is_plain_id(save_id) {
        return Ok(None);
    }
    let name = sidecar_name(save_id);
    let bytes = match store.read(&name, MAX_OWN_BYTES) {
        Err(StorageError::NotFound { .. }) => return Ok(None),
        result => result.doing(|| format!("reading {name}"))?,
    };
    let side = Sidecar::decode(&bytes).map_err(|e| Error::format(&store.describe(), &name, "sidecar", e))?;
    Ok(Some(side).filter(|side| side.save_id == save_id))
}

pub(crate) fn catalog(metadata: Metadata, save_id: Option<String>, writer: String) -> Catalog {
    let entries = metadata
        .entries
        .into_iter()
        .map(|(key, entry)| {
            let entry = match entry.kind {
                EntryKind::Tensor(tensor) => {
                    let chunks = tensor
                        .chunks
                        .into_iter()
                        .map(|chunk| StoredChunk {
                            region: chunk.region,
                            file: chunk.storage.file.0,
                            place: ChunkPlace::Record {
                                offset: chunk.storage.offset,
                                length: chunk.storage.length,
                                transform: chunk.storage.transforms.as_deref().and_then(transform),
                            },
                        })
                        .collect();
                    let properties = tensor.properties;
                    let tensor = CatalogTensor::new(properties.dtype, tensor.shape, properties.requires_grad, chunks);
                    CatalogEntry::tensor(entry.path, tensor)
                }
                EntryKind::Bytes(info) => {
                    let place = ValuePlace::Record { file: info.file.0, offset: info.offset, length: info.length };
                    CatalogEntry::value(entry.path, place)
                }
            };
            (key, entry)
        })
        .collect();
    let dcp_version = metadata.version;
    Catalog { format: Format::Dcp, files: metadata.files, entries, save_id, dcp_version, writer, notes: IndexMap::new() }
}

/// The name of what was done to a record's bytes, where anything was.
fn transform(transforms: &Transforms) -> Option<Box<str>> {
    let names = transforms.descriptors.as_deref().filter(|names| !names.is_empty())?;
    Some(names.join(", ").into_boxed_str())
}
