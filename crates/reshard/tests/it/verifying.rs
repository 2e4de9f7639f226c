//! Verification: silent about what is whole, and every flipped bit, cut and missing file found, with its place.

use std::path::Path;

use reshard::{OpenOptions, SaveOptions, Severity, VerifyOptions, VerifyReport, verify, verify_path};

use crate::corpus;

fn report(path: &Path) -> VerifyReport {
    verify_path(path.to_str().unwrap(), &OpenOptions::default(), &VerifyOptions::default()).unwrap()
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::write(to.path().join(entry.file_name()), std::fs::read(entry.path()).unwrap()).unwrap();
    }
    to
}

/// Flips bits of a file one after the other and demands that each is found.
fn every_flip_is_found(folder: &Path, name: &str, step: usize) {
    let path = folder.join(name);
    let good = std::fs::read(&path).unwrap();
    let mut missed = Vec::new();
    for at in (0..good.len()).step_by(step) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let found = report(folder);
        if found.is_sound() {
            missed.push(at);
            continue;
        }
        let named = found.findings.iter().any(|f| f.severity == Severity::Error && f.file.as_deref() == Some(name));
        assert!(named, "{name} byte {at}: {:?}", found.findings);
    }
    std::fs::write(&path, &good).unwrap();
    assert!(missed.is_empty(), "{name}: flips not found at {missed:?} of {} bytes", good.len());
}

#[test]
fn what_pytorch_wrote_is_sound() {
    for (name, path, _) in corpus::cases() {
        let found = report(&path);
        assert!(found.findings.is_empty(), "{name}: {:?}", found.findings);
        assert!(found.checked == found.records && found.unchecked == 0, "{name}: {found:?}");
    }
}

#[test]
fn every_flipped_bit_of_a_file_that_pytorch_wrote_is_found() {
    for (name, path, _) in corpus::cases() {
        if !["torch-2.13/ddp_w2", "torch-2.5/zoo", "torch-2.15/fsdp2_w3"].contains(&name.as_str()) {
            continue;
        }
        let folder = copy(&path);
        let file = std::fs::read_dir(&path)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .find(|f| f.ends_with("_0.distcp"));
        every_flip_is_found(folder.path(), &file.unwrap(), 7);
    }
}

#[test]
fn our_own_saves_are_sound_and_every_flipped_bit_is_found() {
    let (mut wholes, values) = corpus::sample();
    wholes.retain(|w| w.key != "optim.state.big");
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::columns(2), &corpus::local(folder.path()), &SaveOptions::default());
    let found = report(folder.path());
    assert!(found.findings.is_empty(), "{:?}", found.findings);
    assert_eq!((found.checked, found.files), (found.records, 2));
    for name in ["__0_0.distcp", "__1_0.distcp"] {
        every_flip_is_found(folder.path(), name, 1);
    }
}

#[test]
fn every_flipped_bit_is_found_without_the_side_file_too() {
    let (mut wholes, values) = corpus::sample();
    wholes.truncate(2);
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::rows(1), &corpus::local(folder.path()), &SaveOptions::default());
    let side =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path()).find(|p| p.extension().is_some_and(|e| e == "sums"));
    std::fs::remove_file(side.unwrap()).unwrap();
    assert!(report(folder.path()).findings.is_empty());
    let path = folder.path().join("__0_0.distcp");
    let good = std::fs::read(&path).unwrap();
    for at in (0..good.len() - 8).step_by(3).chain(good.len() - 8..good.len()) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(&path, &bad).unwrap();
        assert!(!report(folder.path()).is_sound(), "byte {at} of {}", good.len());
    }
}

#[test]
fn large_records_are_checked_in_blocks() {
    let big = crate::layouts::Whole::new("t", reshard::DType::Float32, &[1500, 1000], 7);
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&[big], &[], &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
    assert!(report(folder.path()).findings.is_empty());
    let path = folder.path().join("__0_0.distcp");
    let good = std::fs::read(&path).unwrap();
    for at in [0, 100, 3_000_000, 6_000_300, 6_000_600] {
        let mut bad = good.clone();
        bad[at] ^= 0x80;
        std::fs::write(&path, &bad).unwrap();
        let found = report(folder.path());
        assert_eq!(found.errors(), 1, "byte {at}: {:?}", found.findings);
        assert_eq!(found.findings[0].key.as_deref(), Some("t"));
    }
}

