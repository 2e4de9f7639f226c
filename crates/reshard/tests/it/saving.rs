//! What a save promises: who overwrites, who writes what, which plan is kept.

use std::sync::Arc;

use reshard::checkpoint::LoadedValue;
use reshard::layout::Placement;
use reshard::leaf::{LoadLeaf, SaveLeaf, Scope};
use reshard::save::PlanCache;
use reshard::{
    Checkpoint, DType, ErrorKind, Group, LoadOptions, LoadState, SaveOptions, SaveState, Solo, Value, load_with, run_threads,
    save_with,
};

use crate::corpus;
use crate::layouts::{Cut, Whole, add_to_save, held, store_at};
use crate::wholes::save_whole;

#[test]
fn overwriting_is_refused_unless_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("m.a", DType::Float32, &[4], 1);
    save_whole(std::slice::from_ref(&whole), folder.path());
    let mut state = SaveState::new();
    state.insert_value("x", Value::from(1)).unwrap();
    let error = save_with(&Solo, &state, &store_at(folder.path()), &SaveOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert!(error.hint().is_some());
    assert_eq!(Checkpoint::open_store(store_at(folder.path())).unwrap().read_whole("m.a").unwrap(), whole.bytes);
}

#[test]
fn each_rank_keeps_its_own_content_and_replicas_must_agree() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    let results = run_threads(3, |group| {
        let mut state = SaveState::new();
        state.insert("rng", None, Scope::PerRank, SaveLeaf::Value(Value::from(group.rank() as i64)))?;
        state.insert_value("epoch", Value::from(4))?;
        save_with(&group, &state, &store, &SaveOptions::default())
    });
    results.into_iter().for_each(|r| drop(r.unwrap()));
    let results = run_threads(3, |group| {
        let checkpoint = Checkpoint::open_store(Arc::clone(&store))?;
        let mut state = LoadState::new();
        state.insert("rng", Scope::PerRank, LoadLeaf::Value)?;
        state.insert_value("epoch")?;
        let loaded = load_with(&group, &checkpoint, &mut state, &LoadOptions::default())?;
        assert_eq!(loaded.values["rng"], LoadedValue::Plain(Value::from(group.rank() as i64)));
        Ok(())
    });
    results.into_iter().for_each(|r| r.unwrap());
    // The same content under a shared key: an error where asked to check, naming key and ranks.
    let other = tempfile::tempdir().unwrap();
    let store = store_at(other.path());
    let results = run_threads(3, |group| {
        let bytes = [u8::from(group.rank() == 2); 8];
        let mut state = SaveState::new();
        state.insert_bytes("drifted", DType::Float32, &[2], &bytes)?;
        let mut options = SaveOptions::default();
        options.check_replicas = true;
        save_with(&group, &state, &store, &options).map(drop)
    });
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("drifted") && text.contains("rank 0") && text.contains("rank 2"), "{text}");
    }
}

#[test]
fn the_second_save_of_a_layout_uses_the_plan_of_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("m.a", DType::Float32, &[9, 4], 1);
    let cut = Cut { mesh: vec![3], placements: vec![Placement::Shard(0)] };
    let caches: Vec<Arc<PlanCache>> = (0..3).map(|_| Arc::new(PlanCache::new())).collect();
    let run = |name: &str, extra: bool| {
        let store = store_at(&folder.path().join(name));
        let results = run_threads(3, |group| {
            let memory = held(&whole, &cut, group.rank() as u64, false);
            let mut state = SaveState::new();
            add_to_save(&mut state, &whole, &memory);
            if extra && group.rank() == 1 {
                state.insert_value("only.here", Value::from(1))?;
            }
            let mut options = SaveOptions::default();
            options.plan_cache = Some(Arc::clone(&caches[group.rank()]));
            save_with(&group, &state, &store, &options)
        });
        assert_eq!(Checkpoint::open_store(store).unwrap().read_whole("m.a").unwrap(), whole.bytes);
        results.into_iter().map(|r| r.unwrap().plan_cached).collect::<Vec<_>>()
    };
    assert_eq!(run("1", false), [false; 3]);
    assert_eq!(run("2", false), [true; 3]);
    assert_eq!(run("3", true), [false; 3], "one rank changed its part");
    assert_eq!(run("4", true), [true; 3]);
}

#[test]
fn a_plan_is_not_kept_for_another_way_of_splitting() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("m.a", DType::Float32, &[9, 4], 1);
    let caches: Vec<Arc<PlanCache>> = (0..2).map(|_| Arc::new(PlanCache::new())).collect();
    let run = |name: &str, split_above: u64| {
        let store = store_at(&folder.path().join(name));
        let results = run_threads(2, |group| {
            let mut state = SaveState::new();
            state.insert_bytes("m.a", DType::Float32, &[9, 4], &whole.bytes)?;
            let mut options = SaveOptions::default();
            options.split_replicated_above = split_above;
            options.plan_cache = Some(Arc::clone(&caches[group.rank()]));
            save_with(&group, &state, &store, &options)
        });
        let reports: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(Checkpoint::open_store(store).unwrap().read_whole("m.a").unwrap(), whole.bytes);
        (reports[0].plan_cached, reports.iter().map(|r| r.records).sum::<u64>())
    };
    assert_eq!(run("whole", 0), (false, 1));
    assert_eq!(run("split", 8), (false, 2));
    assert_eq!(run("split again", 8), (true, 2));
}

#[test]
fn progress_counts_the_bytes_of_the_save_and_their_sync() {
    for (sync, compression) in [(true, None), (false, None), (true, Some(reshard::save::Compression::Zstd))] {
        let folder = tempfile::tempdir().unwrap();
        let wholes = [Whole::new("a", DType::Float32, &[300, 7], 1), Whole::new("b", DType::Int64, &[50], 2)];
        let bytes: u64 = wholes.iter().map(|whole| whole.bytes.len() as u64).sum();
        let mut options = SaveOptions::default();
        (options.sync, options.compression) = (sync, compression);
        corpus::save_state(&wholes, &[], &corpus::rows(1), &corpus::local(folder.path()), &options);
        let control = &options.control;
        assert_eq!((control.total(), control.done()), (bytes, bytes));
        let synced = if sync { bytes } else { 0 };
        assert_eq!((control.to_sync(), control.synced()), (synced, synced));
    }
}
