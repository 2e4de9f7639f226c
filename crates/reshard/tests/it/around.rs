//! What the engine promises around a save and a load, one rule a test.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use reshard::layout::{ByteLayout, Dims, Placement, Region};
use reshard::storage::memory::MemoryStore;
use reshard::{
    AsyncSaver, CastPolicy, Checkpoint, ChromeTrace, ConvertOptions, ConvertTarget, DType, Destination, DeviceMemory,
    DeviceMemoryMut, Difference, Error, ErrorKind, Group, LoadLeaf, LoadOptions, LoadPiece, LoadState, LoadTensor, LoadedValue,
    PlanCache, SaveLeaf, SaveOptions, SavePiece, SaveState, SaveTensor, Scope, Solo, Source, Strictness, StridedBox, Target,
    Value, convert, load_with, run_threads, save_with,
};

use crate::layouts::{Cut, Memory, Whole, add_to_load, add_to_save, held, store_at};

fn save_whole(wholes: &[Whole], path: &std::path::Path) {
    let mut state = SaveState::new();
    for whole in wholes {
        let keys = whole.key.split('.').map(Into::into).collect();
        let piece = SavePiece::contiguous(Region::whole(&whole.shape).unwrap(), whole.dtype, &whole.bytes).unwrap();
        let shape = Dims::from_slice(&whole.shape);
        let tensor = SaveTensor { dtype: whole.dtype, shape, requires_grad: false, pieces: vec![piece] };
        state.insert(whole.key.clone(), Some(keys), Scope::Shared, SaveLeaf::Tensor(tensor)).unwrap();
    }
    save_with(&Solo, &state, &store_at(path), &SaveOptions::default()).unwrap();
}

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
    state.insert_whole("model.layers.0.wieght", DType::Float32, &[4, 4], a).unwrap();
    state.insert_whole("model.layers.1.weight", DType::Float64, &[4, 4], b).unwrap();
    state.insert_whole("model.layers.0.weight", DType::Float32, &[4, 2], c).unwrap();
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
    state.insert_whole("m.a", DType::Float32, &[4], &mut a).unwrap();
    state.insert_whole("m.c", DType::Float32, &[1], &mut c).unwrap();
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
        state.insert_whole("m.a", dtype, &[600, 1000], memory).unwrap();
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
        Whole::new("m.experts_blocks", DType::UInt8, &[4], 3),
        Whole::new("m.experts_scales", DType::UInt8, &[1], 4),
        Whole::new("m.alone", DType::Float8E4M3Fn, &[4], 5),
    ];
    save_whole(&wholes, folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let run = |key: &str, dtype: DType, shape: &[u64]| {
        let mut memory = vec![0; 64];
        let size = shape.iter().product::<u64>() as usize * dtype.size() as usize;
        let mut state = LoadState::new();
        state.insert_whole(key, dtype, shape, &mut memory[..size]).unwrap();
        let mut options = LoadOptions::default();
        options.cast = CastPolicy::Any;
        options.expected = Some(Arc::new(|_| false));
        load_with(&Solo, &checkpoint, &mut state, &options).map(|_| ())
    };
    for (key, scales, shape) in
        [("m.weight", "m.weight_scale_inv", &[4, 4][..]), ("m.experts_blocks", "m.experts_scales", &[4][..])]
    {
        let error = run(key, DType::Float32, shape).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert!(error.to_string().contains(&format!("scaled by {scales}")), "{error}");
    }
    run("m.weight", DType::Float8E4M3Fn, &[4, 4]).unwrap();
    run("m.alone", DType::Float32, &[4]).unwrap();
    let mut options = ConvertOptions::default();
    options.casts.parse("f32").unwrap();
    let target = ConvertTarget::Safetensors { max_shard_size: None };
    let destination = Destination::folder(Arc::new(MemoryStore::new()));
    let error = convert(&checkpoint, &destination, target, &options).unwrap_err();
    assert!(error.to_string().contains("\"m.weight\" is float8_e4m3fn codes scaled by \"m.weight_scale_inv\""), "{error}");
}

#[test]
fn names_can_be_mapped_at_load() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Whole::new("old.a", DType::Float32, &[4], 1);
    save_whole(std::slice::from_ref(&whole), folder.path());
    let checkpoint = Checkpoint::open_store(store_at(folder.path())).unwrap();
    let mut memory = vec![0; 16];
    let mut state = LoadState::new();
    state.insert_whole("new.a", DType::Float32, &[4], &mut memory).unwrap();
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
        state.insert_whole("drifted", DType::Float32, &[2], &bytes)?;
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
            state.insert_whole("m.a", DType::Float32, &[9, 4], &whole.bytes)?;
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

