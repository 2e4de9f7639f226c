//! What is wrong with runs as people train them: several optimizers, many groups, steps that were damaged.

use std::path::Path;

use reshard::Value;
use reshard::health::{HealthOptions, health};
use reshard::select::Selection;
use reshard::steps::{FirstBad, Trend, TrendOptions, trend};

use crate::corpus;
use crate::health::{floats, found, save, wave};
use crate::layouts::Whole;

/// AdamW's state of parameters.
fn state(root: &str, params: &[&str], step: f32, second: impl Fn(&str) -> f32) -> Vec<Whole> {
    let mut all = Vec::new();
    for param in params {
        let key = |slot: &str| format!("{root}.state.{param}.{slot}");
        let v = second(param);
        all.push(floats(&key("step"), &[], move |_| step));
        all.push(floats(&key("exp_avg"), &[8, 8], move |i| wave(i) * v.abs().sqrt() * 1e-3));
        all.push(floats(&key("exp_avg_sq"), &[8, 8], move |_| v));
    }
    all
}

fn group(root: &str, number: usize, lr: f64, params: &[&str]) -> Vec<(String, Value)> {
    let key = |option: &str| format!("{root}.param_groups.{number}.{option}");
    let names = Value::List(params.iter().map(|param| Value::from(*param)).collect());
    let mut all = vec![(key("lr"), Value::from(lr)), (key("params"), names)];
    // As many options as an optimizer has.
    all.extend((0..10).map(|i| (key(&format!("option_{i}")), Value::from(false))));
    all
}

fn save_all(at: &Path, wholes: &[Whole], values: &[(String, Value)]) {
    let values: Vec<(&str, Value)> = values.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    save(at, wholes, &values);
}

fn rules(at: &Path) -> Vec<(&'static str, String)> {
    found(at, |_| ()).into_iter().map(|(rule, _, key)| (rule, key)).collect()
}

#[test]
fn every_optimizer_is_looked_at_and_knows_its_own_weights() {
    let folder = tempfile::tempdir().unwrap();
    let mut wholes = vec![floats("gen.w", &[8, 8], wave), floats("disc.w", &[8, 8], |i| wave(i) * 1e-4)];
    wholes.extend(state("optim_gen", &["w"], 5.0, |_| 0.25));
    wholes.extend(state("optim_disc", &["w"], 5.0, |_| -0.25));
    let values = [group("optim_gen", 0, 1e-2, &["w"]), group("optim_disc", 0, 1.0, &["w"])].concat();
    save_all(folder.path(), &wholes, &values);
    let negative = ("negative-second-moment", "optim_disc.state.w.exp_avg_sq".to_owned());
    assert_eq!(rules(folder.path()), [("large-update", "disc.w".to_owned()), negative]);
    let report = health(&corpus::open(folder.path()), &HealthOptions::default()).unwrap();
    let weights: Vec<_> =
        report.optimizers.iter().map(|found| (found.root.as_str(), found.params[0].weights.as_deref())).collect();
    assert_eq!(weights, [("optim_gen.", Some("gen.w")), ("optim_disc.", Some("disc.w"))]);
}

#[test]
fn every_group_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let params: Vec<String> = (0..40).map(|i| format!("w{i}")).collect();
    let names: Vec<&str> = params.iter().map(String::as_str).collect();
    let mut wholes: Vec<Whole> = params.iter().map(|name| floats(&format!("model.{name}"), &[8, 8], wave)).collect();
    wholes.extend(state("optim", &names[..39], 5.0, |_| 0.25));
    let groups = names.iter().enumerate().flat_map(|(i, name)| group("optim", i, if i == 38 { 500.0 } else { 1e-3 }, &[name]));
    save_all(folder.path(), &wholes, &groups.collect::<Vec<_>>());
    assert_eq!(rules(folder.path()), [("large-update", "model.w38".to_owned()), ("no-state", "w39".to_owned())]);
}

