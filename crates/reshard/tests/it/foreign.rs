//! Checkpoints of other programs: opened by their folder, equal to what those programs say is in them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use reshard::checkpoint::{CatalogKind, Format};
use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::edit::{EditOptions, edit};
use reshard::select::{Glob, Rename};
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, ErrorKind, OpenOptions, ParameterMap};

use crate::corpus::{digest_of, local, open};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign")
}

fn cases(writer: &str) -> Vec<(String, PathBuf, serde_json::Map<String, serde_json::Value>)> {
    let mut cases = Vec::new();
    let mut folders: Vec<PathBuf> = std::fs::read_dir(root().join(writer)).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    for case in folders.into_iter().filter(|path| path.is_dir()) {
        let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
        let name = case.file_name().unwrap().to_string_lossy().into_owned();
        cases.push((name, case.join("checkpoint"), expected.as_object().unwrap().clone()));
    }
    assert!(!cases.is_empty());
    cases
}

fn copied(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    copy_below(from, to.path());
    to
}

fn copy_below(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy_below(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// How a case is opened: with the map of its parameters, where there is one.
fn with_map(case: &str) -> OpenOptions {
    let map = root().join(case).join("parameters.json");
    let mut options = OpenOptions::default();
    options.parameter_map = map.exists().then(|| Arc::new(ParameterMap::read(map.to_str().unwrap()).unwrap()));
    options
}

fn refused(path: &Path) -> reshard::Error {
    Checkpoint::open(path.to_str().unwrap()).expect_err("it should be refused")
}

/// Every expected key has its digest, every tensor is covered, everything is verified, and a conversion keeps it all.
fn is_equal(name: &str, path: &Path, expected: &serde_json::Map<String, serde_json::Value>) -> Checkpoint {
    holds(name, open(path), expected)
}

/// [`is_equal`], of what was opened.
fn holds(name: &str, checkpoint: Checkpoint, expected: &serde_json::Map<String, serde_json::Value>) -> Checkpoint {
    let found = serde_json::to_value(digest_of(&checkpoint)).unwrap();
    let found = found["entries"].as_object().unwrap();
    for (key, entry) in expected {
        assert_eq!(found.get(key), Some(entry), "{name}: {key}");
    }
    let report = verify(&checkpoint, &VerifyOptions::default()).unwrap();
    assert!(report.is_sound(), "{name}: {:?}", report.findings);
    let folder = tempfile::tempdir().unwrap();
    let mut options = ConvertOptions::default();
    options.skip_opaque = true;
    convert(&checkpoint, &Destination::folder(local(folder.path())), ConvertTarget::Dcp { ranks: 2 }, &options).unwrap();
    let converted = serde_json::to_value(digest_of(&open(folder.path()))).unwrap();
    for key in expected.keys() {
        assert_eq!(converted["entries"].get(key), found.get(key), "{name}, converted: {key}");
    }
    checkpoint
}

#[test]
fn deepspeed_folders_hold_what_deepspeed_says() {
    for version in ["0.14", "0.16", "0.19"] {
        folders_of_deepspeed(version);
    }
}

fn folders_of_deepspeed(version: &str) {
    for (name, path, expected) in cases(&format!("deepspeed-{version}")) {
        let checkpoint = is_equal(&name, &path, &expected);
        let universal = name.ends_with("_universal");
        assert_eq!(checkpoint.catalog().format, if universal { Format::Universal } else { Format::DeepSpeed }, "{name}");
        let writer = &checkpoint.catalog().writer;
        assert!(writer.starts_with(&format!("DeepSpeed {version}")), "{name}: {writer}");
        // Nothing else is a weight or a moment.
        let tensors = checkpoint.catalog().entries.iter().filter(|(_, entry)| matches!(entry.kind, CatalogKind::Tensor(_)));
        for (key, _) in tensors.filter(|(key, _)| !key.ends_with(".step")) {
            assert!(expected.contains_key(key), "{name}: {key}");
        }
        // `ds_to_universal` drops the step of ZeRO-3.
        assert_eq!(checkpoint.entry("optim.state.up.weight.step").is_ok(), name != "zero3_w3_sub_universal", "{name}");
        assert!(checkpoint.entry("optim.param_groups.1.weight_decay").is_ok(), "{name}");
        assert_eq!(checkpoint.value("note").unwrap(), reshard::Value::from("kept"), "{name}");
        if !universal {
            let names = checkpoint.value("optim.param_groups.0.params").unwrap().python_repr();
            assert!(names.contains("'embedding.weight'") && !names.contains("'up.bias'"), "{name}: {names}");
            // The folder of the tag opens as well as the root.
            let tag = open(&path.join("global_step2"));
            assert_eq!(tag.keys().len(), checkpoint.keys().len(), "{name}");
        }
    }
}

#[test]
fn a_missing_rank_of_deepspeed_is_named() {
    for (case, missing) in [
        ("zero2_w3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3_w3_sub", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        ("zero3_w3_sub", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("zero2_w4_tp", "mp_rank_01_model_states.pt"),
    ] {
        let copy = copied(&root().join("deepspeed-0.19").join(case).join("checkpoint"));
        std::fs::remove_file(copy.path().join("global_step2").join(missing)).unwrap();
        let error = refused(copy.path());
        assert_eq!(error.kind(), ErrorKind::Incomplete, "{error}");
        assert!(error.full_text().contains(missing), "{}", error.full_text());
    }
}

#[test]
fn deepspeed_files_that_do_not_belong_together_are_refused() {
    // Of another world size.
    let base = root().join("deepspeed-0.19");
    let copy = copied(&base.join("zero3_w3_sub/checkpoint"));
    let file = "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt";
    std::fs::copy(base.join("zero2_w3/checkpoint").join(file), copy.path().join(file)).unwrap();
    let error = refused(copy.path());
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.full_text().contains("zero_pp_rank_1"), "{}", error.full_text());
    // A tag that is not there.
    let copy = copied(&base.join("zero1_w2/checkpoint"));
    std::fs::write(copy.path().join("latest"), "global_step9").unwrap();
    let text = refused(copy.path()).full_text();
    assert!(text.contains("global_step9") && text.contains("global_step2"), "{text}");
    for tag in ["../global_step2", "", "/etc", "global_step2\n"] {
        std::fs::write(copy.path().join("latest"), tag).unwrap();
        Checkpoint::open(copy.path().to_str().unwrap()).unwrap();
    }
}

#[test]
fn parts_of_deepspeed_in_files_of_their_own_are_named() {
    for file in ["layer_00-model_states.pt", "layer_00-model_01-model_states.pt", "layer_1_expert_0_mp_rank_00_model_states.pt"] {
        let copy = copied(&root().join("deepspeed-0.19/zero2_w3/checkpoint"));
        let tag = copy.path().join("global_step2");
        std::fs::copy(tag.join("mp_rank_00_model_states.pt"), tag.join(file)).unwrap();
        let error = refused(copy.path()).full_text();
        assert!(error.contains(file) && error.contains("ds_to_universal"), "{error}");
    }
}

#[test]
fn a_rank_whose_file_is_gone_or_of_another_is_told_by_what_is_missing() {
    let cases = [
        ("ranks-torch-2.13/accelerate_w2", None, "pytorch_model_fsdp_0_rank1.bin"),
        ("ranks-torch-2.13/accelerate_w2", Some("pytorch_model_fsdp_0_rank0.bin"), "pytorch_model_fsdp_0_rank1.bin"),
        ("ranks-torch-2.13/verl_w4", Some("model_world_size_4_rank_0.pt"), "model_world_size_4_rank_1.pt"),
        ("torch_checkpointing-0.1/fsdp2_w2", Some("model_0.pt"), "model_1.pt"),
    ];
    for (case, source, file) in cases {
        let copy = copied(&root().join(case).join("checkpoint"));
        match source {
            Some(source) => {
                std::fs::copy(copy.path().join(source), copy.path().join(file)).unwrap();
            }
            None => {
                std::fs::remove_file(copy.path().join(file)).unwrap();
                std::fs::remove_file(copy.path().join("optimizer_0_rank1.bin")).unwrap();
            }
        }
        let error = refused(copy.path()).full_text();
        assert!(error.contains("hold only parts of"), "{case}: {error}");
    }
}

#[test]
fn what_lies_beside_a_lost_file_is_no_checkpoint_of_its_own() {
    let copy = copied(&root().join("lightning-2.6/fsdp2_w2/checkpoint"));
    std::fs::remove_file(copy.path().join(".metadata")).unwrap();
    assert!(refused(copy.path()).full_text().contains("no .metadata"));
    let copy = copied(&root().join("megatron-0.16/tp2_dp2/checkpoint"));
    std::fs::remove_file(copy.path().join("iter_0000007/common.pt")).unwrap();
    assert!(refused(copy.path()).full_text().contains("iter_0000007/common.pt"));
}

#[test]
fn a_universal_checkpoint_without_a_weight_is_refused() {
    for gone in ["fp32.pt", ""] {
        let copy = copied(&root().join("deepspeed-0.19/zero3_w3_sub_universal/checkpoint"));
        let parameter = copy.path().join("global_step2_universal/zero/up.weight");
        match gone {
            "" => std::fs::remove_dir_all(&parameter).unwrap(),
            file => std::fs::remove_file(parameter.join(file)).unwrap(),
        }
        let error = refused(copy.path()).full_text();
        assert!(error.contains("zero/up.weight/fp32.pt"), "{error}");
    }
}

#[test]
fn what_is_not_dcp_is_edited_into_a_dcp_checkpoint() {
    let checkpoint = open(&root().join("deepspeed-0.19/zero1_w2/checkpoint"));
    let before = digest_of(&checkpoint);
    let folder = tempfile::tempdir().unwrap();
    let mut options = EditOptions::default();
    options.drop.push(Glob::new("optim.*").unwrap());
    options.renames.push(Rename::new("^model\\.", "net.").unwrap());
    let values = [("note", 7), ("net.scale", 8), ("fresh", 9)];
    options.set = values.iter().map(|(key, value)| ((*key).to_owned(), None, reshard::Value::from(*value))).collect();
    let report = edit(&checkpoint, &local(folder.path()), &options).unwrap();
    assert!(report.linked + report.copied == 0 && report.bytes > 0 && report.skipped.is_empty(), "{report:?}");
    assert!(report.dropped.iter().all(|key| key.starts_with("optim.")) && !report.dropped.is_empty());
    assert!(report.renamed.contains(&("model.up.weight".to_owned(), "net.up.weight".to_owned())));
    let edited = open(folder.path());
    assert_eq!(edited.catalog().format, Format::Dcp);
    assert!(verify(&edited, &VerifyOptions::default()).unwrap().is_sound());
    let after = digest_of(&edited);
    assert_eq!(after.entries["net.up.weight"], before.entries["model.up.weight"]);
    assert!(after.entries.keys().all(|key| !key.starts_with("optim.") && !key.starts_with("model.")));
    for (key, value) in values {
        assert_eq!(edited.value(key).unwrap(), reshard::Value::from(value), "{key}");
    }
    // A path of its own, and each value once.
    assert_eq!(edit(&checkpoint, &local(folder.path()), &options).unwrap_err().kind(), ErrorKind::AlreadyExists);
    options.set.push(options.set[0].clone());
    let elsewhere = tempfile::tempdir().unwrap();
    assert!(edit(&checkpoint, &local(elsewhere.path()), &options).unwrap_err().to_string().contains("set twice"));
    // Objects that only unpickling could bring back are refused, or left out by name.
    let megatron = open(&root().join("megatron-0.16/tp2_dp2/checkpoint"));
    let mut options = EditOptions::default();
    assert_eq!(edit(&megatron, &local(elsewhere.path()), &options).unwrap_err().kind(), ErrorKind::Untrusted);
    assert!(std::fs::read_dir(elsewhere.path()).unwrap().next().is_none(), "something was written");
    options.skip_opaque = true;
    let skipped = edit(&megatron, &local(elsewhere.path()), &options).unwrap().skipped;
    assert!(skipped.contains(&"args".to_owned()));
    // Or set to something else, which leaves nothing to read.
    let mut options = EditOptions::default();
    options.set = skipped.iter().map(|key| (key.clone(), None, reshard::Value::from(1))).collect();
    let third = tempfile::tempdir().unwrap();
    let report = edit(&megatron, &local(third.path()), &options).unwrap();
    assert!(report.skipped.is_empty() && report.dropped.is_empty() && report.set == skipped, "{report:?}");
    assert_eq!(open(third.path()).value("args").unwrap(), reshard::Value::from(1));
    // Two keys of one name are an error, also where a value takes the place of both; and all keys may be set.
    let mut options = EditOptions::default();
    options.renames.push(Rename::new("^model\\.(up|down)\\.weight$", "both").unwrap());
    options.set.push(("both".to_owned(), None, reshard::Value::from(1)));
    let fourth = tempfile::tempdir().unwrap();
    assert!(edit(&checkpoint, &local(fourth.path()), &options).unwrap_err().to_string().contains("would both be named"));
    options.renames.clear();
    options.drop.push(Glob::new("optim.*").unwrap());
    options.set = checkpoint
        .keys()
        .filter(|key| !key.starts_with("optim."))
        .map(|key| (key.to_owned(), None, reshard::Value::from(2)))
        .collect();
    let report = edit(&checkpoint, &local(fourth.path()), &options).unwrap();
    assert_eq!(open(fourth.path()).keys().count(), report.set.len());
}

#[test]
fn megatron_folders_open_with_their_plans_and_common_state() {
    for (name, path, expected) in ["megatron-0.14", "megatron-0.16", "megatron-0.19"].into_iter().flat_map(cases) {
        let checkpoint = is_equal(&name, &path, &expected);
        assert_eq!(checkpoint.catalog().format, Format::Megatron);
        assert_eq!(checkpoint.catalog().writer, "Megatron core");
        assert_eq!(checkpoint.value("iteration").unwrap(), reshard::Value::from(7));
        assert_eq!(checkpoint.value("optimizer.param_groups.0.lr").unwrap(), reshard::Value::from(0.5));
        // A namespace of Megatron's arguments is there, and is not opened.
        assert_eq!(checkpoint.value("args").unwrap_err().kind(), ErrorKind::Untrusted);
        // The iteration opens by itself as well.
        let iteration = open(&path.join("iter_0000007"));
        assert_eq!(iteration.keys().collect::<Vec<_>>(), checkpoint.keys().collect::<Vec<_>>());
    }
    let copy = copied(&root().join("megatron-0.16/tp2_dp2/checkpoint"));
    for (text, words) in [("9", "iter_0000009"), ("../x", "should name an iteration")] {
        std::fs::write(copy.path().join("latest_checkpointed_iteration.txt"), text).unwrap();
        let text = refused(copy.path()).full_text();
        assert!(text.contains(words), "{text}");
    }
}

/// The distributed optimizer's state by parameter, whatever the layout that it was saved in.
#[test]
fn optimizer_state_of_megatron_is_read_by_parameter_in_every_layout() {
    let writers = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let writers = writers.filter(|writer| writer.starts_with("megatron-optimizer"));
    let all = writers.flat_map(|writer| cases(&writer).into_iter().map(move |case| (writer.clone(), case)));
    for (writer, (name, path, expected)) in all {
        let options = with_map(&format!("{writer}/{name}"));
        let opened = Checkpoint::open_with(path.to_str().unwrap(), &options).unwrap();
        let checkpoint = holds(&name, opened, &expected);
        assert_eq!(checkpoint.catalog().format, Format::Megatron, "{name}");
        let by_name = ["fully_reshardable", "fully_sharded_model_space"].contains(&name.as_str());
        assert!(checkpoint.catalog().remarks().iter().all(|remark| !remark.contains("flat buffers")), "{name}");
        // Without a map it opens as well, and says what it lacks.
        let plain = open(&path);
        assert_eq!(plain.catalog().remarks().iter().any(|remark| remark.contains("--parameter-map")), !by_name, "{name}");
        let asked = plain.entry("optimizer.state.exp_avg.up.weight");
        match asked {
            Ok(_) => assert!(by_name, "{name}"),
            Err(error) => assert!(!by_name && error.hint().unwrap().contains("save_parameter_map"), "{name}: {error}"),
        }
        if name != "torch" {
            assert_eq!(checkpoint.value("iteration").unwrap(), reshard::Value::from(3), "{name}");
        }
    }
}

#[test]
fn dtensors_of_megatron_fsdp_open_by_their_root() {
    for (name, path, expected) in cases("megatron-fsdp") {
        let checkpoint = is_equal(&name, &path, &expected);
        assert_eq!(checkpoint.catalog().format, Format::Megatron);
        let group = "optimizer.param_to_group_meta.module.decoder.final_layernorm.weight";
        assert_eq!(checkpoint.value(&format!("{group}.lr")).unwrap(), reshard::Value::from(0.5));
        assert_eq!(checkpoint.value("iteration").unwrap(), reshard::Value::from(3));
        assert_eq!(checkpoint.value("args").unwrap_err().kind(), ErrorKind::Untrusted);
    }
}

#[test]
fn what_lightning_keeps_beside_a_checkpoint_is_part_of_it() {
    for (name, path, expected) in cases("lightning-2.6") {
        let checkpoint = is_equal(&name, &path, &expected);
        assert_eq!(checkpoint.catalog().format, Format::Lightning);
        assert!(checkpoint.catalog().writer.starts_with("Lightning 2.6"), "{}", checkpoint.catalog().writer);
        assert_eq!(checkpoint.value("global_step").unwrap(), reshard::Value::from(2));
        assert_eq!(checkpoint.value("hyper_parameters.width").unwrap(), reshard::Value::from(7));
        assert!(checkpoint.keys().any(|key| key.starts_with("lr_schedulers")), "{:?}", checkpoint.keys().collect::<Vec<_>>());
        // Damage in either part is found.
        for file in [".metadata", "meta.pt"] {
            let copy = copied(&path);
            let bytes = std::fs::read(copy.path().join(file)).unwrap();
            std::fs::write(copy.path().join(file), &bytes[..bytes.len() / 2]).unwrap();
            assert_eq!(refused(copy.path()).kind(), ErrorKind::Corrupt, "{file}");
        }
    }
}

#[test]
fn torchtitan_folders_have_the_parts_where_people_expect_them() {
    for (name, path, expected) in cases("torchtitan-0.3") {
        let checkpoint = is_equal(&name, &path, &expected);
        assert_eq!(checkpoint.catalog().format, Format::Dcp);
        for key in ["train_state.step", "dataloader.world_size", "dataloader.dp_rank_1"] {
            assert!(checkpoint.entry(key).is_ok(), "{key}: {:?}", checkpoint.keys().collect::<Vec<_>>());
        }
        assert!(checkpoint.keys().any(|key| key.starts_with("optimizer.param_groups.")));
    }
}

#[test]
fn items_of_torch_checkpointing_are_put_together() {
    for (name, path, expected) in cases("torch_checkpointing-0.1") {
        let checkpoint = is_equal(&name, &path, &expected);
        assert_eq!(checkpoint.catalog().format, Format::TorchCheckpointing);
        assert_eq!(checkpoint.catalog().writer, "torch_checkpointing, 2 ranks");
        assert_eq!(checkpoint.value("step").unwrap(), reshard::Value::from(2), "{name}");
        // What each rank has for itself.
        assert_eq!(checkpoint.value("loader.rank_1.rank").unwrap(), reshard::Value::from(1), "{name}");
    }
}

#[test]
fn weights_and_optimizer_of_nanotron_are_put_together() {
    for (name, path, expected) in cases("nanotron-0.4") {
        let checkpoint = is_equal(&name, &path, &expected);
        assert_eq!(checkpoint.catalog().format, Format::Nanotron);
        assert!(checkpoint.catalog().writer.starts_with("nanotron"), "{}", checkpoint.catalog().writer);
        assert_eq!(checkpoint.value("checkpoint_metadata.metas.last_train_step").unwrap(), reshard::Value::from(3));
        let names = checkpoint.value("optim.param_groups.0.params").unwrap().python_repr();
        assert!(names.contains("'layer.up.weight'") && !names.contains("'norm.weight'"), "{name}: {names}");
        // A step opens as well as the root.
        assert_eq!(open(&path.join("3")).keys().len(), checkpoint.keys().len(), "{name}");
    }
}

#[test]
fn files_of_each_rank_are_one_checkpoint() {
    let mut versions = 0;
    for version in std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
        if !version.starts_with("ranks-torch-") {
            continue;
        }
        versions += 1;
        for (name, path, expected) in cases(&version) {
            let checkpoint = is_equal(&format!("{version}/{name}"), &path, &expected);
            assert_eq!(checkpoint.catalog().format, Format::Ranks);
            let one = if name.starts_with("verl") { "model_world_size_4_rank_2.pt" } else { "optimizer_0_rank0.bin" };
            // One rank's file by itself says that it is a part.
            let alone = open(&path.join(one));
            let rows = if name.starts_with("verl") { "rows" } else { "state.layer.weight.exp_avg" };
            assert!(alone.value(rows).unwrap_err().to_string().contains("DTensor"), "{version}/{name}");
            let copy = copied(&path);
            std::fs::remove_file(copy.path().join(one)).unwrap();
            let error = refused(copy.path());
            assert_eq!(error.kind(), ErrorKind::Incomplete, "{error}");
            assert!(error.to_string().contains(one), "{error}");
        }
    }
    assert!(versions >= 2);
}

/// FSDP2 on meshes of two dimensions, with copies and with strided shards; FSDP1's ShardedTensors, by name and flat.
#[test]
fn what_fsdp_leaves_in_the_files_of_each_rank_is_one_checkpoint() {
    let mut kinds = std::collections::BTreeSet::new();
    for version in std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
        if !version.starts_with("fsdp-ranks-torch-") {
            continue;
        }
        for (name, path, expected) in cases(&version) {
            let checkpoint = is_equal(&format!("{version}/{name}"), &path, &expected);
            assert_eq!(checkpoint.catalog().format, Format::Ranks);
            let flat = checkpoint.catalog().remarks().iter().any(|remark| remark.contains("LOCAL_STATE_DICT"));
            assert_eq!(flat, name.starts_with("fsdp1_local"), "{version}/{name}");
            let ranks = if name.ends_with("w3") { 3 } else { 4 };
            let one = format!("model_world_size_{ranks}_rank_1.pt");
            let alone = open(&path.join(&one));
            let key = alone.keys().find(|key| key.ends_with("up.weight") || key.ends_with("flat_param")).unwrap();
            assert!(alone.value(key).unwrap_err().to_string().contains("ShardedTensor"), "{version}/{name}");
            let copy = copied(&path);
            std::fs::remove_file(copy.path().join(&one)).unwrap();
            let error = refused(copy.path());
            assert!(error.kind() == ErrorKind::Incomplete && error.to_string().contains(&one), "{error}");
            kinds.insert(name);
        }
    }
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), ["fsdp1_local_w3", "fsdp1_sharded_w3", "hsdp_w4", "tp_fsdp2_w4"]);
}

