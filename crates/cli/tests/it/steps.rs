//! Folders of steps, and checkpoints that lost their metadata.

use std::path::Path;

use crate::command::{case, check, fine, json, run, sorted_entries};
use crate::conversions::copy;

fn folder_of_steps() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (step, name) in ["torch-2.13/fsdp2_w3", "torch-2.13/fsdp2_w4", "torch-2.13/ddp_w2", "torch-2.13/zoo"].iter().enumerate() {
        copy(&case(name), &at(&format!("step_{}", (step + 1) * 100)));
    }
    std::fs::remove_file(folder.path().join("step_400/.metadata")).unwrap();
    std::fs::create_dir(folder.path().join("logs")).unwrap();
    std::fs::write(folder.path().join("logs/today.txt"), "hello").unwrap();
    folder
}

#[test]
fn latest_is_the_newest_complete_one() {
    let folder = folder_of_steps();
    let at = folder.path().to_str().unwrap();
    check("latest", Some(folder.path()), &["latest", at]);
    check("latest_all", Some(folder.path()), &["latest", at, "--all"]);
    let empty = tempfile::tempdir().unwrap();
    check("latest_none", Some(empty.path()), &["latest", empty.path().to_str().unwrap()]);
    assert_eq!(json(&["latest", at, "--json", "--deep"])["latest"]["name"], "step_300");
}

#[test]
fn prune_keeps_what_rules_keep() {
    let folder = folder_of_steps();
    let at = folder.path().to_str().unwrap();
    check("prune_no_rule", Some(folder.path()), &["prune", at]);
    check("prune_dry_run", Some(folder.path()), &["prune", at, "--keep-last", "1", "--grace", "0s", "--dry-run"]);
    assert!(folder.path().join("step_100/.metadata").exists());
    check("prune", Some(folder.path()), &["prune", at, "--keep-last", "1", "--keep-every", "200", "--grace", "0s"]);
    let left = |name: &str| folder.path().join(name).exists();
    assert_eq!((left("step_100"), left("step_200"), left("step_300"), left("logs")), (false, true, true, true));
    check("prune_bad_best", Some(folder.path()), &["prune", at, "--keep-best", "loss"]);
}

#[test]
fn a_path_that_holds_no_run_is_told_apart() {
    let folder = folder_of_steps();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (path, why) in [("step_10", "does not exist"), ("step_100", "is a checkpoint itself")] {
        let path = at(path);
        let prune = ["prune", &path, "--keep-last", "1"];
        for (arguments, code) in [(&["trend", &path][..], 2), (&prune[..], 2), (&["latest", &path][..], 1)] {
            let tried = run(arguments);
            assert!(tried.code == code && tried.stderr.contains(why), "{arguments:?}\n{tried}");
        }
    }
    check("trend_nowhere", Some(folder.path()), &["trend", &at("step_10")]);
    check("trend_of_a_checkpoint", Some(folder.path()), &["trend", &at("step_100")]);
    assert!(folder.path().join("step_100/.metadata").exists());
}

#[test]
fn recover_brings_metadata_back() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("dcp").to_str().unwrap().to_owned();
    fine(&["convert", &case("torch-2.13/fsdp2_w3"), &at, "--to", "dcp", "--ranks", "2"]);
    let before = fine(&["digest", &at]);
    check("recover_nothing", Some(folder.path()), &["recover", &at]);
    std::fs::remove_file(Path::new(&at).join(".metadata")).unwrap();
    check("inspect_unfinished", Some(folder.path()), &["inspect", &at]);
    check("recover_dry_run", Some(folder.path()), &["recover", &at, "--dry-run"]);
    assert!(!Path::new(&at).join(".metadata").exists());
    check("recover", Some(folder.path()), &["recover", &at]);
    assert_eq!(sorted_entries(&fine(&["digest", &at])), sorted_entries(&before));
    // PyTorch's own files have no index to recover from.
    let other = folder.path().join("torch").to_str().unwrap().to_owned();
    copy(&case("torch-2.13/fsdp2_w3"), &other);
    std::fs::remove_file(Path::new(&other).join(".metadata")).unwrap();
    check("recover_foreign", Some(folder.path()), &["recover", &other]);
    assert_eq!(run(&["recover", "/nowhere/at/all"]).code, 2);
}
