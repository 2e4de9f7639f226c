//! Writing one rank's records: batches of neighbouring records, positioned, in parallel, checksummed as they pass.

use std::io::IoSlice;

use rayon::prelude::*;
use reshard_formats::RecordFrame;
use reshard_formats::own::{
    ChecksumBuilder, Checksums, FileIndexRef, IndexedRecordRef, KeyEntry, OffsetsAndSizes, OwnFileError, RecordChecksums,
};
use reshard_storage::{Store, WriteOptions, Writer};

use super::SaveOptions;
use super::jobs::{Jobs, TensorJob};
use super::prepare::Prepared;
use crate::commit::discard;
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::data_file;
use crate::packed::Compression;
use crate::packed::write::{Appending, Packer};
use crate::plan::files::Placed;
use crate::workers::Workers;

/// Records smaller than this are gathered in a buffer and written together.
const SMALL: u64 = 512 << 10;
/// A batch of small records ends when it has this many bytes.
const BATCH: u64 = 2 << 20;

/// What one rank wrote.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// Name and length of every file.
    pub(crate) files: Vec<(String, u64)>,
    /// In the order of the jobs.
    pub(crate) tensors: Vec<Option<Checksums>>,
    /// Where compressed records came to lie, which nobody can plan; else they are where they were planned.
    pub(crate) places: Option<Vec<Placed>>,
    /// Length and checksums in the order of the jobs.
    pub(crate) values: Vec<(u64, Option<Checksums>)>,
}

/// Writes all jobs and makes them durable. On an error nothing of it stays.
pub(crate) fn write(
    jobs: &Jobs<'_>,
    prepared: &Prepared,
    store: &dyn Store,
    options: &SaveOptions,
    workers: &Workers,
) -> Result<Written> {
    let (written, unsynced) =
        Writing::open(jobs, prepared, store, options)?.fill(jobs, 0..jobs.tensors.len(), prepared, store, options, workers)?;
    unsynced.finish(store, options, workers).map(|()| written)
}

/// The files of one rank while they are being written.
pub(crate) struct Writing {
    files: Vec<File>,
    writers: Vec<Box<dyn Writer>>,
    sums: Vec<Option<Checksums>>,
    /// Where each record lies; of compressed ones only those that were written.
    places: Vec<Placed>,
}

/// One file to write.
struct File {
    name: String,
    /// Positions of its tensor jobs.
    tensors: Vec<usize>,
    /// Whether the values go here.
    values: bool,
    /// Where the tensor records end.
    end: u64,
    length: u64,
}

impl Writing {
    /// Creates the files.
    pub(crate) fn open(jobs: &Jobs<'_>, prepared: &Prepared, store: &dyn Store, options: &SaveOptions) -> Result<Writing> {
        let save_id = prepared.decision.named.then_some(prepared.decision.save_id.as_str());
        let mut files: Vec<File> = (0..jobs.ends.len())
            .map(|number| File {
                name: data_file(prepared.rank, number as u32, save_id),
                tensors: Vec::new(),
                values: number == 0 && !jobs.values.is_empty(),
                end: jobs.ends[number],
                length: 0,
            })
            .collect();
        for (i, job) in jobs.tensors.iter().enumerate() {
            files[job.placed.file as usize].tensors.push(i);
        }
        files.retain(|file| file.values || !file.tensors.is_empty());
        let count = files.len() as u32;
        let places: Vec<Placed> = jobs.tensors.iter().map(|job| job.placed).collect();
        for file in &mut files {
            let values: u64 = if file.values { jobs.values.iter().map(|v| v.bytes.len() as u64).sum() } else { 0 };
            if options.compression.is_some() {
                file.end = 0;
                continue;
            }
            file.length =
                file.end + values + file.with_index(jobs, &places, prepared, count, options, None, |i| i.encoded_len())?;
        }
        let bytes = jobs.tensors.iter().map(|j| j.placed.data_length).sum();
        options.control.expect(bytes);
        if options.sync {
            options.control.expect_sync(bytes);
        }
        let mut writing = Writing { files, writers: Vec::new(), sums: vec![None; jobs.tensors.len()], places };
        for i in 0..writing.files.len() {
            let file = &writing.files[i];
            let length = match options.compression {
                None => WriteOptions::with_length(file.length),
                Some(_) => WriteOptions::default(),
            };
            match store.create_writer(&file.name, &length).doing(|| format!("creating {}", file.name)) {
                Ok(writer) => writing.writers.push(writer),
                Err(error) => {
                    writing.abort();
                    return Err(error);
                }
            }
        }
        Ok(writing)
    }

