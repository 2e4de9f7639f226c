//! What the numbers of a checkpoint say: rules, the optimizer's moments, a run's steps.

use std::path::Path;

use indexmap::IndexMap;
use reshard::diff::{DiffOptions, KeyDifference, diff};
use reshard::health::{HealthOptions, health};
use reshard::numbers::{ScanOptions, StatsOptions, scan, stats};
use reshard::select::Selection;
use reshard::steps::{TrendOptions, trend};
use reshard::verify::Severity;
use reshard::{Control, DType, SaveOptions, Value};

use crate::corpus;
use crate::layouts::Whole;

pub(crate) fn floats(key: &str, shape: &[u64], number: impl Fn(usize) -> f32) -> Whole {
    let mut whole = Whole::new(key, DType::Float32, shape, 1);
    let count = shape.iter().product::<u64>() as usize;
    whole.bytes = (0..count).flat_map(|i| number(i).to_le_bytes()).collect();
    whole
}

pub(crate) fn wave(i: usize) -> f32 {
    ((i * 7919) % 1009) as f32 / 1009.0 - 0.5
}

pub(crate) fn save(at: &Path, wholes: &[Whole], values: &[(&str, Value)]) {
    let values: Vec<(String, Value)> = values.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
    corpus::save_state(wholes, &values, &corpus::rows(2), &corpus::local(at), &SaveOptions::default());
}

pub(crate) fn found(at: &Path, change: impl FnOnce(&mut HealthOptions)) -> Vec<(&'static str, Severity, String)> {
    let mut options = HealthOptions::default();
    change(&mut options);
    let report = health(&corpus::open(at), &options).unwrap();
    assert!(report.checked.numbers && !report.checked.checksums);
    assert_eq!(report.is_healthy(), !report.findings.iter().any(|finding| finding.severity == Severity::Error));
    assert!(report.findings.is_sorted_by_key(|finding| finding.severity));
    let mut found: Vec<_> = report.findings.into_iter().map(|finding| (finding.rule, finding.severity, finding.key)).collect();
    found.sort();
    found
}

#[test]
fn a_model_that_is_sound_as_bytes_and_sick_as_numbers_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let wholes = [
        floats("model.fine.weight", &[16, 8], wave),
        floats("model.norm.bias", &[16], |_| 0.0),
        floats("model.nan.weight", &[16, 8], |i| if i == 77 { f32::NAN } else { wave(i) }),
        floats("model.inf.weight", &[16, 8], |i| if i == 3 { f32::NEG_INFINITY } else { wave(i) }),
        floats("model.zero.weight", &[16, 8], |_| 0.0),
        floats("model.large.weight", &[16, 8], |i| wave(i) * 1e6),
        floats("model.flat.weight", &[16, 8], |_| 0.25),
        floats("model.tiny.weight", &[16, 8], |i| (wave(i) + 0.6) * 1e-39),
    ];
    save(folder.path(), &wholes, &[]);
    let key = |rule: &str| format!("model.{rule}.weight");
    let (error, warning) = (Severity::Error, Severity::Warning);
    assert_eq!(
        found(folder.path(), |_| ()),
        [
            ("constant-weight", warning, key("flat")),
            ("inf", error, key("inf")),
            ("large-weight", error, key("large")),
            ("nan", error, key("nan")),
            ("subnormal", warning, key("tiny")),
            ("zero-weight", warning, key("zero")),
        ]
    );
    let less = found(folder.path(), |options| {
        for limit in ["large-weight=1e7", "nan=off", "inf=off", "zero-weight=off", "constant-weight=off", "subnormal=off"] {
            options.limits.parse(limit).unwrap();
        }
    });
    assert_eq!(less, []);
    let some = found(folder.path(), |options| options.selection = Selection::globs(&["*.fine.*", "*.nan.*"]).unwrap());
    assert_eq!(some, [("nan", error, key("nan"))]);
}

