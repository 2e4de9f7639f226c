//! Writing a DCP folder from streams, as if so many ranks had saved it: the same records, index, sidecar and commit as a
//! save, but with the memory of a few blocks.

use std::collections::HashMap;
use std::sync::Arc;

use reshard_formats::own::{Checksums, FileIndex, IndexedRecord, KeyEntry, RecordChecksums, Sidecar, TensorFacts};
use reshard_formats::{Metadata, value_record};
use reshard_layout::Region;
use reshard_storage::Store;

use super::output::{Framing, OutputFile, OutputOptions, Piece, Plan, PlanTensor, write};
use super::packed::{PackedFolder, write_packed};
use super::{Written, opaque};
use crate::checkpoint::LoadedValue;
use crate::commit::{Assembly, Commit, Failed, Publication, encode_side};
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{data_file, sidecar_name};
use crate::mesh::RankPiece;
use crate::plan::files::{FrameSizes, frame, lay_out};

/// One rank's file.
pub(super) struct RankFile {
    pub(super) rank: usize,
    pub(super) name: String,
    /// Positions of its pieces.
    pub(super) pieces: Vec<usize>,
    /// Where the tensor records end.
    pub(super) end: u64,
    /// Positions and records of the values it holds.
    pub(super) values: Vec<(usize, Vec<u8>)>,
}

pub(super) struct DcpFraming<'f, 'p> {
    pub(super) plan: &'f Plan<'p>,
    pub(super) pieces: &'f [Piece],
    pub(super) files: &'f [RankFile],
    pub(super) save_id: &'f str,
    pub(super) ranks: usize,
}

/// Writes and publishes. What lay at the path before stays until the new checkpoint is complete.
pub(crate) fn write_dcp(
    plan: &Plan<'_>,
    records: &[RankPiece],
    ranks: usize,
    overwrite: bool,
    store: &Arc<dyn Store>,
    options: &OutputOptions,
) -> Result<Written> {
    let store = store.as_ref();
    let commit = Commit::begin(store, overwrite)?;
    let save_id = commit.save_id.clone();
    let (files, pieces) = lay_out_ranks(plan, records, ranks, commit.named.then_some(save_id.as_str()))?;
    if let Some(compression) = options.compression {
        return write_packed(plan, PackedFolder { ranks, files, pieces, compression, commit, store }, options);
    }
    let framing = DcpFraming { plan, pieces: &pieces, files: &files, save_id: &save_id, ranks };
    let zero = vec![Checksums::ZERO; pieces.len()];
    let mut outputs = Vec::with_capacity(files.len());
    for (number, file) in files.iter().enumerate() {
        let ending = framing.ending(number, &zero)?.map_or(0, |(_, bytes)| bytes.len() as u64);
        outputs.push(OutputFile { name: file.name.clone(), length: file.end + ending, lead: Vec::new() });
    }
    let sums = write(plan, &outputs, &pieces, &framing, store, options)?;
    match publish(commit, &framing, &outputs, &sums, store, options) {
        Ok(warnings) => {
            let bytes = pieces.iter().map(|p| p.data).sum();
            Ok(Written { files: outputs.into_iter().map(|file| file.name).collect(), bytes, warnings })
        }
        Err(failed) => Err(failed.discarding(outputs.iter().map(|f| f.name.as_str()), store)),
    }
}

pub(super) fn publish(
    commit: Commit,
    framing: &DcpFraming<'_, '_>,
    outputs: &[OutputFile],
    sums: &[Checksums],
    store: &dyn Store,
    options: &OutputOptions,
) -> Result<Vec<String>, Failed> {
    let (metadata, side) = assemble(framing, outputs, sums)?;
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    let publication = Publication {
        metadata: &metadata.encode().map_err(Error::from)?,
        files: outputs.iter().map(|file| (file.name.as_str(), Some(file.length))).collect(),
        beside: Vec::new(),
        sidecar: Some((sidecar_name(&side.save_id), encode_side(&side)?)),
        check_files: true,
        control: &options.control,
    };
    commit.publish(store, publication)
}

fn lay_out_ranks(
    plan: &Plan<'_>,
    records: &[RankPiece],
    ranks: usize,
    save_id: Option<&str>,
) -> Result<(Vec<RankFile>, Vec<Piece>)> {
    let mut by_rank: Vec<Vec<&RankPiece>> = vec![Vec::new(); ranks.max(1)];
    for record in records {
        by_rank.get_mut(record.rank).ok_or_else(|| Error::internal(format!("there is no rank {}", record.rank)))?.push(record);
    }
    let mut sizes = FrameSizes::default();
    let mut files: Vec<RankFile> = Vec::new();
    let mut pieces: Vec<Piece> = Vec::with_capacity(records.len());
    for (rank, own) in by_rank.into_iter().enumerate() {
        let values = match rank {
            0 => plan
                .values
                .iter()
                .enumerate()
                .map(|(i, v)| Ok((i, value_bytes(&v.key, &v.value)?)))
                .collect::<Result<Vec<_>>>()?,
            _ => Vec::new(),
        };
        if own.is_empty() && values.is_empty() {
            continue;
        }
        let shapes = own.iter().map(|r| (plan.tensors[r.tensor].dtype, plan.tensors[r.tensor].requires_grad, r.region.sizes()));
        let (placed, ends) = lay_out(shapes, 1, &mut sizes)?;
        let first = pieces.len();
        for (record, placed) in own.iter().zip(placed) {
            pieces.push(Piece {
                tensor: record.tensor,
                region: record.region.clone(),
                file: files.len(),
                offset: placed.offset,
                head: placed.data_offset,
                data: placed.data_length,
                length: placed.length,
            });
        }
        let end = ends.first().copied().unwrap_or(0);
        files.push(RankFile { rank, name: data_file(rank, 0, save_id), pieces: (first..pieces.len()).collect(), end, values });
    }
    Ok((files, pieces))
}

