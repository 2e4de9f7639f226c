//! Writes a folder with nothing but the `.metadata` of a large job, to time `inspect` and `ls` with.
//!
//! `big_metadata FOLDER [TENSORS RANKS]`; 3,000 × 256 unless told otherwise.

use std::error::Error;
use std::path::Path;

use reshard::DType;
use reshard::formats::PathSegment;
use reshard::formats::metadata::{Chunk, Entry, EntryKind, FileId, Metadata, StorageInfo, TensorEntry, TensorProperties};
use reshard::layout::Region;

#[allow(dead_code, reason = "a test takes the rest of this file as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.as_slice() {
        [folder] => write(Path::new(folder), 3000, 256),
        [folder, tensors, ranks] => write(Path::new(folder), tensors.parse()?, ranks.parse()?),
        _ => Err("usage: big_metadata FOLDER [TENSORS RANKS]".into()),
    }
}

/// Writes `.metadata` of so many tensors, each cut into a chunk for each rank.
pub(crate) fn write(folder: &Path, tensors: u64, ranks: u64) -> Result<(), Box<dyn Error>> {
    let mut metadata = Metadata::new();
    metadata.files = (0..ranks).map(|rank| format!("__{rank}_0.distcp")).collect();
    for number in 0..tensors {
        let chunk = |rank: u64| -> Result<Chunk, Box<dyn Error>> {
            let region = Region::new(&[rank * 16, 0], &[16, 4096])?;
            let storage = StorageInfo::new(FileId(u32::try_from(rank)?), number * 132_000, 132_000);
            Ok(Chunk { region, storage })
        };
        let key = format!("layers.{}.mlp.experts.{}.weight", number / 10, number % 10);
        let tensor = TensorEntry {
            properties: TensorProperties::new(DType::BFloat16),
            shape: [ranks * 16, 4096].into_iter().collect(),
            chunks: (0..ranks).map(chunk).collect::<Result<_, _>>()?,
            extra: None,
        };
        let path = Some(vec![PathSegment::from("model"), PathSegment::from(key.as_str())]);
        metadata.entries.insert(format!("model.{key}"), Entry { path, kind: EntryKind::Tensor(tensor) });
    }
    std::fs::create_dir_all(folder)?;
    Ok(std::fs::write(folder.join(".metadata"), metadata.encode()?)?)
}
