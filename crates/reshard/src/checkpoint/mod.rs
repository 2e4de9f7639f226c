//! What is stored at a path: opened once, listed, and read lazily.
//!
//! [`Checkpoint::open`] looks at the path and turns what is stored there, in whatever format, into one [`Catalog`]: keys, and for
//! each tensor its chunks with their files and offsets. Everything else in this crate works on the catalog and does not
//! know formats.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::checkpoint::{CatalogKind, Format};
//!
//! let checkpoint = reshard::Checkpoint::open(path)?;
//! assert_eq!(checkpoint.catalog().format, Format::Dcp);
//! for (key, entry) in &checkpoint.catalog().entries {
//!     if let CatalogKind::Tensor(tensor) = &entry.kind {
//!         println!("{key}: {:?} {:?} in {} chunks", tensor.dtype, tensor.shape, tensor.chunks.len());
//!     }
//! }
//! # Ok::<(), reshard::Error>(())
//! ```

mod catalog;
mod check;
mod computed;
mod expansion;
mod locate;
mod packed;
mod read;

use std::sync::{Arc, OnceLock};

pub(crate) use catalog::{BUFFER_BUCKET, BUFFER_GROUP, is_flat_buffer};
pub use catalog::{
    Catalog, CatalogEntry, CatalogKind, CatalogTensor, ChunkLocation, DataLocation, Format, SeenLocation, StoredChunk, StoredCrc,
    ValueLocation,
};
pub(crate) use catalog::{ScaledWeight, Weights};
pub(crate) use check::{Checker, check_whole};
pub(crate) use computed::{Computed, Formula, Input};
use indexmap::IndexMap;
pub(crate) use locate::{Check, Located, Precision};
use packed::Packed;
pub use packed::can_undo;
pub use read::{LoadedValue, decode_record};
use reshard_formats::ReadAt;
use reshard_formats::own::Sidecar;
use reshard_storage::{Reader, Store};

use crate::error::{Error, Result, StorageContext};

/// No `.metadata` is larger; a lying file cannot make us allocate more.
pub(crate) const MAX_METADATA_BYTES: u64 = 8 << 30;

/// Two places that do not say the same of a key.
#[derive(Debug, Clone)]
pub(crate) struct Flaw {
    /// Whether something is missing; else it is only not named.
    pub(crate) missing: bool,
    pub(crate) key: String,
    pub(crate) file: String,
    pub(crate) what: String,
}

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) path: String,
    pub(crate) catalog: Catalog,
    /// Checksums and data places of a save of ours.
    pub(crate) side: Option<Sidecar>,
    /// What opening found stored twice and not alike; for verification, and for loads that verify always.
    pub(crate) flaws: Vec<Flaw>,
    /// The class of a file that is one object, which only unpickling could bring back.
    pub(crate) object: Option<String>,
    /// What keys may take beyond twice the bytes that are stored of them.
    pub(crate) expanded_limit: u64,
    /// The checkpoint that this one is a view of; it has the files and what is known of them.
    base: Option<Arc<Checkpoint>>,
    /// Other checkpoints whose files are numbered behind the own, from these numbers on.
    beside: Vec<(u32, Arc<Checkpoint>)>,
    /// What block-scaled weights there are; looked for on first use.
    pub(crate) weights: OnceLock<Weights>,
    readers: Vec<OnceLock<Arc<dyn Reader>>>,
    /// Its compressed records, once one is looked for.
    packed: OnceLock<Packed>,
}

impl Checkpoint {
    pub(crate) fn new(store: Arc<dyn Store>, path: String, catalog: Catalog, side: Option<Sidecar>) -> Checkpoint {
        let readers = catalog.files.iter().map(|_| OnceLock::new()).collect();
        let expanded_limit = expansion::default_limit();
        let (flaws, weights, packed) = (Vec::new(), OnceLock::new(), OnceLock::new());
        Checkpoint {
            store,
            path,
            catalog,
            side,
            flaws,
            object: None,
            expanded_limit,
            base: None,
            beside: Vec::new(),
            weights,
            readers,
            packed,
        }
    }

    /// This checkpoint with other entries, which lie in its files.
    pub(crate) fn seen_as(self, entries: IndexMap<String, CatalogEntry>) -> Checkpoint {
        let catalog = Catalog {
            format: self.catalog.format,
            files: self.catalog.files.clone(),
            entries,
            save_id: self.catalog.save_id.clone(),
            dcp_version: self.catalog.dcp_version.clone(),
            writer: self.catalog.writer.clone(),
            notes: self.catalog.notes.clone(),
        };
        let (store, path, expanded_limit) = (Arc::clone(&self.store), self.path.clone(), self.expanded_limit);
        let beside = self.beside.clone();
        // A view of a view has the same files.
        let base = self.base.clone().unwrap_or_else(|| Arc::new(self));
        let (flaws, readers, weights, packed) = (Vec::new(), Vec::new(), OnceLock::new(), OnceLock::new());
        let (side, object, base) = (None, None, Some(base));
        Checkpoint { store, path, catalog, side, flaws, object, expanded_limit, base, beside, weights, readers, packed }
    }

