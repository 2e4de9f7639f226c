//! The core of the engine's tests on MPI ranks: `mpirun -n 4 mpi_suite` (see `make test-mpi`).
//!
//! Every rank runs every case; rank 0 prints what passed. A case that fails on any rank fails the run.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by stopping")]

#[allow(dead_code)]
#[path = "../tests/it/layouts.rs"]
mod layouts;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use layouts::{Cut, Memory, Whole, add_to_load, add_to_save, fitted, held, store_at};
use mpi::Threading;
use reshard::checkpoint::LoadedValue;
use reshard::group::Mpi;
use reshard::layout::Placement;
use reshard::leaf::{LoadLeaf, SaveLeaf, Scope};
use reshard::save::PlanCache;
use reshard::{Checkpoint, DType, ErrorKind, Group, LoadOptions, LoadState, SaveOptions, SaveState, Value, load_with, save_with};

type Case = (&'static str, fn(&Mpi, &Path));

fn wholes() -> Vec<Whole> {
    vec![
        Whole::new("m.a", DType::Float32, &[13, 8], 1),
        Whole::new("m.b", DType::BFloat16, &[6], 2),
        Whole::new("m.scalar", DType::Int64, &[], 3),
        Whole::new("m.large", DType::UInt8, &[900_001], 4),
        Whole::new("m.empty", DType::Float16, &[0, 5], 5),
    ]
}

fn cuts(group: &Mpi) -> Vec<Cut> {
    let ranks = group.size() as u64;
    let mut cuts = vec![
        Cut { mesh: vec![ranks], placements: vec![Placement::Shard(0)] },
        Cut { mesh: vec![ranks], placements: vec![Placement::Shard(1)] },
        Cut { mesh: vec![ranks], placements: vec![Placement::Replicate] },
    ];
    if ranks.is_multiple_of(2) {
        cuts.push(Cut { mesh: vec![2, ranks / 2], placements: vec![Placement::Replicate, Placement::Shard(0)] });
        cuts.push(Cut { mesh: vec![2, ranks / 2], placements: vec![Placement::Shard(0), Placement::Shard(1)] });
    }
    cuts
}

fn save_under(group: &Mpi, cut: &Cut, path: &Path, options: &SaveOptions) -> reshard::Result<reshard::SaveReport> {
    let rank = group.rank() as u64;
    let wholes = wholes();
    let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &fitted(cut, w.shape.len()), rank, true)).collect();
    let mut state = SaveState::new();
    for (whole, memory) in wholes.iter().zip(&memories) {
        add_to_save(&mut state, whole, memory);
    }
    state.insert_value("step", Value::from(7))?;
    state.insert("rng", None, Scope::PerRank, SaveLeaf::Value(Value::from(rank as i64 * 100)))?;
    save_with(group, &state, &store_at(path), options)
}

fn load_under(group: &Mpi, cut: &Cut, path: &Path) -> reshard::Result<()> {
    let rank = group.rank() as u64;
    let wholes = wholes();
    let checkpoint = Checkpoint::open_store(store_at(path))?;
    let mut memories: Vec<Vec<Memory>> = wholes
        .iter()
        .map(|w| fitted(cut, w.shape.len()).pieces(&w.shape, rank).into_iter().map(|r| Memory::new(r, w.dtype, false)).collect())
        .collect();
    let mut state = LoadState::new();
    for (whole, memory) in wholes.iter().zip(&mut memories) {
        add_to_load(&mut state, whole, memory);
    }
    state.insert_value("step")?;
    state.insert("rng", Scope::PerRank, LoadLeaf::Value)?;
    let loaded = load_with(group, &checkpoint, &mut state, &LoadOptions::default())?;
    drop(state);
    assert_eq!(loaded.values["step"], LoadedValue::Plain(Value::from(7)));
    assert_eq!(loaded.values["rng"], LoadedValue::Plain(Value::from(rank as i64 * 100)));
    for (whole, memory) in wholes.iter().zip(&mut memories) {
        for piece in memory {
            assert_eq!(piece.packed(whole.dtype), whole.slice(&piece.region), "{} {}", whole.key, piece.region);
        }
    }
    Ok(())
}

fn every_layout_to_every_layout(group: &Mpi, dir: &Path) {
    for (i, from) in cuts(group).iter().enumerate() {
        let path = dir.join(format!("cut-{i}"));
        save_under(group, from, &path, &SaveOptions::default()).expect("save");
        for to in cuts(group) {
            load_under(group, &to, &path).expect("load");
        }
    }
}

