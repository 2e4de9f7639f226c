//! What only object stores have: parts, budgets, conditional puts, server-side copies, failing servers.

use std::io::IoSlice;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reshard_storage::{Address, Linked, Publish, Retry, StorageError, Store, StoreOptions, WriteOptions, open};

use crate::server::{BUCKET, Server};

fn store(server: &Server) -> Arc<dyn Store> {
    open(&Address::parse(&format!("s3://{BUCKET}/run")).unwrap(), &server.options()).unwrap()
}

#[test]
fn an_object_appears_only_when_finished() {
    let server = Server::start();
    let store = store(&server);
    let bytes = vec![7; 17 << 20];
    let writer = store.create_writer("file", &WriteOptions::default()).unwrap();
    writer.write_at(0, &[IoSlice::new(&bytes)]).unwrap();
    assert!(store.list("").unwrap().is_empty());
    drop(writer);
    assert!(store.list("").unwrap().is_empty(), "a dropped upload became an object");
    assert!(server.folder.path().join(BUCKET).is_dir());
}

#[test]
fn creation_is_decided_by_the_server() {
    let server = Server::start();
    let store = store(&server);
    store.publish("a", b"1", Publish::Create).unwrap();
    assert!(store.capabilities().put_if_absent, "the server takes If-None-Match");
    assert!(store.publish("a", b"2", Publish::Create).unwrap_err().is_already_exists());
}

#[test]
fn without_conditional_puts_the_capability_is_withdrawn() {
    let server = Server::start();
    let mut options = server.options();
    options.settings.push(("aws_conditional_put".to_owned(), "disabled".to_owned()));
    let store = open(&Address::parse(&format!("s3://{BUCKET}/run")).unwrap(), &options).unwrap();
    store.publish("a", b"1", Publish::Create).unwrap();
    assert!(!store.capabilities().put_if_absent);
    assert!(store.publish("a", b"2", Publish::Create).unwrap_err().is_already_exists());
    assert_eq!(store.read("a", 10).unwrap(), b"1");
}

#[test]
fn copies_within_a_bucket_are_made_by_the_server() {
    let server = Server::start();
    let store = store(&server);
    store.publish("a", b"bytes", Publish::Create).unwrap();
    assert_eq!(store.link_or_copy("a", &*store, "b").unwrap(), Linked::ServerCopy);
    assert_eq!(store.read("b", 10).unwrap(), b"bytes");
}

#[test]
fn a_replaced_object_is_not_mixed_with_its_successor() {
    let server = Server::start();
    let store = store(&server);
    store.publish("a", b"first", Publish::Create).unwrap();
    let reader = store.open_reader("a").unwrap();
    store.publish("a", b"other", Publish::Replace).unwrap();
    let mut bytes = [0; 5];
    match reader.read_at(0, &mut bytes) {
        // A server that ignores If-Match gives one or the other, whole.
        Ok(()) => assert_eq!(&bytes, b"other"),
        Err(error) => assert!(error.to_string().contains("replaced"), "{error}"),
    }
}

#[test]
fn a_wrong_key_is_permission_denied() {
    let server = Server::start();
    let mut options = server.options();
    options.settings =
        vec![("aws_access_key_id".to_owned(), "key".to_owned()), ("aws_secret_access_key".to_owned(), "wrong".to_owned())];
    let store = open(&Address::parse(&format!("s3://{BUCKET}/run")).unwrap(), &options).unwrap();
    let error = store.publish("a", b"1", Publish::Replace).unwrap_err();
    assert!(matches!(error, StorageError::PermissionDenied { .. }), "{error:?}");
    assert!(error.path().contains(&format!("s3://{BUCKET}/run/a")), "{error}");
}

#[test]
fn a_whole_bucket_is_never_deleted() {
    let server = Server::start();
    let whole = open(&Address::parse(&format!("s3://{BUCKET}")).unwrap(), &server.options()).unwrap();
    whole.publish("a", b"1", Publish::Create).unwrap();
    assert!(matches!(whole.delete_root(), Err(StorageError::Unsupported { .. })));
    assert!(whole.exists("a").unwrap());
}

#[test]
fn a_server_that_is_not_there_is_tried_again_and_then_an_error() {
    // A port that nobody listens on.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = StoreOptions {
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        retry: Retry {
            max_retries: 3,
            first_backoff: Duration::from_millis(20),
            max_backoff: Duration::from_millis(40),
            ..Retry::default()
        },
        settings: vec![
            ("aws_access_key_id".to_owned(), "key".to_owned()),
            ("aws_secret_access_key".to_owned(), "secret".to_owned()),
        ],
        ..StoreOptions::default()
    };
    let store = open(&Address::parse(&format!("s3://{BUCKET}/run")).unwrap(), &options).unwrap();
    let start = Instant::now();
    let error = store.read("a", 10).unwrap_err();
    assert!(matches!(error, StorageError::Object { .. }), "{error:?}");
    assert!(start.elapsed() >= Duration::from_millis(20), "it was not tried again");
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn the_store_works_inside_another_runtime() {
    let server = Server::start();
    let store = store(&server);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let bytes = runtime.block_on(async {
        store.publish("a", b"1", Publish::Create).unwrap();
        store.read("a", 10).unwrap()
    });
    assert_eq!(bytes, b"1");
}
