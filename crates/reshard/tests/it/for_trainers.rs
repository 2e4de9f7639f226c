//! Folders that other programs resume from, made of any source: what is in them is what the source holds.

use std::path::{Path, PathBuf};

use reshard::checkpoint::Format;
use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, DType, ErrorKind, SaveOptions, Value};

use crate::corpus::{self, local, open};
use crate::layouts::Whole;
use crate::samples::sorted;

fn foreign(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(case).join("checkpoint")
}

fn options() -> ConvertOptions {
    let mut options = ConvertOptions::default();
    options.skip_opaque = true;
    options
}

fn written(source: &Checkpoint, target: ConvertTarget) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let destination = Destination::parse(folder.path().to_str().unwrap(), target, &Default::default()).unwrap();
    convert(source, &destination, target, &options()).unwrap();
    folder
}

/// A training state as `get_state_dict` names it: two groups, a bfloat16 weight, a buffer, a step.
fn trained(folder: &Path) -> Checkpoint {
    let floats = |key: &str, shape: &[u64], seed: u64| {
        let mut whole = Whole::new(key, DType::Float32, shape, seed);
        let count = whole.bytes.len() as u64 / 4;
        whole.bytes = (0..count).flat_map(|i| ((i * seed) as f32 / 8.0).to_le_bytes()).collect();
        whole
    };
    let mut half = Whole::new("model.half", DType::BFloat16, &[4, 2], 7);
    half.bytes = (0..8u16).flat_map(|i| (0x3f80 + i).to_le_bytes()).collect();
    let mut step = Whole::new("optim.state.a.b.step", DType::Float32, &[], 1);
    step.bytes = 12f32.to_le_bytes().to_vec();
    let mut wholes = vec![floats("model.a.b", &[5, 3], 1), half, Whole::new("model.mask", DType::Bool, &[3], 2), step];
    wholes[2].bytes = vec![1, 0, 1];
    for (name, shape) in [("a.b", vec![5, 3]), ("half", vec![4, 2])] {
        for (slot, seed) in [("exp_avg", 3), ("exp_avg_sq", 5)] {
            wholes.push(floats(&format!("optim.state.{name}.{slot}"), &shape, seed));
        }
    }
    let group = |n: usize, option: &str| format!("optim.param_groups.{n}.{option}");
    let values = vec![
        (group(0, "lr"), Value::from(0.5)),
        (group(0, "params"), Value::List(vec![Value::from("a.b")])),
        (group(0, "weight_decay"), Value::from(0.0)),
        (group(1, "lr"), Value::from(0.25)),
        (group(1, "params"), Value::List(vec![Value::from("half")])),
        ("note".to_owned(), Value::from("kept")),
    ];
    corpus::save_state(&wholes, &values, &corpus::rows(2), &local(folder), &SaveOptions::default());
    open(folder)
}

