//! Checksums beside the data, and the index at the end of every data file.
//!
//! The *sidecar* `.reshard-<save id>.sums` holds the place and the checksums of every record of one save; PyTorch ignores
//! it. It belongs to the `.metadata` that carries the same save id and to no other. Every data file ends with an *index* of
//! its own records, keys included, so that data files alone are enough to rebuild `.metadata`. Both end with a checksum of
//! themselves and are decoded as foreign bytes.

use reshard_formats::ReadAt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::plan::local::TableEntry;

const SIDE_MAGIC: &[u8; 8] = b"RSHSUMS1";
const INDEX_MAGIC: &[u8; 8] = b"RSHINDX1";
/// Length of the index's own tail: body length, body hash, magic.
const INDEX_TAIL: u64 = 24;
/// Bytes of the magic that tell a damaged index from none.
const MAGIC_RECOGNISED: usize = 6;
/// No index or sidecar is larger.
pub(crate) const MAX_SIDE_BYTES: u64 = 4 << 30;

/// Where one record lies and what its content hashes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordChecksums {
    /// Where the record starts in its file.
    pub(crate) offset: u64,
    /// Its whole length.
    pub(crate) length: u64,
    /// Where the summed bytes start, relative to the record: a tensor's data; for a value the whole record, 0.
    pub(crate) data_offset: u64,
    /// How many bytes are summed.
    pub(crate) data_length: u64,
    /// `None` when the save was told to skip checksums.
    pub(crate) sums: Option<Checksums>,
}

/// The checksums of one stretch of bytes: the one every zip tool knows, and a fast strong one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Checksums {
    // Bytes and not numbers, so that their encoding has one length and a file's size is known before its checksums are.
    crc32: [u8; 4],
    xxh3: [u8; 8],
}

impl Checksums {
    pub(crate) const ZERO: Checksums = Checksums { crc32: [0; 4], xxh3: [0; 8] };

    pub(crate) fn crc32(self) -> u32 {
        u32::from_le_bytes(self.crc32)
    }

    pub(crate) fn xxh3(self) -> u64 {
        u64::from_le_bytes(self.xxh3)
    }
}

/// Computes [`Checksums`] as bytes pass by.
pub(crate) struct ChecksumBuilder {
    crc: crc32fast::Hasher,
    xxh3: XxHash3_64,
}

impl ChecksumBuilder {
    pub(crate) fn new() -> ChecksumBuilder {
        ChecksumBuilder { crc: crc32fast::Hasher::new(), xxh3: XxHash3_64::new() }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        // Both pass over a block while it is in the cache.
        for block in bytes.chunks(128 << 10) {
            self.crc.update(block);
            std::hash::Hasher::write(&mut self.xxh3, block);
        }
    }

    pub(crate) fn finish(self) -> Checksums {
        let xxh3 = std::hash::Hasher::finish(&self.xxh3);
        Checksums { crc32: self.crc.finalize().to_le_bytes(), xxh3: xxh3.to_le_bytes() }
    }

    pub(crate) fn of(bytes: &[u8]) -> Checksums {
        Checksums { crc32: crc32fast::hash(bytes).to_le_bytes(), xxh3: XxHash3_64::oneshot(bytes).to_le_bytes() }
    }
}

/// The sidecar of one save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sidecar {
    pub(crate) save_id: String,
    /// How many ranks saved.
    pub(crate) ranks: u32,
    pub(crate) files: Vec<SidecarFile>,
}

/// One data file's records, by offset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SidecarFile {
    pub(crate) file: String,
    pub(crate) length: u64,
    pub(crate) records: Vec<RecordChecksums>,
}

/// Why a sidecar or an index cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum SideFileError {
    /// It ends too early or starts with something else.
    #[error("it is not a reshard sidecar")]
    NotOne,
    /// It is there, but the mark that ends it is not what it was.
    #[error("the mark at its end is damaged")]
    Mark,
    /// Its own checksum is wrong.
    #[error("its own checksum is wrong: it says {expected:016x}, its bytes give {actual:016x}")]
    Damaged {
        /// As stored.
        expected: u64,
        /// As computed.
        actual: u64,
    },
    /// Its content makes no sense.
    #[error("its content cannot be decoded: {0}")]
    Content(String),
    /// It could not be read.
    #[error("it could not be read")]
    Io(#[from] std::io::Error),
}

/// The name of the sidecar of a save.
pub(crate) fn sidecar_name(save_id: &str) -> String {
    format!(".reshard-{save_id}.sums")
}