/// Memory that only tells its bytes when asked, and remembers the largest part that was asked for.
#[derive(Debug)]
struct Device {
    bytes: Vec<u8>,
    largest: AtomicUsize,
    broken: bool,
}

impl DeviceMemory for Device {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        if self.broken {
            return Err("the device is gone".into());
        }
        self.largest.fetch_max(into.len(), Ordering::Relaxed);
        into.copy_from_slice(&self.bytes[offset as usize..offset as usize + into.len()]);
        Ok(())
    }
}

#[test]
fn device_memory_is_read_in_parts_as_it_is_written_or_staged() {
    let folder = tempfile::tempdir().unwrap();
    let long = Whole::new("long", DType::Float32, &[3000, 1000], 1);
    let short = Whole::new("short", DType::Int8, &[5], 2);
    // Stored as columns: every element is a run of its own.
    let turned = Whole::new("turned", DType::Float32, &[200, 300], 3);
    let columns: Vec<u8> = (0..300)
        .flat_map(|c| (0..200).flat_map(move |r| (0..4).map(move |b| (r * 300 + c) * 4 + b)))
        .map(|i| turned.bytes[i])
        .collect();
    let device = |bytes: &[u8], broken| Arc::new(Device { bytes: bytes.to_vec(), largest: AtomicUsize::new(0), broken });
    for (name, budget, broken) in
        [("now", None, false), ("staged", Some(1 << 30), false), ("beyond", Some(1000), false), ("broken", None, true)]
    {
        let devices = [device(&long.bytes, broken), device(&short.bytes, broken), device(&columns, broken)];
        let mut state = SaveState::new();
        for (whole, memory) in [&long, &short, &turned].into_iter().zip(&devices) {
            let layout = match whole.key.as_str() {
                "turned" => ByteLayout::strided(&[200, 300], &[1, 200], 4).unwrap(),
                _ => ByteLayout::contiguous(&whole.shape, whole.dtype.size()).unwrap(),
            };
            let source = Source::device(memory.bytes.len(), Arc::clone(memory) as Arc<dyn DeviceMemory>);
            let piece = SavePiece::new(Region::whole(&whole.shape).unwrap(), layout, source).unwrap();
            let shape = Dims::from_slice(&whole.shape);
            let tensor = SaveTensor { dtype: whole.dtype, shape, requires_grad: false, pieces: vec![piece] };
            state.insert(whole.key.clone(), None, Scope::Shared, SaveLeaf::Tensor(tensor)).unwrap();
        }
        let store = store_at(&folder.path().join(name));
        let saved = match budget {
            None => save_with(&Solo, &state, &store, &SaveOptions::default()).map(drop),
            Some(budget) => {
                let saver = AsyncSaver::new(budget);
                saver.save(Arc::new(Solo), &state, Arc::clone(&store), SaveOptions::default()).and_then(|h| h.wait()).map(drop)
            }
        };
        if broken {
            assert!(saved.unwrap_err().full_text().contains("the device is gone"));
            assert!(Checkpoint::open_store(store).is_err());
            continue;
        }
        saved.unwrap();
        let checkpoint = Checkpoint::open_store(store).unwrap();
        for (whole, memory) in [&long, &short, &turned].into_iter().zip(&devices) {
            assert_eq!(checkpoint.read_whole(&whole.key).unwrap(), whole.bytes, "{} {name}", whole.key);
            let largest = memory.largest.load(Ordering::Relaxed);
            assert!(largest > 0 && largest <= 4 << 20, "{largest} bytes of {} at once", whole.key);
        }
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
fn a_trace_has_the_rank_as_process_and_every_phase() {
    use tracing_subscriber::layer::SubscriberExt;
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let layer = ChromeTrace::new(5, Box::new(sink.clone())).unwrap();
    let (before, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Spans that another test's thread is just meeting for the first time would be taken for unwanted; after one save all
    // of them are known, and are asked for anew.
    save_whole(&[Whole::new("m.a", DType::Float32, &[4], 1)], before.path());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        tracing::callsite::rebuild_interest_cache();
        save_whole(&[Whole::new("m.a", DType::Float32, &[4], 1)], folder.path());
    });
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    let events: serde_json::Value = serde_json::from_str(&format!("{}]", text.trim_end().trim_end_matches(','))).unwrap();
    let names: Vec<&str> = events.as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    for name in ["save", "plan", "write", "sync", "commit"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(events.as_array().unwrap().iter().all(|e| e["pid"] == 5));
}

/// Memory that is only written box by box, and remembers the largest one.
#[derive(Debug)]
struct WritableDevice {
    bytes: Mutex<Vec<u8>>,
    largest: AtomicUsize,
}

impl DeviceMemory for WritableDevice {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), String> {
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset as usize..offset as usize + into.len()]);
        Ok(())
    }
}

