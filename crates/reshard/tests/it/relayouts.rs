//! Re-layouts and their dry run.

use reshard::checkpoint::CatalogKind;
use reshard::convert::{ConvertOptions, Destination, Target, convert};
use reshard::layout::{Placement, local_regions};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, Scope};
use reshard::mesh::Layout;
use reshard::relayout::{estimate_load, relayout};
use reshard::select::Selection;
use reshard::{Checkpoint, LoadOptions, LoadReport, LoadState, SaveOptions, Solo, load_with};

use crate::corpus;

/// What one rank of a layout reads when it loads every tensor.
fn loaded(checkpoint: &Checkpoint, layout: &Layout, rank: u64) -> LoadReport {
    let mut wanted = Vec::new();
    for (key, entry) in &checkpoint.catalog().entries {
        let CatalogKind::Tensor(tensor) = &entry.kind else { continue };
        let placements = layout.placements(key, tensor.shape.len()).unwrap();
        let regions = local_regions(layout.mesh(), &placements, &tensor.shape, rank).unwrap();
        let regions: Vec<_> = regions.into_iter().map(|region| region.global).filter(|region| !region.is_empty()).collect();
        assert!(regions.len() <= 1);
        let memory: Vec<_> = regions.iter().map(|region| vec![0; (region.volume() * tensor.dtype.size()) as usize]).collect();
        wanted.push((key, tensor, regions, memory));
    }
    let mut state = LoadState::new();
    for (key, tensor, regions, memory) in wanted.iter_mut().filter(|(_, _, regions, _)| !regions.is_empty()) {
        let pieces = regions.iter().zip(memory);
        let pieces = pieces.map(|(region, bytes)| LoadPiece::contiguous(region.clone(), tensor.dtype, bytes).unwrap()).collect();
        let leaf = LoadLeaf::Tensor(LoadTensor { dtype: tensor.dtype, shape: tensor.shape.clone(), pieces });
        state.insert(key.as_str(), Scope::Shared, leaf).unwrap();
    }
    let mut options = LoadOptions::default();
    options.expected = Some(std::sync::Arc::new(|_| false));
    load_with(&Solo, checkpoint, &mut state, &options).unwrap().report
}

#[test]
fn an_estimate_is_what_a_load_then_reads() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own");
    corpus::save_state(&wholes, &values, &corpus::columns(3), &corpus::local(&path), &SaveOptions::default());
    let own = corpus::open(&path);
    let target = Target::Safetensors { max_shard_size: None };
    let to = Destination::folder(corpus::local(&folder.path().join("safetensors")));
    convert(&own, &to, target, &ConvertOptions::default()).unwrap();
    let mut checkpoints = vec![(own, true), (corpus::open(&folder.path().join("safetensors")), true)];
    // Where records lie to the byte is known of PyTorch's files only when they are opened, which an estimate does not do.
    checkpoints.extend(corpus::cases().iter().take(6).map(|(_, path, _)| (corpus::open(path), false)));
    for (checkpoint, exact) in checkpoints {
        let columns = Layout::parse("3", &["*.scalar=R", "*=S(1)"]).unwrap();
        let layouts = [Layout::rows(1).unwrap(), Layout::rows(4).unwrap(), columns];
        for layout in layouts.into_iter().take(if exact { 3 } else { 2 }) {
            let estimate = estimate_load(&checkpoint, &layout, &Selection::default()).unwrap();
            for found in &estimate.ranks {
                let real = loaded(&checkpoint, &layout, found.rank);
                let name = format!("{} on {} ranks, rank {}", checkpoint.path(), layout.ranks(), found.rank);
                assert_eq!((found.tensors, found.bytes, found.files), (real.tensors, real.bytes_wanted, real.files), "{name}");
                if exact {
                    assert_eq!((found.bytes_read, found.reads), (real.bytes_read, real.reads), "{name}");
                }
            }
        }
    }
}

#[test]
fn a_relayout_holds_the_same_cut_as_asked() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    corpus::save_state(&wholes, &values, &corpus::columns(3), &corpus::local(&source), &SaveOptions::default());
    let source = corpus::open(&source);
    let layout = Layout::parse("dp=2,tp=2", &["*.big=S(0),S(1)", "model.a=R,S(1)", "*.scalar=R,R", "*=S(0),R"]).unwrap();
    let target = folder.path().join("target");
    let report = relayout(&source, &corpus::local(&target), &layout, &ConvertOptions::default()).unwrap();
    assert_eq!(report.files.len(), 4);
    let found = corpus::open(&target);
    let (a, b) = (corpus::digest_of(&source), corpus::digest_of(&found));
    for (key, entry) in &a.entries {
        assert_eq!(b.entries.get(key), Some(entry), "{key}");
    }
    let big = found.tensor("optim.state.big").unwrap();
    let wanted = [Placement::Shard(0), Placement::Shard(1)];
    for rank in 0..4 {
        let own = local_regions(layout.mesh(), &wanted, &big.shape, rank).unwrap();
        assert!(big.chunks.iter().any(|c| c.region == own[0].global), "{rank}");
    }
    // A load on the layout it was written for reads whole records and nothing else.
    let estimate = estimate_load(&found, &layout, &Selection::default()).unwrap();
    assert_eq!(estimate.ranks.len(), 4);
    assert!(estimate.read_amplification < 1.1, "{}", estimate.read_amplification);
    assert!(estimate.peak_memory > estimate.bytes / 4 && estimate.imbalance >= 1.0);
    let before = estimate_load(&source, &layout, &Selection::default()).unwrap();
    assert_eq!(before.bytes, estimate.bytes);
    assert!(before.ranks.iter().map(|r| r.reads).sum::<u64>() > estimate.ranks.iter().map(|r| r.reads).sum());
}

#[test]
fn a_rule_that_does_not_fit_is_an_error_that_says_so() {
    let (wholes, values) = corpus::sample();
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &values, &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
    let source = corpus::open(folder.path());
    let layout = Layout::parse("2", &["*=S(2)"]).unwrap();
    let error = estimate_load(&source, &layout, &Selection::default()).unwrap_err();
    assert!(error.to_string().contains("model.a"), "{error}");
}
