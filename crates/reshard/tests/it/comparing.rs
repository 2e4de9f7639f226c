//! Differences and averages.

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::diff::{DiffOptions, KeyDifference, Tolerance, diff};
use reshard::merge::merge;
use reshard::storage::StoreOptions;
use reshard::{DType, ErrorKind, SaveOptions, Value};

use crate::corpus;
use crate::layouts::Whole;

fn floats(key: &str, dtype: DType, numbers: &[f32]) -> Whole {
    let mut whole = Whole::new(key, dtype, &[numbers.len() as u64 / 4, 4], 1);
    whole.bytes = match dtype {
        DType::Float32 => numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
        DType::Float64 => numbers.iter().flat_map(|n| f64::from(*n).to_le_bytes()).collect(),
        _ => unreachable!(),
    };
    whole
}

#[test]
fn the_same_state_in_other_layouts_and_formats_is_the_same() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    corpus::save_state(&wholes, &values, &corpus::rows(3), &corpus::local(&a), &SaveOptions::default());
    corpus::save_state(&wholes, &values, &corpus::columns(2), &corpus::local(&b), &SaveOptions::default());
    let (a, b) = (corpus::open(&a), corpus::open(&b));
    let report = diff(&a, &b, &DiffOptions::default()).unwrap();
    assert!(report.is_same() && report.same == 9, "{report:?}");
    let target = ConvertTarget::Torch;
    let path = folder.path().join("x.pt");
    let destination = Destination::parse(path.to_str().unwrap(), target, &StoreOptions::default()).unwrap();
    convert(&a, &destination, target, &ConvertOptions::default()).unwrap();
    let report = diff(&corpus::open(&path), &b, &DiffOptions::default()).unwrap();
    assert!(report.is_same(), "{report:?}");
}

#[test]
fn every_kind_of_difference_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let numbers: Vec<f32> = (0..400_000).map(|i| i as f32).collect();
    let mut changed = numbers.clone();
    changed[300_001] += 2.0;
    changed[300_003] -= 1.0;
    let mut slightly = numbers.clone();
    slightly[5] += 0.001;
    let a = [
        floats("t", DType::Float32, &numbers),
        floats("slightly", DType::Float32, &numbers),
        floats("wide", DType::Float32, &numbers),
        Whole::new("shape", DType::Int8, &[3, 4], 1),
        Whole::new("kind", DType::Int8, &[3], 1),
        Whole::new("only_a", DType::Int8, &[3], 1),
    ];
    let b = [
        floats("t", DType::Float32, &changed),
        floats("slightly", DType::Float32, &slightly),
        floats("wide", DType::Float64, &numbers),
        Whole::new("shape", DType::Int8, &[4, 3], 1),
        Whole::new("only_b", DType::Int8, &[3], 1),
    ];
    let (pa, pb) = (folder.path().join("a"), folder.path().join("b"));
    corpus::save_state(&a, &[("v".into(), Value::from(1))], &corpus::rows(2), &corpus::local(&pa), &SaveOptions::default());
    let values = [("v".into(), Value::from(2)), ("kind".into(), Value::None)];
    corpus::save_state(&b, &values, &corpus::columns(2), &corpus::local(&pb), &SaveOptions::default());
    let (a, b) = (corpus::open(&pa), corpus::open(&pb));
    let mut options = DiffOptions::default();
    options.tolerance.absolute = 0.01;
    let report = diff(&a, &b, &options).unwrap();
    assert_eq!(
        (report.only_first.as_slice(), report.only_second.as_slice(), report.same),
        (["only_a".to_owned()].as_slice(), ["only_b".to_owned()].as_slice(), 1)
    );
    let find = |key: &str| &report.different.iter().find(|d| d.key == key).unwrap().difference;
    match find("t") {
        KeyDifference::Elements(found) => {
            assert_eq!((found.elements, found.different, found.max_absolute), (400_000, 2, Some(2.0)));
            assert_eq!(found.first_index, [75_000, 1]);
            assert_eq!(found.mean_absolute, Some(3.0 / 400_000.0));
            assert!((found.max_relative.unwrap() - 2.0 / 300_003.0).abs() < 1e-12);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(find("wide"), KeyDifference::DType { elements: None, .. }));
    assert!(matches!(find("shape"), KeyDifference::Shape { .. }));
    assert!(matches!(find("kind"), KeyDifference::Kind { first: "tensor", second: "value" }));
    assert!(matches!(find("v"), KeyDifference::Value { .. }));
    options.tolerance = Tolerance::default();
    assert_eq!(diff(&a, &b, &options).unwrap().same, 0);
}

#[test]
fn merging_averages_numbers_by_weight_and_keeps_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let mut sources = Vec::new();
    for (i, scale) in [1.0f32, 3.0].into_iter().enumerate() {
        let numbers: Vec<f32> = (0..400_000).map(|n| n as f32 * scale).collect();
        let wholes = [floats("t", DType::Float32, &numbers), Whole::new("steps", DType::Int64, &[4], i as u64)];
        let path = folder.path().join(i.to_string());
        let values = [("epoch".to_owned(), Value::from(i as i64))];
        corpus::save_state(&wholes, &values, &corpus::rows(1 + i as u64), &corpus::local(&path), &SaveOptions::default());
        sources.push(corpus::open(&path));
    }
    let both: Vec<_> = sources.iter().collect();
    for (weights, factor) in [(vec![], 2.0f32), (vec![3.0, 1.0], 1.5)] {
        for target in [ConvertTarget::Dcp { ranks: 2 }, ConvertTarget::Safetensors { max_shard_size: None }] {
            let path = tempfile::tempdir().unwrap();
            let destination = Destination::folder(corpus::local(path.path()));
            let report = merge(&both, &weights, &destination, target, &ConvertOptions::default()).unwrap();
            assert_eq!(
                (report.averaged, report.taken_from_first.as_slice()),
                (1, ["epoch".to_owned(), "steps".to_owned()].as_slice())
            );
            let merged = corpus::open(path.path());
            let bytes = merged.read_whole("t").unwrap();
            let wanted: Vec<u8> = (0..400_000).flat_map(|n| (n as f32 * factor).to_le_bytes()).collect();
            assert!(bytes == wanted, "{weights:?} {target:?}");
            assert_eq!(merged.read_whole("steps").unwrap(), sources[0].read_whole("steps").unwrap());
        }
    }
    let other = folder.path().join("other");
    corpus::save_state(
        &[Whole::new("t", DType::Float32, &[3], 1)],
        &[],
        &corpus::solo(),
        &corpus::local(&other),
        &SaveOptions::default(),
    );
    let other = corpus::open(&other);
    let destination = Destination::folder(corpus::local(&folder.path().join("never")));
    let error = merge(&[&sources[0], &other], &[], &destination, ConvertTarget::Torch, &ConvertOptions::default()).unwrap_err();
    assert_eq!((error.kind(), error.keys().len()), (ErrorKind::Mismatch, 3), "{error}");
    assert!(merge(&both, &[1.0], &destination, ConvertTarget::Torch, &ConvertOptions::default()).is_err());
    assert!(merge(&both, &[1.0, -1.0], &destination, ConvertTarget::Torch, &ConvertOptions::default()).is_err());
}
