//! Reading the directory of a stored zip archive inside a file, believing nothing that it says.
//!
//! Everything comes from the central directory, because torch leaves sizes and checksums out of the local
//! headers. Entries are proven to lie inside the archive and apart from each other before any is read;
//! where an entry's data starts is read from its local header when it is asked for.

use std::collections::HashSet;

use super::error::{RecordError, read_bytes};
use crate::read_at::ReadAt;

/// Largest central directory that is read: some three million entries.
pub const MAX_DIRECTORY_LEN: u64 = 256 << 20;

/// Bytes read at each end of an archive at first: they hold the whole frame of a record with one tensor, so
/// that opening one takes two reads, or one if it is small.
const FIRST_READ: u64 = 4096;
const HEAD_READ: u64 = 1024;
const LOCAL_HEADER: u64 = 30;

/// One entry of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArchiveEntry {
    /// The full name, including the archive's root folder.
    pub name: String,
    /// Bytes of data.
    pub size: u64,
    /// CRC-32 of the data; none if the writer had checksums turned off.
    pub crc32: Option<u32>,
    /// Position of the local header in the source.
    pub(crate) header: u64,
    /// Position in the source that the entry must end before.
    limit: u64,
}

/// The proven directory of an archive, with the bytes that were read on the way.
pub(crate) struct Directory<'a> {
    src: &'a dyn ReadAt,
    windows: [Window; 2],
    pub(crate) entries: Vec<ArchiveEntry>,
}

#[derive(Default)]
struct Window {
    start: u64,
    bytes: Vec<u8>,
}

impl Window {
    fn get(&self, offset: u64, length: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        self.bytes.get(start..start.checked_add(usize::try_from(length).ok()?)?)
    }
}

impl std::fmt::Debug for Directory<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Directory").field("entries", &self.entries).finish_non_exhaustive()
    }
}

impl<'a> Directory<'a> {
    pub(crate) fn open(src: &'a dyn ReadAt, offset: u64, length: u64) -> Result<Directory<'a>, RecordError> {
        let file_len = src.len();
        let end = match offset.checked_add(length) {
            Some(end) if end <= file_len => end,
            _ => {
                return Err(RecordError::OutsideFile { offset, length, file_len });
            }
        };
        let tail_len = length.min(FIRST_READ);
        let tail = Window { start: end - tail_len, bytes: read_bytes(src, end - tail_len, tail_len)? };
        let head = if tail_len == length {
            Window::default()
        } else {
            let head_len = (length - tail_len).min(HEAD_READ);
            Window { start: offset, bytes: read_bytes(src, offset, head_len)? }
        };
        let mut directory = Directory { src, windows: [tail, head], entries: Vec::new() };
        directory.check_magic(offset, length)?;
        let located = directory.locate(offset, end)?;
        directory.parse(offset, &located)?;
        Ok(directory)
    }

    /// Reads through the windows.
    pub(crate) fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, RecordError> {
        for window in &self.windows {
            if let Some(bytes) = window.get(offset, length) {
                return Ok(bytes.to_vec());
            }
        }
        read_bytes(self.src, offset, length)
    }

    pub(crate) fn src(&self) -> &'a dyn ReadAt {
        self.src
    }

    fn array<const N: usize>(&self, offset: u64) -> Result<[u8; N], RecordError> {
        let bytes = self.read(offset, N as u64)?;
        <[u8; N]>::try_from(bytes.as_slice()).map_err(|_| RecordError::malformed("a short read", offset))
    }

    /// Tells old torch files, which people do have, from garbage.
    fn check_magic(&self, offset: u64, length: u64) -> Result<(), RecordError> {
        let first = self.read(offset, length.min(512))?;
        // Torch tells formats apart by these four bytes, and reads as something else what does not have them.
        if first.starts_with(b"PK\x03\x04") {
            return Ok(());
        }
        if first.is_empty() {
            return Err(RecordError::malformed("it is empty", offset));
        }
        // The magic number 0x1950a86a20f9469cfc6c as a pickled integer.
        let magic = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
        if first.first() == Some(&0x80) && first.windows(magic.len()).any(|bytes| bytes == magic) {
            return Err(RecordError::LegacyFormat { kind: "a torch.save file in the format from before torch 1.6" });
        }
        if first.get(257..262) == Some(b"ustar") {
            return Err(RecordError::LegacyFormat { kind: "a tar file, as torch.save wrote before torch 0.1.10" });
        }
        if first.first() == Some(&0x80) {
            return Err(RecordError::LegacyFormat { kind: "a bare pickle without an archive around it" });
        }
        Err(RecordError::malformed("it does not start with the signature of a zip entry", offset))
    }

