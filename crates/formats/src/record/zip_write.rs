//! The byte layout of torch's zip writer: stored entries, data descriptors, `FB` padding, zip64 at the end.
//!
//! Torch's writer (miniz) puts zero sizes and checksum into the local header and the truth into a
//! descriptor behind the data and into the central directory. That suits streaming: all that precedes an
//! entry's data is known before the data is. Every function here is a pure function of a position.

/// Torch aligns the data of entries to this many bytes from the start of the archive.
pub(crate) const ALIGNMENT: u64 = 64;

/// Sizes and positions from here on move into the zip64 extra field.
const ZIP64_LIMIT: u64 = u32::MAX as u64;
const LOCAL_HEADER: u64 = 30;
const CENTRAL_HEADER: u64 = 46;
/// Zip64 end record, its locator and the classic end record; torch's writer always makes all three.
pub(crate) const END_LEN: u64 = 56 + 20 + 22;
const PADDING: [u8; ALIGNMENT as usize] = [b'Z'; ALIGNMENT as usize];

/// One file in the archive: where its local header starts, and what the directory says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZipEntry<N> {
    pub(crate) name: N,
    pub(crate) header: u64,
    pub(crate) size: u64,
    pub(crate) crc32: u32,
}

/// How an entry's data is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// At a multiple of [`ALIGNMENT`], by an `FB` extra field.
    Padded,
    /// Right behind the header.
    Packed,
}

impl<N: AsRef<str>> ZipEntry<N> {
    fn name_len(&self) -> u64 {
        self.name.as_ref().len() as u64
    }

    fn is_zip64(&self) -> bool {
        self.size >= ZIP64_LIMIT || self.header >= ZIP64_LIMIT
    }

    fn zip64_len(&self) -> u64 {
        if !self.is_zip64() {
            return 0;
        }
        let sizes = if self.size >= ZIP64_LIMIT { 16 } else { 0 };
        let header = if self.header >= ZIP64_LIMIT { 8 } else { 0 };
        4 + sizes + header
    }

    fn flags(&self) -> u16 {
        // 0x800: names are UTF-8; 0x8: a descriptor follows the data, which torch omits after nothing.
        if self.size == 0 { 0x800 } else { 0x808 }
    }

    /// Where the data starts.
    pub(crate) fn data_offset(&self, align: Align) -> u64 {
        let start = self.header + LOCAL_HEADER + self.name_len() + self.zip64_len();
        match align {
            Align::Padded => (start + 4).next_multiple_of(ALIGNMENT),
            Align::Packed => start,
        }
    }

    /// Where the next entry starts.
    pub(crate) fn end(&self, align: Align) -> u64 {
        self.data_offset(align) + self.size + self.descriptor_len()
    }

    fn descriptor_len(&self) -> u64 {
        match (self.size, self.is_zip64()) {
            (0, _) => 0,
            (_, false) => 16,
            (_, true) => 24,
        }
    }

    /// Bytes of this entry in the central directory.
    pub(crate) fn central_len(&self) -> u64 {
        CENTRAL_HEADER + self.name_len() + self.zip64_len()
    }

    fn push_zip64(&self, out: &mut Vec<u8>, compressed_size: u64) {
        if !self.is_zip64() {
            return;
        }
        push16(out, 1);
        push16(out, (self.zip64_len() - 4) as u16);
        if self.size >= ZIP64_LIMIT {
            push64(out, self.size);
            push64(out, compressed_size);
        }
        if self.header >= ZIP64_LIMIT {
            push64(out, self.header);
        }
    }

    /// Appends the local header up to where the data starts.
    pub(crate) fn push_local(&self, out: &mut Vec<u8>, align: Align) {
        let name = self.name.as_ref();
        let start = self.header + LOCAL_HEADER + self.name_len() + self.zip64_len();
        let padding = self.data_offset(align) - start;
        let mut header = *b"PK\x03\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        header[6..8].copy_from_slice(&self.flags().to_le_bytes());
        header[26..28].copy_from_slice(&(name.len() as u16).to_le_bytes());
        header[28..30].copy_from_slice(&((self.zip64_len() + padding) as u16).to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(name.as_bytes());
        // Torch's writer leaves the compressed size zero here and right in the directory.
        self.push_zip64(out, 0);
        if align == Align::Padded {
            out.extend_from_slice(b"FB");
            push16(out, (padding - 4) as u16);
            out.extend_from_slice(&PADDING[..(padding - 4) as usize]);
        }
    }

    /// Appends what follows the data.
    pub(crate) fn push_descriptor(&self, out: &mut Vec<u8>) {
        if self.size == 0 {
            return;
        }
        out.extend_from_slice(b"PK\x07\x08");
        push32(out, self.crc32);
        if self.is_zip64() {
            push64(out, self.size);
            push64(out, self.size);
        } else {
            push32(out, self.size as u32);
            push32(out, self.size as u32);
        }
    }

    /// Appends a whole small entry.
    pub(crate) fn push_whole(&self, out: &mut Vec<u8>, align: Align, data: &[u8]) {
        self.push_local(out, align);
        out.extend_from_slice(data);
        self.push_descriptor(out);
    }

    /// Appends this entry's line of the central directory.
    pub(crate) fn push_central(&self, out: &mut Vec<u8>) {
        let name = self.name.as_ref();
        let mut header = [0; CENTRAL_HEADER as usize];
        header[..4].copy_from_slice(b"PK\x01\x02");
        header[8..10].copy_from_slice(&self.flags().to_le_bytes());
        header[16..20].copy_from_slice(&self.crc32.to_le_bytes());
        let size = self.size.min(ZIP64_LIMIT) as u32;
        header[20..24].copy_from_slice(&size.to_le_bytes());
        header[24..28].copy_from_slice(&size.to_le_bytes());
        header[28..30].copy_from_slice(&(name.len() as u16).to_le_bytes());
        header[30..32].copy_from_slice(&(self.zip64_len() as u16).to_le_bytes());
        header[42..46].copy_from_slice(&(self.header.min(ZIP64_LIMIT) as u32).to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(name.as_bytes());
        self.push_zip64(out, self.size);
    }
}

/// Appends the records that end an archive whose directory of `directory_len` bytes starts at `directory`.
pub(crate) fn push_end(out: &mut Vec<u8>, entries: u64, directory: u64, directory_len: u64) {
    out.extend_from_slice(b"PK\x06\x06");
    push64(out, 44);
    out.extend_from_slice(&[0x1e, 0x03, 0x2d, 0]);
    push64(out, 0);
    push64(out, entries);
    push64(out, entries);
    push64(out, directory_len);
    push64(out, directory);
    out.extend_from_slice(b"PK\x06\x07");
    push32(out, 0);
    push64(out, directory + directory_len);
    push32(out, 1);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    let short = entries.min(u64::from(u16::MAX)) as u16;
    push16(out, short);
    push16(out, short);
    push32(out, directory_len.min(ZIP64_LIMIT) as u32);
    push32(out, directory.min(ZIP64_LIMIT) as u32);
    push16(out, 0);
}

fn push16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn push32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn push64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}
