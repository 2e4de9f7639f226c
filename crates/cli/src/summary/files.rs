//! The data files of a checkpoint: their sizes, who wrote them, how much of each is used.

use std::collections::HashMap;
use std::time::SystemTime;

use reshard::Checkpoint;
use reshard::checkpoint::{CatalogKind, ChunkLocation, ValueLocation};
use reshard::storage::{FileInfo, StorageError};

/// One data file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct FileShare {
    /// Its path in the checkpoint.
    pub(crate) path: String,
    /// Its size on storage; `None` when it is missing.
    pub(crate) size: Option<u64>,
    /// The rank that wrote it, where the name tells.
    pub(crate) rank: Option<u32>,
    /// Chunks in it.
    pub(crate) chunks: u64,
    /// Bytes of tensors in it.
    pub(crate) tensor_bytes: u64,
    /// Where the last thing in it ends.
    pub(crate) used: u64,
}

/// What the store says is there.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    files: HashMap<String, FileInfo>,
    /// Why the folder was not listed, and each file asked for instead.
    pub(crate) unlisted: Option<String>,
    /// Why it is not known of every file whether it is there, if the store did not answer.
    pub(crate) trouble: Option<String>,
}

/// Asks the store what is there.
pub(crate) fn list(checkpoint: &Checkpoint) -> Listing {
    let store = checkpoint.store();
    // A single file's store is rooted at the folder around it, which may hold anything.
    let mut listing = Listing::default();
    if checkpoint.catalog().format.is_dcp() {
        match store.list("") {
            Ok(files) => {
                listing.files = files.into_iter().map(|file| (file.path.clone(), file)).collect();
                return listing;
            }
            // A plain web server cannot list, but may know each file; so may a folder that may be entered and not listed.
            Err(StorageError::Unsupported { .. }) => {}
            Err(error) => listing.unlisted = Some(error.to_string()),
        }
    }
    for path in &checkpoint.catalog().files {
        match store.size(path) {
            Ok(size) => drop(listing.files.insert(path.clone(), FileInfo { path: path.clone(), size, modified: None })),
            Err(StorageError::NotFound { .. }) => {}
            Err(error) => listing.trouble = Some(error.to_string()),
        }
    }
    listing
}

impl Listing {
    /// The catalog's files, sizes filled in, and what lies in each.
    pub(crate) fn shares(&self, checkpoint: &Checkpoint) -> Vec<FileShare> {
        let catalog = checkpoint.catalog();
        let mut shares: Vec<FileShare> = catalog
            .files
            .iter()
            .map(|path| FileShare {
                path: path.clone(),
                size: self.files.get(path).map(|file| file.size),
                rank: rank_of(path),
                ..FileShare::default()
            })
            .collect();
        for entry in catalog.entries.values() {
            match &entry.kind {
                CatalogKind::Tensor(tensor) => {
                    for chunk in &tensor.chunks {
                        if let Some(share) = shares.get_mut(chunk.file as usize) {
                            share.chunks += 1;
                            let bytes = chunk.region.volume().saturating_mul(tensor.dtype.size());
                            share.tensor_bytes = share.tensor_bytes.saturating_add(bytes);
                            share.used = share.used.max(record_end(&chunk.location));
                        }
                    }
                }
                CatalogKind::Value(ValueLocation::Record { file, offset, length, .. }) => {
                    if let Some(share) = shares.get_mut(*file as usize) {
                        share.used = share.used.max(offset.saturating_add(*length));
                    }
                }
                _ => {}
            }
        }
        shares
    }

    /// When the checkpoint was published.
    pub(crate) fn published(&self, checkpoint: &Checkpoint) -> Option<SystemTime> {
        let file = match checkpoint.catalog().format {
            format if format.is_dcp() => ".metadata",
            _ => checkpoint.catalog().files.first()?,
        };
        self.files.get(file)?.modified
    }

    /// Data files in the folder that the checkpoint does not name.
    pub(crate) fn unknown(&self, checkpoint: &Checkpoint) -> Vec<&FileInfo> {
        let named: std::collections::HashSet<&str> = checkpoint.catalog().files.iter().map(String::as_str).collect();
        let is_data = |file: &&FileInfo| file.path.ends_with(".distcp") && !file.path.contains('/');
        let mut unknown: Vec<&FileInfo> =
            self.files.values().filter(is_data).filter(|file| !named.contains(file.path.as_str())).collect();
        unknown.sort_by(|a, b| a.path.cmp(&b.path));
        unknown
    }
}

/// Where the bytes of a chunk end in their file.
pub(crate) fn record_end(location: &ChunkLocation) -> u64 {
    match location {
        ChunkLocation::Record { offset, length, .. } => offset.saturating_add(*length),
        ChunkLocation::Data(data) => data.layout.end(),
        ChunkLocation::Seen(seen) => record_end(&seen.stored),
        _ => 0,
    }
}

/// How many ranks wrote files, where every name tells.
pub(crate) fn ranks(files: &[FileShare]) -> Option<u64> {
    let mut ranks = files.iter().map(|file| file.rank).collect::<Option<Vec<u32>>>()?;
    ranks.sort_unstable();
    ranks.dedup();
    (!ranks.is_empty()).then_some(ranks.len() as u64)
}

/// The rank in a data file's name: `__3_0.distcp`, or `shard-00003-…` of PyTorch's safetensors.
fn rank_of(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next().unwrap_or(path);
    if let Some(rest) = name.strip_prefix("__") {
        return rest.split_once('_')?.0.parse().ok();
    }
    // These are counted from one.
    name.strip_prefix("shard-")?.split_once('-')?.0.parse::<u32>().ok()?.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_from_names() {
        assert_eq!(rank_of("__3_0.distcp"), Some(3));
        assert_eq!(rank_of("a/__12_1.0f3b.distcp"), Some(12));
        assert_eq!(rank_of("shard-00002-model-00001-of-00001.safetensors"), Some(1));
        assert_eq!(rank_of("model.safetensors"), None);
        assert_eq!(rank_of("__x_0.distcp"), None);
    }
}
