//! Verbs that write: nothing is lost on the way, whatever the formats.

use std::path::Path;

use crate::command::{case, check, fine, json, run};

fn entries(path: &str, glob: &str) -> Vec<(String, serde_json::Value)> {
    let mut entries: Vec<_> = json(&["digest", path, glob])["entries"].as_object().unwrap().clone().into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}

fn at(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn round_trips_keep_every_digest() {
    // Safetensors has no word for complex128; everything else goes all the way.
    for (name, glob) in [
        ("torch-2.13/tp_fsdp2_w4", "*"),
        ("torch-2.13/zoo", "{tensors.dtype_[!c]*,tensors.[!d]*,plain.*,list*,tensors.dtype_complex64}"),
        ("torch-2.15/fsdp2_w3", "*"),
        ("torch-2.5/fsdp1_orig_w3", "*"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (one, two, three) = (at(folder.path(), "m.safetensors"), at(folder.path(), "dcp"), at(folder.path(), "m.pt"));
        let expected = entries(&case(name), glob);
        fine(&["convert", &case(name), &one, "--include", glob]);
        assert_eq!(entries(&one, "*"), expected, "{name} as safetensors");
        fine(&["convert", &one, &two, "--to", "dcp", "--ranks", "3"]);
        assert_eq!(entries(&two, "*"), expected, "{name} as DCP again");
        assert_eq!(run(&["verify", &two]).code, 0);
        fine(&["convert", &two, &three]);
        assert_eq!(entries(&three, "*"), expected, "{name} as torch.save");
        fine(&["diff", &case(name), &three, "--include", glob]);
    }
}

#[test]
fn convert_selects_renames_casts_and_shards() {
    let folder = tempfile::tempdir().unwrap();
    let source = case("torch-2.13/tp_fsdp2_w4");
    let to = at(folder.path(), "model");
    check(
        "convert",
        Some(folder.path()),
        &[
            "convert",
            &source,
            &to,
            "--to",
            "safetensors",
            "--model-only",
            "--prefix",
            "model.",
            "--rename",
            r"^blocks\.(\d+)\.=layers.$1.",
            "--cast",
            "*norm*=fp32",
            "--cast",
            "bf16",
            "--max-shard-size",
            "800",
            "--exclude",
            "*scale",
        ],
    );
    check("convert_result", Some(folder.path()), &["ls", &to]);
    let mut files: Vec<String> = std::fs::read_dir(&to)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| !n.starts_with('.'))
        .collect();
    files.sort();
    assert!(files.contains(&"model.safetensors.index.json".to_owned()), "{files:?}");
    assert!(files.contains(&"model-00001-of-00002.safetensors".to_owned()) || files.len() > 2, "{files:?}");
    check("convert_exists", Some(folder.path()), &["convert", &source, &to, "--to", "safetensors"]);
    fine(&["convert", &source, &to, "--to", "safetensors", "--overwrite"]);
    fine(&["diff", &source, &to]);
    check("convert_which_format", Some(folder.path()), &["convert", &source, &at(folder.path(), "new")]);
    check("convert_bad_cast", Some(folder.path()), &["convert", &source, &at(folder.path(), "x.pt"), "--cast", "int3"]);
    check(
        "convert_bad_size",
        Some(folder.path()),
        &["convert", &source, &at(folder.path(), "x"), "--to", "safetensors", "--max-shard-size", "5 apples"],
    );
    check(
        "convert_clash",
        Some(folder.path()),
        &["convert", &source, &at(folder.path(), "y.pt"), "--rename", r"\.(weight|bias)$=.same"],
    );
    assert!(!folder.path().join("x.pt").exists() && !folder.path().join("y.pt").exists());
}

#[test]
fn renames_come_from_a_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = at(folder.path(), "renames");
    std::fs::write(&file, "# comment\n\n^model\\.=\nblocks=layers\n").unwrap();
    let to = at(folder.path(), "m.safetensors");
    fine(&["convert", &case("torch-2.13/fsdp2_w4"), &to, "--include", "model.*", "--rename-file", &file]);
    assert!(fine(&["ls", &to]).contains("\nlayers.0.down.weight "));
    std::fs::write(&file, "fine=x\n(broken=y\n").unwrap();
    check(
        "rename_file_broken",
        Some(folder.path()),
        &["convert", &case("torch-2.13/fsdp2_w4"), &at(folder.path(), "n.pt"), "--rename-file", &file],
    );
}

