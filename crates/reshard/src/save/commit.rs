//! Publishing: the only step that makes a save visible.
//!
//! When every rank has written, rank 0 learns where everything lies and writes the sidecar beside its own data, while
//! everyone's data goes to the disk. When all of that is synced, rank 0 publishes `.metadata`, atomically. Before this a
//! reader finds what was there before, after it the new checkpoint, complete. Only then are the
//! files of the old one removed; a crash before that leaves files that no `.metadata` names, which the next save to the
//! path sweeps. Data files never have the name of a file that was there, so nothing old is ever overwritten.

use std::collections::HashSet;

use reshard_formats::{Chunk, Entry, EntryKind, FileId, Metadata, StorageInfo, StorageMeta, TensorEntry, TensorProperties};
use reshard_layout::Region;
use reshard_storage::{Publish, StorageError, Store};
use serde::{Deserialize, Serialize};

use super::SaveOptions;
use super::prepare::{Decision, Prepared};
use super::write::{Unsynced, Written, discard};
use crate::checksums::{Checksums, RecordChecksums, Sidecar, SidecarFile, sidecar_name};
use crate::error::{Error, RankFailure, Result, StorageContext};
use crate::group::{Group, asking_root};
use crate::layout_names::{METADATA_FILE, data_file, is_save_file};
use crate::plan::files::{FrameSizes, lay_out};
use crate::plan::global::GlobalPlan;
use crate::plan::local::{dims, dtype_of};
use crate::report::{PhaseClock, Phases, SaveReport};
use crate::workers::Workers;

/// What a rank tells of its writing.
#[derive(Serialize, Deserialize)]
struct RankResults {
    files: Vec<(String, u64)>,
    tensors: Vec<Option<Checksums>>,
    values: Vec<(u64, Option<Checksums>)>,
}

/// What rank 0 tells everyone at the end.
#[derive(Clone, Serialize, Deserialize)]
enum Answer {
    Published(Outcome),
    /// Publishing failed, and `.metadata` may be the new one all the same: both the old and the new files must stay.
    Unclear(Vec<RankFailure>),
}

/// What every rank learns of a save that was published.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Outcome {
    total_bytes: u64,
    files: u64,
    imbalance: f64,
    warnings: Vec<String>,
}

/// Publishes what all ranks wrote, or makes sure that nothing of it stays.
pub(crate) fn commit(
    group: &dyn Group,
    prepared: &Prepared,
    written: Result<(Written, Unsynced)>,
    store: &dyn Store,
    options: &SaveOptions,
    workers: &Workers,
    clock: &mut PhaseClock,
) -> Result<Outcome> {
    let outcome = try_commit(group, prepared, written, store, options, workers, clock);
    if let (Err(_), Some(cache)) = (&outcome, &options.plan_cache) {
        cache.clear();
    }
    outcome
}