#[test]
fn a_universal_checkpoint_of_deepspeed_holds_what_its_source_holds() {
    for case in ["zero1_w2", "zero2_w3", "zero2_w4_tp", "zero3_w3_sub", "zero3_w4_bf16"] {
        let source = open(&foreign(&format!("deepspeed-0.19/{case}")));
        let expected = corpus::digest_of(&source);
        let folder = written(&source, ConvertTarget::Universal);
        let found = open(folder.path());
        assert_eq!(found.catalog().format, Format::Universal, "{case}");
        let report = verify(&found, &VerifyOptions::default()).unwrap();
        assert!(report.is_sound(), "{case}: {:?}", report.findings);
        let found = corpus::digest_of(&found);
        for (key, entry) in &expected.entries {
            let state = key.starts_with("model.") || key.starts_with("optim.state.");
            if state || key.ends_with(".lr") || key == "note" {
                assert_eq!(found.entries.get(key), Some(entry), "{case}: {key}");
            }
        }
        // And again, over itself: the new one is the one that is found.
        let mut again = options();
        again.overwrite = true;
        let destination = Destination::folder(local(folder.path()));
        assert_eq!(
            convert(&source, &destination, ConvertTarget::Universal, &options()).unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        let report = convert(&source, &destination, ConvertTarget::Universal, &again).unwrap();
        assert_eq!(report.warnings.len(), 1, "{:?}", report.warnings);
        assert_eq!(corpus::digest_of(&open(folder.path())).entries, found.entries, "{case}");
    }
}

/// A conversion that was stopped before its last step leaves a folder with a marker; it is no checkpoint, and running it again ends
/// as if nothing had been there.
#[test]
fn a_conversion_that_was_stopped_can_be_run_again() {
    let source = open(&foreign("deepspeed-0.19/zero1_w2"));
    let files = |folder: &Path| local(folder).list("").unwrap().into_iter().map(|file| file.path).collect::<Vec<_>>();
    let cases = [
        (ConvertTarget::Universal, "latest_universal", "global_step2_universal"),
        (ConvertTarget::Megatron { ranks: 2 }, "latest_checkpointed_iteration.txt", "iter_0000002"),
    ];
    for (target, latest, below) in cases {
        let folder = written(&source, target);
        let (whole, digest) = (files(folder.path()), corpus::digest_of(&open(folder.path())));
        assert!(!whole.iter().any(|file| file.contains("unfinished")), "{whole:?}");
        std::fs::remove_file(folder.path().join(latest)).unwrap();
        std::fs::write(folder.path().join(below).join(".reshard-unfinished"), "").unwrap();
        assert!(Checkpoint::open(folder.path().to_str().unwrap()).is_err());
        let destination = Destination::parse(folder.path().to_str().unwrap(), target, &Default::default()).unwrap();
        convert(&source, &destination, target, &options()).unwrap();
        let again = files(folder.path());
        assert_eq!(again.len(), whole.len(), "{again:?}");
        assert!(!again.iter().any(|file| file.contains("unfinished")), "{again:?}");
        assert_eq!(corpus::digest_of(&open(folder.path())).entries, digest.entries);
    }
}

#[test]
fn weights_are_written_in_the_precision_of_the_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let source = trained(folder.path());
    let written = written(&source, ConvertTarget::Universal);
    let universal = open(written.path());
    assert_eq!(universal.tensor("model.half").unwrap().dtype, DType::Float32);
    assert_eq!(universal.read::<f32>("model.half").unwrap()[0], 1.0);
    assert_eq!(universal.read_whole("model.mask").unwrap(), [1, 0, 1]);
    assert_eq!(universal.value("global_steps").unwrap(), Value::from(12));
    assert_eq!(universal.value("optim.param_groups.1.lr").unwrap(), Value::from(0.25));
    assert_eq!(universal.value("note").unwrap(), Value::from("kept"));
}

#[test]
fn a_folder_of_megatron_holds_what_its_source_holds() {
    let folder = tempfile::tempdir().unwrap();
    let source = trained(folder.path());
    let written = written(&source, ConvertTarget::Megatron { ranks: 3 });
    for name in ["latest_checkpointed_iteration.txt", "iter_0000012/common.pt", "iter_0000012/metadata.json"] {
        assert!(written.path().join(name).exists(), "{name}");
    }
    let found = open(written.path());
    assert_eq!(found.catalog().format, Format::Megatron);
    assert!(verify(&found, &VerifyOptions::default()).unwrap().is_sound());
    for (key, stored) in [
        ("a.b", "model.a.b"),
        ("half", "model.half"),
        ("optimizer.state.param.a.b", "model.a.b"),
        ("optimizer.state.exp_avg.a.b", "optim.state.a.b.exp_avg"),
        ("optimizer.state.exp_avg_sq.half", "optim.state.half.exp_avg_sq"),
    ] {
        assert_eq!(found.read_whole(key).unwrap(), source.read_whole(stored).unwrap(), "{key}");
    }
    assert_eq!(found.tensor("optimizer.state.param.half").unwrap().dtype, DType::Float32);
    assert_eq!(found.value("optimizer.optimizer.param_groups.1.step").unwrap(), Value::from(12));
    assert_eq!(found.value("optimizer.param_state_sharding_type").unwrap(), Value::from("fully_reshardable"));
    assert_eq!(found.value("iteration").unwrap(), Value::from(12));
    assert_eq!(found.value("note").unwrap(), Value::from("kept"));
    // What is there is not replaced in part.
    let destination = Destination::folder(local(written.path()));
    let mut again = options();
    again.overwrite = true;
    let error = convert(&source, &destination, ConvertTarget::Megatron { ranks: 1 }, &again).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
}

