//! What only local files have: links, folders, full disks, other users' leftovers.

use std::io::IoSlice;
use std::os::unix::fs::MetadataExt;

use reshard_storage::{
    Address, Linked, NoObserver, Operation, Pass, Publish, PublishObserver, StorageError, Store, StoreOptions, WriteOptions,
    is_staged, open,
};

fn store(folder: &std::path::Path) -> std::sync::Arc<dyn Store> {
    open(&Address::local(folder), &StoreOptions::default()).unwrap()
}

#[test]
fn a_link_is_a_second_name_for_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    store.publish("a", b"bytes", Publish::Create).unwrap();
    assert_eq!(store.link_or_copy("a", &*store, "b").unwrap(), Linked::HardLink);
    let inode = |name| std::fs::metadata(folder.path().join(name)).unwrap().ino();
    assert_eq!(inode("a"), inode("b"));
    // Replacing one name leaves the other alone.
    store.publish("a", b"other", Publish::Replace).unwrap();
    assert_eq!(store.read("b", 10).unwrap(), b"bytes");
}

#[test]
fn another_file_system_gets_a_copy() {
    let Ok(far) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let near = tempfile::tempdir().unwrap();
    let (near, far) = (store(near.path()), store(far.path()));
    near.prepare().unwrap();
    near.publish("a", b"bytes", Publish::Create).unwrap();
    let linked = near.link_or_copy("a", &*far, "sub/b").unwrap();
    assert_ne!(linked, Linked::ServerCopy, "no two file systems share blocks");
    assert_eq!(far.read("sub/b", 10).unwrap(), b"bytes");
}

#[test]
fn a_root_that_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder.path().join("not/there"));
    assert!(store.create_writer("file", &WriteOptions::default()).unwrap_err().is_not_found());
    store.prepare().unwrap();
    assert!(store.create_writer("file", &WriteOptions::default()).is_ok());
    assert_eq!(store.local_root().unwrap(), folder.path().join("not/there"));
}

#[test]
fn folders_and_pipes_are_not_files() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    store.publish("folder/file", b"x", Publish::Create).unwrap();
    rustix_mkfifo(&folder.path().join("pipe"));
    for path in ["folder", "pipe"] {
        assert!(store.open_reader(path).is_err(), "{path}");
        assert!(store.read(path, 10).is_err(), "{path}");
        assert!(store.size(path).is_err(), "{path}");
    }
    assert_eq!(store.list("").unwrap().len(), 1);
}

fn rustix_mkfifo(path: &std::path::Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[test]
fn more_than_the_disk_holds_is_no_space_before_a_byte_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let error = store.create_writer("file", &WriteOptions::with_length(1 << 60)).unwrap_err();
    let text = error.to_string();
    // A limit on the size of files shows as another error on some file systems; both name the file.
    assert!(error.is_no_space() || matches!(error, StorageError::Io { .. }), "{error:?}");
    assert!(text.contains("file") && text.contains("preallocate"), "{text}");
    assert!(store.list("").unwrap().is_empty(), "the file of no use is left behind");
}

#[test]
fn a_file_that_shrinks_under_its_reader_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for direct_io in [false, true] {
        let options = StoreOptions { direct_io, ..StoreOptions::default() };
        let store = open(&Address::local(folder.path()), &options).unwrap();
        store.publish("file", &[1; 10_000], Publish::Replace).unwrap();
        let reader = store.open_reader("file").unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("file")).unwrap();
        file.set_len(100).unwrap();
        let error = reader.read_at(50, &mut [0; 5_000]).unwrap_err();
        assert!(matches!(error, StorageError::OutOfRange { size: 100, .. }), "{error}");
    }
}

/// Fails before one operation of a publication.
struct FailBefore(Operation);

impl PublishObserver for FailBefore {
    fn before(&self, operation: Operation, path: &str) -> Result<(), StorageError> {
        if operation == self.0 {
            return Err(StorageError::Injected { path: path.to_owned(), operation, step: 0 });
        }
        NoObserver.before(operation, path)
    }
}

#[test]
fn a_publication_that_fails_leaves_the_old_content_and_no_leftover() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    store.publish("file", b"old", Publish::Create).unwrap();
    for operation in [Operation::Stage, Operation::WriteStaged, Operation::SyncStaged, Operation::Publish] {
        let failed = store.publish_observed("file", b"new", Publish::Replace, &FailBefore(operation));
        assert!(matches!(failed, Err(StorageError::Injected { .. })));
        assert_eq!(store.read("file", 10).unwrap(), b"old");
        assert!(store.list("").unwrap().iter().all(|file| !is_staged(&file.path)));
    }
}

#[test]
fn direct_writes_of_every_alignment_come_back() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options = StoreOptions { direct_io: true, ..StoreOptions::default() };
    let store = open(&Address::local(folder.path()), &options).unwrap();
    let memory: Vec<u8> = (0..6 << 20).map(|index: usize| (index * 31 + index / 4096) as u8).collect();
    let cases = [(0, 0, 4096), (0, 1, 5 << 20), (100, 3, 5 << 20), (4096, 0, 4096 * 3 + 1), (8191, 7, 2), (1, 0, 4094)];
    for (index, (offset, skew, length)) in cases.into_iter().enumerate() {
        let name = format!("file-{index}");
        let (one, two) = memory[skew..skew + length].split_at(length / 3);
        let writer = store.create_writer(&name, &WriteOptions::with_length((offset + length) as u64)).unwrap();
        writer.write_at(0, &[IoSlice::new(&memory[..offset])]).unwrap();
        writer.write_at(offset as u64, &[IoSlice::new(one), IoSlice::new(two)]).unwrap();
        writer.finish(true).unwrap();
        let mut back = vec![0; length];
        store.open_reader(&name).unwrap().read_at(offset as u64, &mut back).unwrap();
        assert!(back == memory[skew..skew + length], "{name}");
        let whole = std::fs::read(folder.path().join(&name)).unwrap();
        assert!(whole[..offset] == memory[..offset] && whole[offset..] == memory[skew..skew + length]);
    }
}

