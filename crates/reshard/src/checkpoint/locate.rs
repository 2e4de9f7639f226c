//! Where exactly a chunk's bytes lie, and what they should hash to.

use std::sync::Arc;

use reshard_formats::{Content, DType, ElementForm, TorchArchive};
use reshard_layout::{ByteLayout, Dims, LayoutError};

use super::catalog::{CatalogTensor, ChunkLocation, StoredChunk};
use super::computed::Computed;
use super::{Checkpoint, StoredFile};
use crate::error::{Error, Geometry, Result, chain};

/// A chunk found in its file.
#[derive(Debug, Clone)]
pub(crate) struct Located {
    pub(crate) file: u32,
    /// How the chunk's elements lie in the file, from the file's start.
    pub(crate) layout: ByteLayout,
    pub(crate) form: ElementForm,
    pub(crate) check: Check,
    /// The element type of what is stored.
    pub(crate) dtype: DType,
    /// For a chunk that lies in no file: what every element is.
    pub(crate) fill: Option<Box<[u8]>>,
    /// For a chunk that is computed: how. The layout is that of a file that holds all of it in row-major order.
    pub(crate) computed: Option<Arc<Computed>>,
}

/// A chunk that is looked for: all of what lies in a record.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'w> {
    pub(super) key: &'w str,
    pub(super) dtype: DType,
    pub(super) sizes: &'w [u64],
    pub(super) file: u32,
}

/// What is known about the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Check {
    /// Nothing.
    None,
    /// Their strong hash; they are exactly the bytes of the layout.
    Xxh3 { offset: u64, length: u64, expected: u64 },
    /// The CRC-32 of a stretch of the file, which may be more than the chunk (a shared storage).
    Crc32 { offset: u64, length: u64, expected: u32 },
}

impl Check {
    /// The stretch of the file that the check is about.
    pub(crate) fn stretch(&self) -> Option<(u64, u64)> {
        match *self {
            Check::None => None,
            Check::Xxh3 { offset, length, .. } | Check::Crc32 { offset, length, .. } => Some((offset, length)),
        }
    }
}

/// How exactly chunks are located.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    /// To the byte, for reading: a record that nothing else tells of is opened.
    Byte,
    /// From metadata alone, for a dry run: such a record is taken to begin with its data.
    Metadata,
}

impl Checkpoint {
    /// Finds the bytes of a chunk.
    pub(crate) fn locate(&self, key: &str, tensor: &CatalogTensor, chunk: usize) -> Result<Located> {
        self.locate_to(Precision::Byte, key, tensor, chunk)
    }

    pub(crate) fn locate_to(&self, precision: Precision, key: &str, tensor: &CatalogTensor, chunk: usize) -> Result<Located> {
        let Some(stored) = tensor.chunks.get(chunk) else {
            return Err(Error::internal(format!("{key:?} has no chunk {chunk}")));
        };
        match &stored.location {
            ChunkLocation::Seen(seen) => {
                let mut located =
                    self.locate_stored(key, (seen.dtype, seen.region.sizes()), stored.file, &seen.stored, precision)?;
                let through = located.layout.through(&seen.window);
                located.layout = through.map_err(|e| self.corrupt(key, stored.file, 0, e.to_string()))?;
                Ok(located)
            }
            ChunkLocation::Fill(value) => {
                let (sizes, none) = (stored.region.sizes(), Dims::from_elem(0, stored.region.ndim()));
                let layout = ByteLayout::strided(sizes, &none, tensor.dtype.size()).proven()?;
                let form = ElementForm::default();
                let fill = Some(value.clone());
                Ok(Located {
                    file: StoredChunk::NO_FILE,
                    layout,
                    form,
                    check: Check::None,
                    dtype: tensor.dtype,
                    fill,
                    computed: None,
                })
            }
            location => self.locate_stored(key, (tensor.dtype, stored.region.sizes()), stored.file, location, precision),
        }
    }

