//! Tensors that are computed from others, read: what a part needs of those is streamed, in bounded memory.

use reshard_layout::{ByteLayout, Dims, Region, copy_runs, runs};

use super::{Stream, TensorStream, check_chunks, uncovered};
use crate::checkpoint::{Check, Checkpoint, ChunkLocation, Computed};
use crate::control::Control;
use crate::error::{Error, Geometry, Result};

/// At most so many elements are computed at once.
const MOST_ELEMENTS: u64 = 4 << 20;

impl Computed {
    /// Computes a part of a chunk whose elements lie as `layout` says, packed in row-major order. Says how many bytes were read.
    pub(crate) fn read(&self, checkpoint: &Checkpoint, layout: &ByteLayout, part: &Region, into: &mut [u8]) -> Result<u64> {
        let packed = ByteLayout::contiguous(part.sizes(), self.dtype().size()).proven()?;
        self.gather(checkpoint, layout, part, &packed, &Dims::from_elem(0, part.ndim()), into)
    }

    /// Computes a part, in halves where all that encloses it is too much at once.
    fn gather(
        &self,
        checkpoint: &Checkpoint,
        layout: &ByteLayout,
        part: &Region,
        packed: &ByteLayout,
        to: &[u64],
        into: &mut [u8],
    ) -> Result<u64> {
        if part.is_empty() {
            return Ok(0);
        }
        let (region, window) = self.enclosing(layout, part)?;
        if region.volume() > MOST_ELEMENTS && part.volume() > 1 {
            let dim = (0..part.ndim()).max_by_key(|&dim| part.sizes()[dim]).unwrap_or(0);
            let half = part.sizes()[dim] / 2;
            let (mut first, mut second) = (Dims::from_slice(part.sizes()), Dims::from_slice(part.sizes()));
            (first[dim], second[dim]) = (half, part.sizes()[dim] - half);
            let (mut offsets, mut further) = (Dims::from_slice(part.offsets()), Dims::from_slice(to));
            let read = self.gather(checkpoint, layout, &Region::new(&offsets, &first).proven()?, packed, to, into)?;
            offsets[dim] += half;
            further[dim] += half;
            let more = self.gather(checkpoint, layout, &Region::new(&offsets, &second).proven()?, packed, &further, into)?;
            return Ok(read + more);
        }
        let (bytes, read) = self.region(checkpoint, &region)?;
        let zero = Dims::from_elem(0, part.ndim());
        copy_runs(&bytes, into, runs(part.sizes(), &window, &zero, packed, to).proven()?).proven()?;
        Ok(read)
    }

    /// Computes a region, packed in row-major order.
    fn region(&self, checkpoint: &Checkpoint, region: &Region) -> Result<(Vec<u8>, u64)> {
        let needs = self.needs(region)?;
        let mut contents = Vec::with_capacity(self.inputs().len());
        let mut read = 0;
        for (input, needed) in self.inputs().iter().zip(&needs) {
            let bytes = needed.volume().saturating_mul(input.tensor.dtype.size());
            let mut content = vec![0; usize::try_from(bytes).map_err(|_| Error::exhausted("a part of a tensor is too large"))?];
            TensorStream::of(checkpoint, &input.key, &input.tensor, needed.clone(), false)?.fill(&mut content)?;
            read += bytes;
            contents.push(content);
        }
        let computed = self.compute(region, &needs, &contents)?;
        Ok((computed, read))
    }

    /// Compares the checksums of all that it is computed from.
    pub(crate) fn check_inputs(&self, checkpoint: &Checkpoint, control: &Control) -> Result<()> {
        self.inputs().iter().try_for_each(|input| check_chunks(checkpoint, &input.key, &input.tensor, &[], control))
    }

    /// What is to be compared when a part of it is read: the checksums of what is needed whole, or of all that is touched.
    pub(crate) fn checks(
        &self,
        checkpoint: &Checkpoint,
        layout: &ByteLayout,
        part: &Region,
        touched: bool,
    ) -> Result<Vec<(u32, Check)>> {
        let mut checks = Vec::new();
        for (key, tensor, needed) in self.needed(layout, part)? {
            let index = tensor.index().map_err(|error| uncovered(checkpoint, key, error.to_string()))?;
            for (number, overlap) in index.overlaps(&needed) {
                let whole = tensor.chunks.get(number).is_some_and(|chunk| chunk.region == overlap);
                if !(whole || touched) || tensor.chunks.get(number).is_some_and(|c| matches!(c.location, ChunkLocation::Live)) {
                    continue;
                }
                let located = checkpoint.locate(key, tensor, number)?;
                if let (Some(computed), Some(chunk)) = (&located.computed, tensor.chunks.get(number)) {
                    checks.extend(computed.checks(
                        checkpoint,
                        &located.layout,
                        &overlap.within(&chunk.region).proven()?,
                        touched,
                    )?);
                } else if located.check.stretch().is_some() {
                    checks.push((located.file, located.check));
                }
            }
        }
        Ok(checks)
    }
}
