//! How close the local backend comes to raw system calls: 128 × 16 MiB written and synced, then read, each in turn in
//! one run, best of several rounds. Prints GB/s and the ratio.
//!
//! ```text
//! cargo run --release -p reshard-storage --example throughput -- [FOLDER] [ROUNDS]
//! ```
#![allow(clippy::unwrap_used)]

use std::fs::OpenOptions;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use reshard_storage::{Address, StoreOptions, WriteOptions, open};

const PIECE: usize = 16 << 20;
const PIECES: usize = 128;
const TOTAL: usize = PIECE * PIECES;
/// What stands before and after each piece, so that writes are vectored and not aligned, as those of records are.
const HEAD: usize = 576;

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    TOTAL as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn raw_write(path: &Path, data: &[u8]) {
    let file = OpenOptions::new().write(true).create_new(true).open(path).unwrap();
    for index in 0..PIECES {
        let piece = &data[index * PIECE..][..PIECE];
        file.write_all_at(piece, (index * PIECE) as u64).unwrap();
    }
    file.sync_all().unwrap();
}

fn raw_read(path: &Path, data: &mut [u8]) {
    let file = std::fs::File::open(path).unwrap();
    for (index, piece) in data.chunks_mut(PIECE).enumerate() {
        file.read_exact_at(piece, (index * PIECE) as u64).unwrap();
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let base = arguments.next().unwrap_or_else(|| std::env::temp_dir().display().to_string());
    let rounds: usize = arguments.next().map_or(5, |rounds| rounds.parse().unwrap());
    let folder = tempfile::tempdir_in(base).unwrap();
    let mut data: Vec<u8> = (0..TOTAL).map(|index| (index as u64).wrapping_mul(0x9E37_79B9) as u8).collect();
    let head = [7; HEAD];

    let variants = [
        ("store", StoreOptions::default()),
        ("store, no early writeback", StoreOptions { early_writeback: false, ..StoreOptions::default() }),
        ("store, no preallocation", StoreOptions { preallocate: false, ..StoreOptions::default() }),
        ("store, direct", StoreOptions { direct_io: true, ..StoreOptions::default() }),
    ];
    let raw_path = folder.path().join("raw");
    let (mut best_write, mut best_read) = (vec![0f64; variants.len() + 1], vec![0f64; variants.len() + 1]);
    for _ in 0..rounds {
        for (index, (_, options)) in variants.iter().enumerate() {
            // Raw calls before each, so that a noisy minute hits both.
            best_write[0] = best_write[0].max(timed(|| raw_write(&raw_path, &data)));
            best_read[0] = best_read[0].max(timed(|| raw_read(&raw_path, &mut data)));
            std::fs::remove_file(&raw_path).unwrap();
            let store = open(&Address::local(folder.path()), options).unwrap();
            let length = (TOTAL + PIECES * HEAD) as u64;
            let write = timed(|| {
                let writer = store.create_writer("data", &WriteOptions::with_length(length)).unwrap();
                for (piece, bytes) in data.chunks(PIECE).enumerate() {
                    let offset = (piece * (PIECE + HEAD)) as u64;
                    writer.write_at(offset, &[IoSlice::new(&head), IoSlice::new(bytes)]).unwrap();
                }
                writer.finish(true).unwrap();
                store.sync().unwrap();
            });
            let read = timed(|| {
                let reader = store.open_reader("data").unwrap();
                for (piece, bytes) in data.chunks_mut(PIECE).enumerate() {
                    reader.read_at((piece * (PIECE + HEAD) + HEAD) as u64, bytes).unwrap();
                }
            });
            store.delete("data").unwrap();
            best_write[index + 1] = best_write[index + 1].max(write);
            best_read[index + 1] = best_read[index + 1].max(read);
        }
    }
    let names = ["raw pwrite + fsync / raw pread"].into_iter().chain(variants.iter().map(|(name, _)| *name));
    println!("{:<32} {:>10} {:>7} {:>10} {:>7}", "128 x 16 MiB, best of rounds", "write GB/s", "ratio", "read GB/s", "ratio");
    for (index, name) in names.enumerate() {
        println!(
            "{name:<32} {:>10.2} {:>7.2} {:>10.2} {:>7.2}",
            best_write[index],
            best_write[index] / best_write[0],
            best_read[index],
            best_read[index] / best_read[0]
        );
    }
}
