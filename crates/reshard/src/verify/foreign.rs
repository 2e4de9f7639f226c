//! Records that PyTorch wrote, by what their zip archives carry: the CRC-32 of every entry, and a frame without slack.

use std::collections::HashMap;

use rayon::prelude::*;
use reshard_formats::{Content, ReadAt, RecordError, TorchArchive};

use super::zip;
use super::{Gathered, Named, VerifyOptions, read};
use crate::checkpoint::{CatalogKind, Checkpoint, ChunkLocation, StoredFile};
use crate::error::{Result, chain};
use crate::workers::Workers;

/// Records are read together until there are this many bytes.
const BATCH: u64 = 4 << 20;

/// Neighbouring records of one file: the work of one thread.
#[derive(Debug)]
pub(super) struct Batch<'c> {
    file: u32,
    /// What the keys at each place say of it: mostly one key.
    records: Vec<Vec<Named<'c>>>,
}

/// The records of a file, each place once however many keys name it, and none that overlaps another, which was found before:
/// what is read is no more than the file.
pub(super) fn batches<'c>(file: u32, named: &[Named<'c>]) -> Vec<Batch<'c>> {
    let mut batches: Vec<Batch<'c>> = Vec::new();
    let mut start = 0;
    let mut last: Option<(u64, u64)> = None;
    // What is compressed is no archive.
    for record in named.iter().filter(|record| record.transform.is_none()) {
        let end = record.offset.saturating_add(record.length);
        let same = last.is_some_and(|(offset, last_end)| (offset, last_end) == (record.offset, end));
        if let Some(keys) = batches.last_mut().and_then(|batch| batch.records.last_mut()).filter(|_| same) {
            keys.push(record.clone());
            continue;
        }
        if last.is_some_and(|(_, last_end)| record.offset < last_end) {
            continue;
        }
        last = Some((record.offset, end));
        let fits = batches.last().is_some() && end - start <= BATCH;
        match batches.last_mut().filter(|_| fits) {
            Some(batch) => batch.records.push(vec![record.clone()]),
            None => {
                start = record.offset;
                batches.push(Batch { file, records: vec![vec![record.clone()]] });
            }
        }
    }
    batches
}

