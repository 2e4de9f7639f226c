//! How to save.

use std::sync::Arc;

use crate::control::Control;
use crate::packed::Compression;
use crate::plan::cache::PlanCache;

/// How to save. The default is safe: synced, with checksums, refusing to overwrite.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Replace a checkpoint that is there. The old one stays readable until the new one is complete.
    pub overwrite: bool,
    /// Compute and store checksums of every record.
    pub checksums: bool,
    /// Wait until everything is on the disk. Without it, a power failure may lose a save that returned.
    pub sync: bool,
    /// Replicated regions of more bytes than this are split between their holders; 0 never splits.
    pub split_replicated_above: u64,
    /// Compare replicated content between ranks and fail where it differs. Costs a hash of everything.
    pub check_replicas: bool,
    /// Before anything is published, look whether every rank's files are there with their lengths: ranks that save to different
    /// paths, or to disks of their own, are found. One request a file.
    pub check_files: bool,
    /// Compress the records of tensors. They take less room, and more time; a load of a part of one decompresses it up to there.
    pub compression: Option<Compression>,
    /// How many files each rank writes.
    pub files_per_rank: u32,
    /// Keeps the plan for the next save of the same layout.
    pub plan_cache: Option<Arc<PlanCache>>,
    /// To watch and to cancel.
    pub control: Control,
}

impl Default for SaveOptions {
    fn default() -> SaveOptions {
        SaveOptions {
            overwrite: false,
            checksums: true,
            sync: true,
            split_replicated_above: 32 << 20,
            check_replicas: false,
            check_files: true,
            compression: None,
            files_per_rank: 1,
            plan_cache: None,
            control: Control::new(),
        }
    }
}