#[test]
fn a_reader_keeps_what_it_opened_while_the_file_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    store.publish("file", b"old", Publish::Create).unwrap();
    let reader = store.open_reader("file").unwrap();
    store.publish("file", b"newer", Publish::Replace).unwrap();
    let mut bytes = [0; 3];
    reader.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"old");
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_read_once_is_right_and_stays_out_of_the_page_cache() {
    use std::os::fd::AsFd;

    use rustix::fs::{Advice, fadvise};

    let bytes: Vec<u8> = (0..(9u32 << 20) + 777).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    // On a disk, and where there is no way past the page cache.
    let folders = [Some(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()), tempfile::tempdir_in("/dev/shm").ok()];
    for (folder, on_disk) in folders.into_iter().flatten().zip([true, false]) {
        let store = store(folder.path());
        store.publish("file", &bytes, Publish::Create).unwrap();
        let file = std::fs::File::open(folder.path().join("file")).unwrap();
        let forget = || {
            file.sync_all().unwrap();
            fadvise(file.as_fd(), 0, None, Advice::DontNeed).unwrap();
        };
        let reader = store.open_reader("file").unwrap();
        // All that a pass lends, in elements of some size that fit nothing; some of it is cached meanwhile.
        let lent = |offset: usize, length: usize, element: usize, disturb: &dyn Fn(usize)| {
            let mut pass = Pass::until((offset + length) as u64, element as u64);
            let mut found = Vec::new();
            while found.len() < length {
                let some = reader.lend((offset + found.len()) as u64, &mut pass).unwrap();
                assert!(!some.is_empty() && some.len().is_multiple_of(element), "{} bytes of elements of {element}", some.len());
                found.extend_from_slice(some);
                disturb(offset + found.len());
            }
            assert!(found == bytes[offset..offset + length], "{length} bytes at {offset}");
            assert!(reader.lend((offset + length) as u64, &mut pass).unwrap().is_empty());
        };
        let whole = bytes.len();
        let stretches =
            [(0, 1 << 20), (4096, 256 << 10), (777, (1 << 20) + 5), (whole - 2_000_001, 2_000_001), (9, 40), (13, whole - 13)];
        for (offset, length) in stretches {
            for element in [1, 2, 12].into_iter().filter(|element| length % element == 0) {
                forget();
                lent(offset, length, element, &|_| {});
                reader.read_at(0, &mut vec![0; bytes.len()]).unwrap();
                lent(offset, length, element, &|_| {});
                forget();
                lent(offset, length, element, &|at| reader.read_at(at as u64, &mut vec![0; 1000.min(whole - at)]).unwrap());
                forget();
            }
        }
        // What is held is not given for another place.
        let mut pass = Pass::until(whole as u64, 1);
        for at in [4_000_000, 77, 6_000_000, 200_000, 200_001] {
            let some = reader.lend(at as u64, &mut pass).unwrap();
            assert!(!some.is_empty() && *some == bytes[at..at + some.len()]);
        }
        let mut too_long = Pass::until(whole as u64 + 1, 1);
        let past_end = reader.lend(2 << 20, &mut too_long);
        assert!(matches!(past_end, Err(StorageError::OutOfRange { .. })), "{past_end:?}");
        if on_disk && opens_directly(&folder.path().join("file")) {
            forget();
            let before = cached_pages(&file, bytes.len());
            assert!(!reader.is_in_memory(1 << 19));
            reader.lend(0, &mut Pass::until(1 << 20, 1)).unwrap();
            assert!(cached_pages(&file, bytes.len()) <= before, "it went through the page cache");
            reader.read_at(0, &mut vec![0; 1 << 20]).unwrap();
            assert!(reader.is_in_memory(1 << 19));
        }
    }
}

#[cfg(target_os = "linux")]
fn opens_directly(path: &std::path::Path) -> bool {
    use rustix::fs::{Mode, OFlags};

    let Ok(file) = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT, Mode::empty()) else { return false };
    // Some file systems open and then refuse.
    let mut bytes = vec![0u8; 8192];
    let start = bytes.as_ptr().align_offset(4096);
    rustix::io::pread(&file, &mut bytes[start..start + 4096], 0).is_ok()
}

/// How many pages of a file the page cache has, by the system's own account.
#[cfg(target_os = "linux")]
fn cached_pages(file: &std::fs::File, length: usize) -> usize {
    use std::os::fd::AsRawFd;

    let pages = length.div_ceil(4096);
    let mut resident = vec![0u8; pages];
    // SAFETY: a mapping that is never read, and gone before this returns; one byte is written for each of its pages.
    unsafe {
        let mapped = libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(mapped, libc::MAP_FAILED);
        assert_eq!(libc::mincore(mapped, length, resident.as_mut_ptr()), 0);
        libc::munmap(mapped, length);
    }
    resident.iter().filter(|page| **page & 1 != 0).count()
}