fn value_bytes(key: &str, value: &LoadedValue) -> Result<Vec<u8>> {
    match value {
        LoadedValue::Plain(value) => {
            value_record(value, None).map_err(|e| Error::unsupported(format!("the value of {key:?} cannot be saved: {e}")))
        }
        LoadedValue::Opaque { record, .. } if !record.is_empty() => Ok(record.clone()),
        LoadedValue::Opaque { class, .. } => Err(opaque(key, class)),
    }
}

impl Framing for DcpFraming<'_, '_> {
    fn sums(&self) -> bool {
        true
    }

    fn head(&self, piece: usize) -> Result<Vec<u8>> {
        let (tensor, sizes) = self.shape(piece);
        Ok(frame(tensor.dtype, tensor.requires_grad, sizes)?.head)
    }

    fn tail(&self, piece: usize, sums: Checksums) -> Result<Vec<u8>> {
        let (tensor, sizes) = self.shape(piece);
        Ok(frame(tensor.dtype, tensor.requires_grad, sizes)?.tail(sums.crc32()))
    }

    /// The values and the index.
    fn ending(&self, file: usize, sums: &[Checksums]) -> Result<Option<(u64, Vec<u8>)>> {
        let file = &self.files[file];
        let mut table: Vec<KeyEntry> = Vec::new();
        let mut position: HashMap<usize, u32> = HashMap::new();
        let mut records = Vec::with_capacity(file.pieces.len() + file.values.len());
        for (key, region, sum) in self.records(file, sums) {
            let key = *position.entry(key).or_insert_with(|| {
                table.push(self.key_entry(key));
                table.len() as u32 - 1
            });
            records.push(IndexedRecord { key, region, sum });
        }
        let mut bytes: Vec<u8> = Vec::new();
        file.values.iter().for_each(|(_, record)| bytes.extend_from_slice(record));
        let index = FileIndex {
            save_id: self.save_id.to_owned(),
            rank: file.rank as u32,
            ranks: self.ranks as u32,
            files: 1,
            table,
            records,
        };
        bytes.extend(index.encode().map_err(|e| Error::internal(format!("the index of {} cannot be written: {e}", file.name)))?);
        Ok(Some((file.end, bytes)))
    }
}

impl DcpFraming<'_, '_> {
    /// The records of a file in their order: the position of their key in the plan, tensors before values, the region, and
    /// where it lies.
    fn records<'r>(
        &'r self,
        file: &'r RankFile,
        sums: &'r [Checksums],
    ) -> impl Iterator<Item = (usize, Option<Region>, RecordChecksums)> {
        let tensors = file.pieces.iter().map(move |&i| {
            let piece = &self.pieces[i];
            (piece.tensor, Some(piece.region.clone()), piece_sum(piece, sums[i]))
        });
        let values = file.values.iter().scan(file.end, move |at, (i, record)| {
            let sum = RecordChecksums::of_value(*at, record.len() as u64, Some(Checksums::of(record)));
            *at += sum.length;
            Some((self.plan.tensors.len() + i, None, sum))
        });
        tensors.chain(values)
    }

    fn key_entry(&self, key: usize) -> KeyEntry {
        match self.plan.tensors.get(key) {
            Some(tensor) => KeyEntry::new(tensor.key.clone(), tensor.path.clone(), Some(facts(tensor))),
            None => {
                let value = &self.plan.values[key - self.plan.tensors.len()];
                KeyEntry::new(value.key.clone(), value.path.clone(), None)
            }
        }
    }

    fn shape(&self, piece: usize) -> (&PlanTensor, &[u64]) {
        let piece = &self.pieces[piece];
        (&self.plan.tensors[piece.tensor], piece.region.sizes())
    }
}

fn piece_sum(piece: &Piece, sums: Checksums) -> RecordChecksums {
    RecordChecksums {
        offset: piece.offset,
        length: piece.length,
        data_offset: piece.head,
        data_length: piece.data,
        sums: Some(sums),
    }
}

fn facts(tensor: &PlanTensor) -> TensorFacts {
    TensorFacts { dtype: tensor.dtype, requires_grad: tensor.requires_grad, shape: tensor.shape.clone() }
}

fn assemble(framing: &DcpFraming<'_, '_>, outputs: &[OutputFile], sums: &[Checksums]) -> Result<(Metadata, Sidecar)> {
    let plan = framing.plan;
    let mut assembly = Assembly::new(framing.save_id, framing.ranks as u32);
    for tensor in &plan.tensors {
        assembly.add_key(tensor.key.clone(), tensor.path.clone(), Some(facts(tensor)));
    }
    for value in &plan.values {
        assembly.add_key(value.key.clone(), value.path.clone(), None);
    }
    for (file, output) in framing.files.iter().zip(outputs) {
        let id = assembly.add_file(file.name.clone(), output.length)?;
        for (key, region, sum) in framing.records(file, sums) {
            assembly.add_record(key, region, id, sum)?;
        }
    }
    assembly.finish()
}
