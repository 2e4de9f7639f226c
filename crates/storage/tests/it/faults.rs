//! The faults do what they say, and the step matrix of a small commit proves old-or-new over every backend.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reshard_storage::faulty::{Failure, Fault, Faults, Loss, Rule, When};
use reshard_storage::memory::MemoryStore;
use reshard_storage::{Address, Operation, Publish, Result, StorageError, Store, StoreOptions, WriteOptions, open};

use crate::server::{BUCKET, Server};

/// A save in small: two data files, then the file that names them, then the old ones go. `name` tells saves apart.
fn save(store: &dyn Store, name: &str, careful: bool) -> Result<()> {
    store.prepare()?;
    let old = store.exists("index")?.then(|| store.read("index", 100)).transpose()?;
    let content = name.repeat(1000);
    for part in 0..2 {
        let path = format!("{name}-{part}");
        // Leftovers of a stopped save by the same name.
        store.delete(&path)?;
        let writer = store.create_writer(&path, &WriteOptions::with_length(content.len() as u64))?;
        let (left, right) = content.as_bytes().split_at(content.len() / 2);
        writer.write_at(0, &[IoSlice::new(left)])?;
        writer.write_at(left.len() as u64, &[IoSlice::new(right)])?;
        writer.finish(careful)?;
    }
    if careful {
        store.sync()?;
    }
    store.publish("index", name.as_bytes(), Publish::Replace)?;
    if let Some(old) = old {
        for part in 0..2 {
            store.delete(&format!("{}-{part}", String::from_utf8_lossy(&old)))?;
        }
    }
    Ok(())
}

