//! Checksums of records, and where the records lie.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::OwnFileError;

/// Where one record lies and what its content hashes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordChecksums {
    /// Where the record starts in its file.
    pub offset: u64,
    /// Its whole length.
    pub length: u64,
    /// Where the summed bytes start, relative to the record: a tensor's data; for a value the whole record, 0.
    pub data_offset: u64,
    /// How many bytes are summed.
    pub data_length: u64,
    /// `None` when the save was told to skip checksums.
    pub sums: Option<Checksums>,
}

impl RecordChecksums {
    /// Of a value: the whole record is summed.
    pub fn of_value(offset: u64, length: u64, sums: Option<Checksums>) -> RecordChecksums {
        RecordChecksums { offset, length, data_offset: 0, data_length: length, sums }
    }

    /// Of a tensor's record: whether it is compressed. Its data does not lie in it as it is then, and the whole record is summed, as a
    /// value's is; a record that is not compressed begins with a frame.
    pub fn is_packed_tensor(&self) -> bool {
        self.data_offset == 0
    }
}

/// The checksums of one stretch of bytes: the one every zip tool knows, and a fast strong one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checksums {
    // Bytes and not numbers, so that their encoding has one length and a file's size is known before its checksums are.
    crc32: [u8; 4],
    xxh3: [u8; 8],
}

impl Checksums {
    /// In place of checksums that are not known yet.
    pub const ZERO: Checksums = Checksums { crc32: [0; 4], xxh3: [0; 8] };

    /// Of some bytes.
    pub fn of(bytes: &[u8]) -> Checksums {
        Checksums { crc32: crc32fast::hash(bytes).to_le_bytes(), xxh3: XxHash3_64::oneshot(bytes).to_le_bytes() }
    }

    /// The CRC-32 of zip.
    pub fn crc32(self) -> u32 {
        u32::from_le_bytes(self.crc32)
    }

    /// The XXH3-64, with seed 0.
    pub fn xxh3(self) -> u64 {
        u64::from_le_bytes(self.xxh3)
    }
}

/// Computes [`Checksums`] as bytes pass by.
pub struct ChecksumBuilder {
    crc: crc32fast::Hasher,
    xxh3: XxHash3_64,
}

impl ChecksumBuilder {
    /// Of no bytes yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> ChecksumBuilder {
        ChecksumBuilder { crc: crc32fast::Hasher::new(), xxh3: XxHash3_64::new() }
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        // Both pass over a block while it is in the cache.
        for block in bytes.chunks(128 << 10) {
            self.crc.update(block);
            std::hash::Hasher::write(&mut self.xxh3, block);
        }
    }

    /// Of all bytes that were added.
    pub fn finish(self) -> Checksums {
        let xxh3 = std::hash::Hasher::finish(&self.xxh3);
        Checksums { crc32: self.crc.finalize().to_le_bytes(), xxh3: xxh3.to_le_bytes() }
    }
}

/// The record at `offset` of a list sorted by offset.
pub fn find_record(records: &[RecordChecksums], offset: u64) -> Option<&RecordChecksums> {
    records.binary_search_by_key(&offset, |r| r.offset).ok().map(|i| &records[i])
}

/// Proves what the readers rely on: sorted, and the summed bytes inside their record.
pub(super) fn check_records(records: impl Iterator<Item = RecordChecksums>) -> Result<(), OwnFileError> {
    let mut last_end = 0u64;
    for record in records {
        let inside = record.data_offset.checked_add(record.data_length).is_some_and(|end| end <= record.length);
        let end = record.offset.checked_add(record.length);
        match end {
            Some(end) if inside && record.offset >= last_end => last_end = end,
            _ => return Err(OwnFileError::Content(format!("the record at {} is invalid", record.offset))),
        }
    }
    Ok(())
}
