//! Writing one `torch.save` file, as PyTorch's own `dcp_to_torch_save` would, but streaming.

use reshard_formats::own::Checksums;
use reshard_formats::{FileTensor, TorchFileWriter};
use reshard_layout::Region;
use reshard_state::Tree;
use reshard_storage::Store;

use super::output::{Framing, OutputFile, OutputOptions, Piece, Plan, write};
use super::publish::{check_free, promote, staged, sweep};
use super::torch_files::nested;
use super::{Written, opaque};
use crate::checkpoint::LoadedValue;
use crate::commit::{claim, discard};
use crate::error::{Error, Geometry, Result, StorageContext, chain};

/// The name of the file in a folder of its own.
pub(super) const TORCH_FILE: &str = "checkpoint.pt";

struct TorchFraming<'f> {
    layout: &'f TorchFileWriter,
    /// The storage of each piece.
    storages: Vec<usize>,
}

pub(super) fn write_torch(
    plan: &Plan<'_>,
    file: Option<&str>,
    overwrite: bool,
    store: &dyn Store,
    options: &OutputOptions,
) -> Result<Written> {
    // One file among others does not concern whoever writes the others.
    let _lock = if file.is_none() { Some(claim(store)?) } else { None };
    let name = file.unwrap_or(TORCH_FILE);
    check_free(store, name, overwrite)?;
    let layout = TorchFileWriter::new(&tree(plan)?, None)
        .map_err(|e| Error::unsupported(format!("{name} cannot be laid out: {}", chain(&e))))?;
    let mut pieces = Vec::with_capacity(plan.tensors.len());
    let mut storages = Vec::with_capacity(plan.tensors.len());
    for (storage, (&tensor, &(data_at, data))) in layout.storages().iter().zip(&layout.placements()).enumerate() {
        let tensor = usize::try_from(tensor).map_err(|_| Error::internal("a storage has no tensor"))?;
        let (offset, head) = before(&layout, storage)?;
        let tail = after(&layout, storage, 0)?;
        let region = Region::whole(&plan.tensors[tensor].shape).proven()?;
        let length = data_at + data + tail.len() as u64 - offset;
        pieces.push(Piece { tensor, region, file: 0, offset, head: head.len() as u64, data, length });
        storages.push(storage);
    }
    let files = [OutputFile { name: staged(store, name), length: layout.total_len(), lead: layout.head().to_vec() }];
    store.prepare().doing(|| format!("preparing {}", store.describe()))?;
    write(plan, &files, &pieces, &TorchFraming { layout: &layout, storages }, store, options)?;
    let published = options.control.check("publishing").and_then(|()| promote(store, &files[0].name, name, overwrite));
    if let Err(error) = published {
        discard(files.iter().map(|f| f.name.as_str()).filter(|f| *f != name), store);
        return Err(error);
    }
    if options.sync {
        store.sync().doing(|| "syncing the folder".into())?;
    }
    sweep(store, name);
    let bytes = pieces.iter().map(|p| p.data).sum();
    Ok(Written { files: vec![name.to_owned()], bytes, warnings: Vec::new() })
}

fn before(layout: &TorchFileWriter, storage: usize) -> Result<(u64, Vec<u8>)> {
    layout.before(storage).ok_or_else(|| Error::internal("a storage has no place"))
}

fn after(layout: &TorchFileWriter, storage: usize, crc32: u32) -> Result<Vec<u8>> {
    layout.after(storage, crc32).map(|(_, bytes)| bytes).ok_or_else(|| Error::internal("a storage has no place"))
}

impl Framing for TorchFraming<'_> {
    fn sums(&self) -> bool {
        true
    }

    fn head(&self, piece: usize) -> Result<Vec<u8>> {
        before(self.layout, self.storages[piece]).map(|(_, bytes)| bytes)
    }

    fn tail(&self, piece: usize, sums: Checksums) -> Result<Vec<u8>> {
        after(self.layout, self.storages[piece], sums.crc32())
    }

    fn ending(&self, _file: usize, sums: &[Checksums]) -> Result<Option<(u64, Vec<u8>)>> {
        let crcs: Vec<u32> = sums.iter().map(|s| s.crc32()).collect();
        let tail =
            self.layout.tail(&crcs).map_err(|e| Error::internal(format!("the file's end cannot be written: {}", chain(&e))))?;
        Ok(Some(tail))
    }
}

/// The nested state dict, by the paths of the keys.
fn tree(plan: &Plan<'_>) -> Result<Tree<FileTensor>> {
    let values = plan.values.iter().map(|value| match &value.value {
        LoadedValue::Plain(plain) => Ok((value, plain)),
        LoadedValue::Opaque { class, .. } => Err(opaque(&value.key, class)),
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let dict = nested(plan, 0..plan.tensors.len(), values.into_iter())?;
    Ok(Tree::Dict(dict))
}
