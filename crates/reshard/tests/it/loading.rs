//! What a load promises: differences, casts, names, what is read once, what is found damaged.

use std::sync::Arc;

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::layout::{Placement, Region};
use reshard::load::{CastPolicy, Strictness};
use reshard::mismatch::Difference;
use reshard::storage::memory::MemoryStore;
use reshard::{
    Checkpoint, DType, Error, ErrorKind, Group, LoadOptions, LoadState, SaveOptions, SaveState, Solo, load_with, run_threads,
    save_with,
};

use crate::layouts::{Cut, Memory, Whole, add_to_load, store_at};
use crate::wholes::save_whole;

#[test]
fn every_difference_is_listed_before_any_byte_moves() {
    let folder = tempfile::tempdir().unwrap();
    let stored = [
        Whole::new("model.layers.0.weight", DType::Float32, &[4, 4], 1),
        Whole::new("model.layers.1.weight", DType::Float32, &[4, 4], 2),
        Whole::new("model.extra", DType::Float32, &[2], 3),
        Whole::new("optim.step", DType::Float32, &[], 4),
    ];
    save_whole(&stored, folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let mut buffers = [vec![0xee; 64], vec![0xee; 128], vec![0xee; 32]];
    let [a, b, c] = &mut buffers;
    let mut state = LoadState::new();
    state.insert_bytes("model.layers.0.wieght", DType::Float32, &[4, 4], a).unwrap();
    state.insert_bytes("model.layers.1.weight", DType::Float64, &[4, 4], b).unwrap();
    state.insert_bytes("model.layers.0.weight", DType::Float32, &[4, 2], c).unwrap();
    let error = load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap_err();
    let Error::Mismatch(mismatch) = &error else { panic!("{error}") };
    let text = error.to_string();
    for part in ["model.layers.0.wieght", "model.layers.0.weight", "float64", "[4, 2]", "unexpected: model.extra"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(!text.contains("optim.step"), "a part of which nothing is wanted is not unexpected");
    assert!(
        matches!(&mismatch.differences[0], Difference::Missing { near, .. } if near.iter().any(|n| n == "model.layers.0.weight"))
    );
    drop(state);
    assert!(buffers.iter().flatten().all(|byte| *byte == 0xee), "nothing was loaded");
}

#[test]
fn a_lenient_load_reports_the_same_and_loads_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let stored = [Whole::new("m.a", DType::Float32, &[4], 1), Whole::new("m.b", DType::Float32, &[3], 2)];
    save_whole(&stored, folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let (mut a, mut c) = (vec![0; 16], vec![0; 4]);
    let mut state = LoadState::new();
    state.insert_bytes("m.a", DType::Float32, &[4], &mut a).unwrap();
    state.insert_bytes("m.c", DType::Float32, &[1], &mut c).unwrap();
    let mut options = LoadOptions::default();
    options.strictness = Strictness::Lenient;
    let report = load_with(&Solo, &checkpoint, &mut state, &options).unwrap().report;
    drop(state);
    assert_eq!(report.missing(), ["m.c"]);
    assert_eq!(report.unexpected(), ["m.b"]);
    assert_eq!(a, stored[0].bytes);
}

#[test]
fn casts_happen_only_by_policy_and_narrowing_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..600_000).map(|i| i as f32 * 0.37 - 7.0).collect();
    let mut whole = Whole::new("m.a", DType::Float32, &[600, 1000], 1);
    whole.bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    save_whole(std::slice::from_ref(&whole), folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let run = |policy: CastPolicy, dtype: DType, memory: &mut [u8]| {
        let mut state = LoadState::new();
        state.insert_bytes("m.a", dtype, &[600, 1000], memory).unwrap();
        let mut options = LoadOptions::default();
        options.cast = policy;
        load_with(&Solo, &checkpoint, &mut state, &options)
    };
    let mut wide = vec![0; values.len() * 8];
    assert_eq!(run(CastPolicy::Never, DType::Float64, &mut wide).unwrap_err().kind(), ErrorKind::Mismatch);
    let report = run(CastPolicy::Widening, DType::Float64, &mut wide).unwrap().report;
    assert!(!report.casts[0].narrowing);
    assert!(wide.chunks(8).zip(&values).all(|(b, v)| f64::from_le_bytes(b.try_into().unwrap()) == f64::from(*v)));
    let mut narrow = vec![0; values.len() * 2];
    assert_eq!(run(CastPolicy::Widening, DType::BFloat16, &mut narrow).unwrap_err().kind(), ErrorKind::Mismatch);
    assert!(run(CastPolicy::Any, DType::BFloat16, &mut narrow).unwrap().report.casts[0].narrowing);
    assert!(narrow.chunks(2).zip(&values).all(|(b, v)| b == half::bf16::from_f32(*v).to_le_bytes()));
}

#[test]
fn codes_are_not_cast_without_their_scales() {
    let folder = tempfile::tempdir().unwrap();
    let wholes = [
        Whole::new("m.weight", DType::Float8E4M3Fn, &[4, 4], 1),
        Whole::new("m.weight_scale_inv", DType::Float32, &[1, 1], 2),
        Whole::new("m.experts_blocks", DType::UInt8, &[1, 4], 3),
        Whole::new("m.experts_scales", DType::UInt8, &[1], 4),
        Whole::new("m.alone", DType::Float8E4M3Fn, &[4], 5),
    ];
    save_whole(&wholes, folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let run = |key: &str, dtype: DType, shape: &[u64]| {
        let mut memory = [0; 64];
        let size = shape.iter().product::<u64>() as usize * dtype.size() as usize;
        let mut state = LoadState::new();
        state.insert_bytes(key, dtype, shape, &mut memory[..size]).unwrap();
        let mut options = LoadOptions::default();
        options.cast = CastPolicy::Any;
        options.expected = Some(Arc::new(|_| false));
        load_with(&Solo, &checkpoint, &mut state, &options).map(|_| ())
    };
    for (key, why, shape) in [
        ("m.alone", "whose scales, \"m.alone_scale_inv\", are missing", &[4][..]),
        ("m.experts_blocks", "\"m.experts\" is the weight", &[1, 4][..]),
    ] {
        let error = run(key, DType::Float32, shape).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
    run("m.weight", DType::Float8E4M3Fn, &[4, 4]).unwrap();
    run("m.weight", DType::Float32, &[4, 4]).unwrap();
    let error = run("m.weight", DType::Float8E5M2, &[4, 4]).unwrap_err();
    assert!(error.to_string().contains("scaled by \"m.weight_scale_inv\""), "{error}");
    let mut options = ConvertOptions::default();
    options.casts.parse("f32").unwrap();
    let target = ConvertTarget::Safetensors { max_shard_size: None };
    let destination = Destination::folder(Arc::new(MemoryStore::new()));
    let error = convert(&checkpoint, &destination, target, &options).unwrap_err();
    assert!(error.to_string().contains("\"m.alone\" is codes whose scales"), "{error}");
    // Without any scales, small floats are numbers like others.
    let folder = tempfile::tempdir().unwrap();
    save_whole(&wholes[wholes.len() - 1..], folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    convert(&checkpoint, &destination, target, &options).unwrap();
}

#[test]
fn names_can_be_mapped_at_load() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("old.a", DType::Float32, &[4], 1);
    save_whole(std::slice::from_ref(&whole), folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let mut memory = vec![0; 16];
    let mut state = LoadState::new();
    state.insert_bytes("new.a", DType::Float32, &[4], &mut memory).unwrap();
    let mut options = LoadOptions::default();
    options.key_map = Some(Arc::new(|key| Some(key.replace("new.", "old."))));
    load_with(&Solo, &checkpoint, &mut state, &options).unwrap();
    drop(state);
    assert_eq!(memory, whole.bytes);
}

#[test]
fn what_is_wanted_twice_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("m.a", DType::Float32, &[500, 1000], 1);
    save_whole(std::slice::from_ref(&whole), folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let region = Region::whole(&whole.shape).unwrap();
    let mut memories = vec![Memory::new(region.clone(), whole.dtype, false), Memory::new(region, whole.dtype, true)];
    let mut state = LoadState::new();
    add_to_load(&mut state, &whole, &mut memories);
    let report = load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap().report;
    drop(state);
    assert_eq!(report.bytes_read, whole.bytes.len() as u64);
    for memory in &mut memories {
        assert_eq!(memory.packed(whole.dtype), whole.bytes);
    }
}

#[test]
fn a_flipped_bit_is_found_by_a_load_that_reads_it_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let stored = [Whole::new("m.small", DType::Float32, &[4], 1), Whole::new("m.large", DType::Float32, &[900, 1000], 2)];
    save_whole(&stored, folder.path());
    let file = folder.path().join("__0_0.distcp");
    let pristine = std::fs::read(&file).unwrap();
    for whole in &stored {
        let at = pristine.windows(16).position(|w| *w == whole.bytes[whole.bytes.len() - 16..]).unwrap() + 5;
        let mut damaged = pristine.clone();
        damaged[at] ^= 0x10;
        std::fs::write(&file, &damaged).unwrap();
        let error = Checkpoint::open_store(store_at(folder.path())).unwrap().read_whole(&whole.key).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!((error.keys(), error.files()), (vec![whole.key.clone()], vec!["__0_0.distcp".to_owned()]));
        assert!(error.to_string().contains("checksum"), "{error}");
    }
}

#[test]
fn replicas_can_read_once_and_exchange() {
    let folder = tempfile::tempdir().unwrap();
    let wholes = [Whole::new("m.a", DType::Float32, &[600, 1000], 1), Whole::new("m.b", DType::Int8, &[77], 2)];
    save_whole(&wholes, folder.path());
    let store = store_at(folder.path());
    let cut = Cut { mesh: vec![2, 2], placements: vec![Placement::Replicate, Placement::Shard(0)] };
    let results = run_threads(4, |group| {
        let checkpoint = Checkpoint::open_store(Arc::clone(&store))?;
        let mut memories: Vec<Vec<Memory>> = wholes
            .iter()
            .map(|w| {
                cut.pieces(&w.shape, group.rank() as u64)
                    .into_iter()
                    .map(|r| Memory::new(r, w.dtype, group.rank() % 2 == 1))
                    .collect()
            })
            .collect();
        let mut state = LoadState::new();
        for (whole, memory) in wholes.iter().zip(&mut memories) {
            add_to_load(&mut state, whole, memory);
        }
        let mut options = LoadOptions::default();
        options.exchange = true;
        let report = load_with(&group, &checkpoint, &mut state, &options)?.report;
        drop(state);
        for (whole, memory) in wholes.iter().zip(&mut memories) {
            for piece in memory {
                assert_eq!(piece.packed(whole.dtype), whole.slice(&piece.region));
            }
        }
        Ok((report.bytes_read, report.bytes_exchanged, report.bytes_wanted))
    });
    let all: Vec<_> = results.into_iter().map(|r| r.unwrap()).collect();
    let unique: u64 = wholes.iter().map(|w| w.bytes.len() as u64).sum();
    assert_eq!(all.iter().map(|r| r.0).sum::<u64>(), unique, "every byte is read once by someone");
    assert!(all.iter().all(|r| r.0 + r.1 == r.2));
}

#[test]
fn a_cast_reads_once_and_verifies() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    let numbers: Vec<u8> = (0..2_000_000u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut state = SaveState::new();
    state.insert_bytes("w", DType::Float32, &[2000, 1000], &numbers).unwrap();
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    let checkpoint = Checkpoint::open_store(store).unwrap();
    let mut wide = vec![0u8; 16_000_000];
    let mut state = LoadState::new();
    state.insert_bytes("w", DType::Float64, &[2000, 1000], &mut wide).unwrap();
    let mut options = LoadOptions::default();
    options.cast = CastPolicy::Widening;
    let report = load_with(&Solo, &checkpoint, &mut state, &options).unwrap().report;
    assert_eq!((report.verified, report.bytes_read), (1, 8_000_000));
    let last = f64::from_le_bytes(wide[wide.len() - 8..].try_into().unwrap());
    assert_eq!(last, 1_999_999.0);
}
