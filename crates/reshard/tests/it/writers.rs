//! Several writers at one path, ranks that do not mean the same path, and answers of an object store that get lost.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use reshard::layout::{ByteLayout, Dims, Placement, Region};
use reshard::leaf::SavePiece;
use reshard::memory::{DeviceMemory, Source};
use reshard::records::{RecordContent, RecordToWrite, abandon, begin, publish_records, write_records};
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Address, Store, StoreOptions, open};
use reshard::{Checkpoint, DType, Error, ErrorKind, Group, SaveOptions, SaveState, Solo, Value, run_threads, save_with};

use crate::layouts::{Cut, Memory, Whole, add_to_save, held, store_at};
use crate::object_like::Ordered;

fn whole(number: u64) -> Whole {
    Whole::new("w", DType::UInt8, &[20_000], number)
}

fn save_alone(number: u64, store: &Arc<dyn Store>, overwrite: bool) -> reshard::Result<()> {
    let whole = whole(number);
    let mut state = SaveState::new();
    state.insert_bytes("w", whole.dtype, &whole.shape, &whole.bytes).unwrap();
    state.insert_value("number", Value::from(number as i64)).unwrap();
    let mut options = SaveOptions::default();
    options.overwrite = overwrite;
    save_with(&Solo, &state, store, &options).map(drop)
}

/// The number that was saved, after a look at every byte.
fn number_at(store: &Arc<dyn Store>) -> u64 {
    let checkpoint = Checkpoint::open_store(Arc::clone(store)).unwrap_or_else(|error| panic!("{}", error.full_text()));
    let Value::Int(number) = checkpoint.value("number").unwrap() else { panic!("the number is a number") };
    let number = number.as_i64().unwrap() as u64;
    assert!(checkpoint.read_whole("w").unwrap() == whole(number).bytes, "the bytes of {number} differ");
    number
}

#[test]
fn four_threads_overwriting_one_path_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let ordered: Arc<dyn Store> = Arc::new(Ordered::default());
    for store in [store_at(folder.path()), Arc::new(MemoryStore::new()) as Arc<dyn Store>, ordered] {
        save_alone(1, &store, true).unwrap();
        let fine = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (store, fine) = (&store, &fine);
                scope.spawn(move || {
                    for round in 0..20 {
                        match save_alone(10 + thread * 100 + round, store, true) {
                            Ok(()) => drop(fine.fetch_add(1, Ordering::Relaxed)),
                            // Its files may also be swept by another one while it writes them, where there is no lock.
                            Err(Error::Conflict { .. } | Error::Invalid { .. }) => {}
                            Err(error) => panic!("{}", error.full_text()),
                        }
                    }
                });
            }
        });
        assert!(fine.into_inner() > 0, "some of them succeed");
        assert!(number_at(&store) >= 1, "and what they saved is there");
        save_alone(9, &store, true).unwrap();
        assert_eq!((number_at(&store), store.list("").unwrap().len()), (9, 3), "leftovers are swept");
    }
}

fn overwriting() -> SaveOptions {
    let mut options = SaveOptions::default();
    options.overwrite = true;
    options
}

/// Memory that tries to save to the same path while it is read.
#[derive(Debug)]
struct Impatient(Arc<dyn Store>);

impl DeviceMemory for Impatient {
    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), String> {
        let error = save_alone(2, &self.0, true).err().ok_or("two saves wrote at once")?;
        assert!(matches!(error, Error::Conflict { .. }) && error.to_string().contains("under way"), "{error}");
        into.fill(0);
        Ok(())
    }
}

#[test]
fn a_second_save_is_refused_while_the_first_writes() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    save_alone(1, &store, false).unwrap();
    let save = begin(store.as_ref(), None, &overwriting()).unwrap();
    let (region, layout) = (Region::whole(&[64]).unwrap(), ByteLayout::contiguous(&[64], 1).unwrap());
    let piece = SavePiece::new(region, layout, Source::device(64, Arc::new(Impatient(Arc::clone(&store))))).unwrap();
    let content = RecordContent::Tensor { dtype: DType::UInt8, requires_grad: false, shape: Dims::from_slice(&[64]), piece };
    let records = vec![RecordToWrite { key: "w".into(), path: None, content }];
    write_records(store.as_ref(), &save, 0, 1, records, &overwriting()).unwrap();
    assert_eq!(number_at(&store), 1);
}

#[test]
fn a_planned_save_gives_way_when_it_may_have_been_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let store = store_at(folder.path());
    // Whoever plans gives up without a word: the same process may start anew, by any road, and the first is over.
    let first = begin(store.as_ref(), None, &overwriting()).unwrap();
    let second = begin(store.as_ref(), None, &overwriting()).unwrap();
    assert!(!first.named && second.named, "another rank of the first may still write");
    save_alone(1, &store, false).unwrap();
    for late in [&first, &second] {
        let late = publish_records(store.as_ref(), late, &[], b"x", None, &overwriting()).unwrap_err();
        assert!(matches!(late, Error::Conflict { .. }), "{late}");
    }
    let named = store.list("").unwrap().iter().any(|file| file.path.ends_with(".distcp") && file.path != "__0_0.distcp");
    assert!(named, "what other ranks still write is not overwritten");
    let third = begin(store.as_ref(), None, &overwriting()).unwrap();
    let failed = publish_records(store.as_ref(), &third, &[b"not sums".to_vec()], b"x", None, &overwriting());
    assert!(failed.is_err() && number_at(&store) == 1);
    // The path is another process's when it is abandoned.
    let last = begin(store.as_ref(), None, &overwriting()).unwrap();
    let elsewhere = store_at(folder.path());
    assert!(elsewhere.lock().is_err());
    abandon(&last.begun);
    drop(elsewhere.lock().unwrap());
}

