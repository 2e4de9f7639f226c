//! Ctrl-C leaves nothing behind.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::command::{ran, reshard};

const BYTES: u64 = 3 << 30;

#[test]
fn an_interrupted_conversion_takes_its_files_away() {
    let folder = tempfile::tempdir().unwrap();
    // Zeros that take no space: what matters is how long it takes to write them.
    let source = folder.path().join("zeros.safetensors");
    let tensors: Vec<String> = (0..BYTES >> 24)
        .map(|i| format!(r#""t{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{},{}]}}"#, 1 << 24, i << 24, (i + 1) << 24))
        .collect();
    let header = format!("{{{}}}", tensors.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    std::fs::write(&source, &bytes).unwrap();
    std::fs::OpenOptions::new().write(true).open(&source).unwrap().set_len(bytes.len() as u64 + BYTES).unwrap();

    let to = folder.path().join("dcp");
    let args = ["convert", source.to_str().unwrap(), to.to_str().unwrap(), "--to", "dcp", "--no-sync"];
    let child = reshard(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while std::fs::read_dir(&to).map_or(0, |entries| entries.count()) == 0 {
        assert!(start.elapsed() < Duration::from_secs(30), "nothing is being written");
        std::thread::sleep(Duration::from_millis(2));
    }
    let id = i32::try_from(child.id()).unwrap();
    // SAFETY: sends a signal to the child that was just started and not yet waited for.
    assert_eq!(unsafe { libc::kill(id, libc::SIGINT) }, 0);
    let ran = ran(&child.wait_with_output().unwrap());
    if ran.code == 0 {
        println!("skipped: it was done before it could be interrupted");
        return;
    }
    assert!(ran.code == 2 && ran.stderr.starts_with("error: cancelled"), "{ran}");
    let left: Vec<_> = std::fs::read_dir(&to).map(|entries| entries.map(|e| e.unwrap().path()).collect()).unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
}
