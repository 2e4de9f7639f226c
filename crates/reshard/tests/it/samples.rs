//! The sample of the corpus in a folder, and how it is looked at.

use std::path::Path;

use reshard::{Checkpoint, SaveOptions};

use crate::corpus;
use crate::layouts::Cut;

pub(crate) fn save(folder: &Path, cut: &Cut, overwrite: bool) {
    let (wholes, values) = corpus::sample();
    let mut options = SaveOptions::default();
    options.overwrite = overwrite;
    corpus::save_state(&wholes, &values, cut, &corpus::local(folder), &options);
}

pub(crate) fn sorted(checkpoint: &Checkpoint) -> Vec<(String, reshard::digest::DigestEntry)> {
    let mut entries: Vec<_> = corpus::digest_of(checkpoint).entries.into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    entries
}

pub(crate) fn sound(folder: &Path) {
    let found = reshard::verify::verify_path(folder.to_str().unwrap(), &Default::default(), &Default::default()).unwrap();
    assert!(found.is_sound(), "{:?}", found.findings);
}

/// All files of a folder, by name.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