#[test]
fn a_model_and_its_optimizer_beside_each_other_are_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let wholes = |part: &str| vec![crate::layouts::Whole::new(&format!("{part}.a"), reshard::DType::Float32, &[6, 10], 1)];
    for (name, part) in [("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        let values = [(format!("{part}.lr"), reshard::Value::from(0.5))];
        let store = local(&folder.path().join(name));
        crate::corpus::save_state(&wholes(part), &values, &crate::corpus::rows(2), &store, &reshard::SaveOptions::default());
    }
    let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/records/read");
    std::fs::copy(records.join("state_dict.pt"), folder.path().join("scheduler.bin")).unwrap();
    let checkpoint = open(folder.path());
    assert_eq!(checkpoint.catalog().format, Format::Accelerate);
    for key in ["model.a", "model.lr", "optim.a", "optim.lr"] {
        assert!(checkpoint.entry(key).is_ok(), "{key}");
    }
    assert!(checkpoint.keys().any(|key| key.starts_with("scheduler.")));
    let report = verify(&checkpoint, &VerifyOptions::default()).unwrap();
    assert!(report.is_sound(), "{:?}", report.findings);
    // Damage in any part is found.
    let data = std::fs::read_dir(folder.path().join("optimizer_0")).unwrap().map(|entry| entry.unwrap().path());
    let data = data.filter(|path| path.extension().is_some_and(|e| e == "distcp")).min().unwrap();
    let mut bytes = std::fs::read(&data).unwrap();
    let middle = bytes.len() / 3;
    bytes[middle] ^= 1;
    std::fs::write(&data, bytes).unwrap();
    assert!(!verify(&open(folder.path()), &VerifyOptions::default()).unwrap().is_sound());
}

