//! Recovering, editing, folders of steps.

use std::path::Path;
use std::time::Duration;

use reshard::{
    Best, Checkpoint, EditOptions, ErrorKind, Glob, LoadedValue, RecoverOptions, Rename, Retention, SaveOptions, StepState,
    StepsOptions, Value, edit, latest, prune, recover, steps,
};

use crate::corpus;
use crate::layouts::Cut;

fn save(folder: &Path, cut: &Cut, overwrite: bool) {
    let (wholes, values) = corpus::sample();
    let mut options = SaveOptions::default();
    options.overwrite = overwrite;
    corpus::save_state(&wholes, &values, cut, &corpus::local(folder), &options);
}

fn sorted(checkpoint: &Checkpoint) -> Vec<(String, reshard::DigestEntry)> {
    let mut entries: Vec<_> = corpus::digest_of(checkpoint).entries.into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}

fn sound(folder: &Path) {
    let found = reshard::verify_path(folder.to_str().unwrap(), &Default::default(), &Default::default()).unwrap();
    assert!(found.is_sound(), "{:?}", found.findings);
}

#[test]
fn metadata_comes_back_from_data_files_alone() {
    for keep_side in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &corpus::columns(3), false);
        let before = sorted(&corpus::open(folder.path()));
        let store = corpus::local(folder.path());
        assert_eq!(recover(&store, &RecoverOptions::default()).unwrap_err().kind(), ErrorKind::AlreadyExists);
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let side = path.extension().is_some_and(|e| e == "sums");
            if path.ends_with(".metadata") || (side && !keep_side) {
                std::fs::remove_file(path).unwrap();
            }
        }
        let mut look = RecoverOptions::default();
        look.dry_run = true;
        assert!(!recover(&store, &look).unwrap().published);
        assert!(!folder.path().join(".metadata").exists());
        let report = recover(&store, &RecoverOptions::default()).unwrap();
        assert_eq!((report.files.len(), report.ranks, report.keys), (3, 3, 9));
        assert!(report.unused.is_empty() && report.warnings.is_empty(), "{report:?}");
        let found = corpus::open(folder.path());
        assert_eq!(sorted(&found), before);
        assert!(found.has_sidecar());
        assert_eq!(found.entry("model.a").unwrap().path.as_ref().unwrap().len(), 2);
        sound(folder.path());
    }
}

#[test]
fn the_newest_complete_save_is_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let newer = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::rows(2), false);
    save(newer.path(), &corpus::rows(3), false);
    // The newer save lost a rank's file, as when it was killed: the older one is what can be had.
    for (i, from) in [(0, "__0_0.distcp"), (2, "__2_0.distcp")] {
        std::fs::copy(newer.path().join(from), folder.path().join(format!("__{i}_9.newer.distcp"))).unwrap();
    }
    std::fs::write(folder.path().join("__5_0.distcp"), b"cut off").unwrap();
    std::fs::remove_file(folder.path().join(".metadata")).unwrap();
    let report = recover(&corpus::local(folder.path()), &RecoverOptions::default()).unwrap();
    assert_eq!((report.ranks, report.files.len(), report.unused.len()), (2, 2, 3), "{report:?}");
    assert!(report.warnings.iter().any(|w| w.contains("rank 1 left no file")), "{:?}", report.warnings);
    sound(folder.path());
}

#[test]
fn what_cannot_be_recovered_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let store = corpus::local(folder.path());
    assert_eq!(recover(&store, &RecoverOptions::default()).unwrap_err().kind(), ErrorKind::NotFound);
    let (_, case, _) = corpus::cases().into_iter().find(|(name, ..)| name.ends_with("ddp_w2")).unwrap();
    for name in ["__0_0.distcp", "__1_0.distcp"] {
        std::fs::copy(case.join(name), folder.path().join(name)).unwrap();
    }
    let error = recover(&store, &RecoverOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incomplete);
    assert!(error.to_string().contains("__1_0.distcp") && error.to_string().contains("no index"), "{error}");
    // A file of ours that was cut has no index any more, and without it the save is not complete.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::rows(2), false);
    std::fs::remove_file(folder.path().join(".metadata")).unwrap();
    let path = folder.path().join("__1_0.distcp");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = recover(&corpus::local(folder.path()), &RecoverOptions::default()).unwrap_err();
    assert!(error.to_string().contains("__1_0.distcp"), "{error}");
}

