//! Checks that are about meaning: paths that stay inside, chunks that tile.

use reshard_layout::{Region, coverage};

use super::error::MetadataError;
use super::types::{EntryKind, Metadata};

/// Why a file path might lead out of the checkpoint's folder; `None` when it can't.
pub(super) fn path_problem(path: &str) -> Option<&'static str> {
    if path.is_empty() {
        return Some("it is empty");
    }
    if path.contains('\0') {
        return Some("it contains a NUL");
    }
    // Windows' separators and drives count everywhere: a checkpoint may be read on another system.
    if path.starts_with(['/', '\\']) {
        return Some("it is absolute");
    }
    if let [drive, b':', ..] = path.as_bytes()
        && drive.is_ascii_alphabetic()
    {
        return Some("it names a drive");
    }
    if path.split(['/', '\\']).any(|part| part == "..") {
        return Some("it contains `..`");
    }
    if path.split(['/', '\\']).all(|part| part.is_empty() || part == ".") {
        return Some("it names a folder");
    }
    None
}

impl Metadata {
    /// Checks that the chunks of each tensor cover it exactly: no element missing, none twice.
    ///
    /// Not part of decoding, because a reader that wants a part of a tensor may not care.
    pub fn check_coverage(&self) -> Result<(), MetadataError> {
        for (key, entry) in &self.entries {
            let EntryKind::Tensor(tensor) = &entry.kind else {
                continue;
            };
            let regions: Vec<Region> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
            let found = coverage(&tensor.shape, &regions).map_err(|source| MetadataError::Shape { key: key.clone(), source })?;
            if let Some(gap) = found.gaps.into_iter().next() {
                return Err(MetadataError::Gap { key: key.clone(), region: gap });
            }
            if let Some(overlap) = found.overlaps.into_iter().next() {
                let (first, second) = (overlap.first, overlap.second);
                return Err(MetadataError::Overlap { key: key.clone(), first, second, region: overlap.region });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_stay_inside_pass_and_others_do_not() {
        for good in ["__0_0.distcp", "a/b.distcp", "..a", "a../b", "./a", "...", "a b", "ab:c"] {
            assert_eq!(path_problem(good), None, "{good}");
        }
        for bad in
            ["", ".", "./", "..", "../a", "a/..", "a/../b", "a\\..\\b", "/a", "\\a", "//a", "C:a", "x:y/z", "c:\\a", "a\0b"]
        {
            assert!(path_problem(bad).is_some(), "{bad}");
        }
    }
}
