//! Old or new on a real S3 server, whoever writes and whatever the network does: each request of every writer lost before or
//! after the server did it, answered with an error, cut short or slow; and the server gone for good from any request on.
//!
//! `RESHARD_CAMPAIGN=1` tries every fault at every request; else each request meets one of them.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use reshard::convert::{ConvertOptions, Destination, Target};
use reshard::storage::{Address, Publish, Retry, Store, StoreOptions, open};
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, Error, ErrorKind};

use crate::matrix::{self, found};
use crate::server::{BUCKET, Server};

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The connection ends before the server sees it.
    Reset,
    /// The server does it, and its answer gets lost.
    LostAnswer,
    /// Something in between answers with an error, and the server never sees it.
    Error,
    /// The server does it, and something in between answers with an error.
    LateError,
    /// The answer ends half way.
    Truncated,
    /// The answer comes in small pieces.
    Slow,
}

const FAULTS: [Fault; 6] = [Fault::Reset, Fault::LostAnswer, Fault::Error, Fault::LateError, Fault::Truncated, Fault::Slow];

/// When.
#[derive(Clone, Copy, Debug)]
struct Plan {
    fault: Fault,
    from: u64,
    /// That request alone, or all from it on.
    forever: bool,
}

/// A proxy before the server: one request a connection, so that requests can be told apart and counted.
struct Proxy {
    endpoint: String,
    plan: Arc<Mutex<Option<Plan>>>,
    count: Arc<AtomicU64>,
}

impl Proxy {
    fn start(server: &Server) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let upstream = server.endpoint.trim_start_matches("http://").to_owned();
        let plan: Arc<Mutex<Option<Plan>>> = Arc::default();
        let count: Arc<AtomicU64> = Arc::default();
        let (shared, counted) = (Arc::clone(&plan), Arc::clone(&count));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), upstream) = (client, upstream.clone()) else { continue };
                let (plan, count) = (Arc::clone(&shared), Arc::clone(&counted));
                std::thread::spawn(move || drop(forward(client, &upstream, &plan, &count)));
            }
        });
        Proxy { endpoint, plan, count }
    }

    /// Forgets what was counted and plans anew.
    fn plan(&self, plan: Option<Plan>) {
        *self.plan.lock().unwrap() = plan;
        self.count.store(0, Ordering::SeqCst);
    }
}

/// Reads a request: its head, and as much body as it announces.
fn request(client: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        if let Some(head) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            if bytes.len() >= head + 4 + length {
                return Ok(bytes);
            }
        }
        match client.read(&mut buffer)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

fn forward(mut client: TcpStream, upstream: &str, plan: &Mutex<Option<Plan>>, count: &AtomicU64) -> std::io::Result<()> {
    let mut request = request(&mut client)?;
    let number = count.fetch_add(1, Ordering::SeqCst);
    let plan = *plan.lock().unwrap();
    let fault = plan.filter(|plan| number == plan.from || (plan.forever && number > plan.from)).map(|plan| plan.fault);
    const FAILED: &[u8] = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    match fault {
        Some(Fault::Reset) => return client.shutdown(Shutdown::Both),
        Some(Fault::Error) => return client.write_all(FAILED),
        _ => {}
    }
    let head = request.windows(2).position(|w| w == b"\r\n").unwrap_or(0);
    request.splice(head..head, b"\r\nconnection: close".iter().copied());
    let mut server = TcpStream::connect(upstream)?;
    server.write_all(&request)?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer)?;
    match fault {
        Some(Fault::LostAnswer) => return client.shutdown(Shutdown::Both),
        Some(Fault::LateError) => return client.write_all(FAILED),
        Some(Fault::Truncated) => answer.truncate(answer.len() / 2 + answer.len() / 4),
        Some(Fault::Slow) => {
            for piece in answer.chunks(answer.len().div_ceil(8).max(1)) {
                client.write_all(piece)?;
                std::thread::sleep(Duration::from_millis(5));
            }
            return client.shutdown(Shutdown::Both);
        }
        _ => {}
    }
    client.write_all(&answer)?;
    client.shutdown(Shutdown::Both)
}

/// Where to write: a store, and the address that it was opened by.
struct Place {
    store: Arc<dyn Store>,
    path: String,
    options: StoreOptions,
}