#[test]
fn a_fresh_optimizer_is_not_dead_and_other_optimizers_moments_are_judged() {
    let folder = tempfile::tempdir().unwrap();
    let (fresh, old) = (folder.path().join("fresh"), folder.path().join("old"));
    let weights = || vec![floats("model.a", &[8, 8], wave), floats("model.b", &[8, 8], wave)];
    for (at, step) in [(&fresh, 1.0), (&old, 9.0)] {
        let wholes = [weights(), state("optim", &["a", "b"], step, |_| 0.0)].concat();
        save_all(at, &wholes, &group("optim", 0, 1e-3, &["a", "b"]));
    }
    assert_eq!(rules(&fresh), []);
    assert_eq!(rules(&old).len(), 2, "after nine steps without a gradient it is");
    let factored = folder.path().join("factored");
    let slots = [
        floats("optim.state.a.row_var", &[8], |_| -1.0),
        floats("optim.state.b.variance", &[8, 8], |_| 1e12),
        floats("optim.state.a.step", &[], |_| -3.0),
        floats("optim.state.b.step", &[], |_| 5.0),
    ];
    save_all(&factored, &[weights(), slots.to_vec()].concat(), &group("optim", 0, 1e-3, &["a", "b"]));
    let expected = [
        ("large-second-moment", "optim.state.b.variance"),
        ("negative-second-moment", "optim.state.a.row_var"),
        ("steps-differ", "optim.state"),
    ];
    assert_eq!(rules(&factored), expected.map(|(rule, key)| (rule, key.to_owned())));
}

#[test]
fn what_is_not_trained_is_no_weight_and_what_is_tied_has_state() {
    let folder = tempfile::tempdir().unwrap();
    let named = folder.path().join("named");
    let mut wholes = vec![
        floats("model.a.weight", &[8, 8], wave),
        floats("model.codebook.usage", &[8, 8], |_| 1e6),
        // Frozen, and a weight by its name.
        floats("model.frozen.weight", &[8, 8], |_| 1e6),
    ];
    wholes.extend(state("optim", &["a.weight"], 5.0, |_| 0.25));
    save_all(&named, &wholes, &group("optim", 0, 1e-3, &["a.weight"]));
    let large = ("large-weight", "model.frozen.weight".to_owned());
    assert_eq!(rules(&named), [("constant-weight", "model.frozen.weight".to_owned()), large]);
    let unnamed = folder.path().join("unnamed");
    let mut wholes = vec![floats("model.embed", &[8, 8], wave), floats("model.head", &[8, 8], wave)];
    wholes.push(floats("model.other", &[8, 8], |i| wave(i + 1)));
    wholes.extend(state("optim", &["embed"], 5.0, |_| 0.25));
    save_all(&unnamed, &wholes, &[("optim.param_groups.0.lr".to_owned(), Value::from(1e-3))]);
    assert_eq!(rules(&unnamed), [("no-state", "model.other".to_owned())]);
}

#[test]
fn patterns_that_fit_nothing_and_folders_without_steps_are_no_verdict() {
    let folder = tempfile::tempdir().unwrap();
    save(&folder.path().join("step_1"), &[floats("model.w", &[4, 4], wave)], &[]);
    let mut options = HealthOptions::default();
    options.selection = Selection::globs(&["nowhere.*"]).unwrap();
    let error = health(&corpus::open(&folder.path().join("step_1")), &options).unwrap_err();
    assert!(error.to_string().contains("nowhere.*"), "{error}");
    let mut options = TrendOptions::default();
    options.selection = Selection::globs(&["nowhere.*"]).unwrap();
    assert!(trend(folder.path().to_str().unwrap(), &options).is_err());
    assert!(trend(folder.path().join("nope").to_str().unwrap(), &TrendOptions::default()).is_err());
}

/// Key, what it is, since when, and what it was before.
fn told(run: &Trend) -> Vec<(&str, &str, &str, String)> {
    let before = |bad: &FirstBad| match (&bad.fine, &bad.before) {
        (Some(fine), None) => format!("fine in {fine}"),
        (None, Some(before)) => format!("{} in {}", before.what, before.step),
        (fine, before) => format!("{fine:?} {before:?}"),
    };
    run.bad.iter().map(|bad| (bad.key.as_str(), bad.what, bad.first.as_str(), before(bad))).collect()
}

