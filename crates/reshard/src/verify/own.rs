//! Our own data files, to the last byte.
//!
//! The index at a file's end says what the file holds. Records must follow each other without a gap from the first byte to
//! the index; each tensor record's frame is derived again from dtype and shape and compared; data is hashed.

use std::hash::Hasher;
use std::sync::Arc;

use reshard_formats::own::{Checksums, FileIndex, IndexedRecord, RecordChecksums};
use reshard_formats::{Content, DType, RecordError, TorchArchive};
use reshard_storage::Reader;
use twox_hash::XxHash3_64;

use super::{Gathered, Named, Severity, VerifyOptions, read};
use crate::checkpoint::Checkpoint;
use crate::error::{Result, chain};
use crate::plan::files::frame;

/// Records are read together until there are this many bytes.
const BATCH: u64 = 4 << 20;
/// Larger records are hashed in blocks of this size.
const BLOCK: u64 = 1 << 20;

/// A record to check.
#[derive(Debug)]
pub(super) struct Record {
    key: String,
    sum: RecordChecksums,
    /// Element type, gradient flag and shape; `None` for a value, or where nothing tells.
    tensor: Option<(DType, bool, Vec<u64>)>,
    /// Whether it is known to be a value.
    value: bool,
}

/// Neighbouring records of one file: the work of one thread.
#[derive(Debug)]
pub(super) struct Batch {
    file: u32,
    records: Vec<Record>,
}

