//! The end of a save: the ranks tell what they wrote, all of it is made durable, the planning rank commits.
//!
//! When every rank has written, rank 0 learns where everything lies and writes the sidecar beside its own data, while
//! everyone's data goes to the disk. When all of that is synced, rank 0 publishes (see [`crate::commit`]).

use std::time::Instant;

use reshard_formats::own::{Checksums, RecordChecksums, Sidecar};
use reshard_formats::{FileId, Metadata};
use reshard_layout::Region;
use reshard_storage::Store;
use serde::{Deserialize, Serialize};

use super::SaveOptions;
use super::prepare::{Decision, Prepared};
use super::write::{Unsynced, Written};
use crate::commit::{Assembly, Commit, Failed, Publication, discard, encode_side};
use crate::error::{Error, RankFailure, Result};
use crate::group::{Group, asking_root};
use crate::layout_names::{data_file, sidecar_name};
use crate::plan::files::{FrameSizes, Placed, lay_out};
use crate::plan::global::GlobalPlan;
use crate::report::{PhaseClock, Phases, SaveReport, Slowest};
use crate::workers::Workers;

/// What a rank tells of its writing.
#[derive(Serialize, Deserialize)]
struct RankResults {
    files: Vec<(String, u64)>,
    tensors: Vec<Option<Checksums>>,
    /// Of compressed records; others lie where they were planned.
    places: Option<Vec<Placed>>,
    values: Vec<(u64, Option<Checksums>)>,
    /// Seconds that it wrote.
    wrote: f64,
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
    slowest: Option<Slowest>,
    warnings: Vec<String>,
}

/// Publishes what all ranks wrote, or makes sure that nothing of it stays.
pub(crate) fn finish(
    group: &dyn Group,
    prepared: &mut Prepared,
    written: Result<(Written, Unsynced)>,
    store: &dyn Store,
    options: &SaveOptions,
    workers: &Workers,
    clock: &mut PhaseClock,
) -> Result<Outcome> {
    let outcome = try_finish(group, prepared, written, store, options, workers, clock);
    if let (Err(_), Some(cache)) = (&outcome, &options.plan_cache) {
        cache.clear();
    }
    outcome
}

