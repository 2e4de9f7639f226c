//! Times metadata of many chunks: encode and decode, with peak memory.
//!
//! `metadata_scale [TENSORS RANKS]` makes the metadata itself (3,000 × 256 unless told otherwise);
//! `metadata_scale FILE` takes a `.metadata` that torch wrote.

use std::error::Error;
use std::time::Instant;

use reshard_formats::metadata::{Chunk, Entry, EntryKind, FileId, Metadata, StorageInfo, TensorEntry, TensorProperties};
use reshard_formats::{DType, PathSegment};
use reshard_layout::Region;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let bytes = match args.as_slice() {
        [file] => std::fs::read(file)?,
        [tensors, ranks] => make(tensors.parse()?, ranks.parse()?)?.encode()?,
        _ => make(3000, 256)?.encode()?,
    };
    println!("{} bytes, peak so far {} MB", bytes.len(), peak_mb());
    for _ in 0..3 {
        let (start, busy) = (Instant::now(), processor_seconds());
        let metadata = Metadata::decode(&bytes)?;
        println!(
            "decode {:.3?} ({:.3} s of processor): {} chunks, peak {} MB",
            start.elapsed(),
            processor_seconds() - busy,
            metadata.chunk_count(),
            peak_mb()
        );
        let (start, busy) = (Instant::now(), processor_seconds());
        let encoded = metadata.encode()?;
        println!(
            "encode {:.3?} ({:.3} s of processor): {} bytes, peak {} MB",
            start.elapsed(),
            processor_seconds() - busy,
            encoded.len(),
            peak_mb()
        );
    }
    Ok(())
}

fn make(tensors: u64, ranks: u64) -> Result<Metadata, Box<dyn Error>> {
    let mut metadata = Metadata::new();
    metadata.files = (0..ranks).map(|rank| format!("__{rank}_0.distcp")).collect();
    for number in 0..tensors {
        let shape = [ranks * 16, 4096];
        let chunk = |rank: u64| -> Result<Chunk, Box<dyn Error>> {
            let region = Region::new(&[rank * 16, 0], &[16, 4096])?;
            let storage = StorageInfo::new(FileId(u32::try_from(rank)?), number * 132_000, 132_000);
            Ok(Chunk { region, storage })
        };
        let key = format!("layers.{}.mlp.experts.{}.weight", number / 10, number % 10);
        let tensor = TensorEntry {
            properties: TensorProperties::new(DType::BFloat16),
            shape: shape.into_iter().collect(),
            chunks: (0..ranks).map(chunk).collect::<Result<_, _>>()?,
            extra: None,
        };
        let path = Some(vec![PathSegment::from("model"), PathSegment::from(key.as_str())]);
        metadata.entries.insert(format!("model.{key}"), Entry { path, kind: EntryKind::Tensor(tensor) });
    }
    Ok(metadata)
}

/// The process's largest resident size so far, where the system tells.
fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}

/// Processor time of this thread, where the system tells: on a busy machine, elapsed time says little.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split(' ').next().and_then(|n| n.parse::<f64>().ok());
    nanoseconds.unwrap_or(0.0) / 1e9
}
