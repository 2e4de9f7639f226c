//! Every checkpoint of the corpus through the binary.

use std::path::PathBuf;

use crate::command::{corpus, fine, json, run};

pub(crate) fn cases() -> Vec<PathBuf> {
    let folders = |path: &std::path::Path| {
        let mut found: Vec<PathBuf> =
            std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
        found.sort();
        found
    };
    let cases: Vec<PathBuf> = folders(&corpus()).iter().flat_map(|version| folders(version)).collect();
    assert!(cases.len() >= 18, "the corpus has only {} cases", cases.len());
    cases
}

#[test]
fn the_digest_of_every_case_is_the_expected_one() {
    for case in cases() {
        let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
        let found = json(&["digest", case.join("checkpoint").to_str().unwrap()]);
        let (found, expected) = (found["entries"].as_object().unwrap(), expected["entries"].as_object().unwrap());
        for (key, entry) in expected {
            assert_eq!(found.get(key), Some(entry), "{}: {key}", case.display());
        }
        assert_eq!(found.len(), expected.len(), "{}", case.display());
    }
}

#[test]
fn every_case_can_be_looked_at_and_is_sound() {
    for case in cases() {
        let path = case.join("checkpoint");
        let path = path.to_str().unwrap();
        let inspected = json(&["inspect", path, "--json"]);
        assert_eq!(inspected["health"]["state"], "whole", "{path}");
        let listed = json(&["ls", path, "--json"]);
        assert_eq!(listed["entries"].as_array().unwrap().len() as u64, inspected["keys"].as_u64().unwrap(), "{path}");
        fine(&["ls", path, "--tree"]);
        assert_eq!(run(&["verify", path]).code, 0, "{path}");
        let name = path.to_owned();
        let ranks: u64 = name.split("_w").nth(1).map_or(1, |rest| rest[..1].parse().unwrap());
        assert_eq!(inspected["ranks"], ranks, "{path}");
    }
}