#[test]
fn an_edit_links_data_and_changes_only_what_was_asked() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    save(&source, &corpus::columns(2), false);
    let checkpoint = corpus::open(&source);
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.*").unwrap()];
    options.renames = vec![Rename::parse("^model\\.=net.").unwrap()];
    options.set = vec![("name".into(), None, Value::from("another")), ("extra".into(), None, Value::List(vec![Value::from(7)]))];
    let target = folder.path().join("target");
    let report = edit(&checkpoint, &corpus::local(&target), &options).unwrap();
    assert_eq!((report.dropped.len(), report.renamed.len(), report.linked, report.copied), (3, 4, 2, 0), "{report:?}");
    let found = corpus::open(&target);
    let (before, after) = (corpus::digest_of(&checkpoint), corpus::digest_of(&found));
    assert_eq!(after.entries.len(), 7);
    for key in ["a", "b", "scalar", "empty"] {
        assert_eq!(before.entries[&format!("model.{key}")], after.entries[&format!("net.{key}")]);
    }
    assert_eq!(found.read_value("name").unwrap(), LoadedValue::Plain(Value::from("another")));
    assert_eq!(found.read_value("extra").unwrap(), LoadedValue::Plain(Value::List(vec![Value::from(7)])));
    sound(&target);
    // The source is untouched, and a second edit to the same path is refused.
    sound(&source);
    assert_eq!(edit(&checkpoint, &corpus::local(&target), &options).unwrap_err().kind(), ErrorKind::AlreadyExists);
    options.renames = vec![Rename::parse("^model.*=x").unwrap()];
    assert!(
        edit(&checkpoint, &corpus::local(&folder.path().join("third")), &options).unwrap_err().to_string().contains("two keys")
    );
}

#[test]
fn what_pytorch_wrote_can_be_edited() {
    let (_, case, _) = corpus::cases().into_iter().find(|(name, ..)| name == "torch-2.13/zoo").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for entry in std::fs::read_dir(case).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), source.join(entry.file_name())).unwrap();
    }
    let mut options = EditOptions::default();
    options.set = vec![("plain.int".into(), None, Value::from(8))];
    let target = folder.path().join("target");
    edit(&corpus::open(&source), &corpus::local(&target), &options).unwrap();
    assert_eq!(corpus::open(&target).value("plain.int").unwrap(), Value::from(8));
    sound(&target);
}

/// All files of a folder, by name.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_edited_checkpoint_is_recovered_as_edited() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    save(&source, &corpus::columns(2), false);
    let mut drops = EditOptions::default();
    drops.drop = vec![Glob::new("optim.*").unwrap()];
    drops.renames = vec![Rename::parse("^model\\.=net.").unwrap()];
    let mut sets = EditOptions::default();
    sets.set = vec![("name".into(), None, Value::from("another"))];
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    edit(&corpus::open(&source), &corpus::local(&first), &drops).unwrap();
    edit(&corpus::open(&first), &corpus::local(&second), &sets).unwrap();
    for target in [&first, &second] {
        let digest = sorted(&corpus::open(target));
        let store = corpus::local(target);
        std::fs::remove_file(target.join(".metadata")).unwrap();
        let report = recover(&store, &RecoverOptions::default()).unwrap();
        assert!(report.unused.is_empty() && report.warnings.is_empty(), "{report:?}");
        assert_eq!(sorted(&corpus::open(target)), digest);
        sound(target);
        // Without its note nothing tells what the edit did: the keys before it do not come back by themselves.
        std::fs::remove_file(target.join(".metadata")).unwrap();
        let note = names(target).into_iter().find(|name| name.ends_with(".edit")).unwrap();
        let bytes = std::fs::read(target.join(&note)).unwrap();
        let mut damaged = bytes.clone();
        damaged[40] ^= 1;
        std::fs::write(target.join(&note), &damaged).unwrap();
        let error = recover(&store, &RecoverOptions::default()).unwrap_err();
        assert!(error.kind() == ErrorKind::Incomplete && error.to_string().contains("it was edited"), "{error}");
        std::fs::remove_file(target.join(&note)).unwrap();
        let error = recover(&store, &RecoverOptions::default()).unwrap_err();
        assert!(error.kind() == ErrorKind::Incomplete && error.to_string().contains("it was edited"), "{error}");
        let mut undo = RecoverOptions::default();
        undo.undo_edits = true;
        let report = recover(&store, &undo).unwrap();
        assert!(report.warnings.iter().any(|w| w.contains("undone")), "{report:?}");
        assert_eq!(sorted(&corpus::open(target)), sorted(&corpus::open(&source)));
    }
}

#[test]
fn a_lost_file_of_an_edited_checkpoint_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    save(&source, &corpus::columns(2), false);
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.*").unwrap()];
    edit(&corpus::open(&source), &corpus::local(&target), &options).unwrap();
    std::fs::remove_file(target.join(".metadata")).unwrap();
    std::fs::remove_file(target.join("__1_0.distcp")).unwrap();
    let error = recover(&corpus::local(&target), &RecoverOptions::default()).unwrap_err();
    assert!(error.to_string().contains("__1_0.distcp"), "{error}");
}

