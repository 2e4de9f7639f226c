//! Any other Unix.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Result;

/// There is no way past the page cache that could be asked for when opening.
pub(in super::super) const DIRECT: OFlags = OFlags::empty();
/// A folder is opened for reading instead.
pub(in super::super) const PATH: OFlags = OFlags::empty();

/// No kernel call keeps a path below a folder; the caller goes part by part.
pub(in super::super) fn open_beneath(_: &OwnedFd, _: &str, _: OFlags, _: Mode) -> Option<Result<OwnedFd>> {
    None
}

/// Writes allocate as they come.
pub(in super::super) fn reserve(_: &File, _: u64) -> Result<()> {
    Ok(())
}

/// The caller copies.
pub(in super::super) fn clone(_: &File, _: &File) -> Result<bool> {
    Ok(false)
}

/// The sync at the end does it all.
pub(in super::super) fn start_writeback(_: &File) {}

/// A read waits for the disk.
pub(in super::super) fn start_reading(_: &File, _: u64, _: u64) {}

/// Nothing tells.
pub(in super::super) fn is_cached(_: &File, _: u64) -> bool {
    true
}

/// There is no way past the page cache.
pub(in super::super) fn open_direct(_: &File) -> Option<File> {
    None
}

/// Pages are as they are.
pub(in super::super) fn prefer_large_pages(_: &mut [u8]) {}

/// One buffer a call.
pub(in super::super) fn read_parts(file: &File, buffers: &mut [IoSliceMut<'_>], offset: u64) -> Result<usize> {
    match buffers.iter_mut().find(|buffer| !buffer.is_empty()) {
        Some(buffer) => rustix::io::pread(file, &mut **buffer, offset),
        None => Ok(0),
    }
}

/// One part a call.
pub(in super::super) fn write_parts(file: &File, parts: &[IoSlice<'_>], offset: u64) -> Result<usize> {
    match parts.iter().find(|part| !part.is_empty()) {
        Some(part) => rustix::io::pwrite(file, part, offset),
        None => Ok(0),
    }
}

/// Makes the bytes of a file durable, and its length.
pub(in super::super) fn sync_data(file: impl AsFd) -> Result<()> {
    sync_all(file)
}

/// Makes a file or a folder durable. On Apple's systems only a full sync reaches the device.
pub(in super::super) fn sync_all(file: impl AsFd) -> Result<()> {
    #[cfg(target_vendor = "apple")]
    if rustix::fs::fcntl_fullfsync(file.as_fd()).is_ok() {
        return Ok(());
    }
    rustix::fs::fsync(file)
}
