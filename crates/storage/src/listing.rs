//! Listings of local folders.

use std::fs::FileType;
use std::fs::Metadata;
use std::io;
use std::path::Path;

use crate::{FileInfo, Operation, Result, StorageError};

/// What a link leads to, by its path below the root; `None` for one that must not be followed.
type Linked<'f> = &'f dyn Fn(&str) -> Option<io::Result<Metadata>>;

/// All files below a root whose path starts with `prefix`, sorted by path. A missing root is an empty list.
pub(crate) fn files(root: &Path, prefix: &str, linked: Linked<'_>) -> Result<Vec<FileInfo>> {
    let mut found = Vec::new();
    walk(root, "", prefix, linked, &mut found)?;
    found.sort_by(|left, right| left.path.cmp(&right.path));
    Ok(found)
}

fn walk(root: &Path, folder: &str, prefix: &str, linked: Linked<'_>, found: &mut Vec<FileInfo>) -> Result<()> {
    let full = if folder.is_empty() { root.to_owned() } else { root.join(folder) };
    let failed = |error| StorageError::from_io(Operation::List, full.display().to_string(), error);
    let entries = match std::fs::read_dir(&full) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        // A name that is not UTF-8 cannot be one of ours, nor be named by a relative path.
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let path = crate::path::join(folder, &name);
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            // Only folders that can hold a path with this prefix.
            let inside = format!("{path}/");
            if inside.starts_with(prefix) || prefix.starts_with(&inside) {
                walk(root, &path, prefix, linked, found)?;
            }
            continue;
        }
        if !path.starts_with(prefix) {
            continue;
        }
        let metadata = if kind.is_symlink() {
            match linked(&path) {
                Some(metadata) => metadata,
                None => continue,
            }
        } else {
            entry.metadata()
        };
        match metadata {
            Ok(metadata) if metadata.is_file() => {
                found.push(FileInfo { path, size: metadata.len(), modified: metadata.modified().ok() });
            }
            Ok(_) => {}
            // Deleted while we looked.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}

/// The names of what is `wanted` directly below a root, sorted. A missing root is an empty list.
pub(crate) fn folders(root: &Path, wanted: impl Fn(FileType, &Path) -> bool) -> Result<Vec<String>> {
    let failed = |error| StorageError::from_io(Operation::List, root.display().to_string(), error);
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        if let (true, Ok(name)) = (wanted(kind, &entry.path()), entry.file_name().into_string()) {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}
