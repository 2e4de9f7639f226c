//! safetensors: every mode of torch's writer, the library's own files, and headers that lie.

use std::fs;

use indexmap::IndexMap;
use proptest::prelude::*;
use reshard_formats::safetensors::{
    INDEX_FILE, SafetensorsError, SafetensorsFile, SafetensorsHeader, SafetensorsIndex, SafetensorsSpec, ShardedTensor,
    dcp_shard_file, model_file, sharded_tensors,
};
use reshard_formats::{DType, ReadAt};
use reshard_layout::{ByteLayout, copy_runs, coverage, runs};
use serde_json::Value as Json;

use crate::support::{error_text, fixture_names, json_fixture, read_fixture, run_python, sha256, torch_python};

/// The whole tensor from its chunks, which must cover it exactly.
fn assemble(tensor: &ShardedTensor, files: &[Vec<u8>]) -> Vec<u8> {
    let regions: Vec<_> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
    assert!(coverage(&tensor.shape, &regions).unwrap().is_exact());
    let whole = ByteLayout::contiguous(&tensor.shape, tensor.dtype.size()).unwrap();
    let mut out = vec![0; whole.end() as usize];
    for chunk in &tensor.chunks {
        let region = &chunk.region;
        let stored = ByteLayout::contiguous(region.sizes(), tensor.dtype.size()).unwrap().at(chunk.data_offset);
        assert_eq!(stored.end() - stored.base(), chunk.data_len);
        let zeros = vec![0; region.ndim()];
        let moves = runs(region.sizes(), &stored, &zeros, &whole, region.offsets()).unwrap();
        copy_runs(&files[chunk.file], &mut out, moves).unwrap();
    }
    out
}

fn check_folder(folder: &str, expected: &Json, skip: &[&str]) {
    let names = fixture_names(&format!("safetensors/{folder}"), "safetensors");
    assert!(!names.is_empty());
    let files: Vec<Vec<u8>> =
        names.iter().map(|name| read_fixture(&format!("safetensors/{folder}/{name}.safetensors"))).collect();
    let headers: Vec<_> = files.iter().map(|file| SafetensorsFile::open(file).unwrap()).collect();
    let tensors = sharded_tensors(&headers).unwrap();
    let expected = expected.as_object().unwrap();
    assert_eq!(tensors.len(), expected.len() - skip.len(), "{folder}");
    for (key, expected) in expected {
        if skip.contains(&key.as_str()) {
            continue;
        }
        let tensor = &tensors[key];
        assert_eq!(tensor.dtype.name(), expected["dtype"], "{folder} {key}");
        let shape: Vec<u64> = serde_json::from_value(expected["shape"].clone()).unwrap();
        assert_eq!(tensor.shape.as_slice(), shape, "{folder} {key}");
        let digest = sha256(&assemble(tensor, &files));
        assert_eq!(digest, expected["sha256"], "{folder} {key}");
    }
}

#[test]
fn every_mode_of_torchs_writer_reads_as_regions() {
    let expected = json_fixture("safetensors/expected.json");
    for folder in ["full", "sharded", "sharded_two_files"] {
        check_folder(folder, &expected["state"], &[]);
    }
    for folder in ["consolidated", "consolidated/sharded"] {
        check_folder(folder, &expected["state"], &["blocks.0.steps", "blocks.0.scale"]);
    }
}

#[test]
fn every_dtype_that_safetensors_has_reads() {
    check_folder("single", &json_fixture("safetensors/expected.json")["single"], &[]);
    let file = read_fixture("safetensors/single/model.safetensors");
    let header = SafetensorsFile::open(&file).unwrap();
    assert!(!header.is_dcp);
    assert_eq!(header.metadata["note"], "é\"\n");
}

#[test]
fn an_index_names_the_files_of_every_tensor() {
    for folder in ["full", "consolidated"] {
        let index = read_fixture(&format!("safetensors/{folder}/{INDEX_FILE}"));
        let index = SafetensorsIndex::parse(&index).unwrap();
        assert_eq!(index.files().len(), 2);
        for (key, file) in &index.weight_map {
            let file = read_fixture(&format!("safetensors/{folder}/{file}"));
            assert!(SafetensorsFile::open(&file).unwrap().tensors.contains_key(key));
        }
    }
    assert_eq!(model_file(1, 2), "model-00001-of-00002.safetensors");
    let shard = dcp_shard_file(2, 1, 12);
    assert_eq!(shard, "shard-00002-model-00001-of-00012.safetensors");
}

fn header(json: &str) -> Result<SafetensorsFile, SafetensorsError> {
    SafetensorsFile::parse(json.as_bytes())
}

