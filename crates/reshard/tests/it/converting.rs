//! Conversions: any format to any other and back with equal digests, all or nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::digest::{Digest, DigestEntry};
use reshard::select::{CastRules, Part, Rename};
use reshard::storage::faulty::Faults;
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Store, StoreOptions};
use reshard::{Checkpoint, DType, ErrorKind, SaveOptions, Value};

use crate::corpus;

const SAFETENSORS: ConvertTarget = ConvertTarget::Safetensors { max_shard_size: None };

fn to(path: &Path, target: ConvertTarget) -> Destination {
    Destination::parse(path.to_str().unwrap(), target, &StoreOptions::default()).unwrap()
}

fn converted(source: &Checkpoint, path: &Path, target: ConvertTarget, options: &ConvertOptions) -> Checkpoint {
    convert(source, &to(path, target), target, options).unwrap();
    corpus::open(path)
}

fn sorted(digest: Digest) -> Vec<(String, DigestEntry)> {
    let mut entries: Vec<_> = digest.entries.into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}

/// A checkpoint of ours; the folder must be kept alive.
fn saved() -> (tempfile::TempDir, Checkpoint) {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::columns(3), &corpus::local(folder.path()), &SaveOptions::default());
    let checkpoint = corpus::open(folder.path());
    (folder, checkpoint)
}

pub(crate) fn python() -> Option<PathBuf> {
    let local = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    let python = std::env::var_os("RESHARD_PYTHON").map_or(local, PathBuf::from);
    let works =
        std::process::Command::new(&python).args(["-c", "import torch, safetensors"]).output().is_ok_and(|o| o.status.success());
    // Whoever names a Python wants these tests to run.
    assert!(works || std::env::var_os("RESHARD_PYTHON").is_none(), "{} has no torch and safetensors", python.display());
    if !works {
        eprintln!("skipped: no Python with torch and safetensors at {}; set RESHARD_PYTHON", python.display());
    }
    works.then_some(python)
}

