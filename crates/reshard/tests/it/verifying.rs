//! Verification: silent about what is whole, and every flipped bit, cut and missing file found, with its place.

use std::path::Path;

use reshard::verify::{Severity, VerifyOptions, VerifyReport, verify, verify_path};
use reshard::{OpenOptions, SaveOptions};

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
    let (mut missed, mut by_checksum) = (Vec::new(), 0);
    for at in (0..good.len()).step_by(step) {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        std::fs::write(&path, &bad).unwrap();
        let found = report(folder);
        if found.is_sound() {
            missed.push(at);
            continue;
        }
        by_checksum += usize::from(found.findings.iter().any(|finding| finding.is_checksum));
        let named = found.findings.iter().any(|f| f.severity == Severity::Error && f.file.as_deref() == Some(name));
        assert!(named, "{name} byte {at}: {:?}", found.findings);
    }
    std::fs::write(&path, &good).unwrap();
    assert!((1..good.len().div_ceil(step)).contains(&by_checksum), "{by_checksum} in data, and not all of them");
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
        let _ = reshard::digest::digest(&checkpoint, &Default::default());
        let target = reshard::convert::Target::Safetensors { max_shard_size: None };
        let store = std::sync::Arc::new(reshard::storage::memory::MemoryStore::new());
        let _ =
            reshard::convert::convert(&checkpoint, &reshard::convert::Destination::folder(store), target, &Default::default());
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

/// Changes what `.metadata` says, and encodes it anew.
fn rewrite(folder: &Path, change: impl FnOnce(&mut reshard::formats::Metadata)) {
    let path = folder.join(".metadata");
    let mut metadata = reshard::formats::Metadata::decode(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut metadata);
    std::fs::write(&path, metadata.encode().unwrap()).unwrap();
}

/// Every verdict there is: verify, verify without data, and a load that verifies always.
fn is_refused(folder: &Path, words: &str) {
    let found = report(folder);
    let named = found.findings.iter().any(|f| f.severity == Severity::Error && f.what.contains(words));
    assert!(named, "{words}: {:?}", found.findings);
    let checkpoint = corpus::open(folder);
    let mut quick = VerifyOptions::default();
    quick.data = false;
    assert!(!verify(&checkpoint, &quick).unwrap().is_sound(), "{words}");
    let key = checkpoint.keys().find(|key| key.starts_with("model.")).unwrap().to_owned();
    let tensor = checkpoint.tensor(&key).unwrap();
    let mut memory = vec![0; tensor.bytes() as usize];
    let whole = reshard::layout::Region::whole(&tensor.shape).unwrap();
    let piece = reshard::leaf::LoadPiece::contiguous(whole, tensor.dtype, &mut memory).unwrap();
    let wanted = reshard::leaf::LoadTensor { dtype: tensor.dtype, shape: tensor.shape.clone(), pieces: vec![piece] };
    let mut state = reshard::LoadState::new();
    state.insert(key, reshard::leaf::Scope::Shared, reshard::leaf::LoadLeaf::Tensor(wanted)).unwrap();
    let mut options = reshard::LoadOptions::default();
    options.verify = reshard::load::Verify::Always;
    options.strictness = reshard::load::Strictness::Lenient;
    let error = reshard::load_with(&reshard::Solo, &checkpoint, &mut state, &options).unwrap_err();
    assert_eq!(error.kind(), reshard::ErrorKind::Corrupt, "{words}: {error}");
}

fn saved(side: bool, seed: u64) -> tempfile::TempDir {
    let wholes: Vec<_> = ["model.a", "model.b"]
        .iter()
        .map(|key| crate::layouts::Whole::new(key, reshard::DType::Float32, &[6, 4], seed))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let values = [("name".to_owned(), reshard::Value::from("x"))];
    corpus::save_state(&wholes, &values, &corpus::rows(2), &corpus::local(folder.path()), &SaveOptions::default());
    if !side {
        remove_side(folder.path());
    }
    folder
}

fn remove_side(folder: &Path) {
    let files = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    files.filter(|p| p.extension().is_some_and(|e| e == "sums")).for_each(|p| std::fs::remove_file(p).unwrap());
}

