//! Block-scaled weights and low-rank updates under random rules and cuts, against the same computed of whole arrays.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use half::bf16;
use proptest::prelude::*;
use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::digest::{DigestOptions, digest};
use reshard::layout::Region;
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, Scope};
use reshard::load::Verify;
use reshard::mesh::Layout;
use reshard::relayout::estimate_load;
use reshard::select::Selection;
use reshard::storage::faulty::Faults;
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Operation, Store};
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, DType, LoadOptions, LoadState, SaveOptions, load_with};

use crate::corpus;
use crate::layouts::Whole;
use crate::views::{Array, cuts, loaded, step, view};

/// What a code of four exponent and three mantissa bits stands for.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if exponent == 0 { mantissa / 8.0 * 2f32.powi(-6) } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { size } else { -size }
}

fn floats(key: &str, shape: &[u64], seed: u64) -> (Whole, Vec<f32>) {
    let mut whole = Whole::new(key, DType::Float32, shape, seed);
    let values: Vec<f32> =
        whole.bytes.as_chunks::<4>().0.iter().map(|b| f32::from(i16::from_le_bytes([b[0], b[1]])) / 4096.0).collect();
    whole.bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    (whole, values)
}

/// Codes and scales, and the weight that they are.
fn scaled(key: &str, shape: [u64; 2], block: [u64; 2], seed: u64, dtype: DType) -> (Vec<Whole>, Array) {
    let mut codes = Whole::new(key, dtype, &shape, seed);
    // What is no number has no one pattern of bits.
    codes.bytes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code = 0);
    let grid = [shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])];
    let (scales, values) = floats(&format!("{key}_scale_inv"), &grid, seed + 7);
    let mut data = Vec::new();
    for row in 0..shape[0] {
        for column in 0..shape[1] {
            let code = e4m3(codes.bytes[(row * shape[1] + column) as usize]);
            let scale = values[(row / block[0] * grid[1] + column / block[1]) as usize];
            data.push(bf16::from_f32(code * scale).to_le_bytes());
        }
    }
    (vec![codes, scales], Array { shape: shape.to_vec(), data })
}

