//! What every backend and every wrapper must do, as one suite: a rule is a function that panics where it is broken. A new backend
//! is right when it keeps every one of [`CASES`]; tests show each of them as a test of its own.
// The suite is a test: it fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::IoSlice;
use std::sync::Arc;

use crate::memory::MemoryStore;
use crate::{Linked, Pass, Publish, RangeRead, StorageError, Store, WriteOptions, is_staged};

/// Makes an empty store, rooted at a place of this name. Two names are siblings in one place.
pub type Make<'a> = &'a dyn Fn(&str) -> Arc<dyn Store>;

/// One rule.
pub type Case = fn(Make<'_>);

macro_rules! cases {
    ($($name:ident)*) => { &[$((stringify!($name), $name)),*] };
}

/// Every rule, by name.
pub const CASES: &[(&str, Case)] = cases! {
    nothing_is_there_at_first
    paths_outside_are_refused
    what_is_written_is_read
    many_threads_write_one_file
    ordered_backends_refuse_disorder
    a_large_file_survives
    existing_files_are_not_overwritten
    declared_lengths_are_checked
    an_aborted_file_is_gone
    publishing_creates_or_replaces
    one_of_many_creators_wins
    an_update_needs_the_version_that_was_seen
    a_root_has_one_writer_at_a_time
    a_rename_replaces_in_one_step
    a_reader_never_sees_half_a_publication
    listings_are_complete
    reads_past_the_end_fail
    ranges_may_be_in_any_order
    a_pass_lends_every_element_once_and_whole
    links_and_copies
    deleting_is_idempotent
};

/// Bytes that differ everywhere and repeat nowhere soon.
fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn write(store: &dyn Store, path: &str, bytes: &[u8]) {
    let writer = store.create_writer(path, &WriteOptions::with_length(bytes.len() as u64)).unwrap();
    writer.write_at(0, &[IoSlice::new(bytes)]).unwrap();
    writer.finish(true).unwrap();
}

fn names_path<T: std::fmt::Debug>(result: Result<T, StorageError>, path: &str) -> StorageError {
    let error = result.expect_err("this must fail");
    assert!(error.to_string().contains(path), "the error does not name {path:?}: {error}");
    error
}

fn nothing_is_there_at_first(make: Make<'_>) {
    let store = make("first");
    assert!(store.list("").unwrap().is_empty());
    assert!(store.list_children().unwrap().is_empty());
    store.prepare().unwrap();
    store.prepare().unwrap();
    assert!(store.list("").unwrap().is_empty());
    assert!(!store.exists("a").unwrap());
    assert!(names_path(store.size("a/b"), "a/b").is_not_found());
    assert!(names_path(store.read("a", 10), "a").is_not_found());
    assert!(names_path(store.open_reader("a"), "a").is_not_found());
    assert!(names_path(store.link_or_copy("a", &*store, "b"), "a").is_not_found());
    store.delete("a").unwrap();
    store.delete("a/b").unwrap();
    store.sync().unwrap();
    assert!(!store.describe().is_empty());
}

fn paths_outside_are_refused(make: Make<'_>) {
    let store = make("outside");
    store.prepare().unwrap();
    store.publish("inside", b"x", Publish::Create).unwrap();
    for path in ["", "..", "../outside/inside", "/etc/hostname", "a/../inside", "a//b", "./inside", "inside/"] {
        let refused = |result: Result<(), StorageError>| {
            assert!(matches!(result, Err(StorageError::BadPath { .. })), "{path:?}: {result:?}");
        };
        refused(store.size(path).map(|_| ()));
        refused(store.exists(path).map(|_| ()));
        refused(store.read(path, 10).map(|_| ()));
        refused(store.open_reader(path).map(|_| ()));
        refused(store.create_writer(path, &WriteOptions::default()).map(|_| ()));
        refused(store.publish(path, b"x", Publish::Replace));
        refused(store.publish(path, b"x", Publish::Create));
        refused(store.delete(path));
        refused(store.link_or_copy("inside", &*store, path).map(|_| ()));
        refused(store.link_or_copy(path, &*store, "copy").map(|_| ()));
    }
    assert_eq!(store.list("").unwrap().len(), 1);
}

fn what_is_written_is_read(make: Make<'_>) {
    let store = make("written");
    store.prepare().unwrap();
    let bytes = pattern(100_003, 1);
    for (name, declared) in [("declared", Some(bytes.len() as u64)), ("deep/er/undeclared", None)] {
        let writer = store.create_writer(name, &WriteOptions { length: declared }).unwrap();
        assert!(writer.path().contains(name));
        let mut offset = 0;
        // Several parts per write, empty ones among them, at offsets that no block starts at.
        for piece in bytes.chunks(7_001) {
            let (left, right) = piece.split_at(piece.len() / 3);
            let parts = [IoSlice::new(left), IoSlice::new(&[]), IoSlice::new(right)];
            writer.write_at(offset, &parts).unwrap();
            offset += piece.len() as u64;
        }
        writer.write_at(offset, &[]).unwrap();
        writer.finish(true).unwrap();
        store.sync().unwrap();
        assert_eq!(store.size(name).unwrap(), bytes.len() as u64);
        assert!(store.exists(name).unwrap());
        assert_eq!(store.read(name, bytes.len() as u64).unwrap(), bytes);
        let error = names_path(store.read(name, bytes.len() as u64 - 1), name);
        assert!(matches!(error, StorageError::TooLarge { size: 100_003, .. }), "{error}");
        let reader = store.open_reader(name).unwrap();
        assert_eq!(reader.len(), bytes.len() as u64);
        assert!(reader.path().contains(name) && !reader.is_empty());
        for (offset, length) in [(0, 100_003), (1, 5), (4_096, 8_192), (99_999, 4), (50_000, 0), (100_003, 0)] {
            let mut back = vec![0; length];
            reader.read_at(offset as u64, &mut back).unwrap();
            assert_eq!(back, bytes[offset..offset + length]);
        }
    }
    for sync in [false, true] {
        let name = format!("empty-{sync}");
        store.create_writer(&name, &WriteOptions::with_length(0)).unwrap().finish(sync).unwrap();
        assert_eq!(store.read(&name, 0).unwrap(), b"");
        assert!(store.open_reader(&name).unwrap().is_empty());
    }
}

fn many_threads_write_one_file(make: Make<'_>) {
    let store = make("threads");
    if store.capabilities().ordered_writes {
        return;
    }
    store.prepare().unwrap();
    let bytes = pattern(1 << 20, 2);
    let writer = store.create_writer("file", &WriteOptions::with_length(bytes.len() as u64)).unwrap();
    // Pieces of an odd size, dealt out to the threads, so that neighbours share blocks.
    let pieces: Vec<_> = bytes.chunks(4_999).enumerate().collect();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (pieces, writer) = (&pieces, &writer);
            scope.spawn(move || {
                for (index, piece) in pieces.iter().skip(thread).step_by(4).rev() {
                    writer.write_at((index * 4_999) as u64, &[IoSlice::new(piece)]).unwrap();
                }
            });
        }
    });
    writer.finish(true).unwrap();
    let reader = store.open_reader("file").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut back = vec![0; bytes.len()];
                reader.read_at(0, &mut back).unwrap();
                assert!(back == bytes, "the file is not what the threads wrote");
            });
        }
    });
}