impl DeviceMemoryMut for WritableDevice {
    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    fn write(&self, to: StridedBox<'_>, bytes: &[u8]) -> Result<(), String> {
        self.largest.fetch_max(bytes.len(), Ordering::Relaxed);
        let mut memory = self.bytes.lock().unwrap();
        let mut index = vec![0; to.sizes.len()];
        for element in bytes.chunks_exact(to.element_size as usize) {
            let at = to.offset + index.iter().zip(to.byte_strides).map(|(i, s)| i * s).sum::<u64>();
            memory[at as usize..at as usize + element.len()].copy_from_slice(element);
            for d in (0..index.len()).rev() {
                index[d] += 1;
                if index[d] < to.sizes[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Ok(())
    }
}

#[test]
fn device_memory_is_written_in_boxes_and_checked_on_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    let whole = Whole::new("w", DType::Float32, &[3000, 1000], 1);
    let mut state = SaveState::new();
    state.insert_whole("w", whole.dtype, &whole.shape, &whole.bytes).unwrap();
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    let checkpoint = Checkpoint::open_store(store).unwrap();

    // The whole as it is, the whole turned, some columns, and the same columns a second time.
    let columns = Region::new(&[0, 100], &[3000, 50]).unwrap();
    let all = Region::whole(&whole.shape).unwrap();
    for (regions, turned) in [(vec![all.clone()], false), (vec![all], true), (vec![columns.clone(), columns], false)] {
        let devices: Vec<Arc<WritableDevice>> = regions
            .iter()
            .map(|region| {
                let bytes = Mutex::new(vec![0; region.volume() as usize * 4]);
                Arc::new(WritableDevice { bytes, largest: AtomicUsize::new(0) })
            })
            .collect();
        let pieces = regions.iter().zip(&devices).map(|(region, device)| {
            let layout = match turned {
                true => ByteLayout::strided(region.sizes(), &[1, region.sizes()[0]], 4).unwrap(),
                false => ByteLayout::contiguous(region.sizes(), 4).unwrap(),
            };
            let memory = Target::device(layout.end() as usize, Arc::clone(device) as Arc<dyn DeviceMemoryMut>);
            LoadPiece::new(region.clone(), layout, memory).unwrap()
        });
        let tensor = LoadTensor { dtype: DType::Float32, shape: Dims::from_slice(&whole.shape), pieces: pieces.collect() };
        let mut state = LoadState::new();
        state.insert("w", Scope::Shared, LoadLeaf::Tensor(tensor)).unwrap();
        let report = load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap().report;
        assert_eq!(report.verified, u64::from(regions.len() == 1));
        for (region, device) in regions.iter().zip(&devices) {
            let mut found = device.bytes.lock().unwrap().clone();
            if turned {
                found = (0..3000)
                    .flat_map(|r| (0..1000).flat_map(move |c| (0..4).map(move |b| (c * 3000 + r) * 4 + b)))
                    .map(|i| found[i])
                    .collect();
            }
            assert!(found == whole.slice(region), "{region} {turned}");
            assert!(device.largest.load(Ordering::Relaxed) <= 4 << 20);
        }
    }
}

#[test]
fn a_cast_reads_once_and_verifies() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    let numbers: Vec<u8> = (0..2_000_000u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut state = SaveState::new();
    state.insert_whole("w", DType::Float32, &[2000, 1000], &numbers).unwrap();
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    let checkpoint = Checkpoint::open_store(store).unwrap();
    let mut wide = vec![0u8; 16_000_000];
    let mut state = LoadState::new();
    state.insert_whole("w", DType::Float64, &[2000, 1000], &mut wide).unwrap();
    let mut options = LoadOptions::default();
    options.cast = CastPolicy::Widening;
    let report = load_with(&Solo, &checkpoint, &mut state, &options).unwrap().report;
    assert_eq!((report.verified, report.bytes_read), (1, 8_000_000));
    let last = f64::from_le_bytes(wide[wide.len() - 8..].try_into().unwrap());
    assert_eq!(last, 1_999_999.0);
}
