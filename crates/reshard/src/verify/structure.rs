//! What can be checked without reading data: coverage, places of records, sizes and presence of files, leftovers.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use reshard_layout::Region;
use reshard_storage::{StorageError, is_staged};

use super::{Gathered, Named, NamedByFile, Severity, VerifyOptions, read, twice};
use crate::checkpoint::{CatalogKind, Checkpoint, ChunkLocation, ValueLocation};
use crate::error::{Error, Result};
use crate::layout_names::{METADATA_FILE, is_save_file, note_name, sidecar_name};
use crate::workers::Workers;

/// The records that the catalog names, sorted by offset.
pub(super) fn named_records(checkpoint: &Checkpoint) -> NamedByFile<'_> {
    let mut named = NamedByFile::new();
    for (key, entry) in &checkpoint.catalog().entries {
        match &entry.kind {
            CatalogKind::Tensor(tensor) => {
                for chunk in &tensor.chunks {
                    if let ChunkLocation::Record { offset, length, transform } = &chunk.location {
                        let whole = Some((tensor, &chunk.region));
                        let tensor = Some((tensor.dtype, tensor.requires_grad, chunk.region.sizes()));
                        let (offset, length) = (*offset, *length);
                        let record = Named { key, offset, length, tensor, entry, chunk: whole, transform: transform.as_deref() };
                        named.entry(chunk.file).or_default().push(record);
                    }
                }
            }
            CatalogKind::Value(ValueLocation::Record { file, offset, length, transform }) => {
                let (offset, length, transform) = (*offset, *length, transform.as_deref());
                let record = Named { key, offset, length, tensor: None, entry, chunk: None, transform };
                named.entry(*file).or_default().push(record);
            }
            CatalogKind::Value(_) => {}
        }
    }
    for records in named.values_mut() {
        records.sort_by_key(|r| (r.offset, r.length));
    }
    named
}

/// Every element of every tensor exactly once.
pub(super) fn coverage(checkpoint: &Checkpoint, gathered: &mut Gathered) -> Result<()> {
    let entries: Vec<_> = checkpoint.catalog().entries.iter().collect();
    let found: Vec<(String, String)> = Workers::normal().run(|| {
        entries
            .par_iter()
            .with_min_len(64)
            .filter_map(|(key, entry)| {
                let CatalogKind::Tensor(tensor) = &entry.kind else { return None };
                if let [only] = tensor.chunks.as_slice()
                    && only.region.sizes() == tensor.shape.as_slice()
                {
                    return None;
                }
                let regions: Vec<Region> = tensor.chunks.iter().map(|c| c.region.clone()).collect();
                let what = match coverage_of(&tensor.shape, &regions) {
                    Ok(()) => return None,
                    Err(what) => what,
                };
                Some(((*key).clone(), what))
            })
            .collect()
    })?;
    for (key, what) in found {
        gathered.push(Severity::Error, Some(&key), None, None, what);
    }
    Ok(())
}

fn coverage_of(shape: &[u64], regions: &[Region]) -> std::result::Result<(), String> {
    let found = reshard_layout::coverage(shape, regions).map_err(|e| e.to_string())?;
    if found.is_exact() {
        return Ok(());
    }
    let mut what = Vec::new();
    let list = |regions: Vec<&Region>| {
        let shown: Vec<String> = regions.iter().take(4).map(ToString::to_string).collect();
        let more = if regions.len() > 4 || found.truncated { " and more" } else { "" };
        format!("{}{more}", shown.join(", "))
    };
    if !found.gaps.is_empty() {
        what.push(format!("no chunk holds {}", list(found.gaps.iter().collect())));
    }
    if !found.overlaps.is_empty() {
        what.push(format!("several chunks hold {}", list(found.overlaps.iter().map(|o| &o.region).collect())));
    }
    if what.is_empty() {
        what.push("its chunks do not tile it".to_owned());
    }
    Err(what.join("; "))
}

/// Presence and sizes of files, places of records, leftovers. Gives the sizes of the files that are there.
pub(super) fn files(checkpoint: &Checkpoint, named: &NamedByFile<'_>, gathered: &mut Gathered) -> Result<BTreeMap<u32, u64>> {
    let catalog = checkpoint.catalog();
    // Plain web servers cannot list, each in its own words; each file is asked for then, and tells if the store is at fault.
    let listed: Option<BTreeMap<String, u64>> =
        checkpoint.store().list("").ok().map(|files| files.into_iter().map(|f| (f.path, f.size)).collect());
    let mut sizes = BTreeMap::new();
    for (file, records) in named.range(catalog.files.len() as u32..) {
        let what = format!("{} records are said to be in file number {file}, which is not listed", records.len());
        gathered.push(Severity::Error, records.first().map(|r| r.key), None, None, what);
    }
    for (number, name) in catalog.files.iter().enumerate() {
        let number = number as u32;
        let size = match &listed {
            Some(listed) => listed.get(name).copied(),
            None => match checkpoint.store().size(name) {
                Ok(size) => Some(size),
                Err(StorageError::NotFound { .. }) => None,
                Err(source) => return Err(Error::Storage { doing: format!("looking at {name}"), source }),
            },
        };
        let Some(size) = size else {
            let keys = named.get(&number).map_or(0, |n| n.iter().map(|r| r.key).collect::<BTreeSet<_>>().len());
            gathered.error(None, name, None, format!("the file is missing; {keys} keys need it"));
            continue;
        };
        sizes.insert(number, size);
        if let Some(side) = checkpoint.side.as_ref().and_then(|side| side.files.iter().find(|f| f.file == *name))
            && side.length != size
        {
            gathered.error(None, name, None, format!("the file has {size} bytes, {} were written", side.length));
        }
        if let Some(records) = named.get(&number) {
            places(name, size, records, gathered);
        }
    }
    if let (Some(listed), true) = (&listed, catalog.format.is_dcp()) {
        leftovers(checkpoint, listed, gathered);
    }
    Ok(sizes)
}

