//! Every verb on every format: checkpoints that other programs wrote, and what those programs say is in them.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::command::{fine, json, run, sorted_entries};

/// One of each format, and of each way in which its optimizer's state is laid out.
const CASES: &[&str] = &[
    "deepspeed-0.19/zero1_w2",
    "deepspeed-0.19/zero2_w4_tp",
    "deepspeed-0.19/zero3_w3_sub",
    "deepspeed-0.19/zero2_w3_universal",
    "megatron-0.16/tp2_dp2",
    "megatron-optimizer/dp_reshardable",
    "megatron-optimizer/fully_reshardable",
    "megatron-optimizer/fully_sharded_model_space",
    "megatron-optimizer/dp_zero_gather_scatter",
    "megatron-optimizer/torch",
    "megatron-fsdp/fsdp_dtensor",
    "ranks-torch-2.13/verl_w4",
    "ranks-torch-2.13/accelerate_w2",
    "lightning-2.6/fsdp2_w2",
    "torchtitan-0.3/fsdp2_w2",
    "torch_checkpointing-0.1/fsdp2_w2",
    "nanotron-0.4/zero1_dp2_tp2",
];

fn foreign() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../reshard/tests/foreign").canonicalize().unwrap()
}

struct Case {
    name: &'static str,
    path: String,
    expected: Map<String, Value>,
    /// What every command is given beside its own arguments.
    map: Vec<String>,
}

impl Case {
    fn new(name: &'static str) -> Case {
        let folder = foreign().join(name);
        let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let map = folder.join("parameters.json");
        let map = if map.exists() { vec!["--parameter-map".into(), map.to_str().unwrap().to_owned()] } else { Vec::new() };
        let path = folder.join("checkpoint").to_str().unwrap().to_owned();
        Case { name, path, expected: expected.as_object().unwrap().clone(), map }
    }