    /// Finds the bytes of a chunk of this type and these sizes, which is all of what lies at a place.
    fn locate_stored(
        &self,
        key: &str,
        (dtype, sizes): (DType, &[u64]),
        file: u32,
        location: &ChunkLocation,
        precision: Precision,
    ) -> Result<Located> {
        // A checkpoint beside this one knows its own checksums and compressed records.
        if let Some((other, own, first)) = self.beside_of(file) {
            let mut located = other.locate_stored(key, (dtype, sizes), own, location, precision)?;
            if located.file != StoredChunk::NO_FILE {
                located.file += if located.file == own { first } else { self.added_to_records(other)? };
            }
            return Ok(located);
        }
        let (offset, length) = match location {
            ChunkLocation::Data(data) => {
                let check = match data.checksum {
                    Some(c) => Check::Crc32 { offset: c.offset, length: c.length, expected: c.crc32 },
                    None => Check::None,
                };
                return Ok(Located {
                    file,
                    layout: data.layout.clone(),
                    form: data.form,
                    check,
                    dtype,
                    fill: None,
                    computed: None,
                });
            }
            ChunkLocation::Record { offset, length, transform: Some(name) } => {
                self.compression(key, name)?;
                return self.locate_packed(&Wanted { key, dtype, sizes, file }, *offset, *length);
            }
            ChunkLocation::Record { offset, length, .. } => (*offset, *length),
            ChunkLocation::Computed(computed) => {
                let (layout, form) = (ByteLayout::contiguous(sizes, dtype.size()).proven()?, ElementForm::default());
                let (file, computed) = (StoredChunk::NO_FILE, Some(Arc::clone(computed)));
                return Ok(Located { file, layout, form, check: Check::None, dtype, fill: None, computed });
            }
            ChunkLocation::Live => {
                let detail = "the view leaves these elements as they are in the tensor that is loaded";
                return Err(Error::unsupported(format!("{key:?} in {} is not stored whole: {detail}", self.path)));
            }
            ChunkLocation::Seen(_) | ChunkLocation::Fill(_) => return Err(Error::internal("a chunk is part of a part")),
        };
        // What a file says of its own chunks.
        let damaged = |error: LayoutError| self.corrupt(key, file, offset, error.to_string());
        let packed = ByteLayout::contiguous(sizes, dtype.size()).map_err(damaged)?;
        if let Some(record) = self.side().and_then(|side| side.find(self.file_name(file), offset))
            && record.length == length
            && record.data_length == packed.end()
            && !record.is_packed_tensor()
        {
            let data = offset + record.data_offset;
            let check = match record.sums {
                Some(sums) => Check::Xxh3 { offset: data, length: record.data_length, expected: sums.xxh3() },
                None => Check::None,
            };
            let layout = packed.try_at(data).map_err(damaged)?;
            return Ok(Located { file, layout, form: ElementForm::default(), check, dtype, fill: None, computed: None });
        }
        if precision == Precision::Metadata {
            let layout = packed.try_at(offset).map_err(damaged)?;
            let form = ElementForm::default();
            return Ok(Located { file, layout, form, check: Check::None, dtype, fill: None, computed: None });
        }
        let reader = StoredFile(self.reader(file)?.as_ref());
        let damaged = |detail: String| self.corrupt(key, file, offset, detail);
        let archive = TorchArchive::open(&reader, offset, length).map_err(|e| damaged(chain(&e)))?;
        self.in_archive(&Wanted { key, dtype, sizes, file }, offset, &archive)
    }

    /// Finds a tensor in its archive. `offset` is the record's in its data file.
    pub(super) fn in_archive(&self, wanted: &Wanted<'_>, offset: u64, archive: &TorchArchive<'_>) -> Result<Located> {
        let Wanted { key, dtype, sizes, file } = *wanted;
        let damaged = |detail: String| self.corrupt(key, file, offset, detail);
        match archive.content().map_err(|e| damaged(chain(&e)))? {
            Content::Tensor(found) => {
                if found.dtype != dtype || found.shape.as_slice() != sizes {
                    return Err(damaged(format!(
                        "the record holds a {} of shape {:?}, the metadata promises {} of shape {:?}",
                        found.dtype.name(),
                        found.shape.as_slice(),
                        dtype.name(),
                        sizes,
                    )));
                }
                let storage = found.storage;
                let check = match storage.crc32 {
                    Some(expected) => Check::Crc32 { offset: storage.offset, length: storage.length, expected },
                    None => Check::None,
                };
                Ok(Located { file, layout: found.layout, form: found.form, check, dtype, fill: None, computed: None })
            }
            _ => Err(damaged("the record holds no tensor".into())),
        }
    }
}
