//! How fast the offline verbs are beside what they cannot be faster than: `verify` and `digest` beside reading the same
//! bytes and hashing them once on the same threads, `convert` beside `cp`. Ratios of one run.
//!
//! `cargo run --release --example offline_speed -- FOLDER [MIB_PER_TENSOR] [TENSORS] [ROUNDS]`

use std::hash::Hasher;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::digest::{DigestOptions, digest};
use reshard::storage::{Address, StoreOptions};
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, DType, SaveOptions, SaveState, Solo, save_with};
use sha2::{Digest as _, Sha256};
use twox_hash::XxHash3_64;

const BLOCK: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().ok_or("give a folder to work in")?);
    let size = args.next().map_or(Ok(16), |a| a.parse::<usize>())? << 20;
    let count = args.next().map_or(Ok(128), |a| a.parse::<usize>())?;
    let rounds = args.next().map_or(Ok(3), |a| a.parse::<usize>())?;
    let source = folder.join("dcp");
    std::fs::create_dir_all(&folder)?;
    if !source.join(".metadata").exists() {
        let mut seed = 1u64;
        let memory: Vec<u8> = (0..size / 8)
            .flat_map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed.to_le_bytes()
            })
            .collect();
        let mut state = SaveState::new();
        for i in 0..count {
            state.insert_bytes(format!("model.layer{i}.weight"), DType::Float32, &[size as u64 / 4096, 1024], &memory)?;
        }
        let store = reshard::storage::open(&Address::local(source.clone()), &StoreOptions::default())?;
        save_with(&Solo, &state, &store, &SaveOptions::default())?;
    }
    let file = source.join("__0_0.distcp");
    let bytes = std::fs::metadata(&file)?.len();
    let checkpoint = Checkpoint::open(&source.display().to_string())?;
    let gigabytes = bytes as f64 / 1e9;
    println!("{gigabytes:.2} GB in {count} tensors");
    for _ in 0..rounds {
        let raw = time(|| hash_file::<XxHash3_64>(&file))?;
        let ours = time(|| {
            let report = verify(&checkpoint, &VerifyOptions::default())?;
            if report.is_sound() { Ok(()) } else { Err("the checkpoint is damaged".into()) }
        })?;
        row("verify", "read + xxh3", gigabytes, raw, ours);
        let raw = time(|| hash_file::<Sha>(&file))?;
        let ours = time(|| digest(&checkpoint, &DigestOptions::default()).map(drop).map_err(Into::into))?;
        row("digest", "read + sha256", gigabytes, raw, ours);
        for (sync, name) in [(false, "cp"), (true, "cp && sync")] {
            let copy = folder.join("copy");
            let _ = std::fs::remove_file(&copy);
            let raw = time(|| cp(&file, &copy, sync))?;
            let _ = std::fs::remove_file(&copy);
            let output = folder.join("out.safetensors");
            let _ = std::fs::remove_file(&output);
            let target = ConvertTarget::Safetensors { max_shard_size: None };
            let destination = Destination::parse(&output.display().to_string(), target, &StoreOptions::default())?;
            let mut options = ConvertOptions::default();
            options.sync = sync;
            let ours = time(|| convert(&checkpoint, &destination, target, &options).map(drop).map_err(Into::into))?;
            let _ = std::fs::remove_file(&output);
            row("convert to safetensors", name, gigabytes, raw, ours);
        }
    }
    println!("peak memory {} MB", peak_memory() >> 20);
    Ok(())
}

fn row(what: &str, beside: &str, gigabytes: f64, raw: Duration, ours: Duration) {
    let rate = |time: Duration| gigabytes / time.as_secs_f64();
    let ratio = raw.as_secs_f64() / ours.as_secs_f64();
    println!("{what:24} {:6.2} GB/s   {beside:14} {:6.2} GB/s   ratio {ratio:.2}", rate(ours), rate(raw));
}

fn time(work: impl FnOnce() -> Result<(), Box<dyn std::error::Error>>) -> Result<Duration, Box<dyn std::error::Error>> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

#[derive(Default)]
struct Sha(Sha256);

impl Hasher for Sha {
    fn finish(&self) -> u64 {
        self.0.clone().finalize()[0].into()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

/// Reads a file and hashes it once, in as many parts as there are threads.
fn hash_file<H: Hasher + Default>(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    let threads = std::thread::available_parallelism()?.get() as u64;
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|i| {
                let file = &file;
                scope.spawn(move || -> std::io::Result<u64> {
                    let (mut at, end) = (length * i / threads, length * (i + 1) / threads);
                    let mut buffer = vec![0; BLOCK];
                    let mut hasher = H::default();
                    while at < end {
                        let part = &mut buffer[..(end - at).min(BLOCK as u64) as usize];
                        file.read_exact_at(part, at)?;
                        hasher.write(part);
                        at += part.len() as u64;
                    }
                    Ok(hasher.finish())
                })
            })
            .collect();
        for part in parts {
            part.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

fn cp(from: &Path, to: &Path, sync: bool) -> Result<(), Box<dyn std::error::Error>> {
    if !std::process::Command::new("cp").arg(from).arg(to).status()?.success() {
        return Err("cp failed".into());
    }
    if sync {
        std::fs::File::open(to)?.sync_all()?;
    }
    Ok(())
}

fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM"));
    line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}