fn optimizer(prefix: &str, param: &str, step: f32, first: impl Fn(usize) -> f32, second: impl Fn(usize) -> f32) -> [Whole; 3] {
    [
        floats(&format!("{prefix}state.{param}.exp_avg"), &[16, 8], first),
        floats(&format!("{prefix}state.{param}.exp_avg_sq"), &[16, 8], second),
        floats(&format!("{prefix}state.{param}.step"), &[], move |_| step),
    ]
}

#[test]
fn an_optimizers_moments_are_judged() {
    let folder = tempfile::tempdir().unwrap();
    let mut wholes: Vec<Whole> =
        ["a", "b", "c", "d", "e"].iter().map(|name| floats(&format!("model.{name}.weight"), &[16, 8], |_| 2.0)).collect();
    wholes.extend(optimizer("optim.", "a.weight", 10.0, |_| 0.5, |_| 0.25));
    wholes.extend(optimizer("optim.", "b.weight", 10.0, |_| 0.0, |_| 0.0));
    wholes.extend(optimizer("optim.", "c.weight", 10.0, |_| 0.1, |i| if i == 9 { -1e-3 } else { 0.01 }));
    wholes.extend(optimizer("optim.", "d.weight", 9.0, |_| f32::NAN, |_| 1e9));
    let groups = [
        ("optim.param_groups.0.lr", Value::from(0.5)),
        ("optim.param_groups.0.eps", Value::from(0.0)),
        ("optim.param_groups.0.weight_decay", Value::from(0.1)),
        (
            "optim.param_groups.0.params",
            Value::List(["a", "b", "c", "d", "e"].map(|p| Value::from(format!("{p}.weight").as_str())).to_vec()),
        ),
    ];
    save(folder.path(), &wholes, &groups);
    let mut options = HealthOptions::default();
    options.limits.parse("constant-weight=off").unwrap();
    let mut report = health(&corpus::open(folder.path()), &options).unwrap();
    let mut told: Vec<(&str, &str)> = report.findings.iter().map(|finding| (finding.rule, finding.key.as_str())).collect();
    told.sort();
    assert_eq!(
        told,
        [
            ("dead-parameter", "optim.state.b.weight.exp_avg_sq"),
            ("large-second-moment", "optim.state.d.weight.exp_avg_sq"),
            ("large-update", "model.a.weight"),
            ("large-update", "model.c.weight"),
            ("nan", "optim.state.d.weight.exp_avg"),
            ("negative-second-moment", "optim.state.c.weight.exp_avg_sq"),
            ("no-state", "e.weight"),
            ("steps-differ", "optim.state"),
        ]
    );
    let optimizer = report.optimizers.remove(0);
    assert_eq!((optimizer.groups[0].weight_decay, optimizer.groups[0].params), (Some(0.1), Some(5)));
    // lr · m / √v over the weights: 0.5 · 0.5 / 0.5 / 2.
    let param = optimizer.params.iter().find(|param| param.param == "a.weight").unwrap();
    assert!((param.update_ratio.unwrap() - 0.25).abs() < 1e-12, "{param:?}");
    assert_eq!(param.weights.as_deref(), Some("model.a.weight"));
}