fn place(options: &StoreOptions, prefix: &str) -> Place {
    let path = format!("s3://{BUCKET}/{prefix}");
    let store = open(&Address::parse(&path).unwrap(), options).unwrap();
    Place { store, path, options: options.clone() }
}

type Writer = dyn Fn(u64, &Place) -> reshard::Result<()>;

fn to_megatron(number: u64, place: &Place) -> reshard::Result<()> {
    matrix::to_megatron(number, &Destination::parse(&place.path, Target::Megatron { ranks: 2 }, &place.options)?)
}

/// Writers that need no more than a store.
fn into_store(new: matrix::Write, old: Option<matrix::Write>, unpublished: bool) {
    let through = |write: matrix::Write| move |number: u64, place: &Place| write(number, &place.store);
    let (new, old) = (through(new), old.map(through));
    every_request(&new, old.as_ref().map(|old| old as &Writer), unpublished, true);
}

fn every_request(new: &Writer, old: Option<&Writer>, unpublished: bool, again: bool) {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let backoff = Duration::from_millis(1);
    let retry = Retry { max_retries: 2, first_backoff: backoff, max_backoff: backoff, ..Retry::default() };
    let direct = server.options();
    let proxied = StoreOptions { endpoint: Some(proxy.endpoint.clone()), retry, ..server.options() };
    let base = place(&direct, "base");
    if let Some(old) = old {
        old(matrix::OLD, &base).unwrap();
    }
    let base = base.store;
    if unpublished {
        matrix::unpublished(&base);
    }
    let files = base.list("").unwrap();
    let before = found(&base, "at the start");
    let mut number = 0;
    let mut fresh = || {
        number += 1;
        let prefix = format!("run-{number}");
        let store = place(&direct, &prefix).store;
        for file in &files {
            base.link_or_copy(&file.path, store.as_ref(), &file.path).unwrap();
        }
        (store, place(&proxied, &prefix))
    };
    let (clean, through) = fresh();
    proxy.plan(None);
    new(matrix::NEW, &through).unwrap();
    assert_eq!(found(&clean, "without faults"), Some(matrix::NEW));
    let requests = proxy.count.load(Ordering::SeqCst);
    let names = clean.list("").unwrap().len();
    let all = std::env::var_os("RESHARD_CAMPAIGN").is_some();
    let mut survived = 0;
    for from in 0..requests {
        for (i, fault) in FAULTS.into_iter().enumerate() {
            if !all && i as u64 != from % FAULTS.len() as u64 {
                continue;
            }
            for forever in [false, true] {
                // What is only slow goes on for ever too.
                if forever && fault == Fault::Slow && from > 0 {
                    continue;
                }
                let (store, through) = fresh();
                let plan = Plan { fault, from, forever };
                proxy.plan(Some(plan));
                let result = new(matrix::NEW, &through);
                proxy.plan(None);
                let when = format!("{plan:?} of {requests}, which gave {:?}", result.as_ref().map_err(Error::full_text));
                let after = found(&store, &when);
                assert!(after == before || after == Some(matrix::NEW), "{when}: found {after:?}");
                assert!(result.is_err() || after == Some(matrix::NEW), "{when}: it returned, so it is there");
                assert!(!(fault == Fault::Slow && result.is_err()), "{when}: slow is no failure");
                survived += u64::from(result.is_ok() && !forever);
                if result.is_ok() && !forever {
                    let left = store.list("").unwrap();
                    assert!(left.len() <= names + 1, "{when}: leftovers: {left:?}");
                }
                // Whatever it left, it can be run again.
                if again && after != Some(matrix::NEW) {
                    let again = new(matrix::NEW, &through).map_err(|error| error.full_text());
                    assert!(again.is_ok() && found(&store, &when) == Some(matrix::NEW), "{when}: again: {again:?}");
                }
            }
        }
    }
    assert!(requests > 3 && survived * 2 > requests, "most single faults are survived: {survived} of {requests}");
}

macro_rules! on_s3 {
    ($($name:ident: $new:expr, $old:expr, $unpublished:expr;)*) => {
        $(#[test]
        fn $name() {
            into_store($new, $old, $unpublished);
        })*
    };
}