    /// Writes the tensor jobs at these positions. Stores that take bytes only in order must be given jobs in order.
    pub(crate) fn put(
        &mut self,
        jobs: &Jobs<'_>,
        wanted: std::ops::Range<usize>,
        store: &dyn Store,
        options: &SaveOptions,
        workers: &Workers,
    ) -> Result<()> {
        if let Some(compression) = options.compression {
            return self.put_packed(jobs, wanted, compression, options, workers);
        }
        let ordered = store.capabilities().ordered_writes;
        let (files, writers) = (&self.files, &self.writers);
        let written: Vec<Vec<(usize, Option<Checksums>)>> = workers.run(|| {
            files
                .par_iter()
                .zip(writers)
                .map(|(file, writer)| {
                    let first = file.tensors.partition_point(|&job| job < wanted.start);
                    let last = file.tensors.partition_point(|&job| job < wanted.end);
                    let tensors = &file.tensors[first..last];
                    let batches = batches(jobs, tensors);
                    let write =
                        |buffer: &mut Vec<u8>, batch: &[usize]| write_batch(jobs, batch, writer.as_ref(), options, buffer);
                    // Buffers are used again: fresh memory costs more than what is copied into it.
                    let sums: Vec<Vec<Option<Checksums>>> = match ordered {
                        true => {
                            let mut buffer = Vec::new();
                            batches.iter().map(|batch| write(&mut buffer, batch)).collect::<Result<_>>()?
                        }
                        false => {
                            batches.par_iter().map_init(Vec::new, |buffer, batch| write(buffer, batch)).collect::<Result<_>>()?
                        }
                    };
                    Ok(tensors.iter().copied().zip(sums.into_iter().flatten()).collect())
                })
                .collect::<Result<_>>()
        })??;
        for (job, sums) in written.into_iter().flatten() {
            self.sums[job] = sums;
        }
        Ok(())
    }

    /// Appends the tensor jobs at these positions to their files, compressed.
    fn put_packed(
        &mut self,
        jobs: &Jobs<'_>,
        wanted: std::ops::Range<usize>,
        compression: Compression,
        options: &SaveOptions,
        workers: &Workers,
    ) -> Result<()> {
        let (files, writers) = (&mut self.files, &self.writers);
        let written: Vec<Vec<(usize, RecordChecksums)>> = workers.run(|| {
            files
                .par_iter_mut()
                .zip(writers)
                .with_max_len(1)
                .map(|(file, writer)| {
                    let first = file.tensors.partition_point(|&job| job < wanted.start);
                    let last = file.tensors.partition_point(|&job| job < wanted.end);
                    let mut packer = Packer::new(compression)?;
                    let mut appending = Appending { writer: writer.as_ref(), at: file.end, checksums: options.checksums };
                    let tensors = &file.tensors[first..last];
                    let one = |&i: &usize| Ok((i, write_packed(&jobs.tensors[i], &mut packer, &mut appending, options)?));
                    let written = tensors.iter().map(one).collect::<Result<_>>()?;
                    file.end = appending.at;
                    Ok(written)
                })
                .collect::<Result<_>>()
        })??;
        for (job, sum) in written.into_iter().flatten() {
            let RecordChecksums { offset, length, data_offset, data_length, sums } = sum;
            self.places[job] = Placed { offset, length, data_offset, data_length, ..self.places[job] };
            self.sums[job] = sums;
        }
        Ok(())
    }