#[test]
fn a_prune_leaves_the_note_of_an_edit() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    save(&source, &corpus::rows(2), false);
    let steps = folder.path().join("steps");
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.*").unwrap()];
    edit(&corpus::open(&source), &corpus::local(&steps.join("step_1")), &options).unwrap();
    let before = names(&steps.join("step_1"));
    let mut rules = Retention::default();
    rules.last = Some(1);
    rules.grace = Duration::ZERO;
    prune(steps.to_str().unwrap(), &rules, false, &self::options()).unwrap();
    assert_eq!(names(&steps.join("step_1")), before);
}

fn options() -> StepsOptions {
    StepsOptions::default()
}

fn metric_step(folder: &Path, number: u64, loss: f64) {
    let (mut wholes, _) = corpus::sample();
    wholes.truncate(1);
    let values = [("loss".to_owned(), Value::from(loss))];
    let store = corpus::local(&folder.join(format!("step_{number}")));
    corpus::save_state(&wholes, &values, &corpus::rows(2), &store, &SaveOptions::default());
}

#[test]
fn the_newest_valid_step_is_found_and_never_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    assert!(latest(path, &options()).unwrap().is_none());
    for (number, loss) in [(100, 0.5), (200, 0.1), (300, 0.4), (1000, 0.3)] {
        metric_step(folder.path(), number, loss);
    }
    std::fs::create_dir(folder.path().join("logs")).unwrap();
    std::fs::write(folder.path().join("logs/9999.txt"), b"not a checkpoint").unwrap();
    assert_eq!(latest(path, &options()).unwrap().unwrap().name, "step_1000");
    // A killed save: newer, without metadata. A lost file: newer, not valid.
    metric_step(folder.path(), 2000, 0.0);
    std::fs::remove_file(folder.path().join("step_2000/.metadata")).unwrap();
    metric_step(folder.path(), 3000, 0.0);
    std::fs::remove_file(folder.path().join("step_3000/__1_0.distcp")).unwrap();
    assert_eq!(latest(path, &options()).unwrap().unwrap().name, "step_1000");
    let all = steps(path, &options()).unwrap();
    let valid: Vec<&str> = all.iter().filter(|s| s.state == StepState::Valid).map(|s| s.name.as_str()).collect();
    assert_eq!(valid, ["step_100", "step_200", "step_300", "step_1000"]);

    let mut rules = Retention::default();
    rules.last = Some(1);
    rules.best = Some(Best::new("loss", false, 1));
    let report = prune(path, &rules, true, &options()).unwrap();
    let gone: Vec<&str> = report.steps.iter().filter(|d| !d.keep).map(|d| d.step.name.as_str()).collect();
    // Incomplete ones were changed just now: a save may be under way.
    assert_eq!(gone, ["step_100", "step_300"]);
    assert!(folder.path().join("step_100").exists());
    rules.grace = Duration::ZERO;
    std::fs::write(folder.path().join("step_200/__7_0.distcp"), b"left over").unwrap();
    // Without any grace they stay all the same: a job saves what is newer than the newest valid step.
    let report = prune(path, &rules, true, &options()).unwrap();
    let gone: Vec<&str> = report.steps.iter().filter(|d| !d.keep).map(|d| d.step.name.as_str()).collect();
    assert_eq!(gone, ["step_100", "step_300"]);
    rules.abandoned = true;
    let report = prune(path, &rules, false, &options()).unwrap();
    assert!(report.failed.is_empty() && report.bytes > 0, "{report:?}");
    assert_eq!(report.leftovers, ["step_200/__7_0.distcp"]);
    let mut left: Vec<String> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["logs", "step_1000", "step_200"]);
    sound(&folder.path().join("step_200"));
    rules.last = Some(0);
    rules.best = None;
    prune(path, &rules, false, &options()).unwrap();
    assert!(folder.path().join("step_1000/.metadata").exists());
}

#[test]
fn a_deep_look_finds_damage_that_sizes_do_not_show() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    metric_step(folder.path(), 1, 0.5);
    metric_step(folder.path(), 2, 0.5);
    let file = folder.path().join("step_2/__0_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(latest(path, &options()).unwrap().unwrap().name, "step_2");
    let mut deep = options();
    deep.deep = true;
    assert_eq!(latest(path, &deep).unwrap().unwrap().name, "step_1");
}