/// Whatever is changed in a file: an error or another value, never a panic, and never more memory than the files have.
#[test]
fn damaged_files_of_other_programs_do_no_harm() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    let cases = [
        "deepspeed-0.19/zero2_w3",
        "deepspeed-0.19/zero2_w4_tp",
        "deepspeed-0.19/zero3_w3_sub",
        "deepspeed-0.19/zero3_w3_sub_universal",
        "megatron-0.16/tp2_dp2",
        "megatron-optimizer/dp_reshardable",
        "megatron-optimizer/fully_sharded_model_space",
        "megatron-optimizer/dp_zero_gather_scatter",
        "megatron-optimizer/torch",
        "ranks-torch-2.13/verl_w4",
        "lightning-2.6/fsdp2_w2",
        "torch_checkpointing-0.1/fsdp2_w2",
        "torch_checkpointing-0.1/safetensors_w2",
        "nanotron-0.4/zero1_dp2_tp2",
    ];
    for case in cases {
        let copy = copied(&root().join(case).join("checkpoint"));
        let store = local(copy.path());
        let files: Vec<String> = store.list("").unwrap().into_iter().map(|file| file.path).collect();
        for round in 0..45 {
            let name = copy.path().join(&files[random(files.len())]);
            let sound = std::fs::read(&name).unwrap();
            let mut bytes = sound.clone();
            match round % 3 {
                0 => bytes.truncate(random(sound.len())),
                1 => {
                    let at = random(sound.len().min(3000));
                    bytes[at] ^= 1 << random(8);
                }
                _ => {
                    // A number or a name of the pickle.
                    let at = random(sound.len().min(3000));
                    bytes[at] = [0, 1, 0xff, b'.', b'K', b'q'][random(6)];
                }
            }
            std::fs::write(&name, &bytes).unwrap();
            if let Ok(checkpoint) = Checkpoint::open_with(copy.path().to_str().unwrap(), &with_map(case)) {
                let _ = verify(&checkpoint, &VerifyOptions::default());
                let _ = reshard::digest::digest(&checkpoint, &reshard::digest::DigestOptions::default());
            }
            std::fs::write(&name, &sound).unwrap();
        }
    }
}

