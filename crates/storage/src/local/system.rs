//! The system calls that not every Unix has. On Linux they are used; elsewhere each has a portable stand-in that is slower or
//! does without, and keeps what is promised: what was synced is durable, and no path leads out of the root.

#[cfg(target_os = "linux")]
#[path = "system/linux.rs"]
mod calls;
#[cfg(not(target_os = "linux"))]
#[path = "system/portable.rs"]
mod calls;

pub(super) use calls::{
    DIRECT, PATH, clone, is_cached, open_beneath, open_direct, prefer_large_pages, read_parts, reserve, start_reading,
    start_writeback, sync_all, sync_data, write_parts,
};