on_s3! {
    a_save_over_a_checkpoint: matrix::saving, Some(matrix::saving), false;
    a_background_save_over_a_checkpoint: matrix::saving_in_the_background, Some(matrix::saving), false;
    a_conversion_over_a_checkpoint: matrix::converting, Some(matrix::saving), false;
    a_relayout_over_a_checkpoint: matrix::laying_out_anew, Some(matrix::saving), false;
    a_merge_over_a_checkpoint: matrix::merging, Some(matrix::saving), false;
    a_recovery_over_an_older_checkpoint: matrix::recovering, Some(matrix::saving), true;
    records_over_a_checkpoint: matrix::writing_records, Some(matrix::saving), false;
    several_safetensors_files_over_several: matrix::to_several_files, Some(matrix::to_several_files), false;
    one_safetensors_file_over_several: matrix::to_one_file, Some(matrix::to_several_files), false;
    a_torch_file: matrix::to_torch, None, false;
    a_compressed_save_over_a_checkpoint: matrix::saving_compressed, Some(matrix::saving), false;
    a_compressed_conversion_over_a_checkpoint: matrix::compressing, Some(matrix::saving_compressed), false;
    a_universal_checkpoint_over_another: matrix::to_universal, Some(matrix::to_universal), false;
    a_hugging_face_folder_over_another: matrix::to_hugging_face, Some(matrix::to_hugging_face), false;
}

/// It takes no path that holds something, be it what an edit that was stopped left.
#[test]
fn an_edit() {
    every_request(&|number, place| matrix::editing(number, &place.store), None, false, false);
}

#[test]
fn a_folder_of_megatron_over_another() {
    every_request(&to_megatron, Some(&to_megatron), false, true);
}

#[test]
fn a_folder_of_megatron_to_a_free_path() {
    every_request(&to_megatron, None, false, true);
}

/// Two conversions to one place at the same time, of two runs at the same step: where there are no locks, one of them is told, and
/// the other's files are whole.
#[test]
fn two_folders_for_a_trainer_at_once() {
    let server = Server::start();
    let sources = [matrix::OLD, matrix::NEW].map(|number| matrix::trained_to(number, 7));
    for (round, target) in (0..12).zip([Target::Megatron { ranks: 2 }, Target::Universal].into_iter().cycle()) {
        let at = place(&server.options(), &format!("run-{round}"));
        let start = Barrier::new(2);
        let results = std::thread::scope(|scope| {
            let convert = |source| {
                let destination = Destination::parse(&at.path, target, &at.options).unwrap();
                start.wait();
                reshard::convert::convert(source, &destination, target, &ConvertOptions::default())
            };
            let running = sources.each_ref().map(|source| scope.spawn(move || convert(source)));
            running.map(|thread| thread.join().unwrap())
        });
        let fine: Vec<usize> = (0..2).filter(|i| results[*i].is_ok()).collect();
        let [winner] = fine[..] else { panic!("{target:?}: {results:?}") };
        for error in results.into_iter().filter_map(Result::err) {
            assert!(matches!(error, Error::Conflict { .. } | Error::AlreadyExists { .. }), "{}", error.full_text());
        }
        let found = Checkpoint::open_store(Arc::clone(&at.store)).unwrap();
        let key = if found.entry("a").is_ok() { "a" } else { "model.a" };
        assert!(found.read_whole(key).unwrap() == sources[winner].read_whole("model.a").unwrap(), "{target:?}");
        assert!(verify(&found, &VerifyOptions::default()).unwrap().is_sound(), "{target:?}");
    }
}

/// Where there are no locks, a marker may be that of a conversion that is at work: only who says so takes its place.
#[test]
fn a_marked_folder_is_taken_over_when_asked() {
    let server = Server::start();
    let at = place(&server.options(), "run");
    let target = Target::Megatron { ranks: 1 };
    let marker = "iter_0000007/.reshard-unfinished";
    at.store.publish(marker, b"another's", Publish::Create).unwrap();
    let mut options = ConvertOptions::default();
    let source = matrix::trained_to(matrix::NEW, 7);
    let destination = Destination::parse(&at.path, target, &at.options).unwrap();
    let error = reshard::convert::convert(&source, &destination, target, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    let left: Vec<String> = at.store.list("").unwrap().into_iter().map(|file| file.path).collect();
    assert_eq!(left, [marker]);
    options.overwrite = true;
    reshard::convert::convert(&source, &destination, target, &options).unwrap();
    assert!(!at.store.exists(marker).unwrap());
    assert!(verify(&Checkpoint::open_store(at.store).unwrap(), &VerifyOptions::default()).unwrap().is_sound());
}
