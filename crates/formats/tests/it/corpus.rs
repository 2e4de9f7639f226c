//! Every checkpoint of the corpus, read the way a loader would: `.metadata`, then each chunk's record, assembled.
//!
//! Every key, element type, shape, digest of the full tensor and plain value must be what the script that made the
//! corpus wrote down, for every torch version in it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use reshard_formats::{Content, EntryKind, Metadata, StorageInfo, TensorEntry, TorchArchive, Value};
use reshard_layout::{ByteLayout, copy_runs, coverage, runs};
use serde_json::Value as Json;

use crate::support::{fixture, sha256};

/// The folders of all cases.
pub(crate) fn cases() -> Vec<PathBuf> {
    let mut cases = Vec::new();
    for version in fs::read_dir(fixture("corpus")).unwrap() {
        let version = version.unwrap().path();
        if version.is_dir() {
            let found = fs::read_dir(version).unwrap();
            cases.extend(found.map(|case| case.unwrap().path()));
        }
    }
    cases.sort();
    cases
}

struct Checkpoint {
    name: String,
    metadata: Metadata,
    files: Vec<Vec<u8>>,
}

impl Checkpoint {
    fn open(case: &Path) -> Checkpoint {
        let folder = case.join("checkpoint");
        let metadata = fs::read(folder.join(".metadata")).unwrap();
        let metadata = Metadata::decode(&metadata).unwrap();
        let files = metadata.files.iter().map(|file| fs::read(folder.join(file)).unwrap()).collect();
        Checkpoint { name: case.display().to_string(), metadata, files }
    }

    fn record(&self, storage: &StorageInfo) -> TorchArchive<'_> {
        let file = &self.files[storage.file.0 as usize];
        let archive = TorchArchive::open(file, storage.offset, storage.length).unwrap();
        archive.verify_all().unwrap();
        archive
    }

    /// The full tensor's bytes from its chunks, which must cover it exactly.
    fn assemble(&self, key: &str, tensor: &TensorEntry) -> Vec<u8> {
        let what = format!("{} {key}", self.name);
        let dtype = tensor.properties.dtype;
        let regions: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        assert!(coverage(&tensor.shape, &regions).unwrap().is_exact(), "{what}");
        let whole = ByteLayout::contiguous(&tensor.shape, dtype.size()).unwrap();
        let mut out = vec![0; whole.end() as usize];
        for chunk in &tensor.chunks {
            let archive = self.record(&chunk.storage);
            let Content::Tensor(stored) = archive.plain_content().unwrap() else {
                panic!("{what}: a chunk that is not a tensor");
            };
            assert_eq!(stored.dtype, dtype, "{what}");
            assert_eq!(stored.shape.as_slice(), chunk.region.sizes(), "{what}");
            assert!(!stored.form.big_endian && stored.storage.crc32.is_some(), "{what}");
            let file = &self.files[chunk.storage.file.0 as usize];
            let zeros = vec![0; chunk.region.ndim()];
            let moves = runs(chunk.region.sizes(), &stored.layout, &zeros, &whole, chunk.region.offsets());
            copy_runs(file, &mut out, moves.unwrap()).unwrap();
        }
        out
    }
}

/// Takes lists of containers apart. The script that wrote the expectations does so for every such list, where torch
/// itself keeps one whole that has no tensor below it.
fn flatten(key: &str, value: &Value, found: &mut BTreeMap<String, Value>) {
    match value {
        Value::List(items) if items.iter().any(|item| matches!(item, Value::List(_) | Value::Dict(_))) => {
            for (index, item) in items.iter().enumerate() {
                flatten(&format!("{key}.{index}"), item, found);
            }
        }
        value => {
            found.insert(key.to_owned(), value.clone());
        }
    }
}

fn check(case: &Path) -> (usize, usize) {
    let expected = fs::read(case.join("expected.json")).unwrap();
    let expected: Json = serde_json::from_slice(&expected).unwrap();
    let expected = expected["entries"].as_object().unwrap();
    let checkpoint = Checkpoint::open(case);
    let (mut tensors, mut values) = (0, BTreeMap::new());
    for (key, entry) in &checkpoint.metadata.entries {
        let what = format!("{} {key}", checkpoint.name);
        match &entry.kind {
            EntryKind::Tensor(tensor) => {
                let expected = &expected[key];
                assert_eq!(tensor.properties.dtype.name(), expected["dtype"], "{what}");
                let shape: Vec<u64> = serde_json::from_value(expected["shape"].clone()).unwrap();
                assert_eq!(tensor.shape.as_slice(), shape, "{what}");
                let digest = sha256(&checkpoint.assemble(key, tensor));
                assert_eq!(digest, expected["sha256"], "{what}");
                tensors += 1;
            }
            EntryKind::Bytes(storage) => {
                let archive = checkpoint.record(storage);
                let Content::Value(value) = archive.plain_content().unwrap() else {
                    panic!("{what} is not a plain value");
                };
                flatten(key, &value, &mut values);
            }
        }
    }
    for (key, value) in &values {
        let what = format!("{} {key}", checkpoint.name);
        let expected = expected.get(key).unwrap_or_else(|| panic!("{what} is not expected"));
        match expected.get("repr") {
            Some(repr) => assert_eq!(value.python_repr(), *repr, "{what}"),
            None => assert_eq!(value.to_json(), expected["value"], "{what}"),
        }
        assert!(expected.get("dtype").is_none(), "{what}");
    }
    assert_eq!(tensors + values.len(), expected.len(), "{}", checkpoint.name);
    (tensors, values.len())
}

#[test]
fn every_case_reads_as_written() {
    let cases = cases();
    assert!(cases.len() >= 18, "{} cases", cases.len());
    let (mut tensors, mut values) = (0, 0);
    for case in &cases {
        let (more_tensors, more_values) = check(case);
        tensors += more_tensors;
        values += more_values;
    }
    println!("{} cases, {tensors} tensors, {values} plain values", cases.len());
    assert!(tensors > 600 && values > 400);
}

/// What a torch version writes into every record, by case.
#[test]
fn old_and_new_sets_of_entries_are_there() {
    let mut sets = BTreeMap::new();
    for case in cases() {
        let checkpoint = Checkpoint::open(&case);
        let (_, entry) = checkpoint.metadata.entries.first().unwrap();
        let storage = match &entry.kind {
            EntryKind::Tensor(tensor) => &tensor.chunks[0].storage,
            EntryKind::Bytes(storage) => storage,
        };
        let archive = checkpoint.record(storage);
        let version = case.parent().unwrap().file_name().unwrap();
        let new = archive.entry(".format_version").is_some();
        sets.insert(version.to_str().unwrap().to_owned(), new);
    }
    let sets: Vec<_> = sets.iter().map(|(version, new)| (version.as_str(), *new)).collect();
    assert_eq!(sets, [("torch-2.13", true), ("torch-2.15", true), ("torch-2.5", false)]);
}
