//! Metadata and pickle at a tenth of the scale that the example `metadata_scale` shows.

use divan::Bencher;
use divan::counter::BytesCount;
use reshard_formats::metadata::{Chunk, Entry, EntryKind, FileId, StorageInfo, TensorEntry, TensorProperties};
use reshard_formats::pickle::{Policy, decode};
use reshard_formats::{DType, Metadata, PathSegment};
use reshard_layout::Region;

fn main() {
    divan::main();
}

/// Tensors in chunks of rows, one per rank.
fn metadata(tensors: u64, ranks: u64) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.files = (0..ranks).map(|rank| format!("__{rank}_0.distcp")).collect();
    for number in 0..tensors {
        let chunks = (0..ranks).filter_map(|rank| {
            let region = Region::new(&[rank * 16, 0], &[16, 4096]).ok()?;
            let storage = StorageInfo::new(FileId(rank as u32), number * 132_000, 132_000);
            Some(Chunk { region, storage })
        });
        let tensor = TensorEntry {
            properties: TensorProperties::new(DType::BFloat16),
            shape: [ranks * 16, 4096].into_iter().collect(),
            chunks: chunks.collect(),
            extra: None,
        };
        let key = format!("layers.{number}.weight");
        let path = Some(vec![PathSegment::from("model"), PathSegment::from(key.as_str())]);
        metadata.entries.insert(format!("model.{key}"), Entry { path, kind: EntryKind::Tensor(tensor) });
    }
    metadata
}

fn encoded(tensors: u64, ranks: u64) -> Vec<u8> {
    metadata(tensors, ranks).encode().unwrap_or_default()
}

const SIZES: &[(u64, u64)] = &[(300, 8), (300, 256)];

#[divan::bench(args = SIZES)]
fn decode_metadata(bencher: Bencher<'_, '_>, (tensors, ranks): (u64, u64)) {
    let bytes = encoded(tensors, ranks);
    bencher.counter(BytesCount::new(bytes.len())).bench_local(|| Metadata::decode(&bytes).ok());
}

#[divan::bench(args = SIZES)]
fn encode_metadata(bencher: Bencher<'_, '_>, (tensors, ranks): (u64, u64)) {
    let metadata = metadata(tensors, ranks);
    bencher.bench_local(|| metadata.encode().ok());
}

#[divan::bench(args = SIZES)]
fn decode_pickle(bencher: Bencher<'_, '_>, (tensors, ranks): (u64, u64)) {
    let bytes = encoded(tensors, ranks);
    let input = bytes.as_slice();
    bencher.counter(BytesCount::new(input.len())).bench_local(|| decode(input, Policy::metadata()).map(|d| d.root()));
}

#[divan::bench(args = SIZES)]
fn check_coverage(bencher: Bencher<'_, '_>, (tensors, ranks): (u64, u64)) {
    let metadata = metadata(tensors, ranks);
    bencher.bench_local(|| metadata.check_coverage().ok());
}
