//! A tensor as parts of its stored chunks that hold every element once.

use reshard_layout::{Region, coverage};

use crate::checkpoint::{CatalogTensor, Checkpoint};
use crate::error::Result;
use crate::stream::{check_covered, uncovered};

/// Larger chunks are cut for several threads, unless they have to pass whole for their checksums.
const LARGE: u64 = 32 << 20;

/// No layout of ranks cuts a chunk into so many by overlapping it.
const MOST_PIECES: usize = 1 << 12;

/// Elements of one stored chunk.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Part {
    pub(super) chunk: usize,
    /// In the tensor's coordinates.
    pub(super) region: Region,
}

/// The parts of a region. What several chunks hold is taken from the first; what none holds is an error.
pub(super) fn parts(
    checkpoint: &Checkpoint,
    key: &str,
    tensor: &CatalogTensor,
    wanted: &Region,
    whole: bool,
) -> Result<Vec<Part>> {
    let regions: Vec<Region> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
    let mut parts = Vec::new();
    match check_covered(checkpoint, key, tensor) {
        Ok(()) => {
            for (chunk, region) in regions.iter().enumerate() {
                parts.extend(region.intersection(wanted).map(|region| Part { chunk, region }));
            }
        }
        Err(error) => {
            let found = coverage(&tensor.shape, &regions).map_err(|e| uncovered(checkpoint, key, e.to_string()))?;
            if !found.is_covered() {
                return Err(error);
            }
            for (chunk, region) in regions.iter().enumerate() {
                let mut left: Vec<Region> = region.intersection(wanted).into_iter().collect();
                for (before, shared) in tensor.index().map_err(|e| uncovered(checkpoint, key, e.to_string()))?.overlaps(region) {
                    if before < chunk && !left.is_empty() {
                        left = left.iter().flat_map(|piece| piece.without(&shared)).collect();
                    }
                    if left.len() > MOST_PIECES {
                        return Err(error);
                    }
                }
                parts.extend(left.into_iter().map(|region| Part { chunk, region }));
            }
        }
    }
    // A scalar's region has one element; a region without elements has nothing to count.
    parts.retain(|part| !part.region.is_empty());
    if whole {
        return Ok(parts);
    }
    let large = LARGE / tensor.dtype.size();
    let cut = |part: Part| part.region.cut_to(large).map(move |region| Part { chunk: part.chunk, region }).collect::<Vec<_>>();
    Ok(parts.into_iter().flat_map(cut).collect())
}