fn try_finish(
    group: &dyn Group,
    prepared: &mut Prepared,
    written: Result<(Written, Unsynced)>,
    store: &dyn Store,
    options: &SaveOptions,
    workers: &Workers,
    clock: &mut PhaseClock,
) -> Result<Outcome> {
    clock.enter("sync");
    let wrote = clock.last().as_secs_f64();
    let (results, mut unsynced) = match written {
        Ok((w, unsynced)) => {
            (Ok(RankResults { files: w.files, tensors: w.tensors, places: w.places, values: w.values, wrote }), Some(unsynced))
        }
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
    // The wait for the others is no work of this rank's.
    let syncing = Instant::now();
    let (draft, finished) = match (draft.transpose(), unsynced) {
        (Ok(draft), Some(unsynced)) => (draft, unsynced.finish(store, options, workers)),
        (Ok(draft), None) => (draft, Ok(())),
        (Err(error), unsynced) => {
            unsynced.into_iter().for_each(Unsynced::abort);
            (None, Err(error))
        }
    };
    clock.enter("commit");
    let synced = finished.map(|()| syncing.elapsed().as_secs_f64());
    let answer = asking_root(group, synced, |synced| {
        let Some(draft) = draft else {
            return Err(Error::internal("the planning rank has lost its plan"));
        };
        Ok(vec![draft.publish(store, options, &synced)?; group.size()])
    });
    match answer {
        Ok(Answer::Published(outcome)) => Ok(outcome),
        Ok(Answer::Unclear(failures)) => Err(Error::Remote { failures }),
        Err(error) => {
            // A rank that lost contact cannot know whether its files are in use; if not, the next save sweeps them.
            if !matches!(error, Error::Group { .. }) {
                discard(own_files.iter().map(String::as_str), store);
            }
            Err(error)
        }
    }
}

/// What rank 0 is about to publish.
struct Draft {
    commit: Commit,
    encoded: Vec<u8>,
    side: Vec<u8>,
    side_name: String,
    /// Names and lengths of all data files.
    files: Vec<(String, u64)>,
    /// Bytes of tensor data that each rank wrote.
    loads: Vec<u64>,
    /// Seconds that each rank wrote.
    wrote: Vec<f64>,
}

impl Draft {
    fn of(prepared: &mut Prepared, results: &[RankResults], store: &dyn Store, options: &SaveOptions) -> Result<Draft> {
        let lost = || Error::internal("the planning rank has lost its plan");
        let mut commit = prepared.commit.take().ok_or_else(lost)?;
        let global = prepared.global().ok_or_else(lost)?;
        let (metadata, side) = assemble(global, results, &prepared.decision, options)?;
        let encoded = metadata.encode()?;
        let side_name = sidecar_name(&side.save_id);
        let files = side.files.iter().map(|file| (file.file.clone(), file.length)).collect();
        let side = encode_side(&side)?;
        commit.read_old(store);
        let wrote = results.iter().map(|results| results.wrote).collect();
        Ok(Draft { commit, encoded, side, side_name, files, loads: global.loads.clone(), wrote })
    }

    /// Publishes. `Err` when nothing was. `synced` has the seconds that each rank waited for its disk.
    fn publish(self, store: &dyn Store, options: &SaveOptions, synced: &[f64]) -> Result<Answer> {
        let publication = Publication {
            metadata: &self.encoded,
            files: self.files.iter().map(|(name, length)| (name.as_str(), Some(*length))).collect(),
            beside: vec![self.side_name],
            sidecar: None,
            check_files: options.check_files,
            control: &options.control,
        };
        let warnings = match self.commit.publish(store, publication) {
            Ok(warnings) => warnings,
            Err(Failed { error, keep: true }) => return Ok(Answer::Unclear(error.to_failures(0))),
            Err(Failed { error, keep: false }) => return Err(error),
        };
        let files = self.files.len() as u64;
        let total_bytes = self.loads.iter().sum();
        let mean = total_bytes as f64 / self.loads.len().max(1) as f64;
        let most = self.loads.iter().copied().max().unwrap_or(0) as f64;
        let imbalance = if mean > 0.0 { most / mean } else { 1.0 };
        let worked = self.wrote.iter().zip(synced).map(|(&wrote, &synced)| vec![("write", wrote), ("sync", synced)]);
        let slowest = Slowest::of(&worked.collect::<Vec<_>>());
        Ok(Answer::Published(Outcome { total_bytes, files, imbalance, slowest, warnings }))
    }
}

/// The report of a finished save.
pub(crate) fn report(outcome: Result<Outcome>, prepared: &Prepared, phases: Phases, store: &dyn Store) -> Result<SaveReport> {
    let outcome = outcome?;
    let records = prepared.plan.assigned().len() as u64;
    let mut bytes = 0;
    for assigned in prepared.plan.assigned() {
        if let (Some(region), Some(tensor)) = (&assigned.region, &prepared.table[assigned.local as usize].tensor) {
            bytes += region.volume() * tensor.dtype.size();
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
        slowest: outcome.slowest,
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
    let mut assembly = Assembly::new(&decision.save_id, results.len() as u32);
    for entry in global.table.iter() {
        assembly.add_key(entry.key.clone(), entry.key_path(), entry.tensor.clone());
    }
    let mut sizes = FrameSizes::default();
    for (rank, (assigned, result)) in global.assigned.iter().zip(results).enumerate() {
        let disagree = || Error::internal(format!("rank {rank} wrote something else than was planned"));
        let tensors: Vec<(usize, &Region)> =
            assigned.iter().filter_map(|a| a.region.as_ref().map(|region| (a.key as usize, region))).collect();
        let shapes = tensors
            .iter()
            .map(|(key, region)| match &global.table[*key].tensor {
                Some(tensor) => Ok((tensor.dtype, tensor.requires_grad, region.sizes())),
                None => Err(disagree()),
            })
            .collect::<Result<Vec<_>>>()?;
        let (mut placed, mut ends) = lay_out(shapes.into_iter(), options.files_per_rank, &mut sizes)?;
        if let Some(places) = &result.places {
            if places.len() != placed.len() || places.iter().zip(&placed).any(|(is, planned)| is.file != planned.file) {
                return Err(disagree());
            }
            placed.clone_from(places);
            ends.iter_mut().for_each(|end| *end = 0);
            for place in &placed {
                let end = &mut ends[place.file as usize];
                *end = place.offset.checked_add(place.length).ok_or_else(disagree)?.max(*end);
            }
        }
        if result.tensors.len() != tensors.len() || result.values.len() != assigned.len() - tensors.len() {
            return Err(disagree());
        }
        // Files of this rank that hold something, by their number.
        let mut ids: Vec<Option<FileId>> = vec![None; ends.len()];
        for (number, id) in ids.iter_mut().enumerate() {
            let name = data_file(rank, number as u32, save_id);
            if let Some((_, length)) = result.files.iter().find(|(file, _)| *file == name) {
                *id = Some(assembly.add_file(name, *length)?);
            }
        }
        for (((key, region), place), sums) in tensors.into_iter().zip(placed).zip(&result.tensors) {
            let file = ids[place.file as usize].ok_or_else(disagree)?;
            let (data_offset, data_length) = (place.data_offset, place.data_length);
            let record = RecordChecksums { offset: place.offset, length: place.length, data_offset, data_length, sums: *sums };
            assembly.add_record(key, Some(region.clone()), file, record)?;
        }
        let mut at = ends[0];
        for (assigned, (length, sums)) in assigned.iter().filter(|a| a.region.is_none()).zip(&result.values) {
            let file = ids[0].ok_or_else(disagree)?;
            let record = RecordChecksums::of_value(at, *length, *sums);
            assembly.add_record(assigned.key as usize, None, file, record)?;
            at += length;
        }
    }
    assembly.finish()
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
                places: None,
                values: vec![(0, Some(Checksums::ZERO)); assigned.len() - tensors],
                wrote: 0.0,
            }
        })
        .collect();
    let (metadata, side) = assemble(global, &results, &Decision::default(), options)?;
    encode_side(&side)?;
    Ok(metadata.encode()?.len() as u64)
}
