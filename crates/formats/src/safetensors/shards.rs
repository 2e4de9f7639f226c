//! Several files taken together: every tensor with all the regions of it that the files hold.

use indexmap::IndexMap;
use reshard_layout::{Dims, Region};

use super::error::SafetensorsError;
use super::header::SafetensorsFile;
use crate::DType;

/// A tensor as a set of files holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardedTensor {
    /// The element type.
    pub dtype: DType,
    /// The smallest shape that holds every chunk: DCP's files don't record the whole tensor's.
    pub shape: Dims,
    /// The stored regions.
    pub chunks: Vec<SafetensorsChunk>,
}

/// A stored region of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SafetensorsChunk {
    /// Which of the files has it.
    pub file: usize,
    /// Which part of the tensor it is.
    pub region: Region,
    /// Where the data starts in the file.
    pub data_offset: u64,
    /// Bytes of data.
    pub data_len: u64,
}

/// Puts the tensors of several files together by name, in order of first appearance.
///
/// Types and numbers of dimensions must agree. Only the files of DCP's variant may hold a tensor in
/// several pieces; whether the pieces cover it is for the caller to check.
pub fn sharded_tensors<'f>(
    files: impl IntoIterator<Item = &'f SafetensorsFile>,
) -> Result<IndexMap<String, ShardedTensor>, SafetensorsError> {
    let mut tensors: IndexMap<String, ShardedTensor> = IndexMap::new();
    for (number, file) in files.into_iter().enumerate() {
        for (key, stored) in &file.tensors {
            let chunk = SafetensorsChunk {
                file: number,
                region: stored.region.clone(),
                data_offset: stored.data_offset,
                data_len: stored.data_len,
            };
            let Some(tensor) = tensors.get_mut(key) else {
                let shape = (0..stored.shape.len()).map(|dim| stored.region.end(dim));
                let tensor = ShardedTensor { dtype: stored.dtype, shape: shape.collect(), chunks: vec![chunk] };
                tensors.insert(key.clone(), tensor);
                continue;
            };
            let bad = |reason: String| SafetensorsError::BadTensor { key: key.clone(), reason };
            if !file.is_dcp {
                return Err(SafetensorsError::Duplicate { key: key.clone(), place: "files that aren't shards" });
            }
            if tensor.dtype != stored.dtype {
                let (a, b) = (tensor.dtype, stored.dtype);
                return Err(bad(format!("one file says {a}, another {b}")));
            }
            if tensor.shape.len() != stored.shape.len() {
                let (a, b) = (tensor.shape.len(), stored.shape.len());
                return Err(bad(format!("one file says {a} dimensions, another {b}")));
            }
            for (dim, size) in tensor.shape.iter_mut().enumerate() {
                *size = (*size).max(stored.region.end(dim));
            }
            tensor.chunks.push(chunk);
        }
    }
    Ok(tensors)
}
