//! What the numbers say: `stats`, `verify --numbers`, `diff`, `trend`; and what every verb does with a typo.

use std::path::Path;

use reshard::{SaveState, Solo, save};

use crate::command::{case, check, corpus, fine, json, ran, reshard, run};
use crate::conversions::copy;

fn wave(i: usize) -> f32 {
    ((i * 7919) % 1009) as f32 / 1009.0 - 0.5
}

/// A small model after so many steps; a sick one has NaN in one tensor and nothing but zeros in another.
fn model(at: &Path, step: usize, sick: bool) {
    let drift = step as f32 * 0.01;
    let one: Vec<f32> = (0..128).map(|i| wave(i) + drift).collect();
    let two: Vec<f32> = (0..128).map(|i| if sick && i % 50 == 0 { f32::NAN } else { wave(i + 9) }).collect();
    let three: Vec<f32> = (0..128).map(|i| if sick { 0.0 } else { wave(i + 5) }).collect();
    let (first, second) = ([0.01f32; 128], [1e-4f32; 128]);
    let mut state = SaveState::of(&Solo);
    let mut tensors = vec![("model.one.weight", &one[..]), ("model.two.weight", &two), ("model.three.weight", &three)];
    tensors.push(("optim.state.one.weight.exp_avg", &first));
    tensors.push(("optim.state.one.weight.exp_avg_sq", &second));
    for (key, numbers) in tensors {
        state.tensor(key, &[16, 8], numbers).unwrap();
    }
    for (key, value) in [("lr", 1e-3), ("weight_decay", 0.1), ("eps", 1e-8)] {
        state.value(format!("optim.param_groups.0.{key}"), value).unwrap();
    }
    state.value("_reshard.metrics.loss", 4.0 / step as f64).unwrap();
    save(&Solo, at.to_str().unwrap(), &state).unwrap();
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

#[test]
fn numbers_are_shown_and_judged() {
    let folder = tempfile::tempdir().unwrap();
    let (well, sick) = (folder.path().join("well"), folder.path().join("sick"));
    model(&well, 1, false);
    model(&sick, 2, true);
    check("stats_well", Some(folder.path()), &["stats", &text(&well)]);
    check("stats_sick", Some(folder.path()), &["stats", &text(&sick)]);
    check("stats_rules", None, &["stats", "--rules"]);
    check("verify_numbers", Some(folder.path()), &["verify", &text(&sick), "--numbers"]);
    assert_eq!(run(&["verify", &text(&sick)]).code, 0);
    assert!(fine(&["verify", &text(&well)]).contains("not checked: numbers"));
    let found = json(&["stats", &text(&well), "--json", "--key", "model.one.*"]);
    let one = &found["tensors"]["model.one.weight"];
    assert_eq!((&one["elements"], &one["nans"]), (&128.into(), &0.into()));
    assert!(one["percentiles"]["p50"].is_number() && one["magnitudes"].as_array().unwrap().len() > 2, "{one}");
    assert_eq!(found["checked"], serde_json::json!({"structure": false, "checksums": false, "numbers": true}));
    let nothing = run(&["stats", &text(&well), "--key", "_reshard.*"]);
    assert!(nothing.code == 0 && nothing.stdout.contains("checked: nothing"), "{nothing}");
    assert_eq!(json(&["stats", &text(&well), "--key", "_reshard.*", "--json"])["healthy"], false);
    assert_eq!(run(&["stats", &text(&sick), "--limit", "nan=off"]).code, 0);
    assert_eq!(run(&["stats", &text(&sick), "--limit", "large=3"]).code, 2);
    check("diff_sick", Some(folder.path()), &["diff", &text(&well), &text(&sick), "--include", "model.*"]);
}

#[test]
fn a_verdict_is_the_same_for_readers_that_leave_early() {
    let folder = tempfile::tempdir().unwrap();
    let sick = folder.path().join("step_1");
    model(&sick, 2, true);
    for arguments in [
        vec!["stats", "--json", sick.to_str().unwrap()],
        vec!["verify", "--numbers", "--json", sick.to_str().unwrap()],
        vec!["trend", "--json", folder.path().to_str().unwrap()],
        vec!["stats", sick.to_str().unwrap()],
    ] {
        let mut command = reshard(&arguments);
        let mut running = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null()).spawn().unwrap();
        drop(running.stdout.take());
        assert_eq!(running.wait().unwrap().code(), Some(1), "{arguments:?}");
    }
}

