//! A region of a stored tensor as a stream of bytes in row-major order, in bounded memory.
//!
//! Everything offline (digests, conversions, comparisons, statistics) reads tensors through here. Because a tensor's
//! row-major order restricted to a chunk is the chunk's own row-major order, the bytes of a chunk that passes whole pass in
//! their stored order whatever the cut, so its checksum is compared on the way without a second read.

mod ahead;
mod computed;
mod part;
mod slab;

use std::collections::HashMap;

use reshard_formats::DType;
use reshard_layout::{ByteLayout, Dims, Region, copy_runs, coverage, flat_pieces, runs};

use self::ahead::announce;
pub(crate) use self::part::PartStream;
use self::slab::{Slab, read_runs};

use crate::cast::{can_cast, cast};
use crate::checkpoint::{CatalogTensor, Check, Checker, Checkpoint, ChunkLocation, Located};
use crate::control::Control;
use crate::error::{Error, Geometry, Result, StorageContext};
use crate::mismatch::{Difference, Mismatch};
use crate::workers::Workers;

/// Streams are read in blocks of this many bytes: a multiple of every element's size, and still in the cache when used.
pub(crate) const BLOCK: usize = 1 << 20;

/// Bytes of one tensor, or of a region of one, in row-major order.
pub(crate) trait Stream: Send {
    /// The next `buf.len()` bytes; a multiple of the element's size.
    fn fill(&mut self, buf: &mut [u8]) -> Result<()>;
}

impl<S: Stream + ?Sized> Stream for Box<S> {
    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        (**self).fill(buf)
    }
}

/// A region of a checkpoint's tensor.
pub(crate) struct TensorStream<'c> {
    checkpoint: &'c Checkpoint,
    key: &'c str,
    tensor: &'c CatalogTensor,
    region: Region,
    /// The only chunk to read from; any that holds an element otherwise.
    only: Option<usize>,
    verify: bool,
    /// In elements of the region.
    position: u64,
    open: HashMap<usize, OpenChunk>,
    scratch: Vec<u8>,
}

struct OpenChunk {
    located: Located,
    checker: Option<Checker>,
    /// Bytes that have not passed yet.
    left: u64,
    /// Where in the file the announced bytes end.
    announced: u64,
    /// Whether its elements lie in row-major order.
    in_order: bool,
    /// The part at hand, where they do not.
    slab: Option<Slab>,
}

impl OpenChunk {
    /// Compares the checksum, when all bytes have passed.
    fn compare(&mut self, checkpoint: &Checkpoint, key: &str) -> Result<()> {
        let Some(checker) = self.checker.take() else { return Ok(()) };
        let offset = self.located.check.stretch().map_or(0, |(offset, _)| offset);
        checker.finish().map_err(|detail| checkpoint.corrupt(key, self.located.file, offset, detail))
    }
}

/// A storage is read to compare its checksum when it has at most this many times the bytes of the tensor that lies in it.
const SUMMED_RATIO: u64 = 2;

