//! Any tree, any M ranks and layout, saved; any N ranks and layout, loaded: the identity, bit for bit.

use proptest::prelude::*;
use reshard::checkpoint::LoadedValue;
use reshard::layout::Region;
use reshard::storage::Store;
use reshard::{Checkpoint, DType, LoadOptions, LoadState, SaveOptions, SaveState, Value, load_with, run_threads, save_with};

use crate::layouts::{Cut, Memory, Whole, add_to_load, add_to_save, any_cut, fitted, held, store_at};

fn save_all(
    wholes: &[Whole],
    values: &[(String, Value)],
    cut: &Cut,
    padded: bool,
    store: &std::sync::Arc<dyn Store>,
    options: &SaveOptions,
) {
    let results = run_threads(cut.ranks() as usize, |group| {
        let rank = reshard::Group::rank(&group) as u64;
        let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &fitted(cut, w.shape.len()), rank, padded)).collect();
        let mut state = SaveState::new();
        for (whole, memory) in wholes.iter().zip(&memories) {
            add_to_save(&mut state, whole, memory);
        }
        for (key, value) in values {
            state.insert_value(key.clone(), value.clone())?;
        }
        save_with(&group, &state, store, options)
    });
    for result in results {
        result.unwrap();
    }
}

fn load_all(
    wholes: &[Whole],
    values: &[(String, Value)],
    cut: &Cut,
    padded: bool,
    store: &std::sync::Arc<dyn Store>,
    options: &LoadOptions,
) {
    let results = run_threads(cut.ranks() as usize, |group| {
        let rank = reshard::Group::rank(&group) as u64;
        let checkpoint = Checkpoint::open_store(std::sync::Arc::clone(store))?;
        let mut memories: Vec<Vec<Memory>> = wholes
            .iter()
            .map(|w| {
                let pieces = fitted(cut, w.shape.len()).pieces(&w.shape, rank);
                pieces.into_iter().map(|region| Memory::new(region, w.dtype, padded)).collect()
            })
            .collect();
        let mut state = LoadState::new();
        for (whole, memory) in wholes.iter().zip(&mut memories) {
            add_to_load(&mut state, whole, memory);
        }
        for (key, _) in values {
            state.insert_value(key.clone())?;
        }
        let loaded = load_with(&group, &checkpoint, &mut state, options)?;
        drop(state);
        for (key, value) in values {
            assert_eq!(loaded.values[key], LoadedValue::Plain(value.clone()));
        }
        for (whole, memory) in wholes.iter().zip(&mut memories) {
            for piece in memory {
                assert_eq!(piece.packed(whole.dtype), whole.slice(&piece.region), "{} {}", whole.key, piece.region);
            }
        }
        Ok(())
    });
    for result in results {
        result.unwrap();
    }
}

fn any_tensors() -> impl Strategy<Value = Vec<Whole>> {
    let tensor = (prop::collection::vec(0u64..=7, 0..=4), 0..DType::ALL.len(), any::<u64>());
    prop::collection::vec(tensor, 1..=5).prop_map(|list| {
        list.into_iter()
            .enumerate()
            .map(|(i, (shape, dtype, seed))| Whole::new(&format!("part.t{i}"), DType::ALL[dtype], &shape, seed))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_layout_to_any_layout_is_the_identity(
        wholes in any_tensors(),
        from in any_cut(8),
        to in any_cut(8),
        padded in any::<(bool, bool)>(),
        files in 1u32..=3,
        split in prop_oneof![Just(0u64), Just(8), Just(1 << 20)],
    ) {
        let folder = tempfile::tempdir().unwrap();
        let store = store_at(folder.path());
        let values = vec![("step".to_owned(), Value::from(7)), ("name".to_owned(), Value::Str("naïve ✓".into()))];
        let mut options = SaveOptions::default();
        options.files_per_rank = files;
        options.split_replicated_above = split;
        options.sync = false;
        options.check_replicas = true;
        save_all(&wholes, &values, &from, padded.0, &store, &options);
        load_all(&wholes, &values, &to, padded.1, &store, &LoadOptions::default());
    }

    #[test]
    fn any_slice_is_what_was_saved(whole in any_tensors(), from in any_cut(6), fractions in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0), 4)) {
        let folder = tempfile::tempdir().unwrap();
        let store = store_at(folder.path());
        let mut options = SaveOptions::default();
        options.sync = false;
        save_all(&whole, &[], &from, false, &store, &options);
        let checkpoint = Checkpoint::open_store(store).unwrap();
        for whole in &whole {
            let (offsets, sizes): (Vec<u64>, Vec<u64>) = whole.shape.iter().zip(&fractions).map(|(&n, (a, b))| {
                let start = (n as f64 * a) as u64;
                (start, ((n - start) as f64 * b).ceil() as u64)
            }).unzip();
            let region = Region::new(&offsets, &sizes).unwrap();
            prop_assert_eq!(checkpoint.read_bytes(&whole.key, &region).unwrap(), whole.slice(&region));
        }
    }
}

#[test]
fn large_tensors_pass_through_blocks_and_batches() {
    let wholes = vec![
        Whole::new("a.big", DType::Float32, &[1500, 1000], 1),
        Whole::new("a.wide", DType::BFloat16, &[7, 300_000], 2),
        Whole::new("a.small", DType::Int8, &[3], 3),
    ];
    let from =
        Cut { mesh: vec![2, 2], placements: vec![reshard::layout::Placement::Shard(0), reshard::layout::Placement::Shard(1)] };
    let to = Cut { mesh: vec![3], placements: vec![reshard::layout::Placement::Shard(1)] };
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    save_all(&wholes, &[], &from, true, &store, &SaveOptions::default());
    load_all(&wholes, &[], &to, false, &store, &LoadOptions::default());
    load_all(&wholes, &[], &from, true, &store, &LoadOptions::default());
    let mut always = LoadOptions::default();
    always.verify = reshard::load::Verify::Always;
    load_all(&wholes, &[], &to, true, &store, &always);
}