#[test]
fn rules_are_listed_with_the_limits_that_are_set() {
    let told = json(&["stats", "--rules", "--json", "--limit", "large-weight=5", "--limit", "nan=off"]);
    let rule = |name: &str| told["rules"].as_array().unwrap().iter().find(|rule| rule["name"] == name).unwrap().clone();
    assert_eq!(
        (&rule("large-weight")["limit"], &rule("nan")["off"], &rule("inf")["off"]),
        (&5.0.into(), &true.into(), &false.into())
    );
    let text = fine(&["stats", "--rules", "--limit", "nan=off"]);
    assert!(text.lines().any(|line| line.starts_with("nan ") && line.contains("off")), "{text}");
    assert_eq!(run(&["stats", "--rules", "--limit", "large-weight=-1"]).code, 2);
}

#[cfg(unix)]
#[test]
fn a_page_goes_where_a_link_points_and_into_what_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("checkpoint");
    model(&at, 1, false);
    let (link, target, pipe) = (folder.path().join("link.html"), folder.path().join("target.html"), folder.path().join("pipe"));
    std::fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink("target.html", &link).unwrap();
    fine(&["report", &text(&at), "-o", &text(&link)]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    let page = std::fs::read(&target).unwrap();
    assert!(page.starts_with(b"<!"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reading = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).unwrap()
    });
    fine(&["report", &text(&at), "-o", &text(&pipe)]);
    assert_eq!(reading.join().unwrap().len(), page.len());
    assert!(!std::fs::symlink_metadata(&pipe).unwrap().is_file());
}

#[test]
fn a_run_is_shown_with_the_first_bad_step() {
    let folder = tempfile::tempdir().unwrap();
    for step in 1..=6 {
        model(&folder.path().join(format!("step_{step}")), step, step >= 4);
    }
    check("trend", Some(folder.path()), &["trend", &text(folder.path())]);
    let found = run(&["trend", &text(folder.path()), "--numbers", "--key", "model.*", "--json"]);
    assert_eq!(found.code, 1, "{found}");
    let found: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!(found["steps"][5]["metrics"]["loss"].as_f64(), Some(4.0 / 6.0));
    assert!(found["steps"][1]["tensors"]["model.one.weight"]["change"].as_f64().unwrap() > 0.0);
    let bad: Vec<&str> = found["bad"].as_array().unwrap().iter().map(|bad| bad["first"].as_str().unwrap()).collect();
    assert_eq!(bad, ["step_4", "step_4"]);
    check("trend_numbers", Some(folder.path()), &["trend", &text(folder.path()), "--numbers", "--key", "model.*"]);
    assert_eq!(run(&["trend", &text(&folder.path().join("step_1"))]).code, 2);
}

#[test]
fn steps_are_known_by_the_names_that_trainers_give_them() {
    for name in ["checkpoint-", "step-", "step_", "global_step", "iter_000000", "epoch=0-step="] {
        let folder = tempfile::tempdir().unwrap();
        for step in [2, 4, 10] {
            model(&folder.path().join(format!("{name}{step}")), step, step == 10);
        }
        let found = run(&["trend", &text(folder.path()), "--json"]);
        let shown: serde_json::Value = serde_json::from_str(&found.stdout).unwrap_or_else(|_| panic!("{name}: {found}"));
        let steps: Vec<&str> = shown["steps"].as_array().unwrap().iter().map(|step| step["name"].as_str().unwrap()).collect();
        assert_eq!(steps, [2, 4, 10].map(|step| format!("{name}{step}")), "{name}");
        let bad: Vec<&str> = shown["bad"].as_array().unwrap().iter().map(|bad| bad["first"].as_str().unwrap()).collect();
        assert!(!bad.is_empty() && bad.iter().all(|first| *first == steps[2]), "{name}: {shown}");
    }
}