#[test]
fn headers_that_lie_are_refused_with_their_reason() {
    let cases: &[(&str, &str)] = &[
        ("", "EOF"),
        ("[]", "invalid type"),
        ("{\"a\": 1}", "tensor \"a\""),
        (r#"{"a": {"dtype": "F32", "shape": [2]}}"#, "missing field"),
        (r#"{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}"#, "\"a\""),
        (r#"{"a": {"dtype": "C128", "shape": [1], "data_offsets": [0, 16]}}"#, "a: the safetensors type \"C128\""),
        (r#"{"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}"#, "F6_E2M3"),
        (r#"{"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}"#, "4-bit"),
        (r#"{"a": {"dtype": "F4", "shape": [], "data_offsets": [0, 1]}}"#, "4-bit"),
        (r#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}"#, "invalid shape, data type, or offset"),
        (r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}"#, "invalid offset for tensor `a`"),
        (r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}"#, "invalid offset for tensor `a`"),
        (
            r#"{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}"#,
            "invalid offset for tensor `b`",
        ),
        (
            r#"{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}"#,
            "\"a\" occurs twice",
        ),
        (r#"{"__metadata__": {}, "__metadata__": {}}"#, "\"__metadata__\" occurs twice"),
        (r#"{"__metadata__": {"x": "1", "x": "2"}}"#, "\"x\" occurs twice"),
        (r#"{"__metadata__": {"x": 1}}"#, "expected a string"),
        (r#"{"a": {"dtype": "F32", "shape": [9223372036854775807, 9223372036854775807], "data_offsets": [0, 4]}}"#, "64 bits"),
        (r#"{"a": {"dtype": "F32", "shape": [18446744073709551616], "data_offsets": [0, 4]}}"#, "\"a\""),
        (r#"{"__metadata__": {"DCP_SHARDING_INFO": "[1]"}}"#, "DCP_SHARDING_INFO"),
        (
            r#"{"__metadata__": {"DCP_SHARDING_INFO": "{\"a\": {\"saved_offsets\": [0, 0]}}"}, "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}"#,
            "a: ",
        ),
        (
            r#"{"__metadata__": {"DCP_SHARDING_INFO": "{\"a\": {\"saved_offsets\": [18446744073709551615]}}"}, "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}"#,
            "a: ",
        ),
        (
            r#"{"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}"#,
            "a: DCP_SHARDING_INFO lacks it",
        ),
    ];
    for (json, words) in cases {
        let error = error_text(&header(json).unwrap_err());
        assert!(error.contains(words), "{json}: {error}");
    }
}

#[test]
fn every_truncation_of_a_file_is_refused() {
    let file = read_fixture("safetensors/sharded/shard-00002-model-00001-of-00001.safetensors");
    SafetensorsFile::open(&file).unwrap();
    for len in 0..file.len() {
        let error = SafetensorsFile::open(&file[..len].to_vec()).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    let longer = [file.as_slice(), b"x"].concat();
    let error = SafetensorsFile::open(&longer).unwrap_err();
    assert!(matches!(error, SafetensorsError::DataLength { .. }), "{error}");
    let mut lying = file;
    lying[7] = 0x7f;
    let error = SafetensorsFile::open(&lying).unwrap_err();
    assert!(matches!(error, SafetensorsError::HeaderLength { .. }), "{error}");
}

#[test]
fn types_that_safetensors_lacks_are_refused_by_name() {
    for dtype in [DType::Complex32, DType::Complex128] {
        let spec = SafetensorsSpec { key: "model.freqs", dtype, shape: &[2], saved_offsets: None };
        let error = SafetensorsHeader::new(&[spec], &IndexMap::new()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("model.freqs") && text.contains(dtype.name()), "{text}");
    }
}

#[test]
fn specs_that_contradict_each_other_are_refused() {
    let spec = |key, saved_offsets| SafetensorsSpec { key, dtype: DType::UInt8, shape: &[2], saved_offsets };
    for (specs, words) in [
        (vec![spec("a", None), spec("a", None)], "twice"),
        (vec![spec("__metadata__", None)], "reserved"),
        (vec![spec("a", Some(&[0][..])), spec("b", None)], "b: saved offsets"),
        (vec![spec("a", Some(&[0, 0][..]))], "a: saved offsets"),
    ] {
        let error = SafetensorsHeader::new(&specs, &IndexMap::new()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

fn write(specs: &[SafetensorsSpec<'_>], metadata: &IndexMap<String, String>, seed: u8) -> Vec<u8> {
    let layout = SafetensorsHeader::new(specs, metadata).unwrap();
    let mut file = layout.head;
    file.resize(layout.total_len as usize, 0);
    for (index, (offset, len)) in layout.placements.into_iter().enumerate() {
        for at in 0..len {
            file[(offset + at) as usize] = ((index as u64 + at) as u8).wrapping_add(seed) % 2;
        }
    }
    file
}

fn has_dtype(dtype: &DType) -> bool {
    !matches!(dtype, DType::Complex32 | DType::Complex128)
}

#[test]
fn the_safetensors_library_and_torch_read_our_files() {
    let Some(python) = torch_python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let dtypes: Vec<DType> = DType::ALL.iter().copied().filter(has_dtype).collect();
    let specs: Vec<_> =
        dtypes.iter().map(|&dtype| SafetensorsSpec { key: dtype.name(), dtype, shape: &[2, 4], saved_offsets: None }).collect();
    let metadata = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
    let whole = folder.path().join("whole.safetensors");
    fs::write(&whole, write(&specs, &metadata, 0)).unwrap();
    let sharded = folder.path().join("sharded");
    fs::create_dir(&sharded).unwrap();
    for rank in 0..2u64 {
        let offsets = [3 * rank, 0];
        let shape = [3 - rank, 2];
        let spec = SafetensorsSpec { key: "w", dtype: DType::Float32, shape: &shape, saved_offsets: Some(&offsets) };
        let file = write(&[spec], &IndexMap::new(), rank as u8);
        fs::write(sharded.join(dcp_shard_file(rank + 1, 1, 1)), file).unwrap();
    }
    let program = r#"
import sys, torch, warnings
warnings.simplefilter("ignore")
from safetensors.torch import load_file
import torch.distributed.checkpoint as dcp
for name, tensor in load_file(sys.argv[1]).items():
    assert str(tensor.dtype) == "torch." + name and list(tensor.shape) == [2, 4], (name, tensor)
    print(name)
target = {"w": torch.full((5, 2), -1.0)}
dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(sys.argv[2]), no_dist=True)
first = bytes((at) % 2 for at in range(24))
second = bytes((at + 1) % 2 for at in range(16))
assert bytes(target["w"].flatten().view(torch.uint8).tolist()) == first + second
"#;
    let names = run_python(&python, program, &[&whole, &sharded]);
    assert_eq!(names.lines().count(), dtypes.len());
}

proptest! {
    #[test]
    fn files_come_back_as_they_were_specified(
        tensors in proptest::collection::btree_map(
            "[a-zé.\"\\\\]{1,8}",
            (
                proptest::sample::select(DType::ALL).prop_filter("known", has_dtype),
                proptest::collection::vec((0u64..5, 0u64..9), 1..4),
            ),
            0..8,
        ),
        sharded in any::<bool>(),
        metadata in proptest::collection::btree_map("[a-z]{1,4}", ".{0,9}", 0..3),
    ) {
        let tensors: Vec<_> = tensors
            .into_iter()
            .map(|(key, (dtype, dims))| {
                let (shape, offsets): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
                (key, dtype, shape, offsets)
            })
            .collect();
        let specs: Vec<_> = tensors
            .iter()
            .map(|(key, dtype, shape, offsets)| SafetensorsSpec {
                key,
                dtype: *dtype,
                shape,
                saved_offsets: sharded.then_some(offsets),
            })
            .collect();
        let metadata: IndexMap<String, String> = metadata.into_iter().collect();
        let file = write(&specs, &metadata, 0);
        ::safetensors::SafeTensors::deserialize(&file).unwrap();
        let header = SafetensorsFile::open(&file).unwrap();
        prop_assert_eq!(header.tensors.len(), specs.len());
        prop_assert_eq!(header.is_dcp, sharded && !specs.is_empty());
        for (text, content) in &metadata {
            prop_assert_eq!(&header.metadata[text], content);
        }
        let layout = SafetensorsHeader::new(&specs, &metadata).unwrap();
        prop_assert_eq!(file.len() as u64, ReadAt::len(&file));
        for (spec, (offset, len)) in specs.iter().zip(layout.placements) {
            let tensor = &header.tensors[spec.key];
            prop_assert_eq!(tensor.dtype, spec.dtype);
            prop_assert_eq!(tensor.shape.as_slice(), spec.shape);
            prop_assert_eq!((tensor.data_offset, tensor.data_len), (offset, len));
            let zeros = vec![0; spec.shape.len()];
            prop_assert_eq!(tensor.region.offsets(), spec.saved_offsets.unwrap_or(&zeros));
        }
    }
}