fn try_commit(
    group: &dyn Group,
    prepared: &Prepared,
    written: Result<(Written, Unsynced)>,
    store: &dyn Store,
    options: &SaveOptions,
    workers: &Workers,
    clock: &mut PhaseClock,
) -> Result<Outcome> {
    clock.enter("sync");
    let (results, mut unsynced) = match written {
        Ok((w, unsynced)) => (Ok(RankResults { files: w.files, tensors: w.tensors, values: w.values }), Some(unsynced)),
        Err(error) => (Err(error), None),
    };
    let mut own_files: Vec<String> = Vec::new();
    if let Ok(results) = &results {
        own_files.extend(results.files.iter().map(|(name, _)| name.clone()));
    }
    // What will be published is made while the disk is still busy with the data.
    let results = results.and_then(|results| options.control.check("publishing").map(|()| results));
    let mut gathered = None;
    let told = asking_root(group, results, |all| {
        gathered = Some(all);
        Ok(vec![(); group.size()])
    });
    if let Err(error) = told {
        // Without this rank nobody publishes anything.
        unsynced.into_iter().for_each(Unsynced::abort);
        return Err(error);
    }
    let draft = gathered.map(|results| {
        let draft = Draft::of(prepared, &results, store, options)?;
        own_files.push(draft.side_name.clone());
        match &mut unsynced {
            Some(unsynced) => unsynced.add(&draft.side_name, &draft.side, store).map(|()| draft),
            None => Ok(draft),
        }
    });
    let (draft, drafted) = match draft {
        None => (None, Ok(())),
        Some(Ok(draft)) => (Some(draft), Ok(())),
        Some(Err(error)) => (None, Err(error)),
    };
    let finished = match (drafted, unsynced) {
        (Ok(()), Some(unsynced)) => unsynced.finish(store, options, workers),
        (Ok(()), None) => Ok(()),
        (Err(error), unsynced) => {
            unsynced.into_iter().for_each(Unsynced::abort);
            Err(error)
        }
    };
    clock.enter("commit");
    let answer = asking_root(group, finished, |_| {
        let Some(draft) = draft else {
            return Err(Error::invalid("the planning rank has lost its plan"));
        };
        Ok(vec![draft.publish(store, options)?; group.size()])
    });
    match answer {
        Ok(Answer::Published(outcome)) => Ok(outcome),
        Ok(Answer::Unclear(failures)) => Err(Error::Remote { failures }),
        Err(error) => {
            // A rank that lost contact cannot know whether its files are in use; if not, the next save sweeps them.
            if !matches!(error, Error::Group { .. }) {
                discard(&own_files, store);
            }
            Err(error)
        }
    }
}

/// What rank 0 is about to publish.
struct Draft {
    metadata: Metadata,
    encoded: Vec<u8>,
    side: Vec<u8>,
    side_name: String,
    save_id: String,
    /// The files of the checkpoint that is there.
    old: Vec<String>,
    /// Bytes of tensor data that each rank wrote.
    loads: Vec<u64>,
}

impl Draft {
    fn of(prepared: &Prepared, results: &[RankResults], store: &dyn Store, options: &SaveOptions) -> Result<Draft> {
        let Some(global) = prepared.global() else {
            return Err(Error::invalid("the planning rank has lost its plan"));
        };
        let (metadata, side) = assemble(global, results, &prepared.decision, options)?;
        let encoded = metadata.encode()?;
        let side_name = sidecar_name(&side.save_id);
        let (side, save_id) = (encode_side(&side)?, side.save_id);
        Ok(Draft { metadata, encoded, side, side_name, save_id, old: old_files(store), loads: global.loads.clone() })
    }

    /// Publishes. `Err` when nothing was.
    fn publish(self, store: &dyn Store, options: &SaveOptions) -> Result<Answer> {
        let mode = if options.overwrite { Publish::Replace } else { Publish::Create };
        options.control.check("publishing")?;
        if let Err(error) = store.publish(METADATA_FILE, &self.encoded, mode).doing(|| "publishing .metadata".into()) {
            // A publication may fail after the new file got its name (the folder could not be synced, the answer got
            // lost). Only when the file is seen not to be ours may our data go.
            return match store.read(METADATA_FILE, crate::checkpoint::MAX_METADATA_BYTES) {
                Ok(found) if found != self.encoded => Err(error),
                Err(StorageError::NotFound { .. }) => Err(error),
                _ => Ok(Answer::Unclear(error.to_failures(0))),
            };
        }
        let files = self.metadata.files.len() as u64;
        let warnings = sweep(store, &self.metadata, &self.save_id, self.old);
        let total_bytes = self.loads.iter().sum();
        let mean = total_bytes as f64 / self.loads.len().max(1) as f64;
        let most = self.loads.iter().copied().max().unwrap_or(0) as f64;
        let imbalance = if mean > 0.0 { most / mean } else { 1.0 };
        Ok(Answer::Published(Outcome { total_bytes, files, imbalance, warnings }))
    }
}