#[test]
fn nothing_is_wider_than_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("a-folder-whose-name-is-rather-long-but-not-too-long");
    copy(&case("torch-2.13/fsdp2_w3"), &text(&at));
    std::fs::remove_file(at.join("__0_0.distcp")).unwrap();
    let sick = folder.path().join("sick");
    model(&sick, 2, true);
    let whole = case("torch-2.13/fsdp2_w3");
    let run = folder.path().join("run");
    for step in 1..=3 {
        model(&run.join(format!("a-step-with-quite-a-long-name-{step}")), step, step == 3);
    }
    let (a, b) = (text(&run.join("a-step-with-quite-a-long-name-1")), text(&run.join("a-step-with-quite-a-long-name-3")));
    let other = text(&folder.path().join("other"));
    let words = [("words", 0.5f32), ("more-words", 0.25)].map(|(name, first)| {
        let numbers = [first, f32::NAN, 3.0, 4.0];
        let mut state = SaveState::of(&Solo);
        for key in ["模型.层.注意力.查询.权重".repeat(4), "e\u{301}".repeat(90), "deep.".repeat(60) + "weight", "x".repeat(300)]
        {
            state.tensor(key, &[2, 2], &numbers).unwrap();
        }
        let at = text(&folder.path().join(name));
        save(&Solo, &at, &state).unwrap();
        at
    });
    for args in [
        vec!["inspect", &words[0]],
        vec!["ls", &words[0]],
        vec!["ls", &words[0], "--tree"],
        vec!["stats", &words[0]],
        vec!["verify", &words[0], "--numbers"],
        vec!["diff", &words[0], &words[1]],
        vec!["plan", &words[0], "--mesh", "dp=2"],
        vec!["trend", &text(&run)],
        vec!["trend", &text(&run), "--numbers"],
        vec!["diff", &a, &b],
        vec!["stats", "--rules"],
        vec!["latest", &text(&run), "--all"],
        vec!["prune", &text(&run), "--keep-last", "1", "--dry-run"],
        vec!["view", "list"],
        vec!["show", &a, "model.one.weight"],
        vec!["relayout", &whole, &other, "--mesh", "dp=2"],
        vec!["help", "convert"],
        vec!["--help"],
        vec!["inspect", &whole],
        vec!["ls", &whole],
        vec!["ls", &whole, "--tree"],
        vec!["verify", &text(&at)],
        vec!["verify", &whole],
        vec!["diff", &whole, &text(&sick)],
        vec!["stats", &whole],
        vec!["stats", &text(&sick)],
        vec!["plan", &whole, "--mesh", "dp=2"],
    ] {
        let shown = ran(&reshard(&args).env("COLUMNS", "80").output().unwrap());
        // A terminal gives Chinese characters two cells, and an accent none of its own.
        let cells = |c: char| if c == '\u{301}' { 0 } else { 1 + usize::from(c >= '\u{2e80}') };
        let is_wide = |line: &&str| line.chars().map(cells).sum::<usize>() > 80;
        for shown in [&shown.stdout, &shown.stderr] {
            let wide: Vec<&str> = shown.lines().filter(is_wide).collect();
            assert!(wide.is_empty(), "{args:?}: {wide:#?}");
        }
        let cut = shown.stdout.replace('…', "");
        assert!(!cut.is_empty() && shown.code <= 1, "{args:?}\n{shown}");
    }
    // What is piped is never cut.
    assert!(!fine(&["ls", &whole]).contains('…'));
}

