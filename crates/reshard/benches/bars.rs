//! The engine against the limits of the machine it runs on: every row is a ratio taken in one run.
//!
//! `cargo bench -p reshard --bench bars [-- FILTER] [--json FILE] [--dir DIR]`. Files go to DIR (default: the system's
//! temporary folder), are in the page cache when they are read, and are removed. Rows alternate with their limit; each
//! number is the median of several rounds.
#![allow(clippy::expect_used, reason = "a benchmark that cannot run should stop")]

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reshard::layout::{ByteLayout, Dims, Region};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::load::Verify;
use reshard::memory::{Source, Target};
use reshard::save::{PlanCache, simulate_plan};
use reshard::storage::{Address, Store, StoreOptions};
use reshard::{
    AsyncSaver, Checkpoint, DType, Group, LoadOptions, LoadState, SaveOptions, SaveState, Solo, load_with, run_threads, save_with,
};

const ROUNDS: usize = 5;
const MIB: usize = 1 << 20;

struct Row {
    name: &'static str,
    ours: Vec<Duration>,
    limit: Vec<Duration>,
    limit_name: &'static str,
    note: String,
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

fn spread(times: &[Duration]) -> String {
    let (least, most) = (times.iter().min().copied().unwrap_or_default(), times.iter().max().copied().unwrap_or_default());
    format!("{:.1}–{:.1} ms", least.as_secs_f64() * 1e3, most.as_secs_f64() * 1e3)
}

fn store_at(path: &Path) -> Arc<dyn Store> {
    let address = Address::parse(path.to_str().expect("a path that is text")).expect("a path");
    reshard::storage::open(&address, &StoreOptions::default()).expect("a folder")
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed(), result)
}

