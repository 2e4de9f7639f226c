//! The entries that surround the data in every torch archive, in torch's order and with torch's content.
//!
//! `data.pkl`, `.format_version`, `.storage_alignment` and `byteorder` come before the storages; `version` and
//! `.data/serialization_id`, the directory and the end records behind them. The optional note comes last.

use super::zip_write::{Align, END_LEN, ZipEntry, push_end};

/// The pickled object.
pub(crate) const PICKLE: &str = "archive/data.pkl";
/// The extra entry of ours that torch ignores.
pub(crate) const NOTE: &str = "archive/.reshard";

/// An entry whose content never changes, with its CRC-32.
struct Fixed(&'static str, &'static [u8], u32);

const FORMAT_VERSION: Fixed = Fixed("archive/.format_version", b"1", 0x83dc_efb7);
const STORAGE_ALIGNMENT: Fixed = Fixed("archive/.storage_alignment", b"64", 0xe971_773f);
const BYTE_ORDER: Fixed = Fixed("archive/byteorder", b"little", 0x19e3_3d85);
const VERSION: Fixed = Fixed("archive/version", b"3\n", 0x5567_9ed1);
const SERIALIZATION_ID: &str = "archive/.data/serialization_id";
const SERIALIZATION_ID_LEN: usize = 40;

/// Number of entries before the storages.
pub(crate) const PREAMBLE: usize = 4;

/// Appends the entries that precede the storages.
pub(crate) fn push_preamble(out: &mut Vec<u8>, pickle: &[u8]) -> [ZipEntry<&'static str>; PREAMBLE] {
    let pickle_crc = crc32fast::hash(pickle);
    [
        push_entry(out, PICKLE, pickle, pickle_crc),
        push_fixed(out, &FORMAT_VERSION),
        push_fixed(out, &STORAGE_ALIGNMENT),
        push_fixed(out, &BYTE_ORDER),
    ]
}

fn push_fixed(out: &mut Vec<u8>, fixed: &Fixed) -> ZipEntry<&'static str> {
    push_entry(out, fixed.0, fixed.1, fixed.2)
}

fn push_entry(out: &mut Vec<u8>, name: &'static str, content: &[u8], crc32: u32) -> ZipEntry<&'static str> {
    let entry = ZipEntry { name, header: out.len() as u64, size: content.len() as u64, crc32 };
    entry.push_whole(out, Align::Padded, content);
    entry
}

/// The entries that follow the storages, placed but for the content of the serialization id.
#[derive(Clone, Debug)]
pub(crate) struct Closing {
    version: ZipEntry<&'static str>,
    serialization_id: ZipEntry<&'static str>,
    note: Option<ZipEntry<&'static str>>,
    directory: u64,
}

impl Closing {
    /// Places the entries from `cursor`, where the last storage ends.
    pub(crate) fn new(cursor: u64, note: Option<&[u8]>) -> Closing {
        let version = ZipEntry { name: VERSION.0, header: cursor, size: VERSION.1.len() as u64, crc32: VERSION.2 };
        let serialization_id =
            ZipEntry { name: SERIALIZATION_ID, header: version.end(Align::Padded), size: SERIALIZATION_ID_LEN as u64, crc32: 0 };
        let end = serialization_id.end(Align::Padded);
        let note = note.map(|note| ZipEntry { name: NOTE, header: end, size: note.len() as u64, crc32: crc32fast::hash(note) });
        Closing { version, serialization_id, directory: note.as_ref().map_or(end, |note| note.end(Align::Packed)), note }
    }

    /// Where these entries start.
    pub(crate) fn start(&self) -> u64 {
        self.version.header
    }

    /// Length of the whole archive, given how much the entries before these take in the directory.
    pub(crate) fn total_len(&self, central_len: u64) -> u64 {
        let own = self.version.central_len()
            + self.serialization_id.central_len()
            + self.note.as_ref().map_or(0, ZipEntry::central_len);
        self.directory + central_len + own + END_LEN
    }

    /// Appends everything from the end of the last storage: `entries` are those before these, and
    /// `names_hash` is the first half of the serialization id.
    pub(crate) fn push<N: AsRef<str>>(&self, out: &mut Vec<u8>, entries: &[ZipEntry<N>], names_hash: u64, note: Option<&[u8]>) {
        self.version.push_whole(out, Align::Padded, VERSION.1);
        let mut data_hash = 0;
        for entry in entries {
            // Torch's writer returns before hashing when there is nothing to write.
            if entry.size > 0 {
                data_hash = combine(data_hash, u64::from(entry.crc32));
            }
        }
        data_hash = combine(data_hash, u64::from(self.version.crc32));
        let id = serialization_id(names_hash, data_hash);
        let mut serialization_id = self.serialization_id;
        serialization_id.crc32 = crc32fast::hash(&id);
        serialization_id.push_whole(out, Align::Padded, &id);
        if let (Some(entry), Some(note)) = (&self.note, note) {
            entry.push_whole(out, Align::Packed, note);
        }

        let start = out.len();
        entries.iter().for_each(|entry| entry.push_central(out));
        self.version.push_central(out);
        serialization_id.push_central(out);
        if let Some(entry) = &self.note {
            entry.push_central(out);
        }
        let directory_len = (out.len() - start) as u64;
        let count = entries.len() as u64 + 2 + u64::from(self.note.is_some());
        push_end(out, count, self.directory, directory_len);
    }
}

/// Torch's `at::hash_combine`.
pub(crate) fn combine(seed: u64, value: u64) -> u64 {
    seed ^ value.wrapping_add(0x9e37_79b9).wrapping_add(seed << 6).wrapping_add(seed >> 2)
}

/// Two numbers of twenty digits each.
fn serialization_id(names: u64, data: u64) -> [u8; SERIALIZATION_ID_LEN] {
    let mut id = [b'0'; SERIALIZATION_ID_LEN];
    let (first, second) = id.split_at_mut(SERIALIZATION_ID_LEN / 2);
    for (digits, mut number) in [(first, names), (second, data)] {
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (number % 10) as u8;
            number /= 10;
        }
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_entries_have_the_checksum_of_their_content() {
        for fixed in [&FORMAT_VERSION, &STORAGE_ALIGNMENT, &BYTE_ORDER, &VERSION] {
            assert_eq!(crc32fast::hash(fixed.1), fixed.2, "{}", fixed.0);
        }
    }

    #[test]
    fn serialization_id_is_two_padded_numbers() {
        assert_eq!(&serialization_id(7, u64::MAX), b"0000000000000000000718446744073709551615");
    }
}
