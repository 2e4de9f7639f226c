//! What may have been meant by a path where no checkpoint is.

use std::path::{Path, PathBuf};

use reshard::Checkpoint;

use crate::failure::Failure;
use crate::human;

/// Folders that are looked into; a run's folder may hold very many.
const MOST_LOOKS: usize = 64;
/// Names that are told.
const MOST_TOLD: usize = 3;

/// A hint for a path of this machine that holds no checkpoint; `None` when nothing comes to mind.
pub(crate) fn meant(given: &str) -> Option<String> {
    let path = Path::new(given);
    match path.is_dir() {
        true => below(path),
        false if !path.exists() => beside(path),
        false => {
            let folder = path.parent()?;
            let is_checkpoint = !folder.as_os_str().is_empty() && Checkpoint::open(folder.to_str()?).is_ok();
            is_checkpoint.then(|| format!("give its folder: {}", quoted(&[folder.to_path_buf()])))
        }
    }
}

/// What is wrong with a path of this machine at which no step of a run was found; `None` when nothing comes to mind.
pub(crate) fn no_run(given: &str) -> Option<Failure> {
    let path = Path::new(given);
    let failure = |what: &str| Failure::new(format!("no folder of steps at {}: {what}", human::printable(given)));
    if given.contains("://") {
        return None;
    }
    if !path.exists() {
        let failure = failure("it does not exist");
        return Some(match beside(path) {
            Some(hint) => failure.hint(hint),
            None => failure,
        });
    }
    Checkpoint::open(given).ok()?;
    let failure = failure("it is a checkpoint itself");
    Some(match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => {
            failure.hint(format!("its steps' folder is the one above: {}", quoted(&[above.to_path_buf()])))
        }
        _ => failure,
    })
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    names.sort_by(|a, b| human::natural(&a.to_string_lossy(), &b.to_string_lossy()));
    names
}

fn quoted(paths: &[PathBuf]) -> String {
    paths.iter().take(MOST_TOLD).map(|path| human::shell_word(&path.to_string_lossy())).collect::<Vec<_>>().join(", ")
}

/// The checkpoint is one level below.
fn below(folder: &Path) -> Option<String> {
    let children = children(folder);
    let holds = |path: &&PathBuf| path.is_dir() && path.to_str().is_some_and(|path| Checkpoint::open(path).is_ok());
    // The newest come last.
    let found: Vec<PathBuf> = children.iter().rev().take(MOST_LOOKS).filter(holds).cloned().collect();
    match &found[..] {
        [] => None,
        [only] => Some(format!("there is a checkpoint one level below: {}", quoted(std::slice::from_ref(only)))),
        several => Some(format!(
            "the folders in it are checkpoints: {}{}; `reshard latest` gives the newest, `reshard trend` compares them",
            quoted(several),
            if several.len() > MOST_TOLD { ", …" } else { "" },
        )),
    }
}

/// A name beside it that is written nearly the same.
fn beside(path: &Path) -> Option<String> {
    let (name, folder) = (path.file_name()?.to_str()?, path.parent()?);
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let named = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let names: Vec<String> = children(folder).iter().filter_map(named).collect();
    let near = reshard::mismatch::near_names(name, names.iter().map(String::as_str));
    // The nearest alone: names of a few letters are all near each other.
    let near: Vec<PathBuf> =
        near.into_iter().filter(|near| is_like(name, near)).take(1).map(|name| path.with_file_name(name)).collect();
    (!near.is_empty()).then(|| format!("did you mean {}?", quoted(&near)))
}

/// Whether half of a name is that of the other, at their start and end; a few edits make any short name of any other.
fn is_like(name: &str, near: &str) -> bool {
    fn shared(a: impl Iterator<Item = char>, b: impl Iterator<Item = char>) -> usize {
        a.zip(b).take_while(|(a, b)| a == b).count()
    }
    let alike = shared(name.chars(), near.chars()) + shared(name.chars().rev(), near.chars().rev());
    2 * alike >= name.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_beside_it_that_is_nearly_the_same_is_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("step_100")).unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        assert!(meant(&at("step_10")).is_some_and(|hint| hint.contains("did you mean") && hint.contains("step_100")));
        assert_eq!(meant(&at("something else")), None);
        std::fs::write(folder.path().join("m.pt"), "").unwrap();
        assert_eq!(meant(&at("nope")), None, "as many edits away as a slip, and nothing alike");
        assert!(meant(&at("n.pt")).is_some_and(|hint| hint.contains("m.pt")));
        assert_eq!(meant(folder.path().to_str().unwrap()), None);
    }
}