fn ordered_backends_refuse_disorder(make: Make<'_>) {
    let store = make("order");
    store.prepare().unwrap();
    let writer = store.create_writer("file", &WriteOptions::default()).unwrap();
    writer.write_at(0, &[IoSlice::new(b"ab")]).unwrap();
    if store.capabilities().ordered_writes {
        for offset in [0, 3] {
            let error = names_path(writer.write_at(offset, &[IoSlice::new(b"x")]), "file");
            assert!(matches!(error, StorageError::OutOfOrder { expected: 2, .. }), "{error}");
        }
    } else {
        writer.write_at(4, &[IoSlice::new(b"ef")]).unwrap();
    }
    writer.write_at(2, &[IoSlice::new(b"cd")]).unwrap();
    assert!(writer.write_at(u64::MAX - 1, &[IoSlice::new(b"xyz")]).is_err());
    writer.finish(true).unwrap();
    assert!(b"abcdef".starts_with(&store.read("file", 10).unwrap()));
}

fn a_large_file_survives(make: Make<'_>) {
    let store = make("large");
    store.prepare().unwrap();
    let bytes = pattern((21 << 20) + 12_345, 3);
    let writer = store.create_writer("file", &WriteOptions::with_length(bytes.len() as u64)).unwrap();
    let mut offset = 0;
    for piece in bytes.chunks((3 << 20) + 17) {
        writer.write_at(offset, &[IoSlice::new(&piece[..64]), IoSlice::new(&piece[64..])]).unwrap();
        offset += piece.len() as u64;
    }
    writer.finish(true).unwrap();
    let mut back = vec![0; bytes.len()];
    store.open_reader("file").unwrap().read_at(0, &mut back).unwrap();
    assert!(back == bytes, "a large file came back changed");
}