#[test]
fn relayout_cuts_for_a_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let (source, to) = (case("torch-2.13/ddp_w2"), at(folder.path(), "new"));
    let layout =
        ["--mesh", "dp=2,tp=2", "--rule", "*down.weight*=S(0),S(1)", "--rule", "*.weight*=R,S(0)", "--include", "model.*weight"];
    check("relayout", Some(folder.path()), &[&["relayout", &source, &to], &layout[..]].concat());
    check("relayout_result", Some(folder.path()), &["ls", &to]);
    fine(&["diff", &source, &to, "--include", "model.*weight"]);
    // What was cut for the mesh lies together: so small, a load reads it with one request a file, what is between included.
    let plan = json(&[&["plan", &to, "--json"], &layout[..]].concat());
    let ranks = plan["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4);
    assert!(ranks.iter().all(|rank| rank["reads"] == rank["files"]), "{plan}");
}

#[test]
fn merge_averages() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (case("torch-2.13/fsdp2_w3"), case("torch-2.13/fsdp2_w4"));
    let to = at(folder.path(), "mean");
    check("merge", Some(folder.path()), &["merge", &one, &two, "-o", &to, "--include", "model.*", "--weights", "3,1"]);
    let value = |path: &str| json(&["show", path, "model.head.weight", "--json"])["stats"]["mean"].as_f64().unwrap();
    let expected = 0.75 * value(&one) + 0.25 * value(&two);
    assert!((value(&to) - expected).abs() < 1e-7, "{} {expected}", value(&to));
    check("merge_different", Some(folder.path()), &["merge", &one, &case("torch-2.13/zoo"), "-o", &at(folder.path(), "no")]);
    check("merge_bad_weights", Some(folder.path()), &["merge", &one, &two, "-o", &at(folder.path(), "no"), "--weights", "1"]);
    assert!(!folder.path().join("no/.metadata").exists());
}

#[test]
fn edit_links_data_and_changes_keys() {
    let folder = tempfile::tempdir().unwrap();
    let source = at(folder.path(), "source");
    copy(&case("torch-2.13/fsdp2_w3"), &source);
    let to = at(folder.path(), "edited");
    check(
        "edit",
        Some(folder.path()),
        &[
            "edit",
            &source,
            &to,
            "--drop",
            "optim.state.*",
            "--rename",
            "^model\\.=net.",
            "--set",
            "step=1000",
            "--set",
            "optim.note=run 7",
        ],
    );
    check("edit_result", Some(folder.path()), &["ls", &to]);
    assert_eq!(fine(&["show", &to, "step"]), "1000\n");
    assert_eq!(fine(&["show", &to, "optim.note"]), "'run 7'\n");
    assert_eq!(run(&["verify", &to]).code, 0, "{}", run(&["verify", &to]));
    fine(&["diff", &source, &to, "--include", "model.*", "--include", "net.*", "--rename", "^model=net"]);
    let links = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).unwrap().nlink()
    };
    assert_eq!(links(&Path::new(&source).join("__0_0.distcp")), 2);
    check("edit_exists", Some(folder.path()), &["edit", &source, &to, "--drop", "model.*"]);
    check("edit_nothing", Some(folder.path()), &["edit", &source, &at(folder.path(), "other")]);
}

/// A copy of a checkpoint, to be damaged.
pub(crate) fn copy(from: &str, to: &str) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), Path::new(to).join(entry.file_name())).unwrap();
    }
}
