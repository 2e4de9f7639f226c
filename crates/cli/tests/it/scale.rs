//! A checkpoint of 768,000 chunks is looked at in a moment, from its metadata alone; a large tensor is converted in little
//! memory, however it lies in its file.

use std::time::{Duration, Instant};

use crate::command::{fine, json, reshard};
use crate::python::python;

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

#[test]
fn a_large_transposed_tensor_is_converted_in_little_memory() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let script =
        "import sys, torch; torch.save({'w': torch.arange(80_000_000, dtype=torch.int32).reshape(8000, 10000).t()}, sys.argv[1])";
    assert!(std::process::Command::new(python).args(["-c", script, &at("x.pt")]).status().unwrap().success());
    for (to, more) in [("x.safetensors", &[][..]), ("dcp", &["--to", "dcp", "--ranks", "3"]), ("y.pt", &[])] {
        let peak = peak_of(&[&["convert", &at("x.pt"), &at(to), "--no-sync"], more].concat());
        println!("{to}: peak {} MB", peak >> 20);
        assert!(peak < 256 << 20, "{to}: {} MB for a tensor of 305 MB", peak >> 20);
        let last = fine(&["show", &at(to), "w", "--slice", "9999:,-1:", "--values-only", "--json"]);
        assert!(last.contains("79999999"), "{to}: {last}");
    }
}

/// Runs what must be fine and gives its largest resident size in bytes.
fn peak_of(args: &[&str]) -> u64 {
    let child = reshard(args).stdout(std::process::Stdio::null()).spawn().unwrap();
    let mut status = 0;
    // SAFETY: waits for the child that was just started and that nobody else waits for; fills what it is given.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(
            libc::wait4(i32::try_from(child.id()).unwrap(), &mut status, 0, &mut usage),
            i32::try_from(child.id()).unwrap()
        );
        usage
    };
    assert_eq!(status, 0, "{args:?}");
    usage.ru_maxrss as u64 * 1024
}