fn encode_side(side: &Sidecar) -> Result<Vec<u8>> {
    side.encode().map_err(|e| Error::invalid(format!("the sidecar cannot be written: {e}")))
}

/// The report of a finished save.
pub(crate) fn report(outcome: Result<Outcome>, prepared: &Prepared, phases: Phases, store: &dyn Store) -> Result<SaveReport> {
    let outcome = outcome?;
    let records = prepared.plan.assigned().len() as u64;
    let mut bytes = 0;
    for assigned in prepared.plan.assigned() {
        if let (Some(region), Some(tensor)) = (&assigned.region, &prepared.table[assigned.local as usize].tensor) {
            bytes += region.volume() * dtype_of(tensor.dtype)?.size();
        }
    }
    Ok(SaveReport {
        path: store.describe(),
        save_id: prepared.decision.save_id.clone(),
        phases,
        bytes,
        total_bytes: outcome.total_bytes,
        records,
        files: outcome.files,
        imbalance: outcome.imbalance,
        plan_cached: prepared.plan_cached,
        warnings: outcome.warnings,
    })
}

/// The metadata and the sidecar of a save, from the plan and what the ranks report.
fn assemble(
    global: &GlobalPlan,
    results: &[RankResults],
    decision: &Decision,
    options: &SaveOptions,
) -> Result<(Metadata, Sidecar)> {
    let save_id = decision.named.then_some(decision.save_id.as_str());
    let mut files: Vec<String> = Vec::new();
    let mut side: Vec<SidecarFile> = Vec::new();
    let mut chunks: Vec<Vec<Chunk>> = vec![Vec::new(); global.table.len()];
    let mut values: Vec<Option<StorageInfo>> = vec![None; global.table.len()];
    let mut sizes = FrameSizes::default();
    for (rank, (assigned, result)) in global.assigned.iter().zip(results).enumerate() {
        let disagree = || Error::invalid(format!("rank {rank} wrote something else than was planned"));
        let tensors: Vec<(usize, &Region)> =
            assigned.iter().filter_map(|a| a.region.as_ref().map(|region| (a.key as usize, region))).collect();
        let shapes = tensors
            .iter()
            .map(|(key, region)| match &global.table[*key].tensor {
                Some(tensor) => Ok((dtype_of(tensor.dtype)?, tensor.requires_grad, region.sizes())),
                None => Err(disagree()),
            })
            .collect::<Result<Vec<_>>>()?;
        let (placed, ends) = lay_out(shapes.into_iter(), options.files_per_rank, &mut sizes)?;
        if result.tensors.len() != tensors.len() || result.values.len() != assigned.len() - tensors.len() {
            return Err(disagree());
        }
        // Files of this rank that hold something, by their number.
        let mut ids: Vec<Option<FileId>> = vec![None; ends.len()];
        let first = files.len();
        for (number, id) in ids.iter_mut().enumerate() {
            let name = data_file(rank, number as u32, save_id);
            if let Some((_, length)) = result.files.iter().find(|(file, _)| *file == name) {
                *id = Some(FileId(u32::try_from(files.len()).map_err(|_| Error::invalid("too many files"))?));
                files.push(name.clone());
                side.push(SidecarFile { file: name, length: *length, records: Vec::new() });
            }
        }
        for (((key, region), place), sums) in tensors.into_iter().zip(placed).zip(&result.tensors) {
            let file = ids[place.file as usize].ok_or_else(disagree)?;
            let storage = StorageInfo::new(file, place.offset, place.length);
            chunks[key].push(Chunk { region: region.clone(), storage });
            let (data_offset, data_length) = (place.data_offset, place.data_length);
            let record = RecordChecksums { offset: place.offset, length: place.length, data_offset, data_length, sums: *sums };
            side[first + position(&ids, place.file)].records.push(record);
        }
        let mut at = ends[0];
        for (assigned, (length, sums)) in assigned.iter().filter(|a| a.region.is_none()).zip(&result.values) {
            let file = ids[0].ok_or_else(disagree)?;
            values[assigned.key as usize] = Some(StorageInfo::new(file, at, *length));
            side[first].records.push(RecordChecksums {
                offset: at,
                length: *length,
                data_offset: 0,
                data_length: *length,
                sums: *sums,
            });
            at += length;
        }
    }
    side.sort_by(|a, b| a.file.cmp(&b.file));
    let mut metadata = Metadata::new();
    metadata.files = files;
    metadata.storage_meta = Some(StorageMeta { save_id: Some(decision.save_id.clone()), ..StorageMeta::default() });
    for ((entry, mut chunks), value) in global.table.iter().zip(chunks).zip(values) {
        let kind = match (&entry.tensor, value) {
            (Some(tensor), _) => {
                chunks.sort_by(|a, b| a.region.cmp(&b.region));
                let mut properties = TensorProperties::new(dtype_of(tensor.dtype)?);
                properties.requires_grad = tensor.requires_grad;
                EntryKind::Tensor(TensorEntry { properties, shape: dims(&tensor.shape), chunks, extra: None })
            }
            (None, Some(storage)) => EntryKind::Bytes(storage),
            (None, None) => return Err(Error::invalid(format!("nobody wrote {:?}", entry.key))),
        };
        metadata.entries.insert(entry.key.clone(), Entry { path: Some(entry.key_path()), kind });
    }
    let side = Sidecar { save_id: decision.save_id.clone(), ranks: results.len() as u32, files: side };
    Ok((metadata, side))
}

