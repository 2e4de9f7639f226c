//! Old or new, never neither: a save stopped after every single step, and failing at every single step.

use std::sync::Arc;

use reshard::layout::Placement;
use reshard::storage::faulty::{Failure, Faults, Loss};
use reshard::storage::{Address, Store, StoreOptions};
use reshard::{Checkpoint, DType, ErrorKind, Group, SaveOptions, SaveState, Value, run_threads, save_with};

use crate::layouts::{Cut, Memory, Whole, add_to_save, held, store_at};

const RANKS: usize = 3;

fn generation(number: u64) -> Vec<Whole> {
    vec![
        Whole::new("model.a", DType::Float32, &[7, 5], number * 10 + 1),
        Whole::new("model.b", DType::BFloat16, &[64], number * 10 + 2),
        Whole::new("model.large", DType::UInt8, &[700_000], number * 10 + 3),
    ]
}

fn cut() -> Cut {
    Cut { mesh: vec![RANKS as u64], placements: vec![Placement::Shard(0)] }
}

fn save_generation(number: u64, store: &Arc<dyn Store>) -> Vec<reshard::Result<reshard::SaveReport>> {
    let wholes = generation(number);
    run_threads(RANKS, |group| {
        let rank = group.rank() as u64;
        let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut(), rank, false)).collect();
        let mut state = SaveState::new();
        for (whole, memory) in wholes.iter().zip(&memories) {
            add_to_save(&mut state, whole, memory);
        }
        state.insert_value("step", Value::from(number as i64))?;
        let mut options = SaveOptions::default();
        options.overwrite = true;
        save_with(&group, &state, store, &options)
    })
}

/// Which generation lies there, complete; `None` when there is no checkpoint. Anything in between fails the test.
fn generation_at(store: &Arc<dyn Store>) -> Option<u64> {
    let checkpoint = match Checkpoint::open_store(Arc::clone(store)) {
        Ok(checkpoint) => checkpoint,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Incomplete) => return None,
        Err(error) => panic!("a reader sees neither old nor new: {}", error.full_text()),
    };
    let step = checkpoint.value("step").unwrap();
    let number = (1..=2).find(|n| step == Value::from(*n as i64)).expect("a step that was saved");
    for whole in generation(number) {
        assert_eq!(checkpoint.read_whole(&whole.key).unwrap(), whole.bytes, "{} of generation {number}", whole.key);
    }
    Some(number)
}

fn steps_of_a_save(store: Arc<dyn Store>) -> u64 {
    let faults = Faults::new().only_mutating();
    for result in save_generation(1, &faults.wrap(store)) {
        result.unwrap();
    }
    faults.steps()
}

fn crash_everywhere(make: impl Fn() -> (Arc<dyn Store>, Box<dyn std::any::Any>), loss: Loss, overwriting: bool) {
    let (store, _keep) = make();
    if overwriting {
        save_generation(1, &store).into_iter().for_each(|r| drop(r.unwrap()));
    }
    let steps = steps_of_a_save(store) + 3;
    let mut seen = [0usize; 3];
    for step in 1..=steps {
        let (store, _keep) = make();
        if overwriting {
            save_generation(1, &store).into_iter().for_each(|r| drop(r.unwrap()));
        }
        let faults = Faults::crash_at(step).only_mutating().losing(loss);
        let results = save_generation(2, &faults.wrap(Arc::clone(&store)));
        let found = generation_at(&store);
        let before = overwriting.then_some(1);
        assert!(found == before || found == Some(2), "step {step}: found {found:?}");
        if results.iter().all(Result::is_ok) {
            assert_eq!(found, Some(2), "step {step}: the save returned, so it is there");
        }
        if faults.crashed().is_some() && found == before {
            assert!(results.iter().any(Result::is_err), "step {step}: a crash before publishing is an error");
        }
        seen[found.unwrap_or(0) as usize] += 1;
        // Whatever was left behind, the next save works and sweeps it.
        save_generation(2, &store).into_iter().for_each(|r| drop(r.unwrap()));
        assert_eq!(generation_at(&store), Some(2));
        let files = store.list("").unwrap();
        assert_eq!(files.len(), 2 + RANKS, "step {step}: leftovers: {files:?}");
    }
    let before = usize::from(overwriting);
    assert!(seen[before] > 3 && seen[2] > 0, "the matrix saw both outcomes: {seen:?}");
}

