//! How much more a checkpoint says it holds than is stored of it.
//!
//! Several keys may name the same bytes (tied weights of a `torch.save` file, an expanded tensor); a hostile file lets a
//! thousand keys name one record, or a tensor of terabytes repeat four bytes. Whatever reads keys as a whole asks here
//! first: work and memory are bounded by twice what is stored, plus a limit that can be raised.

use reshard_layout::Region;

use super::Checkpoint;
use super::catalog::{CatalogKind, CatalogTensor, ChunkLocation, StoredChunk, ValueLocation};
use crate::error::{EXPANDED_LIMIT_VARIABLE, Error, Result};

/// What keys may take beyond twice the bytes that are stored of them.
const EXPANDED_LIMIT: u64 = 4 << 30;

/// Values are held in memory, decoded, where tensors stream; a byte of a pickle may become so many.
pub(super) const DECODED: u64 = 64;

pub(super) fn default_limit() -> u64 {
    std::env::var(EXPANDED_LIMIT_VARIABLE).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(EXPANDED_LIMIT)
}

/// What may be made of so many stored bytes: each of them twice, as where an embedding is tied, and the limit.
pub(super) fn allowed(stored: u64, limit: u64) -> u64 {
    stored.saturating_mul(2).saturating_add(limit)
}

/// Stretches of files that keys name, and the bytes that reading the keys would give.
#[derive(Default)]
struct Claims<'k> {
    stretches: Vec<(u32, u64, u64)>,
    bytes: u64,
    keys: u64,
    largest: Option<(u64, &'k str)>,
}

impl<'k> Claims<'k> {
    fn add(&mut self, key: &'k str, bytes: u64, stretches: impl Iterator<Item = (u32, u64, u64)>) {
        self.stretches.extend(stretches);
        self.bytes = self.bytes.saturating_add(bytes);
        self.keys += 1;
        if self.largest.is_none_or(|(most, _)| bytes > most) {
            self.largest = Some((bytes, key));
        }
    }

    /// The bytes of files that are named, each once.
    fn stored(&mut self) -> u64 {
        self.stretches.sort_unstable();
        let mut stored = 0u64;
        let mut last = (0u32, 0u64);
        for &(file, start, end) in &self.stretches {
            let from = if file == last.0 { start.max(last.1) } else { start };
            stored = stored.saturating_add(end.saturating_sub(from));
            last = (file, if file == last.0 { end.max(last.1) } else { end });
        }
        stored
    }

    fn check(mut self, checkpoint: &Checkpoint, limit: u64) -> Result<()> {
        // Most checkpoints end here: nothing is sorted for them.
        if self.bytes <= limit {
            return Ok(());
        }
        let stored = self.stored();
        if self.bytes <= allowed(stored, limit) {
            return Ok(());
        }
        let key = self.largest.map_or("", |(_, key)| key);
        let others = match self.keys - 1 {
            0 => " takes".to_owned(),
            1 => " and 1 other key take".to_owned(),
            n => format!(" and {n} other keys take"),
        };
        Err(checkpoint.expands(key, format!("{key:?}{others} {} bytes, and {stored} are stored of them", self.bytes), limit))
    }
}