fn fresh(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Writes buffers to one file with two threads and syncs it.
fn raw_write(path: &Path, tensors: &[Vec<u8>], sync: bool) {
    let _ = std::fs::remove_file(path);
    let file = std::fs::File::create(path).expect("create");
    std::thread::scope(|scope| {
        for half in 0..2 {
            let file = &file;
            scope.spawn(move || {
                for (i, tensor) in tensors.iter().enumerate().filter(|(i, _)| i * 2 / tensors.len() == half) {
                    file.write_all_at(tensor, (i * tensor.len()) as u64).expect("write");
                }
            });
        }
    });
    if sync {
        file.sync_all().expect("sync");
    }
}

fn raw_read(path: &Path, tensors: &mut [Vec<u8>]) {
    let file = std::fs::File::open(path).expect("open");
    let half = tensors.len().div_ceil(2);
    std::thread::scope(|scope| {
        for (part, tensors) in tensors.chunks_mut(half).enumerate() {
            let file = &file;
            scope.spawn(move || {
                for (i, tensor) in tensors.iter_mut().enumerate() {
                    let at = ((part * half + i) * tensor.len()) as u64;
                    file.read_exact_at(tensor, at).expect("read");
                }
            });
        }
    });
}

fn large(dir: &Path, rows: &mut Vec<Row>) {
    let shape = [16 * MIB as u64];
    let tensors: Vec<Vec<u8>> = (0..128).map(|i| pattern(16 * MIB, i as u8)).collect();
    let mut targets: Vec<Vec<u8>> = tensors.iter().map(|t| vec![1; t.len()]).collect();
    let (raw, ckpt) = (dir.join("raw"), dir.join("ckpt"));
    for (name, sync) in [("save 128 × 16 MiB, synced", true), ("save 128 × 16 MiB, not synced", false)] {
        let mut row = Row {
            name,
            ours: vec![],
            limit: vec![],
            limit_name: if sync { "raw write + fsync" } else { "raw write" },
            note: String::new(),
        };
        for _ in 0..ROUNDS {
            row.limit.push(timed(|| raw_write(&raw, &tensors, sync)).0);
            let _ = std::fs::remove_dir_all(&ckpt);
            let mut state = SaveState::new();
            for (i, tensor) in tensors.iter().enumerate() {
                state.insert_bytes(format!("t{i:03}"), DType::UInt8, &shape, tensor).expect("insert");
            }
            let mut options = SaveOptions::default();
            options.sync = sync;
            let store = store_at(&ckpt);
            row.ours.push(timed(|| save_with(&Solo, &state, &store, &options).expect("save")).0);
        }
        rows.push(row);
    }
    for (name, verify) in [("load 128 × 16 MiB, no checksums", Verify::Never), ("load 128 × 16 MiB, checksums", Verify::Whole)]
    {
        let mut row = Row { name, ours: vec![], limit: vec![], limit_name: "raw preadv", note: String::new() };
        for _ in 0..ROUNDS {
            row.limit.push(timed(|| raw_read(&raw, &mut targets)).0);
            let checkpoint = Checkpoint::open_store(store_at(&ckpt)).expect("open");
            let mut state = LoadState::new();
            for (i, target) in targets.iter_mut().enumerate() {
                state.insert_bytes(format!("t{i:03}"), DType::UInt8, &shape, target).expect("insert");
            }
            let mut options = LoadOptions::default();
            options.verify = verify;
            let (time, loaded) = timed(|| load_with(&Solo, &checkpoint, &mut state, &options).expect("load"));
            row.note = format!("amplification {:.3}", loaded.report.read_amplification());
            row.ours.push(time);
        }
        assert!(targets == tensors, "loaded bytes differ");
        rows.push(row);
    }
    let _ = std::fs::remove_file(&raw);
    let _ = std::fs::remove_dir_all(&ckpt);
}

fn small(dir: &Path, rows: &mut Vec<Row>) {
    let tensors: Vec<Vec<u8>> = (0..20_000).map(|i| pattern(1024, i as u8)).collect();
    let mut save_row =
        Row { name: "save 20,000 × 1 KiB", ours: vec![], limit: vec![], limit_name: "bar 60 ms", note: String::new() };
    let mut load_row =
        Row { name: "load 20,000 × 1 KiB", ours: vec![], limit: vec![], limit_name: "bar 60 ms", note: String::new() };
    let ckpt = dir.join("small");
    for _ in 0..ROUNDS {
        let _ = std::fs::remove_dir_all(&ckpt);
        let mut state = SaveState::new();
        for (i, tensor) in tensors.iter().enumerate() {
            state.insert_bytes(format!("layers.{i}.weight"), DType::Float32, &[256], tensor).expect("insert");
        }
        let store = store_at(&ckpt);
        let (time, report) = timed(|| save_with(&Solo, &state, &store, &SaveOptions::default()).expect("save"));
        save_row.ours.push(time);
        save_row.note = phases(&report.phases);
        save_row.limit.push(Duration::from_millis(60));
        let mut targets: Vec<Vec<u8>> = tensors.iter().map(|t| vec![1; t.len()]).collect();
        let (time, report) = timed(|| {
            let checkpoint = Checkpoint::open_store(store_at(&ckpt)).expect("open");
            let mut state = LoadState::new();
            for (i, target) in targets.iter_mut().enumerate() {
                state.insert_bytes(format!("layers.{i}.weight"), DType::Float32, &[256], target).expect("insert");
            }
            load_with(&Solo, &checkpoint, &mut state, &LoadOptions::default()).expect("load").report
        });
        load_row.ours.push(time);
        load_row.note =
            format!("{}; amplification {:.2}, {} reads", phases(&report.phases), report.read_amplification(), report.reads);
        load_row.limit.push(Duration::from_millis(60));
        assert!(targets == tensors, "loaded bytes differ");
    }
    rows.extend([save_row, load_row]);
    let _ = std::fs::remove_dir_all(&ckpt);
}

fn phases(phases: &reshard::save::Phases) -> String {
    phases.steps.iter().map(|(name, time)| format!("{name} {:.1} ms", time.as_secs_f64() * 1e3)).collect::<Vec<_>>().join(", ")
}

fn planning(rows: &mut Vec<Row>) {
    let memory = vec![0u8; 4096];
    for ranks in [64usize, 256, 512, 1024, 4096] {
        let states: Vec<SaveState<'_>> = (0..ranks)
            .map(|rank| {
                let mut state = SaveState::new();
                for tensor in 0..500 {
                    let shape = [ranks as u64 * 4, 64];
                    let region = Region::new(&[rank as u64 * 4, 0], &[4, 64]).expect("region");
                    let layout = ByteLayout::contiguous(region.sizes(), 4).expect("layout");
                    let piece = SavePiece::new(region, layout, Source::new(&memory)).expect("piece");
                    let whole = SaveTensor {
                        dtype: DType::Float32,
                        shape: Dims::from_slice(&shape),
                        requires_grad: false,
                        pieces: vec![piece],
                    };
                    state
                        .insert(format!("model.layers.{tensor}.mlp.weight"), None, Scope::Shared, SaveLeaf::Tensor(whole))
                        .expect("insert");
                }
                state
            })
            .collect();
        let name: &'static str = match ranks {
            64 => "plan + commit 64 ranks × 500",
            256 => "plan + commit 256 ranks × 500",
            512 => "plan + commit 512 ranks × 500",
            1024 => "plan + commit 1,024 ranks × 500",
            _ => "plan + commit 4,096 ranks × 500",
        };
        let mut row = Row { name, ours: vec![], limit: vec![], limit_name: "bar 300 ms at 512", note: String::new() };
        for _ in 0..if ranks > 1024 { 2 } else { ROUNDS } {
            let plan = simulate_plan(&states, &SaveOptions::default()).expect("plan");
            row.ours.push(plan.local + plan.global + plan.commit);
            row.limit.push(Duration::from_secs_f64(0.3 * ranks as f64 / 512.0));
            row.note = format!(
                "local {:.1} ms, global {:.1} ms, commit {:.1} ms; rank 0 receives {:.2} MB, {:.3} MB when cached; .metadata {:.1} MB",
                plan.local.as_secs_f64() * 1e3,
                plan.global.as_secs_f64() * 1e3,
                plan.commit.as_secs_f64() * 1e3,
                plan.received as f64 / 1e6,
                plan.received_cached as f64 / 1e6,
                plan.metadata_bytes as f64 / 1e6,
            );
        }
        rows.push(row);
    }
}

