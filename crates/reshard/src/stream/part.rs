//! Elements of one chunk that are read once: as they lie in the file, where they lie there in one stretch.

use reshard_layout::{ByteLayout, Dims, Region, runs};
use reshard_storage::Pass;

use super::{OpenChunk, Stream, TensorStream};
use crate::cast::cast;
use crate::checkpoint::{CatalogTensor, Checkpoint};
use crate::error::{Error, Geometry, Result, StorageContext};

/// What is asked of a disk or of a service at a time, where the reader does not say.
const ASKED: u64 = 2 << 20;

/// A region that lies in one chunk, read from that chunk whatever else holds it, and not needed again.
pub(crate) struct PartStream<'c> {
    stream: TensorStream<'c>,
    stretch: Option<Stretch>,
    /// Bytes that have not passed yet.
    left: u64,
    buffer: Vec<u8>,
}

/// Where the region lies, if that is one stretch of its file.
struct Stretch {
    open: OpenChunk,
    at: u64,
    pass: Pass,
}

impl<'c> PartStream<'c> {
    /// A chunk that passes whole is compared with its checksum when `verify`.
    pub(crate) fn new(
        checkpoint: &'c Checkpoint,
        key: &'c str,
        tensor: &'c CatalogTensor,
        chunk: usize,
        region: Region,
        verify: bool,
    ) -> Result<PartStream<'c>> {
        let left = region.volume().saturating_mul(tensor.dtype.size());
        let mut stream = TensorStream { only: Some(chunk), ..TensorStream::of(checkpoint, key, tensor, region, verify)? };
        let open = stream.open_chunk(chunk)?;
        let stretch = match stretch(&open, &tensor.chunks[chunk].region, &stream.region)? {
            Some((at, end)) => Some(Stretch { at, pass: Pass::until(end, open.located.dtype.size()), open }),
            None => {
                stream.open.insert(chunk, open);
                None
            }
        };
        Ok(PartStream { stream, stretch, left, buffer: Vec::new() })
    }

    /// With memory that was used before.
    pub(crate) fn with_memory(mut self, memory: Vec<u8>) -> PartStream<'c> {
        match self.stretch.take() {
            Some(stretch) => self.stretch = Some(Stretch { pass: stretch.pass.with_memory(memory), ..stretch }),
            None => self.buffer = memory,
        }
        self
    }

    /// Its memory, to be used again.
    pub(crate) fn into_memory(self) -> Vec<u8> {
        self.stretch.map_or(self.buffer, |stretch| stretch.pass.into_memory())
    }

    /// Whether what is in the middle of it is known to be in memory already.
    pub(crate) fn is_in_memory(&self) -> Result<bool> {
        let Some(Stretch { open, at, .. }) = &self.stretch else { return Ok(false) };
        Ok(self.stream.checkpoint.reader(open.located.file)?.is_in_memory(at + self.left / 2))
    }

    /// The next elements, in row-major order; none when all have passed.
    pub(crate) fn next(&mut self) -> Result<&[u8]> {
        let Some(Stretch { open, at, pass }) = &mut self.stretch else {
            let length = self.left.min(ASKED);
            self.buffer.resize(length as usize, 0);
            self.stream.fill(&mut self.buffer)?;
            self.left -= length;
            return Ok(&self.buffer);
        };
        let TensorStream { checkpoint, key, tensor, .. } = &self.stream;
        let reader = checkpoint.reader(open.located.file)?;
        let bytes = reader.lend(*at, pass).doing(|| format!("reading {key:?} from {}", reader.path()))?;
        if bytes.is_empty() && self.left > 0 {
            return Err(Error::internal(format!("{} lends nothing of {key:?}", reader.path())));
        }
        *at += bytes.len() as u64;
        if let Some(checker) = &mut open.checker {
            checker.update(bytes);
        }
        let stored = open.located.dtype;
        self.left = self.left.saturating_sub(bytes.len() as u64 / stored.size() * tensor.dtype.size());
        if self.left == 0 {
            open.compare(checkpoint, key)?;
        }
        let form = open.located.form;
        if form.is_plain(stored) && stored == tensor.dtype {
            return Ok(bytes);
        }
        let mut elements = bytes.to_vec();
        if !form.is_plain(stored) {
            form.decode(stored, &mut elements);
        }
        if stored != tensor.dtype {
            let mut values = vec![0; elements.len() / stored.size() as usize * tensor.dtype.size() as usize];
            cast(stored, &elements, tensor.dtype, &mut values)?;
            elements = values;
        }
        self.buffer = elements;
        Ok(&self.buffer)
    }
}

/// From which byte of its file to which a region of a chunk lies, if it is one stretch.
fn stretch(open: &OpenChunk, chunk: &Region, region: &Region) -> Result<Option<(u64, u64)>> {
    let located = &open.located;
    if !open.in_order || located.fill.is_some() || located.computed.is_some() || region.is_empty() {
        return Ok(None);
    }
    let from = region.within(chunk).proven()?;
    let packed = ByteLayout::contiguous(region.sizes(), located.dtype.size()).proven()?;
    let zero = Dims::from_elem(0, region.ndim());
    let mut all = runs(region.sizes(), &located.layout, from.offsets(), &packed, &zero).proven()?;
    Ok(if all.count_runs() == 1 { all.next().map(|run| (run.src, run.src + run.len)) } else { None })
}
