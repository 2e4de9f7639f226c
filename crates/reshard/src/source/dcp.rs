//! A DCP folder as a catalog.

use std::collections::HashMap;
use std::sync::Arc;

use reshard_formats::metadata::{PlannerData, Transforms};
use reshard_formats::own::{MAX_OWN_BYTES, Sidecar};
use reshard_formats::{EntryKind, Metadata};
use reshard_storage::{StorageError, Store};

use super::folder::Folder;
use super::{lightning, megatron};
use crate::checkpoint::{
    Catalog, CatalogEntry, CatalogTensor, Checkpoint, ChunkLocation, Format, MAX_METADATA_BYTES, StoredChunk, ValueLocation,
};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{META_FILE, METADATA_FILE, sidecar_name};
use crate::workers::Workers;

/// A folder with `.metadata`.
pub(super) fn open_folder(folder: &Folder) -> Result<Option<Checkpoint>> {
    if !folder.has(METADATA_FILE)? {
        return Ok(None);
    }
    let (store, path) = (folder.store.clone(), folder.path.clone());
    let read = read(store.as_ref(), &path, "", METADATA_FILE)?;
    if folder.has(META_FILE)? {
        return lightning::finish(folder, read).map(Some);
    }
    if read.foreign {
        return megatron::finish(folder, "", read).map(Some);
    }
    Ok(Some(Checkpoint::new(store, path, read.catalog, read.side)))
}

impl Checkpoint {
    /// Opens a DCP folder by metadata of another name: without coordination PyTorch writes `__<rank>.metadata` for each rank.
    pub fn open_metadata(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
        open_as(store, name)
    }
}

fn open_as(store: Arc<dyn Store>, name: &str) -> Result<Checkpoint> {
    let path = store.describe();
    let read = read(store.as_ref(), &path, "", name)?;
    Ok(Checkpoint::new(store, path, read.catalog, read.side))
}

/// A DCP folder.
pub(super) struct Read {
    pub(super) catalog: Catalog,
    pub(super) side: Option<Sidecar>,
    /// Whether its metadata has more, or less, than PyTorch itself writes: another program's planner made it.
    pub(super) foreign: bool,
    /// The shapes of tensors that Megatron stored flattened.
    pub(super) shapes: HashMap<String, Vec<u64>>,
}

/// The catalog of a DCP folder below `prefix` (empty, or a folder with `/` at its end), its files by their paths from the
/// root.
pub(super) fn read(store: &dyn Store, path: &str, prefix: &str, name: &str) -> Result<Read> {
    let file = format!("{prefix}{name}");
    let bytes = store.read(&file, MAX_METADATA_BYTES).doing(|| format!("reading {file}"))?;
    let metadata = Metadata::decode(&bytes).map_err(|e| Error::format(path, &file, "DCP metadata", e))?;
    drop(bytes);
    let foreign = !metadata.extra.is_empty() || matches!(metadata.planner_data, PlannerData::None);
    let shapes = megatron::shapes(&metadata.extra, path, &file)?;
    let save_id = metadata.storage_meta.as_ref().and_then(|m| m.save_id.clone());
    let id = save_id.clone();
    let side = || id.map_or(Ok(None), |id| read_side_file(store, prefix, &id));
    let writer = "torch.distributed.checkpoint".into();
    let (mut catalog, side) = Workers::normal().run(|| rayon::join(|| catalog(metadata, save_id, writer), side))?;
    let mut side = side?;
    if let Some(side) = &side {
        catalog.writer = format!("reshard, {} rank{}", side.ranks, if side.ranks == 1 { "" } else { "s" });
    }
    if !prefix.is_empty() {
        let side = side.as_mut().map_or(&mut [][..], |side| side.files.as_mut_slice());
        for name in catalog.files.iter_mut().chain(side.iter_mut().map(|file| &mut file.file)) {
            *name = format!("{prefix}{name}");
        }
    }
    Ok(Read { catalog, side, foreign, shapes })
}

/// An id comes from a file: one that is no plain word of ours names no file beside it.
pub(crate) fn is_plain_id(save_id: &str) -> bool {
    !save_id.is_empty() && save_id.len() <= 64 && save_id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// The sidecar of a save; its absence is fine, its damage is not.
fn read_side_file(store: &dyn Store, prefix: &str, save_id: &str) -> Result<Option<Sidecar>> {
    if !is_plain_id(save_id) {
        return Ok(None);
    }
    let name = format!("{prefix}{}", sidecar_name(save_id));
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
                            location: ChunkLocation::Record {
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
                    let transform = info.transforms.as_deref().and_then(transform);
                    let location =
                        ValueLocation::Record { file: info.file.0, offset: info.offset, length: info.length, transform };
                    CatalogEntry::value(entry.path, location)
                }
            };
            (key, entry)
        })
        .collect();
    let dcp_version = metadata.version;
    Catalog { save_id, dcp_version, ..Catalog::new(Format::Dcp, metadata.files, entries, writer) }
}

/// The name of what was done to a record's bytes, where anything was.
fn transform(transforms: &Transforms) -> Option<Box<str>> {
    let names = transforms.descriptors.as_deref().filter(|names| !names.is_empty())?;
    Some(names.join(", ").into_boxed_str())
}
