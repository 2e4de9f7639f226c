//! The index at the end of every data file: its own records, keys included, so that data files alone are enough to rebuild
//! `.metadata`.

use reshard_layout::Region;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use twox_hash::XxHash3_64;

use super::checksums::{RecordChecksums, check_records};
use super::keys::KeyEntry;
use super::{MAX_OWN_BYTES, OwnFileError, check_hash, whole};
use crate::read_at::ReadAt;

const MAGIC: &[u8; 8] = b"RSHINDX1";
/// Length of the index's own tail: body length, body hash, magic.
const TAIL: u64 = 24;
/// Bytes of the magic that tell a damaged index from none.
const MAGIC_RECOGNISED: usize = 6;

/// The index of a data file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIndex {
    /// Of the save that wrote the file.
    pub save_id: String,
    /// The rank that wrote it.
    pub rank: u32,
    /// How many ranks saved; 0 when the file holds what an edit added to files of another save.
    pub ranks: u32,
    /// How many files this rank wrote.
    pub files: u32,
    /// The keys that occur in this file.
    pub table: Vec<KeyEntry>,
    /// The records, in the order in which they lie in the file.
    pub records: Vec<IndexedRecord>,
}

/// One record of a data file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexedRecord {
    /// Position in the index's table.
    pub key: u32,
    /// `None` for a value.
    #[serde(serialize_with = "region_numbers", deserialize_with = "region")]
    pub region: Option<Region>,
    /// Where it lies, and its checksums.
    pub sum: RecordChecksums,
}

/// What is written of [`FileIndex`]: the same fields, borrowed.
#[derive(Serialize)]
pub struct FileIndexRef<'a> {
    /// See [`FileIndex`].
    pub save_id: &'a str,
    /// See [`FileIndex`].
    pub rank: u32,
    /// See [`FileIndex`].
    pub ranks: u32,
    /// See [`FileIndex`].
    pub files: u32,
    /// See [`FileIndex`].
    pub table: Vec<&'a KeyEntry>,
    /// See [`FileIndex`].
    pub records: Vec<IndexedRecordRef<'a>>,
}

/// What is written of [`IndexedRecord`].
#[derive(Serialize)]
pub struct IndexedRecordRef<'a> {
    /// See [`IndexedRecord`].
    pub key: u32,
    /// See [`IndexedRecord`].
    pub region: Option<OffsetsAndSizes<'a>>,
    /// See [`IndexedRecord`].
    pub sum: RecordChecksums,
}

/// A region as one list of numbers: offsets, then sizes.
pub struct OffsetsAndSizes<'a>(pub &'a [u64], pub &'a [u64]);

impl Serialize for OffsetsAndSizes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().chain(self.1))
    }
}

fn region_numbers<S: Serializer>(region: &Option<Region>, serializer: S) -> Result<S::Ok, S::Error> {
    region.as_ref().map(|region| OffsetsAndSizes(region.offsets(), region.sizes())).serialize(serializer)
}

fn region<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Region>, D::Error> {
    let Some(numbers) = Option::<Vec<u64>>::deserialize(deserializer)? else { return Ok(None) };
    let (offsets, sizes) = numbers.split_at(numbers.len() / 2);
    Region::new(offsets, sizes).map(Some).map_err(serde::de::Error::custom)
}

impl FileIndexRef<'_> {
    /// The bytes that end the file.
    pub fn encode(&self) -> Result<Vec<u8>, OwnFileError> {
        encode(self)
    }

    /// How many they are.
    pub fn encoded_len(&self) -> Result<u64, OwnFileError> {
        let body = postcard::serialize_with_flavor(self, postcard::ser_flavors::Size::default());
        Ok(body.map_err(OwnFileError::content)? as u64 + TAIL)
    }
}

fn encode(index: &impl Serialize) -> Result<Vec<u8>, OwnFileError> {
    let mut bytes = postcard::to_stdvec(index).map_err(OwnFileError::content)?;
    let length = bytes.len() as u64;
    let hash = XxHash3_64::oneshot(&bytes);
    bytes.extend(length.to_le_bytes());
    bytes.extend(hash.to_le_bytes());
    bytes.extend(MAGIC);
    Ok(bytes)
}

impl FileIndex {
    /// The bytes that end the file.
    pub fn encode(&self) -> Result<Vec<u8>, OwnFileError> {
        encode(self)
    }

    /// Reads the index at the end of a data file; `None` when the file has none (PyTorch wrote it, or it was cut off).
    pub fn read(file: &dyn ReadAt) -> Result<Option<FileIndex>, OwnFileError> {
        let size = file.len();
        let Some(tail_at) = size.checked_sub(TAIL) else { return Ok(None) };
        let mut tail = [0u8; TAIL as usize];
        file.read_at(tail_at, &mut tail)?;
        if !tail.ends_with(MAGIC) {
            // No file of PyTorch's ends nearly so.
            let equal = tail[16..].iter().zip(MAGIC).filter(|(a, b)| a == b).count();
            return if equal >= MAGIC_RECOGNISED { Err(OwnFileError::Mark) } else { Ok(None) };
        }
        let length = u64::from_le_bytes(tail[..8].try_into().map_err(|_| OwnFileError::NotOne)?);
        let start = tail_at.checked_sub(length).filter(|_| length <= MAX_OWN_BYTES).ok_or(OwnFileError::NotOne)?;
        let mut body = vec![0; length as usize];
        file.read_at(start, &mut body)?;
        check_hash(&body, &tail[8..16])?;
        let index: FileIndex = whole(&body)?;
        index.check()?;
        Ok(Some(index))
    }

    /// Proves that every record is one of a key in the table, and a part of it where that is a tensor.
    fn check(&self) -> Result<(), OwnFileError> {
        check_records(self.records.iter().map(|record| record.sum))?;
        for record in &self.records {
            let Some(entry) = self.table.get(record.key as usize) else {
                return Err(OwnFileError::Content("a record names a key that is not in the table".into()));
            };
            let sound = match (&entry.tensor, &record.region) {
                (Some(tensor), Some(region)) => region.check_inside(&tensor.shape).is_ok(),
                (None, None) => true,
                _ => false,
            };
            if !sound {
                return Err(OwnFileError::Content(format!(
                    "the record at {} is not a part of {:?}",
                    record.sum.offset, entry.key
                )));
            }
        }
        Ok(())
    }
}
