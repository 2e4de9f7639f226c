//! How close the local backend comes to raw system calls: 128 × 16 MiB written and synced, then read, beside raw calls
//! for the same bytes in the same minute. Prints the median over the rounds of speed, of the ratio to the raw run next
//! to it, and of the ratio of processor time, which other work on the machine disturbs least.
//!
//! ```text
//! cargo run --release -p reshard-storage --example throughput -- [FOLDER] [ROUNDS]
//! ```
#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use reshard_storage::{Address, StoreOptions, WriteOptions, open};

const PIECE: usize = 16 << 20;
const PIECES: usize = 128;
const TOTAL: usize = PIECE * PIECES;
/// What stands before each piece, so that writes are vectored and not aligned, as those of records are.
const HEAD: usize = 576;
const STEP: usize = HEAD + PIECE;

/// Seconds by the clock, and of processor time.
#[derive(Clone, Copy)]
struct Cost {
    clock: f64,
    processor: f64,
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn timed(work: impl FnOnce()) -> Cost {
    let (start, processor) = (Instant::now(), processor_time());
    work();
    Cost { clock: start.elapsed().as_secs_f64(), processor: (processor_time() - processor).as_secs_f64() }
}

fn raw_write(path: &Path, data: &[u8]) {
    let file = OpenOptions::new().write(true).create_new(true).open(path).unwrap();
    for (index, piece) in data.chunks(PIECE).enumerate() {
        file.write_all_at(piece, (index * PIECE) as u64).unwrap();
    }
    file.sync_all().unwrap();
}

fn raw_read(path: &Path, data: &mut [u8]) {
    let file = File::open(path).unwrap();
    for (index, piece) in data.chunks_mut(PIECE).enumerate() {
        file.read_exact_at(piece, (index * STEP + HEAD) as u64).unwrap();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(name: &str, raw: &[Cost], ours: &[Cost]) {
    let pairs = || raw.iter().zip(ours);
    let speed = |costs: &[Cost]| TOTAL as f64 / 1e9 / median(costs.iter().map(|cost| cost.clock).collect());
    println!(
        "{name:<34} {:>8.2} {:>8.2} {:>8.2} {:>10.2}",
        speed(raw),
        speed(ours),
        median(pairs().map(|(raw, ours)| raw.clock / ours.clock).collect()),
        median(pairs().map(|(raw, ours)| raw.processor / ours.processor).collect()),
    );
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let base = arguments.next().unwrap_or_else(|| std::env::temp_dir().display().to_string());
    let rounds: usize = arguments.next().map_or(5, |rounds| rounds.parse().unwrap());
    let folder = tempfile::tempdir_in(base).unwrap();
    let mut data: Vec<u8> = (0..TOTAL).map(|index| (index as u64).wrapping_mul(0x9E37_79B9) as u8).collect();
    let head = [7; HEAD];
    let (raw_path, path) = (folder.path().join("raw"), folder.path().join("data"));

    println!("{:<34} {:>8} {:>8} {:>8} {:>10}", "128 x 16 MiB, medians", "raw GB/s", "GB/s", "ratio", "cpu ratio");
    for (name, options) in [
        ("default", StoreOptions::default()),
        ("no early writeback", StoreOptions { early_writeback: false, ..StoreOptions::default() }),
        ("no preallocation", StoreOptions { preallocate: false, ..StoreOptions::default() }),
        ("direct", StoreOptions { direct_io: true, ..StoreOptions::default() }),
    ] {
        let store = open(&Address::local(folder.path()), &options).unwrap();
        let (mut raw_writes, mut writes, mut raw_reads, mut reads) = (vec![], vec![], vec![], vec![]);
        for _ in 0..rounds {
            raw_writes.push(timed(|| raw_write(&raw_path, &data)));
            std::fs::remove_file(&raw_path).unwrap();
            writes.push(timed(|| {
                let length = (PIECES * STEP) as u64;
                let writer = store.create_writer("data", &WriteOptions::with_length(length)).unwrap();
                for (index, piece) in data.chunks(PIECE).enumerate() {
                    writer.write_at((index * STEP) as u64, &[IoSlice::new(&head), IoSlice::new(piece)]).unwrap();
                }
                writer.finish(true).unwrap();
                store.sync().unwrap();
            }));
            raw_reads.push(timed(|| raw_read(&path, &mut data)));
            reads.push(timed(|| {
                let reader = store.open_reader("data").unwrap();
                for (index, piece) in data.chunks_mut(PIECE).enumerate() {
                    reader.read_at((index * STEP + HEAD) as u64, piece).unwrap();
                }
            }));
            store.delete("data").unwrap();
        }
        report(&format!("write and sync, {name}"), &raw_writes, &writes);
        report(&format!("read, {name}"), &raw_reads, &reads);
    }
}
