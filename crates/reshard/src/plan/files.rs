//! A rank's records end to end in its files.

use std::collections::HashMap;

use reshard_formats::{DType, RecordFrame, RecordSpec};
use reshard_layout::Dims;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Where a tensor record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Placed {
    /// Which of the rank's files.
    pub(crate) file: u32,
    /// Where the record starts.
    pub(crate) offset: u64,
    /// Its whole length.
    pub(crate) length: u64,
    /// Where its tensor data starts, relative to the record.
    pub(crate) data_offset: u64,
    /// The length of the data.
    pub(crate) data_length: u64,
}

/// Sizes of record frames: all records of one dtype and shape are alike.
#[derive(Debug, Default)]
pub(crate) struct FrameSizes {
    known: HashMap<(DType, bool, Dims), (u64, u64, u64)>,
}

impl FrameSizes {
    /// (data offset, data length, total length)
    fn of(&mut self, dtype: DType, requires_grad: bool, shape: &[u64]) -> Result<(u64, u64, u64)> {
        let key = (dtype, requires_grad, Dims::from_slice(shape));
        if let Some(sizes) = self.known.get(&key) {
            return Ok(*sizes);
        }
        let frame = frame(dtype, requires_grad, shape)?;
        let sizes = (frame.data_offset(), frame.data_len(), frame.total_len());
        self.known.insert(key, sizes);
        Ok(sizes)
    }
}

/// The frame of one tensor record.
pub(crate) fn frame(dtype: DType, requires_grad: bool, shape: &[u64]) -> Result<RecordFrame> {
    RecordFrame::new(&RecordSpec { dtype, shape, requires_grad, note: None })
        .map_err(|error| Error::invalid(format!("a tensor of shape {shape:?} cannot be recorded: {error}")))
}

/// Lays tensor records into `files` files, each record to the file that is shortest so far; returns their places and
/// the length of each file up to there (values and the trailer follow).
pub(crate) fn lay_out<'a>(
    records: impl Iterator<Item = (DType, bool, &'a [u64])>,
    files: u32,
    sizes: &mut FrameSizes,
) -> Result<(Vec<Placed>, Vec<u64>)> {
    let mut ends = vec![0u64; files.max(1) as usize];
    let mut placed = Vec::new();
    for (dtype, requires_grad, shape) in records {
        let (data_offset, data_length, length) = sizes.of(dtype, requires_grad, shape)?;
        let file = (0..ends.len()).min_by_key(|&f| (ends[f], f)).unwrap_or(0);
        let offset = ends[file];
        ends[file] = offset.checked_add(length).ok_or_else(|| Error::exhausted("a data file would exceed 2^64 bytes"))?;
        placed.push(Placed { file: file as u32, offset, length, data_offset, data_length });
    }
    Ok((placed, ends))
}
