//! A checkpoint of 768,000 chunks is looked at in a moment, from its metadata alone.

use std::time::{Duration, Instant};

use crate::command::{fine, json};

#[path = "../../examples/big_metadata.rs"]
mod big_metadata;

/// A build without optimisation on a busy machine; the shipped binary needs a fifth of it.
const PATIENCE: Duration = Duration::from_secs(20);
const MEMORY: u64 = 1 << 30;

#[test]
fn many_chunks_are_listed_in_little_time_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    big_metadata::write(folder.path(), 3000, 256).unwrap();
    let at = folder.path().to_str().unwrap();
    let start = Instant::now();
    let inspected = json(&["inspect", "--json", at]);
    let inspect = start.elapsed();
    assert_eq!(inspected["chunks"], 768_000);
    assert_eq!(inspected["ranks"], 256);
    assert_eq!(inspected["layouts"][0]["label"], "Shard(0)/256");
    assert_eq!(inspected["health"]["state"], "damaged", "the data files are not there");
    let start = Instant::now();
    let listed = fine(&["ls", at]);
    let ls = start.elapsed();
    assert_eq!(listed.lines().count(), 3001);
    let peak = largest_child();
    println!("inspect {inspect:?}, ls {ls:?}, peak {} MB", peak >> 20);
    assert!(inspect < PATIENCE && ls < PATIENCE, "{inspect:?} {ls:?}");
    assert!(peak < MEMORY, "{} MB", peak >> 20);
}

/// The largest resident size of any child so far, in bytes.
fn largest_child() -> u64 {
    // SAFETY: getrusage fills the zeroed struct that it is given and keeps no pointer to it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage), 0);
        usage
    };
    usage.ru_maxrss as u64 * 1024
}