fn existing_files_are_not_overwritten(make: Make<'_>) {
    let store = make("existing");
    store.prepare().unwrap();
    write(&*store, "file", b"old");
    let again = store
        .create_writer("file", &WriteOptions::default())
        .and_then(|writer| writer.write_at(0, &[IoSlice::new(b"new")]).and_then(|()| writer.finish(true)));
    assert!(names_path(again, "file").is_already_exists());
    assert_eq!(store.read("file", 10).unwrap(), b"old");
}

fn declared_lengths_are_checked(make: Make<'_>) {
    let store = make("lengths");
    store.prepare().unwrap();
    let writer = store.create_writer("file", &WriteOptions::with_length(10)).unwrap();
    writer.write_at(0, &[IoSlice::new(b"short")]).unwrap();
    let error = names_path(writer.finish(true), "file");
    assert!(matches!(error, StorageError::WrongLength { declared: 10, written: 5, .. }), "{error}");
}

fn an_aborted_file_is_gone(make: Make<'_>) {
    let store = make("aborted");
    store.prepare().unwrap();
    let writer = store.create_writer("folder/file", &WriteOptions::with_length(12 << 20)).unwrap();
    writer.write_at(0, &[IoSlice::new(&pattern(11 << 20, 4))]).unwrap();
    writer.abort();
    assert!(store.list("").unwrap().is_empty());
    write(&*store, "folder/file", b"again");
    assert_eq!(store.read("folder/file", 10).unwrap(), b"again");
}

fn publishing_creates_or_replaces(make: Make<'_>) {
    let store = make("publish");
    store.prepare().unwrap();
    store.publish(".metadata", b"one", Publish::Create).unwrap();
    assert!(names_path(store.publish(".metadata", b"two", Publish::Create), ".metadata").is_already_exists());
    assert_eq!(store.read(".metadata", 10).unwrap(), b"one");
    store.publish(".metadata", b"three", Publish::Replace).unwrap();
    assert_eq!(store.read(".metadata", 10).unwrap(), b"three");
    store.publish("new/folder/file", b"", Publish::Replace).unwrap();
    assert_eq!(store.read("new/folder/file", 10).unwrap(), b"");
    let left: Vec<_> = store.list("").unwrap().into_iter().filter(|file| is_staged(&file.path)).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn one_of_many_creators_wins(make: Make<'_>) {
    let store = make("race");
    store.prepare().unwrap();
    // Learns by trying, where it cannot be known before.
    store.publish("probe", b"x", Publish::Create).unwrap();
    if !store.capabilities().put_if_absent {
        return;
    }
    let store = &store;
    let winners: Vec<String> = std::thread::scope(|scope| {
        let racers: Vec<_> = (0..6)
            .map(|racer| {
                scope.spawn(move || {
                    let name = format!("racer {racer}");
                    match store.publish("prize", name.as_bytes(), Publish::Create) {
                        Ok(()) => Some(name),
                        Err(error) => {
                            assert!(error.is_already_exists(), "{error}");
                            None
                        }
                    }
                })
            })
            .collect();
        racers.into_iter().filter_map(|racer| racer.join().unwrap()).collect()
    });
    // A server that checks and then writes can let two in; whoever is told that it won must at least be one of them.
    assert!(!winners.is_empty());
    let prize = String::from_utf8(store.read("prize", 100).unwrap()).unwrap();
    assert!(winners.contains(&prize), "{prize:?} was told that it lost");
    if !store.capabilities().ordered_writes {
        assert_eq!(winners.len(), 1);
    }
}

fn an_update_needs_the_version_that_was_seen(make: Make<'_>) {
    let store = make("update");
    store.prepare().unwrap();
    assert_eq!(store.version("file").unwrap(), None);
    store.publish("file", b"one", Publish::Create).unwrap();
    let first = store.version("file").unwrap().expect("it exists");
    assert_eq!(store.version("file").unwrap().as_ref(), Some(&first), "looking changes nothing");
    store.publish("file", b"two", Publish::Update(first.clone())).unwrap();
    assert_eq!(store.read("file", 10).unwrap(), b"two");
    let late = names_path(store.publish("file", b"three", Publish::Update(first.clone())), "file");
    assert!(matches!(late, StorageError::Changed { .. }), "{late}");
    assert_eq!(store.read("file", 10).unwrap(), b"two");
    store.delete("file").unwrap();
    let gone = names_path(store.publish("file", b"three", Publish::Update(first)), "file");
    assert!(matches!(gone, StorageError::Changed { .. }), "{gone}");
    assert!(!store.exists("file").unwrap());
}

fn a_root_has_one_writer_at_a_time(make: Make<'_>) {
    let (store, again, other) = (make("lock"), make("lock"), make("lock-sibling"));
    for store in [&store, &other] {
        store.prepare().unwrap();
    }
    let held = store.lock().unwrap();
    let _elsewhere = other.lock().unwrap();
    if store.capabilities().locks {
        assert!(matches!(again.lock(), Err(StorageError::Busy { .. })));
        assert!(matches!(store.lock(), Err(StorageError::Busy { .. })));
    }
    drop(held);
    drop(again.lock().unwrap());
    assert!(store.list("").unwrap().is_empty(), "a lock leaves nothing behind");
}

fn a_rename_replaces_in_one_step(make: Make<'_>) {
    let store = make("rename");
    store.prepare().unwrap();
    write(&*store, "from", b"new");
    write(&*store, "to", b"old");
    if !store.capabilities().hard_links {
        assert!(matches!(store.rename("from", "to", Publish::Replace), Err(StorageError::Unsupported { .. })));
        return;
    }
    assert!(names_path(store.rename("from", "to", Publish::Create), "to").is_already_exists());
    assert_eq!(store.read("to", 10).unwrap(), b"old");
    store.rename("from", "to", Publish::Replace).unwrap();
    assert_eq!(store.read("to", 10).unwrap(), b"new");
    assert!(store.rename("from", "to", Publish::Replace).unwrap_err().is_not_found());
    store.rename("to", "third", Publish::Create).unwrap();
    assert_eq!(store.list("").unwrap().len(), 1);
}

fn a_reader_never_sees_half_a_publication(make: Make<'_>) {
    let store = make("half");
    store.prepare().unwrap();
    let versions = [pattern(50_000, 5), pattern(70_000, 6)];
    store.publish("file", &versions[0], Publish::Replace).unwrap();
    if !store.capabilities().atomic_replace {
        return;
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..20 {
                store.publish("file", &versions[round % 2], Publish::Replace).unwrap();
            }
            done.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        while !done.load(std::sync::atomic::Ordering::SeqCst) {
            let seen = store.read("file", 1 << 20).unwrap();
            assert!(versions.contains(&seen), "{} bytes that nobody published", seen.len());
        }
    });
}