/// Which save a reader finds, proven complete; `Err` tells what is wrong.
fn found(store: &dyn Store) -> std::result::Result<Option<String>, String> {
    let name = match store.read("index", 100) {
        Ok(name) => String::from_utf8(name).map_err(|error| error.to_string())?,
        Err(StorageError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    for part in 0..2 {
        let content = store.read(&format!("{name}-{part}"), 1 << 20).map_err(|error| error.to_string())?;
        if content != name.repeat(1000).as_bytes() {
            return Err(format!("{name}-{part} is damaged"));
        }
    }
    Ok(Some(name))
}

/// Stops a save at every step, fresh and overwriting; a reader must find the old or the new.
fn crash_matrix(make: &dyn Fn() -> Arc<dyn Store>, fault: Fault, loss: Loss) -> (usize, usize) {
    let mut outcomes = (0, 0);
    for overwriting in [false, true] {
        let start = || {
            let store = make();
            if overwriting {
                save(&*store, "old", true).unwrap();
            }
            store
        };
        let counting = Faults::new();
        save(&*counting.wrap(start()), "new", true).unwrap();
        assert!(counting.steps() >= 10, "{:?}", counting.log());
        for step in 0..counting.steps() {
            let store = start();
            let faults = Faults::at(step, fault).losing(loss);
            let error = save(&*faults.wrap(store.clone()), "new", true).unwrap_err();
            assert!(error.is_crash() && faults.crashed() == Some(step), "{error}");
            assert!(faults.wrap(store.clone()).read("index", 10).unwrap_err().is_crash());
            let at = &counting.log()[step as usize];
            match found(&*store) {
                Ok(Some(name)) if name == "new" => outcomes.1 += 1,
                Ok(old) => {
                    assert_eq!(old.as_deref(), overwriting.then_some("old"), "{at:?}");
                    outcomes.0 += 1;
                }
                Err(problem) => {
                    panic!("neither old nor new after a crash at {at:?} with {loss:?}: {problem}")
                }
            }
            // The next save to that place works, whatever is left there.
            save(&*store, "next", true).unwrap();
            assert_eq!(found(&*store).unwrap().as_deref(), Some("next"));
        }
    }
    outcomes
}

fn local() -> (tempfile::TempDir, impl Fn() -> Arc<dyn Store>) {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().to_owned();
    let next = std::sync::atomic::AtomicU32::new(0);
    let make = move || {
        let count = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        open(&Address::local(base.join(count.to_string())), &StoreOptions::default()).unwrap()
    };
    (folder, make)
}

#[test]
fn a_crash_at_any_step_leaves_old_or_new_on_local_files() {
    let (_folder, make) = local();
    for loss in [Loss::Nothing, Loss::Truncate, Loss::Zero, Loss::Remove] {
        for fault in [Fault::Crash, Fault::CrashInside] {
            let (old, new) = crash_matrix(&make, fault, loss);
            assert!(old > 0 && new > 0, "{old} {new}");
        }
    }
}

#[test]
fn a_crash_at_any_step_leaves_old_or_new_in_memory_and_on_s3() {
    let (old, new) = crash_matrix(&|| Arc::new(MemoryStore::new()), Fault::Crash, Loss::Zero);
    assert!(old > 0 && new > 0);
    let server = Server::start();
    let next = std::sync::atomic::AtomicU32::new(0);
    let make = || {
        let count = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        open(&Address::parse(&format!("s3://{BUCKET}/{count}")).unwrap(), &server.options()).unwrap()
    };
    let (old, new) = crash_matrix(&make, Fault::Crash, Loss::Remove);
    assert!(old > 0 && new > 0);
}

#[test]
fn a_save_that_does_not_sync_is_caught() {
    let (_folder, make) = local();
    for loss in [Loss::Truncate, Loss::Zero, Loss::Remove] {
        let counting = Faults::new();
        save(&*counting.wrap(make()), "new", false).unwrap();
        let broken = (0..counting.steps()).any(|step| {
            let store = make();
            let _ = save(&*Faults::crash_at(step).losing(loss).wrap(store.clone()), "new", false);
            found(&*store).is_err()
        });
        assert!(broken, "{loss:?} did not show that nothing was synced");
    }
}

#[test]
fn a_published_name_is_synced_before_it_appears() {
    let (_folder, make) = local();
    let counting = Faults::new().only_mutating();
    counting.wrap(make()).prepare().unwrap();
    let store = counting.wrap(make());
    store.prepare().unwrap();
    store.publish("index", b"x", Publish::Create).unwrap();
    let operations: Vec<Operation> = counting.log().iter().map(|step| step.operation).collect();
    assert_eq!(
        operations[2..],
        [Operation::Stage, Operation::WriteStaged, Operation::SyncStaged, Operation::Publish, Operation::SyncFolder]
    );
}

#[test]
fn failures_look_like_the_real_thing_and_nothing_is_published() {
    let (_folder, make) = local();
    let counting = Faults::new();
    save(&*counting.wrap(make()), "new", true).unwrap();
    for (failure, full) in [(Failure::NoSpace, true), (Failure::Device, false), (Failure::Marked, false)] {
        for step in counting.log() {
            let store = make();
            let error = save(&*Faults::fail_at(step.number, failure).wrap(store.clone()), "new", true).unwrap_err();
            assert_eq!(error.is_no_space(), full, "{error:?}");
            assert_eq!(matches!(error, StorageError::Injected { .. }), failure == Failure::Marked);
            assert!(error.path().contains(&step.path) || error.path().contains("staged"), "{error} at {step:?}");
            let late = step.operation == Operation::SyncFolder && step.number > 12;
            assert!(late || matches!(found(&*store), Ok(None)), "{step:?}");
        }
    }
}

#[test]
fn short_writes_fail_or_are_found_by_the_length() {
    let (_folder, make) = local();
    let rule = |fault| Rule { when: When::Nth { operation: Some(Operation::Write), path: "new-1".to_owned(), nth: 1 }, fault };
    for (fault, expected) in [(Fault::ShortWrite, "write"), (Fault::LostWrite, "declared")] {
        let store = make();
        let faults = Faults::new();
        faults.add(rule(fault));
        let error = save(&*faults.wrap(store.clone()), "new", true).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(found(&*store).unwrap(), None);
    }
}

#[test]
fn one_bit_is_flipped_where_told() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let faults = Faults::new();
    for (operation, path) in [(Operation::Write, "written"), (Operation::Read, "read"), (Operation::Publish, "put")] {
        let when = When::Nth { operation: Some(operation), path: path.to_owned(), nth: 0 };
        faults.add(Rule { when, fault: Fault::FlipBit(9) });
    }
    let wrapped = faults.wrap(store.clone());
    let writer = wrapped.create_writer("written", &WriteOptions::default()).unwrap();
    writer.write_at(0, &[IoSlice::new(&[0]), IoSlice::new(&[0, 0])]).unwrap();
    writer.finish(true).unwrap();
    assert_eq!(store.read("written", 10).unwrap(), [0, 2, 0]);
    wrapped.publish("put", &[0, 0], Publish::Create).unwrap();
    assert_eq!(store.read("put", 10).unwrap(), [0, 2]);
    store.publish("read", &[0, 0, 0], Publish::Create).unwrap();
    assert_eq!(wrapped.read("read", 10).unwrap(), [0, 2, 0]);
    let mut bytes = [9; 3];
    wrapped.open_reader("read").unwrap().read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 3], "only the first read was to be changed");
}

#[test]
fn late_failures_have_happened_and_delays_take_time() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let wrapped = Faults::at(0, Fault::FailLate(Failure::Device)).wrap(store.clone());
    assert!(wrapped.publish("a", b"x", Publish::Create).is_err());
    assert!(store.exists("a").unwrap());
    let wrapped = Faults::at(0, Fault::Delay(Duration::from_millis(30))).wrap(store);
    let start = Instant::now();
    assert!(wrapped.exists("a").unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30));
}

#[test]
fn many_stores_share_one_crash() {
    let faults = Faults::crash_at(2);
    let (one, two) = (faults.wrap(Arc::new(MemoryStore::new())), faults.wrap(Arc::new(MemoryStore::new())));
    one.publish("a", b"x", Publish::Create).unwrap();
    two.publish("a", b"x", Publish::Create).unwrap();
    assert!(one.delete("a").unwrap_err().is_crash());
    assert!(two.read("a", 1).unwrap_err().is_crash());
    assert_eq!(faults.steps(), 3);
}