#[test]
fn long_lists_are_capped_and_say_how_to_see_all() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = SaveState::of(&Solo);
    let names: Vec<String> = (0..300).map(|i| format!("model.{i}.weight")).collect();
    for name in &names {
        state.tensor(name, &[4], &[1f32, 2.0, 3.0, 4.0]).unwrap();
    }
    save(&Solo, folder.path().to_str().unwrap(), &state).unwrap();
    let mut files = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path());
    let file = files.find(|path| path.extension().is_some_and(|e| e == "distcp")).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 8]).unwrap();
    let few = run(&["verify", &text(folder.path())]);
    assert!(few.code == 1 && few.stdout.lines().count() < 60 && few.stdout.contains("--all lists them"), "{few}");
    let all = run(&["verify", &text(folder.path()), "--all"]);
    assert!(all.stdout.lines().count() > 200 && !all.stdout.contains("--all"), "{}", all.stdout.lines().count());
}

#[test]
fn a_pattern_that_fits_nothing_is_an_error_in_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, to) = (case("torch-2.13/fsdp2_w3"), text(&folder.path().join("to")));
    let above = text(Path::new(&whole).parent().unwrap());
    let selecting = ["--include=modeel.*", "--exclude=modeel.*", "--prefix=modeel.", "--rename=^modeel=x"];
    let verbs: [(&[&str], &[&str]); 10] = [
        (&["ls", &whole], &["modeel.*"]),
        (&["digest", &whole], &["modeel.*"]),
        (&["stats", &whole], &["--key=modeel.*"]),
        (&["trend", &above], &["--key=modeel.*"]),
        (&["diff", &whole, &whole], &["--include=modeel.*", "--exclude=modeel.*", "--rename=^modeel=x"]),
        (&["convert", &whole, &to, "--to", "dcp"], &[&selecting[..], &["--cast=modeel.*=bf16"]].concat()),
        (&["relayout", &whole, &to, "--mesh", "dp=2"], &[&selecting[..], &["--rule=modeel.*=S(0)"]].concat()),
        (&["plan", &whole, "--mesh", "dp=2"], &[&selecting[..], &["--rule=modeel.*=S(0)"]].concat()),
        (&["edit", &whole, &to], &["--drop=modeel.*", "--rename=^modeel=x"]),
        (&["merge", &whole, &whole, "--output", &to], &selecting),
    ];
    for (verb, options) in verbs {
        for option in options {
            let tried = run(&[verb, &[option]].concat());
            assert!(tried.code == 2 && tried.stderr.contains("modeel"), "{verb:?} {option}\n{tried}");
            assert!(!Path::new(&to).exists(), "{verb:?} {option}");
        }
    }
    check("typo_key", None, &["show", &whole, "model.head.wieght"]);
    check("typo_glob", None, &["ls", &whole, "model.head.wieght"]);
}

#[test]
fn a_path_that_was_not_quite_meant_is_understood() {
    let folder = tempfile::tempdir().unwrap();
    model(&folder.path().join("runs/step_100"), 1, false);
    let at = |name: &str| text(&folder.path().join(name));
    check("path_one_below", Some(folder.path()), &["inspect", &at("runs")]);
    check("path_typo", Some(folder.path()), &["inspect", &at("runs/step_10")]);
    model(&folder.path().join("runs/step_200"), 1, false);
    check("path_several_below", Some(folder.path()), &["inspect", &at("runs")]);
}

#[test]
fn other_names_of_verbs_and_help_are_understood() {
    let whole = case("torch-2.13/fsdp2_w3");
    for (alias, verb) in [("info", "inspect"), ("cat", "show"), ("hash", "digest")] {
        let key: &[&str] = if verb == "show" { &["model.head.weight"] } else { &[] };
        assert_eq!(fine(&[&[alias, &whole], key].concat()), fine(&[&[verb, &whole], key].concat()), "{alias}");
    }
    for verb in ["recover", "repair", "relayout", "reshard", "stats", "man"] {
        assert!(fine(&["help", verb]).contains("Usage"), "{verb}");
    }
    assert!(fine(&["--help"]).contains("man "));
    assert_eq!(run(&["diff", &whole, &whole, "--atol", "1e-3", "--rtol", "1e-3"]).code, 0);
}

