//! Many `torch.save` files in one pass: what a trainer's folder consists of.

use std::collections::HashMap;

use reshard_formats::own::Checksums;
use reshard_formats::{FileTensor, TorchFileWriter, Value};
use reshard_layout::Region;
use reshard_state::{Dict, Tree, unflatten_entries};
use reshard_storage::Store;

use super::output::{Framing, OutputFile, OutputOptions, Piece, Plan, PlanValue, write};
use crate::commit::discard;
use crate::error::{Error, Geometry, Result, chain};

/// So many files are open at once.
const OPEN: usize = 128;

/// A file to write: its path, and what it holds. The storages of its tensors are the plan's.
pub(super) struct TorchFile {
    pub(super) name: String,
    pub(super) content: Tree<FileTensor>,
}

/// A tensor of the plan, as a file holds it.
pub(super) fn file_tensor(plan: &Plan<'_>, tensor: usize, requires_grad: bool) -> Tree<FileTensor> {
    let known = &plan.tensors[tensor];
    Tree::Tensor(FileTensor {
        dtype: known.dtype,
        shape: known.shape.clone(),
        requires_grad,
        parameter: false,
        storage: tensor as u64,
    })
}

/// Tensors and values of the plan, as the nested dict that their paths make.
pub(super) fn nested<'v>(
    plan: &Plan<'_>,
    tensors: impl Iterator<Item = usize>,
    values: impl Iterator<Item = (&'v PlanValue, &'v Value)>,
) -> Result<Dict<FileTensor>> {
    let tensors = tensors.map(|i| {
        let known = &plan.tensors[i];
        (known.key.clone(), known.path.clone(), file_tensor(plan, i, known.requires_grad))
    });
    let values = values.map(|(value, plain)| (value.key.clone(), value.path.clone(), Tree::from_value(plain.clone())));
    unflatten_entries(tensors.chain(values))
        .map_err(|e| Error::unsupported(format!("the keys do not form a tree: {}", chain(&e))))
}

struct Files<'f> {
    layouts: &'f [TorchFileWriter],
    /// File and storage of each piece.
    pieces: Vec<(usize, usize)>,
}

/// Writes all files, whose names nothing had before. When it fails, nothing of them stays. Says how many bytes of tensors they have.
pub(super) fn write_files(plan: &Plan<'_>, files: &[TorchFile], store: &dyn Store, options: &OutputOptions) -> Result<u64> {
    let written = files.chunks(OPEN).map(|batch| write_batch(plan, batch, store, options)).sum::<Result<u64>>();
    if written.is_err() {
        // Also what could not be created: it may be there all the same.
        discard(files.iter().map(|file| file.name.as_str()), store);
    }
    written
}

fn write_batch(plan: &Plan<'_>, files: &[TorchFile], store: &dyn Store, options: &OutputOptions) -> Result<u64> {
    let unwritable = |name: &str| {
        let name = name.to_owned();
        move |e| Error::unsupported(format!("{name} cannot be laid out: {}", chain(&e)))
    };
    let layouts: Vec<TorchFileWriter> = files
        .iter()
        .map(|file| TorchFileWriter::new(&file.content, None).map_err(unwritable(&file.name)))
        .collect::<Result<_>>()?;
    let lost = || Error::internal("a storage has no place");
    let mut outputs = Vec::with_capacity(files.len());
    let mut pieces = Vec::new();
    let mut places = Vec::new();
    for (number, (file, layout)) in files.iter().zip(&layouts).enumerate() {
        outputs.push(OutputFile { name: file.name.clone(), length: layout.total_len(), lead: layout.head().to_vec() });
        for (storage, (&tensor, &(data_at, data))) in layout.storages().iter().zip(&layout.placements()).enumerate() {
            let tensor = usize::try_from(tensor).map_err(|_| lost())?;
            let (offset, head) = layout.before(storage).ok_or_else(lost)?;
            let (_, tail) = layout.after(storage, 0).ok_or_else(lost)?;
            let region = Region::whole(&plan.tensors[tensor].shape).proven()?;
            let length = data_at + data + tail.len() as u64 - offset;
            pieces.push(Piece { tensor, region, file: number, offset, head: head.len() as u64, data, length });
            places.push((number, storage));
        }
    }
    write(plan, &outputs, &pieces, &Files { layouts: &layouts, pieces: places }, store, options)?;
    Ok(pieces.iter().map(|piece| piece.data).sum())
}

impl Framing for Files<'_> {
    fn sums(&self) -> bool {
        true
    }

    fn head(&self, piece: usize) -> Result<Vec<u8>> {
        let (file, storage) = self.pieces[piece];
        let (_, bytes) = self.layouts[file].before(storage).ok_or_else(|| Error::internal("a storage has no place"))?;
        Ok(bytes)
    }

    fn tail(&self, piece: usize, sums: Checksums) -> Result<Vec<u8>> {
        let (file, storage) = self.pieces[piece];
        let after = self.layouts[file].after(storage, sums.crc32());
        after.map(|(_, bytes)| bytes).ok_or_else(|| Error::internal("a storage has no place"))
    }

    fn ending(&self, file: usize, sums: &[Checksums]) -> Result<Option<(u64, Vec<u8>)>> {
        let own: HashMap<usize, u32> = self
            .pieces
            .iter()
            .zip(sums)
            .filter(|((of, _), _)| *of == file)
            .map(|((_, storage), sums)| (*storage, sums.crc32()))
            .collect();
        let crcs: Vec<u32> = (0..own.len()).map(|storage| own.get(&storage).copied().unwrap_or(0)).collect();
        let tail = self.layouts[file].tail(&crcs);
        tail.map(Some).map_err(|e| Error::internal(format!("the file's end cannot be written: {}", chain(&e))))
    }
}
