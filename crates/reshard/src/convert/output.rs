//! Writing files whose layout is known beforehand from streams of tensors: every format's conversion ends here.
//!
//! Memory is a block or two for each thread. Stores that take bytes in any order get positioned writes from all threads;
//! those that take them in order (object stores) get each file from front to back, several files at once.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::mpsc::{channel, sync_channel};

use rayon::prelude::*;
use reshard_formats::own::{ChecksumBuilder, Checksums};
use reshard_formats::{DType, KeyPath};
use reshard_layout::{Dims, Region};
use reshard_storage::{Store, WriteOptions, Writer};

use crate::cast::can_cast;
use crate::checkpoint::{Checkpoint, LoadedValue};
use crate::commit::discard;
use crate::control::Control;
use crate::error::{Error, Result, StorageContext};
use crate::mesh::{Layout, RankPiece};
use crate::packed::Compression;
use crate::stream::{BLOCK, CastStream, Stream};
use crate::workers::Workers;

/// Pieces are gathered in a buffer and written together until there are this many bytes.
const BATCH: u64 = 2 << 20;

/// A piece of at least this size is read and written at the same time, so that a lone large tensor keeps two threads busy.
const PIPELINED: u64 = 64 << 20;

/// A tensor to write.
#[derive(Debug, Clone)]
pub(crate) struct PlanTensor {
    /// The key in the source.
    pub(crate) stored: String,
    pub(crate) key: String,
    pub(crate) path: KeyPath,
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
    pub(crate) requires_grad: bool,
}

impl PlanTensor {
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>().saturating_mul(self.dtype.size())
    }
}

/// A value to write.
#[derive(Debug, Clone)]
pub(crate) struct PlanValue {
    pub(crate) key: String,
    pub(crate) path: KeyPath,
    pub(crate) value: LoadedValue,
}

/// Gives the bytes of a region of a tensor, by its position in the plan.
pub(crate) type OpenStream<'p> = Box<dyn Fn(usize, &Region) -> Result<Box<dyn Stream + 'p>> + Send + Sync + 'p>;

/// Everything to write, and where it comes from.
pub(crate) struct Plan<'p> {
    pub(crate) tensors: Vec<PlanTensor>,
    pub(crate) values: Vec<PlanValue>,
    pub(crate) open: OpenStream<'p>,
}

impl Plan<'_> {
    /// Who writes what on a layout.
    pub(crate) fn pieces(&self, layout: &Layout) -> Result<Vec<RankPiece>> {
        layout.pieces(self.tensors.iter().map(|tensor| (tensor.key.as_str(), tensor.shape.as_slice(), tensor.dtype)))
    }
}

impl<'p> Plan<'p> {
    /// The same with other values, and with tensors that are those at the given positions, under other names or of another type.
    pub(crate) fn remapped(self, chosen: Vec<(usize, PlanTensor)>, values: Vec<PlanValue>) -> Result<Plan<'p>> {
        let before = self.tensors;
        let mut tensors = Vec::with_capacity(chosen.len());
        let mut sources = Vec::with_capacity(chosen.len());
        for (i, tensor) in chosen {
            let from = before.get(i).ok_or_else(|| Error::internal("a tensor that is not planned"))?.dtype;
            if from != tensor.dtype && !can_cast(from, tensor.dtype) {
                let (from, to) = (from.name(), tensor.dtype.name());
                return Err(Error::unsupported(format!("{:?}: no cast from {from} to {to}", tensor.stored)));
            }
            sources.push((i, from, tensor.dtype));
            tensors.push(tensor);
        }
        let inner = self.open;
        let open: OpenStream<'p> = Box::new(move |j, region| {
            let (i, from, to) = sources[j];
            let stream = inner(i, region)?;
            Ok(if from == to { stream } else { Box::new(CastStream::new(stream, from, to)?) })
        });
        Ok(Plan { tensors, values, open })
    }

    /// The same with one more tensor, of one number, and its position.
    pub(crate) fn with_number(self, number: f32) -> (Plan<'p>, usize) {
        let Plan { mut tensors, values, open: inner } = self;
        let position = tensors.len();
        let key = "step".to_owned();
        let (path, dtype, shape) = (Vec::new(), DType::Float32, Dims::new());
        tensors.push(PlanTensor { stored: key.clone(), key, path, dtype, shape, requires_grad: false });
        let open: OpenStream<'p> = Box::new(move |i, region| match i == position {
            true => Ok(Box::new(Number(number.to_le_bytes()))),
            false => inner(i, region),
        });
        (Plan { tensors, values, open }, position)
    }

    /// The same with some tensors of another type.
    pub(crate) fn with_dtypes(self, wanted: &HashMap<usize, DType>) -> Result<Plan<'p>> {
        let dtype = |i: &usize, tensor: &PlanTensor| wanted.get(i).copied().unwrap_or(tensor.dtype);
        let all = self.tensors.iter().cloned().enumerate();
        let chosen = all.map(|(i, tensor)| (i, PlanTensor { dtype: dtype(&i, &tensor), ..tensor })).collect();
        let values = self.values.clone();
        self.remapped(chosen, values)
    }
}