    /// Writes the tensor jobs at these positions and everything else; see [`Writing::put`] and [`Writing::complete`].
    pub(crate) fn fill(
        mut self,
        jobs: &Jobs<'_>,
        wanted: std::ops::Range<usize>,
        prepared: &Prepared,
        store: &dyn Store,
        options: &SaveOptions,
        workers: &Workers,
    ) -> Result<(Written, Unsynced)> {
        match self.put(jobs, wanted, store, options, workers) {
            Ok(()) => self.complete(jobs, prepared, options),
            Err(error) => {
                self.abort();
                Err(error)
            }
        }
    }

    /// Writes values and indexes: all bytes are given to the store then, and none need be durable. On an error nothing stays.
    pub(crate) fn complete(mut self, jobs: &Jobs<'_>, prepared: &Prepared, options: &SaveOptions) -> Result<(Written, Unsynced)> {
        if let Err(error) = self.put_ends(jobs, prepared, options) {
            self.abort();
            return Err(error);
        }
        let values =
            jobs.values.iter().map(|v| (v.bytes.len() as u64, options.checksums.then(|| Checksums::of(&v.bytes)))).collect();
        let places = options.compression.map(|_| self.places);
        let bytes = |file: &File| file.tensors.iter().map(|&job| jobs.tensors[job].placed.data_length).sum();
        let writers = self.files.iter().zip(self.writers);
        let writers = writers.map(|(file, writer)| ToClose { name: file.name.clone(), writer, bytes: bytes(file) }).collect();
        let files = self.files.into_iter().map(|f| (f.name, f.length)).collect();
        let unsynced = Unsynced { writers };
        Ok((Written { files, tensors: self.sums, places, values }, unsynced))
    }

    fn put_ends(&mut self, jobs: &Jobs<'_>, prepared: &Prepared, options: &SaveOptions) -> Result<()> {
        options.control.check("writing")?;
        let count = self.files.len() as u32;
        for (file, writer) in self.files.iter_mut().zip(&self.writers) {
            let mut at = file.end;
            let mut end = Vec::new();
            if file.values {
                jobs.values.iter().for_each(|value| end.extend_from_slice(&value.bytes));
            }
            let sums = Some(self.sums.as_slice());
            let index = file.with_index(jobs, &self.places, prepared, count, options, sums, |index| index.encode())?;
            writer
                .write_at(at, &[IoSlice::new(&end), IoSlice::new(&index)])
                .doing(|| format!("writing the end of {}", file.name))?;
            at += (end.len() + index.len()) as u64;
            debug_assert!(options.compression.is_some() || at == file.length);
            file.length = at;
        }
        Ok(())
    }

    /// Gives up and removes what was written.
    pub(crate) fn abort(self) {
        self.writers.into_iter().for_each(|writer| writer.abort());
    }
}

/// Files that have all their bytes, and are not yet closed and synced.
pub(crate) struct Unsynced {
    writers: Vec<ToClose>,
}

struct ToClose {
    name: String,
    writer: Box<dyn Writer>,
    /// Of tensors: what its sync counts for in the progress of the save.
    bytes: u64,
}

impl Unsynced {
    /// One more file, whole.
    pub(crate) fn add(&mut self, name: &str, bytes: &[u8], store: &dyn Store) -> Result<()> {
        let writing = || format!("writing {name}");
        let writer = store.create_writer(name, &WriteOptions::with_length(bytes.len() as u64)).doing(writing)?;
        match writer.write_at(0, &[IoSlice::new(bytes)]).doing(writing) {
            Ok(()) => {
                self.writers.push(ToClose { name: name.to_owned(), writer, bytes: 0 });
                Ok(())
            }
            Err(error) => {
                writer.abort();
                Err(error)
            }
        }
    }