// The same body as the fuzz target `folder`.
#[path = "../../../../fuzz/folder.rs"]
mod folder;

#[test]
fn mutated_folders_of_other_programs_end_in_a_value_or_an_error() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/folder");
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(seeds).unwrap().map(|entry| entry.unwrap().path()).collect();
    seeds.sort();
    for writer in std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap()).filter(|entry| entry.path().is_dir()) {
        let name = writer.file_name().into_string().unwrap();
        let has = |seed: &PathBuf| seed.file_name().unwrap().to_str().unwrap().starts_with(&format!("{name}-"));
        assert!(seeds.iter().any(has), "{name} has no seed: run fuzz/seeds.py");
    }
    let mutations: u64 = std::env::var("RESHARD_MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut dice = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit.max(1) as u64) as usize
    };
    for seed in seeds {
        let data = std::fs::read(&seed).unwrap();
        assert!(folder::check(&folder::files(&data)), "{} opens as it is", seed.display());
        for _ in 0..mutations {
            let mut mutated = data.clone();
            for _ in 0..=dice(3) {
                let at = dice(mutated.len());
                match dice(6) {
                    0 | 1 => mutated[at] ^= 1 << dice(8),
                    2 => mutated[at] = dice(256) as u8,
                    3 => mutated[at] = [0, 1, 0x7f, 0x80, 0xff, b'.', b'0', b'K', b'M', b'J'][dice(10)],
                    4 => drop(mutated.drain(at..(at + 1 + dice(4)).min(data.len() - 4).max(at))),
                    _ => mutated.insert(at, dice(256) as u8),
                }
            }
            folder::check(&folder::files(&mutated));
        }
    }
}
