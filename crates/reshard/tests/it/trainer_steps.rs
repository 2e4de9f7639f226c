//! Folders of steps as trainers make them: what is the newest, and what may go.

use std::fs;
use std::path::{Path, PathBuf};

use reshard::steps::{Retention, StepState, StepsOptions, latest, prune, steps};
use reshard::{Checkpoint, Error, SaveOptions, SaveState, Solo, Value, save_with};

use crate::corpus;
use crate::layouts::store_at;

fn save(path: &Path) {
    fs::create_dir_all(path).unwrap();
    let mut state = SaveState::new();
    state.insert_value("x", Value::from(1)).unwrap();
    save_with(&Solo, &state, &store_at(path), &SaveOptions::default()).unwrap();
}

/// As accelerate and the transformers Trainer do it.
fn trainer_step(root: &Path, number: u64, last: &str) -> PathBuf {
    let step = root.join(format!("checkpoint-{number}"));
    save(&step.join("pytorch_model_fsdp_0"));
    save(&step.join("optimizer_0"));
    for name in ["scheduler.pt", "rng_state_0.pth", "training_args.bin", last] {
        fs::write(step.join(name), b"x").unwrap();
    }
    step
}

fn rules(last: usize) -> Retention {
    let mut rules = Retention::default();
    rules.last = Some(last);
    rules
}

fn names(root: &Path) -> Vec<String> {
    let mut found: Vec<String> = fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    found
}

#[test]
fn a_step_of_accelerate_is_complete_when_all_its_checkpoints_and_its_last_file_are() {
    for last in ["trainer_state.json", "random_states_0.pkl"] {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for number in [8, 9, 10, 11, 12, 13] {
            trainer_step(root, number, last);
        }
        fs::remove_dir_all(root.join("checkpoint-13/pytorch_model_fsdp_0")).unwrap();
        // Without a model; cut short: before the last file, in the middle of the optimizer, and damaged.
        fs::remove_file(root.join("checkpoint-12").join(last)).unwrap();
        fs::remove_file(root.join("checkpoint-11/optimizer_0/.metadata")).unwrap();
        let model = root.join("checkpoint-10/pytorch_model_fsdp_0/__0_0.distcp");
        fs::write(&model, &fs::read(&model).unwrap()[..10]).unwrap();
        let newest = latest(root.to_str().unwrap(), &StepsOptions::default()).unwrap().unwrap();
        assert_eq!(newest.name, "checkpoint-9");
        let found = steps(root.to_str().unwrap(), &StepsOptions::default()).unwrap();
        let valid: Vec<bool> = found.iter().map(|step| step.state == StepState::Valid).collect();
        assert_eq!(valid, [true, true, false, false, false, false]);
    }
}

#[test]
fn steps_of_accelerate_go_whole_and_what_nobody_knows_stays() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for number in [1, 2, 3] {
        trainer_step(root, number, "trainer_state.json");
    }
    fs::write(root.join("checkpoint-2/tokenizer.json"), b"mine").unwrap();
    let report = prune(root.to_str().unwrap(), &rules(1), true, &StepsOptions::default()).unwrap();
    assert_eq!(report.steps.iter().map(|d| d.keep).collect::<Vec<_>>(), [false, false, true]);
    assert_eq!(names(root), ["checkpoint-1", "checkpoint-2", "checkpoint-3"]);
    let report = prune(root.to_str().unwrap(), &rules(1), false, &StepsOptions::default()).unwrap();
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    assert_eq!(names(root), ["checkpoint-2", "checkpoint-3"]);
    assert_eq!(names(&root.join("checkpoint-2")), ["tokenizer.json"]);
    assert_eq!(names(&root.join("checkpoint-3")).len(), 6);
    let newest = latest(root.to_str().unwrap(), &StepsOptions::default()).unwrap().unwrap();
    assert_eq!(newest.name, "checkpoint-3");
}

#[test]
fn lightnings_folders_are_steps_and_go_with_their_meta_file() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let meta = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/lightning-2.6/fsdp2_w2/checkpoint/meta.pt");
    for name in ["epoch=0-step=5.ckpt", "epoch=0-step=10.ckpt", "epoch=1-step=15-v1.ckpt", "epoch=1-step=20.ckpt", "last.ckpt"] {
        save(&root.join(name));
        fs::copy(&meta, root.join(name).join("meta.pt")).unwrap();
    }
    // Lightning writes it last.
    fs::remove_file(root.join("epoch=1-step=20.ckpt/meta.pt")).unwrap();
    let newest = latest(root.to_str().unwrap(), &StepsOptions::default()).unwrap().unwrap();
    assert_eq!((newest.name.as_str(), newest.number), ("epoch=1-step=15-v1.ckpt", Some(15)));
    // Over the engine it is there first. Neither with data beside it nor alone is it a checkpoint.
    for data in [true, false] {
        let killed = root.join("epoch=1-step=25.ckpt");
        save(&killed);
        fs::copy(&meta, killed.join("meta.pt")).unwrap();
        fs::remove_file(killed.join(".metadata")).unwrap();
        if !data {
            fs::remove_file(killed.join("__0_0.distcp")).unwrap();
        }
        let error = Checkpoint::open(killed.to_str().unwrap()).unwrap_err();
        assert!(matches!(error, Error::Incomplete { .. }), "{error}");
        let newest = latest(root.to_str().unwrap(), &StepsOptions::default()).unwrap().unwrap();
        assert_eq!(newest.number, Some(15));
        fs::remove_dir_all(killed).unwrap();
    }
    prune(root.to_str().unwrap(), &rules(1), false, &StepsOptions::default()).unwrap();
    assert_eq!(names(root), ["epoch=1-step=15-v1.ckpt", "epoch=1-step=20.ckpt", "last.ckpt"]);
}

#[test]
fn torchtitans_steps_are_found_and_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for number in [5, 10, 15] {
        save(&root.join(format!("step-{number}")));
    }
    prune(root.to_str().unwrap(), &rules(2), false, &StepsOptions::default()).unwrap();
    assert_eq!(names(root), ["step-10", "step-15"]);
    assert_eq!(latest(root.to_str().unwrap(), &StepsOptions::default()).unwrap().unwrap().name, "step-15");
}

/// A bit that no length shows.
fn turn_a_bit(step: &Path) {
    let file = step.join("__0_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    bytes[1000] ^= 1;
    fs::write(&file, bytes).unwrap();
}

#[test]
fn a_step_is_read_whole_and_stays_before_older_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (mut wholes, _) = corpus::sample();
    wholes.truncate(1);
    for number in [1, 2, 3] {
        let store = corpus::local(&root.join(format!("step-{number}")));
        corpus::save_state(&wholes, &[], &corpus::rows(2), &store, &SaveOptions::default());
    }
    turn_a_bit(&root.join("step-3"));
    let shallow = steps(root.to_str().unwrap(), &StepsOptions::default()).unwrap();
    assert!(shallow.iter().all(|step| step.state == StepState::Valid), "{shallow:?}");
    let mut rules = rules(1);
    rules.fallback = true;
    let report = prune(root.to_str().unwrap(), &rules, false, &StepsOptions::default()).unwrap();
    let kept: Vec<bool> = report.steps.iter().map(|d| d.keep).collect();
    assert_eq!(kept, [false, true, true], "{:?}", report.steps);
    assert_eq!(names(root), ["step-2", "step-3"]);
    // Where nothing is sound, nothing goes.
    turn_a_bit(&root.join("step-2"));
    prune(root.to_str().unwrap(), &rules, false, &StepsOptions::default()).unwrap();
    assert_eq!(names(root), ["step-2", "step-3"]);
}
