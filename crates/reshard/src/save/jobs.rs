//! What one rank writes: the records that were assigned to it, and where their content lies in memory.

use reshard_formats::{DType, RecordFrame, value_record};
use reshard_layout::{ByteLayout, Dims};
use twox_hash::XxHash3_64;

use super::blocks::each_block;
use super::prepare::Prepared;
use crate::error::{Error, Geometry, Result};
use crate::leaf::{SaveLeaf, SaveState};
use crate::memory::Source;
use crate::plan::files::{FrameSizes, Placed, frame, lay_out};

/// One tensor record to write.
#[derive(Debug, Clone)]
pub(crate) struct TensorJob<'a> {
    /// Position in this rank's table.
    pub(crate) local: u32,
    pub(crate) dtype: DType,
    pub(crate) requires_grad: bool,
    /// Where in the tensor.
    pub(crate) global_offsets: Dims,
    pub(crate) sizes: Dims,
    pub(crate) placed: Placed,
    pub(crate) memory: Source<'a>,
    pub(crate) layout: ByteLayout,
    /// Where in the layout the record's region starts.
    pub(crate) offsets: Dims,
}

/// One value record to write, encoded.
#[derive(Debug, Clone)]
pub(crate) struct ValueJob {
    pub(crate) local: u32,
    pub(crate) bytes: Vec<u8>,
    /// The offsets and sizes of the region whose transformed record this is; of a value nothing.
    pub(crate) region: Option<(Dims, Dims)>,
}

/// Everything one rank writes.
#[derive(Debug, Clone)]
pub(crate) struct Jobs<'a> {
    pub(crate) tensors: Vec<TensorJob<'a>>,
    pub(crate) values: Vec<ValueJob>,
    /// Where each file's tensor records end.
    pub(crate) ends: Vec<u64>,
}

/// Finds the memory of everything that was assigned to this rank.
pub(crate) fn jobs<'a>(state: &SaveState<'a>, prepared: &Prepared, files: u32) -> Result<Jobs<'a>> {
    let mut tensors = Vec::new();
    let mut values = Vec::new();
    for assigned in prepared.plan.assigned() {
        let Some((key, entry)) = state.leaves.get_index(assigned.local as usize) else {
            return Err(Error::internal("the plan names a key that this rank does not have"));
        };
        match (&entry.leaf, &assigned.region) {
            (SaveLeaf::Tensor(tensor), Some(region)) => {
                let Some(piece) = tensor.pieces.get(assigned.piece as usize) else {
                    return Err(Error::internal(format!("the plan names a piece of {key:?} that this rank does not have")));
                };
                tensors.push(TensorJob {
                    local: assigned.local,
                    dtype: tensor.dtype,
                    requires_grad: tensor.requires_grad,
                    global_offsets: Dims::from_slice(region.offsets()),
                    sizes: Dims::from_slice(region.sizes()),
                    placed: Placed::default(),
                    memory: piece.memory.clone(),
                    layout: piece.layout.clone(),
                    offsets: Dims::from_slice(region.within(&piece.region).proven()?.offsets()),
                });
            }
            (SaveLeaf::Value(_) | SaveLeaf::Record(_), None) => {
                values.push(ValueJob { local: assigned.local, bytes: value_bytes(key, &entry.leaf)?, region: None });
            }
            _ => return Err(Error::internal(format!("the plan and the state disagree on {key:?}"))),
        }
    }
    let shapes = tensors.iter().map(|t| (t.dtype, t.requires_grad, t.sizes.as_slice()));
    let (placed, ends) = lay_out(shapes, files, &mut FrameSizes::default())?;
    for (tensor, placed) in tensors.iter_mut().zip(placed) {
        tensor.placed = placed;
    }
    Ok(Jobs { tensors, values, ends })
}

fn value_bytes(key: &str, leaf: &SaveLeaf<'_>) -> Result<Vec<u8>> {
    match leaf {
        SaveLeaf::Value(value) => {
            value_record(value, None).map_err(|e| Error::invalid(format!("the value of {key:?} cannot be saved: {e}")))
        }
        SaveLeaf::Record(bytes) => Ok(bytes.clone()),
        SaveLeaf::Tensor(_) => Err(Error::internal(format!("{key:?} is a tensor, not a value"))),
    }
}

/// Hashes of every piece and value in table order, to compare replicas.
pub(crate) fn content_hashes(state: &SaveState<'_>) -> Result<Vec<u64>> {
    let mut hashes = Vec::new();
    for (key, entry) in &state.leaves {
        match &entry.leaf {
            SaveLeaf::Tensor(tensor) => {
                for piece in &tensor.pieces {
                    let offsets = Dims::from_elem(0, piece.region.ndim());
                    let mut hasher = XxHash3_64::new();
                    let sink = |bytes: &[u8]| std::hash::Hasher::write(&mut hasher, bytes);
                    each_block(&piece.memory, &piece.layout, &offsets, piece.region.sizes(), tensor.dtype, sink)?;
                    hashes.push(std::hash::Hasher::finish(&hasher));
                }
            }
            leaf => hashes.push(XxHash3_64::oneshot(&value_bytes(key, leaf)?)),
        }
    }
    Ok(hashes)
}

impl TensorJob<'_> {
    /// The same record from other memory, in which its data lies packed.
    pub(crate) fn detached(&self, memory: Source<'static>) -> TensorJob<'static> {
        let packed = ByteLayout::contiguous(&self.sizes, self.dtype.size()).unwrap_or_else(|_| self.layout.clone());
        TensorJob {
            local: self.local,
            dtype: self.dtype,
            requires_grad: self.requires_grad,
            global_offsets: self.global_offsets.clone(),
            sizes: self.sizes.clone(),
            placed: self.placed,
            memory,
            layout: packed,
            offsets: Dims::from_elem(0, self.sizes.len()),
        }
    }

    pub(super) fn frame(&self) -> Result<RecordFrame> {
        frame(self.dtype, self.requires_grad, &self.sizes)
    }

    pub(super) fn is_framed_like(&self, other: &TensorJob<'_>) -> bool {
        self.dtype == other.dtype && self.requires_grad == other.requires_grad && self.sizes == other.sizes
    }

    /// Gives the record's data in row-major order, in blocks.
    pub(crate) fn each_block(&self, sink: impl FnMut(&[u8])) -> Result<()> {
        each_block(&self.memory, &self.layout, &self.offsets, &self.sizes, self.dtype, sink)
    }

    /// [`TensorJob::each_block`] with a step that can fail; nothing is done after the first that does.
    pub(super) fn try_each_block(&self, mut step: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut failed = Ok(());
        self.each_block(|block| {
            if failed.is_ok() {
                failed = step(block);
            }
        })?;
        failed
    }
}
