//! Tensors whose elements do not lie in row-major order: transposed, permuted, sliced, expanded, views of one storage.
//! In the memory of whoever saves or loads, and in files that `torch.save` wrote.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::diff::{DiffOptions, diff};
use reshard::digest::DigestEntry;
use reshard::layout::{ByteLayout, Dims, Region};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::memory::{Source, Target};
use reshard::numbers::{StatsOptions, TensorStats, stats};
use reshard::storage::StoreOptions;
use reshard::{AsyncSaver, Checkpoint, DType, Group, LoadOptions, LoadState, SaveOptions, SaveState, Solo, load_with, save_with};

use crate::converting::{python, run_python};
use crate::corpus;
use crate::layouts::{Whole, store_at};

/// A tensor and the strides, in elements, with which it lies in memory.
fn kinds() -> Vec<(&'static str, Vec<u64>, Vec<u64>)> {
    let kind = |name, shape: &[u64], strides: &[u64]| (name, shape.to_vec(), strides.to_vec());
    vec![
        kind("transposed", &[30, 20], &[1, 30]),
        kind("large transposed", &[700, 900], &[1, 700]),
        kind("permuted", &[5, 6, 7], &[7, 35, 1]),
        kind("reversed dimensions", &[50, 60, 70], &[1, 50, 3000]),
        kind("rows expanded", &[40, 30], &[0, 1]),
        kind("columns expanded", &[40, 30], &[1, 0]),
        kind("one element expanded", &[600, 700], &[0, 0]),
        kind("every second column", &[30, 20], &[40, 2]),
        kind("rows of a wider matrix", &[300, 1000], &[1024, 1]),
        kind("columns of a transposed matrix", &[300, 1000], &[2, 700]),
        kind("overlapping windows", &[50, 8], &[3, 1]),
    ]
}

/// Memory of that layout, and the tensor that it means.
fn in_memory(shape: &[u64], strides: &[u64]) -> (ByteLayout, Vec<u8>, Vec<u8>) {
    let layout = ByteLayout::strided(shape, strides, 4).unwrap();
    let memory = Whole::new("m", DType::Float32, &[layout.end() / 4], 11).bytes;
    let mut meant = Vec::new();
    for flat in 0..shape.iter().product::<u64>() {
        let (mut rest, mut at) = (flat, 0);
        for dim in (0..shape.len()).rev() {
            at += (rest % shape[dim] * strides[dim] * 4) as usize;
            rest /= shape[dim];
        }
        meant.extend_from_slice(&memory[at..at + 4]);
    }
    (layout, memory, meant)
}

#[test]
fn what_is_saved_from_strided_memory_is_the_tensor_it_means() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = kinds();
    let tensors: Vec<_> = kinds.iter().map(|(_, shape, strides)| in_memory(shape, strides)).collect();
    let mut state = SaveState::new();
    for ((name, shape, _), (layout, memory, _)) in kinds.iter().zip(&tensors) {
        let piece = SavePiece::new(Region::whole(shape).unwrap(), layout.clone(), Source::new(memory)).unwrap();
        let shape = Dims::from_slice(shape);
        let tensor = SaveTensor { dtype: DType::Float32, shape, requires_grad: false, pieces: vec![piece] };
        state.insert((*name).to_owned(), None, Scope::Shared, SaveLeaf::Tensor(tensor)).unwrap();
    }
    let (now, later) = (folder.path().join("now"), folder.path().join("later"));
    save_with(&Solo, &state, &store_at(&now), &SaveOptions::default()).unwrap();
    let group: Arc<dyn Group> = Arc::new(Solo);
    AsyncSaver::new(1 << 30).save(group, &state, store_at(&later), SaveOptions::default()).unwrap().wait().unwrap();
    for path in [now, later] {
        let found = corpus::open(&path);
        for ((name, ..), (_, _, meant)) in kinds.iter().zip(&tensors) {
            assert!(found.read_whole(name).unwrap() == *meant, "{name} in {}", path.display());
        }
        let report = reshard::verify::verify(&found, &Default::default()).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
}

#[test]
fn what_is_loaded_into_strided_memory_is_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let separate = |(name, ..): &(&str, Vec<u64>, Vec<u64>)| !name.contains("expanded") && !name.contains("overlapping");
    let kinds: Vec<_> = kinds().into_iter().filter(separate).collect();
    let wholes: Vec<Whole> = kinds.iter().map(|(name, shape, _)| Whole::new(name, DType::Float32, shape, 3)).collect();
    corpus::save_state(&wholes, &[], &corpus::columns(3), &corpus::local(folder.path()), &SaveOptions::default());
    let found = corpus::open(folder.path());
    for ((name, shape, strides), whole) in kinds.iter().zip(&wholes) {
        let (layout, mut memory, _) = in_memory(shape, strides);
        let mut state = LoadState::new();
        let piece = LoadPiece::new(Region::whole(shape).unwrap(), layout.clone(), Target::new(&mut memory)).unwrap();
        let tensor = LoadTensor { dtype: DType::Float32, shape: Dims::from_slice(shape), pieces: vec![piece] };
        state.insert((*name).to_owned(), Scope::Shared, LoadLeaf::Tensor(tensor)).unwrap();
        let mut options = LoadOptions::default();
        options.strictness = reshard::load::Strictness::Lenient;
        load_with(&Solo, &found, &mut state, &options).unwrap();
        drop(state);
        for flat in 0..shape.iter().product::<u64>() {
            let (mut rest, mut at) = (flat, 0);
            for dim in (0..shape.len()).rev() {
                at += (rest % shape[dim] * strides[dim] * 4) as usize;
                rest /= shape[dim];
            }
            assert_eq!(memory[at..at + 4], whole.bytes[flat as usize * 4..][..4], "{name} at {flat}");
        }
    }
}