impl<'c> TensorStream<'c> {
    /// All of a tensor.
    pub(crate) fn whole(checkpoint: &'c Checkpoint, key: &'c str, verify: bool) -> Result<TensorStream<'c>> {
        let tensor = checkpoint.tensor(key)?;
        TensorStream::new(checkpoint, key, Region::whole(&tensor.shape).proven()?, verify)
    }

    /// A region of a tensor. Chunks that pass whole are compared with their checksums when `verify`.
    pub(crate) fn new(checkpoint: &'c Checkpoint, key: &'c str, region: Region, verify: bool) -> Result<TensorStream<'c>> {
        TensorStream::of(checkpoint, key, checkpoint.tensor(key)?, region, verify)
    }

    /// A region of a tensor whose chunks lie in the checkpoint's files; `key` is what it is called.
    pub(crate) fn of(
        checkpoint: &'c Checkpoint,
        key: &'c str,
        tensor: &'c CatalogTensor,
        region: Region,
        verify: bool,
    ) -> Result<TensorStream<'c>> {
        region.check_inside(&tensor.shape).given()?;
        let (open, scratch) = (HashMap::new(), Vec::new());
        Ok(TensorStream { checkpoint, key, tensor, region, only: None, verify, position: 0, open, scratch })
    }

    fn overlap(&mut self, chunk: usize, overlap: &Region, wanted: &Region, target: &mut [u8]) -> Result<()> {
        let Some(stored) = self.tensor.chunks.get(chunk) else {
            return Err(Error::internal(format!("{:?} has no chunk {chunk}", self.key)));
        };
        if !self.open.contains_key(&chunk) {
            let opened = self.open_chunk(chunk)?;
            self.open.insert(chunk, opened);
        }
        let Some(open) = self.open.get_mut(&chunk) else { return Err(Error::internal("a chunk was lost")) };
        let (checkpoint, key, dtype) = (self.checkpoint, self.key, self.tensor.dtype);
        let located = &open.located;
        let element = located.dtype.size();
        let length = overlap.volume() * element;
        let layout = &located.layout;
        let from = overlap.within(&stored.region).proven()?;
        let to = overlap.within(wanted).proven()?;
        let packed = ByteLayout::contiguous(wanted.sizes(), dtype.size()).proven()?;
        let form = located.form;
        let zero = Dims::from_elem(0, overlap.ndim());
        if let Some(value) = &located.fill {
            let all = runs(overlap.sizes(), layout, from.offsets(), &packed, to.offsets()).proven()?;
            return copy_runs(value, target, all).proven();
        }
        let own = ByteLayout::contiguous(overlap.sizes(), element).proven()?;
        let stretches = runs(overlap.sizes(), layout, from.offsets(), &own, &zero).proven()?;
        let straight = overlap == wanted && (!open.in_order || stretches.count_runs() == 1) && located.dtype == dtype;
        self.scratch.resize(if straight { 0 } else { length as usize }, 0);
        let bytes: &mut [u8] = if straight { target } else { &mut self.scratch };
        if open.in_order {
            let reader = checkpoint.reader(located.file)?;
            let (start, end) = (stretches.clone().next().map_or(0, |run| run.src), stretches.ends().0);
            let last = layout.end().min(start.saturating_add(open.left));
            announce(reader.as_ref(), &mut open.announced, (start, end), last);
            read_runs(reader.as_ref(), stretches, bytes).doing(|| format!("reading {key:?} from {}", reader.path()))?;
        } else {
            let slab = match open.slab.take().filter(|slab| slab.contains(&from)) {
                Some(slab) => slab,
                None => {
                    let all = self
                        .region
                        .intersection(&stored.region)
                        .unwrap_or_else(|| overlap.clone())
                        .within(&stored.region)
                        .proven()?;
                    let most = Slab::most(self.tensor.chunks.len());
                    match &located.computed {
                        Some(computed) => Slab::computed(checkpoint, computed, layout, &from, &all, most)?,
                        None => Slab::read(checkpoint.reader(located.file)?.as_ref(), layout, &from, &all, most)?,
                    }
                }
            };
            slab.copy(&from, bytes)?;
            open.slab = Some(slab);
        }
        if let Some(checker) = &mut open.checker {
            checker.update(bytes);
        }
        if !form.is_plain(located.dtype) {
            form.decode(located.dtype, bytes);
        }
        if located.dtype != dtype {
            let mut values = vec![0; (overlap.volume() * dtype.size()) as usize];
            cast(located.dtype, &self.scratch, dtype, &mut values)?;
            self.scratch = values;
        }
        if !straight {
            let own = ByteLayout::contiguous(overlap.sizes(), dtype.size()).proven()?;
            copy_runs(&self.scratch, target, runs(overlap.sizes(), &own, &zero, &packed, to.offsets()).proven()?).proven()?;
        }
        open.left = open.left.saturating_sub(length);
        if open.left == 0
            && let Some(mut done) = self.open.remove(&chunk)
        {
            done.compare(checkpoint, key)?;
        }
        Ok(())
    }

    fn open_chunk(&self, chunk: usize) -> Result<OpenChunk> {
        let located = self.checkpoint.locate(self.key, self.tensor, chunk)?;
        let region = &self.tensor.chunks[chunk].region;
        if located.fill.is_some() {
            return Ok(OpenChunk { located, checker: None, left: u64::MAX, announced: 0, in_order: true, slab: None });
        }
        let element = located.dtype.size();
        let wanted = self.region.intersection(region).map_or(0, |r| r.volume());
        if let Some(computed) = &located.computed {
            if self.verify && self.region.contains(region) {
                computed.check_inputs(self.checkpoint, &Control::new())?;
            }
            let left = wanted.saturating_mul(element);
            return Ok(OpenChunk { located, checker: None, left, announced: 0, in_order: false, slab: None });
        }
        let layout = &located.layout;
        let (base, extent) = (layout.base(), layout.end() - layout.base());
        let in_order = layout.is_contiguous();
        let exact = in_order && located.check.stretch() == Some((base, extent));
        let checker = (self.verify && exact && self.region.contains(region)).then(|| Checker::new(located.check));
        let reader = self.checkpoint.reader(located.file)?;
        if layout.end() > reader.len() {
            let detail = format!("its data ends at byte {}, the file has {}", layout.end(), reader.len());
            return Err(self.checkpoint.corrupt(self.key, located.file, base, detail));
        }
        // Bytes that do not pass as they were summed are compared beforehand.
        if self.verify && checker.is_none() && self.region.contains(region) && is_most(&located, region, element) {
            self.checkpoint.check_stretch(self.key, located.file, located.check, &Control::new())?;
        }
        let left = wanted.saturating_mul(element);
        Ok(OpenChunk { located, checker, left, announced: 0, in_order, slab: None })
    }
}