/// One number.
struct Number([u8; 4]);

impl Stream for Number {
    fn fill(&mut self, buf: &mut [u8]) -> Result<()> {
        buf.chunks_exact_mut(4).for_each(|element| element.copy_from_slice(&self.0));
        Ok(())
    }
}

/// A region of a tensor and its place.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) tensor: usize,
    pub(crate) region: Region,
    pub(crate) file: usize,
    /// Where its head starts.
    pub(crate) offset: u64,
    /// Bytes of its head.
    pub(crate) head: u64,
    /// Bytes of its data.
    pub(crate) data: u64,
    /// Bytes of head, data and tail.
    pub(crate) length: u64,
}

/// A file to write: a lead, pieces one after the other, an ending.
#[derive(Debug, Clone)]
pub(crate) struct OutputFile {
    pub(crate) name: String,
    pub(crate) length: u64,
    pub(crate) lead: Vec<u8>,
}

/// What surrounds pieces in a format.
pub(crate) trait Framing: Sync {
    /// Whether pieces are to be summed.
    fn sums(&self) -> bool;

    /// The bytes right before a piece's data.
    fn head(&self, piece: usize) -> Result<Vec<u8>>;

    /// The bytes right after it.
    fn tail(&self, piece: usize, sums: Checksums) -> Result<Vec<u8>>;

    /// The bytes that end a file, and their place.
    fn ending(&self, file: usize, sums: &[Checksums]) -> Result<Option<(u64, Vec<u8>)>>;
}

/// How to write.
#[derive(Debug, Clone)]
pub(crate) struct OutputOptions {
    pub(crate) sync: bool,
    pub(crate) control: Control,
    /// How records of a DCP folder are compressed.
    pub(crate) compression: Option<Compression>,
    /// Those who read what is written.
    pub(crate) readers: &'static Workers,
}

impl OutputOptions {
    pub(crate) fn new(sync: bool, control: &Control, sources: &[&Checkpoint]) -> OutputOptions {
        let readers = Workers::reading_any(sources.iter().map(|source| source.store.as_ref()));
        OutputOptions { sync, control: control.clone(), compression: None, readers }
    }

    pub(crate) fn compressed(self, compression: Option<Compression>) -> OutputOptions {
        OutputOptions { compression, ..self }
    }
}

/// Writes all files. When it fails, nothing of them stays; when it returns, they are complete but may have names that
/// are not durable yet.
pub(crate) fn write(
    plan: &Plan<'_>,
    files: &[OutputFile],
    pieces: &[Piece],
    framing: &dyn Framing,
    store: &dyn Store,
    options: &OutputOptions,
) -> Result<Vec<Checksums>> {
    options.control.expect(pieces.iter().map(|p| p.data).sum());
    if options.sync {
        options.control.expect_sync(files.iter().map(|file| file.length).sum());
    }
    let mut writers: Vec<Box<dyn Writer>> = Vec::with_capacity(files.len());
    for file in files {
        let length = WriteOptions::with_length(file.length);
        match store.create_writer(&file.name, &length).doing(|| format!("creating {}", file.name)) {
            Ok(writer) => writers.push(writer),
            Err(error) => {
                writers.into_iter().for_each(Writer::abort);
                return Err(error);
            }
        }
    }
    let job = Job { plan, files, pieces, framing, writers: &writers, options };
    let done = match store.capabilities().ordered_writes {
        true => job.in_order(),
        false => job.in_any_order(),
    };
    let sums = match done {
        Ok(sums) => sums,
        Err(error) => {
            writers.into_iter().for_each(Writer::abort);
            return Err(error);
        }
    };
    let finished: Vec<Result<()>> = Workers::normal().run(|| {
        let finish = |(writer, file): (Box<dyn Writer>, &OutputFile)| {
            writer.finish(options.sync).doing(|| format!("finishing {}", file.name))?;
            if options.sync {
                options.control.advance_sync(file.length);
            }
            Ok(())
        };
        writers.into_par_iter().zip(files).with_max_len(1).map(finish).collect()
    })?;
    match finished.into_iter().find_map(Result::err) {
        None => Ok(sums),
        Some(error) => {
            discard(files.iter().map(|f| f.name.as_str()), store);
            Err(error)
        }
    }
}