fn records() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/records/read")
}

/// Compares the digests of a checkpoint with what torch said of every tensor.
fn assert_digests(found: &Checkpoint, expected: &serde_json::Value, what: &str) {
    let digest = corpus::digest_of(found);
    for (key, wanted) in expected.as_object().unwrap() {
        let Some(DigestEntry::Tensor { dtype, shape, sha256 }) = digest.entries.get(key) else {
            panic!("{what}: no tensor {key}")
        };
        assert_eq!(serde_json::json!(dtype), wanted["dtype"], "{what}: {key}");
        assert_eq!(serde_json::json!(shape), wanted["shape"], "{what}: {key}");
        assert_eq!(serde_json::json!(sha256), wanted["sha256"], "{what}: {key}");
    }
    assert_eq!(digest.entries.len(), expected.as_object().unwrap().len(), "{what}");
}

/// Digests, conversions to every format on several ranks, and comparisons with the source.
fn assert_survives(path: &Path, expected: &serde_json::Value) {
    let name = path.file_name().unwrap().to_str().unwrap();
    let source = corpus::open(path);
    assert_digests(&source, expected, name);
    let folder = tempfile::tempdir().unwrap();
    let plain = expected.as_object().unwrap().values().all(|t| {
        let dtype = t["dtype"].as_str().unwrap();
        !dtype.starts_with("complex") && !dtype.contains("fnuz") && !dtype.starts_with("float4")
    });
    let targets = [
        ("one", ConvertTarget::Dcp { ranks: 1 }),
        ("three", ConvertTarget::Dcp { ranks: 3 }),
        ("x.pt", ConvertTarget::Torch),
        ("x.safetensors", ConvertTarget::Safetensors { max_shard_size: None }),
    ];
    for (path, target) in targets {
        if path == "x.safetensors" && !plain {
            continue;
        }
        let to = folder.path().join(path);
        let destination = Destination::parse(to.to_str().unwrap(), target, &StoreOptions::default()).unwrap();
        convert(&source, &destination, target, &ConvertOptions::default()).unwrap();
        let made = corpus::open(&to);
        assert_digests(&made, expected, &format!("{name} as {path}"));
        assert!(diff(&source, &made, &DiffOptions::default()).unwrap().is_same(), "{name} as {path}");
        for key in expected.as_object().unwrap().keys() {
            let (ours, theirs) =
                (stats(&made, key, &StatsOptions::default()).unwrap(), stats(&source, key, &StatsOptions::default()).unwrap());
            let counted = |s: &TensorStats| (s.elements, s.nans, s.infinities, s.zeros, s.min, s.max, s.magnitudes.clone());
            assert_eq!(counted(&ours), counted(&theirs), "{name} as {path}: {key}");
            // Sums are made in the order of storage.
            let near = |a: Option<f64>, b: Option<f64>| a == b || (a.unwrap() / b.unwrap() - 1.0).abs() < 1e-12;
            assert!(near(ours.mean, theirs.mean) && near(ours.l2, theirs.l2), "{name} as {path}: {key}");
        }
    }
}

#[test]
fn strided_torch_files_are_digested_converted_and_compared_as_what_they_mean() {
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(records().join("read.json")).unwrap()).unwrap();
    for name in ["strided", "offset", "shared", "expanded", "big_endian", "zero", "no_crc"] {
        assert_survives(&records().join(format!("{name}.pt")), &expected[name]);
    }
}

#[test]
fn large_strided_torch_files_are_read_in_parts_and_right() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
import hashlib, json, sys
import torch
base = torch.arange(3_000_000, dtype=torch.float32)
state = {
    "transposed": base.reshape(1500, 2000).t(),
    "slice of a transposed": base.reshape(1500, 2000).t()[100:1900:3, 7:1000],
    "expanded": base[:700].reshape(700, 1).expand(700, 900),
    "rows expanded": base[:700].expand(900, 700),
    "permuted": base.reshape(100, 150, 200).permute(2, 0, 1),
    "view": base[1_000_000:2_000_000],
    "half": base.reshape(1500, 2000).half().t(),
}
torch.save(state, sys.argv[1] + "/x.pt")
print(json.dumps({k: {
    "dtype": str(v.dtype).removeprefix("torch."),
    "shape": list(v.shape),
    "sha256": hashlib.sha256(v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
} for k, v in state.items()}))
"#;
    let expected: serde_json::Value = serde_json::from_str(&run_python(&python, script, &[folder.path()])).unwrap();
    assert_survives(&folder.path().join("x.pt"), &expected);
}

#[test]
fn damage_in_a_strided_tensor_is_found_on_the_way() {
    let bytes = std::fs::read(records().join("strided.pt")).unwrap();
    // The storage counts up from 0.0 as float32.
    let wanted: Vec<u8> = (0..4u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let at = bytes.windows(wanted.len()).position(|w| w == wanted).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("strided.pt");
    let mut damaged = bytes;
    damaged[at + 3] ^= 1;
    std::fs::write(&path, damaged).unwrap();
    let target = ConvertTarget::Dcp { ranks: 1 };
    let to = folder.path().join("dcp");
    let destination = Destination::parse(to.to_str().unwrap(), target, &StoreOptions::default()).unwrap();
    let error = convert(&corpus::open(&path), &destination, target, &ConvertOptions::default()).unwrap_err();
    assert_eq!(error.kind(), reshard::ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("checksum"), "{error}");
}