fn save_together(stores: &[Arc<dyn Store>], check_files: bool) -> Vec<reshard::Result<()>> {
    let whole = whole(5);
    let cut = Cut { mesh: vec![stores.len() as u64], placements: vec![Placement::Shard(0)] };
    run_threads(stores.len(), |group| {
        let memory: Vec<Memory> = held(&whole, &cut, group.rank() as u64, false);
        let mut state = SaveState::new();
        add_to_save(&mut state, &whole, &memory);
        state.insert_value("number", Value::from(5))?;
        let mut options = SaveOptions::default();
        (options.overwrite, options.check_files) = (true, check_files);
        save_with(&group, &state, &stores[group.rank()], &options).map(drop)
    })
}

#[test]
fn ranks_that_save_to_different_paths_all_get_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let stores = [store_at(&folder.path().join("one")), store_at(&folder.path().join("other"))];
    save_alone(1, &stores[0], false).unwrap();
    for result in save_together(&stores, true) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let text = error.full_text();
        assert!(text.contains("different paths") && text.contains("one") && text.contains("rank 1 to"), "{text}");
    }
    assert_eq!(number_at(&stores[0]), 1);
    assert!(stores[1].list("").unwrap().is_empty());
}

#[test]
fn ranks_with_disks_of_their_own_all_get_an_error_and_the_old_checkpoint_stays() {
    // Two disks under one name.
    let disk = || -> Arc<dyn Store> {
        let store = MemoryStore::shared("disk-of-a-node", "ckpt");
        reshard::storage::memory::forget("disk-of-a-node");
        Arc::new(store)
    };
    let stores = [disk(), disk()];
    assert_eq!(stores[0].describe(), stores[1].describe());
    save_alone(1, &stores[0], false).unwrap();
    for result in save_together(&stores, true) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.full_text().contains("is not there") && error.full_text().contains("__1_0"), "{}", error.full_text());
    }
    assert_eq!((number_at(&stores[0]), stores[0].list("").unwrap().len()), (1, 3), "nothing was published, nothing is left");
    assert!(stores[1].list("").unwrap().is_empty());
    // Switched off, nobody looks.
    save_together(&stores, false).into_iter().for_each(|result| result.unwrap());
}

/// How an answer gets lost.
#[derive(Clone, Copy, Debug)]
enum Lost {
    /// The connection ends.
    Cut,
    /// The server, or something in between, says that it failed.
    Failed,
}

/// Forwards requests to a server; of the first put of `.metadata` the answer gets lost.
fn losing(server: &str, lost: Lost) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = server.trim_start_matches("http://").to_owned();
    let left = Arc::new(AtomicUsize::new(1));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            let left = Arc::clone(&left);
            std::thread::spawn(move || forward(client, server, &left, lost));
        }
    });
    format!("http://{address}")
}

fn forward(mut client: TcpStream, mut server: TcpStream, left: &AtomicUsize, lost: Lost) {
    let losing = Arc::new(AtomicUsize::new(0));
    let (mut answers, mut to_client, flag) = (server.try_clone().unwrap(), client.try_clone().unwrap(), Arc::clone(&losing));
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = answers.read(&mut buffer) {
            if flag.load(Ordering::SeqCst) > 0 {
                if let Lost::Failed = lost {
                    let _ = to_client
                        .write_all(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                }
                break;
            }
            if to_client.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to_client.shutdown(std::net::Shutdown::Both);
        let _ = answers.shutdown(std::net::Shutdown::Both);
    });
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let line = buffer[..count].split(|b| *b == b'\r').next().unwrap_or_default();
        let is_commit = line.starts_with(b"PUT ") && String::from_utf8_lossy(line).contains("/.metadata");
        if is_commit && left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
            losing.store(1, Ordering::SeqCst);
        }
        if server.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
}

#[test]
fn a_lost_answer_to_the_put_of_metadata_is_resolved_by_reading_back() {
    let server = crate::server::Server::start();
    for (number, lost) in [Lost::Cut, Lost::Failed].into_iter().enumerate() {
        for old in [false, true] {
            let address = Address::parse(&format!("s3://{}/{number}-{old}", crate::server::BUCKET)).unwrap();
            let direct = open(&address, &server.options()).unwrap();
            if old {
                save_alone(1, &direct, false).unwrap();
            }
            let options = StoreOptions { endpoint: Some(losing(&server.endpoint, lost)), ..server.options() };
            let proxied = open(&address, &options).unwrap();
            save_alone(2, &proxied, old).unwrap_or_else(|error| panic!("{lost:?}, {old}: {}", error.full_text()));
            assert_eq!((number_at(&direct), direct.list("").unwrap().len()), (2, 3), "{lost:?}, {old}");
        }
    }
}

#[test]
fn on_an_object_store_the_second_publisher_gets_an_error() {
    let server = crate::server::Server::start();
    let address = Address::parse(&format!("s3://{}/two", crate::server::BUCKET)).unwrap();
    let store = open(&address, &server.options()).unwrap();
    let options = overwriting();
    for old in [false, true] {
        let first = begin(store.as_ref(), None, &options).unwrap();
        save_alone(3 + u64::from(old), &store, true).unwrap();
        let sums: Vec<Vec<u8>> = Vec::new();
        let error = publish_records(store.as_ref(), &first, &sums, b"late", None, &options).unwrap_err();
        assert!(matches!(error, Error::Conflict { .. }) && error.to_string().contains("changed"), "{error}");
        assert_eq!((number_at(&store), store.list("").unwrap().len()), (3 + u64::from(old), 3));
    }
}
