//! Folders of steps: the newest that is complete, and which of them go.

use std::path::Path;
use std::time::Duration;

use reshard::steps::{Best, Retention, StepState, StepsOptions, latest, prune, steps};
use reshard::{SaveOptions, Value};

use crate::corpus;
use crate::samples::{save, sound};

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
    options.memory = Some(reshard::steps::StepsMemory::default());
    options.prefix = Some("step-".into());
    assert_eq!(steps(at, &options).unwrap()[0].state, StepState::Valid);
    std::fs::write(folder.path().join("step-1/__0_0.distcp"), b"PK").unwrap();
    assert!(matches!(steps(at, &options).unwrap()[0].state, StepState::Incomplete { .. }));
    std::fs::create_dir(folder.path().join("step-007")).unwrap();
    assert_eq!(steps(at, &options).unwrap().len(), 1);
}