#[test]
fn what_is_stored_twice_must_agree() {
    for side in [true, false] {
        let swapped = saved(side, 1);
        rewrite(swapped.path(), |m| {
            let (a, b) = (m.entries["model.a"].kind.clone(), m.entries["model.b"].kind.clone());
            m.entries["model.a"].kind = b;
            m.entries["model.b"].kind = a;
        });
        is_refused(swapped.path(), "\"model.b\" is stored there");
        let dropped = saved(side, 1);
        rewrite(dropped.path(), |m| drop(m.entries.shift_remove("model.b")));
        is_refused(dropped.path(), "that .metadata does not name");
        let renamed = saved(side, 1);
        rewrite(renamed.path(), |m| {
            let entry = m.entries.shift_remove("model.a").unwrap();
            let path =
                Some(vec![reshard::formats::PathSegment::Key("model".into()), reshard::formats::PathSegment::Key("c".into())]);
            m.entries.insert("model.c".into(), reshard::formats::Entry { path, ..entry });
        });
        is_refused(renamed.path(), "\"model.a\" is stored there");
        let moved = saved(side, 1);
        rewrite(moved.path(), |m| m.entries["model.a"].path = m.entries["model.b"].path.clone());
        is_refused(moved.path(), "which is another key");
        let flagged = saved(side, 1);
        rewrite(flagged.path(), |m| {
            if let reshard::formats::EntryKind::Tensor(tensor) = &mut m.entries["model.a"].kind {
                tensor.properties.requires_grad = true;
            }
        });
        is_refused(flagged.path(), "the file's own index says");
    }
}

#[test]
fn a_file_of_another_save_is_found_without_the_sidecar() {
    let (folder, other) = (saved(false, 1), saved(false, 2));
    std::fs::copy(other.path().join("__1_0.distcp"), folder.path().join("__1_0.distcp")).unwrap();
    is_refused(folder.path(), "the file belongs to the save");
}

#[test]
fn a_file_that_the_metadata_forgot_is_found() {
    let folder = saved(false, 1);
    rewrite(folder.path(), |m| {
        for key in ["model.a", "model.b"] {
            if let reshard::formats::EntryKind::Tensor(tensor) = &mut m.entries[key].kind {
                tensor.shape = reshard::layout::Dims::from_slice(&[3, 4]);
                tensor.chunks.truncate(1);
            }
        }
    });
    let found = report(folder.path());
    assert!(found.findings.iter().any(|f| f.what.contains("does not name it")), "{:?}", found.findings);
}

#[test]
fn one_changed_byte_in_the_name_of_a_field_is_found() {
    for side in [true, false] {
        let folder = saved(side, 1);
        let path = folder.path().join(".metadata");
        let good = std::fs::read(&path).unwrap();
        for field in ["relative_path", "storage_data", "planner_data", "offsets", "sizes", "length", "fqn", "save_id"] {
            let at = good.windows(field.len()).position(|w| w == field.as_bytes()).unwrap();
            let mut bad = good.clone();
            bad[at + field.len() - 1] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            let found = report(folder.path());
            assert!(!found.is_sound(), "{field}: {found:?}");
        }
    }
}

#[test]
fn the_report_says_what_was_checked() {
    let folder = saved(true, 1);
    let found = report(folder.path());
    assert_eq!((found.indexes, found.values, found.checked, found.data), (2, 1, 5, true));
    let mut quick = VerifyOptions::default();
    quick.data = false;
    let found = verify(&corpus::open(folder.path()), &quick).unwrap();
    assert_eq!((found.indexes, found.values, found.checked, found.data, found.bytes), (2, 0, 0, false, 0));
}

#[test]
fn a_safetensors_index_must_say_what_its_files_hold() {
    let source = saved(true, 1);
    let folder = tempfile::tempdir().unwrap();
    let target = reshard::convert::Target::Safetensors { max_shard_size: Some(100) };
    let to = reshard::convert::Destination::folder(corpus::local(folder.path()));
    reshard::convert::convert(&corpus::open(source.path()), &to, target, &Default::default()).unwrap();
    assert!(report(folder.path()).is_sound());
    let index = folder.path().join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    assert!(text.contains("model.a"), "{text}");
    std::fs::write(&index, text.replace("\"model.a\"", "\"model.gone\"")).unwrap();
    is_refused(folder.path(), "and it does not");
}

#[test]
fn a_folder_of_several_checkpoints_is_refused_with_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/records/read");
    std::fs::copy(records.join("state_dict.pt"), folder.path().join("scheduler.bin")).unwrap();
    assert!(report(folder.path()).is_sound(), "alone it is the only one");
    let model = folder.path().join("a_model");
    std::fs::create_dir(&model).unwrap();
    std::fs::write(model.join(".metadata"), b"cut").unwrap();
    let text = folder.path().to_str().unwrap();
    let refused = [
        reshard::Checkpoint::open(text).unwrap_err(),
        verify_path(text, &OpenOptions::default(), &VerifyOptions::default()).unwrap_err(),
    ];
    for error in refused {
        assert!(error.to_string().contains("a_model/, scheduler.bin"), "{error}");
    }
    std::fs::remove_dir_all(&model).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), b"cut").unwrap();
    let error = reshard::Checkpoint::open(text).unwrap_err();
    assert!(error.to_string().contains("model.safetensors, scheduler.bin"), "{error}");
}