fn listings_are_complete(make: Make<'_>) {
    let (store, sibling) = (make("list"), make("list-sibling"));
    for store in [&store, &sibling] {
        store.prepare().unwrap();
    }
    sibling.publish("other", b"x", Publish::Create).unwrap();
    for path in ["b", "a/z", "a/b/c", "a.txt", "ab/c"] {
        store.publish(path, path.as_bytes(), Publish::Create).unwrap();
    }
    let listed = |prefix: &str| -> Vec<String> { store.list(prefix).unwrap().into_iter().map(|file| file.path).collect() };
    assert_eq!(listed(""), ["a.txt", "a/b/c", "a/z", "ab/c", "b"]);
    assert_eq!(listed("a"), ["a.txt", "a/b/c", "a/z", "ab/c"]);
    assert_eq!(listed("a/"), ["a/b/c", "a/z"]);
    assert_eq!(listed("a/b"), ["a/b/c"]);
    assert_eq!(listed("a/b/c"), ["a/b/c"]);
    assert!(listed("nothing/here").is_empty());
    assert_eq!(store.list_children().unwrap(), ["a", "ab"]);
    for file in store.list("").unwrap() {
        assert_eq!(file.size, file.path.len() as u64);
    }
}

fn reads_past_the_end_fail(make: Make<'_>) {
    let store = make("past");
    store.prepare().unwrap();
    write(&*store, "file", b"0123456789");
    let reader = store.open_reader("file").unwrap();
    for (offset, length) in [(10, 1), (5, 6), (11, 0), (u64::MAX, 1), (u64::MAX, 0)] {
        let error = names_path(reader.read_at(offset, &mut vec![0; length]), "file");
        assert!(matches!(error, StorageError::OutOfRange { size: 10, .. }), "{error}");
        let mut buf = vec![0; length];
        let mut good = [0];
        let mut ranges = [RangeRead { offset: 0, buf: &mut good }, RangeRead { offset, buf: &mut buf }];
        assert!(matches!(reader.read_ranges(&mut ranges), Err(StorageError::OutOfRange { .. })));
        let mut pass = Pass::until(offset.saturating_add(length as u64), 1);
        assert!(matches!(reader.lend(offset, &mut pass), Err(StorageError::OutOfRange { .. })));
    }
}

