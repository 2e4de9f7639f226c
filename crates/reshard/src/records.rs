//! Saves that someone else plans: records written one by one, published together.
//!
//! PyTorch's own planner, or a user's, may decide what is written where and only want bytes moved. [`begin`] looks at the path
//! once, [`write_records`] writes one rank's records, [`publish_records`] makes the save visible; the promises are those of
//! [`save`](crate::save()): old or new, synced, with checksums, files that describe themselves.

use std::sync::Arc;

use rayon::prelude::*;
use reshard_formats::own::{KeyEntry, RecordChecksums, Sidecar, SidecarFile, TensorFacts};
use reshard_formats::{DType, KeyPath, PathSegment, value_record};
use reshard_layout::{Dims, Region};
use reshard_storage::Store;

use crate::checkpoint::{Checkpoint, LoadedValue};
use crate::commit::{Publication, encode_side, planned};
use crate::error::{Error, Geometry, Result, chain};
use crate::group::{Group, decode, encode};
use crate::layout_names::{data_file, sidecar_name};
use crate::leaf::SavePiece;
use crate::plan::cache::CachedPlan;
use crate::plan::files::{FrameSizes, Placed, lay_out};
use crate::save::SaveOptions;
use crate::save::jobs::{Jobs, TensorJob, ValueJob};
use crate::save::prepare::{Decision, Prepared};
use crate::save::write::write;
use crate::workers::Workers;

/// The same outcome on every rank: fine on all, or everyone's errors. For steps of an embedding program that may fail on one
/// rank before the engine is called.
pub fn together<T>(group: &dyn Group, result: Result<T>) -> Result<T> {
    crate::group::together(group, result)
}

/// A save that someone else plans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordSave {
    /// Unique among the saves to one place.
    pub save_id: String,
    /// Whether data files carry the id in their names, because others lie there.
    pub named: bool,
    /// The id that [`begin`] gave, and under which the path is claimed. A plan that was used before may write under another.
    pub begun: String,
}

/// One record to write.
#[derive(Debug, Clone)]
pub struct RecordToWrite<'a> {
    /// Its key.
    pub key: String,
    /// Where the key sat in the tree; `None` when the key is the only segment.
    pub path: Option<KeyPath>,
    /// What it holds.
    pub content: RecordContent<'a>,
}

/// What a record holds.
#[derive(Debug, Clone)]
#[non_exhaustive]
// Nearly all are tensors: a box would cost an allocation each and save nothing.
#[allow(clippy::large_enum_variant)]
pub enum RecordContent<'a> {
    /// A region of a tensor.
    Tensor {
        /// Element type.
        dtype: DType,
        /// Whether PyTorch should see it as requiring gradients.
        requires_grad: bool,
        /// Shape of the whole tensor.
        shape: Dims,
        /// The region and its memory.
        piece: SavePiece<'a>,
    },
    /// Bytes, as they are.
    Bytes(Vec<u8>),
    /// The record of a region of a tensor, as transforms of the caller's made it. Its metadata names them.
    Transformed {
        /// Element type.
        dtype: DType,
        /// Whether PyTorch should see it as requiring gradients.
        requires_grad: bool,
        /// Shape of the whole tensor.
        shape: Dims,
        /// What of it the record holds.
        region: Region,
        /// The record.
        bytes: Vec<u8>,
    },
}

/// Where a record was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenRecord {
    /// The file, relative to the checkpoint.
    pub file: String,
    /// Where it starts.
    pub offset: u64,
    /// Its length.
    pub length: u64,
}

/// What one rank wrote.
#[derive(Debug, Clone)]
pub struct WrittenRecords {
    /// In the order given.
    pub records: Vec<WrittenRecord>,
    /// Places and checksums for [`publish_records`], in an encoding of its own.
    pub sums: Vec<u8>,
}

