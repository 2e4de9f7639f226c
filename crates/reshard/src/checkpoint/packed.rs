//! Compressed records: found like any other, once they were decompressed to see how long they are.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use reshard_formats::TorchArchive;
use reshard_layout::{ByteLayout, Dims};
use reshard_storage::Reader;

use super::expansion::{DECODED, allowed};
use super::locate::{Located, Wanted};
use super::{Catalog, CatalogKind, Checkpoint, ChunkLocation, StoredChunk, ValueLocation};
use crate::error::{Error, Result, chain};
use crate::packed::Compression;
use crate::packed::read::{Broken, Ends, PackedLocation, Pool, Unpacked, unpack};

/// What surrounds a tensor's data in its record is less.
const FRAME: u64 = 1 << 20;

/// Whether what was done to a record, by the descriptors of its transforms, can be undone.
pub fn can_undo(descriptors: &str) -> bool {
    Compression::of(descriptors).is_some()
}

impl Checkpoint {
    fn packed(&self) -> &Packed {
        let stored = self.base().unwrap_or(self);
        stored.packed.get_or_init(|| Packed::of(&stored.catalog))
    }

    /// The compressed record of a number that is not a data file's.
    pub(super) fn packed_record(&self, number: u32) -> Option<&PackedRecord> {
        if number < FIRST_NUMBER || number == StoredChunk::NO_FILE {
            return None;
        }
        self.base().unwrap_or(self).packed.get()?.record(number)
    }

    /// Refuses what was done to a record if it cannot be undone.
    pub(crate) fn compression(&self, key: &str, transform: &str) -> Result<Compression> {
        Compression::of(transform).ok_or_else(|| {
            Error::unsupported(format!(
                "{key:?} in {} was stored through the stream transform {transform:?}, which is not known; load it with PyTorch \
                 and the extension that made it, and save it without",
                self.path
            ))
        })
    }

    /// Finds the tensor in a compressed record.
    pub(super) fn locate_packed(&self, wanted: &Wanted<'_>, offset: u64, length: u64) -> Result<Located> {
        let file = wanted.file;
        let (number, record) = self.packed().find(file, offset, length).ok_or_else(|| self.too_many())?;
        let packed = ByteLayout::contiguous(wanted.sizes, wanted.dtype.size())
            .map_err(|error| self.corrupt(wanted.key, file, offset, error.to_string()))?;
        if let Some((sizes, located)) = record.located.get()
            && located.dtype == wanted.dtype
            && sizes.as_slice() == wanted.sizes
        {
            return Ok(located.clone());
        }
        let location = self.packed_location(wanted.key, file, offset, length)?;
        let measured = location.measure(allowed(packed.end(), FRAME)).map_err(|broken| match broken {
            Broken::TooLarge(most) => {
                let detail = format!("it decompresses to more than {most} bytes, and its tensor has {}", packed.end());
                self.corrupt(wanted.key, file, offset, detail)
            }
            broken => self.broken(wanted.key, file, offset, broken),
        })?;
        let len = measured.len;
        let reader = record.reader.get_or_init(|| self.packed().reader(number, location, len));
        let ends = Ends { measured, rest: reader.as_ref() };
        let archive = TorchArchive::open(&ends, 0, len).map_err(|e| self.corrupt(wanted.key, file, offset, chain(&e)))?;
        let located = self.in_archive(&Wanted { file: number, ..*wanted }, offset, &archive)?;
        record.located.get_or_init(|| (Dims::from_slice(wanted.sizes), located.clone()));
        Ok(located)
    }

    /// What is added to the numbers of the compressed records of a checkpoint beside this one.
    pub(super) fn added_to_records(&self, other: &Checkpoint) -> Result<u32> {
        let position = self.others().position(|one| std::ptr::eq(one, other));
        let added = position.and_then(added);
        added.ok_or_else(|| Error::unsupported(format!("{} is seen with too many checkpoints beside it", self.path)))
    }

    fn too_many(&self) -> Error {
        Error::unsupported(format!("{} has more than {NUMBERS} compressed records", self.path))
    }

    fn packed_location(&self, key: &str, file: u32, offset: u64, length: u64) -> Result<PackedLocation> {
        let reader = self.reader(file)?;
        if offset.checked_add(length).is_none_or(|end| end > reader.len()) {
            let detail = format!("its record of {length} bytes does not fit into the file of {} bytes", reader.len());
            return Err(self.corrupt(key, file, offset, detail));
        }
        Ok(PackedLocation { file: Arc::clone(reader), offset, length })
    }

    /// How many bytes the value in a compressed record has.
    pub(super) fn unpacked_value_len(&self, key: &str, file: u32, offset: u64, length: u64) -> Result<u64> {
        let (_, record) = self.packed().find(file, offset, length).ok_or_else(|| self.too_many())?;
        if let Some(known) = record.value.get() {
            return Ok(*known);
        }
        let location = self.packed_location(key, file, offset, length)?;
        let measured = location.measure(self.most_of_value(length));
        let len = measured.map_err(|broken| self.broken(key, file, offset, broken))?.len;
        Ok(*record.value.get_or_init(|| len))
    }