    /// [`Checkpoint::seen_as`], with entries that lie in the files of another, too; those are numbered behind the own.
    pub(crate) fn seen_beside(self, entries: IndexMap<String, CatalogEntry>, other: Arc<Checkpoint>) -> Checkpoint {
        let mut seen = self.seen_as(entries);
        let first = seen.catalog.files.len() as u32;
        let names = other.catalog.files.iter().map(|file| format!("{}/{file}", other.path));
        seen.catalog.files.extend(names);
        seen.beside.push((first, other));
        seen
    }

    /// How many files are its own, and not of a checkpoint beside it.
    pub(crate) fn own_files(&self) -> u32 {
        self.beside.first().map_or(self.catalog.files.len() as u32, |(first, _)| *first)
    }

    /// The checkpoints in whose files some of it lies, besides its own.
    pub(crate) fn others(&self) -> impl Iterator<Item = &Checkpoint> {
        self.beside.iter().map(|(_, other)| other.as_ref())
    }

    /// The checkpoint beside this one that a file or a compressed record is of: its own number there, and what has to be added
    /// to numbers of that checkpoint.
    pub(super) fn beside_of(&self, number: u32) -> Option<(&Checkpoint, u32, u32)> {
        if number == StoredChunk::NO_FILE {
            return None;
        }
        let (first, other) = match packed::beside(number) {
            Some((0, _)) => return None,
            Some((position, added)) => (added, &self.beside.get(position - 1)?.1),
            None => self.beside.iter().rev().find(|(first, _)| number >= *first).map(|(first, other)| (*first, other))?,
        };
        Some((other, number - first, first))
    }

    /// What is stored, where this is a view of it.
    pub(crate) fn base(&self) -> Option<&Checkpoint> {
        self.base.as_deref()
    }

    /// Checksums and data places, where there are any.
    pub(crate) fn side(&self) -> Option<&Sidecar> {
        self.base().unwrap_or(self).side.as_ref()
    }

    /// The address.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The store it lies in.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Everything that is stored.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// All keys, in the order of the file.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.catalog.entries.keys().map(String::as_str)
    }

    /// Whether checksums of every record lie beside it.
    pub fn has_sidecar(&self) -> bool {
        self.side().is_some()
    }

    /// The entry of a key.
    pub fn entry(&self, key: &str) -> Result<&CatalogEntry> {
        self.catalog.entries.get(key).ok_or_else(|| match self.needs_parameter_map(key) {
            Some(error) => error,
            None => {
                let near = crate::mismatch::near_names(key, self.keys());
                Error::NoSuchKey { key: key.to_owned(), path: self.path.clone(), near }
            }
        })
    }

    /// Why a key is not there, if it is optimizer state by parameter that lies in flat buffers.
    pub(crate) fn needs_parameter_map(&self, key: &str) -> Option<Error> {
        let asked = self.catalog.format == Format::Megatron && key.starts_with("optimizer.state.");
        let needed = asked && self.catalog.has_flat_buffers();
        needed.then(|| Error::NeedsParameterMap { key: key.to_owned(), path: self.path.clone() })
    }

    /// The tensor of a key.
    pub fn tensor(&self, key: &str) -> Result<&CatalogTensor> {
        match &self.entry(key)?.kind {
            CatalogKind::Tensor(tensor) => Ok(tensor),
            CatalogKind::Value(_) => Err(Error::invalid(format!("{key:?} in {} is a plain value, not a tensor", self.path))),
        }
    }

    /// An open file of the checkpoint.
    pub(crate) fn reader(&self, file: u32) -> Result<&Arc<dyn Reader>> {
        if let Some((other, number, _)) = self.beside_of(file) {
            return other.reader(number);
        }
        if let Some(record) = self.packed_record(file) {
            return record.reader.get().ok_or_else(|| Error::internal("a compressed record is read before it is measured"));
        }
        if let Some(base) = self.base() {
            return base.reader(file);
        }
        let (Some(name), Some(cell)) = (self.catalog.files.get(file as usize), self.readers.get(file as usize)) else {
            return Err(Error::internal(format!("{} has no file number {file}", self.path)));
        };
        if let Some(reader) = cell.get() {
            return Ok(reader);
        }
        let reader = match self.store.open_reader(name) {
            Err(reshard_storage::StorageError::NotFound { .. }) => {
                return Err(Error::Incomplete {
                    path: self.path.clone(),
                    detail: format!("the file {name}, which the metadata names, is missing"),
                });
            }
            result => result.doing(|| format!("opening {name}"))?,
        };
        Ok(cell.get_or_init(|| reader))
    }

    pub(crate) fn file_name(&self, file: u32) -> &str {
        if let Some((other, number, _)) = self.beside_of(file)
            && other.packed_record(number).is_some()
        {
            return other.file_name(number);
        }
        let file = self.packed_record(file).map_or(file, |record| record.file);
        self.catalog.files.get(file as usize).map_or("?", String::as_str)
    }

    pub(crate) fn corrupt(&self, key: &str, file: u32, offset: u64, detail: impl Into<String>) -> Error {
        Error::Corrupt {
            path: self.path.clone(),
            key: Some(key.to_owned()),
            file: self.file_name(file).to_owned(),
            offset,
            detail: detail.into(),
        }
    }
}

/// A stored file as the formats read it.
pub(crate) struct StoredFile<'a>(pub(crate) &'a dyn Reader);

impl ReadAt for StoredFile<'_> {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(offset, buf).map_err(std::io::Error::other)
    }
}
