//! The suite over every backend, each rule a test of its own.

use std::path::Path;
use std::sync::Arc;

use reshard_storage::conformance::{CASES, Case};
use reshard_storage::faulty::Faults;
use reshard_storage::{Address, Store, StoreOptions, open};

use crate::server::{BUCKET, Server};

/// The rules as tests of a backend, which is a function that runs one rule.
macro_rules! conforms {
    ($($backend:ident)*) => {
        $(conforms! {
            $backend:
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
        })*
    };
    ($backend:ident: $($rule:ident)*) => {
        mod $backend {
            $(
                #[test]
                fn $rule() {
                    super::$backend(super::rule(stringify!($rule)));
                }
            )*

            #[test]
            fn no_rule_is_left_out() {
                let all: Vec<&str> = super::CASES.iter().map(|(name, _)| *name).collect();
                assert_eq!(all, [$(stringify!($rule)),*]);
            }
        }
    };
}

conforms! {
    local_files
    local_files_without_preallocation
    direct_io_on_disk
    direct_io_in_memory
    memory
    s3
    s3_without_conditional_puts
    faults_around_local_files
    faults_around_direct_io
    faults_around_memory
    faults_around_s3
}

fn rule(name: &str) -> Case {
    CASES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("there is no rule {name}")).1
}

fn direct() -> StoreOptions {
    StoreOptions { direct_io: true, ..StoreOptions::default() }
}

fn at(folder: &Path, name: &str, options: &StoreOptions) -> Arc<dyn Store> {
    open(&Address::local(folder.join(name)), options).unwrap()
}

fn memory_at(name: &str) -> Arc<dyn Store> {
    // Rules run at once, and memory is shared by all who name it alike.
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("test").replace("::", "-");
    open(&Address::parse(&format!("memory://{test}/{name}")).unwrap(), &StoreOptions::default()).unwrap()
}

fn local_files(rule: Case) {
    let folder = tempfile::tempdir().unwrap();
    rule(&|name| at(folder.path(), name, &StoreOptions::default()));
}

fn local_files_without_preallocation(rule: Case) {
    let folder = tempfile::tempdir().unwrap();
    let options = StoreOptions { preallocate: false, ..StoreOptions::default() };
    rule(&|name| at(folder.path(), name, &options));
}

/// Where direct I/O works, mostly.
fn direct_io_on_disk(rule: Case) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    rule(&|name| at(folder.path(), name, &direct()));
}

/// Where it may be refused.
fn direct_io_in_memory(rule: Case) {
    let base = if Path::new("/dev/shm").is_dir() { "/dev/shm".into() } else { std::env::temp_dir() };
    let folder = tempfile::tempdir_in(base).unwrap();
    rule(&|name| at(folder.path(), name, &direct()));
}

fn memory(rule: Case) {
    rule(&memory_at);
}

fn s3(rule: Case) {
    let server = Server::start();
    let address = Address::parse(&format!("s3://{BUCKET}/runs")).unwrap();
    rule(&|name| open(&address.join(name).unwrap(), &server.options()).unwrap());
}

fn s3_without_conditional_puts(rule: Case) {
    let server = Server::start();
    let address = Address::parse(&format!("s3://{BUCKET}/runs")).unwrap();
    let mut options = server.options();
    options.settings.push(("aws_conditional_put".to_owned(), "disabled".to_owned()));
    rule(&|name| open(&address.join(name).unwrap(), &options).unwrap());
}

fn faults_around_local_files(rule: Case) {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::new();
    rule(&|name| faults.wrap(at(folder.path(), name, &StoreOptions::default())));
}

fn faults_around_direct_io(rule: Case) {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::new();
    rule(&|name| faults.wrap(at(folder.path(), name, &direct())));
}

fn faults_around_memory(rule: Case) {
    let faults = Faults::new();
    rule(&|name| faults.wrap(memory_at(name)));
}

fn faults_around_s3(rule: Case) {
    let server = Server::start();
    let address = Address::parse(&format!("s3://{BUCKET}")).unwrap();
    let faults = Faults::new();
    rule(&|name| faults.wrap(open(&address.join(name).unwrap(), &server.options()).unwrap()));
}

#[test]
fn a_wrapper_sees_every_step() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::new();
    for (name, rule) in CASES {
        rule(&|root| faults.wrap(at(&folder.path().join(name), root, &StoreOptions::default())));
    }
    assert!(faults.steps() > 250, "{} steps", faults.steps());
}