/// What there is to check in a file of ours; `None` when it is not one.
pub(super) fn plan(
    checkpoint: &Checkpoint,
    file: u32,
    index: Option<&FileIndex>,
    named: &[Named<'_>],
    gathered: &mut Gathered,
) -> Result<Option<Vec<Batch>>> {
    let name = checkpoint.file_name(file);
    let reader = checkpoint.reader(file)?;
    let side = checkpoint.side.as_ref().and_then(|side| side.files.iter().find(|f| f.file == name));
    let mut records: Vec<Record> = match (index, side) {
        (Some(index), _) => index.records.iter().map(|r| indexed(index, r)).collect(),
        (None, Some(side)) => side.records.iter().map(|sum| summed(*sum, named)).collect(),
        (None, None) => return Ok(None),
    };
    for record in &mut records {
        // What went through transforms is looked at where they are undone.
        let known = named.binary_search_by_key(&record.sum.offset, |n| n.offset).ok();
        record.value &= known.is_none_or(|i| named[i].transform.is_none());
    }
    let mut at = 0;
    for record in &records {
        if record.sum.offset != at {
            let what = format!("{} bytes before this record belong to nothing", record.sum.offset.saturating_sub(at));
            gathered.error(Some(&record.key), name, Some(at), what);
        }
        at = record.sum.offset + record.sum.length;
    }
    if index.is_none() {
        agree(name, &records, named, gathered);
    }
    let mut batches: Vec<Batch> = Vec::new();
    let mut bytes = 0;
    for record in records {
        if record.sum.offset + record.sum.length > reader.len() {
            let what = format!("its record of {} bytes reaches past the file's end at {}", record.sum.length, reader.len());
            gathered.error(Some(&record.key), name, Some(record.sum.offset), what);
            continue;
        }
        let adjacent =
            batches.last().and_then(|b| b.records.last()).is_some_and(|l| l.sum.offset + l.sum.length == record.sum.offset);
        let fits = adjacent && bytes + record.sum.length <= BATCH;
        bytes = if fits { bytes } else { 0 } + record.sum.length;
        match batches.last_mut().filter(|_| fits) {
            Some(batch) => batch.records.push(record),
            None => batches.push(Batch { file, records: vec![record] }),
        }
    }
    Ok(Some(batches))
}

fn indexed(index: &FileIndex, record: &IndexedRecord) -> Record {
    let entry = &index.table[record.key as usize];
    let tensor = match (&entry.tensor, &record.region) {
        // A compressed record has no frame of its own.
        (Some(tensor), Some(region)) if !record.sum.is_packed_tensor() => {
            Some((tensor.dtype, tensor.requires_grad, region.sizes().to_vec()))
        }
        _ => None,
    };
    Record { key: entry.key.clone(), sum: record.sum, value: entry.tensor.is_none(), tensor }
}

/// A record of the sidecar, with what the metadata knows about it.
fn summed(sum: RecordChecksums, named: &[Named<'_>]) -> Record {
    let known = named.binary_search_by_key(&sum.offset, |n| n.offset).ok().map(|i| &named[i]);
    Record {
        key: known.map_or_else(|| "?".to_owned(), |n| n.key.to_owned()),
        sum,
        value: known.is_some_and(|n| n.tensor.is_none()),
        tensor: known
            .filter(|_| !sum.is_packed_tensor())
            .and_then(|n| n.tensor)
            .map(|(dtype, grad, shape)| (dtype, grad, shape.to_vec())),
    }
}

/// Everything that the metadata names must be in the sidecar; the index, where there is one, was compared before.
fn agree(name: &str, records: &[Record], named: &[Named<'_>], gathered: &mut Gathered) {
    for wanted in named {
        let found = records.binary_search_by_key(&wanted.offset, |r| r.sum.offset).ok().map(|i| &records[i]);
        if found.is_none_or(|found| found.sum.length != wanted.length) {
            let what = format!("the sidecar knows no record of {} bytes there", wanted.length);
            gathered.error(Some(wanted.key), name, Some(wanted.offset), what);
        }
    }
}

/// Checks one batch.
pub(super) fn check(checkpoint: &Checkpoint, batch: &Batch, options: &VerifyOptions) -> Result<Gathered> {
    options.control.check("verifying")?;
    let mut gathered = Gathered::default();
    let name = checkpoint.file_name(batch.file);
    let reader = checkpoint.reader(batch.file)?;
    let Some(first) = batch.records.first() else { return Ok(gathered) };
    let total: u64 = batch.records.iter().map(|r| r.sum.length).sum();
    gathered.bytes = total;
    if total > BATCH {
        check_large(reader, name, first, options, &mut gathered)?;
        return Ok(gathered);
    }
    let mut bytes = vec![0; total as usize];
    if let Err(what) = read(reader, first.sum.offset, &mut bytes) {
        gathered.error(Some(&first.key), name, Some(first.sum.offset), what);
        return Ok(gathered);
    }
    let mut at = 0;
    for record in &batch.records {
        let (sum, start) = (&record.sum, at);
        at += sum.length as usize;
        let whole = &bytes[start..at];
        let (from, to) = (sum.data_offset as usize, (sum.data_offset + sum.data_length) as usize);
        let data = &whole[from..to];
        verdict(name, record, XxHash3_64::oneshot(data), &mut gathered);
        frame_differs(name, record, &whole[..from], &whole[to..], &mut gathered);
        if record.value {
            decoded(name, record, whole, &mut gathered);
        }
    }
    options.control.advance(total);
    Ok(gathered)
}

fn check_large(
    reader: &Arc<dyn Reader>,
    name: &str,
    record: &Record,
    options: &VerifyOptions,
    gathered: &mut Gathered,
) -> Result<()> {
    let sum = &record.sum;
    let mut hasher = XxHash3_64::new();
    let mut buffer = vec![0; BLOCK as usize];
    let mut head = vec![0; sum.data_offset as usize];
    let tail_at = sum.data_offset + sum.data_length;
    let mut tail = vec![0; (sum.length - tail_at) as usize];
    let ends = read(reader, sum.offset, &mut head).and_then(|()| read(reader, sum.offset + tail_at, &mut tail));
    if let Err(what) = ends {
        gathered.error(Some(&record.key), name, Some(sum.offset), what);
        return Ok(());
    }
    let mut at = sum.offset + sum.data_offset;
    let end = at + sum.data_length;
    while at < end {
        options.control.check("verifying")?;
        let part = &mut buffer[..(end - at).min(BLOCK) as usize];
        if let Err(what) = read(reader, at, part) {
            gathered.error(Some(&record.key), name, Some(at), what);
            return Ok(());
        }
        hasher.write(part);
        at += part.len() as u64;
        options.control.advance(part.len() as u64);
    }
    verdict(name, record, hasher.finish(), gathered);
    frame_differs(name, record, &head, &tail, gathered);
    options.control.advance((head.len() + tail.len()) as u64);
    Ok(())
}

fn verdict(name: &str, record: &Record, actual: u64, gathered: &mut Gathered) {
    let Some(sums) = record.sum.sums else {
        gathered.unchecked += 1;
        return;
    };
    gathered.checked += 1;
    if sums.xxh3() != actual {
        let what = format!("the checksum of its data should be {:016x}, the bytes give {actual:016x}", sums.xxh3());
        gathered.wrong_checksum(Some(&record.key), name, record.sum.offset + record.sum.data_offset, what);
    }
}

/// A value's record must be one; what only its own library can read is fine, and what its checksum vouches for was written so.
fn decoded(name: &str, record: &Record, bytes: &[u8], gathered: &mut Gathered) {
    let content = TorchArchive::open(&bytes, 0, bytes.len() as u64).and_then(|archive| archive.content());
    match content {
        Ok(Content::Value(_)) => gathered.values += 1,
        Ok(_) | Err(RecordError::Unsupported { .. }) => {}
        Err(error) => {
            let severity = if record.sum.sums.is_some() { Severity::Warning } else { Severity::Error };
            gathered.push(severity, Some(&record.key), Some(name), Some(record.sum.offset), chain(&error));
        }
    }
}

/// The bytes around the data must be exactly what they were written as.
fn frame_differs(name: &str, record: &Record, head: &[u8], tail: &[u8], gathered: &mut Gathered) {
    let Some((dtype, grad, shape)) = &record.tensor else { return };
    let expected = match frame(*dtype, *grad, shape) {
        Ok(expected) => expected,
        Err(error) => {
            gathered.error(Some(&record.key), name, Some(record.sum.offset), error.to_string());
            return;
        }
    };
    let start = record.sum.offset;
    if let Some(at) = first_difference(head, &expected.head) {
        let what = "the bytes before its data are not what was written";
        gathered.error(Some(&record.key), name, Some(start + at), what);
    }
    let crc = record.sum.sums.map_or(0, Checksums::crc32);
    if let Some(at) = first_difference(tail, &expected.tail(crc)) {
        let what = "the bytes after its data are not what was written";
        gathered.error(Some(&record.key), name, Some(start + record.sum.data_offset + record.sum.data_length + at), what);
    }
}

/// Where two stretches of bytes differ first.
pub(super) fn first_difference(found: &[u8], expected: &[u8]) -> Option<u64> {
    if found == expected {
        return None;
    }
    let at = found.iter().zip(expected).position(|(a, b)| a != b);
    Some(at.unwrap_or_else(|| found.len().min(expected.len())) as u64)
}
