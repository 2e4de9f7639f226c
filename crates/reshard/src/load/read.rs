//! Carrying out a read plan.
//!
//! Runs that are long enough go straight into their places, many of them in one vectored read, with unwanted bytes between
//! neighbours read into a throw-away buffer where that is cheaper than another request. Very short runs (columns) and
//! moves that need a cast or a byte swap, or go to memory that the CPU cannot write, pass through a bounded buffer.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use reshard_layout::{ByteLayout, Dims, Region, Run, Runs, copy_runs, runs};
use reshard_storage::Reader;

use super::boxes::{self, place};
use super::direct::Direct;
use super::options::{LoadOptions, Verify};
use super::order::FileOrder;
use super::plan::{PlannedMove, ReadPlan};
use crate::cast::cast;
use crate::checkpoint::{CatalogTensor, Checker, Checkpoint, Computed, StoredChunk};
use crate::error::{Error, Geometry, Result, StorageContext};
use crate::leaf::{LoadLeaf, LoadPiece, LoadState};

/// Runs shorter than this are not worth a vector of their own.
pub(super) const TINY: u64 = 512;
/// A request is sent when it has this many bytes. On a local disk they are still in the cache then when they are hashed; an
/// object store's reader makes several requests of it, which run at once.
const LOCAL_REQUEST: u64 = 1 << 20;
const REMOTE_REQUEST: u64 = 32 << 20;
/// Unwanted bytes between neighbours that are cheaper to read than to skip, on a local disk and on an object store.
const LOCAL_GAP: u64 = 4 << 10;
const REMOTE_GAP: u64 = 256 << 10;
/// The same for tiny runs, each of which would otherwise be a request.
const TINY_GAP: u64 = 16 << 10;

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) bytes_read: u64,
    pub(super) reads: u64,
    pub(super) verified: u64,
}

#[derive(Default)]
pub(super) struct Tally {
    bytes_read: AtomicU64,
    reads: AtomicU64,
    pub(super) verified: AtomicU64,
}

impl Tally {
    pub(super) fn read(&self, bytes: u64, reads: u64) {
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        self.reads.fetch_add(reads, Ordering::Relaxed);
    }
}

/// Reads everything into its place.
pub(super) fn execute(
    checkpoint: &Checkpoint,
    state: &mut LoadState<'_>,
    plan: &ReadPlan,
    options: &LoadOptions,
) -> Result<Done> {
    carry_out(checkpoint, state, plan, options, false)
}

/// Counts what [`execute`] would read. No file is opened and no memory touched.
pub(super) fn count(checkpoint: &Checkpoint, state: &LoadState<'_>, plan: &ReadPlan, options: &LoadOptions) -> Result<Done> {
    carry_out(checkpoint, state, plan, options, true)
}

fn carry_out(
    checkpoint: &Checkpoint,
    state: &LoadState<'_>,
    plan: &ReadPlan,
    options: &LoadOptions,
    dry_run: bool,
) -> Result<Done> {
    let tally = Tally::default();
    options.control.expect(plan.bytes_wanted);
    let remote = checkpoint.store.capabilities().remote;
    let request = if remote { REMOTE_REQUEST } else { LOCAL_REQUEST };
    let max_gap = options.max_gap.unwrap_or(if remote { REMOTE_GAP } else { LOCAL_GAP });
    let job = Job { checkpoint, state, options, tally: &tally, request, max_gap, dry_run };
    for wave in &plan.waves {
        wave.par_iter().try_for_each(|batch| job.batch(batch))?;
    }
    plan.checks.par_iter().try_for_each(|c| -> Result<()> {
        let bytes = match dry_run {
            true => c.check.stretch().map_or(0, |(_, length)| length),
            false => checkpoint.check_stretch(job.key(c.wanted), c.file, c.check, &options.control)?,
        };
        tally.read(bytes, bytes.div_ceil(LOCAL_REQUEST));
        tally.verified.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })?;
    for copy in plan.copies.iter().filter(|_| !dry_run) {
        job.copy(copy.from, copy.to)?;
    }
    Ok(Done { bytes_read: tally.bytes_read.into_inner(), reads: tally.reads.into_inner(), verified: tally.verified.into_inner() })
}