struct Job<'j, 'p> {
    plan: &'j Plan<'p>,
    files: &'j [OutputFile],
    pieces: &'j [Piece],
    framing: &'j dyn Framing,
    writers: &'j [Box<dyn Writer>],
    options: &'j OutputOptions,
}

impl Job<'_, '_> {
    fn in_any_order(&self) -> Result<Vec<Checksums>> {
        let batches = self.batches();
        let sums = self.options.readers.run(|| {
            batches.par_iter().with_max_len(1).map(|batch| self.batch(batch)).collect::<Result<Vec<Vec<(usize, Checksums)>>>>()
        })??;
        let sums = self.sorted(sums.into_iter().flatten());
        for (number, file) in self.files.iter().enumerate() {
            if !file.lead.is_empty() {
                self.put(number, 0, &[IoSlice::new(&file.lead)])?;
            }
            if let Some((at, bytes)) = self.framing.ending(number, &sums)? {
                self.put(number, at, &[IoSlice::new(&bytes)])?;
            }
        }
        Ok(sums)
    }

    /// Each file from front to back.
    fn in_order(&self) -> Result<Vec<Checksums>> {
        let mut by_file: Vec<Vec<usize>> = vec![Vec::new(); self.files.len()];
        let mut order: Vec<usize> = (0..self.pieces.len()).collect();
        order.sort_by_key(|&i| (self.pieces[i].file, self.pieces[i].offset));
        order.into_iter().for_each(|i| by_file[self.pieces[i].file].push(i));
        let all = self.options.readers.run(|| {
            let one = |(number, pieces): (usize, &Vec<usize>)| -> Result<Vec<(usize, Checksums)>> {
                let lead = &self.files[number].lead;
                if !lead.is_empty() {
                    self.put(number, 0, &[IoSlice::new(lead)])?;
                }
                let mut sums = vec![Checksums::ZERO; self.pieces.len()];
                let mut own = Vec::with_capacity(pieces.len());
                for &i in pieces {
                    let sum = self.large(i)?;
                    sums[i] = sum;
                    own.push((i, sum));
                }
                if let Some((at, bytes)) = self.framing.ending(number, &sums)? {
                    self.put(number, at, &[IoSlice::new(&bytes)])?;
                }
                Ok(own)
            };
            by_file.par_iter().enumerate().with_max_len(1).map(one).collect::<Result<Vec<_>>>()
        })??;
        Ok(self.sorted(all.into_iter().flatten()))
    }

    fn sorted(&self, found: impl Iterator<Item = (usize, Checksums)>) -> Vec<Checksums> {
        let mut sums = vec![Checksums::ZERO; self.pieces.len()];
        found.for_each(|(i, sum)| sums[i] = sum);
        sums
    }

    /// Neighbouring small pieces together, large ones alone and first.
    fn batches(&self) -> Vec<Vec<usize>> {
        let mut order: Vec<usize> = (0..self.pieces.len()).collect();
        order.sort_by_key(|&i| (self.pieces[i].file, self.pieces[i].offset));
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let (mut end, mut bytes) = ((usize::MAX, 0), 0);
        for i in order {
            let piece = &self.pieces[i];
            let fits = end == (piece.file, piece.offset) && bytes + piece.length <= BATCH;
            bytes = if fits { bytes } else { 0 } + piece.length;
            end = (piece.file, piece.offset + piece.length);
            match batches.last_mut().filter(|_| fits) {
                Some(batch) => batch.push(i),
                None => batches.push(vec![i]),
            }
        }
        batches
    }

