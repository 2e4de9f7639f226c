//! Runs that are read straight into their places, many of them in one vectored read.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;

use reshard_layout::Runs;
use reshard_storage::{RangeRead, Reader};

use super::boxes::outside;
use super::plan::PlannedMove;
use super::read::{Job, TINY};
use crate::checkpoint::{Checker, check_whole};
use crate::error::{Error, Result, StorageContext};
use crate::leaf::LoadPiece;

/// A request is sent when it has this many parts; the kernel takes 1,024.
const PARTS: usize = 1000;
/// …or this many bytes that nobody wants.
const UNWANTED: u64 = 4 << 20;

/// A stretch of a file, and where its bytes go; `None` for bytes that nobody wants.
struct Segment<'p, 'a> {
    offset: u64,
    length: u64,
    to: Option<(&'p LoadPiece<'a>, u64)>,
    /// The move to be verified, by position in its batch.
    verify: Option<usize>,
    /// Whether the move ends here.
    last: bool,
}

/// Collects runs that are read straight into their places.
pub(super) struct Direct<'d, 'j, 'a> {
    job: &'d Job<'j, 'a>,
    /// `None` where reads are only counted.
    reader: Option<&'d dyn Reader>,
    batch: &'d [PlannedMove],
    segments: Vec<Segment<'d, 'a>>,
    bytes: u64,
    unwanted: u64,
    /// Where the last segment ends.
    end: u64,
    /// Of the move whose segments are being hashed; outlives a request.
    hasher: Option<Checker>,
    gaps: Vec<u8>,
}

impl<'d, 'j, 'a> Direct<'d, 'j, 'a> {
    pub(super) fn new(job: &'d Job<'j, 'a>, reader: Option<&'d dyn Reader>, batch: &'d [PlannedMove]) -> Direct<'d, 'j, 'a> {
        Direct { job, reader, batch, segments: Vec::new(), bytes: 0, unwanted: 0, end: 0, hasher: None, gaps: Vec::new() }
    }

    pub(super) fn add(&mut self, index: usize, piece: &'d LoadPiece<'a>, all: Runs, verify: bool) -> Result<()> {
        let mut left = all.bytes();
        for mut run in all {
            while run.len > 0 {
                let request = self.job.request;
                let room = request - self.bytes.min(request - 1);
                // Runs that nearly fit are not cut in two.
                let length = if run.len <= room + TINY { run.len } else { run.len.min(room) };
                let gap = run.src.checked_sub(self.end).filter(|_| !self.segments.is_empty());
                if let Some(gap) = gap.filter(|&gap| gap > 0 && gap <= self.job.max_gap) {
                    self.segments.push(Segment { offset: self.end, length: gap, to: None, verify: None, last: false });
                    self.bytes += gap;
                    self.unwanted += gap;
                }
                left -= length;
                let to = Some((piece, run.dst));
                self.segments.push(Segment { offset: run.src, length, to, verify: verify.then_some(index), last: left == 0 });
                self.bytes += length;
                self.end = run.src + length;
                run.src += length;
                run.dst += length;
                run.len -= length;
                if self.bytes >= request || self.segments.len() >= PARTS || self.unwanted >= UNWANTED {
                    self.flush()?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Result<()> {
        if self.segments.is_empty() {
            return Ok(());
        }
        self.job.options.control.check("loading")?;
        self.job.tally.read(self.bytes, 1);
        let segments = std::mem::take(&mut self.segments);
        if let Some(reader) = self.reader {
            self.read(reader, segments)?;
        }
        self.bytes = 0;
        self.unwanted = 0;
        Ok(())
    }

    fn read(&mut self, reader: &dyn Reader, segments: Vec<Segment<'d, 'a>>) -> Result<()> {
        self.gaps.resize(self.unwanted as usize, 0);
        let mut gaps = self.gaps.as_mut_slice();
        let mut ranges = Vec::with_capacity(segments.len());
        for segment in &segments {
            let buf = match segment.to {
                // SAFETY: the plan gives each byte of a piece to one move and each move's runs are disjoint; moves of one
                // wave run on disjoint memory; the slices end with this request.
                Some((piece, at)) => unsafe { piece.memory.slice(at, segment.length) }.ok_or_else(outside)?,
                None => {
                    let (gap, rest) = gaps.split_at_mut(segment.length as usize);
                    gaps = rest;
                    gap
                }
            };
            ranges.push(RangeRead { offset: segment.offset, buf });
        }
        reader.read_ranges(&mut ranges).doing(|| {
            let keys = self.batch.first().map_or("?", |m| self.job.key(m.wanted));
            format!("reading {keys:?} and what lies beside it from {}", reader.path())
        })?;
        drop(ranges);
        self.job.options.control.advance(self.bytes - self.unwanted);
        for segment in segments {
            let (Some((piece, at)), Some(index)) = (segment.to, segment.verify) else { continue };
            let planned = &self.batch[index];
            // SAFETY: as above; the read is done and this is the only slice of these bytes.
            let bytes = unsafe { piece.memory.slice(at, segment.length) }.ok_or_else(outside)?;
            match (self.hasher.take(), segment.last) {
                // A move that fits into one segment is hashed in one go: small tensors do.
                (None, true) => {
                    self.job.tally.verified.fetch_add(1, Ordering::Relaxed);
                    check_whole(planned.located.check, bytes).map_err(|detail| self.damaged(planned, detail))?;
                }
                (hasher, last) => {
                    let mut hasher = hasher.unwrap_or_else(|| Checker::new(planned.located.check));
                    hasher.update(bytes);
                    match last {
                        true => self.job.compare(planned, hasher)?,
                        false => self.hasher = Some(hasher),
                    }
                }
            }
        }
        Ok(())
    }

    fn damaged(&self, planned: &PlannedMove, detail: String) -> Error {
        let offset = planned.located.check.stretch().map_or(0, |(offset, _)| offset);
        self.job.checkpoint.corrupt(self.job.key(planned.wanted), planned.located.file, offset, detail)
    }
}
