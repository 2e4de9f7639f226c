//! Records behind stream transforms: those that can be undone are, to the last byte, and what is in them is compared with its own
//! checksum.

use rayon::prelude::*;

use super::{Gathered, VerifyOptions};
use crate::checkpoint::{CatalogKind, CatalogTensor, Checkpoint, ChunkLocation, ValueLocation};
use crate::error::{Error, Result};
use crate::packed::Compression;
use crate::workers::Workers;

/// Records that went through what only its own library can undo.
pub(super) fn unknown(checkpoint: &Checkpoint, gathered: &mut Gathered) {
    let mut found = |key: &str, file: u32, offset: u64, name: &str| {
        if let Some(meant) = Compression::garbled(name) {
            let what = format!("stored through {name:?}, which is not known and nearly {:?}", meant.descriptor());
            gathered.error(Some(key), checkpoint.file_name(file), Some(offset), what);
        } else if Compression::of(name).is_none() {
            let what = format!("stored through {name}, which cannot be undone here; its content was not checked");
            gathered.warning(Some(key), checkpoint.file_name(file), Some(offset), what);
            gathered.unchecked += 1;
        }
    };
    for (key, entry) in &checkpoint.catalog().entries {
        match &entry.kind {
            CatalogKind::Tensor(tensor) => {
                for chunk in &tensor.chunks {
                    if let ChunkLocation::Record { offset, transform: Some(name), .. } = &chunk.location {
                        found(key, chunk.file, *offset, name);
                    }
                }
            }
            CatalogKind::Value(ValueLocation::Record { file, offset, transform: Some(name), .. }) => {
                found(key, *file, *offset, name)
            }
            CatalogKind::Value(_) => {}
        }
    }
}

/// Decompresses all that can be. Values are decoded elsewhere, as all are.
pub(super) fn check(checkpoint: &Checkpoint, options: &VerifyOptions) -> Result<Gathered> {
    let mut gathered = Gathered::default();
    let mut chunks: Vec<(&str, &CatalogTensor, usize)> = Vec::new();
    for (key, entry) in &checkpoint.catalog().entries {
        match &entry.kind {
            CatalogKind::Tensor(tensor) => {
                let packed = |at: &usize| is_packed(&tensor.chunks[*at].location);
                chunks.extend((0..tensor.chunks.len()).filter(packed).map(|at| (key.as_str(), tensor, at)));
            }
            CatalogKind::Value(ValueLocation::Record { transform: Some(name), .. }) if Compression::of(name).is_some() => {
                gathered.checked += 1;
            }
            CatalogKind::Value(_) => {}
        }
    }
    let one = |&(key, tensor, at): &(&str, &CatalogTensor, usize)| -> Result<Gathered> {
        options.control.check("verifying")?;
        let mut gathered = Gathered { checked: 1, ..Gathered::default() };
        let summed = checkpoint
            .locate(key, tensor, at)
            .and_then(|located| checkpoint.check_stretch(key, located.file, located.check, &options.control));
        match summed {
            Ok(bytes) => gathered.bytes += bytes,
            Err(error @ Error::Cancelled { .. }) => return Err(error),
            // A file that is missing was found before.
            Err(Error::Incomplete { .. }) => {}
            Err(error) => {
                let chunk = &tensor.chunks[at];
                let offset = match chunk.location {
                    ChunkLocation::Record { offset, .. } => Some(offset),
                    _ => None,
                };
                gathered.error(Some(key), checkpoint.file_name(chunk.file), offset, error.full_text());
            }
        }
        Ok(gathered)
    };
    let found = Workers::reading(checkpoint.store.as_ref())
        .run(|| chunks.par_iter().with_max_len(1).map(one).try_reduce(Gathered::default, |a, b| Ok(a.join(b))))??;
    Ok(gathered.join(found))
}

fn is_packed(location: &ChunkLocation) -> bool {
    matches!(location, ChunkLocation::Record { transform: Some(name), .. } if Compression::of(name).is_some())
}
