//! Writing a DCP folder whose tensors' records are compressed: how long they are is known when they are written, so each file is
//! written from front to back, several files at once.

use std::io::IoSlice;

use rayon::prelude::*;
use reshard_formats::own::{Checksums, RecordChecksums};
use reshard_storage::{Store, WriteOptions, Writer};

use super::Written;
use super::dcp::{DcpFraming, RankFile, publish};
use super::output::{Framing, OutputFile, OutputOptions, Piece, Plan};
use crate::commit::{Commit, discard};
use crate::error::{Result, StorageContext};
use crate::packed::Compression;
use crate::packed::write::{Appending, Packer};
use crate::plan::files::frame;
use crate::stream::for_each_block;
use crate::workers::Workers;

/// A folder to write.
pub(super) struct PackedFolder<'f> {
    pub(super) ranks: usize,
    pub(super) files: Vec<RankFile>,
    pub(super) pieces: Vec<Piece>,
    pub(super) compression: Compression,
    pub(super) commit: Commit,
    pub(super) store: &'f dyn Store,
}

/// Writes and publishes.
pub(super) fn write_packed(plan: &Plan<'_>, folder: PackedFolder<'_>, options: &OutputOptions) -> Result<Written> {
    let PackedFolder { ranks, mut files, mut pieces, compression, commit, store } = folder;
    let bytes = pieces.iter().map(|p| p.data).sum();
    options.control.expect(bytes);
    let shares: Vec<u64> = files.iter().map(|file| file.pieces.iter().map(|&i| pieces[i].data).sum()).collect();
    if options.sync {
        options.control.expect_sync(bytes);
    }
    let mut writers: Vec<Box<dyn Writer>> = Vec::with_capacity(files.len());
    for file in &files {
        match store.create_writer(&file.name, &WriteOptions::default()).doing(|| format!("creating {}", file.name)) {
            Ok(writer) => writers.push(writer),
            Err(error) => {
                writers.into_iter().for_each(Writer::abort);
                return Err(error);
            }
        }
    }
    let save_id = commit.save_id.clone();
    let mut put = || -> Result<(Vec<OutputFile>, Vec<Checksums>)> {
        let records = options.readers.run(|| {
            let writers: Vec<&dyn Writer> = writers.iter().map(AsRef::as_ref).collect();
            let one = |(file, writer): (&RankFile, &&dyn Writer)| append(plan, &pieces, file, *writer, compression, options);
            files.par_iter().zip(&writers).with_max_len(1).map(one).collect::<Result<Vec<_>>>()
        })??;
        let mut sums = vec![Checksums::ZERO; pieces.len()];
        for (file, records) in files.iter_mut().zip(records) {
            file.end = 0;
            for (&i, record) in file.pieces.iter().zip(records) {
                let piece = &mut pieces[i];
                (piece.offset, piece.head, piece.data, piece.length) = (record.offset, 0, record.length, record.length);
                sums[i] = record.sums.unwrap_or(Checksums::ZERO);
                file.end = record.offset + record.length;
            }
        }
        let framing = DcpFraming { plan, pieces: &pieces, files: &files, save_id: &save_id, ranks };
        let mut outputs = Vec::with_capacity(files.len());
        for (number, (file, writer)) in files.iter().zip(&writers).enumerate() {
            let (at, ending) = framing.ending(number, &sums)?.unwrap_or((file.end, Vec::new()));
            writer.write_at(at, &[IoSlice::new(&ending)]).doing(|| format!("writing {}", file.name))?;
            outputs.push(OutputFile { name: file.name.clone(), length: at + ending.len() as u64, lead: Vec::new() });
        }
        Ok((outputs, sums))
    };
    let (outputs, sums) = match put() {
        Ok(done) => done,
        Err(error) => {
            writers.into_iter().for_each(Writer::abort);
            return Err(error);
        }
    };
    let finished: Vec<Result<()>> = Workers::normal().run(|| {
        let finish = |((writer, file), share): ((Box<dyn Writer>, &OutputFile), &u64)| -> Result<()> {
            writer.finish(options.sync).doing(|| format!("finishing {}", file.name))?;
            if options.sync {
                options.control.advance_sync(*share);
            }
            Ok(())
        };
        writers.into_par_iter().zip(&outputs).zip(&shares).with_max_len(1).map(finish).collect()
    })?;
    if let Some(error) = finished.into_iter().find_map(Result::err) {
        discard(outputs.iter().map(|f| f.name.as_str()), store);
        return Err(error);
    }
    let framing = DcpFraming { plan, pieces: &pieces, files: &files, save_id: &save_id, ranks };
    match publish(commit, &framing, &outputs, &sums, store, options) {
        Ok(warnings) => Ok(Written { files: outputs.into_iter().map(|file| file.name).collect(), bytes, warnings }),
        Err(failed) => Err(failed.discarding(outputs.iter().map(|f| f.name.as_str()), store)),
    }
}

/// The records of one file.
fn append(
    plan: &Plan<'_>,
    pieces: &[Piece],
    file: &RankFile,
    writer: &dyn Writer,
    compression: Compression,
    options: &OutputOptions,
) -> Result<Vec<RecordChecksums>> {
    let mut packer = Packer::new(compression)?;
    let mut appending = Appending { writer, at: 0, checksums: true };
    let mut records = Vec::with_capacity(file.pieces.len());
    for &i in &file.pieces {
        options.control.check("writing")?;
        let piece = &pieces[i];
        let tensor = &plan.tensors[piece.tensor];
        let frame = frame(tensor.dtype, tensor.requires_grad, piece.region.sizes())?;
        let mut feed = |push: &mut dyn FnMut(&[u8]) -> Result<()>| -> Result<()> {
            push(&frame.head)?;
            let mut crc = crc32fast::Hasher::new();
            if piece.data > 0 {
                let mut stream = (plan.open)(piece.tensor, &piece.region)?;
                for_each_block(stream.as_mut(), piece.data, |block| {
                    crc.update(block);
                    push(block)?;
                    options.control.advance(block.len() as u64);
                    options.control.check("writing")
                })?;
            }
            push(&frame.tail(crc.finalize()))
        };
        records.push(appending.record(&mut packer, frame.total_len(), &mut feed)?);
    }
    Ok(records)
}
