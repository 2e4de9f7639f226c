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

#[cfg(target_os = "linux")]
#[test]
fn a_large_transposed_tensor_is_converted_in_little_memory() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let script =
        "import sys, torch; torch.save({'w': torch.arange(80_000_000, dtype=torch.int32).reshape(8000, 10000).t()}, sys.argv[1])";
    assert!(std::process::Command::new(python).args(["-c", script, &at("x.pt")]).status().unwrap().success());
    for (to, more) in [("x.safetensors", &[][..]), ("dcp", &["--to", "dcp", "--ranks", "3"]), ("y.pt", &[])] {
        // No room for the tensor's 305 MiB.
        within(290 << 20, &[&["convert", &at("x.pt"), &at(to), "--no-sync"], more].concat());
        let last = fine(&["show", &at(to), "w", "--slice", "9999:,-1:", "--values-only", "--json"]);
        assert!(last.contains("79999999"), "{to}: {last}");
    }
}

/// Runs what must be fine when it may have no more than so many bytes of memory of its own.
#[cfg(target_os = "linux")]
fn within(bytes: u64, args: &[&str]) {
    use std::os::unix::process::CommandExt;
    let mut command = reshard(args);
    // SAFETY: setrlimit is safe to call between fork and exec, and reads only what it is given.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
            match libc::setrlimit(libc::RLIMIT_DATA, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let ran = crate::command::ran(&command.output().unwrap());
    assert_eq!(ran.code, 0, "{args:?}\n{ran}");
}
