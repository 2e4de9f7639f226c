//! Linux.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, ResolveFlags};
use rustix::io::{Errno, Result};

use super::super::transfer::retry;

/// Past the page cache.
pub(in super::super) const DIRECT: OFlags = OFlags::DIRECT;
/// To a place in the tree, not to what is there.
pub(in super::super) const PATH: OFlags = OFlags::PATH;

/// Opens a path that the kernel keeps below `root`; `None` where the kernel has no such call.
pub(in super::super) fn open_beneath(root: &OwnedFd, relative: &str, flags: OFlags, mode: Mode) -> Option<Result<OwnedFd>> {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    let known = *KNOWN.get_or_init(|| {
        let folder = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tried = rustix::fs::openat2(CWD, ".", folder, Mode::empty(), ResolveFlags::BENEATH);
        // Old kernels have no such call, and some sandboxes forbid it.
        !matches!(tried, Err(Errno::NOSYS | Errno::PERM))
    });
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    known.then(|| {
        retry(|| match rustix::fs::openat2(root, relative, flags, mode, resolve) {
            // A rename elsewhere made the kernel unsure; it asks to try again.
            Err(Errno::AGAIN) => Err(Errno::INTR),
            done => done,
        })
    })
}

/// Takes the space now, so that a full disk is noticed before hours of writing, and so that the file is not scattered.
pub(in super::super) fn reserve(file: &File, length: u64) -> Result<()> {
    if length == 0 {
        return Ok(());
    }
    match retry(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)) {
        // Not every file system can; the writes then allocate as they come.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether the file system copied all bytes by itself.
pub(in super::super) fn clone(source: &File, target: &File) -> Result<bool> {
    if rustix::fs::ioctl_ficlone(target, source).is_ok() {
        return Ok(true);
    }
    let mut left = rustix::fs::fstat(source)?.st_size as u64;
    while left > 0 {
        let step = usize::try_from(left).unwrap_or(usize::MAX).min(1 << 30);
        match retry(|| rustix::fs::copy_file_range(source, None, target, None, step)) {
            Ok(0) => return Ok(false),
            Ok(count) => left = left.saturating_sub(count as u64),
            Err(Errno::NOSPC) => return Err(Errno::NOSPC),
            Err(Errno::IO) => return Err(Errno::IO),
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

/// Starts writing dirty pages to the device while the rest of the file is still being copied into the page cache, so that
/// the sync at the end finds most of the work done. Does not wait for the end. A failure is not reported here: the kernel
/// keeps it and gives it to the sync, and a file system that cannot do this loses nothing but time.
pub(in super::super) fn start_writeback(file: &File) {
    // SAFETY: the call takes integers only and touches no memory of this process; `file` keeps the descriptor open.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Starts bringing a stretch of a file into the page cache, and does not wait for it. The kernel does so by itself for one
/// reader of a file that goes on where it was; several threads that share a descriptor look like random reads to it. A file
/// system that cannot do this loses nothing but time.
pub(in super::super) fn start_reading(file: &File, offset: u64, length: u64) {
    let _ = rustix::fs::fadvise(file, offset, NonZeroU64::new(length), rustix::fs::Advice::WillNeed);
}

/// Whether the page cache has a byte of a file. Where the system does not tell, such as of files of other users, it is said to.
pub(in super::super) fn is_cached(file: &File, offset: u64) -> bool {
    let page = rustix::param::page_size();
    let Ok(start) = libc::off_t::try_from(offset - offset % page as u64) else { return true };
    let mut resident = 0u8;
    // SAFETY: a mapping of its own, at an address that the kernel chooses, that nothing may read and nobody learns of; it is
    // gone before this returns. The call in between writes one byte for its one page.
    unsafe {
        let mapped = libc::mmap(std::ptr::null_mut(), page, libc::PROT_NONE, libc::MAP_SHARED, file.as_raw_fd(), start);
        if mapped == libc::MAP_FAILED {
            return true;
        }
        let told = libc::mincore(mapped, page, &raw mut resident);
        libc::munmap(mapped, page);
        told != 0 || resident & 1 != 0
    }
}

/// The same file, to be read past the page cache; `None` where that cannot be.
pub(in super::super) fn open_direct(file: &File) -> Option<File> {
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(itself, OFlags::RDONLY | OFlags::CLOEXEC | DIRECT, Mode::empty()).ok().map(File::from)
}

/// Asks for large pages under memory that holds zeros, from a large page's boundary on. Best effort: small ones do, too.
pub(in super::super) fn prefer_large_pages(zeros: &mut [u8]) {
    let (start, length) = (zeros.as_mut_ptr().cast(), zeros.len());
    // SAFETY: the memory is the caller's alone. The first call changes nothing that could be read; the second gives pages that were
    // touched before back, and what comes instead holds zeros, as they did. It is not made unless the first one was understood.
    unsafe {
        if rustix::mm::madvise(start, length, rustix::mm::Advice::LinuxHugepage).is_ok() {
            let _ = rustix::mm::madvise(start, length, rustix::mm::Advice::LinuxDontNeed);
        }
    }
}

/// Fills buffers one after the other; may fill less than all.
pub(in super::super) fn read_parts(file: &File, buffers: &mut [IoSliceMut<'_>], offset: u64) -> Result<usize> {
    rustix::io::preadv(file, buffers, offset)
}

/// Writes parts one after the other; may write less than all.
pub(in super::super) fn write_parts(file: &File, parts: &[IoSlice<'_>], offset: u64) -> Result<usize> {
    rustix::io::pwritev(file, parts, offset)
}

/// Makes the bytes of a file durable, and its length.
pub(in super::super) fn sync_data(file: impl AsFd) -> Result<()> {
    rustix::fs::fdatasync(file)
}

/// Makes a file or a folder durable.
pub(in super::super) fn sync_all(file: impl AsFd) -> Result<()> {
    rustix::fs::fsync(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_stay_zeros_under_large_pages_and_take_what_is_written() {
        let mut bytes = vec![0u8; 8 << 20];
        let start = bytes.as_ptr().align_offset(2 << 20);
        let zeros = &mut bytes[start..start + (4 << 20)];
        prefer_large_pages(zeros);
        assert!(zeros.iter().all(|byte| *byte == 0));
        zeros.fill(7);
        assert!(zeros.iter().all(|byte| *byte == 7));
        // Memory that no page starts at is left as it is.
        prefer_large_pages(&mut [0u8; 100][1..]);
    }
}