/// 1.2 GB in 24 matrices: rows on 4 ranks when saved, columns on 3 ranks when loaded.
fn reshard_rows(dir: &Path, rows: &mut Vec<Row>) {
    const COUNT: usize = 24;
    let shape = [3072u64, 4096];
    let ckpt = fresh(dir, "reshard");
    let store = store_at(&ckpt);
    let cache = Arc::new(PlanCache::new());
    let saved = run_threads(4, |group| {
        let rows_here = shape[0] / 4;
        let memory: Vec<Vec<u8>> =
            (0..COUNT).map(|i| pattern((rows_here * shape[1] * 4) as usize, i as u8 + group.rank() as u8)).collect();
        let mut state = SaveState::new();
        for (i, bytes) in memory.iter().enumerate() {
            let region = Region::new(&[rows_here * group.rank() as u64, 0], &[rows_here, shape[1]])?;
            let piece = SavePiece::contiguous(region, DType::Float32, bytes)?;
            let tensor =
                SaveTensor { dtype: DType::Float32, shape: Dims::from_slice(&shape), requires_grad: false, pieces: vec![piece] };
            state.insert(format!("w{i}"), None, Scope::Shared, SaveLeaf::Tensor(tensor))?;
        }
        let mut options = SaveOptions::default();
        options.plan_cache = Some(Arc::clone(&cache)).filter(|_| group.rank() == 0);
        save_with(&group, &state, &store, &options)
    });
    saved.into_iter().for_each(|r| drop(r.expect("save")));
    let bytes: usize = COUNT * (shape[0] * shape[1] * 4) as usize;
    for (name, by_rows) in [("load 1.2 GB, 4 ranks → 3, rows", true), ("load 1.2 GB, 4 ranks → 3, columns", false)] {
        let mut row = Row { name, ours: vec![], limit: vec![], limit_name: "bar 250 ms", note: String::new() };
        let mut memory: Vec<Vec<Vec<u8>>> = (0..3)
            .map(|rank| (0..COUNT).map(|_| vec![1u8; (part(shape, rank, by_rows).volume() * 4) as usize]).collect())
            .collect();
        for _ in 0..ROUNDS {
            row.limit.push(Duration::from_millis(250));
            let memory = std::sync::Mutex::new(memory.iter_mut().map(Some).collect::<Vec<_>>());
            let (time, reports) = timed(|| {
                run_threads(3, |group| {
                    let mine = memory.lock().expect("lock")[group.rank()].take().expect("memory");
                    let checkpoint = Checkpoint::open_store(Arc::clone(&store))?;
                    let mut state = LoadState::new();
                    for (i, bytes) in mine.iter_mut().enumerate() {
                        let region = part(shape, group.rank() as u64, by_rows);
                        let layout = ByteLayout::contiguous(region.sizes(), 4)?;
                        let piece = LoadPiece::new(region, layout, Target::new(bytes))?;
                        let tensor = LoadTensor { dtype: DType::Float32, shape: Dims::from_slice(&shape), pieces: vec![piece] };
                        state.insert(format!("w{i}"), Scope::Shared, LoadLeaf::Tensor(tensor))?;
                    }
                    Ok(load_with(&group, &checkpoint, &mut state, &LoadOptions::default())?.report)
                })
            });
            row.ours.push(time);
            let (read, wanted) =
                reports.iter().flatten().fold((0, 0), |(r, w), report| (r + report.bytes_read, w + report.bytes_wanted));
            row.note =
                format!("{:.2} GB/s, amplification {:.3}", bytes as f64 / time.as_secs_f64() / 1e9, read as f64 / wanted as f64);
        }
        rows.push(row);
    }
    let _ = std::fs::remove_dir_all(&ckpt);
}