fn rules_of(at: &Path) -> (Vec<(&'static str, String)>, reshard::health::OptimizerHealth) {
    let mut options = HealthOptions::default();
    options.limits.parse("constant-weight=off").unwrap();
    let mut report = health(&corpus::open(at), &options).unwrap();
    let mut told: Vec<_> = report.findings.into_iter().map(|finding| (finding.rule, finding.key)).collect();
    told.sort();
    (told, report.optimizers.remove(0))
}

#[test]
fn moments_are_judged_whatever_a_trainer_calls_them() {
    let folder = tempfile::tempdir().unwrap();
    // Megatron: the slot first, groups of an optimizer inside, buckets of all parameters beside.
    let at = folder.path().join("megatron");
    let wholes = [
        floats("decoder.fc.weight", &[16, 8], |_| 2.0),
        floats("optimizer.state.exp_avg.decoder.fc.weight", &[16, 8], |_| 0.5),
        floats("optimizer.state.exp_avg_sq.decoder.fc.weight", &[16, 8], |i| if i == 3 { -0.25 } else { 0.25 }),
        floats("optimizer.state.param.decoder.fc.weight", &[16, 8], |_| 1e6),
        floats("optimizer.distributed.group_0.bucket_0.exp_avg_sq", &[64], |_| 1e9),
        floats("optimizer.distributed.group_0.bucket_0.param", &[64], |_| 1e6),
    ];
    save(&at, &wholes, &[("optimizer.optimizer.param_groups.0.lr", Value::from(0.5))]);
    let (told, optimizer) = rules_of(&at);
    let key = |slot: &str| format!("optimizer.state.{slot}.decoder.fc.weight");
    assert_eq!(
        told,
        [
            ("large-second-moment", "optimizer.distributed.group_0.bucket_0.exp_avg_sq".to_owned()),
            ("large-update", "decoder.fc.weight".to_owned()),
            ("negative-second-moment", key("exp_avg_sq")),
        ]
    );
    assert_eq!((optimizer.root.as_str(), optimizer.name), ("optimizer.", Some("Adam or AdamW")));
    assert_eq!(optimizer.params[0].weights.as_deref(), Some("decoder.fc.weight"));
    // torchtitan: options of groups with every parameter, and groups told apart by them.
    let at = folder.path().join("torchtitan");
    // A bias that has just left zero moves far, as it should.
    let bias = floats("fc.bias", &[16], |_| 1e-6);
    let mut wholes = vec![floats("fc.weight", &[16, 8], wave), floats("norm.weight", &[16], |_| 1.0), bias];
    let mut values = Vec::new();
    for (param, decay) in [("fc.weight", 0.1), ("norm.weight", 0.0), ("fc.bias", 0.0)] {
        wholes.extend(optimizer_of("optimizer.", param));
        values.push((format!("optimizer.param_groups.{param}.lr"), Value::from(1e-3)));
        values.push((format!("optimizer.param_groups.{param}.weight_decay"), Value::from(decay)));
    }
    let values: Vec<(&str, Value)> = values.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    save(&at, &wholes, &values);
    let (told, optimizer) = rules_of(&at);
    assert_eq!(told, []);
    let groups: Vec<_> = optimizer.groups.iter().map(|group| (group.weight_decay, group.params)).collect();
    assert_eq!(groups, [(Some(0.1), Some(1)), (Some(0.0), Some(2))]);
    let group_of: IndexMap<_, _> = optimizer.params.iter().map(|param| (param.param.as_str(), param.group)).collect();
    assert_eq!(group_of, IndexMap::from([("fc.weight", Some(0)), ("norm.weight", Some(1)), ("fc.bias", Some(1))]));
    let bias = optimizer.params.iter().find(|param| param.param == "fc.bias").unwrap();
    assert!(bias.update_ratio.unwrap() > 1.0, "{bias:?}");
    // Low-bit moments are several tensors; Lightning's best score is infinite before the first one.
    let at = folder.path().join("low-bit");
    let wholes = [
        floats("model.fc.weight", &[16, 8], wave),
        floats("optim.state.fc.weight.exp_avg.scale", &[4], |_| 0.0),
        floats("optim.state.fc.weight.step", &[], |_| 3.0),
        floats("callbacks.best.kth_value", &[], |_| f32::INFINITY),
        floats("model.logit_scale", &[], |_| f32::INFINITY),
    ];
    save(&at, &wholes, &[("optim.param_groups.0.params", Value::List(vec![Value::from("fc.weight")]))]);
    let (told, optimizer) = rules_of(&at);
    assert_eq!(told, [("inf", "model.logit_scale".to_owned())]);
    assert_eq!((optimizer.params.len(), optimizer.params[0].step), (1, Some(3.0)));
}

fn optimizer_of(prefix: &str, param: &str) -> [Whole; 3] {
    optimizer(prefix, param, 10.0, |_| 1e-4, |_| 1e-4)
}

#[test]
fn codes_are_counted_and_compared_as_the_weights_that_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let state = |scale: f32, missing: bool| {
        // 0x38 is one, 0xb8 minus one; the second half of the rows has another scale.
        let mut codes = Whole::new("w", DType::Float8E4M3Fn, &[4, 128], 1);
        codes.bytes = (0..4 * 128).map(|i| if i % 2 == 0 { 0x38 } else { 0xb8 }).collect();
        let mut all = vec![codes, floats("w_scale_inv", &[2, 1], move |i| if i == 0 { scale } else { 2.0 * scale })];
        // Two codes a byte, one (0x2) and minus three (0xd), of which 32 share a scale of 2^(128 - 127).
        let mut packed = Whole::new("e_blocks", DType::UInt8, &[2, 3, 1, 16], 1);
        packed.bytes = vec![0xd2; 2 * 3 * 16];
        let mut scales = Whole::new("e_scales", DType::UInt8, &[2, 3, 1], 1);
        scales.bytes = vec![128; 6];
        all.extend([packed, scales]);
        if missing {
            all.remove(1);
        }
        all
    };
    let at = |name: &str| folder.path().join(name);
    save(&at("a"), &state(0.5, false), &[]);
    save(&at("b"), &state(1.0, false), &[]);
    save(&at("c"), &state(0.5, true), &[]);
    let (a, b) = (corpus::open(&at("a")), corpus::open(&at("b")));
    for verify in [false, true] {
        let mut options = ScanOptions::default();
        options.verify = verify;
        let found = scan(&a, &options).unwrap();
        let (one, packed) = (&found["w"], &found["e_blocks"]);
        assert_eq!((one.elements, one.min, one.max, one.mean), (512, Some(-1.0), Some(1.0), Some(0.0)));
        assert_eq!((packed.elements, packed.min, packed.max), (192, Some(-6.0), Some(2.0)));
        assert_eq!((one, packed), (&stats(&a, "w", &StatsOptions::default()).unwrap(), &found["e_blocks"]));
    }
    // The codes are the same, the weights twice as large.
    let told = diff(&a, &b, &DiffOptions::default()).unwrap();
    let moved: Vec<_> = told
        .different
        .iter()
        .map(|differing| match &differing.difference {
            KeyDifference::Elements(found) => (differing.key.as_str(), found.relative_change),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(moved, [("w", Some(1.0)), ("w_scale_inv", Some(1.0))]);
    // A limit that only the weights can break, and codes that nobody can read.
    let limited = found(&at("b"), |options| options.limits.parse("large-weight=1.5").unwrap());
    let large = |key: &str| ("large-weight", Severity::Error, key.to_owned());
    assert_eq!(limited, [large("e_blocks"), large("w"), large("w_scale_inv")]);
    assert_eq!(found(&at("c"), |_| ()), [("no-scales", Severity::Warning, "w".to_owned())]);
}

#[test]
fn numbers_do_not_depend_on_layout_and_damage_is_no_number() {
    let folder = tempfile::tempdir().unwrap();
    let wholes = [
        floats("w", &[700, 1000], wave),
        Whole::new("b", DType::BFloat16, &[300, 7], 3),
        Whole::new("i", DType::Int64, &[50], 4),
    ];
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    corpus::save_state(&wholes, &[], &corpus::rows(5), &corpus::local(&a), &SaveOptions::default());
    corpus::save_state(&wholes, &[], &corpus::columns(3), &corpus::local(&b), &SaveOptions::default());
    let (a, b) = (scan(&corpus::open(&a), &ScanOptions::default()).unwrap(), corpus::open(&b));
    for verify in [false, true] {
        let mut options = ScanOptions::default();
        options.verify = verify;
        let again = scan(&b, &options).unwrap();
        assert_eq!(scan(&b, &options).unwrap(), again, "the same files give the same numbers");
        for (key, ours) in &a {
            let theirs = &again[key];
            assert_eq!(
                (ours.elements, ours.nans, ours.zeros, ours.min, ours.max),
                (theirs.elements, theirs.nans, theirs.zeros, theirs.min, theirs.max)
            );
            assert_eq!((&ours.percentiles, &ours.magnitudes), (&theirs.percentiles, &theirs.magnitudes));
            for (x, y) in [(ours.mean, theirs.mean), (ours.std, theirs.std), (ours.l2, theirs.l2)] {
                assert!(
                    x == y || (x.unwrap() - y.unwrap()).abs() <= 1e-12 * ours.absmax.unwrap() * ours.elements as f64,
                    "{key}"
                );
            }
            assert_eq!(stats(&b, key, &StatsOptions::default()).unwrap().percentiles, ours.percentiles);
        }
    }
    let data = std::fs::read_dir(folder.path().join("b")).unwrap().map(|e| e.unwrap().path());
    let file =
        data.filter(|path| path.extension().is_some_and(|e| e == "distcp")).max_by_key(|p| p.metadata().unwrap().len()).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    std::fs::write(&file, bytes).unwrap();
    let mut options = ScanOptions::default();
    options.verify = true;
    assert!(scan(&corpus::open(&folder.path().join("b")), &options).is_err());
}

#[test]
fn since_when_a_tensor_is_bad_is_found_by_halving() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = 0;
    for step in 1..=16u32 {
        let at = folder.path().join(format!("step_{}", step * 100));
        let wholes = [
            floats("model.big.weight", &[1000, 100], |i| wave(i) + step as f32),
            floats("model.late.weight", &[16, 8], |i| if step >= 11 && i == 5 { f32::NAN } else { wave(i) }),
            floats("model.always.weight", &[16, 8], |_| 0.0),
            // Begins as zeros, as some slots and adapters do, overflows, and is NaN after that.
            floats("model.first.weight", &[16, 8], |i| match step {
                ..=8 => 0.0,
                9 if i == 3 => f32::INFINITY,
                10.. => f32::NAN,
                _ => wave(i),
            }),
        ];
        bytes += wholes.iter().map(|whole| whole.bytes.len() as u64).sum::<u64>();
        save(&at, &wholes, &[("_reshard.metrics.loss", Value::from(10.0 / f64::from(step)))]);
    }
    std::fs::create_dir(folder.path().join("step_1700")).unwrap();
    let mut options = TrendOptions::default();
    options.control = Control::new();
    let run = trend(folder.path().to_str().unwrap(), &options).unwrap();
    assert_eq!((run.steps.len(), run.steps[15].metrics["loss"]), (16, 0.625));
    let bad: Vec<_> = run.bad.iter().map(|bad| (bad.key.as_str(), bad.what, bad.first.as_str(), bad.fine.as_deref())).collect();
    // The first to go bad is the one to look at first.
    assert_eq!(
        bad,
        [
            ("model.always.weight", "zero", "step_100", None),
            ("model.first.weight", "inf", "step_900", None),
            ("model.late.weight", "nan", "step_1100", Some("step_1000"))
        ]
    );
    let before = run.bad[1].before.as_ref().unwrap();
    assert_eq!((before.step.as_str(), before.what), ("step_800", "zero"));
    // The newest step whole, and of four others some small tensors.
    let read = options.control.done();
    assert!(read < bytes / 16 + 16 * 3 * 512, "{read} of {bytes} bytes");
    options.numbers = true;
    options.selection = Selection::globs(&["model.big.*"]).unwrap();
    let run = trend(folder.path().to_str().unwrap(), &options).unwrap();
    let big = |step: usize| &run.steps[step].tensors["model.big.weight"];
    let moved = run.steps[1].modules["model.big"];
    assert!(run.steps[0].modules.is_empty() && (moved / big(1).change.unwrap() - 1.0).abs() < 1e-9);
    assert!(big(0).change.is_none() && big(15).change.unwrap() < big(1).change.unwrap() && big(1).cosine.unwrap() > 0.9);
}

#[test]
fn how_far_a_tensor_and_its_module_moved_counts_what_did_not() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    // Larger than a block, and changed in one of them alone.
    let big = |change: f32| floats("model.m.big", &[800, 1000], move |i| if i == 799_999 { 3.0 + change } else { 0.5 });
    save(&a, &[big(0.0), floats("model.m.dies", &[4, 4], |_| 1.0), floats("model.n.w", &[4, 4], wave)], &[]);
    let sick = floats("model.n.w", &[4, 4], |i| if i < 2 { f32::NAN } else { wave(i) });
    save(&b, &[big(1.0), floats("model.m.dies", &[4, 4], |_| 0.0), sick], &[]);
    let report = diff(&corpus::open(&a), &corpus::open(&b), &DiffOptions::default()).unwrap();
    let of = |key: &str| match &report.different.iter().find(|differing| differing.key == key).unwrap().difference {
        KeyDifference::Elements(found) => found.clone(),
        other => panic!("{other:?}"),
    };
    let norm = (799_999.0 * 0.25 + 9.0f64).sqrt();
    let big = of("model.m.big");
    assert!(
        (big.first_l2.unwrap() / norm - 1.0).abs() < 1e-9 && (big.relative_change.unwrap() * norm - 1.0).abs() < 1e-9,
        "{big:?}"
    );
    assert!(big.cosine.unwrap() > 0.99999 && big.cosine.unwrap() < 1.0);
    assert!(of("model.m.dies").newly_zero && of("model.n.w").new_nans == 2);
    let modules: Vec<(String, u64, u64)> = report.modules().into_iter().map(|m| (m.module, m.new_nans, m.newly_zero)).collect();
    assert_eq!(modules, [("model.n".to_owned(), 2, 0), ("model.m".to_owned(), 0, 1)]);
}