fn ranges_may_be_in_any_order(make: Make<'_>) {
    let store = make("ranges");
    store.prepare().unwrap();
    let bytes = pattern((9 << 20) + 11, 7);
    write(&*store, "file", &bytes);
    let reader = store.open_reader("file").unwrap();
    let check = |wanted: &[(usize, usize)]| {
        let mut bufs: Vec<Vec<u8>> = wanted.iter().map(|&(_, length)| vec![0; length]).collect();
        let mut ranges: Vec<RangeRead<'_>> =
            wanted.iter().zip(&mut bufs).map(|(&(offset, _), buf)| RangeRead { offset: offset as u64, buf }).collect();
        reader.read_ranges(&mut ranges).unwrap();
        for (&(offset, length), buf) in wanted.iter().zip(&bufs) {
            assert!(*buf == bytes[offset..offset + length], "{length} bytes at {offset}");
        }
    };
    check(&[]);
    check(&[(5, 0), (5, 10), (15, 0), (15, 5), (20, 1)]);
    check(&[(100, 50), (0, 10), (90, 30), (100, 50), (bytes.len() - 3, 3), (120, 1)]);
    check(&[(0, bytes.len()), (3 << 20, 5 << 20)]);
    let adjacent: Vec<_> = (0..3_000).map(|index| (index * 13, 13)).collect();
    check(&adjacent);
    let columns: Vec<_> = (0..500).map(|row| (row * 16_384 + 100, 200)).collect();
    check(&columns);
}

fn a_pass_lends_every_element_once_and_whole(make: Make<'_>) {
    let store = make("lending");
    store.prepare().unwrap();
    let bytes = pattern((9 << 20) + 11, 9);
    write(&*store, "file", &bytes);
    let reader = store.open_reader("file").unwrap();
    for (start, end, element) in [(0, 9 << 20, 2), (5, bytes.len(), 1), (7, 7 + 12 * 700_001, 12), (3, 11, 8), (10, 10, 4)] {
        let mut pass = Pass::until(end as u64, element as u64).with_memory(vec![7; 100]);
        let mut at = start;
        while at < end {
            let lent = reader.lend(at as u64, &mut pass).unwrap();
            assert!(!lent.is_empty() && lent.len().is_multiple_of(element), "{} bytes of elements of {element}", lent.len());
            assert!(*lent == bytes[at..at + lent.len()], "{} bytes at {at}", lent.len());
            at += lent.len();
        }
        assert_eq!(at, end);
        assert!(reader.lend(end as u64, &mut pass).unwrap().is_empty());
    }
}

fn links_and_copies(make: Make<'_>) {
    let (store, other) = (make("links"), make("links-target"));
    for store in [&store, &other] {
        store.prepare().unwrap();
    }
    let bytes = pattern(100_000, 8);
    write(&*store, "file", &bytes);
    store.link_or_copy("file", &*store, "folder/near").unwrap();
    store.link_or_copy("file", &*other, "far").unwrap();
    let memory = MemoryStore::new();
    assert_eq!(store.link_or_copy("file", &memory, "copy").unwrap(), Linked::Copied);
    assert_eq!(memory.link_or_copy("copy", &*other, "back").unwrap(), Linked::Copied);
    other.sync().unwrap();
    assert!(names_path(store.link_or_copy("file", &*other, "far"), "far").is_already_exists());
    store.delete("file").unwrap();
    assert_eq!(store.read("folder/near", 1 << 20).unwrap(), bytes);
    assert_eq!(other.read("far", 1 << 20).unwrap(), bytes);
    assert_eq!(other.read("back", 1 << 20).unwrap(), bytes);
    assert_eq!(memory.read("copy", 1 << 20).unwrap(), bytes);
}

fn deleting_is_idempotent(make: Make<'_>) {
    let (store, sibling) = (make("delete"), make("delete-sibling"));
    for store in [&store, &sibling] {
        store.prepare().unwrap();
        store.publish("a/file", b"x", Publish::Create).unwrap();
        store.publish("file", b"x", Publish::Create).unwrap();
    }
    store.delete("file").unwrap();
    store.delete("file").unwrap();
    store.sync().unwrap();
    assert!(!store.exists("file").unwrap() && store.exists("a/file").unwrap());
    store.delete_empty_root().unwrap();
    assert!(store.exists("a/file").unwrap());
    store.delete_root().unwrap();
    store.delete_root().unwrap();
    store.delete_empty_root().unwrap();
    assert!(store.list("").unwrap().is_empty());
    assert_eq!(sibling.list("").unwrap().len(), 2);
    store.prepare().unwrap();
    store.publish("file", b"again", Publish::Create).unwrap();
    assert_eq!(store.read("file", 10).unwrap(), b"again");
}