    /// Finds the central directory from the records at the end.
    fn locate(&self, offset: u64, end: u64) -> Result<Located, RecordError> {
        let classic_at = self.find_end_record(offset, end)?;
        let classic: [u8; 22] = self.array(classic_at)?;
        let disks = [le16(&classic, 4), le16(&classic, 6)];
        let counts = [le16(&classic, 8), le16(&classic, 10)];
        let mut located = Located {
            entries: u64::from(counts[1]),
            len: u64::from(le32(&classic, 12)),
            start: u64::from(le32(&classic, 16)),
            end_record: classic_at,
        };
        if disks != [0, 0] || counts[0] != counts[1] {
            return Err(RecordError::malformed("an archive in several parts", classic_at));
        }
        let locator_at = classic_at.checked_sub(20).filter(|&at| at >= offset);
        if let Some(locator_at) = locator_at {
            let locator: [u8; 20] = self.array(locator_at)?;
            if locator.starts_with(b"PK\x06\x07") {
                located = self.zip64_end(offset, locator_at, &locator, &located)?;
            }
        }
        located.start = located
            .start
            .checked_add(offset)
            .filter(|&start| start.checked_add(located.len).is_some_and(|end| end <= located.end_record))
            .ok_or_else(|| RecordError::malformed("the directory lies outside the archive", classic_at))?;
        if located.len > MAX_DIRECTORY_LEN {
            return Err(RecordError::TooLarge {
                entry: "central directory".to_owned(),
                size: located.len,
                limit: MAX_DIRECTORY_LEN,
            });
        }
        Ok(located)
    }

    fn find_end_record(&self, offset: u64, end: u64) -> Result<u64, RecordError> {
        // Torch writes no comment behind it; with one, readers that search differ in which end record they find.
        let missing = || RecordError::malformed("no end record at its end, so the archive is cut short or not a zip", end);
        let at = end.checked_sub(22).filter(|&at| at >= offset);
        let at = at.ok_or_else(missing)?;
        if self.array::<4>(at)? == *b"PK\x05\x06" && self.array::<2>(at + 20)? == [0, 0] {
            return Ok(at);
        }
        Err(missing())
    }

    fn zip64_end(&self, offset: u64, locator_at: u64, locator: &[u8; 20], classic: &Located) -> Result<Located, RecordError> {
        let at = offset.checked_add(le64(locator, 8)).filter(|at| at.checked_add(56).is_some_and(|end| end <= locator_at));
        let bad = |reason| RecordError::malformed(reason, locator_at);
        let at = at.ok_or_else(|| bad("the zip64 end record lies outside the archive"))?;
        let record: [u8; 56] = self.array(at)?;
        if !record.starts_with(b"PK\x06\x06") {
            return Err(bad("no zip64 end record where its locator points"));
        }
        let located = Located { entries: le64(&record, 32), len: le64(&record, 40), start: le64(&record, 48), end_record: at };
        let alone = [le32(&record, 16), le32(&record, 20), le32(locator, 4)] == [0; 3];
        if !alone || le64(&record, 24) != located.entries {
            return Err(bad("an archive in several parts"));
        }
        // Two end records that disagree would show different readers different archives.
        let agree = |short: u64, full: u64, limit: u64| short == full || short == limit;
        if !agree(classic.entries, located.entries, u64::from(u16::MAX))
            || !agree(classic.len, located.len, u64::from(u32::MAX))
            || !agree(classic.start, located.start, u64::from(u32::MAX))
        {
            return Err(bad("the two end records disagree"));
        }
        Ok(located)
    }