    /// The bytes of a value's record that was compressed.
    pub(super) fn unpacked_value(&self, key: &str, file: u32, offset: u64, record: &[u8]) -> Result<Vec<u8>> {
        unpack(record, self.most_of_value(record.len() as u64)).map_err(|broken| self.broken(key, file, offset, broken))
    }

    fn most_of_value(&self, length: u64) -> u64 {
        allowed(length, self.expanded_limit / DECODED)
    }

    fn broken(&self, key: &str, file: u32, offset: u64, broken: Broken) -> Error {
        match broken {
            Broken::Storage(source) => Error::Storage { doing: format!("reading {key:?} from {}", self.file_name(file)), source },
            Broken::Damaged(detail) => self.corrupt(key, file, offset, detail),
            Broken::Exhausted => Error::exhausted(format!("there is no memory to decompress {key:?}")),
            Broken::TooLarge(most) => {
                let detail = format!("{key:?} decompresses to more than {most} bytes");
                self.expands(key, detail, self.expanded_limit / DECODED)
            }
        }
    }
}

/// The number of the first compressed record: above those of all files, also of files of a checkpoint beside.
const FIRST_NUMBER: u32 = 1 << 31;
/// Numbers for the compressed records of one checkpoint; those of the checkpoints beside it follow.
const NUMBERS: u32 = 1 << 24;

/// Of a compressed record's number: whose it is, 0 for the own and 1 for the first beside, and what is added to its number there.
pub(super) fn beside(number: u32) -> Option<(usize, u32)> {
    let position = number.checked_sub(FIRST_NUMBER)? / NUMBERS;
    Some((position as usize, position * NUMBERS))
}

/// What is added to the numbers of the compressed records of a checkpoint beside, by its position; `None` where numbers end.
pub(super) fn added(position: usize) -> Option<u32> {
    let added = u32::try_from(position + 1).ok()?.checked_mul(NUMBERS)?;
    FIRST_NUMBER.checked_add(added)?.checked_add(NUMBERS)?;
    Some(added)
}

/// The compressed records of a checkpoint, each with a number as if it were a file.
#[derive(Debug)]
pub(super) struct Packed {
    numbers: HashMap<(u32, u64, u64), u32>,
    records: Vec<PackedRecord>,
    pool: Arc<Pool>,
}

#[derive(Debug)]
pub(super) struct PackedRecord {
    /// The data file that it lies in.
    pub(super) file: u32,
    pub(super) reader: OnceLock<Arc<dyn Reader>>,
    /// Where its tensor was found.
    pub(super) located: OnceLock<(Dims, Located)>,
    /// How long the value in it is.
    pub(super) value: OnceLock<u64>,
}

impl Packed {
    /// The compressed records that a catalog names.
    pub(super) fn of(catalog: &Catalog) -> Packed {
        let mut packed = Packed { numbers: HashMap::new(), records: Vec::new(), pool: Arc::default() };
        for entry in catalog.entries.values() {
            match &entry.kind {
                CatalogKind::Tensor(tensor) => {
                    for chunk in &tensor.chunks {
                        if let ChunkLocation::Record { offset, length, transform: Some(name) } = chunk.location.stored() {
                            packed.add(chunk.file, *offset, *length, name);
                        }
                    }
                }
                CatalogKind::Value(ValueLocation::Record { file, offset, length, transform: Some(name) }) => {
                    packed.add(*file, *offset, *length, name);
                }
                CatalogKind::Value(_) => {}
            }
        }
        packed
    }

    fn add(&mut self, file: u32, offset: u64, length: u64, transform: &str) {
        let number = FIRST_NUMBER + self.records.len() as u32;
        // More of them than there are numbers are not known, and say so when they are looked for.
        let fits = self.records.len() < NUMBERS as usize;
        if fits && Compression::of(transform).is_some() && !self.numbers.contains_key(&(file, offset, length)) {
            self.numbers.insert((file, offset, length), number);
            let (reader, located, value) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
            self.records.push(PackedRecord { file, reader, located, value });
        }
    }

    /// The number and the record of a stretch of a data file.
    pub(super) fn find(&self, file: u32, offset: u64, length: u64) -> Option<(u32, &PackedRecord)> {
        let number = *self.numbers.get(&(file, offset, length))?;
        Some((number, self.record(number)?))
    }

    /// The record of a number that is not a data file's.
    pub(super) fn record(&self, number: u32) -> Option<&PackedRecord> {
        self.records.get(number.checked_sub(FIRST_NUMBER)? as usize)
    }

    /// A reader of a record that was measured.
    pub(super) fn reader(&self, number: u32, location: PackedLocation, len: u64) -> Arc<dyn Reader> {
        Arc::new(Unpacked::new(location, len, number, Arc::clone(&self.pool)))
    }
}
