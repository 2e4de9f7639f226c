//! What is read next, told to the disk beforehand, so that it comes while the processor works on what is there.

use reshard_storage::Reader;

/// A disk is told so many bytes before they are read what will be.
const AHEAD: u64 = 16 << 20;
/// As much at a time: kernels take no more from one announcement than a device reads at once.
const ANNOUNCED: u64 = 1 << 20;

/// Tells a disk what is read after a stretch of a file, up to `last`, unless it was told.
pub(super) fn announce(reader: &dyn Reader, announced: &mut u64, (start, end): (u64, u64), last: u64) {
    let mut from = start.max(*announced);
    let goal = last.min(end.saturating_add(AHEAD));
    if last <= end || goal <= from || (goal - from < ANNOUNCED && goal < last) {
        return;
    }
    while from < goal {
        let length = ANNOUNCED.min(goal - from);
        reader.will_read(from, length);
        from += length;
    }
    *announced = goal;
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use reshard_storage::StorageError;

    use super::*;
    use crate::stream::BLOCK;

    /// Remembers what it was told.
    #[derive(Debug, Default)]
    struct Told(Mutex<Vec<(u64, u64)>>);

    impl Reader for Told {
        fn path(&self) -> &str {
            "file"
        }

        fn len(&self) -> u64 {
            u64::MAX
        }

        fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), StorageError> {
            Ok(())
        }

        fn will_read(&self, offset: u64, length: u64) {
            self.0.lock().unwrap().push((offset, length));
        }
    }

    #[test]
    fn a_disk_is_told_every_byte_once_and_none_beyond_what_is_read() {
        for (start, length) in [(700, 64 << 20), (0, 5 << 20), (41, (4 << 20) + 3)] {
            let (told, mut announced, block) = (Told::default(), 0, BLOCK as u64 / 4);
            let last = start + length;
            let mut at = start;
            while at < last {
                let end = (at + block).min(last);
                announce(&told, &mut announced, (at, end), last);
                let ahead = announced.saturating_sub(end);
                assert!(announced == last || (AHEAD - ANNOUNCED..=AHEAD).contains(&ahead), "{ahead} bytes ahead at {at}");
                at = end;
            }
            let told = told.0.into_inner().unwrap();
            let mut next = start;
            for (offset, length) in told {
                assert_eq!(offset, next);
                assert!(length <= ANNOUNCED, "kernels cut longer ones");
                next += length;
            }
            assert_eq!(next, last);
        }
    }

    #[test]
    fn what_is_read_at_once_is_not_announced() {
        let (told, mut announced) = (Told::default(), 0);
        announce(&told, &mut announced, (10, 5000), 5000);
        assert!(told.0.into_inner().unwrap().is_empty());
    }
}
