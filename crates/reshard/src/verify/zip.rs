//! The bytes of a torch archive that no checksum covers: headers, padding, the directory, the end.
//!
//! Torch writes these in one way only. Whatever is said twice (in an entry's own header, behind its data, in the directory)
//! must agree; entries follow each other without a gap; padding is uniform; constants are constant. So one flipped bit
//! anywhere between the data is found as well.

use std::collections::HashMap;

use reshard_formats::{ReadAt, TorchArchive};

use crate::error::chain;

/// What is wrong, and where in the source.
pub(super) type Flaw = (u64, String);

/// Constants of the end record that torch writes: the size of the rest of it, and versions.
const END64_REST: u64 = 44;

struct Header {
    version: u16,
    flags: u16,
    stamp: u32,
}

/// Checks everything around the data of the archive at `offset`. What it says of the data itself is not looked at.
pub(super) fn check(src: &dyn ReadAt, archive: &TorchArchive<'_>, offset: u64, length: u64) -> Result<(), Flaw> {
    let end = offset + length;
    let mut entries = Vec::with_capacity(archive.entries().len());
    for entry in archive.entries() {
        let at = archive.data_offset(entry).map_err(|e| (offset, chain(&e)))?;
        entries.push((at, entry));
    }
    let listed: Vec<&str> = archive.entries().iter().map(|e| e.name.as_str()).collect();
    entries.sort_by_key(|(at, _)| *at);
    let mut headers: Vec<(String, Header, u64)> = Vec::with_capacity(entries.len());
    let mut cursor = offset;
    for (at, entry) in entries {
        let crc = entry.crc32.unwrap_or(0);
        let gap = bytes(src, cursor, at.checked_sub(cursor).ok_or_else(|| (cursor, "entries overlap".to_owned()))?)?;
        let header =
            local(&gap, &entry.name, crc, entry.size).map_err(|what| (cursor, format!("entry {:?}: {what}", entry.name)))?;
        let start = cursor;
        cursor = at + entry.size;
        if header.flags & 8 != 0 {
            let rest = (end - cursor).min(24);
            let descriptor = bytes(src, cursor, rest)?;
            let used = descriptor_len(&descriptor, crc, entry.size);
            cursor += used
                .ok_or_else(|| (cursor, format!("entry {:?}: what follows its data disagrees with the directory", entry.name)))?;
        }
        headers.push((entry.name.clone(), header, start - offset));
    }
    let rest = bytes(src, cursor, end - cursor)?;
    directory(&rest, &listed, &headers, cursor - offset).map_err(|(at, what)| (cursor + at, what))
}

fn bytes(src: &dyn ReadAt, offset: u64, length: u64) -> Result<Vec<u8>, Flaw> {
    if length > 256 << 20 {
        return Err((offset, "too many bytes between two entries".to_owned()));
    }
    let mut bytes = vec![0; length as usize];
    src.read_at(offset, &mut bytes).map_err(|e| (offset, e.to_string()))?;
    Ok(bytes)
}

fn local(gap: &[u8], name: &str, crc: u32, size: u64) -> Result<Header, &'static str> {
    let fixed = gap.get(..30).filter(|h| h.starts_with(b"PK\x03\x04")).ok_or("it does not follow the entry before it")?;
    let (name_len, extra_len) = (usize::from(u16_at(fixed, 26)), usize::from(u16_at(fixed, 28)));
    if gap.len() != 30 + name_len + extra_len || gap.get(30..30 + name_len) != Some(name.as_bytes()) {
        return Err("its header is not as long as it says");
    }
    extra(&gap[30 + name_len..])?;
    // Left out and given behind the data, or the same as in the directory.
    let flags = u16_at(fixed, 6);
    let says = (u32_at(fixed, 14), u32_at(fixed, 18), u32_at(fixed, 22));
    let short = u32::try_from(size).unwrap_or(u32::MAX);
    if u16_at(fixed, 8) != 0
        || !(says == (crc, short, short) || (flags & 8 != 0 && [(0, 0, 0), (0, u32::MAX, u32::MAX)].contains(&says)))
    {
        return Err("its header disagrees with the directory");
    }
    Ok(Header { version: u16_at(fixed, 4), flags, stamp: u32_at(fixed, 10) })
}

/// Extra fields: their lengths add up, and padding is of one byte.
fn extra(mut fields: &[u8]) -> Result<(), &'static str> {
    while !fields.is_empty() {
        let length = fields.get(2..4).map(|_| usize::from(u16_at(fields, 2))).ok_or("its extra field is cut off")?;
        let body = fields.get(4..4 + length).ok_or("its extra field is cut off")?;
        match u16_at(fields, 0) {
            1 => {}
            // "FB", which torch fills with "Z".
            0x4246 if body.iter().all(|b| *b == b'Z') => {}
            0x4246 => return Err("its padding was changed"),
            _ => return Err("its extra field is of no kind that torch writes"),
        }
        fields = &fields[4 + length..];
    }
    Ok(())
}

