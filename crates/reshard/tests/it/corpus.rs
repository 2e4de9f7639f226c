//! The corpus of checkpoints that PyTorch wrote, and small states of our own, for the tests of everything offline.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use reshard::digest::{Digest, DigestOptions, digest};
use reshard::formats::{KeyPath, PathSegment};
use reshard::layout::{Dims, Placement, Region};
use reshard::leaf::{SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::storage::{Address, Store, StoreOptions};
use reshard::{Checkpoint, DType, Result, SaveOptions, Value, run_threads, save_with};

use crate::layouts::{Cut, Whole, fitted};

/// Every case: its name, its checkpoint's folder, what a reader must find.
pub(crate) fn cases() -> Vec<(String, PathBuf, serde_json::Value)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/corpus");
    let mut cases = Vec::new();
    for version in folders(&root) {
        for case in folders(&version) {
            let expected = std::fs::read(case.join("expected.json")).unwrap();
            let name = format!("{}/{}", version.file_name().unwrap().display(), case.file_name().unwrap().display());
            cases.push((name, case.join("checkpoint"), serde_json::from_slice(&expected).unwrap()));
        }
    }
    assert!(cases.len() >= 18, "the corpus has only {} cases", cases.len());
    cases
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    found.sort();
    found
}

pub(crate) fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path.to_str().unwrap()).unwrap()
}

pub(crate) fn local(path: &Path) -> Arc<dyn Store> {
    reshard::storage::open(&Address::local(path), &StoreOptions::default()).unwrap()
}

pub(crate) fn digest_of(checkpoint: &Checkpoint) -> Digest {
    digest(checkpoint, &DigestOptions::default()).unwrap()
}

/// A few tensors of many kinds and a few values.
pub(crate) fn sample() -> (Vec<Whole>, Vec<(String, Value)>) {
    let wholes = vec![
        Whole::new("model.a", DType::Float32, &[6, 10], 1),
        Whole::new("model.b", DType::BFloat16, &[7, 3, 5], 2),
        Whole::new("model.scalar", DType::Int64, &[], 3),
        Whole::new("model.empty", DType::Float32, &[0, 4], 4),
        Whole::new("optim.state.a.exp_avg", DType::Float32, &[6, 10], 5),
        Whole::new("optim.state.big", DType::UInt8, &[3000, 100], 6),
    ];
    let values = vec![
        ("optim.lr".to_owned(), Value::from(0.001)),
        ("name".to_owned(), Value::from("a name")),
        ("progress".to_owned(), Value::List(vec![Value::from(1), Value::None])),
    ];
    (wholes, values)
}

/// Saves a state on as many ranks as the cut has.
pub(crate) fn save_state(wholes: &[Whole], values: &[(String, Value)], cut: &Cut, store: &Arc<dyn Store>, options: &SaveOptions) {
    let results = run_threads(cut.ranks() as usize, |group| {
        let rank = reshard::Group::rank(&group) as u64;
        let pieces: Vec<Vec<(Region, Vec<u8>)>> = wholes
            .iter()
            .map(|w| fitted(cut, w.shape.len()).pieces(&w.shape, rank).into_iter().map(|r| (r.clone(), w.slice(&r))).collect())
            .collect();
        let mut state = reshard::SaveState::new();
        for (whole, pieces) in wholes.iter().zip(&pieces) {
            let pieces =
                pieces.iter().map(|(r, bytes)| SavePiece::contiguous(r.clone(), whole.dtype, bytes)).collect::<Result<_>>()?;
            let tensor = SaveTensor { dtype: whole.dtype, shape: Dims::from_slice(&whole.shape), requires_grad: false, pieces };
            state.insert(whole.key.clone(), Some(path_of(&whole.key)), Scope::Shared, SaveLeaf::Tensor(tensor))?;
        }
        for (key, value) in values {
            state.insert(key.clone(), Some(path_of(key)), Scope::Shared, SaveLeaf::Value(value.clone()))?;
        }
        save_with(&group, &state, store, options)
    });
    for result in results {
        result.unwrap();
    }
}

/// One rank.
pub(crate) fn solo() -> Cut {
    rows(1)
}

/// Cut along the first dimension.
pub(crate) fn rows(ranks: u64) -> Cut {
    Cut { mesh: vec![ranks], placements: vec![Placement::Shard(0)] }
}

/// Cut along the second dimension.
pub(crate) fn columns(ranks: u64) -> Cut {
    Cut { mesh: vec![ranks], placements: vec![Placement::Shard(1)] }
}

/// The first word is the part, the rest the name in it.
fn path_of(key: &str) -> KeyPath {
    match key.split_once('.') {
        Some((part, rest)) => vec![PathSegment::Key(part.to_owned()), PathSegment::Key(rest.to_owned())],
        None => vec![PathSegment::Key(key.to_owned())],
    }
}
