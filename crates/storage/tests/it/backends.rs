//! The suite over every backend.

use std::path::Path;
use std::sync::Arc;

use reshard_storage::faulty::Faults;
use reshard_storage::{Address, Store, StoreOptions, conformance, open};

use crate::server::{BUCKET, Server};

fn local(folder: &Path, name: &str, options: &StoreOptions) -> Arc<dyn Store> {
    open(&Address::local(folder.join(name)), options).unwrap()
}

fn memory(name: &str) -> Arc<dyn Store> {
    open(&Address::parse(&format!("memory://{name}")).unwrap(), &StoreOptions::default()).unwrap()
}

#[test]
fn local_files_conform() {
    let folder = tempfile::tempdir().unwrap();
    conformance::run(&|name| local(folder.path(), name, &StoreOptions::default()));
}

#[test]
fn local_files_without_preallocation_conform() {
    let folder = tempfile::tempdir().unwrap();
    let options = StoreOptions { preallocate: false, ..StoreOptions::default() };
    conformance::run(&|name| local(folder.path(), name, &options));
}

#[test]
fn local_files_with_direct_io_conform() {
    // Once where direct I/O works (mostly), once where it may be refused.
    let options = StoreOptions { direct_io: true, ..StoreOptions::default() };
    for base in [env!("CARGO_TARGET_TMPDIR"), "/dev/shm"] {
        if Path::new(base).is_dir() {
            let folder = tempfile::tempdir_in(base).unwrap();
            conformance::run(&|name| local(folder.path(), name, &options));
        }
    }
}

#[test]
fn memory_conforms() {
    conformance::run(&|name| memory(&format!("conforms/{name}")));
}

#[test]
fn s3_conforms() {
    let server = Server::start();
    let address = Address::parse(&format!("s3://{BUCKET}/runs")).unwrap();
    conformance::run(&|name| open(&address.join(name).unwrap(), &server.options()).unwrap());
}

#[test]
fn s3_without_conditional_puts_conforms() {
    let server = Server::start();
    let address = Address::parse(&format!("s3://{BUCKET}/runs")).unwrap();
    let mut options = server.options();
    options.settings.push(("aws_conditional_put".to_owned(), "disabled".to_owned()));
    conformance::run(&|name| open(&address.join(name).unwrap(), &options).unwrap());
}

#[test]
fn the_wrapper_without_faults_conforms_around_each() {
    let folder = tempfile::tempdir().unwrap();
    let direct = StoreOptions { direct_io: true, ..StoreOptions::default() };
    let server = Server::start();
    let address = Address::parse(&format!("s3://{BUCKET}")).unwrap();
    let faults = Faults::new();
    conformance::run(&|name| faults.wrap(local(folder.path(), name, &StoreOptions::default())));
    conformance::run(&|name| faults.wrap(local(&folder.path().join("direct"), name, &direct)));
    conformance::run(&|name| faults.wrap(memory(&format!("wrapped/{name}"))));
    conformance::run(&|name| faults.wrap(open(&address.join(name).unwrap(), &server.options()).unwrap()));
    assert!(faults.steps() > 1_000, "{} steps", faults.steps());
}