#[test]
fn what_broke_comes_first_and_an_optimizers_state_last() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let tensors = |moved: f32, bad: f32, step: f32| {
        [
            floats("model.a.weight", &[4, 4], move |i| wave(i) * (1.0 + moved)),
            floats("model.b.weight", &[4, 4], move |i| wave(i) * (1.0 + 3.0 * moved)),
            floats("model.c.weight", &[4, 4], move |i| wave(i) * if i == 3 { bad } else { 1.0 }),
            floats("model.d.weight", &[4, 4], move |i| wave(i) * moved),
            floats("optim.state.a.weight.step", &[], move |_| step),
            floats("optim.state.a.weight.exp_avg", &[4, 4], move |i| wave(i) * step * step),
        ]
    };
    save(&a, &tensors(0.0, 1.0, 1.0), &[("epoch", Value::Int(1i64.into())), ("optim.param_groups.0.lr", Value::Float(0.1))]);
    save(&b, &tensors(0.1, f32::NAN, 9.0), &[("epoch", Value::Int(2i64.into())), ("optim.param_groups.0.lr", Value::Float(0.2))]);
    let report = diff(&corpus::open(&a), &corpus::open(&b), &DiffOptions::default()).unwrap();
    let keys: Vec<&str> = report.gravest_first().into_iter().map(|differing| differing.key.as_str()).collect();
    assert_eq!(
        keys,
        [
            "model.c.weight",
            "epoch",
            "model.d.weight",
            "model.b.weight",
            "model.a.weight",
            "optim.param_groups.0.lr",
            "optim.state.a.weight.exp_avg",
            "optim.state.a.weight.step",
        ]
    );
    let modules: Vec<String> = report.modules().into_iter().map(|change| change.module).collect();
    assert_eq!(modules, ["model.c", "model.d", "model.b", "model.a"], "what an optimizer remembers is no weight");
}