/// A weight and two factors, and their sum.
fn updated(key: &str, shape: [u64; 2], rank: u64, seed: u64) -> (Vec<Whole>, Array) {
    let (mut weight, values) = floats(&format!("{key}.w"), &shape, seed);
    let (a, a_values) = floats(&format!("{key}.A"), &[rank, shape[1]], seed + 1);
    let (b, b_values) = floats(&format!("{key}.B"), &[shape[0], rank], seed + 2);
    let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
    weight.dtype = DType::BFloat16;
    weight.bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut data = Vec::new();
    for row in 0..shape[0] {
        for column in 0..shape[1] {
            let product = (0..rank)
                .fold(0f32, |sum, k| sum + b_values[(row * rank + k) as usize] * a_values[(k * shape[1] + column) as usize]);
            let weight = values[(row * shape[1] + column) as usize].to_f32();
            data.push(bf16::from_f32(weight + 0.75 * product).to_le_bytes());
        }
    }
    (vec![weight, a, b], Array { shape: shape.to_vec(), data })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn weights_are_computed_as_of_whole_arrays_whatever_lies_on_top(
        rows in 1u64..12, columns in 1u64..12, block in (1u64..6, 1u64..6), rank in 1u64..4,
        choices in prop::collection::vec(0u64..1000, 3), stacked in any::<bool>(),
        saved in cuts(), wanted in cuts(), always in any::<bool>(),
    ) {
        let (shape, block) = ([rows, columns], [block.0, block.1]);
        let (mut wholes, mut expected) = (Vec::new(), BTreeMap::new());
        let (mut turn, mut sums) = (String::new(), String::new());
        let mut all = Vec::new();
        for layer in 0..2 {
            let (more, mut array) = scaled(&format!("model.l.{layer}.w"), shape, block, layer, DType::Float8E4M3Fn);
            wholes.extend(more);
            turn.clear();
            for choice in &choices {
                array = step(&array, *choice, &mut turn);
            }
            if stacked {
                all.push(array.with_dim(0));
            } else {
                expected.insert(format!("model.layers.{layer}"), array);
            }
            let (more, mut array) = updated(&format!("model.u.{layer}"), shape, rank, 50 + layer);
            wholes.extend(more);
            sums.clear();
            for choice in &choices {
                array = step(&array, *choice, &mut sums);
            }
            expected.insert(format!("model.sums.{layer}"), array);
        }
        if stacked {
            expected.insert("model.layers".to_owned(), Array::joined(&all, 0));
        }
        let stack = if stacked { "{ stack = \"i\" }" } else { "" };
        let name = if stacked { "layers" } else { "layers.{i}" };
        let mut rules = String::new();
        write!(
            rules,
            "rest = \"error\"\n\
             [[rule]]\nfrom = [\"l.{{i}}.w\", \"l.{{i}}.w_scale_inv\"]\nto = \"{name}\"\n\
             steps = [{{ dequantise = \"bfloat16\", block = {block:?} }}, {turn}{stack}]\n\
             [[rule]]\nfrom = [\"u.{{i}}.w\", \"u.{{i}}.A\", \"u.{{i}}.B\"]\nto = \"sums.{{i}}\"\n\
             steps = [{{ lora = 0.75 }}, {sums}]\n",
        ).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        corpus::save_state(&wholes, &[], &saved, &corpus::local(&source), &SaveOptions::default());
        let seen = corpus::open(&source).through(&view(&rules)).unwrap();
        for (key, array) in &expected {
            prop_assert_eq!(&seen.tensor(key).unwrap().shape[..], &array.shape[..], "{}", key);
            prop_assert_eq!(seen.read_whole(key).unwrap(), array.bytes(), "{}", key);
        }
        let mut options = LoadOptions::default();
        options.verify = if always { Verify::Always } else { Verify::Whole };
        // Buffers of a few elements: many parts.
        options.buffer = 64;
        loaded(&seen, &wanted, &expected, &options);
        prop_assert!(verify(&seen, &VerifyOptions::default()).unwrap().is_sound());
        let layout = Layout::rows(2).unwrap();
        prop_assert!(estimate_load(&seen, &layout, &Selection::default()).unwrap().bytes_read > 0);
        let made = folder.path().join("made");
        let target = ConvertTarget::Dcp { ranks: wanted.ranks() as usize };
        convert(&seen, &Destination::folder(corpus::local(&made)), target, &ConvertOptions::default()).unwrap();
        for (key, array) in &expected {
            prop_assert_eq!(corpus::open(&made).read_whole(key).unwrap(), array.bytes(), "{}", key);
        }
        let options = DigestOptions::default();
        prop_assert_eq!(
            digest(&seen, &options).unwrap().entries.len(),
            digest(&corpus::open(&made), &options).unwrap().entries.len()
        );
    }
}

