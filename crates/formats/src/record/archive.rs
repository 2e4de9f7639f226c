//! Reading a torch archive: its entries, checksums, byte order and note.
//!
//! What the pickled object inside means is the business of `content`.

use super::envelope::NOTE;
use super::error::RecordError;
use super::zip_read::{ArchiveEntry, Directory};
use crate::read_at::ReadAt;

/// Largest `data.pkl` that is read.
pub const MAX_PICKLE_LEN: u64 = 1 << 30;
/// Largest note that is read.
pub const MAX_NOTE_LEN: u64 = 1 << 20;
/// Checksums are computed with a buffer of this size.
const VERIFY_BUFFER: u64 = 1 << 20;

/// A torch archive at some place of a file, with its directory proven.
///
/// Opening reads the directory only; a record of one tensor takes at most two reads.
#[derive(Debug)]
pub struct TorchArchive<'a> {
    directory: Directory<'a>,
    /// Entries by name.
    by_name: Vec<u32>,
    root: String,
    big_endian: bool,
}

impl<'a> TorchArchive<'a> {
    /// Opens the archive that takes up `length` bytes at `offset` of `src`.
    pub fn open(src: &'a dyn ReadAt, offset: u64, length: u64) -> Result<TorchArchive<'a>, RecordError> {
        let directory = Directory::open(src, offset, length)?;
        let entries = &directory.entries;
        let root = entries
            .first()
            .and_then(|entry| entry.name.split_once('/'))
            .map(|(root, _)| root.to_owned())
            .ok_or_else(|| RecordError::malformed("its entries are not in a folder, as torch's are", offset))?;
        let mut by_name: Vec<u32> = (0..entries.len() as u32).collect();
        by_name.sort_unstable_by_key(|&index| entries[index as usize].name.as_str());
        let mut archive = TorchArchive { directory, by_name, root, big_endian: false };
        archive.big_endian = archive.read_byte_order()?;
        Ok(archive)
    }

    /// Opens a whole file, such as `model.pt`.
    pub fn open_file(src: &'a dyn ReadAt) -> Result<TorchArchive<'a>, RecordError> {
        TorchArchive::open(src, 0, src.len())
    }

    /// All entries, in the order of the directory.
    pub fn entries(&self) -> &[ArchiveEntry] {
        &self.directory.entries
    }

    /// The folder that all of torch's entries are in: `archive`, or the name the file was saved under.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Whether the elements of its tensors have their most significant byte first; see
    /// [`swap_bytes`](crate::swap_bytes).
    pub fn big_endian(&self) -> bool {
        self.big_endian
    }

    /// The entry of this name inside the root folder, such as `data.pkl`.
    pub fn entry(&self, name: &str) -> Option<&ArchiveEntry> {
        let entries = &self.directory.entries;
        let wanted = [self.root.as_bytes(), b"/", name.as_bytes()].concat();
        let at = self.by_name.binary_search_by(|&index| entries[index as usize].name.as_bytes().cmp(&wanted)).ok()?;
        entries.get(*self.by_name.get(at)? as usize)
    }

    /// Where an entry's data starts in the source.
    pub fn data_offset(&self, entry: &ArchiveEntry) -> Result<u64, RecordError> {
        self.directory.data_offset(entry)
    }

    /// An entry's data, which may have at most `limit` bytes.
    pub fn read(&self, entry: &ArchiveEntry, limit: u64) -> Result<Vec<u8>, RecordError> {
        if entry.size > limit {
            return Err(RecordError::TooLarge { entry: entry.name.clone(), size: entry.size, limit });
        }
        let offset = self.directory.data_offset(entry)?;
        self.directory.read(offset, entry.size)
    }

    /// The pickle of the object, `data.pkl`, checked against its CRC-32.
    pub fn pickle(&self) -> Result<Vec<u8>, RecordError> {
        if self.entry("constants.pkl").is_some() {
            return Err(RecordError::Unsupported {
                key: self.root.clone(),
                what: "a TorchScript program (torch.jit.save)".to_owned(),
            });
        }
        let entry = self.entry("data.pkl").ok_or_else(|| RecordError::MissingEntry { entry: "data.pkl".to_owned() })?;
        self.read_checked(entry, MAX_PICKLE_LEN)
    }

    /// The content of the entry that makes a record self-describing, if there is one.
    pub fn note(&self) -> Result<Option<Vec<u8>>, RecordError> {
        let name = NOTE.rsplit('/').next().unwrap_or(NOTE);
        self.entry(name).map(|entry| self.read_checked(entry, MAX_NOTE_LEN)).transpose()
    }

    /// Compares an entry's data with its CRC-32, reading it in pieces; nothing to compare is fine.
    pub fn verify(&self, entry: &ArchiveEntry) -> Result<(), RecordError> {
        let Some(expected) = entry.crc32 else {
            return Ok(());
        };
        let offset = self.directory.data_offset(entry)?;
        let actual = crc32_at(self.directory.src(), offset, entry.size)?;
        check(entry, offset, expected, actual)
    }

    /// Compares every entry's data with its CRC-32.
    pub fn verify_all(&self) -> Result<(), RecordError> {
        self.entries().iter().try_for_each(|entry| self.verify(entry))
    }

    fn read_checked(&self, entry: &ArchiveEntry, limit: u64) -> Result<Vec<u8>, RecordError> {
        let data = self.read(entry, limit)?;
        if let Some(expected) = entry.crc32 {
            let offset = self.directory.data_offset(entry)?;
            check(entry, offset, expected, crc32fast::hash(&data))?;
        }
        Ok(data)
    }

    fn read_byte_order(&self) -> Result<bool, RecordError> {
        let Some(entry) = self.entry("byteorder") else {
            return Ok(false);
        };
        let content = self.read(entry, 16)?;
        match content.as_slice() {
            b"little" => Ok(false),
            b"big" => Ok(true),
            _ => Err(RecordError::malformed(format!("unknown byte order {:?}", String::from_utf8_lossy(&content)), entry.header)),
        }
    }
}

fn check(entry: &ArchiveEntry, offset: u64, expected: u32, actual: u32) -> Result<(), RecordError> {
    if expected == actual {
        return Ok(());
    }
    Err(RecordError::Checksum { entry: entry.name.clone(), offset, expected, actual })
}

/// The CRC-32 (IEEE, as in zip) of `length` bytes at `offset`, read in pieces.
pub fn crc32_at(src: &dyn ReadAt, offset: u64, length: u64) -> Result<u32, RecordError> {
    let end = offset.checked_add(length).ok_or_else(|| RecordError::malformed("a length that overflows", offset))?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; length.min(VERIFY_BUFFER) as usize];
    let mut at = offset;
    while at < end {
        let piece = (end - at).min(VERIFY_BUFFER);
        let buffer = &mut buffer[..piece as usize];
        src.read_at(at, buffer).map_err(|source| RecordError::Io { offset: at, length: piece, source })?;
        hasher.update(buffer);
        at += piece;
    }
    Ok(hasher.finalize())
}