#[test]
fn weights_are_judged_beside_those_of_other_layers() {
    let folder = tempfile::tempdir().unwrap();
    let (small, million) = (1e-3, 1e6);
    let mut wholes = vec![floats("model.norm.weight", &[8], |_| 0.0)];
    for layer in 0..5 {
        let size = if layer == 2 { small * million } else { small };
        wholes.push(floats(&format!("model.layers.{layer}.mlp.weight"), &[8, 8], move |i| wave(i) * size));
        // Nothing is told of biases, which start at zero and go where they like.
        wholes.push(floats(&format!("model.layers.{layer}.mlp.bias"), &[8], move |i| if layer == 1 { wave(i) } else { 1e-9 }));
        wholes.push(floats(&format!("model.layers.{layer}.norm.weight"), &[8], move |_| if layer == 3 { 0.0 } else { 1.0 }));
    }
    save(folder.path(), &wholes, &[]);
    let error = Severity::Error;
    let zero = |key: &str| ("zero-weight", Severity::Warning, key.to_owned());
    assert_eq!(
        found(folder.path(), |_| ()),
        [
            ("outlier-weight", error, "model.layers.2.mlp.weight".to_owned()),
            zero("model.layers.3.norm.weight"),
            zero("model.norm.weight")
        ]
    );
    let less = |options: &mut HealthOptions| {
        options.limits.parse("outlier-weight=1e7").unwrap();
        options.limits.parse("zero-weight=off").unwrap();
    };
    assert_eq!(found(folder.path(), less), []);
}

