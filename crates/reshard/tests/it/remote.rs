//! Reading from far away: every request takes a while, so many must run at once and each must bring much.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reshard::checkpoint::LoadedValue;
use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::digest::{DigestOptions, digest};
use reshard::storage::Store;
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, DType, LoadOptions, LoadState, SaveOptions, SaveState, Solo, Value, load_with, save_with};

use crate::layouts::{Whole, store_at};
use crate::object_like::{Ordered, Reads};

const AWAY: Duration = Duration::from_millis(20);

fn tensors(count: u64, rows: u64) -> Vec<Whole> {
    (0..count).map(|i| Whole::new(&format!("layers.{i}.weight"), DType::Float32, &[rows, 256], i + 1)).collect()
}

fn saved_far_away(wholes: &[Whole], values: i64) -> (Arc<dyn Store>, Arc<Reads>) {
    let far = Arc::new(Ordered { away: AWAY, ..Ordered::default() });
    let reads = Arc::clone(&far.reads);
    let store: Arc<dyn Store> = far;
    let mut state = SaveState::new();
    for whole in wholes {
        state.insert_bytes(whole.key.clone(), whole.dtype, &whole.shape, &whole.bytes).unwrap();
    }
    for i in 0..values {
        state.insert_value(format!("value.{i}"), Value::Int(i.into())).unwrap();
    }
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    (store, reads)
}

/// How many reads the work made, how many at once, and how long it took.
fn counted(reads: &Reads, work: impl FnOnce()) -> (usize, usize, Duration) {
    let before = reads.all.load(Ordering::SeqCst);
    reads.most_at_once.store(0, Ordering::SeqCst);
    let start = Instant::now();
    work();
    (reads.all.load(Ordering::SeqCst) - before, reads.most_at_once.load(Ordering::SeqCst), start.elapsed())
}

#[test]
fn small_tensors_come_in_few_requests_and_values_at_once() {
    let wholes = tensors(320, 64);
    let (store, reads) = saved_far_away(&wholes, 160);
    let checkpoint = Checkpoint::open_store(store).unwrap();
    let mut memory: Vec<Vec<u8>> = wholes.iter().map(|whole| vec![0; whole.bytes.len()]).collect();
    let mut state = LoadState::new();
    for (whole, memory) in wholes.iter().zip(&mut memory) {
        state.insert_bytes(whole.key.clone(), whole.dtype, &whole.shape, memory).unwrap();
    }
    (0..160).for_each(|i| state.insert_value(format!("value.{i}")).unwrap());
    let (count, at_once, elapsed) = counted(&reads, || {
        let loaded = load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap();
        assert_eq!(loaded.values["value.77"], LoadedValue::Plain(Value::Int(77i64.into())));
    });
    drop(state);
    assert!(wholes.iter().zip(&memory).all(|(whole, memory)| whole.bytes == *memory));
    // 20 MiB in batches of 8, and a request for each value.
    assert!(count <= 160 + 8, "{count} reads");
    assert!(at_once >= 16, "at most {at_once} reads at once");
    assert!(elapsed < AWAY * count as u32 / 4, "{count} reads took {elapsed:?}");
}

#[test]
fn large_tensors_are_read_and_checked_at_once() {
    let wholes = tensors(24, 8192);
    let (store, reads) = saved_far_away(&wholes, 0);
    let checkpoint = Checkpoint::open_store(store).unwrap();
    let mut memory: Vec<Vec<u8>> = wholes.iter().map(|whole| vec![0; whole.bytes.len()]).collect();
    let mut state = LoadState::new();
    for (whole, memory) in wholes.iter().zip(&mut memory) {
        state.insert_bytes(whole.key.clone(), whole.dtype, &whole.shape, memory).unwrap();
    }
    let (count, at_once, _) = counted(&reads, || {
        let loaded = load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap();
        assert_eq!(loaded.report.verified, 24);
    });
    drop(state);
    assert!(wholes.iter().zip(&memory).all(|(whole, memory)| whole.bytes == *memory));
    // One request for each: what is split further is the store's affair.
    assert_eq!(count, 24);
    assert!(at_once >= 8, "at most {at_once} reads at once");

    let (_, at_once, _) = counted(&reads, || {
        let report = verify(&checkpoint, &VerifyOptions::default()).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    });
    assert!(at_once >= 8, "verify: at most {at_once} reads at once");
    let folder = tempfile::tempdir().unwrap();
    let (_, at_once, _) = counted(&reads, || {
        let to = Destination::folder(store_at(folder.path()));
        convert(&checkpoint, &to, ConvertTarget::Dcp { ranks: 2 }, &ConvertOptions::default()).unwrap();
    });
    assert!(at_once >= 8, "convert: at most {at_once} reads at once");
    let (_, at_once, _) = counted(&reads, || {
        digest(&checkpoint, &DigestOptions::default()).unwrap();
    });
    assert!(at_once >= 8, "digest: at most {at_once} reads at once");
}
