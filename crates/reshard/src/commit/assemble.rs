//! From what was written, record by record, to `.metadata` and the sidecar.

use std::sync::Arc;

use reshard_formats::metadata::Transforms;
use reshard_formats::own::{RecordChecksums, Sidecar, SidecarFile, TensorFacts};
use reshard_formats::{
    Chunk, Entry, EntryKind, FileId, KeyPath, Metadata, StorageInfo, StorageMeta, TensorEntry, TensorProperties,
};
use reshard_layout::Region;

use crate::error::{Error, Result};
use crate::packed::Compression;

/// A checkpoint being put together: files, keys, then the records that say what lies where.
pub(crate) struct Assembly {
    save_id: String,
    ranks: u32,
    files: Vec<String>,
    sidecar: Vec<SidecarFile>,
    entries: Vec<Pending>,
    /// What is said of compressed records.
    packed: Option<Arc<Transforms>>,
}

struct Pending {
    key: String,
    path: KeyPath,
    tensor: Option<TensorFacts>,
    chunks: Vec<Chunk>,
    value: Option<StorageInfo>,
}

impl Assembly {
    pub(crate) fn new(save_id: &str, ranks: u32) -> Assembly {
        let (files, sidecar, entries) = (Vec::new(), Vec::new(), Vec::new());
        Assembly { save_id: save_id.to_owned(), ranks, files, sidecar, entries, packed: None }
    }

    /// A data file.
    pub(crate) fn add_file(&mut self, name: String, length: u64) -> Result<FileId> {
        let id = FileId(u32::try_from(self.files.len()).map_err(|_| Error::exhausted("too many files"))?);
        self.sidecar.push(SidecarFile { file: name.clone(), length, records: Vec::new() });
        self.files.push(name);
        Ok(id)
    }

    /// A key, in the order of the checkpoint; without facts it is a value's. Returns its position.
    pub(crate) fn add_key(&mut self, key: String, path: KeyPath, tensor: Option<TensorFacts>) -> usize {
        self.entries.push(Pending { key, path, tensor, chunks: Vec::new(), value: None });
        self.entries.len() - 1
    }

    /// A record of a key, of a region of it where it is a tensor. A file's records come in their order.
    pub(crate) fn add_record(&mut self, key: usize, region: Option<Region>, file: FileId, sum: RecordChecksums) -> Result<()> {
        let (Some(entry), Some(side)) = (self.entries.get_mut(key), self.sidecar.get_mut(file.0 as usize)) else {
            return Err(Error::internal("a record of a key or a file that is not known"));
        };
        let mut storage = StorageInfo::new(file, sum.offset, sum.length);
        if entry.tensor.is_some() && sum.is_packed_tensor() {
            storage.transforms = Some(Arc::clone(self.packed.get_or_insert_with(|| {
                let descriptors = Some(vec![Compression::Zstd.descriptor().to_owned()]);
                Arc::new(Transforms { descriptors, ..Transforms::default() })
            })));
        }
        match (&entry.tensor, region) {
            (Some(_), Some(region)) => entry.chunks.push(Chunk { region, storage }),
            // The first is as good as any.
            (None, None) => drop(entry.value.get_or_insert(storage)),
            _ => return Err(Error::internal(format!("{:?} is both a tensor and a value", entry.key))),
        }
        side.records.push(sum);
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<(Metadata, Sidecar)> {
        let mut metadata = Metadata::new();
        metadata.files = self.files;
        metadata.storage_meta = Some(StorageMeta { save_id: Some(self.save_id.clone()), ..StorageMeta::default() });
        metadata.entries.reserve(self.entries.len());
        for Pending { key, path, tensor, mut chunks, value } in self.entries {
            let kind = match (tensor, value) {
                (Some(facts), _) => {
                    chunks.sort_by(|a, b| a.region.cmp(&b.region));
                    let mut properties = TensorProperties::new(facts.dtype);
                    properties.requires_grad = facts.requires_grad;
                    EntryKind::Tensor(TensorEntry { properties, shape: facts.shape, chunks, extra: None })
                }
                (None, Some(storage)) => EntryKind::Bytes(storage),
                (None, None) => return Err(Error::internal(format!("nobody wrote {key:?}"))),
            };
            metadata.entries.insert(key, Entry { path: Some(path), kind });
        }
        let mut files = self.sidecar;
        files.sort_by(|a, b| a.file.cmp(&b.file));
        Ok((metadata, Sidecar { save_id: self.save_id, ranks: self.ranks, files }))
    }
}

/// The bytes of a sidecar.
pub(crate) fn encode_side(side: &Sidecar) -> Result<Vec<u8>> {
    side.encode().map_err(|e| Error::internal(format!("the sidecar cannot be written: {e}")))
}