fn bytes_of_any_length_arrive(group: &Mpi, _dir: &Path) {
    for length in [0usize, 1, 1000, 3_000_000] {
        let mine = vec![group.rank() as u8; length + group.rank()];
        let all = group.all_gather(&mine).expect("gather");
        for (rank, bytes) in all.iter().enumerate() {
            assert_eq!(*bytes, vec![rank as u8; length + rank]);
        }
        let sent = (group.rank() == 1).then_some(mine.as_slice());
        assert_eq!(group.broadcast(1, sent).expect("broadcast"), vec![1; length + 1]);
        let root = group.size() - 1;
        let gathered = group.gather(root, &mine).expect("gather");
        assert_eq!(gathered, (group.rank() == root).then_some(all));
        let parts = |rank: usize| vec![rank as u8 ^ 0x55; length * usize::from(rank != 1) + rank];
        let sent = (group.rank() == root).then(|| (0..group.size()).map(parts).collect());
        assert_eq!(group.scatter(root, sent).expect("scatter"), parts(group.rank()));
    }
    let sent = (group.rank() == 0).then(|| vec![vec![1]]);
    let error = group.scatter(0, sent).expect_err("a part for one rank only");
    assert!(error.to_string().contains("did not scatter to all"), "{error}");
}

fn a_second_save_uses_the_cached_plan(group: &Mpi, dir: &Path) {
    let cut = &cuts(group)[0];
    let mut options = SaveOptions::default();
    options.plan_cache = Some(Arc::new(PlanCache::new()));
    assert!(!save_under(group, cut, &dir.join("first"), &options).expect("save").plan_cached);
    assert!(save_under(group, cut, &dir.join("second"), &options).expect("save").plan_cached);
    load_under(group, &cuts(group)[1], &dir.join("second")).expect("load");
}

fn an_error_on_one_rank_is_an_error_on_all(group: &Mpi, dir: &Path) {
    let path = dir.join("failing");
    let options = SaveOptions::default();
    if group.rank() == group.size() - 1 {
        options.control.cancel();
    }
    let error = save_under(group, &cuts(group)[0], &path, &options).expect_err("one rank cancelled");
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
    group.barrier().expect("barrier");
    assert!(Checkpoint::open_store(store_at(&path)).is_err(), "nothing was published");
}

fn overwriting_is_refused_on_every_rank(group: &Mpi, dir: &Path) {
    let path = dir.join("refused");
    save_under(group, &cuts(group)[0], &path, &SaveOptions::default()).expect("save");
    let error = save_under(group, &cuts(group)[0], &path, &SaveOptions::default()).expect_err("there is one");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

fn main() {
    let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized).expect("MPI starts once");
    assert!(threading >= Threading::Serialized, "this MPI cannot be used from other threads");
    let world = universe.world();
    let group = Mpi::new(&world, Duration::from_secs(60));
    let mine = std::env::temp_dir().join(format!("reshard-mpi-{}", std::process::id()));
    let sent = Some(mine.to_str().expect("text").as_bytes()).filter(|_| group.rank() == 0);
    let dir = String::from_utf8(group.broadcast(0, sent).expect("broadcast")).expect("text");
    let dir = Path::new(&dir);
    let cases: &[Case] = &[
        ("every_layout_to_every_layout", every_layout_to_every_layout),
        ("bytes_of_any_length_arrive", bytes_of_any_length_arrive),
        ("a_second_save_uses_the_cached_plan", a_second_save_uses_the_cached_plan),
        ("an_error_on_one_rank_is_an_error_on_all", an_error_on_one_rank_is_an_error_on_all),
        ("overwriting_is_refused_on_every_rank", overwriting_is_refused_on_every_rank),
    ];
    for (name, case) in cases {
        case(&group, dir);
        group.barrier().expect("barrier");
        if group.rank() == 0 {
            println!("test mpi::{name} ... ok");
        }
    }
    // Last, on a group of its own: rank 0 is late, and the others must not wait for it for ever.
    let short = Mpi::new(&world, Duration::from_millis(300));
    if short.rank() == 0 {
        std::thread::sleep(Duration::from_millis(900));
        short.barrier().expect("the others have called already");
    } else {
        assert_eq!(short.barrier().expect_err("rank 0 says nothing").kind(), ErrorKind::Group);
        assert!(short.barrier().is_err(), "a group that lost an exchange stays lost");
    }
    group.barrier().expect("barrier");
    if group.rank() == 0 {
        println!("test mpi::a_silent_rank_is_an_error_within_the_timeout ... ok");
        println!("{} passed, 0 failed", cases.len() + 1);
        let _ = std::fs::remove_dir_all(dir);
    }
}
