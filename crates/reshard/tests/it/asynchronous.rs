//! Saves in the background: what was copied is what is written, failures are seen, memory is reused.

use std::sync::Arc;

use reshard::save::StagingPool;
use reshard::{AsyncSaver, Checkpoint, DType, Group, SaveOptions, SaveState, Solo};

use crate::layouts::{Whole, store_at};

fn save_one(
    saver: &AsyncSaver,
    whole: &Whole,
    bytes: &[u8],
    path: &std::path::Path,
) -> reshard::Result<reshard::save::SaveHandle> {
    let mut state = SaveState::new();
    state.insert_bytes(whole.key.clone(), whole.dtype, &whole.shape, bytes)?;
    let group: Arc<dyn Group> = Arc::new(Solo);
    saver.save(group, &state, store_at(path), SaveOptions::default())
}

#[test]
fn what_changes_after_staging_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("w", DType::Float32, &[300, 1000], 1);
    let saver = AsyncSaver::new(1 << 30);
    let mut live = whole.bytes.clone();
    let handle = save_one(&saver, &whole, &live, &folder.path().join("a")).unwrap();
    live.fill(0);
    let report = handle.wait().unwrap();
    assert_eq!(report.total_bytes, whole.bytes.len() as u64);
    assert_eq!(Checkpoint::open(folder.path().join("a").to_str().unwrap()).unwrap().read_whole("w").unwrap(), whole.bytes);
}

#[test]
fn what_exceeds_the_budget_is_written_before_save_returns() {
    let folder = tempfile::tempdir().unwrap();
    let wholes: Vec<Whole> = (0..6).map(|i| Whole::new(&format!("t{i}"), DType::UInt8, &[700_000], i + 1)).collect();
    let saver = AsyncSaver::new(1_500_000);
    let mut live: Vec<Vec<u8>> = wholes.iter().map(|w| w.bytes.clone()).collect();
    let mut state = SaveState::new();
    for (whole, bytes) in wholes.iter().zip(&live) {
        state.insert_bytes(whole.key.clone(), whole.dtype, &whole.shape, bytes).unwrap();
    }
    let handle = saver.save(Arc::new(Solo), &state, store_at(folder.path()), SaveOptions::default()).unwrap();
    live.iter_mut().for_each(|bytes| bytes.fill(9));
    handle.wait().unwrap();
    let checkpoint = Checkpoint::open(folder.path().to_str().unwrap()).unwrap();
    for whole in &wholes {
        assert_eq!(checkpoint.read_whole(&whole.key).unwrap(), whole.bytes);
    }
}

#[test]
fn a_failure_is_seen_at_wait_and_at_the_next_save() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("w", DType::UInt8, &[64], 1);
    let saver = AsyncSaver::new(1 << 20);
    save_one(&saver, &whole, &whole.bytes, folder.path()).unwrap().wait().unwrap();
    // Planning refuses at once: a checkpoint is there.
    assert_eq!(save_one(&saver, &whole, &whole.bytes, folder.path()).unwrap_err().kind(), reshard::ErrorKind::AlreadyExists);
    // A cancelled save fails in the background; the next call tells.
    let mut state = SaveState::new();
    state.insert_bytes("w", whole.dtype, &whole.shape, &whole.bytes).unwrap();
    let mut options = SaveOptions::default();
    options.overwrite = true;
    let handle = saver.save(Arc::new(Solo), &state, store_at(folder.path()), options.clone()).unwrap();
    handle.cancel();
    let mut second = SaveOptions::default();
    second.overwrite = true;
    let outcome = saver.save(Arc::new(Solo), &state, store_at(folder.path()), second);
    match outcome {
        // The cancellation came in time …
        Err(error) => assert_eq!(error.kind(), reshard::ErrorKind::Cancelled),
        // … or the first save had already published.
        Ok(second) => assert!(handle.wait().is_ok() && second.wait().is_ok()),
    }
    assert_eq!(Checkpoint::open(folder.path().to_str().unwrap()).unwrap().read_whole("w").unwrap(), whole.bytes);
}

#[test]
fn the_pool_reserves_within_its_budget() {
    let pool = StagingPool::new(1 << 20);
    pool.reserve(1 << 30).unwrap();
    assert_eq!(pool.budget(), 1 << 20);
}
