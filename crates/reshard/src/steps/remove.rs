//! The removal of a checkpoint, and the proof that something is one.
//!
//! `.metadata` goes first and its absence is made durable, so that wherever this stops, what is left is not taken for a
//! checkpoint. Only files that `.metadata` names, or that are named as a save names its own, go; the folder does when nothing
//! else lies in it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reshard_storage::{FileInfo, StorageError, Store, is_staged};

use super::trainer::is_companion;
use super::{Step, seconds};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result, StorageContext};
use crate::layout_names::{
    DATA_PREFIX, DATA_SUFFIX, EDIT_SUFFIX, METADATA_FILE, SIDE_PREFIX, SIDE_SUFFIX, note_name, sidecar_name,
};

/// Whether a save gives its files such a name: `__RANK_FILE.distcp`, with an id where others lie there, sidecars, notes, and
/// what is not finished of either.
pub(super) fn is_own_name(name: &str) -> bool {
    let data = name.strip_prefix(DATA_PREFIX).and_then(|rest| rest.strip_suffix(DATA_SUFFIX)).is_some_and(|middle| {
        let (numbers, id) = middle.split_once('.').unwrap_or((middle, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        crate::source::is_plain_id(id) && numbers.split_once('_').is_some_and(|(rank, file)| digits(rank) && digits(file))
    });
    let beside = name.starts_with(SIDE_PREFIX) && (name.ends_with(SIDE_SUFFIX) || name.ends_with(EDIT_SUFFIX));
    !name.contains('/') && (data || beside || is_staged(name))
}

/// Whether names and contents prove an abandoned save: nothing lies there but files that a save writes, and each data file
/// starts as a record does, or was only reserved.
pub(super) fn is_abandoned(store: &dyn Store, files: &[FileInfo]) -> bool {
    let starts_well = |file: &FileInfo| {
        if file.size == 0 || !file.path.ends_with(DATA_SUFFIX) {
            return true;
        }
        let mut start = [0u8; 4];
        let start = &mut start[..file.size.min(4) as usize];
        let read = store.open_reader(&file.path).and_then(|reader| reader.read_at(0, start));
        read.is_ok() && (b"PK\x03\x04".starts_with(start) || start.iter().all(|b| *b == 0))
    };
    let own = |file: &FileInfo| is_own_name(&file.path) || file.path == METADATA_FILE;
    files.iter().any(|f| is_own_name(&f.path)) && files.iter().all(|file| own(file) && starts_well(file))
}

/// The files that a checkpoint names, and the names of what lies beside it as its own.
pub(super) fn checkpoint_files(store: &Arc<dyn Store>) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let checkpoint = Checkpoint::open_store(store.clone())?;
    let catalog = checkpoint.catalog();
    if !catalog.format.is_dcp() {
        return Err(Error::unsupported(format!("{} is not a DCP checkpoint", store.describe())));
    }
    let beside = catalog.save_id.iter().flat_map(|id| [sidecar_name(id), note_name(id)]).collect();
    Ok((catalog.files.iter().cloned().collect(), beside))
}

/// Files of killed saves beside a checkpoint that stays. While one of them is young, a save may be under way, and all stay.
pub(super) fn leftovers<'f>(
    own: &BTreeSet<String>,
    beside: &BTreeSet<String>,
    files: &'f [FileInfo],
    grace: Duration,
    now: u64,
) -> Vec<&'f FileInfo> {
    let strange: Vec<&FileInfo> =
        files.iter().filter(|f| is_own_name(&f.path) && !own.contains(&f.path) && !beside.contains(&f.path)).collect();
    match strange.iter().all(|file| is_old(file, grace, now)) {
        true => strange,
        false => Vec::new(),
    }
}

fn is_old(file: &FileInfo, grace: Duration, now: u64) -> bool {
    file.modified.is_some_and(|modified| now.saturating_sub(seconds(modified)) >= grace.as_secs())
}

/// Whether files of a save that is not finished lie there and are young, or the files changed since they were looked at.
pub(super) fn under_way(store: &Arc<dyn Store>, step: &Step, grace: Duration) -> Result<bool> {
    let files = store.list("").doing(|| format!("listing {}", store.describe()))?;
    if files != step.files {
        return Ok(true);
    }
    let Ok((own, beside)) = checkpoint_files(store) else { return Ok(false) };
    let now = seconds(SystemTime::now());
    let strange = |f: &&FileInfo| is_own_name(&f.path) && !own.contains(&f.path) && !beside.contains(&f.path);
    Ok(files.iter().filter(strange).any(|file| !is_old(file, grace, now)))
}

/// Removes a checkpoint or an abandoned save. Returns the files that are none of its own and stay.
pub(super) fn remove(store: &Arc<dyn Store>, step: &Step) -> Result<Vec<String>> {
    let doing = || format!("removing {}", store.describe());
    let named = checkpoint_files(store).map(|(own, _)| own).unwrap_or_default();
    store.delete(METADATA_FILE).doing(doing)?;
    store.sync().doing(doing)?;
    let own = |file: &FileInfo| named.contains(&file.path) || is_own_name(&file.path) || is_companion(step, &file.path);
    let files = step.files.iter().filter(|f| f.path != METADATA_FILE);
    remove_files(store, files, &own, true)
}

/// Removes the files of a trainer beside the checkpoints of a step; the folder goes when nothing else is left in it.
pub(super) fn remove_beside(store: &Arc<dyn Store>, step: &Step, files: &[&FileInfo], alone: bool) -> Result<Vec<String>> {
    remove_files(store, files.iter().copied(), &|file| is_companion(step, &file.path), alone)
}

fn remove_files<'f>(
    store: &Arc<dyn Store>,
    files: impl Iterator<Item = &'f FileInfo>,
    own: &dyn Fn(&FileInfo) -> bool,
    alone: bool,
) -> Result<Vec<String>> {
    let doing = || format!("removing {}", store.describe());
    let mut left = Vec::new();
    for file in files {
        if own(file) {
            match store.delete(&file.path) {
                Ok(()) | Err(StorageError::NotFound { .. }) => {}
                Err(source) => return Err(Error::Storage { doing: doing(), source }),
            }
        } else {
            left.push(file.path.clone());
        }
    }
    if left.is_empty() && alone {
        store.delete_empty_root().doing(doing)?;
    }
    store.sync().doing(doing)?;
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_saves_own_names_count() {
        for name in ["__0_0.distcp", "__12_3.01jd-abc.distcp", ".reshard-abc.sums", ".reshard-abc.edit"] {
            assert!(is_own_name(name), "{name}");
        }
        for name in
            ["__a_0.distcp", "__0.distcp", "__0_0.x y.distcp", "model.safetensors", "sub/__0_0.distcp", ".metadata", "x.pt"]
        {
            assert!(!is_own_name(name), "{name}");
        }
    }
}