/// Assembles and encodes what a plan publishes, without checksums; the size of `.metadata`.
pub(crate) fn offline_metadata(global: &GlobalPlan, options: &SaveOptions) -> Result<u64> {
    let results: Vec<RankResults> = global
        .assigned
        .iter()
        .enumerate()
        .map(|(rank, assigned)| {
            let tensors = assigned.iter().filter(|a| a.region.is_some()).count();
            RankResults {
                files: (0..options.files_per_rank).map(|file| (data_file(rank, file, None), 0)).collect(),
                tensors: vec![Some(Checksums::ZERO); tensors],
                values: vec![(0, Some(Checksums::ZERO)); assigned.len() - tensors],
            }
        })
        .collect();
    let (metadata, side) = assemble(global, &results, &Decision::default(), options)?;
    encode_side(&side)?;
    Ok(metadata.encode()?.len() as u64)
}

/// How many of a rank's files before `file` hold something.
fn position(ids: &[Option<FileId>], file: u32) -> usize {
    ids[..file as usize].iter().flatten().count()
}

/// The files that the checkpoint already there names, as far as it can be read.
pub(crate) fn old_files(store: &dyn Store) -> Vec<String> {
    let Ok(bytes) = store.read(METADATA_FILE, crate::checkpoint::MAX_METADATA_BYTES) else { return Vec::new() };
    Metadata::decode(&bytes).map_or_else(|_| Vec::new(), |metadata| metadata.files)
}

/// Removes what no longer belongs to the checkpoint. What cannot be removed is a warning: the save itself is done.
pub(crate) fn sweep(store: &dyn Store, metadata: &Metadata, save_id: &str, old: Vec<String>) -> Vec<String> {
    let mut keep: HashSet<&str> = metadata.files.iter().map(String::as_str).collect();
    let side = sidecar_name(save_id);
    keep.insert(&side);
    let mut warnings = Vec::new();
    let mut remove: HashSet<String> = old.into_iter().collect();
    match store.list("") {
        Ok(files) => remove.extend(files.into_iter().map(|f| f.path).filter(|name| is_save_file(name))),
        Err(error) => warnings.push(format!("files of earlier saves could not be listed: {error}")),
    }
    for name in remove.into_iter().filter(|name| !keep.contains(name.as_str())) {
        if let Err(error) = store.delete(&name) {
            warnings.push(format!("{name} of an earlier save could not be removed: {error}"));
        }
    }
    warnings
}