/// The length of the record behind an entry's data, if it says what the directory says.
fn descriptor_len(bytes: &[u8], crc: u32, size: u64) -> Option<u64> {
    if bytes.len() < 16 || !bytes.starts_with(b"PK\x07\x08") || u32_at(bytes, 4) != crc {
        return None;
    }
    let wide = bytes.len() >= 24 && u64_at(bytes, 8) == size && u64_at(bytes, 16) == size;
    let narrow = u64::from(u32_at(bytes, 8)) == size && u64::from(u32_at(bytes, 12)) == size;
    // An empty entry's sizes fit both ways; what follows decides.
    let next = |at: usize| bytes.get(at..at + 2) == Some(b"PK");
    match (narrow, wide) {
        (true, true) if next(16) => Some(16),
        (_, true) => Some(24),
        (true, false) => Some(16),
        (false, false) => None,
    }
}

fn directory(rest: &[u8], listed: &[&str], headers: &[(String, Header, u64)], start: u64) -> Result<(), Flaw> {
    let by_name: HashMap<&str, &(String, Header, u64)> = headers.iter().map(|header| (header.0.as_str(), header)).collect();
    let mut at = 0usize;
    let mut common: Option<(u16, u16, u32)> = None;
    for name in listed {
        let flaw = |what: &str| (at as u64, format!("the directory's entry {name:?} {what}"));
        let fixed =
            rest.get(at..at + 46).filter(|h| h.starts_with(b"PK\x01\x02")).ok_or_else(|| flaw("is not where it should be"))?;
        let lengths = [u16_at(fixed, 28), u16_at(fixed, 30), u16_at(fixed, 32)].map(usize::from);
        let fields = rest.get(at + 46 + lengths[0]..at + 46 + lengths[0] + lengths[1]).ok_or_else(|| flaw("is cut off"))?;
        extra(fields).map_err(|_| flaw("has an extra field that torch does not write"))?;
        let header = by_name.get(name).ok_or_else(|| flaw("has no data"))?;
        let position = u32_at(fixed, 42);
        let same = u16_at(fixed, 6) == header.1.version
            && u16_at(fixed, 8) == header.1.flags
            && u32_at(fixed, 12) == header.1.stamp
            && (u64::from(position) == header.2 || position == u32::MAX);
        if !same {
            return Err(flaw("disagrees with the header before its data"));
        }
        let own = (u16_at(fixed, 4), u16_at(fixed, 36), u32_at(fixed, 38));
        if u16_at(fixed, 34) != 0 || lengths[2] != 0 || *common.get_or_insert(own) != own {
            return Err(flaw("differs from the others"));
        }
        at += 46 + lengths[0] + lengths[1];
    }
    ending(&rest[at..], start, at as u64, listed.len() as u64).map_err(|what| (at as u64, what.to_owned()))
}

fn ending(end: &[u8], start: u64, length: u64, count: u64) -> Result<(), &'static str> {
    let classic = match end.len() {
        22 => end,
        98 => {
            let known = u64_at(end, 4) == END64_REST && u32_at(end, 16) == 0 && u32_at(end, 20) == 0;
            // Versions of whoever made the file: torch's writer has one pair.
            let versions = (u16_at(end, 12), u16_at(end, 14));
            let placed = u64_at(end, 40) == length && u64_at(end, 48) == start;
            let located = end[56..].starts_with(b"PK\x06\x07") && u64_at(end, 64) == start + length;
            let locator = located && u32_at(end, 60) == 0 && u32_at(end, 72) == 1;
            let counted = u64_at(end, 24) == count && u64_at(end, 32) == count;
            if !end.starts_with(b"PK\x06\x06") || !known || versions != torch_versions() || !placed || !locator || !counted {
                return Err("the records at the archive's end were changed");
            }
            &end[76..]
        }
        _ => return Err("the archive's end is not as torch writes it"),
    };
    let counts = u16_at(classic, 8) == u16_at(classic, 10) && [count.min(0xffff) as u16, 0xffff].contains(&u16_at(classic, 8));
    let alone = u16_at(classic, 4) == 0 && u16_at(classic, 6) == 0 && u16_at(classic, 20) == 0;
    let placed = |value: u32, full: u64| u64::from(value) == full || value == u32::MAX;
    if !classic.starts_with(b"PK\x05\x06")
        || !counts
        || !alone
        || !placed(u32_at(classic, 12), length)
        || !placed(u32_at(classic, 16), start)
    {
        return Err("the record at the archive's end was changed");
    }
    Ok(())
}

/// The versions in the end record that torch's writer gives.
fn torch_versions() -> (u16, u16) {
    static KNOWN: std::sync::OnceLock<(u16, u16)> = std::sync::OnceLock::new();
    *KNOWN.get_or_init(|| {
        let record = reshard_formats::pickle_record(b"N.", None).unwrap_or_default();
        match record.len().checked_sub(98) {
            Some(at) => (u16_at(&record, at + 12), u16_at(&record, at + 14)),
            None => (0, 0),
        }
    })
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