    fn parse(&mut self, offset: u64, located: &Located) -> Result<(), RecordError> {
        let bytes = self.read(located.start, located.len)?;
        if located.entries > located.len / 46 {
            return Err(RecordError::malformed(format!("{} entries don't fit the directory", located.entries), located.start));
        }
        let mut rest = bytes.as_slice();
        let mut entries = Vec::with_capacity(located.entries as usize);
        for _ in 0..located.entries {
            let at = located.start + (bytes.len() - rest.len()) as u64;
            let (entry, len) = parse_central(rest, offset, at).map_err(|error| explain(error, &bytes))?;
            rest = rest.get(len..).unwrap_or_default();
            entries.push(entry);
        }
        if !rest.is_empty() {
            return Err(RecordError::malformed("the directory has more than its entries", located.start));
        }
        prove_apart(&mut entries, located.start)?;
        self.entries = entries;
        Ok(())
    }

    /// Where an entry's data starts in the source.
    pub(crate) fn data_offset(&self, entry: &ArchiveEntry) -> Result<u64, RecordError> {
        let header: [u8; LOCAL_HEADER as usize] = self.array(entry.header)?;
        let bad = |reason: &str| RecordError::malformed(format!("entry {:?}: {reason}", entry.name), entry.header);
        if !header.starts_with(b"PK\x03\x04") {
            return Err(bad("no local header where the directory points"));
        }
        check_stored(&entry.name, le16(&header, 6), le16(&header, 8))?;
        let name_len = u64::from(le16(&header, 26));
        if name_len != entry.name.len() as u64 || self.read(entry.header + LOCAL_HEADER, name_len)? != entry.name.as_bytes() {
            return Err(bad("the local header has another name"));
        }
        let start = entry.header + LOCAL_HEADER + name_len + u64::from(le16(&header, 28));
        match start.checked_add(entry.size) {
            Some(end) if end <= entry.limit => Ok(start),
            _ => Err(bad("its data reaches into the next entry")),
        }
    }
}

struct Located {
    entries: u64,
    len: u64,
    start: u64,
    /// Where the first of the end records starts, which the directory must not reach.
    end_record: u64,
}

/// Parses one line of the directory; `offset` is where the archive starts, `at` where the line does.
fn parse_central(bytes: &[u8], offset: u64, at: u64) -> Result<(ArchiveEntry, usize), RecordError> {
    let cut = || RecordError::malformed("the directory is cut short", at);
    let header = bytes.get(..46).ok_or_else(cut)?;
    if !header.starts_with(b"PK\x01\x02") {
        return Err(RecordError::malformed("no directory entry", at));
    }
    let name_end = 46 + usize::from(le16(header, 28));
    let extra_end = name_end + usize::from(le16(header, 30));
    let len = extra_end + usize::from(le16(header, 32));
    let name = bytes.get(46..name_end).ok_or_else(cut)?;
    let extra = bytes.get(name_end..extra_end).ok_or_else(cut)?;
    bytes.get(..len).ok_or_else(cut)?;
    let name = str::from_utf8(name).map_err(|_| RecordError::malformed("an entry's name is not UTF-8", at))?;
    check_stored(name, le16(header, 8), le16(header, 10))?;

    let bad = |reason: &str| RecordError::malformed(format!("entry {name:?}: {reason}"), at);
    let mut wide = zip64_extra(extra).unwrap_or_default();
    let mut widen = |short: u32| -> Result<u64, RecordError> {
        if short != u32::MAX {
            return Ok(u64::from(short));
        }
        let (value, rest) = wide.split_first_chunk::<8>().ok_or_else(|| bad("its zip64 extra field is missing or short"))?;
        wide = rest;
        Ok(u64::from_le_bytes(*value))
    };
    let size = widen(le32(header, 24))?;
    let compressed = widen(le32(header, 20))?;
    let local = widen(le32(header, 42))?;
    if size != compressed {
        return Err(bad("stored, but with two sizes"));
    }
    if ![0, u16::MAX].contains(&le16(header, 34)) {
        return Err(bad("it is in another part of the archive"));
    }
    let header_at = local.checked_add(offset).ok_or_else(|| bad("its position overflows"))?;
    let crc32 = le32(header, 16);
    let entry = ArchiveEntry {
        name: name.to_owned(),
        size,
        // Torch writes zero when checksums are turned off; for no data zero is right.
        crc32: (crc32 != 0 || size == 0).then_some(crc32),
        header: header_at,
        limit: 0,
    };
    Ok((entry, len))
}

