//! `.metadata` from data files alone.

use reshard::edit::{EditOptions, edit};
use reshard::recover::{RecoverOptions, recover};
use reshard::select::{Glob, Rename};
use reshard::{ErrorKind, Value};

use crate::corpus;
use crate::samples::{names, save, sorted, sound};

#[test]
fn metadata_comes_back_from_data_files_alone() {
    for keep_side in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &corpus::columns(3), false);
        let before = sorted(&corpus::open(folder.path()));
        let store = corpus::local(folder.path());
        assert_eq!(recover(&store, &RecoverOptions::default()).unwrap_err().kind(), ErrorKind::AlreadyExists);
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let side = path.extension().is_some_and(|e| e == "sums");
            if path.ends_with(".metadata") || (side && !keep_side) {
                std::fs::remove_file(path).unwrap();
            }
        }
        let mut look = RecoverOptions::default();
        look.dry_run = true;
        assert!(!recover(&store, &look).unwrap().published);
        assert!(!folder.path().join(".metadata").exists());
        let report = recover(&store, &RecoverOptions::default()).unwrap();
        assert_eq!((report.files.len(), report.ranks, report.keys), (3, 3, 9));
        assert!(report.unused.is_empty() && report.warnings.is_empty(), "{report:?}");
        let found = corpus::open(folder.path());
        assert_eq!(sorted(&found), before);
        assert!(found.has_sidecar());
        assert_eq!(found.entry("model.a").unwrap().path.as_ref().unwrap().len(), 2);
        sound(folder.path());
    }
}

#[test]
fn the_newest_complete_save_is_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let newer = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::rows(2), false);
    save(newer.path(), &corpus::rows(3), false);
    // The newer save lost a rank's file, as when it was killed: the older one is what can be had.
    for (i, from) in [(0, "__0_0.distcp"), (2, "__2_0.distcp")] {
        std::fs::copy(newer.path().join(from), folder.path().join(format!("__{i}_9.newer.distcp"))).unwrap();
    }
    std::fs::write(folder.path().join("__5_0.distcp"), b"cut off").unwrap();
    std::fs::remove_file(folder.path().join(".metadata")).unwrap();
    let report = recover(&corpus::local(folder.path()), &RecoverOptions::default()).unwrap();
    assert_eq!((report.ranks, report.files.len(), report.unused.len()), (2, 2, 3), "{report:?}");
    assert!(report.warnings.iter().any(|w| w.contains("rank 1 left no file")), "{:?}", report.warnings);
    sound(folder.path());
}

#[test]
fn what_cannot_be_recovered_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let store = corpus::local(folder.path());
    assert_eq!(recover(&store, &RecoverOptions::default()).unwrap_err().kind(), ErrorKind::NotFound);
    let (_, case, _) = corpus::cases().into_iter().find(|(name, ..)| name.ends_with("ddp_w2")).unwrap();
    for name in ["__0_0.distcp", "__1_0.distcp"] {
        std::fs::copy(case.join(name), folder.path().join(name)).unwrap();
    }
    let error = recover(&store, &RecoverOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Incomplete);
    assert!(error.to_string().contains("__1_0.distcp") && error.to_string().contains("no index"), "{error}");
    // A file of ours that was cut has no index any more, and without it the save is not complete.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::rows(2), false);
    std::fs::remove_file(folder.path().join(".metadata")).unwrap();
    let path = folder.path().join("__1_0.distcp");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = recover(&corpus::local(folder.path()), &RecoverOptions::default()).unwrap_err();
    assert!(error.to_string().contains("__1_0.distcp"), "{error}");
}

#[test]
fn an_edited_checkpoint_is_recovered_as_edited() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    save(&source, &corpus::columns(2), false);
    let mut drops = EditOptions::default();
    drops.drop = vec![Glob::new("optim.*").unwrap()];
    drops.renames = vec![Rename::parse("^model\\.=net.").unwrap()];
    let mut sets = EditOptions::default();
    sets.set = vec![("name".into(), None, Value::from("another"))];
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    edit(&corpus::open(&source), &corpus::local(&first), &drops).unwrap();
    edit(&corpus::open(&first), &corpus::local(&second), &sets).unwrap();
    for target in [&first, &second] {
        let digest = sorted(&corpus::open(target));
        let store = corpus::local(target);
        std::fs::remove_file(target.join(".metadata")).unwrap();
        let report = recover(&store, &RecoverOptions::default()).unwrap();
        assert!(report.unused.is_empty() && report.warnings.is_empty(), "{report:?}");
        assert_eq!(sorted(&corpus::open(target)), digest);
        sound(target);
        // Without its note nothing tells what the edit did: the keys before it do not come back by themselves.
        std::fs::remove_file(target.join(".metadata")).unwrap();
        let note = names(target).into_iter().find(|name| name.ends_with(".edit")).unwrap();
        let bytes = std::fs::read(target.join(&note)).unwrap();
        let mut damaged = bytes.clone();
        damaged[40] ^= 1;
        std::fs::write(target.join(&note), &damaged).unwrap();
        let error = recover(&store, &RecoverOptions::default()).unwrap_err();
        assert!(error.kind() == ErrorKind::Incomplete && error.to_string().contains("it was edited"), "{error}");
        std::fs::remove_file(target.join(&note)).unwrap();
        let error = recover(&store, &RecoverOptions::default()).unwrap_err();
        assert!(error.kind() == ErrorKind::Incomplete && error.to_string().contains("it was edited"), "{error}");
        let mut undo = RecoverOptions::default();
        undo.undo_edits = true;
        let report = recover(&store, &undo).unwrap();
        assert!(report.warnings.iter().any(|w| w.contains("undone")), "{report:?}");
        assert_eq!(sorted(&corpus::open(target)), sorted(&corpus::open(&source)));
    }
}