impl Sidecar {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, SideFileError> {
        seal(SIDE_MAGIC, self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Sidecar, SideFileError> {
        let side: Sidecar = unseal(SIDE_MAGIC, bytes)?;
        side.files.iter().try_for_each(|file| check_records(&file.records))?;
        Ok(side)
    }

    /// The record at `offset` of `file`.
    pub(crate) fn find(&self, file: &str, offset: u64) -> Option<&RecordChecksums> {
        let position = self.files.binary_search_by(|entry| entry.file.as_str().cmp(file)).ok()?;
        find_record(&self.files[position].records, offset)
    }
}

/// A small file of ours: a mark, the content, and the checksum of both.
pub(crate) fn seal(magic: &[u8; 8], content: &impl Serialize) -> Result<Vec<u8>, SideFileError> {
    let mut bytes = postcard::to_extend(content, magic.to_vec()).map_err(|e| SideFileError::Content(e.to_string()))?;
    bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
    Ok(bytes)
}

/// The content of such a file.
pub(crate) fn unseal<T: DeserializeOwned>(magic: &[u8; 8], bytes: &[u8]) -> Result<T, SideFileError> {
    let body = bytes.len().checked_sub(8).filter(|&n| n >= magic.len() && bytes.starts_with(magic));
    let Some((body, stored)) = body.map(|n| bytes.split_at(n)) else {
        return Err(SideFileError::NotOne);
    };
    check_hash(body, stored)?;
    postcard::from_bytes(&body[magic.len()..]).map_err(|e| SideFileError::Content(e.to_string()))
}

/// The record at `offset` of a list sorted by offset.
pub(crate) fn find_record(records: &[RecordChecksums], offset: u64) -> Option<&RecordChecksums> {
    records.binary_search_by_key(&offset, |r| r.offset).ok().map(|i| &records[i])
}

fn check_hash(body: &[u8], stored: &[u8]) -> Result<(), SideFileError> {
    let expected = u64::from_le_bytes(stored.try_into().map_err(|_| SideFileError::NotOne)?);
    let actual = XxHash3_64::oneshot(body);
    if expected == actual { Ok(()) } else { Err(SideFileError::Damaged { expected, actual }) }
}

/// Proves what the readers rely on: sorted, and the summed bytes inside their record.
fn check_records(records: &[RecordChecksums]) -> Result<(), SideFileError> {
    let mut last_end = 0u64;
    for record in records {
        let inside = record.data_offset.checked_add(record.data_length).is_some_and(|end| end <= record.length);
        let end = record.offset.checked_add(record.length);
        match end {
            Some(end) if inside && record.offset >= last_end => last_end = end,
            _ => return Err(SideFileError::Content(format!("the record at {} makes no sense", record.offset))),
        }
    }
    Ok(())
}

/// The index at the end of a data file: enough to rebuild this file's part of `.metadata`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileIndex {
    pub(crate) save_id: String,
    pub(crate) rank: u32,
    /// How many ranks saved; 0 when the file holds what an edit added to files of another save.
    pub(crate) ranks: u32,
    /// How many files this rank wrote.
    pub(crate) files: u32,
    /// The keys that occur in this file.
    pub(crate) table: Vec<TableEntry>,
    pub(crate) records: Vec<IndexedRecord>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IndexedRecord {
    /// Position in the index's table.
    pub(crate) key: u32,
    /// Offsets then sizes; `None` for a value.
    pub(crate) region: Option<Vec<u64>>,
    pub(crate) sum: RecordChecksums,
}

/// What is written of [`FileIndex`]: the same fields, borrowed.
#[derive(Serialize)]
pub(crate) struct FileIndexRef<'a> {
    pub(crate) save_id: &'a str,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) files: u32,
    pub(crate) table: Vec<&'a TableEntry>,
    pub(crate) records: Vec<IndexedRecordRef<'a>>,
}

#[derive(Serialize)]
pub(crate) struct IndexedRecordRef<'a> {
    pub(crate) key: u32,
    pub(crate) region: Option<OffsetsAndSizes<'a>>,
    pub(crate) sum: RecordChecksums,
}

/// Both, as one list.
pub(crate) struct OffsetsAndSizes<'a>(pub(crate) &'a [u64], pub(crate) &'a [u64]);

impl Serialize for OffsetsAndSizes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().chain(self.1))
    }
}

impl FileIndexRef<'_> {
    /// The bytes that end the file.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, SideFileError> {
        encode_index(self)
    }

    /// How many they are.
    pub(crate) fn encoded_len(&self) -> Result<u64, SideFileError> {
        let body = postcard::serialize_with_flavor(self, postcard::ser_flavors::Size::default());
        Ok(body.map_err(|e| SideFileError::Content(e.to_string()))? as u64 + INDEX_TAIL)
    }
}

fn encode_index(index: &impl Serialize) -> Result<Vec<u8>, SideFileError> {
    let mut bytes = postcard::to_stdvec(index).map_err(|e| SideFileError::Content(e.to_string()))?;
    let length = bytes.len() as u64;
    let hash = XxHash3_64::oneshot(&bytes);
    bytes.extend(length.to_le_bytes());
    bytes.extend(hash.to_le_bytes());
    bytes.extend(INDEX_MAGIC);
    Ok(bytes)
}

impl FileIndex {
    /// The bytes that end the file.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, SideFileError> {
        encode_index(self)
    }

    /// Reads the index at the end of a data file; `None` when the file has none (PyTorch wrote it, or it was cut off).
    pub(crate) fn read(file: &dyn ReadAt) -> Result<Option<FileIndex>, SideFileError> {
        let size = file.len();
        let Some(tail_at) = size.checked_sub(INDEX_TAIL) else { return Ok(None) };
        let mut tail = [0u8; INDEX_TAIL as usize];
        file.read_at(tail_at, &mut tail)?;
        if !tail.ends_with(INDEX_MAGIC) {
            // No file of PyTorch's ends nearly so.
            let equal = tail[16..].iter().zip(INDEX_MAGIC).filter(|(a, b)| a == b).count();
            return if equal >= MAGIC_RECOGNISED { Err(SideFileError::Mark) } else { Ok(None) };
        }
        let length = u64::from_le_bytes(tail[..8].try_into().map_err(|_| SideFileError::NotOne)?);
        let start = tail_at.checked_sub(length).filter(|_| length <= MAX_SIDE_BYTES).ok_or(SideFileError::NotOne)?;
        let mut body = vec![0; length as usize];
        file.read_at(start, &mut body)?;
        check_hash(&body, &tail[8..16])?;
        let index: FileIndex = postcard::from_bytes(&body).map_err(|e| SideFileError::Content(e.to_string()))?;
        let sums: Vec<RecordChecksums> = index.records.iter().map(|r| r.sum).collect();
        check_records(&sums)?;
        if index.records.iter().any(|r| r.key as usize >= index.table.len()) {
            return Err(SideFileError::Content("a record names a key that is not in the table".into()));
        }
        Ok(Some(index))
    }
}
