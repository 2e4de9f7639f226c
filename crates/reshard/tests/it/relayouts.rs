//! Re-layouts, and what a load on a layout would read.

use reshard::layout::{Placement, local_regions};
use reshard::{
    ConvertOptions, Group, Layout, LoadOptions, LoadState, SaveOptions, Selection, estimate_load, load_with, relayout,
    run_threads,
};

use crate::corpus;
use crate::layouts::{Cut, Memory, Whole, add_to_load};

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
    // A load on the layout it was written for reads whole records, and what lies between neighbours.
    let estimate = estimate_load(&found, &layout, &Selection::default()).unwrap();
    assert_eq!(estimate.ranks.len(), 4);
    assert!((1.0..1.1).contains(&estimate.read_amplification), "{}", estimate.read_amplification);
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

/// What the ranks of a layout report when they load.
fn loaded(path: &std::path::Path, wholes: &[Whole], cuts: &[Cut]) -> Vec<(u64, u64, u64, u64)> {
    let checkpoint = corpus::open(path);
    run_threads(cuts[0].ranks() as usize, |group| {
        let rank = group.rank() as u64;
        let mut memories: Vec<Vec<Memory>> = Vec::new();
        for (whole, cut) in wholes.iter().zip(cuts) {
            let own = cut.pieces(&whole.shape, rank).into_iter().filter(|region| !region.is_empty());
            memories.push(own.map(|region| Memory::new(region, whole.dtype, false)).collect());
        }
        let mut state = LoadState::new();
        for (whole, memories) in wholes.iter().zip(&mut memories) {
            add_to_load(&mut state, whole, memories);
        }
        let mut options = LoadOptions::default();
        options.expected = Some(std::sync::Arc::new(|_| false));
        let report = load_with(&group, &checkpoint, &mut state, &options)?.report;
        Ok::<_, reshard::Error>((report.bytes_wanted, report.bytes_read, report.reads, report.files))
    })
    .into_iter()
    .map(|report| report.unwrap())
    .collect()
}

#[test]
fn an_estimate_is_what_a_load_then_reports() {
    let (mut wholes, values) = corpus::sample();
    // Columns so narrow that they are read in spans, and rows that fill requests.
    wholes.push(Whole::new("model.narrow", reshard::DType::Float32, &[5000, 8], 7));
    wholes.push(Whole::new("model.long", reshard::DType::Float32, &[4, 700_000], 8));
    let rules = ["*.big=S(0),S(1)", "model.a=R,S(1)", "*.scalar=R,R", "*.narrow=R,S(1)", "*=S(0),R"];
    let layout = Layout::parse("dp=2,tp=2", &rules).unwrap();
    let cut = |whole: &Whole| {
        let placements = match whole.key.as_str() {
            "optim.state.big" => [Placement::Shard(0), Placement::Shard(1)],
            "model.a" | "model.narrow" => [Placement::Replicate, Placement::Shard(1)],
            "model.scalar" => [Placement::Replicate, Placement::Replicate],
            _ => [Placement::Shard(0), Placement::Replicate],
        };
        Cut { mesh: vec![2, 2], placements: placements.to_vec() }
    };
    let cuts: Vec<Cut> = wholes.iter().map(cut).collect();
    for (number, written) in [corpus::solo(), corpus::columns(3), corpus::rows(4)].iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        corpus::save_state(&wholes, &values, written, &corpus::local(folder.path()), &SaveOptions::default());
        let estimate = estimate_load(&corpus::open(folder.path()), &layout, &Selection::default()).unwrap();
        let said: Vec<_> = estimate.ranks.iter().map(|r| (r.bytes, r.bytes_read, r.reads, r.files)).collect();
        assert_eq!(said, loaded(folder.path(), &wholes, &cuts), "written as {number}");
    }
}
