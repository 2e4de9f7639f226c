//! The command is held to the schemas that docs/cli-json.md promises.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::command::{case, run};
use crate::conversions::copy;

/// The schemas of the document, by verb: the fenced blocks named `json VERB`.
fn schemas() -> BTreeMap<String, Value> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli-json.md")).unwrap();
    let mut schemas = BTreeMap::new();
    for block in text.split("\n```json ").skip(1) {
        let (verb, rest) = block.split_once('\n').unwrap();
        let body = rest.split("\n```").next().unwrap();
        schemas
            .insert(verb.to_owned(), serde_json::from_str(body).unwrap_or_else(|error| panic!("the schema of {verb}: {error}")));
    }
    schemas
}

/// Checks the part of JSON Schema that the document uses; anything else in it is an error.
fn violations(root: &Value, schema: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
    let schema = schema.as_object().unwrap();
    for (word, rule) in schema {
        match word.as_str() {
            "$defs" => {}
            "$ref" => {
                let target = rule.as_str().unwrap().strip_prefix('#').unwrap();
                violations(root, root.pointer(target).unwrap(), value, at, found);
            }
            "const" if rule != value => found.push(format!("{at}: {value} is not {rule}")),
            "const" => {}
            "enum" if !rule.as_array().unwrap().contains(value) => found.push(format!("{at}: {value} is none of {rule}")),
            "enum" => {}
            "type" => {
                let types: Vec<&str> = match rule {
                    Value::String(one) => vec![one],
                    many => many.as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect(),
                };
                let fits = |name: &str| match name {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "number" => value.is_number(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    other => panic!("the type {other} is unknown"),
                };
                if !types.into_iter().any(fits) {
                    found.push(format!("{at}: {value} is no {rule}"));
                }
            }
            "anyOf" => {
                let reasons: Vec<Vec<String>> = rule
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|choice| {
                        let mut reasons = Vec::new();
                        violations(root, choice, value, at, &mut reasons);
                        reasons
                    })
                    .collect();
                if !reasons.iter().any(Vec::is_empty) {
                    found.push(format!("{at}: {value} fits no choice: {reasons:?}"));
                }
            }
            "items" => {
                for (number, item) in value.as_array().into_iter().flatten().enumerate() {
                    violations(root, rule, item, &format!("{at}[{number}]"), found);
                }
            }
            "required" => {
                for name in rule.as_array().unwrap().iter().map(|name| name.as_str().unwrap()) {
                    if value.get(name).is_none() {
                        found.push(format!("{at}: {name} is missing"));
                    }
                }
            }
            "properties" => {
                for (name, rule) in rule.as_object().unwrap() {
                    if let Some(value) = value.get(name) {
                        violations(root, rule, value, &format!("{at}.{name}"), found);
                    }
                }
            }
            "additionalProperties" => {
                let known = schema.get("properties").and_then(Value::as_object);
                for (name, value) in value.as_object().into_iter().flatten() {
                    if known.is_some_and(|known| known.contains_key(name)) {
                        continue;
                    }
                    match rule {
                        Value::Bool(false) => found.push(format!("{at}: {name} is not documented")),
                        rule => violations(root, rule, value, &format!("{at}.{name}"), found),
                    }
                }
            }
            other => panic!("the schema at {at} uses {other}, which this test does not know"),
        }
    }
}

fn check(schemas: &BTreeMap<String, Value>, verb: &str, args: &[&str]) {
    let ran = run(args);
    assert!(ran.code < 2, "{args:?}\n{ran}");
    let value: Value = serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}\n{ran}"));
    let mut found = Vec::new();
    violations(&schemas[verb], &schemas[verb], &value, verb, &mut found);
    assert!(found.is_empty(), "{args:?}: {found:#?}");
}

#[test]
fn what_is_printed_is_what_is_documented() {
    let schemas = schemas();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (tp, zoo) = (case("torch-2.13/tp_fsdp2_w4"), case("torch-2.13/zoo"));
    let check = |verb: &str, args: &[&str]| check(&schemas, verb, args);
    for path in [&tp, &zoo, &case("torch-2.13/fsdp1_flat_w4"), &case("torch-2.13/fsdp2_flat_optim_w2")] {
        check("inspect", &["inspect", "--json", path]);
        check("ls", &["ls", "--json", path]);
        check("digest", &["digest", path]);
        check("verify", &["verify", "--json", path]);
        check("verify", &["verify", "--json", "--numbers", path]);
        check("stats", &["stats", "--json", path]);
    }
    let damaged = at("damaged");
    copy(&tp, &damaged);
    std::fs::remove_file(Path::new(&damaged).join("__1_0.distcp")).unwrap();
    check("inspect", &["inspect", "--json", &damaged]);
    check("verify", &["verify", "--json", &damaged]);
    for key in ["tensors.cube", "tensors.dtype_complex64", "tensors.scalar", "tensors.empty", "plain.list", "plain.bytes"] {
        check("show", &["show", "--json", &zoo, key]);
    }
    check("diff", &["diff", "--json", &tp, &case("torch-2.13/fsdp2_w4")]);
    check("diff", &["diff", "--json", &tp, &zoo]);
    check("plan", &["plan", "--json", &tp, "--mesh", "2,2", "--rule", "*weight=S(0),R"]);
    check("convert", &["convert", "--json", &tp, &at("bf16"), "--to", "dcp", "--ranks", "2", "--cast", "bf16"]);
    check("diff", &["diff", "--json", &tp, &at("bf16")]);
    check("convert", &["relayout", "--json", &tp, &at("cut"), "--mesh", "2,2", "--rule", "*weight=S(0),R"]);
    check("view-check", &["view", "check", "--json", "{from=\"model.{x...}\", to=\"m.{x}\"}", &tp]);
    check("view-list", &["view", "list", "--json"]);
    check("merge", &["merge", "--json", &tp, &tp, "-o", &at("mean.pt")]);
    check("edit", &["edit", "--json", &tp, &at("edited"), "--drop", "optim.*", "--rename", "model=net", "--set", "a=1"]);
    std::fs::remove_file(folder.path().join("cut/.metadata")).unwrap();
    check("recover", &["recover", "--json", &at("cut")]);
    let runs = at("runs");
    copy(&tp, &format!("{runs}/step_1"));
    copy(&damaged, &format!("{runs}/step_2"));
    std::fs::create_dir(folder.path().join("runs/other")).unwrap();
    check("latest", &["latest", "--json", "--all", &runs]);
    check("trend", &["trend", "--json", "--numbers", &runs]);
    check("latest", &["latest", "--json", &at("nowhere")]);
    check("prune", &["prune", "--json", &runs, "--keep-last", "1", "--grace", "0s"]);
}

#[test]
fn the_checker_finds_violations() {
    let schema = serde_json::json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": ["integer", "null"]}, "b": {"enum": ["x"]}}});
    let wrong = |value: Value| {
        let mut found = Vec::new();
        violations(&schema, &schema, &value, "", &mut found);
        found.len()
    };
    assert_eq!(wrong(serde_json::json!({"a": 1, "b": "x"})), 0);
    assert_eq!(wrong(serde_json::json!({"b": "y", "c": 1})), 3);
    assert_eq!(wrong(serde_json::json!({"a": 1.5})), 1);
}
