//! Relative paths: the one check that every path given to a store passes, and the names of temporary files.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Result, StorageError};

/// How the names of temporary files of an atomic publication end, so that leftovers of a killed process can be
/// recognised and swept.
pub const STAGED_SUFFIX: &str = ".reshard-staged";

/// Whether a path is that of a temporary file that an atomic publication left behind.
pub fn is_staged(path: &str) -> bool {
    path.ends_with(STAGED_SUFFIX)
}

/// Proves that a path stays below its root by its text alone: relative, no `..`, no empty or `.` parts, no NUL.
pub fn check_relative(path: &str) -> Result<()> {
    let bad = |reason| Err(StorageError::BadPath { path: path.to_owned(), reason });
    if path.is_empty() {
        return bad("it is empty");
    }
    if path.starts_with('/') {
        return bad("it is absolute");
    }
    if path.contains('\0') {
        return bad("it contains a NUL byte");
    }
    for part in path.split('/') {
        match part {
            "" => return bad("it has an empty part"),
            "." => return bad("it contains `.`"),
            ".." => return bad("it contains `..`"),
            _ => {}
        }
    }
    Ok(())
}

/// The folder and the file name of a relative path.
pub(crate) fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// A fresh temporary name beside `path`.
#[cfg_attr(not(unix), allow(dead_code))]
pub(crate) fn staged_name(path: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (folder, name) = split(path);
    let count = NEXT.fetch_add(1, Ordering::Relaxed);
    // The clock tells apart two machines with the same process id on one shared file system.
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    let name = format!(".{name}.{}-{count}-{clock:x}{STAGED_SUFFIX}", std::process::id());
    if folder.is_empty() { name } else { format!("{folder}/{name}") }
}

/// `folder/name`, or `name` when the folder is the root.
pub(crate) fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_root_are_refused() {
        for path in ["", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "a\0b"] {
            assert!(matches!(check_relative(path), Err(StorageError::BadPath { .. })), "{path:?}");
        }
        for path in ["a", ".metadata", "a/b", "..a", "a..", "__0_0.distcp"] {
            assert!(check_relative(path).is_ok(), "{path:?}");
        }
    }

    #[test]
    fn staged_names_are_fresh_recognised_and_beside_the_target() {
        let (first, second) = (staged_name("a/.metadata"), staged_name("a/.metadata"));
        assert_ne!(first, second);
        assert!(first.starts_with("a/."), "{first}");
        assert!(is_staged(&first) && !is_staged("a/.metadata"));
        assert!(staged_name("x").starts_with(".x."));
    }
}