pub(super) struct Job<'j, 'a> {
    pub(super) checkpoint: &'j Checkpoint,
    state: &'j LoadState<'a>,
    pub(super) options: &'j LoadOptions,
    pub(super) tally: &'j Tally,
    /// A request is sent when it has this many bytes.
    pub(super) request: u64,
    /// Unwanted bytes between neighbours that are cheaper to read than to skip.
    pub(super) max_gap: u64,
    /// Whether reads are only counted.
    dry_run: bool,
}

impl<'a> Job<'_, 'a> {
    pub(super) fn key(&self, wanted: u32) -> &str {
        self.state.leaves.get_index(wanted as usize).map_or("?", |(key, _)| key.as_str())
    }

    fn piece(&self, wanted: u32, piece: u32) -> Result<(&LoadPiece<'a>, reshard_formats::DType)> {
        match self.state.leaves.get_index(wanted as usize).map(|(_, entry)| &entry.leaf) {
            Some(LoadLeaf::Tensor(tensor)) if (piece as usize) < tensor.pieces.len() => {
                Ok((&tensor.pieces[piece as usize], tensor.dtype))
            }
            _ => Err(Error::internal("the plan names a piece that is not wanted")),
        }
    }

    /// The moves of one thread, all of one file.
    fn batch(&self, batch: &[PlannedMove]) -> Result<()> {
        let Some(first) = batch.first() else { return Ok(()) };
        self.options.control.check("loading")?;
        if first.located.file == StoredChunk::NO_FILE {
            return batch.iter().try_for_each(|planned| match planned.located.computed.as_deref() {
                Some(computed) => self.compute(planned, computed),
                None if self.dry_run => Ok(()),
                None => self.fill(planned),
            });
        }
        // Where reads are only counted there is no reader, and nothing to verify or to put anywhere.
        let reader = match self.dry_run {
            true => None,
            false => Some(self.checkpoint.reader(first.located.file)?.as_ref()),
        };
        let mut direct = Direct::new(self, reader, batch);
        for (i, planned) in batch.iter().enumerate() {
            let (piece, dtype) = self.piece(planned.wanted, planned.piece)?;
            let verify =
                reader.is_some() && self.options.verify != Verify::Never && planned.whole && planned.located.check_is_layout();
            if planned.decodes() || dtype != planned.located.dtype || piece.memory.away().is_some() {
                self.by_boxes(reader, planned, piece, dtype, verify)?;
                continue;
            }
            let all = self.runs(planned, &planned.sizes, &planned.chunk_offsets, &piece.layout, &planned.piece_offsets)?;
            let tiny = all.run_len() < TINY && all.count_runs() > 1;
            if tiny && !FileOrder::new(&planned.located.layout, &planned.sizes).is_own() {
                self.by_boxes(reader, planned, piece, dtype, verify)?;
            } else if tiny {
                self.tiny(reader, planned, piece, all, verify)?;
            } else {
                direct.add(i, piece, all, verify)?;
            }
        }
        direct.flush()
    }

    fn runs(&self, planned: &PlannedMove, sizes: &[u64], from: &[u64], to: &ByteLayout, to_offsets: &[u64]) -> Result<Runs> {
        runs(sizes, &planned.located.layout, from, to, to_offsets).proven()
    }

    /// Short runs: whole spans into a buffer, from there to their places.
    fn tiny(
        &self,
        reader: Option<&dyn Reader>,
        planned: &PlannedMove,
        piece: &LoadPiece<'_>,
        all: Runs,
        verify: bool,
    ) -> Result<()> {
        let mut hasher = verify.then(|| Checker::new(planned.located.check));
        let done = self.spans(reader, planned.wanted, all, |bytes, runs, base| {
            if let Some(hasher) = &mut hasher {
                hasher.update(bytes);
            }
            for run in runs {
                let from = (run.src - base) as usize;
                place(piece, run.dst, &bytes[from..from + run.len as usize])?;
            }
            Ok(())
        });
        done?;
        self.options.control.advance(planned.bytes);
        match hasher {
            Some(hasher) => self.compare(planned, hasher),
            None => Ok(()),
        }
    }

    /// Reads runs in ascending order as spans of at most one buffer, and gives each span with its runs.
    fn spans(
        &self,
        reader: Option<&dyn Reader>,
        wanted: u32,
        all: Runs,
        mut each: impl FnMut(&[u8], &[Run], u64) -> Result<()>,
    ) -> Result<()> {
        let limit = self.options.buffer.max(LOCAL_REQUEST);
        let gap = self.max_gap.max(TINY_GAP);
        let mut buffer: Vec<u8> = Vec::new();
        let mut group: Vec<Run> = Vec::new();
        let mut end = 0;
        let mut flush = |group: &mut Vec<Run>, end: u64| -> Result<()> {
            let Some(start) = group.first().map(|r| r.src) else { return Ok(()) };
            let length = end - start;
            if let Some(reader) = reader {
                buffer.resize(length as usize, 0);
                reader.read_at(start, &mut buffer).doing(|| self.reading(wanted, reader))?;
                each(&buffer, group, start)?;
            }
            self.tally.read(length, 1);
            group.clear();
            Ok(())
        };
        for mut run in all {
            // A run longer than the buffer is cut.
            while run.len > 0 {
                let part = Run { len: run.len.min(limit), ..run };
                let start = group.first().map_or(part.src, |r| r.src);
                let far = part.src < end || part.src - end > gap || part.src + part.len - start > limit;
                if !group.is_empty() && far {
                    flush(&mut group, end)?;
                }
                end = part.src + part.len;
                run.src += part.len;
                run.dst += part.len;
                run.len -= part.len;
                group.push(part);
            }
        }
        flush(&mut group, end)
    }

    /// Moves that need a cast or a byte swap, that lie crosswise in the file, or whose target the CPU cannot write by itself: box
    /// by box through a buffer.
    fn by_boxes(
        &self,
        reader: Option<&dyn Reader>,
        planned: &PlannedMove,
        piece: &LoadPiece<'_>,
        dtype: reshard_formats::DType,
        verify: bool,
    ) -> Result<()> {
        let stored = planned.located.dtype;
        let element = stored.size();
        let mut checker = verify.then(|| Checker::new(planned.located.check));
        let order = FileOrder::new(&planned.located.layout, &planned.sizes);
        for part in order.parts(self.options.buffer / element).proven()? {
            self.options.control.check("loading")?;
            let part = part.proven()?;
            let bytes = part.volume() * element;
            let from = part.translated(&planned.chunk_offsets).proven()?;
            let (filed, zero) = (order.layout(part.sizes(), element).proven()?, Dims::from_elem(0, part.ndim()));
            let mut content = vec![0u8; bytes as usize];
            let all = self.runs(planned, part.sizes(), from.offsets(), &filed, &zero)?;
            self.gather(reader, planned.wanted, all, &mut content)?;
            if reader.is_none() {
                continue;
            }
            if !order.is_own() {
                let mut turned = vec![0u8; bytes as usize];
                let packed = ByteLayout::contiguous(part.sizes(), element).proven()?;
                copy_runs(&content, &mut turned, runs(part.sizes(), &filed, &zero, &packed, &zero).proven()?).proven()?;
                content = turned;
            }
            // What is verified is a whole record in its own order, and so are the boxes one after the other.
            if let Some(checker) = &mut checker {
                checker.update(&content);
            }
            if planned.decodes() {
                planned.located.form.decode(stored, &mut content);
            }
            if dtype != stored {
                let mut wanted = vec![0u8; (part.volume() * dtype.size()) as usize];
                cast(stored, &content, dtype, &mut wanted)?;
                content = wanted;
            }
            boxes::put(piece, &part.translated(&planned.piece_offsets).proven()?, &content)?;
            self.options.control.advance(bytes);
        }
        match checker {
            Some(checker) => self.compare(planned, checker),
            None => Ok(()),
        }
    }

    /// A chunk that is computed from others, part by part through a buffer.
    fn compute(&self, planned: &PlannedMove, computed: &Computed) -> Result<()> {
        let (piece, dtype) = self.piece(planned.wanted, planned.piece)?;
        let stored = planned.located.dtype;
        let order = FileOrder::new(&planned.located.layout, &planned.sizes);
        let parts =
            order.parts(self.options.buffer / stored.size()).proven()?.collect::<std::result::Result<Vec<_>, _>>().proven()?;
        if self.dry_run {
            for part in &parts {
                let needed = computed.needed(&planned.located.layout, &part.translated(&planned.chunk_offsets).proven()?)?;
                let bytes = |(_, input, region): &(_, &CatalogTensor, Region)| region.volume().saturating_mul(input.dtype.size());
                self.tally.read(needed.iter().map(bytes).fold(0, u64::saturating_add), needed.len() as u64);
            }
            return Ok(());
        }
        parts.par_iter().try_for_each(|part| {
            self.options.control.check("loading")?;
            let from = part.translated(&planned.chunk_offsets).proven()?;
            let mut content = vec![0u8; (part.volume() * stored.size()) as usize];
            let read = computed.read(self.checkpoint, &planned.located.layout, &from, &mut content)?;
            self.tally.read(read, 1);
            if dtype != stored {
                let mut values = vec![0u8; (part.volume() * dtype.size()) as usize];
                cast(stored, &content, dtype, &mut values)?;
                content = values;
            }
            boxes::put(piece, &part.translated(&planned.piece_offsets).proven()?, &content)?;
            self.options.control.advance(part.volume() * stored.size());
            Ok(())
        })
    }

    /// A chunk that lies in no file: every element is the same.
    fn fill(&self, planned: &PlannedMove) -> Result<()> {
        let (piece, dtype) = self.piece(planned.wanted, planned.piece)?;
        let stored = planned.located.fill.as_deref().ok_or_else(boxes::outside)?;
        let mut element = vec![0u8; dtype.size() as usize];
        cast(planned.located.dtype, stored, dtype, &mut element)?;
        for part in Region::whole(&planned.sizes).proven()?.cut_to(self.options.buffer / dtype.size()) {
            self.options.control.check("loading")?;
            let content = element.repeat(part.volume() as usize);
            boxes::put(piece, &part.translated(&planned.piece_offsets).proven()?, &content)?;
        }
        self.options.control.advance(planned.bytes);
        Ok(())
    }

    /// Reads runs into one buffer; one long run straight, many through spans.
    fn gather(&self, reader: Option<&dyn Reader>, wanted: u32, mut all: Runs, into: &mut [u8]) -> Result<()> {
        if all.count_runs() == 1
            && let Some(run) = all.next()
        {
            if let Some(reader) = reader {
                reader.read_at(run.src, into).doing(|| self.reading(wanted, reader))?;
            }
            self.tally.read(run.len, 1);
            return Ok(());
        }
        self.spans(reader, wanted, all, |bytes, runs, base| {
            for run in runs {
                let from = (run.src - base) as usize;
                into[run.dst as usize..(run.dst + run.len) as usize].copy_from_slice(&bytes[from..from + run.len as usize]);
            }
            Ok(())
        })
    }

    pub(super) fn compare(&self, planned: &PlannedMove, checker: Checker) -> Result<()> {
        self.verdict(self.key(planned.wanted), planned.located.file, checker)
    }

    fn verdict(&self, key: &str, file: u32, checker: Checker) -> Result<()> {
        self.tally.verified.fetch_add(1, Ordering::Relaxed);
        let offset = checker.check.stretch().map_or(0, |(offset, _)| offset);
        checker.finish().map_err(|detail| self.checkpoint.corrupt(key, file, offset, detail))
    }

    fn reading(&self, wanted: u32, reader: &dyn Reader) -> String {
        format!("reading {:?} from {}", self.key(wanted), reader.path())
    }

    /// Fills a piece from another that wants the same region.
    fn copy(&self, from: (u32, u32), to: (u32, u32)) -> Result<()> {
        let (source, _) = self.piece(from.0, from.1)?;
        let (target, _) = self.piece(to.0, to.1)?;
        if source.memory.address() == target.memory.address() {
            return Ok(());
        }
        for part in Region::whole(source.region.sizes()).proven()?.cut_to(self.options.buffer / source.layout.element_size()) {
            let mut bytes = vec![0; (part.volume() * source.layout.element_size()) as usize];
            boxes::take(source, &part, &mut bytes)?;
            boxes::put(target, &part, &bytes)?;
        }
        Ok(())
    }
}