/// One changed byte in `.metadata` once made every record resolve to no file at all: the step was called sound, and the good
/// ones were pruned for it.
#[test]
fn a_damaged_step_never_costs_a_good_one() {
    let folder = tempfile::tempdir().unwrap();
    for step in ["step-1", "step-2", "step-3"] {
        save(&folder.path().join(step), &corpus::rows(2), false);
    }
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 3] = [
        ("a field", |step| {
            let path = step.join(".metadata");
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.windows(13).position(|w| w == b"relative_path").unwrap();
            bytes[at] ^= 1;
            std::fs::write(path, bytes).unwrap();
        }),
        ("a file", |step| std::fs::remove_file(step.join("__1_0.distcp")).unwrap()),
        ("a cut", |step| std::fs::write(step.join("__0_0.distcp"), b"PK").unwrap()),
    ];
    let at = folder.path().to_str().unwrap();
    let mut rules = Retention::default();
    rules.last = Some(1);
    rules.grace = Duration::ZERO;
    for (what, damage) in damages {
        let newest = folder.path().join("step-4");
        save(&newest, &corpus::rows(2), true);
        damage(&newest);
        let found = latest(at, &StepsOptions::default()).unwrap().unwrap();
        assert_eq!(found.name, "step-3", "{what}");
        let report = prune(at, &rules, true, &StepsOptions::default()).unwrap();
        let kept: Vec<&str> = report.steps.iter().filter(|d| d.keep).map(|d| d.step.name.as_str()).collect();
        assert_eq!(kept, ["step-3", "step-4"], "{what}");
        std::fs::remove_dir_all(&newest).unwrap();
    }
    prune(at, &rules, false, &StepsOptions::default()).unwrap();
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["step-3"]);
    sound(&folder.path().join("step-3"));
}

#[test]
fn prune_takes_a_checkpoints_own_files_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    for step in ["step-1", "step-2", "step-3"] {
        save(&folder.path().join(step), &corpus::solo(), false);
    }
    std::fs::write(folder.path().join("step-1/results.json"), "{}").unwrap();
    // Named like steps, and none of a save's.
    for (name, file, bytes) in [
        ("step-0", "__0_0.distcp", &b"not a record"[..]),
        ("step-00", "model.pt", b"PK\x03\x04"),
        ("step-0000", "log.txt", b"hello"),
    ] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        std::fs::write(folder.path().join(name).join(file), bytes).unwrap();
    }
    // An abandoned save of our own kind.
    std::fs::create_dir(folder.path().join("step-000")).unwrap();
    std::fs::write(folder.path().join("step-000/__0_0.distcp"), b"PK\x03\x04 half a record").unwrap();
    let mut rules = Retention::default();
    rules.last = Some(1);
    rules.grace = Duration::ZERO;
    let report = prune(folder.path().to_str().unwrap(), &rules, false, &StepsOptions::default()).unwrap();
    assert!(report.failed.is_empty(), "{report:?}");
    let mut left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["step-0", "step-00", "step-0000", "step-1", "step-3"]);
    let rest: Vec<_> = std::fs::read_dir(folder.path().join("step-1")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(rest, ["results.json"]);
}

#[test]
fn a_step_that_is_being_saved_again_stays() {
    let folder = tempfile::tempdir().unwrap();
    for step in ["step-1", "step-2"] {
        save(&folder.path().join(step), &corpus::solo(), false);
    }
    std::fs::write(folder.path().join("step-1/__0_0.another.distcp"), b"PK\x03\x04").unwrap();
    let mut rules = Retention::default();
    rules.last = Some(1);
    let at = folder.path().to_str().unwrap();
    let report = prune(at, &rules, false, &StepsOptions::default()).unwrap();
    assert!(report.steps.iter().all(|d| d.keep), "{report:?}");
    sound(&folder.path().join("step-1"));
    rules.grace = Duration::ZERO;
    let held = corpus::local(&folder.path().join("step-1"));
    let lock = held.lock().unwrap();
    assert!(prune(at, &rules, false, &StepsOptions::default()).unwrap().steps.iter().all(|d| d.keep));
    drop(lock);
    prune(at, &rules, false, &StepsOptions::default()).unwrap();
    assert!(!folder.path().join("step-1").exists());
}

#[test]
fn what_was_looked_at_is_remembered_until_files_change() {
    let folder = tempfile::tempdir().unwrap();
    save(&folder.path().join("step-1"), &corpus::solo(), false);
    let at = folder.path().to_str().unwrap();
    let mut options = StepsOptions::default();
    options.memory = Some(reshard::StepsMemory::default());
    options.prefix = Some("step-".into());
    assert_eq!(steps(at, &options).unwrap()[0].state, StepState::Valid);
    std::fs::write(folder.path().join("step-1/__0_0.distcp"), b"PK").unwrap();
    assert!(matches!(steps(at, &options).unwrap()[0].state, StepState::Incomplete { .. }));
    std::fs::create_dir(folder.path().join("step-007")).unwrap();
    assert_eq!(steps(at, &options).unwrap().len(), 1);
}