#[test]
fn what_people_type_for_formats_and_old_flags_are_understood() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, at) = (case("torch-2.13/fsdp2_w3"), |name: &str| text(&folder.path().join(name)));
    fine(&["convert", &whole, &at("x.bin"), "--to", "pt"]);
    fine(&["convert", &whole, &at("y.bin"), "--to", "torch"]);
    assert_eq!(fine(&["digest", &at("x.bin")]), fine(&["digest", &at("y.bin")]));
    assert_eq!(run(&["diff", &whole, &at("x.bin"), "--tolerance", "1e-6"]).code, 0);
    // The page: numbers are read unless they are not wanted; a flag of before is still taken.
    for (flags, read) in [(&["--histograms"][..], true), (&[], true), (&["--no-numbers"], false)] {
        let page = at("page.html");
        fine(&[&["report", &whole, "-o", &page][..], flags].concat());
        let page = std::fs::read_to_string(page).unwrap();
        assert_eq!(page.contains(r#""numbers":{"stats""#), read, "{flags:?}");
        assert!(page.contains("fsdp2_w3/checkpoint"), "the title has two parts");
        assert!(!page.contains(r#""state":"healthy""#), "checksums were not compared");
    }
}

#[test]
fn a_page_says_what_is_wrong_and_what_was_not_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let (sick, well, page) = (folder.path().join("sick"), folder.path().join("well"), text(&folder.path().join("page.html")));
    model(&sick, 2, true);
    model(&well, 1, false);
    let state = |args: &[&str]| {
        fine(&[&["report", "-o", &page][..], args].concat());
        let html = std::fs::read_to_string(&page).unwrap();
        let start = html.find(r#"type="application/json">"#).unwrap() + r#"type="application/json">"#.len();
        let data: serde_json::Value = serde_json::from_str(html[start..].split("</script>").next().unwrap()).unwrap();
        data
    };
    let found = state(&[&text(&sick), "--verify"]);
    let health = &found["checkpoint"]["health"];
    assert_eq!((&health["state"], &health["checks"]["checksums"]["state"]), (&"unwell".into(), &"fine".into()), "{health}");
    assert!(health["findings"][0]["text"].as_str().unwrap().starts_with("nan: "), "{health}");
    assert_eq!(state(&[&text(&well), "--verify"])["checkpoint"]["health"]["state"], "warning", "two have no state");
    // Nothing is healthy with a rule off, and the rules are named.
    let off = ["nan=off", "no-state=off", "zero-weight=off"].map(|limit| ["--limit", limit]).concat();
    for of in [&well, &sick] {
        let found = &state(&[&[&text(of), "--verify"][..], &off].concat())["checkpoint"]["health"];
        assert_eq!((&found["state"], &found["checks"]["numbers"]["state"]), (&"partial".into(), &"partial".into()), "{found}");
        assert!(found["checks"]["numbers"]["note"].as_str().unwrap().ends_with("off: nan, zero-weight, no-state"), "{found}");
    }
    assert_eq!(run(&["report", &text(&well), "-o", &page, "--limit", "no-sate=off"]).code, 2);
    let glanced = state(&[&text(&sick), "--no-numbers"]);
    assert_eq!(glanced["checkpoint"]["health"]["state"], "partial");
    let both = state(&[&text(&well), &text(&sick)]);
    assert_eq!((&both["diff"]["name_a"], &both["diff"]["name_b"]), (&"well".into(), &"sick".into()));
    let bad = both["diff"]["changed"].as_array().unwrap().iter().filter(|what| what["newly_bad"].as_u64() > Some(0)).count();
    assert_eq!(bad, 1, "{}", both["diff"]["changed"]);
    assert!(!both["numbers"]["other"].as_object().unwrap().is_empty());
    // What cannot be read is still a page.
    let data =
        std::fs::read_dir(&sick).unwrap().map(|e| e.unwrap().path()).find(|p| p.extension().is_some_and(|e| e == "distcp"));
    std::fs::write(data.unwrap(), b"short").unwrap();
    assert_eq!(state(&[&text(&sick)])["checkpoint"]["health"]["state"], "damaged");
    let both = state(&[&text(&well), &text(&sick)]);
    assert_eq!((&both["other_health"]["state"], &both["diff"]["name_b"]), (&"damaged".into(), &"sick".into()));
    assert!(both["not_compared"].as_str().is_some_and(|why| why.contains("sick")), "{}", both["not_compared"]);
}

#[test]
fn a_mesh_alone_means_fully_sharded_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, to) = (case("torch-2.13/fsdp2_w3"), text(&folder.path().join("to")));
    let done = run(&["relayout", &whole, &to, "--mesh", "dp=2"]);
    assert!(done.code == 0 && done.stderr.contains("Shard(0)"), "{done}");
    assert_eq!(fine(&["digest", &whole]).len(), fine(&["digest", &to]).len());
    let listed = json(&["ls", &to, "model.head.weight", "--json"]);
    assert_eq!(listed["entries"][0]["grid"][0], 2, "{listed}");
    let planned = run(&["plan", &whole, "--mesh", "dp=8"]);
    assert!(planned.code == 0 && planned.stderr.contains("Shard(0)"), "{planned}");
}

#[test]
fn a_model_alone_loads_into_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&folder.path().join(name));
    let keys = |path: &str| -> Vec<String> {
        let listed = json(&["ls", path, "--json"]);
        listed["entries"].as_array().unwrap().iter().map(|entry| entry["key"].as_str().unwrap().to_owned()).collect()
    };
    // Below a key of its own.
    model(&folder.path().join("ours"), 1, false);
    fine(&["convert", &at("ours"), &at("ours.safetensors"), "--model-only"]);
    assert_eq!(keys(&at("ours.safetensors")), ["one.weight", "three.weight", "two.weight"]);
    // At the top level, beside what is no model; words of the model's own stay.
    let mut state = SaveState::of(&Solo);
    for key in ["model.embed.weight", "lm_head.weight", "optimizer.state.lm_head.weight.exp_avg", "rng_state.cpu"] {
        state.tensor(key, &[2], &[1f32, 2.0]).unwrap();
    }
    state.value("train_state.step", 3i64).unwrap();
    save(&Solo, &at("top"), &state).unwrap();
    fine(&["convert", &at("top"), &at("top.safetensors"), "--model-only"]);
    assert_eq!(keys(&at("top.safetensors")), ["lm_head.weight", "model.embed.weight"]);
    fine(&["convert", &at("top.safetensors"), &at("again.safetensors"), "--model-only"]);
    assert_eq!(keys(&at("again.safetensors")), ["lm_head.weight", "model.embed.weight"]);
    // Nothing is never written.
    fine(&["convert", &at("top"), &at("optimizer.pt"), "--optimizer-only"]);
    let none = run(&["convert", &at("optimizer.pt"), &at("none.safetensors"), "--model-only"]);
    assert!(none.code == 2 && !Path::new(&at("none.safetensors")).exists(), "{none}");
}

#[test]
fn megatrons_model_alone_is_found_at_the_top_level() {
    let folder = tempfile::tempdir().unwrap();
    let source = corpus().join("../../../reshard/tests/foreign/megatron-0.16/tp2_dp2/checkpoint").canonicalize().unwrap();
    let to = text(&folder.path().join("model.safetensors"));
    fine(&["convert", &text(&source), &to, "--model-only"]);
    let listed = json(&["ls", &to, "--json"]);
    let keys: Vec<&str> = listed["entries"].as_array().unwrap().iter().map(|entry| entry["key"].as_str().unwrap()).collect();
    assert!(!keys.is_empty() && keys.iter().all(|key| !key.contains("optimizer") && !key.contains("rng_state")), "{keys:?}");
    assert!(keys.contains(&"embedding.weight"), "{keys:?}");
}
