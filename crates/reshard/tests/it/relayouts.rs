//! Re-layouts and their dry run.

use reshard::SaveOptions;
use reshard::convert::ConvertOptions;
use reshard::layout::{Placement, local_regions};
use reshard::mesh::Layout;
use reshard::relayout::{estimate_load, relayout};
use reshard::select::Selection;

use crate::corpus;

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
    assert_eq!((estimate.ranks.len(), estimate.read_amplification), (4, 1.0));
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