pub(crate) fn run_python(python: &Path, script: &str, args: &[&Path]) -> String {
    let output = std::process::Command::new(python).arg("-c").arg(script).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_corpus_survives_every_format_with_equal_digests() {
    for (name, path, _) in corpus::cases() {
        let folder = tempfile::tempdir().unwrap();
        let source = corpus::open(&path);
        let digest = sorted(corpus::digest_of(&source));
        let options = ConvertOptions::default();
        // Complex types are not in safetensors; the others make the whole round.
        let mut plain = ConvertOptions::default();
        plain.selection.exclude = vec![reshard::select::Glob::new("*complex*").unwrap()];
        let dcp = converted(&source, &folder.path().join("dcp"), ConvertTarget::Dcp { ranks: 3 }, &options);
        assert_eq!(sorted(corpus::digest_of(&dcp)), digest, "{name}: dcp");
        let safetensors = converted(&dcp, &folder.path().join("x.safetensors"), SAFETENSORS, &plain);
        let rest: Vec<_> = digest.iter().filter(|(k, _)| !k.contains("complex")).cloned().collect();
        assert_eq!(sorted(corpus::digest_of(&safetensors)), rest, "{name}: safetensors");
        let again = converted(&safetensors, &folder.path().join("again"), ConvertTarget::Dcp { ranks: 1 }, &options);
        assert_eq!(sorted(corpus::digest_of(&again)), rest, "{name}: dcp again");
        let torch = converted(&dcp, &folder.path().join("x.pt"), ConvertTarget::Torch, &options);
        assert_eq!(sorted(corpus::digest_of(&torch)), digest, "{name}: torch");
        let back = converted(&torch, &folder.path().join("back"), ConvertTarget::Dcp { ranks: 2 }, &options);
        assert_eq!(sorted(corpus::digest_of(&back)), digest, "{name}: back");
        for path in ["dcp", "again", "back", "x.pt", "x.safetensors"] {
            let found = reshard::verify::verify_path(
                folder.path().join(path).to_str().unwrap(),
                &Default::default(),
                &Default::default(),
            )
            .unwrap();
            assert!(found.findings.is_empty(), "{name} {path}: {:?}", found.findings);
        }
    }
}

#[test]
fn a_model_in_several_files_has_an_index_and_stays_under_the_size() {
    let (_kept, source) = saved();
    let folder = tempfile::tempdir().unwrap();
    let target = ConvertTarget::Safetensors { max_shard_size: Some(300) };
    let report = convert(&source, &to(folder.path(), target), target, &ConvertOptions::default()).unwrap();
    assert!(report.files.len() > 2 && report.files[0].starts_with("model-00001-of-0000"), "{:?}", report.files);
    assert!(folder.path().join("model.safetensors.index.json").exists());
    assert_eq!(sorted(corpus::digest_of(&corpus::open(folder.path()))), sorted(corpus::digest_of(&source)));
    // Refused, then replaced by one file; nothing of the old stays.
    let error = convert(&source, &to(folder.path(), target), target, &ConvertOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let mut options = ConvertOptions::default();
    options.overwrite = true;
    for target in [target, SAFETENSORS, target] {
        convert(&source, &to(folder.path(), target), target, &options).unwrap();
        assert_eq!(sorted(corpus::digest_of(&corpus::open(folder.path()))), sorted(corpus::digest_of(&source)));
    }
    let names: Vec<String> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().all(|n| !n.ends_with("staged")) && names.len() == report.files.len() + 1, "{names:?}");
}

#[test]
fn a_place_that_holds_a_checkpoint_of_any_format_is_refused() {
    let (_kept, source) = saved();
    let indexed = ConvertTarget::Safetensors { max_shard_size: Some(300) };
    let targets = [ConvertTarget::Dcp { ranks: 2 }, SAFETENSORS, indexed, ConvertTarget::Torch];
    let options = ConvertOptions::default();
    for first in targets {
        let folder = tempfile::tempdir().unwrap();
        convert(&source, &to(folder.path(), first), first, &options).unwrap();
        let digest = sorted(corpus::digest_of(&corpus::open(folder.path())));
        for second in targets {
            let error = convert(&source, &to(folder.path(), second), second, &options).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{first:?} then {second:?}: {error}");
        }
        assert_eq!(sorted(corpus::digest_of(&corpus::open(folder.path()))), digest, "{first:?}");
    }
    // One file beside the index of another model, which loaders would prefer or not as they like.
    let folder = tempfile::tempdir().unwrap();
    let report = convert(&source, &to(folder.path(), indexed), indexed, &options).unwrap();
    for name in ["model.safetensors", "other.safetensors"] {
        let error = convert(&source, &to(&folder.path().join(name), SAFETENSORS), SAFETENSORS, &options).unwrap_err();
        assert!(error.kind() == ErrorKind::AlreadyExists && error.to_string().contains("index.json"), "{error}");
    }
    // Also when the index is all that is left of it.
    report.files.iter().for_each(|file| std::fs::remove_file(folder.path().join(file)).unwrap());
    let error = convert(&source, &to(folder.path(), SAFETENSORS), SAFETENSORS, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
}

#[test]
fn selections_renames_and_casts_apply() {
    let (_kept, source) = saved();
    let folder = tempfile::tempdir().unwrap();
    let mut options = ConvertOptions::default();
    options.selection.part = Part::Model;
    options.selection.strip_prefix = Some("model.".into());
    options.selection.renames = vec![Rename::parse("^a$=embed.weight").unwrap()];
    options.casts = CastRules::new();
    options.casts.parse("bf16").unwrap();
    let report = convert(&source, &to(folder.path(), SAFETENSORS), SAFETENSORS, &options).unwrap();
    let found = corpus::open(folder.path());
    let mut keys: Vec<&str> = found.keys().collect();
    keys.sort();
    assert_eq!(keys, ["b", "embed.weight", "empty", "scalar"]);
    assert_eq!(found.tensor("embed.weight").unwrap().dtype, DType::BFloat16);
    assert_eq!(found.tensor("scalar").unwrap().dtype, DType::Int64);
    assert_eq!(report.casts.len(), 2);
    assert!(report.casts.iter().all(|c| c.narrowing));
    options.selection.renames = vec![Rename::parse(".*=same").unwrap()];
    let error = convert(&source, &to(&folder.path().join("y.safetensors"), SAFETENSORS), SAFETENSORS, &options).unwrap_err();
    assert!(error.to_string().contains("both be named"), "{error}");
}

#[test]
fn a_conversion_stopped_anywhere_leaves_old_or_new() {
    let (_kept, source) = saved();
    let expected = sorted(corpus::digest_of(&source));
    for target in [
        ConvertTarget::Dcp { ranks: 2 },
        SAFETENSORS,
        ConvertTarget::Safetensors { max_shard_size: Some(300) },
        ConvertTarget::Torch,
    ] {
        let run = |store: Arc<dyn Store>| {
            let destination = match target {
                ConvertTarget::Torch => Destination::file(store, "x.pt"),
                _ => Destination::folder(store),
            };
            convert(&source, &destination, target, &ConvertOptions::default())
        };
        let counting = Faults::new();
        run(counting.wrap(Arc::new(MemoryStore::new()))).unwrap();
        for step in 0..counting.steps() {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
            let failed = run(Faults::crash_at(step).wrap(Arc::clone(&store))).is_err();
            let opened = match target {
                ConvertTarget::Torch => Checkpoint::open_file(Arc::clone(&store), "x.pt"),
                _ => Checkpoint::open_store(Arc::clone(&store)),
            };
            match opened {
                Ok(found)
                    if found.catalog().files.iter().any(|f| f.contains("-of-"))
                        && !store.exists("model.safetensors.index.json").unwrap() =>
                {
                    assert!(failed, "{target:?} step {step}");
                }
                Ok(found) => assert_eq!(sorted(corpus::digest_of(&found)), expected, "{target:?} step {step}"),
                Err(_) => assert!(failed, "{target:?} step {step}"),
            }
            // What is left does not disturb the next attempt.
            if failed
                && store
                    .list("")
                    .unwrap()
                    .iter()
                    .all(|f| !f.path.ends_with(".metadata") && !f.path.ends_with("x.pt") && !f.path.contains("model"))
            {
                run(Arc::clone(&store)).unwrap();
            }
        }
    }
}

#[test]
fn damage_in_the_source_is_an_error_and_nothing_is_written() {
    let (kept, source) = saved();
    drop(source);
    let path = kept.path().join("__1_0.distcp");
    let mut bytes = std::fs::read(&path).unwrap();
    // In the middle lies the data of the one large tensor, of which the new layout cuts every chunk.
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&path, &bytes).unwrap();
    let source = corpus::open(kept.path());
    let folder = tempfile::tempdir().unwrap();
    for target in [ConvertTarget::Dcp { ranks: 2 }, SAFETENSORS, ConvertTarget::Torch] {
        let error = convert(&source, &to(folder.path(), target), target, &ConvertOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
    }
}

#[test]
fn real_libraries_load_what_is_written() {
    let Some(python) = python() else { return };
    let (_kept, source) = saved();
    let folder = tempfile::tempdir().unwrap();
    let target = ConvertTarget::Safetensors { max_shard_size: Some(300) };
    converted(&source, &folder.path().join("sharded"), target, &ConvertOptions::default());
    converted(&source, &folder.path().join("x.pt"), ConvertTarget::Torch, &ConvertOptions::default());
    converted(&source, &folder.path().join("dcp"), ConvertTarget::Dcp { ranks: 2 }, &ConvertOptions::default());
    let script = r#"
import hashlib, json, sys
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors import safe_open
def sha(t):
    t = t.contiguous().reshape(-1)
    return hashlib.sha256(t.view(torch.uint8).numpy().tobytes() if t.numel() else b"").hexdigest()
root = sys.argv[1]
index = json.load(open(root + "/sharded/model.safetensors.index.json"))
out = {"safetensors": {}}
for key, file in index["weight_map"].items():
    with safe_open(root + "/sharded/" + file, "pt") as f:
        assert f.metadata()["format"] == "pt"
        out["safetensors"][key] = sha(f.get_tensor(key))
def flat(tree, prefix, found):
    for k, v in tree.items():
        flat(v, prefix + [k], found) if isinstance(v, dict) else found.__setitem__(".".join(map(str, prefix + [k])), sha(v) if isinstance(v, torch.Tensor) else v)
    return found
out["torch"] = flat(torch.load(root + "/x.pt", weights_only=True), [], {})
dcp_to_torch_save(root + "/dcp", root + "/dcp.pt")
out["dcp"] = flat(torch.load(root + "/dcp.pt", weights_only=True), [], {})
print(json.dumps(out))
"#;
    let found: serde_json::Value = serde_json::from_str(&run_python(&python, script, &[folder.path()])).unwrap();
    for (key, entry) in &corpus::digest_of(&source).entries {
        match entry {
            DigestEntry::Tensor { sha256, .. } => {
                for form in ["safetensors", "torch", "dcp"] {
                    assert_eq!(found[form][key], *sha256, "{form} {key}");
                }
            }
            DigestEntry::Value { value } => {
                for form in ["torch", "dcp"] {
                    assert_eq!(found[form][key], *value, "{form} {key}");
                }
            }
            _ => unreachable!(),
        }
    }
}

#[test]
fn values_of_every_kind_survive_safetensors() {
    let values = vec![
        ("a".to_owned(), Value::Tuple(vec![Value::from(1), Value::None])),
        ("b".to_owned(), Value::Bytes(vec![0, 255])),
        ("c".to_owned(), Value::from(f64::NAN)),
        ("d.e".to_owned(), Value::Dict(vec![(Value::from(1), Value::from("x"))])),
    ];
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("dcp");
    corpus::save_state(&[], &values, &corpus::solo(), &corpus::local(&source), &SaveOptions::default());
    let found = converted(&corpus::open(&source), &folder.path().join("x.safetensors"), SAFETENSORS, &ConvertOptions::default());
    for (key, value) in values {
        assert_eq!(found.value(&key).unwrap(), value);
    }
}

#[test]
fn stores_that_take_bytes_in_order_get_them_in_order() {
    let (_kept, source) = saved();
    let expected = sorted(corpus::digest_of(&source));
    for target in [
        ConvertTarget::Dcp { ranks: 3 },
        SAFETENSORS,
        ConvertTarget::Safetensors { max_shard_size: Some(300) },
        ConvertTarget::Torch,
    ] {
        let store: Arc<dyn Store> = Arc::new(crate::object_like::Ordered::default());
        let destination = Destination::folder(Arc::clone(&store));
        convert(&source, &destination, target, &ConvertOptions::default()).unwrap();
        let found = Checkpoint::open_store(Arc::clone(&store)).unwrap();
        assert_eq!(sorted(corpus::digest_of(&found)), expected, "{target:?}");
        let report = reshard::verify::verify_store(Arc::clone(&store), &Default::default()).unwrap();
        assert!(report.findings.is_empty(), "{target:?}: {:?}", report.findings);
        // A single object cannot be replaced in one step; what is more than one can.
        let mut options = ConvertOptions::default();
        options.overwrite = true;
        let again = convert(&source, &destination, target, &options);
        match target {
            SAFETENSORS | ConvertTarget::Torch => assert_eq!(again.unwrap_err().kind(), ErrorKind::Invalid),
            _ => assert_eq!(again.unwrap().files.len(), found.catalog().files.len()),
        }
        assert_eq!(sorted(corpus::digest_of(&Checkpoint::open_store(store).unwrap())), expected, "{target:?} again");
    }
}

#[test]
fn progress_counts_what_is_moved_and_what_is_synced() {
    let (folder, source) = saved();
    for (name, sync) in [("a.safetensors", true), ("b.safetensors", false)] {
        let mut options = ConvertOptions::default();
        options.sync = sync;
        let at = folder.path().join(name);
        converted(&source, &at, SAFETENSORS, &options);
        let control = &options.control;
        assert!(control.total() > 0 && control.done() == control.total(), "{control:?}");
        let length = if sync { std::fs::metadata(&at).unwrap().len() } else { 0 };
        assert_eq!((control.to_sync(), control.synced()), (length, length));
    }
}