#[test]
fn a_run_is_judged_by_the_rules_of_health_and_what_was_before_is_told_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    for step in 0..8u32 {
        let mut wholes = vec![
            floats("model.attn.causal_mask", &[4, 4], |i| if i % 4 > i / 4 { f32::NEG_INFINITY } else { 0.0 }),
            floats("model.healed.weight", &[4, 4], move |_| if step < 5 { f32::NAN } else { 0.0 }),
            floats("model.grown.weight", &[4, 4], move |i| wave(i) * if step < 3 { 1.0 } else { 1e9 }),
        ];
        if step >= 6 {
            wholes.push(floats("model.new.weight", &[4, 4], |_| f32::NAN));
        }
        save(&folder.path().join(format!("step_{step}")), &wholes, &[]);
    }
    let path = folder.path().to_str().unwrap();
    let run = trend(path, &TrendOptions::default()).unwrap();
    let expected = [
        ("model.grown.weight", "large", "step_3", "fine in step_2".to_owned()),
        ("model.healed.weight", "zero", "step_5", "nan in step_4".to_owned()),
        ("model.new.weight", "nan", "step_6", "absent in step_5".to_owned()),
    ];
    assert_eq!(told(&run), expected);
    let mut options = TrendOptions::default();
    options.limits.parse("large-weight=off").unwrap();
    assert_eq!(told(&trend(path, &options).unwrap()), expected[1..]);
}

#[test]
fn a_step_whose_data_are_damaged_is_left_out_and_named() {
    let folder = tempfile::tempdir().unwrap();
    for step in 0..8u32 {
        let dead = floats("model.w", &[64, 64], move |i| if step < 3 { wave(i) } else { 0.0 });
        save(&folder.path().join(format!("step_{step}")), &[dead], &[("metrics.loss", Value::from(f64::from(step)))]);
    }
    // Its bytes say that the tensor is fine; its checksums say that they are not what was saved.
    let damaged = folder.path().join("step_3");
    for entry in std::fs::read_dir(&damaged).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "distcp") {
            let mut bytes = std::fs::read(&file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle - 100..middle].fill(0x3d);
            std::fs::write(&file, bytes).unwrap();
        }
    }
    let path = folder.path().to_str().unwrap();
    for numbers in [false, true] {
        let mut options = TrendOptions::default();
        options.numbers = numbers;
        let run = trend(path, &options).unwrap();
        assert_eq!(told(&run), [("model.w", "zero", "step_4", "fine in step_2".to_owned())]);
        assert_eq!((run.steps.len(), run.skipped[0].0.as_str()), (7, "step_3"));
        assert!(run.skipped[0].1.contains("checksum"), "{:?}", run.skipped);
    }
}

#[cfg(unix)]
#[test]
fn steps_that_are_links_are_followed_when_asked_to_and_named_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    for step in 0..4u32 {
        let sick = floats("model.w", &[4, 4], move |i| if step < 2 { wave(i) } else { f32::NAN });
        save(&run.join(format!("step_{step}")), &[sick], &[]);
    }
    for step in [2, 3] {
        std::fs::rename(run.join(format!("step_{step}")), folder.path().join(format!("moved_{step}"))).unwrap();
        std::os::unix::fs::symlink(format!("../moved_{step}"), run.join(format!("step_{step}"))).unwrap();
    }
    let path = run.to_str().unwrap();
    let mut options = TrendOptions::default();
    let found = trend(path, &options).unwrap();
    let left_out: Vec<&str> = found.skipped.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((left_out, told(&found)), (vec!["step_2", "step_3"], vec![]));
    options.steps.store.follow_symlinks = true;
    let found = trend(path, &options).unwrap();
    assert_eq!(told(&found), [("model.w", "nan", "step_2", "fine in step_1".to_owned())]);
    assert_eq!(reshard::steps::latest(path, &options.steps).unwrap().unwrap().name, "step_3");
    // What they point to is somebody else's.
    let mut retention = reshard::steps::Retention::default();
    retention.last = Some(1);
    reshard::steps::prune(path, &retention, false, &options.steps).unwrap();
    assert!(folder.path().join("moved_2/.metadata").exists() && run.join("step_2/.metadata").exists());
}