impl Checkpoint {
    /// Refuses keys that would take far more than the bytes that are stored of them: all who read whole checkpoints ask first.
    pub fn check_expanded<'k>(&'k self, keys: impl IntoIterator<Item = &'k str>) -> Result<()> {
        let mut tensors = Claims::default();
        let mut values = Claims::default();
        for key in keys {
            match &self.entry(key)?.kind {
                CatalogKind::Tensor(tensor) => {
                    // A record is opened for each chunk that it holds, whatever the chunk's size.
                    let records: u64 = tensor.chunks.iter().map(|chunk| record_length(&chunk.location)).sum();
                    tensors.add(key, tensor.needed_bytes().max(records), stretches(tensor).into_iter());
                }
                CatalogKind::Value(ValueLocation::Record { file, offset, length, transform }) => {
                    let bytes = match transform {
                        Some(transform) => {
                            self.compression(key, transform)?;
                            self.unpacked_value_len(key, *file, *offset, *length)?
                        }
                        None => *length,
                    };
                    values.add(key, bytes, std::iter::once((*file, *offset, offset.saturating_add(*length))));
                }
                CatalogKind::Value(_) => {}
            }
        }
        tensors.check(self, self.expanded_limit)?;
        values.check(self, self.expanded_limit / DECODED)
    }

    /// Refuses a region of a tensor that would take far more than all that is stored of the tensor.
    pub fn check_region(&self, key: &str, region: &Region) -> Result<()> {
        let tensor = self.tensor(key)?;
        let bytes = region.volume().saturating_mul(tensor.dtype.size());
        let stored = stored_of(tensor);
        if bytes <= allowed(stored, self.expanded_limit) {
            return Ok(());
        }
        let detail = format!("{key:?} takes {bytes} bytes, and {stored} are stored of it");
        Err(self.expands(key, detail, self.expanded_limit))
    }

    pub(super) fn expands(&self, key: &str, detail: String, limit: u64) -> Error {
        Error::Expands { path: self.path.clone(), key: key.to_owned(), detail, limit }
    }
}

/// A code of four bits may become a float of 32.
const WIDENED: u64 = 8;

fn stored_of(tensor: &CatalogTensor) -> u64 {
    let length = |(_, start, end): &(u32, u64, u64)| end.saturating_sub(*start);
    let lengths = tensor.chunks.iter().map(|chunk| {
        let stored = chunk_stretches(chunk).iter().map(length).fold(0, u64::saturating_add);
        match chunk.location.stored() {
            ChunkLocation::Computed(_) => stored.saturating_mul(WIDENED),
            _ => stored,
        }
    });
    lengths.fold(0, u64::saturating_add)
}

/// The stretches of files that a tensor is made from.
fn stretches(tensor: &CatalogTensor) -> Vec<(u32, u64, u64)> {
    tensor.chunks.iter().flat_map(chunk_stretches).collect()
}

fn chunk_stretches(chunk: &StoredChunk) -> Vec<(u32, u64, u64)> {
    match chunk.location.stored() {
        ChunkLocation::Record { offset, length, .. } => vec![(chunk.file, *offset, offset.saturating_add(*length))],
        ChunkLocation::Data(data) => vec![(chunk.file, data.layout.base(), data.layout.end())],
        ChunkLocation::Computed(computed) => computed.tensors().flat_map(stretches).collect(),
        ChunkLocation::Seen(_) | ChunkLocation::Fill(_) | ChunkLocation::Live => Vec::new(),
    }
}

fn record_length(location: &ChunkLocation) -> u64 {
    match location {
        ChunkLocation::Record { length, .. } => *length,
        // Parts of a record, as a view has them, are read as such.
        ChunkLocation::Data(_)
        | ChunkLocation::Seen(_)
        | ChunkLocation::Computed(_)
        | ChunkLocation::Fill(_)
        | ChunkLocation::Live => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::Claims;

    #[test]
    fn bytes_that_several_keys_name_are_stored_once() {
        let stored = |stretches: &[(u32, u64, u64)]| {
            let mut claims = Claims::default();
            claims.add("k", 0, stretches.iter().copied());
            claims.stored()
        };
        assert_eq!(stored(&[]), 0);
        assert_eq!(stored(&[(0, 10, 20), (0, 10, 20), (0, 15, 30), (0, 40, 41)]), 21);
        assert_eq!(stored(&[(0, 0, 100), (0, 10, 20), (0, 50, 60)]), 100);
        assert_eq!(stored(&[(1, 5, 10), (0, 0, 10), (1, 0, 7)]), 20);
        assert_eq!(stored(&[(0, 7, 7), (3, 2, u64::MAX)]), u64::MAX - 2);
    }
}