    fn batch(&self, batch: &[usize]) -> Result<Vec<(usize, Checksums)>> {
        self.options.control.check("writing")?;
        let first = &self.pieces[batch[0]];
        if batch.len() == 1 && first.length > BATCH {
            return Ok(vec![(batch[0], self.large(batch[0])?)]);
        }
        let total: u64 = batch.iter().map(|&i| self.pieces[i].length).sum();
        let mut buffer: Vec<u8> = Vec::with_capacity(total as usize);
        let mut all = Vec::with_capacity(batch.len());
        for &i in batch {
            let piece = &self.pieces[i];
            buffer.extend_from_slice(&self.framing.head(i)?);
            let start = buffer.len();
            buffer.resize(start + piece.data as usize, 0);
            if piece.data > 0 {
                (self.plan.open)(piece.tensor, &piece.region)?.fill(&mut buffer[start..])?;
            }
            let sums = if self.framing.sums() { Checksums::of(&buffer[start..]) } else { Checksums::ZERO };
            buffer.extend_from_slice(&self.framing.tail(i, sums)?);
            self.options.control.advance(piece.data);
            all.push((i, sums));
        }
        if buffer.len() as u64 != total {
            return Err(Error::internal("a piece has another length than was planned"));
        }
        self.put(first.file, first.offset, &[IoSlice::new(&buffer)])?;
        Ok(all)
    }

    /// A piece in blocks.
    fn large(&self, i: usize) -> Result<Checksums> {
        let piece = &self.pieces[i];
        let mut stream = (self.plan.open)(piece.tensor, &piece.region)?;
        let mut summer = self.framing.sums().then(ChecksumBuilder::new);
        let head = self.framing.head(i)?;
        self.put(piece.file, piece.offset, &[IoSlice::new(&head)])?;
        let data_at = piece.offset + head.len() as u64;
        let mut left = piece.data;
        let mut fill = |block: &mut Vec<u8>| -> Result<bool> {
            self.options.control.check("writing")?;
            block.resize(left.min(BLOCK as u64) as usize, 0);
            stream.fill(block)?;
            if let Some(summer) = &mut summer {
                summer.update(block);
            }
            left -= block.len() as u64;
            Ok(!block.is_empty())
        };
        let mut at = data_at;
        let mut drain = |block: &[u8]| -> Result<()> {
            self.put(piece.file, at, &[IoSlice::new(block)])?;
            at += block.len() as u64;
            self.options.control.advance(block.len() as u64);
            Ok(())
        };
        if piece.data >= PIPELINED {
            pipelined(fill, drain)?;
        } else {
            let mut block = Vec::new();
            while fill(&mut block)? {
                drain(&block)?;
            }
        }
        let sums = summer.map_or(Checksums::ZERO, ChecksumBuilder::finish);
        let tail = self.framing.tail(i, sums)?;
        self.put(piece.file, data_at + piece.data, &[IoSlice::new(&tail)])?;
        Ok(sums)
    }

    fn put(&self, file: usize, at: u64, parts: &[IoSlice<'_>]) -> Result<()> {
        if parts.iter().all(|part| part.is_empty()) {
            return Ok(());
        }
        let writer = &self.writers[file];
        writer.write_at(at, parts).doing(|| format!("writing {}", writer.path()))
    }
}

/// Drains each block on a thread of its own while the next is filled. Three blocks go round.
fn pipelined(
    mut fill: impl FnMut(&mut Vec<u8>) -> Result<bool>,
    mut drain: impl FnMut(&[u8]) -> Result<()> + Send,
) -> Result<()> {
    let (full, to_drain) = sync_channel::<Vec<u8>>(1);
    let (empty, to_fill) = channel::<Vec<u8>>();
    std::thread::scope(|scope| {
        let drained = scope.spawn(move || -> Result<()> {
            for block in to_drain {
                drain(&block)?;
                // Nobody fills any more once everything is read.
                let _ = empty.send(block);
            }
            Ok(())
        });
        let mut fresh = 3;
        let filled = loop {
            let mut block = match to_fill.try_recv() {
                Ok(block) => block,
                Err(_) if fresh > 0 => {
                    fresh -= 1;
                    Vec::new()
                }
                Err(_) => match to_fill.recv() {
                    Ok(block) => block,
                    Err(_) => break Ok(()),
                },
            };
            match fill(&mut block) {
                Ok(true) if full.send(block).is_ok() => {}
                Ok(_) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        drop(full);
        let drained = drained.join().unwrap_or_else(|_| Err(Error::internal("the thread that writes panicked")));
        filled.and(drained)
    })
}