    fn with<'a>(&'a self, args: &[&'a str]) -> Vec<&'a str> {
        args.iter().copied().chain(self.map.iter().map(String::as_str)).collect()
    }

    fn fine(&self, args: &[&str]) -> String {
        fine(&self.with(args))
    }

    fn json(&self, args: &[&str]) -> Value {
        json(&self.with(args))
    }

    /// What it holds, by key.
    fn entries(&self) -> Vec<(String, Value)> {
        sorted_entries(&self.fine(&["digest", &self.path, "--json"]))
    }

    /// A large tensor of it.
    fn key(&self) -> &str {
        let elements = |entry: &Value| entry["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product::<u64>();
        self.expected.iter().max_by_key(|(_, entry)| elements(entry)).unwrap().0
    }
}

fn is_equal(case: &Case, entries: &[(String, Value)], what: &str) {
    for (key, entry) in &case.expected {
        let found = entries.iter().find(|(name, _)| name == key).map(|(_, entry)| entry);
        assert_eq!(found, Some(entry), "{} {what}: {key}", case.name);
    }
}

#[test]
fn every_verb_that_reads_takes_every_format() {
    for case in CASES.iter().map(|name| Case::new(name)) {
        let (path, key) = (case.path.as_str(), case.key());
        let summary = case.json(&["inspect", path, "--json"]);
        assert!(summary["writer"].as_str().is_some_and(|writer| !writer.is_empty()), "{}: {summary}", case.name);
        assert!(case.fine(&["inspect", path]).contains(path), "{}", case.name);
        let listed = case.json(&["ls", path, "--json"]).to_string();
        for key in case.expected.keys() {
            assert!(listed.contains(&format!("{key:?}")), "{}: {key}", case.name);
        }
        is_equal(&case, &case.entries(), "digest");
        assert!(!case.fine(&["show", path, key]).is_empty());
        // Numbers that were made up may be called bad; they are there all the same.
        assert!(!run(&case.with(&["stats", path])).stdout.is_empty());
        assert!(case.fine(&["verify", path]).contains("sound"), "{}", case.name);
        case.fine(&["diff", path, path]);
        assert!(!case.fine(&["plan", path, "--mesh", "3"]).is_empty());
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("report.html");
        case.fine(&["report", path, "-o", page.to_str().unwrap()]);
        assert!(std::fs::read_to_string(page).unwrap().contains(key), "{}", case.name);
    }
}

#[test]
fn every_verb_that_writes_takes_every_format() {
    for case in CASES.iter().map(|name| Case::new(name)) {
        let path = case.path.as_str();
        let folder = tempfile::tempdir().unwrap();
        let to = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let digest = |path: &str| sorted_entries(&fine(&["digest", path, "--json"]));
        let flags = ["--skip-opaque", "--no-sync"];
        for (name, args) in [("dcp", vec!["--to", "dcp", "--ranks", "2"]), ("file.pt", vec![]), ("file.safetensors", vec![])] {
            let target = to(name);
            let args = [["convert", path, target.as_str()].as_slice(), &args, &flags].concat();
            case.fine(&args);
            is_equal(&case, &digest(&target), name);
            // What is left out is named, and nothing else differs.
            let compared = run(&case.with(&["diff", path, &target, "--json"]));
            let compared: Value = serde_json::from_str(&compared.stdout).unwrap();
            assert_eq!(compared["different"], Value::Array(Vec::new()), "{}: {compared}", case.name);
        }
        let target = to("relayout");
        case.fine(&[["relayout", path, target.as_str(), "--mesh", "dp=3,tp=2"].as_slice(), &flags].concat());
        is_equal(&case, &digest(&target), "relayout");
        let target = to("merged");
        case.fine(&[["merge", path, path, "-o", target.as_str(), "--to", "dcp"].as_slice(), &flags].concat());
        is_equal(&case, &digest(&target), "merge");
        let target = to("edited");
        case.fine(&["edit", path, &target, "--set", "edited.note=1", "--skip-opaque"]);
        is_equal(&case, &digest(&target), "edit");
        assert_eq!(fine(&["show", &target, "edited.note"]).trim(), "1", "{}", case.name);
    }
}

/// Without the map, flat buffers are what they are; asked for by name, the error says what is needed.
#[test]
fn flat_buffers_ask_for_a_map() {
    let case = Case::new("megatron-optimizer/dp_reshardable");
    assert!(
        fine(&["inspect", &case.path]).replace('\n', " ").contains("--parameter-map FILE"),
        "{}",
        fine(&["inspect", &case.path])
    );
    assert!(fine(&["ls", &case.path]).contains("bucket_idx_0.exp_avg"));
    assert!(fine(&["verify", &case.path]).contains("sound"));
    let asked = run(&["show", &case.path, "optimizer.state.exp_avg.up.weight"]);
    assert_eq!(asked.code, 2, "{asked}");
    for words in ["flat buffers", "--parameter-map FILE", "save_parameter_map"] {
        assert!(asked.stderr.replace('\n', " ").contains(words), "{words}: {asked}");
    }
    let folder = tempfile::tempdir().unwrap();
    let map = std::fs::read_to_string(&case.map[1]).unwrap();
    let wrong = folder.path().join("map.json");
    let wrong_name = wrong.to_str().unwrap();
    for (from, to, words) in [
        ("\"elements\": ", "\"elements\": 1", "sizes disagree"),
        ("bucket_idx_0\"", "bucket_idx_9\"", "bucket_idx_"),
        ("\"version\": 1", "\"version\": 9", "version 9"),
        ("\"start\"", "\"begin\"", "unknown field"),
    ] {
        std::fs::write(&wrong, map.replacen(from, to, 1)).unwrap();
        let target = folder.path().join("out");
        let refused = run(&["convert", &case.path, target.to_str().unwrap(), "--to", "dcp", "--parameter-map", wrong_name]);
        let text = refused.stderr.replace('\n', " ");
        assert!(refused.code == 2 && text.contains(words) && text.contains("map.json"), "{from}: {refused}");
        assert!(!target.exists(), "something was written");
    }
    let absent = run(&["ls", &case.path, "--parameter-map", "nowhere.json"]);
    assert!(absent.code == 2 && absent.stderr.contains("nowhere.json"), "{absent}");
}