fn part(shape: [u64; 2], rank: u64, by_rows: bool) -> Region {
    let dim = usize::from(!by_rows);
    let step = shape[dim].div_ceil(3);
    let mut offsets = [0, 0];
    let mut sizes = shape;
    offsets[dim] = (rank * step).min(shape[dim]);
    sizes[dim] = step.min(shape[dim] - offsets[dim]);
    Region::new(&offsets, &sizes).expect("region")
}

fn stall(dir: &Path, rows: &mut Vec<Row>) {
    let tensors: Vec<Vec<u8>> = (0..64).map(|i| pattern(32 * MIB, i as u8)).collect();
    let mut copies: Vec<Vec<u8>> = tensors.iter().map(|t| vec![1; t.len()]).collect();
    let saver = AsyncSaver::new(4 << 30);
    saver.pool().reserve(2 << 30).expect("reserve");
    let mut row =
        Row { name: "async stall, 2 GiB", ours: vec![], limit: vec![], limit_name: "memcpy, same threads", note: String::new() };
    let ckpt = dir.join("async");
    let mut state = SaveState::new();
    for (i, tensor) in tensors.iter().enumerate() {
        state.insert_bytes(format!("t{i}"), DType::UInt8, &[tensor.len() as u64], tensor).expect("insert");
    }
    for _ in 0..ROUNDS {
        let (time, ()) = timed(|| {
            let (a, b) = copies.split_at_mut(32);
            std::thread::scope(|scope| {
                for (part, copies) in [a, b].into_iter().enumerate() {
                    let tensors = &tensors;
                    scope.spawn(move || copies.iter_mut().zip(&tensors[part * 32..]).for_each(|(c, t)| c.copy_from_slice(t)));
                }
            });
        });
        row.limit.push(time);
        let mut options = SaveOptions::default();
        options.overwrite = true;
        let handle = saver.save(Arc::new(Solo), &state, store_at(&ckpt), options).expect("save");
        row.ours.push(handle.stall());
        handle.wait().expect("durable");
    }
    rows.push(row);
    let _ = std::fs::remove_dir_all(&ckpt);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let after = |flag: &str| args.iter().position(|a| a == flag).and_then(|i| args.get(i + 1)).cloned();
    let json = after("--json");
    let dir = after("--dir").map_or_else(std::env::temp_dir, PathBuf::from).join(format!("reshard-bars-{}", std::process::id()));
    let filter = args.first().filter(|a| !a.starts_with("--")).cloned().unwrap_or_default();
    std::fs::create_dir_all(&dir).expect("a folder for the files");
    let mut rows = Vec::new();
    let wants = |name: &str| name.contains(&filter);
    if wants("large") {
        large(&dir, &mut rows);
    }
    if wants("small") {
        small(&dir, &mut rows);
    }
    if wants("planning") {
        planning(&mut rows);
    }
    if wants("reshard") {
        reshard_rows(&dir, &mut rows);
    }
    if wants("stall") {
        stall(&dir, &mut rows);
    }
    let _ = std::fs::remove_dir_all(&dir);
    let mut out = std::io::stdout().lock();
    let mut lines = Vec::new();
    for row in &rows {
        let (ours, limit) = (median(&row.ours), median(&row.limit));
        let ratio = limit.as_secs_f64() / ours.as_secs_f64();
        let _ = writeln!(
            out,
            "{:<36} {:>9.1} ms ({})  {:>6.2} of {} ({:.1} ms)  {}",
            row.name,
            ours.as_secs_f64() * 1e3,
            spread(&row.ours),
            ratio,
            row.limit_name,
            limit.as_secs_f64() * 1e3,
            row.note
        );
        lines.push(format!(
            "{{\"name\":{:?},\"ours_ms\":{:.3},\"limit\":{:?},\"limit_ms\":{:.3},\"ratio\":{:.4},\"note\":{:?}}}",
            row.name,
            ours.as_secs_f64() * 1e3,
            row.limit_name,
            limit.as_secs_f64() * 1e3,
            ratio,
            row.note
        ));
    }
    if let Some(path) = json {
        std::fs::write(path, format!("[\n{}\n]\n", lines.join(",\n"))).expect("the JSON file");
    }
}
