//! Digests: equal to what PyTorch itself found in every case of the corpus, and independent of layout.

use reshard::digest::{DigestOptions, digest};
use reshard::numbers::{StatsOptions, stats};
use reshard::select::Selection;
use reshard::{DType, SaveOptions};

use crate::corpus;
use crate::layouts::Whole;

#[test]
fn every_case_of_the_corpus_has_its_expected_digest() {
    for (name, path, expected) in corpus::cases() {
        let found = serde_json::to_value(corpus::digest_of(&corpus::open(&path))).unwrap();
        let (found, expected) = (found["entries"].as_object().unwrap(), expected["entries"].as_object().unwrap());
        for (key, entry) in expected {
            assert_eq!(found.get(key), Some(entry), "{name}: {key}");
        }
        assert_eq!(found.len(), expected.len(), "{name}");
    }
}

#[test]
fn digests_do_not_depend_on_the_layout() {
    let (wholes, values) = corpus::sample();
    let mut digests = Vec::new();
    for cut in [corpus::solo(), corpus::rows(3), corpus::columns(4)] {
        let folder = tempfile::tempdir().unwrap();
        let store = corpus::local(folder.path());
        corpus::save_state(&wholes, &values, &cut, &store, &SaveOptions::default());
        let digest = corpus::digest_of(&corpus::open(folder.path()));
        assert_eq!(digest.entries.len(), wholes.len() + values.len());
        let mut entries: Vec<_> = digest.entries.into_iter().collect();
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        digests.push(entries);
    }
    assert_eq!(digests[0], digests[1]);
    assert_eq!(digests[0], digests[2]);
}

#[test]
fn a_selection_digests_only_its_keys() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::rows(2), &corpus::local(folder.path()), &SaveOptions::default());
    let mut options = DigestOptions::default();
    options.selection = Selection::globs(&["model.*"]).unwrap();
    let found = digest(&corpus::open(folder.path()), &options).unwrap();
    assert!(found.entries.keys().all(|key| key.starts_with("model.")) && found.entries.len() == 4);
}

#[test]
fn statistics_are_those_of_the_elements() {
    let numbers: Vec<f32> = (0..600_000).map(|i| (i % 1000) as f32 - 250.0).collect();
    let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    let mut whole = Whole::new("t", DType::Float32, &[600, 1000], 1);
    whole.bytes = bytes;
    whole.bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    whole.bytes[4..8].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&[whole], &[], &corpus::columns(3), &corpus::local(folder.path()), &SaveOptions::default());
    let mut options = StatsOptions::default();
    options.bins = 10;
    let found = stats(&corpus::open(folder.path()), "t", &options).unwrap();
    assert_eq!((found.elements, found.nans, found.infinities, found.zeros), (600_000, 1, 1, 600));
    assert_eq!((found.min, found.max), (Some(-250.0), Some(749.0)));
    let finite: Vec<f64> = numbers[2..].iter().map(|n| f64::from(*n)).collect();
    let mean = finite.iter().sum::<f64>() / finite.len() as f64;
    let std = (finite.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / finite.len() as f64).sqrt();
    assert!((found.mean.unwrap() - mean).abs() < 1e-9 && (found.std.unwrap() - std).abs() < 1e-9);
    assert_eq!(found.histogram.iter().sum::<u64>(), 599_998);
}
