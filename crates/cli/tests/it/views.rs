//! Verbs that only look, on checkpoints that PyTorch wrote.

use crate::command::{case, check, fine, reshard, run};

const TP: &str = "torch-2.13/tp_fsdp2_w4";
const FLAT: &str = "torch-2.13/fsdp1_flat_w4";

#[test]
fn inspect_is_one_screen() {
    for (name, at) in [
        ("inspect_tp", TP),
        ("inspect_zoo", "torch-2.15/zoo"),
        ("inspect_flat_optimizer", "torch-2.13/fsdp2_flat_optim_w2"),
        ("inspect_old", "torch-2.5/fsdp1_flat_w4"),
    ] {
        check(name, None, &["inspect", &case(at)]);
        let lines = fine(&["inspect", &case(at)]).lines().count();
        assert!(lines <= 44, "{at}: {lines} lines are no screen");
    }
}

#[test]
fn ls_lists_sorts_and_draws_trees() {
    check("ls", None, &["ls", &case(TP), "model.*"]);
    check("ls_by_size", None, &["ls", &case("torch-2.13/zoo"), "--sort", "size"]);
    check("ls_tree", None, &["ls", "--tree", &case(FLAT)]);
    check("ls_tree_depth", None, &["ls", "--tree", "--depth", "2", &case(TP)]);
    check("ls_nothing_fits", None, &["ls", &case(TP), "nothing*"]);
}

#[test]
fn show_has_values_statistics_and_places() {
    let zoo = case("torch-2.13/zoo");
    check("show_tensor", None, &["show", &case(TP), "model.blocks.0.down.weight"]);
    check("show_slice", None, &["show", &zoo, "tensors.cube", "--slice", "0:2,-1,:3"]);
    check("show_value", None, &["show", &zoo, "plain.str"]);
    check("show_no_such_key", None, &["show", &zoo, "plain.strr"]);
    check("show_bad_slice", None, &["show", &zoo, "tensors.cube", "--slice", "0:2:3"]);
    check("show_slice_of_value", None, &["show", &zoo, "plain.int", "--slice", "0"]);
    check("show_empty", None, &["show", &zoo, "tensors.empty"]);
    for dtype in ["float16", "bfloat16", "int8", "uint64", "bool", "complex128", "float8_e4m3fn", "float8_e5m2"] {
        let shown = fine(&["show", &zoo, &format!("tensors.dtype_{dtype}")]);
        assert!(shown.contains(dtype) && shown.contains("[0:9, 0:11]"), "{shown}");
    }
}

#[test]
fn statistics_are_those_of_the_values_shown() {
    let shown = crate::command::json(&["show", &case("torch-2.13/zoo"), "tensors.dtype_float64", "--json", "--slice", ":3,1:4"]);
    let rows = shown["values"].as_array().unwrap();
    let values: Vec<f64> = rows.iter().flat_map(|row| row.as_array().unwrap()).map(|v| v.as_f64().unwrap()).collect();
    assert_eq!((rows.len(), values.len()), (3, 9));
    let mean = values.iter().sum::<f64>() / 9.0;
    assert!((shown["stats"]["mean"].as_f64().unwrap() - mean).abs() < 1e-9);
    assert_eq!(shown["stats"]["max"].as_f64().unwrap(), values.iter().copied().fold(f64::MIN, f64::max));
}

#[test]
fn verify_and_diff_tell_what_they_found() {
    check("verify", None, &["verify", &case(TP)]);
    check("verify_quick", None, &["verify", "--quick", &case("torch-2.5/zoo")]);
    check("diff_same", None, &["diff", &case(TP), &case(TP)]);
    check("diff_formats_of_values", None, &["diff", &case(TP), &case("torch-2.13/fsdp2_w4"), "--include", "model.*"]);
    check(
        "diff_within_tolerance",
        None,
        &["diff", &case(TP), &case("torch-2.13/fsdp2_w4"), "--include", "model.*", "--tolerance", "1e-5"],
    );
    check(
        "diff_shapes_only",
        None,
        &["diff", &case(TP), &case("torch-2.13/zoo"), "--shapes-only", "--include", "*scale*", "--include", "plain.*"],
    );
    check("diff_bad_tolerance", None, &["diff", &case(TP), &case(TP), "--tolerance", "NaN"]);
}

#[test]
fn plan_is_a_dry_run() {
    check(
        "plan",
        None,
        &[
            "plan",
            &case(TP),
            "--mesh",
            "dp=2,tp=3",
            "--rule",
            "*norm*=R,S(0)",
            "--rule",
            "*.weight=S(0),S(1)",
            "--include",
            "model.*.weight",
        ],
    );
    check("plan_bad_rule", None, &["plan", &case(TP), "--mesh", "dp=2,tp=3", "--rule", "*.weight=S(0)"]);
    check("plan_bad_mesh", None, &["plan", &case(TP), "--mesh", "dp=x"]);
}

#[test]
fn digests_are_json() {
    check("digest", None, &["digest", &case("torch-2.13/zoo"), "plain.*"]);
}

#[test]
fn help_version_and_completions_are_there() {
    check("help", None, &["--help"]);
    check("usage_error", None, &["inspect"]);
    check("unknown_verb", None, &["inspekt", "x"]);
    let version = fine(&["--version"]);
    for fact in ["reshard ", "commit:", "target:", "compiler:", "formats:", "stores:"] {
        assert!(version.contains(fact), "{version}");
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = fine(&["completions", shell]);
        assert!(script.contains("relayout") && script.contains("max-shard-size"), "{shell}");
    }
    assert!(fine(&["man"]).contains(".TH reshard 1"));
    let folder = tempfile::tempdir().unwrap();
    fine(&["man", folder.path().to_str().unwrap()]);
    let pages = std::fs::read_dir(folder.path()).unwrap().count();
    assert!(pages >= 18, "{pages} manual pages");
}

#[test]
fn every_verb_has_help() {
    let help = fine(&["--help"]);
    let verbs = help.lines().skip_while(|l| !l.starts_with("Commands:")).skip(1).take_while(|l| !l.is_empty());
    // Lines that only go on with the words of the one before start further in.
    let verbs = verbs.filter(|line| !line.starts_with("   "));
    let mut count = 0;
    for verb in verbs.filter_map(|line| line.split_whitespace().next()).filter(|verb| *verb != "help") {
        assert!(fine(&["help", verb]).contains("Usage: reshard"), "{verb}");
        assert!(fine(&[verb, "--help"]).contains("Usage: reshard"), "{verb}");
        count += 1;
    }
    assert!(count >= 18, "{count} verbs");
}

#[test]
fn colors_are_for_eyes_only() {
    let plain = run(&["inspect", &case(TP)]);
    assert!(!plain.stdout.contains('\u{1b}'));
    let painted = run(&["inspect", &case(TP), "--color", "always"]);
    assert!(painted.stdout.contains("\u{1b}[1m"));
    let refused = reshard(&["inspect", &case(TP), "--color", "auto"]).env("NO_COLOR", "1").output().unwrap();
    assert!(!refused.stdout.contains(&0x1b));
    let failed = run(&["inspect", "/nowhere", "--color", "always"]);
    assert!(failed.stderr.starts_with("\u{1b}[1;31merror:\u{1b}[0m"), "{failed}");
}

#[test]
fn quiet_means_data_and_errors_alone() {
    assert_eq!(run(&["ls", &case(TP), "-q"]).stderr, "");
    assert_ne!(run(&["ls", &case(TP)]).stderr, "");
}