#[test]
fn what_good_models_hold_breaks_no_rule() {
    let folder = tempfile::tempdir().unwrap();
    let mut wholes = vec![
        // Models whose norms add one to their weights, and blocks that begin as identities, start so.
        floats("model.norm.weight", &[8], |_| 0.0),
        floats("model.attn.causal_mask", &[8, 8], |i| if i % 8 > i / 8 { f32::NEG_INFINITY } else { 0.0 }),
        floats("model.bn.running_var", &[8], |i| 1e6 * (i as f32 + 1.0)),
        floats("model.router.tokens_per_expert", &[8], |_| 3e6),
        floats("model.q.lora_A.default.weight", &[2, 8], wave),
        floats("model.q.lora_B.default.weight", &[8, 2], |_| 0.0),
    ];
    for layer in 0..4 {
        wholes.push(floats(&format!("model.layers.{layer}.norm.weight"), &[8], |_| 0.0));
        wholes.push(floats(&format!("model.layers.{layer}.weight"), &[8, 8], move |i| wave(i) / (layer + 1) as f32));
    }
    save(folder.path(), &wholes, &[("best", Value::Float(f64::INFINITY))]);
    assert_eq!(found(folder.path(), |_| ()), []);
    let sick = [floats("model.mask", &[4, 4], |_| f32::INFINITY), floats("model.nan_mask", &[4, 4], |_| f32::NAN)];
    let other = tempfile::tempdir().unwrap();
    save(other.path(), &sick, &[("metrics", Value::List(vec![Value::Float(1.0), Value::Float(f64::NAN)]))]);
    let key = |key: &str| key.to_owned();
    assert_eq!(
        found(other.path(), |_| ()),
        [
            ("inf", Severity::Error, key("model.mask")),
            ("nan", Severity::Error, key("model.nan_mask")),
            ("nan-value", Severity::Warning, key("metrics"))
        ]
    );
}

#[test]
fn numbers_that_are_not_there_were_not_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &[], &[("step", Value::Int(3i64.into()))]);
    let report = health(&corpus::open(folder.path()), &HealthOptions::default()).unwrap();
    assert!(!report.checked.numbers && report.findings.is_empty() && !report.is_healthy());
}