/// Records must lie inside their file and apart from each other.
fn places(name: &str, size: u64, records: &[Named<'_>], gathered: &mut Gathered) {
    let mut last: Option<(u64, u64, &str)> = None;
    for record in records {
        match record.offset.checked_add(record.length) {
            Some(end) if end <= size => {
                match last {
                    Some((offset, last_end, key)) if (offset, last_end) == (record.offset, end) => {
                        let what = format!("its record is that of {key:?} too");
                        gathered.warning(Some(record.key), name, Some(record.offset), what);
                        continue;
                    }
                    Some((_, last_end, key)) if record.offset < last_end => {
                        let what = format!("its record overlaps that of {key:?}");
                        gathered.error(Some(record.key), name, Some(record.offset), what);
                        // What comes next may lie inside the longer of both.
                        if last_end > end {
                            continue;
                        }
                    }
                    _ => {}
                }
                last = Some((record.offset, end, record.key));
            }
            _ => {
                let what = format!("its record of {} bytes reaches past the file's end at {size}", record.length);
                gathered.error(Some(record.key), name, Some(record.offset), what);
            }
        }
    }
}

/// Files that look like a save's but belong to no part of this checkpoint.
fn leftovers(checkpoint: &Checkpoint, listed: &BTreeMap<String, u64>, gathered: &mut Gathered) {
    let catalog = checkpoint.catalog();
    let known: BTreeSet<&str> = catalog.files.iter().map(String::as_str).collect();
    let own: Vec<String> = catalog.save_id.iter().flat_map(|id| [sidecar_name(id), note_name(id)]).collect();
    let others = listed.keys().filter(|name| !known.contains(name.as_str()));
    twice::forgotten(checkpoint, others, gathered);
    for (name, size) in listed {
        if known.contains(name.as_str()) || name == METADATA_FILE || own.contains(name) {
            continue;
        }
        if is_save_file(name) || is_staged(name) {
            gathered.warning(None, name, None, format!("no part of the checkpoint: {size} bytes left over from another save"));
        }
    }
}

/// Nothing is called sound that was not read: every record that the metadata names was, or there is a finding about it.
pub(super) fn all_read(checkpoint: &Checkpoint, named: &NamedByFile<'_>, gathered: &mut Gathered) {
    if !checkpoint.catalog().format.is_dcp() || gathered.findings.iter().any(|f| f.severity == Severity::Error) {
        return;
    }
    let places = |records: &Vec<Named<'_>>| records.iter().map(|r| r.offset).collect::<BTreeSet<_>>().len() as u64;
    let wanted: u64 = named.values().map(places).sum();
    let done = gathered.checked + gathered.unchecked;
    if done < wanted {
        let what = format!("{} of its {wanted} records could not be found in any file", wanted - done);
        gathered.push(Severity::Error, None, None, None, what);
    }
}

/// Safetensors files carry no checksums: what can be proven is the header, which opening did, and that every byte of the
/// data can be read.
pub(super) fn safetensors(checkpoint: &Checkpoint, numbers: &[u32], options: &VerifyOptions) -> Result<Gathered> {
    let catalog = checkpoint.catalog();
    let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
    let mut chunks = 0;
    for entry in catalog.entries.values() {
        let CatalogKind::Tensor(tensor) = &entry.kind else { continue };
        for chunk in &tensor.chunks {
            if let (ChunkLocation::Data(data), true) = (&chunk.location, numbers.contains(&chunk.file)) {
                let end = ends.entry(chunk.file).or_default();
                *end = (*end).max(data.layout.end());
                chunks += 1;
            }
        }
    }
    let all = Workers::reading(checkpoint.store.as_ref()).run(|| {
        numbers
            .par_iter()
            .with_max_len(1)
            .map(|&file| -> Result<Gathered> {
                let mut gathered = Gathered::default();
                let name = checkpoint.file_name(file);
                let reader = checkpoint.reader(file)?;
                let end = ends.get(&file).copied().unwrap_or(0);
                if end > reader.len() {
                    gathered.error(None, name, Some(reader.len()), format!("the file ends here, its tensors at {end}"));
                }
                let mut buffer = vec![0; reader.len().min(1 << 20) as usize];
                let mut at = 0;
                while at < reader.len() {
                    options.control.check("verifying")?;
                    let part = (reader.len() - at).min(1 << 20) as usize;
                    if let Err(what) = read(reader, at, &mut buffer[..part]) {
                        gathered.error(None, name, Some(at), what);
                        break;
                    }
                    at += part as u64;
                    gathered.bytes += part as u64;
                    options.control.advance(part as u64);
                }
                Ok(gathered)
            })
            .try_reduce(Gathered::default, |a, b| Ok(a.join(b)))
    })??;
    Ok(Gathered { unchecked: chunks, ..all })
}