/// Says what an archive with compressed entries most likely is.
fn explain(error: RecordError, directory: &[u8]) -> RecordError {
    let constants = b"/constants.pkl";
    match error {
        RecordError::NotStored { entry, .. } if directory.windows(constants.len()).any(|name| name == constants) => {
            RecordError::Unsupported { key: entry, what: "a TorchScript program (torch.jit.save)".to_owned() }
        }
        error => error,
    }
}

fn zip64_extra(mut extra: &[u8]) -> Option<&[u8]> {
    loop {
        let (head, rest) = extra.split_at_checked(4)?;
        let (field, rest) = rest.split_at_checked(usize::from(le16(head, 2)))?;
        if le16(head, 0) == 1 {
            return Some(field);
        }
        extra = rest;
    }
}

fn check_stored(name: &str, flags: u16, method: u16) -> Result<(), RecordError> {
    let how = match (flags & 1, method) {
        (0, 0) => return Ok(()),
        (0, 8) => "compressed (deflate)".to_owned(),
        (0, method) => format!("compressed (zip method {method})"),
        _ => "encrypted".to_owned(),
    };
    Err(RecordError::NotStored { entry: name.to_owned(), how })
}

/// Checks that entries have distinct names, lie before the directory and don't overlap, and notes for each
/// where it must end.
fn prove_apart(entries: &mut [ArchiveEntry], directory: u64) -> Result<(), RecordError> {
    check_names(entries)?;
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&index| entries[index].header);
    let mut next: Option<usize> = None;
    for &index in order.iter().rev() {
        let limit = next.map_or(directory, |next| entries[next].header);
        let entry = &mut entries[index];
        entry.limit = limit;
        let least_end =
            entry.size.checked_add(LOCAL_HEADER + entry.name.len() as u64).and_then(|len| len.checked_add(entry.header));
        if least_end.is_none_or(|end| end > limit) {
            return Err(match next {
                Some(next) => RecordError::Overlap {
                    first: entries[index].name.clone(),
                    second: entries[next].name.clone(),
                    offset: entries[next].header,
                },
                None => RecordError::malformed(format!("entry {:?} reaches past the archive's data", entry.name), entry.header),
            });
        }
        next = Some(index);
    }
    Ok(())
}

/// Checks that no reader could find another entry than this one does. Torch looks for entries without regard to case.
fn check_names(entries: &[ArchiveEntry]) -> Result<(), RecordError> {
    let mut names = HashSet::with_capacity(entries.len());
    let root = entries.first().and_then(|entry| entry.name.split_once('/')).map(|(root, _)| root);
    for entry in entries {
        let bad = |what: &str| Err(RecordError::malformed(format!("entry {:?} {what}", entry.name), entry.header));
        if !names.insert(entry.name.to_ascii_lowercase()) {
            return bad("occurs twice");
        }
        if entry.name.bytes().any(|byte| byte.is_ascii_control() || byte == b'\\') {
            return bad("has a name that no torch writes");
        }
        let Some((folder, name)) = entry.name.split_once('/') else {
            return bad("is not in the archive's folder");
        };
        if Some(folder) != root {
            return bad("is not in the archive's folder");
        }
        let lower = name.to_ascii_lowercase();
        let looked_for = NAMES.contains(&lower.as_str()) || lower.starts_with("data/");
        if looked_for && name.chars().any(|c| c.is_ascii_uppercase()) && !name.starts_with("data/") {
            return bad("is spelled otherwise than torch spells it");
        }
    }
    Ok(())
}

/// The entries that torch looks for by name, besides the storages in `data/`.
const NAMES: [&str; 6] = ["data.pkl", "constants.pkl", "byteorder", "version", ".format_version", ".storage_alignment"];

fn le16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u16::from_le_bytes(*value))
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u32::from_le_bytes(*value))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |value| u64::from_le_bytes(*value))
}