#[test]
fn damage_of_codes_or_scales_is_found_by_whoever_reads_the_weight() {
    for suffix in ["", "_scale_inv"] {
        let folder = tempfile::tempdir().unwrap();
        let (wholes, array) = scaled("w", [8, 8], [4, 4], 3, DType::Float8E4M3Fn);
        corpus::save_state(&wholes, &[], &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
        let view = view("dequantise = \"bfloat16\"");
        let seen = corpus::open(folder.path()).through(&view).unwrap();
        assert_eq!(seen.read_whole("w").unwrap(), array.bytes());
        let stored = corpus::open(folder.path());
        let wanted = stored.read_whole(&format!("w{suffix}")).unwrap();
        let file = folder.path().join(&stored.catalog().files[0]);
        let mut bytes = std::fs::read(&file).unwrap();
        let at = bytes.windows(wanted.len()).position(|window| window == wanted).unwrap();
        bytes[at + 1] ^= 0x11;
        std::fs::write(&file, bytes).unwrap();
        let seen = corpus::open(folder.path()).through(&view).unwrap();
        assert_eq!(seen.read_whole("w").unwrap_err().kind(), reshard::ErrorKind::Corrupt, "{suffix}");
        let target = Destination::folder(corpus::local(&folder.path().join("made")));
        let error = convert(&seen, &target, ConvertTarget::Dcp { ranks: 1 }, &ConvertOptions::default()).unwrap_err();
        assert_eq!(error.kind(), reshard::ErrorKind::Corrupt, "{suffix}");
    }
}

/// Float8 that nothing calls quantised is numbers; where anything does, its scales are missing.
#[test]
fn codes_are_told_from_plain_float8() {
    let hints: [(&str, Option<&str>, bool); 6] = [
        ("logit_scale", None, true),
        ("other.weight_scale", None, false),
        ("head.input_scale", None, false),
        ("gone.weight_scale_inv", None, false),
        ("logit_scale", Some("config.json"), false),
        ("logit_scale", Some("hf_quant_config.json"), false),
    ];
    for (key, file, plain) in hints {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let wholes = [Whole::new("a.weight", DType::Float8E4M3Fn, &[4, 4], 1), floats(key, &[1], 2).0];
        corpus::save_state(&wholes, &[], &corpus::solo(), &corpus::local(path), &SaveOptions::default());
        if let Some(file) = file {
            std::fs::write(path.join(file), r#"{"quantization_config": {"quant_method": "fp8"}}"#).unwrap();
        }
        let target = tempfile::tempdir().unwrap();
        let mut options = ConvertOptions::default();
        options.casts.parse("bfloat16").unwrap();
        let destination = Destination::folder(corpus::local(target.path()));
        let done = convert(&corpus::open(path), &destination, ConvertTarget::Dcp { ranks: 1 }, &options);
        assert_eq!(done.is_ok(), plain, "{key} {file:?}: {done:?}");
    }
}

/// Counted where they are read: by the store.
#[test]
fn a_slice_reads_its_codes_and_their_scales_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (wholes, array) = scaled("w", [512, 512], [128, 128], 3, DType::Float8E4M3Fn);
    corpus::save_state(&wholes, &[], &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let target = ConvertTarget::Safetensors { max_shard_size: None };
    convert(&corpus::open(folder.path()), &Destination::folder(Arc::clone(&store)), target, &ConvertOptions::default()).unwrap();
    let counted = Faults::new();
    let checkpoint = Checkpoint::open_store(counted.wrap(store)).unwrap();
    // Three whole rows of the second row of blocks: four scales. A part of rows at an edge between blocks: two of one row's.
    for (offsets, sizes, codes, scales) in [([130, 0], [3, 512], 3 * 512, 4), ([0, 100], [1, 60], 60, 2), ([5, 7], [0, 3], 0, 0)]
    {
        let region = Region::new(&offsets, &sizes).unwrap();
        let mut memory = vec![0; region.volume() as usize * 2];
        let before = counted.log().len();
        let mut state = LoadState::new();
        let piece = LoadPiece::contiguous(region.clone(), DType::BFloat16, &mut memory).unwrap();
        let wanted = LoadTensor { dtype: DType::BFloat16, shape: [512, 512].as_slice().into(), pieces: vec![piece] };
        state.insert("w", Scope::Shared, LoadLeaf::Tensor(wanted)).unwrap();
        load_with(&reshard::Solo, &checkpoint, &mut state, &LoadOptions::default()).unwrap();
        drop(state);
        let expected = Array::pick(sizes.to_vec(), |index| array.get(&[offsets[0] + index[0], offsets[1] + index[1]]));
        assert_eq!(memory, expected.bytes(), "{region}");
        let log = counted.log();
        let read: u64 = log[before..].iter().filter(|step| step.operation == Operation::Read).map(|step| step.bytes).sum();
        assert_eq!(read, codes + 4 * scales, "{region}: {:?}", &log[before..]);
    }
}