/// Prepares a path for a save that someone else plans; one rank calls it, before any writes. `metadata_name` is that of one rank
/// among several which save without talking to each other; each of them calls it then.
pub fn begin(store: &dyn Store, metadata_name: Option<&str>, options: &SaveOptions) -> Result<RecordSave> {
    let (save_id, named) = planned::begin(store, metadata_name, options.overwrite)?;
    Ok(RecordSave { begun: save_id.clone(), save_id, named })
}

/// Gives up a save: its path is free again, and it can no longer publish. Nothing happens where it is over. To be called when no
/// rank of it writes any more: another save may write files of the same names at once.
pub fn abandon(begun: &str) {
    planned::abandon(begun);
}

/// Writes one rank's records, synced unless told otherwise. On an error nothing of it stays.
pub fn write_records(
    store: &dyn Store,
    save: &RecordSave,
    rank: usize,
    ranks: usize,
    records: Vec<RecordToWrite<'_>>,
    options: &SaveOptions,
) -> Result<WrittenRecords> {
    let _writing = planned::Writing::to(store);
    let count = records.len();
    let mut table = Vec::with_capacity(count);
    let mut jobs = Jobs { tensors: Vec::new(), values: Vec::new(), ends: Vec::new() };
    // Position of each record among its own kind.
    let mut kinds: Vec<(bool, usize)> = Vec::with_capacity(count);
    for (local, record) in records.into_iter().enumerate() {
        let local = u32::try_from(local).map_err(|_| Error::exhausted("too many records"))?;
        let path = record.path.unwrap_or_else(|| vec![PathSegment::Key(record.key.clone())]);
        let mut entry = KeyEntry::new(record.key, path, None);
        match record.content {
            RecordContent::Tensor { dtype, requires_grad, shape, piece } => {
                piece.region.check_inside(&shape).given()?;
                entry.tensor = Some(TensorFacts { dtype, requires_grad, shape });
                kinds.push((true, jobs.tensors.len()));
                jobs.tensors.push(TensorJob {
                    local,
                    dtype,
                    requires_grad,
                    global_offsets: Dims::from_slice(piece.region.offsets()),
                    sizes: Dims::from_slice(piece.region.sizes()),
                    placed: Placed::default(),
                    memory: piece.memory,
                    layout: piece.layout,
                    offsets: Dims::from_elem(0, piece.region.ndim()),
                });
            }
            RecordContent::Bytes(bytes) => {
                kinds.push((false, jobs.values.len()));
                jobs.values.push(ValueJob { local, bytes, region: None });
            }
            RecordContent::Transformed { dtype, requires_grad, shape, region, bytes } => {
                region.check_inside(&shape)?;
                entry.tensor = Some(TensorFacts { dtype, requires_grad, shape });
                let region = Some((Dims::from_slice(region.offsets()), Dims::from_slice(region.sizes())));
                kinds.push((false, jobs.values.len()));
                jobs.values.push(ValueJob { local, bytes, region });
            }
        }
        table.push(entry);
    }
    let shapes = jobs.tensors.iter().map(|t| (t.dtype, t.requires_grad, t.sizes.as_slice()));
    let (placed, ends) = lay_out(shapes, options.files_per_rank, &mut FrameSizes::default())?;
    for (tensor, placed) in jobs.tensors.iter_mut().zip(placed) {
        tensor.placed = placed;
    }
    jobs.ends = ends;
    let decision = Decision { save_id: save.save_id.clone(), named: save.named, use_cached: false, table_hash: 0 };
    let plan = CachedPlan { local_hash: 0, id: 0, split_above: 0, told: Vec::new(), global: None };
    let prepared =
        Prepared { decision, rank, ranks, table: Arc::new(table), plan: Arc::new(plan), plan_cached: false, commit: None };
    // What a planner of someone else's writes has transforms of its own, or none.
    let options = &SaveOptions { compression: None, ..options.clone() };
    let written = write(&jobs, &prepared, store, options, Workers::normal())?;

    let id = save.named.then_some(save.save_id.as_str());
    let mut side: Vec<SidecarFile> = written
        .files
        .iter()
        .map(|(file, length)| SidecarFile { file: file.clone(), length: *length, records: Vec::new() })
        .collect();
    let mut note = |file: &str, record: RecordChecksums| {
        if let Some(entry) = side.iter_mut().find(|entry| entry.file == file) {
            entry.records.push(record);
        }
    };
    let mut tensors = Vec::with_capacity(jobs.tensors.len());
    for (job, sums) in jobs.tensors.iter().zip(&written.tensors) {
        let Placed { file, offset, length, data_offset, data_length } = job.placed;
        let file = data_file(rank, file, id);
        note(&file, RecordChecksums { offset, length, data_offset, data_length, sums: *sums });
        tensors.push(WrittenRecord { file, offset, length });
    }
    let mut values = Vec::with_capacity(jobs.values.len());
    let mut at = jobs.ends.first().copied().unwrap_or(0);
    for (length, sums) in &written.values {
        let file = data_file(rank, 0, id);
        note(&file, RecordChecksums::of_value(at, *length, *sums));
        values.push(WrittenRecord { file, offset: at, length: *length });
        at += length;
    }
    let records = kinds.into_iter().map(|(tensor, i)| if tensor { tensors[i].clone() } else { values[i].clone() }).collect();
    Ok(WrittenRecords { records, sums: encode(&side)? })
}