impl Stream for TensorStream<'_> {
    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        let element = self.tensor.dtype.size();
        let count = buf.len() as u64 / element;
        let tensor = self.tensor;
        let region = self.region.clone();
        let mut filled = 0u64;
        for piece in flat_pieces(region.sizes(), self.position, self.position + count).proven()? {
            let wanted = piece.region.translated(region.offsets()).proven()?;
            let (start, length) = (piece.start * element, wanted.volume() * element);
            let target = buf.get_mut(start as usize..(start + length) as usize).ok_or_else(outside)?;
            if let Some(chunk) = self.only {
                filled += wanted.volume();
                self.overlap(chunk, &wanted, &wanted, target)?;
                continue;
            }
            for (chunk, overlap) in
                tensor.index().map_err(|e| uncovered(self.checkpoint, self.key, e.to_string()))?.overlaps(&wanted)
            {
                filled += overlap.volume();
                self.overlap(chunk, &overlap, &wanted, target)?;
            }
        }
        if filled != count {
            return Err(uncovered(self.checkpoint, self.key, format!("the stored chunks do not tile {region}")));
        }
        self.position += count;
        Ok(())
    }
}

/// A stream of another element type.
pub(crate) struct CastStream<S> {
    inner: S,
    from: DType,
    to: DType,
    scratch: Vec<u8>,
}

impl<S: Stream> CastStream<S> {
    pub(crate) fn new(inner: S, from: DType, to: DType) -> Result<CastStream<S>> {
        if !can_cast(from, to) {
            return Err(Error::unsupported(format!("no cast from {} to {}", from.name(), to.name())));
        }
        Ok(CastStream { inner, from, to, scratch: Vec::new() })
    }
}

impl<S: Stream> Stream for CastStream<S> {
    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        if self.from == self.to {
            return self.inner.fill(buf);
        }
        let count = buf.len() / self.to.size() as usize;
        self.scratch.resize(count * self.from.size() as usize, 0);
        self.inner.fill(&mut self.scratch)?;
        cast(self.from, &self.scratch, self.to, buf)
    }
}

/// Gives a stream of `length` bytes block by block.
pub(crate) fn for_each_block(stream: &mut dyn Stream, length: u64, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut buffer = vec![0; length.min(BLOCK as u64) as usize];
    let mut left = length;
    while left > 0 {
        let part = &mut buffer[..left.min(BLOCK as u64) as usize];
        stream.fill(part)?;
        each(part)?;
        left -= part.len() as u64;
    }
    Ok(())
}