fn local() -> (Arc<dyn Store>, Box<dyn std::any::Any>) {
    let folder = tempfile::tempdir().unwrap();
    (store_at(folder.path()), Box::new(folder))
}

fn memory() -> (Arc<dyn Store>, Box<dyn std::any::Any>) {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let name = format!("memory://crashes-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    (reshard::storage::open(&Address::parse(&name).unwrap(), &StoreOptions::default()).unwrap(), Box::new(()))
}

#[test]
fn on_an_object_store_without_rename_it_is_the_same() {
    let server = crate::server::Server::start();
    let next = std::sync::atomic::AtomicU64::new(0);
    let s3 = || -> (Arc<dyn Store>, Box<dyn std::any::Any>) {
        let number = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let address = Address::parse(&format!("s3://{}/run-{number}", crate::server::BUCKET)).unwrap();
        (reshard::storage::open(&address, &server.options()).unwrap(), Box::new(()))
    };
    crash_everywhere(s3, Loss::Nothing, false);
    crash_everywhere(s3, Loss::Nothing, true);
}

#[test]
fn a_fresh_save_stopped_at_any_step_is_absent_or_complete() {
    crash_everywhere(local, Loss::Nothing, false);
    crash_everywhere(memory, Loss::Nothing, false);
}

#[test]
fn an_overwriting_save_stopped_at_any_step_is_old_or_new() {
    crash_everywhere(local, Loss::Nothing, true);
    crash_everywhere(memory, Loss::Nothing, true);
}

#[test]
fn nothing_that_was_not_synced_is_relied_on() {
    crash_everywhere(local, Loss::Truncate, false);
    crash_everywhere(local, Loss::Truncate, true);
    crash_everywhere(local, Loss::Zero, true);
}

#[test]
fn a_failure_at_any_step_is_an_error_on_every_rank_and_publishes_nothing() {
    for failure in [Failure::Device, Failure::NoSpace] {
        let (store, _keep) = local();
        let steps = steps_of_a_save(store);
        let (mut failed, mut old) = (0, 0);
        for step in 1..=steps {
            let (store, _keep) = local();
            save_generation(1, &store).into_iter().for_each(|r| drop(r.unwrap()));
            let faults = Faults::fail_at(step, failure).only_mutating();
            let results = save_generation(2, &faults.wrap(Arc::clone(&store)));
            let errors = results.iter().filter(|r| r.is_err()).count();
            assert!(errors == 0 || errors == RANKS, "step {step}: {errors} of {RANKS} ranks failed");
            if errors > 0 {
                failed += 1;
                // After `.metadata` got its new name only its durability is in doubt: the new one is there, complete.
                let found = generation_at(&store);
                assert!(found == Some(1) || found == Some(2), "step {step}");
                old += usize::from(found == Some(1));
                for (rank, result) in results.iter().enumerate() {
                    let error = result.as_ref().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Storage, "step {step}, rank {rank}: {}", error.full_text());
                }
                let files = store.list("").unwrap();
                let most = if found == Some(1) { 2 + RANKS + 1 } else { 2 * (2 + RANKS) };
                assert!(files.len() <= most, "step {step}: a failed save leaves nothing behind: {files:?}");
            } else {
                assert_eq!(generation_at(&store), Some(2), "step {step}: removing old files failed, which is a warning");
            }
        }
        assert!(failed > 5 && old + 2 >= failed, "{old} of {failed} failures left the old one");
    }
}

#[test]
fn a_rank_that_dies_is_named_by_the_others() {
    let (store, _keep) = local();
    let wholes = generation(1);
    let results = run_threads(RANKS, |group| {
        if group.rank() == 1 {
            return Ok(());
        }
        let rank = group.rank() as u64;
        let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut(), rank, false)).collect();
        let mut state = SaveState::new();
        for (whole, memory) in wholes.iter().zip(&memories) {
            add_to_save(&mut state, whole, memory);
        }
        save_with(&group, &state, &store, &SaveOptions::default()).map(drop)
    });
    for rank in [0, 2] {
        let error = results[rank].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Group);
        assert!(error.ranks().contains(&1), "{error}");
    }
    assert_eq!(generation_at(&store), None);
}
