//! What is written is what the real libraries load: `safetensors` and `torch` in Python.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{case, fine};

/// An interpreter with torch: `RESHARD_PYTHON`, or the virtual environment that `make` makes.
pub(crate) fn python() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    let given = std::env::var_os("RESHARD_PYTHON").map(PathBuf::from);
    let found = given.into_iter().chain([root]).find(|path| path.exists());
    let works = |path: &PathBuf| {
        Command::new(path).args(["-c", "import torch, safetensors.torch"]).output().is_ok_and(|o| o.status.success())
    };
    let found = found.filter(works);
    // Whoever names a Python wants these tests to run.
    assert!(found.is_some() || std::env::var_os("RESHARD_PYTHON").is_none(), "RESHARD_PYTHON has no torch and safetensors");
    if found.is_none() {
        println!("skipped: no Python with torch and safetensors (set RESHARD_PYTHON, or run `make test`)");
    }
    found
}

const SCRIPT: &str = r#"
import hashlib, json, sys, torch
from safetensors.torch import load_file

def digest(t):
    t = t.detach().contiguous()
    return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "sha256": hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"").hexdigest()}

def flat(value, prefix, out):
    if isinstance(value, dict):
        for key, below in value.items():
            flat(below, f"{prefix}.{key}" if prefix else str(key), out)
    elif isinstance(value, torch.Tensor):
        out[prefix] = digest(value)
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (torch.Tensor, dict)) for v in value):
        for i, below in enumerate(value):
            flat(below, f"{prefix}.{i}", out)

expected = json.load(open(sys.argv[1]))["entries"]
expected = {k: v for k, v in expected.items() if "sha256" in v}
out = {}
if sys.argv[2].endswith(".pt"):
    flat(torch.load(sys.argv[2], weights_only=True, map_location="cpu"), "", out)
else:
    out = {k: digest(t) for k, t in load_file(sys.argv[2]).items()}
missing = sorted(set(expected) - set(out))
assert not missing, missing
wrong = [k for k in expected if expected[k] != out[k]]
assert not wrong, [(k, expected[k], out[k]) for k in wrong[:3]]
assert set(out) == set(expected), sorted(set(out) - set(expected))
print(len(out), "tensors")
"#;

#[test]
fn torch_and_safetensors_load_what_was_written() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (name, keys) in [("torch-2.13/tp_fsdp2_w4", &[][..]), ("torch-2.13/zoo", &["--exclude", "*complex128*"])] {
        let (digest, pt, safetensors) = (at("digest.json"), at("m.pt"), at("m.safetensors"));
        fine(&[&["convert", &case(name), &pt, "--overwrite"], keys].concat());
        fine(&[&["convert", &case(name), &safetensors, "--overwrite"], keys].concat());
        std::fs::write(&digest, fine(&["digest", &pt])).unwrap();
        for file in [&pt, &safetensors] {
            let output = Command::new(&python).args(["-c", SCRIPT, &digest, file]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {file}: {said}");
        }
    }
}
