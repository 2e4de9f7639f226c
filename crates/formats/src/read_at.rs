//! Positioned reads: all that the readers of this crate need to know of a file.
//!
//! A reader asks for exact ranges; whoever owns the file (local, object store, memory) implements the
//! trait. Helpers here keep every read inside the file before any buffer is allocated.

use std::io;

/// Something of known length that can be read at any position.
pub trait ReadAt {
    /// The length in bytes.
    fn len(&self) -> u64;

    /// Fills `buf` with the bytes at `offset`; a read past the end is an error, never a short read.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Whether there is nothing to read.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ReadAt for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let source = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buf.len())?))
            .ok_or_else(|| past_end(offset, buf.len(), ReadAt::len(self)))?;
        buf.copy_from_slice(source);
        Ok(())
    }
}

impl ReadAt for Vec<u8> {
    fn len(&self) -> u64 {
        ReadAt::len(self.as_slice())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(offset, buf)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buf)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for std::sync::Arc<T> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buf)
    }
}

impl<T: ReadAt + ?Sized> ReadAt for Box<T> {
    fn len(&self) -> u64 {
        (**self).len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buf)
    }
}

fn past_end(offset: u64, wanted: usize, len: u64) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("{wanted} bytes at {offset} reach past the end at {len}"))
}

/// Reads `length` bytes at `offset` into a fresh buffer, after checking that they exist, so that a lying
/// length can't allocate more than the source holds.
pub(crate) fn read_vec(src: &dyn ReadAt, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let wanted = usize::try_from(length).unwrap_or(usize::MAX);
    if offset.checked_add(length).is_none_or(|end| end > src.len()) {
        return Err(past_end(offset, wanted, src.len()));
    }
    let mut buf = vec![0; wanted];
    src.read_at(offset, &mut buf)?;
    Ok(buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_inside_succeed_and_reads_past_the_end_fail() {
        let data = vec![1u8, 2, 3, 4];
        let mut buf = [0; 2];
        data.read_at(2, &mut buf).unwrap();
        assert_eq!(buf, [3, 4]);
        assert!(data.read_at(3, &mut buf).is_err());
        assert!(data.read_at(u64::MAX, &mut buf).is_err());
        assert!(data.read_at(4, &mut []).is_ok());
        assert_eq!(read_vec(&data, 1, 3).unwrap(), [2, 3, 4]);
        assert!(read_vec(&data, 1, u64::MAX).is_err());
        assert!(read_vec(&data, 0, 1 << 62).is_err());
    }
}