#[test]
fn a_folder_of_megatron_becomes_a_universal_one_and_the_other_way_round() {
    let folder = tempfile::tempdir().unwrap();
    let source = trained(folder.path());
    let universal = written(&source, ConvertTarget::Universal);
    let megatron = written(&open(universal.path()), ConvertTarget::Megatron { ranks: 2 });
    let back = written(&open(megatron.path()), ConvertTarget::Universal);
    let tensors = |folder: &Path| {
        let entries = sorted(&open(folder));
        entries.into_iter().filter(|(key, _)| key.starts_with("model.") || key.contains(".exp_avg")).collect::<Vec<_>>()
    };
    assert_eq!(tensors(back.path()), tensors(universal.path()));
}

#[test]
fn a_source_that_cannot_be_resumed_from_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let weights = [Whole::new("model.a", DType::Float32, &[4], 1)];
    corpus::save_state(&weights, &[], &corpus::solo(), &local(folder.path()), &SaveOptions::default());
    let to = tempfile::tempdir().unwrap();
    let destination = Destination::folder(local(to.path()));
    let error = convert(&open(folder.path()), &destination, ConvertTarget::Universal, &options()).unwrap_err();
    assert!(error.to_string().contains("no optimizer state"), "{error}");
    // Numbered state belongs to no name.
    let state = [weights[0].clone(), Whole::new("optim.state.0.exp_avg", DType::Float32, &[4], 2)];
    let mut over = SaveOptions::default();
    over.overwrite = true;
    corpus::save_state(&state, &[], &corpus::solo(), &local(folder.path()), &over);
    let error = convert(&open(folder.path()), &destination, ConvertTarget::Universal, &options()).unwrap_err();
    assert!(error.to_string().contains("numbered"), "{error}");
    // State of a parameter that is not there.
    let state = [weights[0].clone(), Whole::new("optim.state.b.exp_avg", DType::Float32, &[4], 2)];
    corpus::save_state(&state, &[], &corpus::solo(), &local(folder.path()), &over);
    for target in [ConvertTarget::Universal, ConvertTarget::Megatron { ranks: 1 }] {
        let error = convert(&open(folder.path()), &destination, target, &options()).unwrap_err();
        assert!(error.to_string().contains("\"b\""), "{error}");
    }
    assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 0, "nothing is written");
}

#[test]
fn a_folder_for_the_hub_has_the_models_own_names_and_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let source = trained(folder.path());
    let to = tempfile::tempdir().unwrap();
    std::fs::write(to.path().join("config.json"), "{}").unwrap();
    let destination = Destination::folder(local(to.path()));
    convert(&source, &destination, ConvertTarget::HuggingFace { max_shard_size: Some(60) }, &options()).unwrap();
    let index: serde_json::Value =
        serde_json::from_slice(&std::fs::read(to.path().join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 5 * 3 * 4 + 4 * 2 * 2 + 3);
    let names: Vec<&String> = index["weight_map"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["a.b", "half", "mask"]);
    assert_eq!(std::fs::read(to.path().join("config.json")).unwrap(), b"{}");
    assert_eq!(open(to.path()).read_whole("a.b").unwrap(), source.read_whole("model.a.b").unwrap());
    // One file where they fit.
    let one = written(&source, ConvertTarget::HuggingFace { max_shard_size: None });
    assert!(one.path().join("model.safetensors").exists() && !one.path().join("model.safetensors.index.json").exists());
}
