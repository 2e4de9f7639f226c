//! Edits: keys dropped, renamed, values set, without moving data.

use std::time::Duration;

use reshard::checkpoint::LoadedValue;
use reshard::edit::{EditOptions, edit};
use reshard::recover::{RecoverOptions, recover};
use reshard::select::{Glob, Rename};
use reshard::steps::{Retention, StepsOptions, prune};
use reshard::{ErrorKind, Value};

use crate::corpus;
use crate::samples::{names, save, sound};

#[test]
fn an_edit_links_data_and_changes_only_what_was_asked() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    save(&source, &corpus::columns(2), false);
    let checkpoint = corpus::open(&source);
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.*").unwrap()];
    options.renames = vec![Rename::parse("^model\\.=net.").unwrap()];
    options.set = vec![("name".into(), None, Value::from("another")), ("extra".into(), None, Value::List(vec![Value::from(7)]))];
    let target = folder.path().join("target");
    let report = edit(&checkpoint, &corpus::local(&target), &options).unwrap();
    assert_eq!((report.dropped.len(), report.renamed.len(), report.linked, report.copied), (3, 4, 2, 0), "{report:?}");
    let found = corpus::open(&target);
    let (before, after) = (corpus::digest_of(&checkpoint), corpus::digest_of(&found));
    assert_eq!(after.entries.len(), 7);
    for key in ["a", "b", "scalar", "empty"] {
        assert_eq!(before.entries[&format!("model.{key}")], after.entries[&format!("net.{key}")]);
    }
    assert_eq!(found.read_value("name").unwrap(), LoadedValue::Plain(Value::from("another")));
    assert_eq!(found.read_value("extra").unwrap(), LoadedValue::Plain(Value::List(vec![Value::from(7)])));
    sound(&target);
    // The source is untouched, and a second edit to the same path is refused.
    sound(&source);
    assert_eq!(edit(&checkpoint, &corpus::local(&target), &options).unwrap_err().kind(), ErrorKind::AlreadyExists);
    options.renames = vec![Rename::parse("^model.*=x").unwrap()];
    assert!(
        edit(&checkpoint, &corpus::local(&folder.path().join("third")), &options).unwrap_err().to_string().contains("two keys")
    );
}

#[test]
fn what_pytorch_wrote_can_be_edited() {
    let (_, case, _) = corpus::cases().into_iter().find(|(name, ..)| name == "torch-2.13/zoo").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for entry in std::fs::read_dir(case).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), source.join(entry.file_name())).unwrap();
    }
    let mut options = EditOptions::default();
    options.set = vec![("plain.int".into(), None, Value::from(8))];
    let target = folder.path().join("target");
    edit(&corpus::open(&source), &corpus::local(&target), &options).unwrap();
    assert_eq!(corpus::open(&target).value("plain.int").unwrap(), Value::from(8));
    sound(&target);
}

#[test]
fn a_lost_file_of_an_edited_checkpoint_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    save(&source, &corpus::columns(2), false);
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.*").unwrap()];
    edit(&corpus::open(&source), &corpus::local(&target), &options).unwrap();
    std::fs::remove_file(target.join(".metadata")).unwrap();
    std::fs::remove_file(target.join("__1_0.distcp")).unwrap();
    let error = recover(&corpus::local(&target), &RecoverOptions::default()).unwrap_err();
    assert!(error.to_string().contains("__1_0.distcp"), "{error}");
}

#[test]
fn a_prune_leaves_the_note_of_an_edit() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    save(&source, &corpus::rows(2), false);
    let steps = folder.path().join("steps");
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.*").unwrap()];
    edit(&corpus::open(&source), &corpus::local(&steps.join("step_1")), &options).unwrap();
    let before = names(&steps.join("step_1"));
    let mut rules = Retention::default();
    rules.last = Some(1);
    rules.grace = Duration::ZERO;
    prune(steps.to_str().unwrap(), &rules, false, &StepsOptions::default()).unwrap();
    assert_eq!(names(&steps.join("step_1")), before);
}
