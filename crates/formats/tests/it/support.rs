//! What several test modules need: fixtures, a file as `ReadAt`, and a Python with torch where there is one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use reshard_formats::{DType, ReadAt};
use reshard_layout::{ByteLayout, copy_runs, runs};
use sha2::{Digest, Sha256};

/// A path below this crate's `tests` folder.
pub(crate) fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

pub(crate) fn read_fixture(path: &str) -> Vec<u8> {
    let path = fixture(path);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn json_fixture(path: &str) -> serde_json::Value {
    serde_json::from_slice(&read_fixture(path)).unwrap()
}

/// The files of a fixture folder with this extension, by name without it.
pub(crate) fn fixture_names(folder: &str, extension: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(fixture(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

/// An error with all its causes, as a caller would print it.
pub(crate) fn error_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The elements of a layout in row-major order, in this machine's byte order.
pub(crate) fn gather(src: &dyn ReadAt, dtype: DType, layout: &ByteLayout, swap: bool) -> Vec<u8> {
    let shape = layout.shape();
    let dense = ByteLayout::contiguous(shape, dtype.size()).unwrap();
    let mut source = vec![0; (layout.end() - layout.base()) as usize];
    src.read_at(layout.base(), &mut source).unwrap();
    let mut out = vec![0; dense.end() as usize];
    let zeros = vec![0; shape.len()];
    let moves = runs(shape, &layout.clone().at(0), &zeros, &dense, &zeros).unwrap();
    copy_runs(&source, &mut out, moves).unwrap();
    if swap {
        reshard_formats::swap_bytes(dtype, &mut out);
    }
    out
}

/// A Python that can import torch: `$RESHARD_PYTHON`, else `.venv/bin/python` at the repository's root. Says why
/// a test does nothing when there is none.
pub(crate) fn torch_python() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = match std::env::var_os("RESHARD_PYTHON") {
        Some(python) => PathBuf::from(python),
        None => root.join(".venv/bin/python"),
    };
    let works = Command::new(&python).args(["-c", "import torch"]).output().is_ok_and(|output| output.status.success());
    // Whoever names a Python wants these tests to run.
    assert!(works || std::env::var_os("RESHARD_PYTHON").is_none(), "{} has no torch", python.display());
    if !works {
        println!("skipped: {} has no torch; set RESHARD_PYTHON to a Python that has", python.display());
    }
    works.then_some(python)
}

/// Runs a Python program and returns what it printed.
pub(crate) fn run_python(python: &Path, program: &str, args: &[&Path]) -> String {
    let output = Command::new(python).arg("-c").arg(program).args(args).output().unwrap();
    assert!(output.status.success(), "python failed:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