    /// Closes and syncs all of them, and the folder. On an error nothing stays.
    pub(crate) fn finish(self, store: &dyn Store, options: &SaveOptions, workers: &Workers) -> Result<()> {
        let names: Vec<String> = self.writers.iter().map(|file| file.name.clone()).collect();
        // Every file is closed even when one fails, so that nothing stays open or half synced.
        let finished: Vec<Result<()>> = workers.run(|| {
            let close = |ToClose { name, writer, bytes }: ToClose| -> Result<()> {
                writer.finish(options.sync).doing(|| format!("closing {name}"))?;
                if options.sync {
                    options.control.advance_sync(bytes);
                }
                Ok(())
            };
            self.writers.into_par_iter().map(close).collect()
        })?;
        let synced = finished.into_iter().collect::<Result<()>>().and_then(|()| match options.sync {
            true => store.sync().doing(|| "making the data files' names durable".into()),
            false => Ok(()),
        });
        if synced.is_err() {
            discard(names.iter().map(String::as_str), store);
        }
        synced
    }

    /// Gives up and removes what was written.
    pub(crate) fn abort(self) {
        self.writers.into_iter().for_each(|file| file.writer.abort());
    }
}

/// Neighbouring small records together, large ones alone.
fn batches<'j>(jobs: &Jobs<'_>, tensors: &'j [usize]) -> Vec<&'j [usize]> {
    let mut batches = Vec::new();
    let mut start = 0;
    let mut bytes = 0;
    for (i, &job) in tensors.iter().enumerate() {
        let length = jobs.tensors[job].placed.length;
        if i > start && (bytes + length > BATCH || length > SMALL) {
            batches.push(&tensors[start..i]);
            start = i;
            bytes = 0;
        }
        bytes += length;
    }
    if start < tensors.len() {
        batches.push(&tensors[start..]);
    }
    batches
}