/// Compares the checksums of those chunks of a tensor that lie in none of `regions` whole, and so were not compared by
/// streams of these regions.
pub(crate) fn check_cut_chunks(checkpoint: &Checkpoint, key: &str, regions: &[&Region], control: &Control) -> Result<()> {
    check_chunks(checkpoint, key, checkpoint.tensor(key)?, regions, control)
}

/// [`check_cut_chunks`], of a tensor whose chunks lie in the checkpoint's files.
pub(crate) fn check_chunks(
    checkpoint: &Checkpoint,
    key: &str,
    tensor: &CatalogTensor,
    regions: &[&Region],
    control: &Control,
) -> Result<()> {
    for (i, chunk) in tensor.chunks.iter().enumerate() {
        if regions.iter().any(|region| region.contains(&chunk.region)) {
            continue;
        }
        if matches!(chunk.location, ChunkLocation::Live) {
            continue;
        }
        let located = checkpoint.locate(key, tensor, i)?;
        if let Some(computed) = &located.computed {
            computed.check_inputs(checkpoint, control)?;
        } else if is_most(&located, &chunk.region, tensor.dtype.size()) {
            checkpoint.check_stretch(key, located.file, located.check, control)?;
        }
    }
    Ok(())
}

/// Compares the checksums of records of which a view's tensors are small parts: no stream sees one of these whole, and none
/// reads it only to compare it. Each is read once, whatever shows it.
pub(crate) fn check_seen_records(checkpoint: &Checkpoint, keys: &[&str], control: &Control) -> Result<()> {
    if checkpoint.base().is_none() {
        return Ok(());
    }
    let mut records: HashMap<(u32, Check), &str> = HashMap::new();
    for key in keys {
        let tensor = checkpoint.tensor(key)?;
        for (i, chunk) in tensor.chunks.iter().enumerate() {
            let ChunkLocation::Seen(seen) = &chunk.location else { continue };
            let located = checkpoint.locate(key, tensor, i)?;
            let own = chunk.region.volume().saturating_mul(seen.dtype.size() * SUMMED_RATIO);
            if located.check.stretch().is_some_and(|(_, length)| length > own) {
                records.entry((located.file, located.check)).or_insert(key);
            }
        }
    }
    let mut records: Vec<_> = records.into_iter().collect();
    records.sort_by_key(|((file, check), _)| (*file, check.stretch()));
    Workers::reading(checkpoint.store.as_ref())
        .in_order(&records, |((file, check), key)| checkpoint.check_stretch(key, *file, *check, control).map(drop))
}

/// Whether a chunk is most of the bytes that its checksum is of. A small part of a shared storage, such as a parameter's
/// in a partition of all of them, is not worth reading the whole for.
fn is_most(located: &Located, region: &Region, element: u64) -> bool {
    let own = region.volume().saturating_mul(element * SUMMED_RATIO);
    located.check.stretch().is_some_and(|(_, length)| length <= own)
}

/// Proves that the chunks of a tensor hold every element exactly once.
pub(crate) fn check_covered(checkpoint: &Checkpoint, key: &str, tensor: &CatalogTensor) -> Result<()> {
    if let [only] = tensor.chunks.as_slice()
        && only.region.sizes() == tensor.shape.as_slice()
    {
        return Ok(());
    }
    let regions: Vec<Region> = tensor.chunks.iter().map(|c| c.region.clone()).collect();
    let found = coverage(&tensor.shape, &regions).map_err(|e| uncovered(checkpoint, key, e.to_string()))?;
    if found.is_exact() {
        return Ok(());
    }
    let detail = match (found.gaps.first(), found.overlaps.first()) {
        (Some(gap), _) => format!("no stored chunk holds {gap}"),
        (None, Some(twice)) => format!("two stored chunks hold {}", twice.region),
        (None, None) => format!("the stored chunks do not tile the shape {:?}", tensor.shape.as_slice()),
    };
    Err(uncovered(checkpoint, key, detail))
}

pub(crate) fn uncovered(checkpoint: &Checkpoint, key: &str, detail: String) -> Error {
    let differences = vec![Difference::Coverage { key: key.to_owned(), detail }];
    Error::Mismatch(Box::new(Mismatch { path: checkpoint.path().to_owned(), differences }))
}

fn outside() -> Error {
    Error::internal("a planned read reaches outside its buffer")
}