/// Publishes what all ranks wrote under the given `.metadata`, whose storage meta should carry the save's id, and removes the
/// files of what was there before. Returns warnings about what could not be removed.
pub fn publish_records(
    store: &dyn Store,
    save: &RecordSave,
    sums: &[Vec<u8>],
    metadata: &[u8],
    metadata_name: Option<&str>,
    options: &SaveOptions,
) -> Result<Vec<String>> {
    let mut files: Vec<SidecarFile> = Vec::new();
    for bytes in sums {
        files.extend(decode::<Vec<SidecarFile>>(bytes)?);
    }
    files.sort_by(|a, b| a.file.cmp(&b.file));
    let commit = planned::take(store, metadata_name, &save.begun);
    let commit = commit.ok_or_else(|| Error::Conflict {
        path: store.describe(),
        detail: "another save of this process to it began after this one; nothing of this save was published".into(),
    })?;
    let side = Sidecar { save_id: save.save_id.clone(), ranks: u32::try_from(sums.len()).unwrap_or(u32::MAX), files };
    let publication = Publication {
        metadata,
        files: side.files.iter().map(|file| (file.file.as_str(), Some(file.length))).collect(),
        beside: Vec::new(),
        sidecar: Some((sidecar_name(&save.save_id), encode_side(&side)?)),
        check_files: options.check_files,
        control: &options.control,
    };
    // The data files stay on an error: other ranks wrote them, and the next save sweeps them.
    commit.publish(store, publication).map_err(|failed| failed.error)
}

impl Checkpoint {
    /// The records of values, for a reader that unpickles. Of plain data a record made anew, so that nothing of the file
    /// reaches that reader but the data; of anything else what unpickling it would import, and the record as it lies in its
    /// file.
    pub fn value_records(&self, keys: &[String]) -> Result<Vec<(Vec<String>, Vec<u8>)>> {
        self.check_expanded(keys.iter().map(String::as_str))?;
        let one = |key: &String| match self.read_value(key)? {
            LoadedValue::Plain(value) => {
                let record = value_record(&value, None).map_err(|e| Error::invalid(format!("{key:?}: {}", chain(&e))))?;
                Ok((Vec::new(), record))
            }
            LoadedValue::Opaque { classes, record, .. } => Ok((classes, record)),
        };
        Workers::reading(self.store.as_ref()).run(|| keys.par_iter().map(one).collect())?
    }
}