#[test]
fn cuts_missing_files_and_leftovers_are_named() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::rows(2), &corpus::local(folder.path()), &SaveOptions::default());
    let path = folder.path().join("__1_0.distcp");
    let good = std::fs::read(&path).unwrap();
    for length in [0, 1, 100, good.len() / 2, good.len() - 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        let found = report(folder.path());
        assert!(!found.is_sound(), "cut to {length}");
        assert!(
            found.findings.iter().any(|f| f.file.as_deref() == Some("__1_0.distcp")),
            "cut to {length}: {:?}",
            found.findings
        );
    }
    std::fs::write(&path, [good.as_slice(), b"more"].concat()).unwrap();
    assert!(!report(folder.path()).is_sound());
    std::fs::remove_file(&path).unwrap();
    let found = report(folder.path());
    assert!(found.findings.iter().any(|f| f.what.contains("missing")), "{:?}", found.findings);
    std::fs::write(&path, &good).unwrap();
    std::fs::write(folder.path().join("__7_0.distcp"), b"left over").unwrap();
    let found = report(folder.path());
    assert!(
        found.is_sound() && found.findings.len() == 1 && found.findings[0].severity == Severity::Warning,
        "{:?}",
        found.findings
    );
}

#[test]
fn damaged_metadata_is_a_finding_and_nothing_is_an_error() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
    let path = folder.path().join(".metadata");
    let good = std::fs::read(&path).unwrap();
    std::fs::write(&path, &good[..good.len() / 2]).unwrap();
    let found = report(folder.path());
    assert!(!found.is_sound() && found.findings[0].file.as_deref() == Some(".metadata"), "{:?}", found.findings);
    let empty = tempfile::tempdir().unwrap();
    let path = empty.path().to_str().unwrap();
    assert!(verify_path(path, &OpenOptions::default(), &VerifyOptions::default()).is_err());
}

#[test]
fn without_data_only_structure_is_read() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
    let path = folder.path().join("__0_0.distcp");
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let checkpoint = corpus::open(folder.path());
    let mut options = VerifyOptions::default();
    options.data = false;
    assert!(verify(&checkpoint, &options).unwrap().is_sound());
    assert!(!verify(&checkpoint, &VerifyOptions::default()).unwrap().is_sound());
}

/// Whatever a file says, the answer is a report or an error.
fn survives(path: &Path) {
    let text = path.to_str().unwrap();
    let _ = verify_path(text, &OpenOptions::default(), &VerifyOptions::default());
    if let Ok(checkpoint) = reshard::Checkpoint::open(text) {
        let _ = reshard::digest(&checkpoint, &Default::default());
        let target = reshard::ConvertTarget::Safetensors { max_shard_size: None };
        let store = std::sync::Arc::new(reshard::storage::memory::MemoryStore::new());
        let _ = reshard::convert(&checkpoint, &reshard::Destination::folder(store), target, &Default::default());
    }
}

#[test]
fn hostile_torch_files_do_no_harm() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/records/hostile");
    let scratch = tempfile::tempdir().unwrap();
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && path.extension().is_none_or(|e| e != "json") {
            let copy = scratch.path().join("x.pt");
            std::fs::copy(&path, &copy).unwrap();
            survives(&copy);
            count += 1;
        }
    }
    assert!(count > 0);
}

#[test]
fn damaged_metadata_does_no_harm() {
    let (mut wholes, values) = corpus::sample();
    wholes.truncate(3);
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::columns(2), &corpus::local(folder.path()), &SaveOptions::default());
    let path = folder.path().join(".metadata");
    let good = std::fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        survives(folder.path());
    }
    for length in (0..good.len()).step_by(37) {
        std::fs::write(&path, &good[..length]).unwrap();
        survives(folder.path());
    }
}
