//! Starts writing dirty pages to the device while the rest of the file is still being copied into the page cache, so that
//! the sync at the end finds most of the work done.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;

/// Asks the kernel to begin, and does not wait for the end. A failure is not reported here: the kernel keeps it and
/// gives it to the sync, and a file system that cannot do this loses nothing but time.
pub(super) fn start(file: &File) {
    // SAFETY: the call takes integers only and touches no memory of this process; `file` keeps the descriptor open.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}
