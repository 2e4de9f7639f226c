//! The names of files in a checkpoint's folder.

/// DCP's own: the checkpoint exists when this file does.
pub(crate) const METADATA_FILE: &str = ".metadata";
/// Data files start so, and end in [`DATA_SUFFIX`].
pub(crate) const DATA_PREFIX: &str = "__";
pub(crate) const DATA_SUFFIX: &str = ".distcp";
/// Sidecars start so, and end in [`SIDE_SUFFIX`].
pub(crate) const SIDE_PREFIX: &str = ".reshard-";
pub(crate) const SIDE_SUFFIX: &str = ".sums";
/// The note of an edit has a sidecar's prefix and ends so.
pub(crate) const EDIT_SUFFIX: &str = ".edit";

/// Lies in a folder of a trainer's own format until a conversion has written all of it.
pub(crate) const UNFINISHED_FILE: &str = ".reshard-unfinished";

/// What Lightning keeps beside a DCP checkpoint.
pub(crate) const META_FILE: &str = "meta.pt";

/// A safetensors model in one file; where it exists it is the folder's model, as for the libraries that load it.
pub(crate) const MODEL_FILE: &str = "model.safetensors";

/// The name of a rank's data file. `save_id` sets it apart from files of other saves in the same folder.
pub(crate) fn data_file(rank: usize, file: u32, save_id: Option<&str>) -> String {
    match save_id {
        None => format!("{DATA_PREFIX}{rank}_{file}{DATA_SUFFIX}"),
        Some(id) => format!("{DATA_PREFIX}{rank}_{file}.{id}{DATA_SUFFIX}"),
    }
}

/// The name of the sidecar of a save.
pub(crate) fn sidecar_name(save_id: &str) -> String {
    format!("{SIDE_PREFIX}{save_id}{SIDE_SUFFIX}")
}

/// The name of the note of an edit.
pub(crate) fn note_name(save_id: &str) -> String {
    format!("{SIDE_PREFIX}{save_id}{EDIT_SUFFIX}")
}

/// Whether a file of this name may be left over from a save.
pub(crate) fn is_save_file(name: &str) -> bool {
    let data = name.starts_with(DATA_PREFIX) && name.ends_with(DATA_SUFFIX);
    let side = name.starts_with(SIDE_PREFIX) && (name.ends_with(SIDE_SUFFIX) || name.ends_with(EDIT_SUFFIX));
    !name.contains('/') && (data || side || reshard_storage::is_staged(name))
}

pub(crate) fn is_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")
}

pub(crate) fn is_torch(name: &str) -> bool {
    [".pt", ".pth", ".bin", ".ckpt"].iter().any(|suffix| name.ends_with(suffix))
}