fn write_batch(
    jobs: &Jobs<'_>,
    batch: &[usize],
    writer: &dyn Writer,
    options: &SaveOptions,
    buffer: &mut Vec<u8>,
) -> Result<Vec<Option<Checksums>>> {
    options.control.check("writing")?;
    let first = &jobs.tensors[batch[0]];
    if batch.len() == 1 && first.placed.length > SMALL {
        return Ok(vec![write_large(first, writer, options)?]);
    }
    let length: u64 = batch.iter().map(|&i| jobs.tensors[i].placed.length).sum();
    buffer.clear();
    buffer.reserve(length as usize);
    let mut all = Vec::with_capacity(batch.len());
    // Neighbours are often alike, and then so are their frames.
    let mut last: Option<(&TensorJob<'_>, RecordFrame)> = None;
    for &i in batch {
        let job = &jobs.tensors[i];
        let frame = match last.take().filter(|(other, _)| job.is_framed_like(other)) {
            Some((_, frame)) => frame,
            None => job.frame()?,
        };
        let frame = &last.insert((job, frame)).1;
        buffer.extend_from_slice(&frame.head);
        let start = buffer.len();
        job.each_block(|bytes| buffer.extend_from_slice(bytes))?;
        let sums = options.checksums.then(|| Checksums::of(&buffer[start..]));
        frame.push_tail(sums.map_or(0, Checksums::crc32), buffer);
        all.push(sums);
        options.control.advance(job.placed.data_length);
    }
    writer.write_at(first.placed.offset, &[IoSlice::new(buffer)]).doing(|| format!("writing records to {}", writer.path()))?;
    Ok(all)
}

fn write_large(job: &TensorJob<'_>, writer: &dyn Writer, options: &SaveOptions) -> Result<Option<Checksums>> {
    let frame = job.frame()?;
    let mut summer = options.checksums.then(ChecksumBuilder::new);
    let mut at = job.placed.offset;
    let mut left = job.placed.data_length;
    let put =
        |at: u64, parts: &[IoSlice<'_>]| writer.write_at(at, parts).doing(|| format!("writing a record to {}", writer.path()));
    let mut head = Some(&frame.head);
    job.try_each_block(|block| {
        options.control.check("writing")?;
        if let Some(summer) = &mut summer {
            summer.update(block);
        }
        left -= block.len() as u64;
        let head = head.take().map_or(&[][..], Vec::as_slice);
        put(at, &[IoSlice::new(head), IoSlice::new(block)])?;
        at += (head.len() + block.len()) as u64;
        options.control.advance(block.len() as u64);
        Ok(())
    })?;
    let sums = summer.map(ChecksumBuilder::finish);
    let tail = frame.tail(sums.map_or(0, Checksums::crc32));
    put(at, &[IoSlice::new(&tail)])?;
    Ok(sums)
}

/// A record as it would be, compressed.
fn write_packed(
    job: &TensorJob<'_>,
    packer: &mut Packer,
    appending: &mut Appending<'_>,
    options: &SaveOptions,
) -> Result<RecordChecksums> {
    let frame = job.frame()?;
    let mut feed = |push: &mut dyn FnMut(&[u8]) -> Result<()>| -> Result<()> {
        push(&frame.head)?;
        let mut crc = crc32fast::Hasher::new();
        job.try_each_block(|block| {
            options.control.check("writing")?;
            crc.update(block);
            push(block)?;
            options.control.advance(block.len() as u64);
            Ok(())
        })?;
        push(&frame.tail(crc.finalize()))
    };
    appending.record(packer, frame.total_len(), &mut feed)
}

impl File {
    /// Gives the index that ends this file; without checksums it has the same length.
    #[allow(clippy::too_many_arguments)]
    fn with_index<T>(
        &self,
        jobs: &Jobs<'_>,
        places: &[Placed],
        prepared: &Prepared,
        count: u32,
        options: &SaveOptions,
        sums: Option<&[Option<Checksums>]>,
        give: impl FnOnce(&FileIndexRef<'_>) -> std::result::Result<T, OwnFileError>,
    ) -> Result<T> {
        let zero = options.checksums.then_some(Checksums::ZERO);
        let values = if self.values { jobs.values.as_slice() } else { &[] };
        let mut table: Vec<&KeyEntry> = Vec::new();
        let mut last: Option<u32> = None;
        let mut position = |local: u32| -> u32 {
            if last != Some(local) {
                table.push(&prepared.table[local as usize]);
                last = Some(local);
            }
            table.len() as u32 - 1
        };
        let mut records = Vec::with_capacity(self.tensors.len() + values.len());
        for &i in &self.tensors {
            let job = &jobs.tensors[i];
            let region = OffsetsAndSizes(&job.global_offsets, &job.sizes);
            let Placed { offset, length, data_offset, data_length, .. } = places[i];
            let sum = RecordChecksums { offset, length, data_offset, data_length, sums: sums.map_or(zero, |sums| sums[i]) };
            records.push(IndexedRecordRef { key: position(job.local), region: Some(region), sum });
        }
        let mut at = self.end;
        for value in values {
            let length = value.bytes.len() as u64;
            let sums = options.checksums.then(|| if sums.is_some() { Checksums::of(&value.bytes) } else { Checksums::ZERO });
            let sum = RecordChecksums::of_value(at, length, sums);
            let region = value.region.as_ref().map(|(offsets, sizes)| OffsetsAndSizes(offsets, sizes));
            records.push(IndexedRecordRef { key: position(value.local), region, sum });
            at += length;
        }
        let (rank, ranks) = (prepared.rank as u32, prepared.ranks as u32);
        let index = FileIndexRef { save_id: &prepared.decision.save_id, rank, ranks, files: count, table, records };
        give(&index).map_err(|e| Error::internal(format!("the index of {} cannot be written: {e}", self.name)))
    }
}