/// Bytes of a file that belong to no record that the metadata names: nothing reads them, so nothing checks them.
pub(super) fn slack(name: &str, size: u64, named: &[Named<'_>], gathered: &mut Gathered) {
    let mut at = 0u64;
    let mut slack = 0u64;
    let mut first = None;
    let ends = named.iter().map(|r| (r.offset, r.offset.saturating_add(r.length)));
    for (start, end) in ends.chain(std::iter::once((size, size))) {
        if start > at && start <= size {
            slack += start - at;
            first.get_or_insert(at);
        }
        at = at.max(end);
    }
    if slack > 0 {
        gathered.warning(None, name, first, format!("{slack} bytes belong to no record"));
    }
}

pub(super) fn check_all(checkpoint: &Checkpoint, batches: &[Batch<'_>], options: &VerifyOptions) -> Result<Gathered> {
    batches
        .par_iter()
        .with_max_len(1)
        .map(|batch| check(checkpoint, batch, options))
        .try_reduce(Gathered::default, |a, b| Ok(a.join(b)))
}

fn check(checkpoint: &Checkpoint, batch: &Batch<'_>, options: &VerifyOptions) -> Result<Gathered> {
    options.control.check("verifying")?;
    let mut gathered = Gathered::default();
    let name = checkpoint.file_name(batch.file);
    let reader = checkpoint.reader(batch.file)?;
    let whole = StoredFile(reader.as_ref());
    // What reaches past the file's end was found before.
    let inside = |r: &&Named<'_>| r.offset.checked_add(r.length).is_some_and(|end| end <= reader.len());
    let places: Vec<&[Named<'_>]> =
        batch.records.iter().filter(|keys| keys.first().filter(inside).is_some()).map(Vec::as_slice).collect();
    let ends = (places.first().and_then(|keys| keys.first()), places.last().and_then(|keys| keys.first()));
    let (Some(first), Some(last)) = ends else { return Ok(gathered) };
    let (start, end) = (first.offset, last.offset + last.length);
    let mut bytes = Vec::new();
    if end - start <= BATCH {
        bytes.resize((end - start) as usize, 0);
        if let Err(what) = read(reader, start, &mut bytes) {
            gathered.error(Some(first.key), name, Some(start), what);
            return Ok(gathered);
        }
    }
    for keys in places {
        let Some(record) = keys.first() else { continue };
        options.control.check("verifying")?;
        let found = match bytes.is_empty() {
            true => check_record(&whole, 0, record.offset, keys, name, &mut gathered),
            false => check_record(&bytes, start, record.offset - start, keys, name, &mut gathered),
        };
        if let Err(fault) = found {
            fault.tell(Some(record.key), name, &mut gathered);
        }
        gathered.bytes += record.length;
        options.control.advance(record.length);
    }
    Ok(gathered)
}

/// What is wrong at a place of a file.
struct Fault {
    at: u64,
    what: String,
    is_checksum: bool,
}

impl Fault {
    fn tell(self, key: Option<&str>, name: &str, gathered: &mut Gathered) {
        match self.is_checksum {
            true => gathered.wrong_checksum(key, name, self.at, self.what),
            false => gathered.error(key, name, Some(self.at), self.what),
        }
    }
}

impl From<(u64, String)> for Fault {
    fn from((at, what): (u64, String)) -> Fault {
        Fault { at, what, is_checksum: false }
    }
}

/// Checks the record at `offset` of `src`, whose own first byte is `base` of the file, and what all keys that name it say.
fn check_record(
    src: &dyn ReadAt,
    base: u64,
    offset: u64,
    keys: &[Named<'_>],
    name: &str,
    gathered: &mut Gathered,
) -> std::result::Result<(), Fault> {
    let Some(record) = keys.first() else { return Ok(()) };
    let failed = |error: RecordError| Fault {
        at: base + position(&error).unwrap_or(offset),
        what: chain(&error),
        is_checksum: matches!(error, RecordError::Checksum { .. }),
    };
    let archive = TorchArchive::open(src, offset, record.length).map_err(failed)?;
    if archive.entries().iter().any(|entry| entry.crc32.is_none()) {
        gathered.unchecked += 1;
        gathered.warning(Some(record.key), name, Some(base + offset), "the record was written without checksums");
    } else {
        gathered.checked += 1;
    }
    archive.verify_all().map_err(failed)?;
    zip::check(src, &archive, offset, record.length).map_err(|(at, what)| (base + at, what))?;
    let content = match archive.content() {
        // Nothing is wrong with it: it is for its own library to read.
        Err(RecordError::Unsupported { what, .. }) => Content::Opaque { class: what },
        content => content.map_err(failed)?,
    };
    Ok(keys.iter().try_for_each(|record| promised(&content, record, base + offset, name, gathered))?)
}

/// Compares what a record holds with what the metadata says of a key.
fn promised(
    content: &Content,
    record: &Named<'_>,
    at: u64,
    name: &str,
    gathered: &mut Gathered,
) -> std::result::Result<(), (u64, String)> {
    match (content, record.tensor) {
        (Content::Tensor(found), Some((dtype, _, shape))) if found.dtype != dtype || found.shape.as_slice() != shape => {
            let found = format!("{} of shape {:?}", found.dtype.name(), found.shape.as_slice());
            Err((at, format!("the record holds a {found}, the metadata promises {} of shape {shape:?}", dtype.name())))
        }
        (Content::Opaque { class }, Some(_)) => {
            let what = format!("its record is a {class}, which only its own library can read");
            gathered.warning(Some(record.key), name, Some(at), what);
            Ok(())
        }
        (Content::Value(_), None) => {
            gathered.values += 1;
            Ok(())
        }
        (Content::Tensor(_), Some(_)) | (_, None) => Ok(()),
        (_, Some(_)) => Err((at, "the record holds no tensor".to_owned())),
    }
}

/// Where an error says that it is.
fn position(error: &RecordError) -> Option<u64> {
    match error {
        RecordError::Checksum { offset, .. }
        | RecordError::Malformed { offset, .. }
        | RecordError::Overlap { offset, .. }
        | RecordError::Io { offset, .. } => Some(*offset),
        _ => None,
    }
}

/// A whole `torch.save` file: every entry's CRC-32, all threads at once.
pub(super) fn torch_file(checkpoint: &Checkpoint, number: u32, options: &VerifyOptions) -> Result<Gathered> {
    let name = checkpoint.file_name(number);
    let reader = checkpoint.reader(number)?;
    let file = StoredFile(reader.as_ref());
    let mut gathered = Gathered { bytes: reader.len(), ..Gathered::default() };
    let archive = match TorchArchive::open_file(&file) {
        Ok(archive) => archive,
        Err(error) => {
            gathered.error(None, name, position(&error), chain(&error));
            return Ok(gathered);
        }
    };
    let entries = archive.entries();
    let places: Vec<(Option<u64>, Option<u32>, u64, &str)> =
        entries.iter().map(|e| (archive.data_offset(e).ok(), e.crc32, e.size, e.name.as_str())).collect();
    let found: Vec<Fault> = Workers::reading(checkpoint.store.as_ref()).run(|| {
        places
            .par_iter()
            .with_max_len(1)
            .filter_map(|(at, crc, size, entry)| {
                let Some(at) = at else {
                    return Some((0, format!("entry {entry:?} has no data where the directory points")).into());
                };
                let expected = (*crc)?;
                if options.control.is_cancelled() {
                    return None;
                }
                let actual = reshard_formats::record::crc32_at(&StoredFile(reader.as_ref()), *at, *size);
                options.control.advance(*size);
                match actual {
                    Ok(actual) if actual == expected => None,
                    Ok(actual) => {
                        let what = format!("entry {entry:?} has CRC-32 {actual:08x}, the archive says {expected:08x}");
                        Some(Fault { at: *at, what, is_checksum: true })
                    }
                    Err(error) => Some((*at, chain(&error)).into()),
                }
            })
            .collect()
    })?;
    options.control.check("verifying")?;
    gathered.unchecked = entries.iter().filter(|e| e.crc32.is_none()).count() as u64;
    gathered.checked = entries.len() as u64 - gathered.unchecked;
    let mut by_place: HashMap<u64, &str> = HashMap::new();
    for (key, entry) in checkpoint.catalog().entries.iter().filter(|_| !found.is_empty()) {
        let CatalogKind::Tensor(tensor) = &entry.kind else { continue };
        for chunk in &tensor.chunks {
            if let ChunkLocation::Data(data) = &chunk.location
                && chunk.file == number
                && let Some(crc) = data.checksum
            {
                by_place.entry(crc.offset).or_insert(key);
            }
        }
    }
    for fault in found {
        let key = by_place.get(&fault.at).copied();
        fault.tell(key, name, &mut gathered);
    }
    if let Err((at, what)) = zip::check(&file, &archive, 0, reader.len()) {
        gathered.error(None, name, Some(at), what);
    }
    Ok(gathered)
}
