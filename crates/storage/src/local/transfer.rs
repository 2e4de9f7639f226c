//! Loops around the positioned system calls: interrupted calls are repeated, short ones are continued, and the number
//! of parts per call stays below the kernel's limit.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};

use rustix::io::Errno;

use super::system;
use crate::{Operation, Result, StorageError};

/// Linux's `IOV_MAX`.
pub(super) const MAX_PARTS: usize = 1024;

/// Repeats a call that a signal interrupted.
pub(super) fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

fn failed(operation: Operation, path: &str, error: Errno) -> StorageError {
    StorageError::from_io(operation, path, io::Error::from(error))
}

/// Fills `buf` from `offset`. `size` is what the file should have, for the message if it has less.
pub(super) fn read_full(file: &File, mut offset: u64, mut buf: &mut [u8], path: &str, size: u64) -> Result<()> {
    while !buf.is_empty() {
        match retry(|| rustix::io::pread(file, &mut *buf, offset)) {
            Ok(0) => return Err(ended(file, path, offset, buf.len(), size)),
            Ok(count) => {
                buf = &mut buf[count..];
                offset += count as u64;
            }
            Err(error) => return Err(failed(Operation::Read, path, error)),
        }
    }
    Ok(())
}

/// Fills all buffers, one after the other, from `offset`.
pub(super) fn read_vectored(file: &File, mut offset: u64, mut bufs: &mut [IoSliceMut<'_>], path: &str, size: u64) -> Result<()> {
    // Drops empty buffers in front: a call with only those would return 0, which means the end of the file.
    IoSliceMut::advance_slices(&mut bufs, 0);
    while !bufs.is_empty() {
        let limit = bufs.len().min(MAX_PARTS);
        match retry(|| system::read_parts(file, &mut bufs[..limit], offset)) {
            Ok(0) => {
                let wanted = bufs.iter().map(|buf| buf.len()).sum();
                return Err(ended(file, path, offset, wanted, size));
            }
            Ok(count) => {
                IoSliceMut::advance_slices(&mut bufs, count);
                offset += count as u64;
            }
            Err(error) => return Err(failed(Operation::Read, path, error)),
        }
    }
    Ok(())
}

/// Writes all parts, one after the other, from `offset`.
pub(super) fn write_vectored(file: &File, mut offset: u64, parts: &[IoSlice<'_>], path: &str) -> Result<()> {
    let mut rest;
    let mut rest: &mut [IoSlice<'_>] = match parts {
        [] => return Ok(()),
        [only] => return write_full(file, offset, only, path),
        many => {
            rest = many.to_vec();
            &mut rest
        }
    };
    IoSlice::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        let limit = rest.len().min(MAX_PARTS);
        match retry(|| system::write_parts(file, &rest[..limit], offset)) {
            Ok(0) => return Err(wrote_nothing(path)),
            Ok(count) => {
                IoSlice::advance_slices(&mut rest, count);
                offset += count as u64;
            }
            Err(error) => return Err(failed(Operation::Write, path, error)),
        }
    }
    Ok(())
}

/// Writes all bytes from `offset`.
pub(super) fn write_full(file: &File, mut offset: u64, mut bytes: &[u8], path: &str) -> Result<()> {
    while !bytes.is_empty() {
        match retry(|| rustix::io::pwrite(file, bytes, offset)) {
            Ok(0) => return Err(wrote_nothing(path)),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(error) => return Err(failed(Operation::Write, path, error)),
        }
    }
    Ok(())
}

fn wrote_nothing(path: &str) -> StorageError {
    StorageError::from_io(Operation::Write, path, io::ErrorKind::WriteZero.into())
}

/// The file ended early: it shrank since it was opened.
fn ended(file: &File, path: &str, offset: u64, length: usize, size: u64) -> StorageError {
    let size = file.metadata().map_or(size, |metadata| metadata.len());
    StorageError::OutOfRange { path: path.to_owned(), offset, length: length as u64, size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_parts_than_the_kernel_takes_at_once_arrive_in_order() {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..3 * MAX_PARTS).map(|index| index as u8).collect();
        let mut parts = vec![IoSlice::new(&[])];
        parts.extend(bytes.chunks(1).map(IoSlice::new));
        parts.insert(7, IoSlice::new(&[]));
        write_vectored(&file, 10, &parts, "x").unwrap();

        let mut back = vec![0; bytes.len()];
        let mut bufs: Vec<_> = back.chunks_mut(1).map(IoSliceMut::new).collect();
        read_vectored(&file, 10, &mut bufs, "x", 0).unwrap();
        assert_eq!(back, bytes);
    }

    #[test]
    fn a_file_that_ends_early_is_named_with_its_size() {
        let file = tempfile::tempfile().unwrap();
        write_full(&file, 0, b"abc", "x").unwrap();
        let error = read_full(&file, 1, &mut [0; 4], "x", 9).unwrap_err();
        assert!(matches!(error, StorageError::OutOfRange { size: 3, .. }), "{error}");
        let (mut one, mut two) = ([0; 2], [0; 2]);
        let mut bufs = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        assert!(matches!(read_vectored(&file, 0, &mut bufs, "x", 9), Err(StorageError::OutOfRange { .. })));
    }
}
