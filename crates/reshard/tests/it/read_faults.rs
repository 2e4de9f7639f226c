//! Whoever reads: a read that fails, at every single step, is an error or a finding, and never "sound", "the same" or a digest.

use std::sync::Arc;

use reshard::diff::{DiffOptions, diff};
use reshard::digest::{DigestOptions, digest};
use reshard::numbers::{StatsOptions, stats};
use reshard::storage::faulty::{Failure, Fault, Faults};
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Operation, Store};
use reshard::verify::{VerifyOptions, verify_store};
use reshard::{Checkpoint, Result};

use crate::matrix::{self, Write};

/// What a verb says of a checkpoint; `None` where it says that something is wrong with it.
type Verb = fn(&Arc<dyn Store>) -> Result<Option<String>>;

fn verifying(store: &Arc<dyn Store>) -> Result<Option<String>> {
    let report = verify_store(Arc::clone(store), &VerifyOptions::default())?;
    Ok(report.is_sound().then(|| format!("{} of {} records", report.checked, report.records)))
}

fn verifying_quickly(store: &Arc<dyn Store>) -> Result<Option<String>> {
    let mut options = VerifyOptions::default();
    options.data = false;
    let report = verify_store(Arc::clone(store), &options)?;
    Ok(report.is_sound().then(|| format!("{} records, {} indexes", report.records, report.indexes)))
}

fn digesting(store: &Arc<dyn Store>) -> Result<Option<String>> {
    let found = digest(&Checkpoint::open_store(Arc::clone(store))?, &DigestOptions::default())?;
    Ok(Some(format!("{:?}", found.entries)))
}

fn comparing(store: &Arc<dyn Store>) -> Result<Option<String>> {
    let (a, b) = (Checkpoint::open_store(Arc::clone(store))?, matrix::source(matrix::OLD));
    let found = diff(&a, &b, &DiffOptions::default())?;
    Ok(found.is_same().then(|| format!("{} keys", found.same)))
}

fn listing(store: &Arc<dyn Store>) -> Result<Option<String>> {
    let checkpoint = Checkpoint::open_store(Arc::clone(store))?;
    let keys: Vec<&str> = checkpoint.keys().collect();
    Ok(Some(keys.join(" ")))
}

fn showing(store: &Arc<dyn Store>) -> Result<Option<String>> {
    let checkpoint = Checkpoint::open_store(Arc::clone(store))?;
    let numbers = stats(&checkpoint, "model.a", &StatsOptions::default())?;
    let (bytes, step) = (checkpoint.read_whole("model.b")?, checkpoint.value("step")?);
    Ok(Some(format!("{:?} {bytes:?} {step:?}", numbers.mean)))
}

const VERBS: [(&str, Verb); 6] = [
    ("verify", verifying),
    ("verify --quick", verifying_quickly),
    ("digest", digesting),
    ("diff", comparing),
    ("ls", listing),
    ("show", showing),
];

const FORMATS: [(&str, Write); 4] = [
    ("dcp", matrix::saving),
    ("safetensors", matrix::to_one_file),
    ("sharded safetensors", matrix::to_several_files),
    ("torch", matrix::to_torch),
];

#[test]
fn a_failed_read_is_never_a_good_answer() {
    for (format, write) in FORMATS {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        write(matrix::OLD, &store).unwrap();
        for (name, verb) in VERBS {
            let counting = Faults::new();
            let clean = verb(&counting.wrap(Arc::clone(&store))).unwrap();
            assert!(clean.is_some(), "{name} of {format}");
            for (number, step) in counting.log().into_iter().enumerate() {
                for failure in [Fault::Fail(Failure::Device), Fault::Crash] {
                    let faults = Faults::at(number as u64, failure);
                    let found = verb(&faults.wrap(Arc::clone(&store)));
                    // Not every store can list; each file is asked for then, and all that was said is said.
                    let said = step.operation == Operation::List && name.starts_with("verify");
                    match found {
                        Err(_) | Ok(None) => {}
                        Ok(text) if said && text == clean => {}
                        // Threads that read in another order may need a read less: nothing failed then.
                        Ok(text) if faults.steps() <= number as u64 && text == clean => {}
                        Ok(Some(text)) => panic!("{name} of {format}, {failure:?} at {step:?}: it said {text:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_flipped_bit_on_the_way_is_never_a_good_answer_where_there_are_checksums() {
    for (format, write) in [FORMATS[0], FORMATS[3]] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        write(matrix::OLD, &store).unwrap();
        for (name, verb) in VERBS.into_iter().filter(|(name, _)| ["verify", "digest"].contains(name)) {
            let counting = Faults::new();
            let clean = verb(&counting.wrap(Arc::clone(&store))).unwrap();
            for (number, step) in counting.log().into_iter().enumerate().filter(|(_, step)| step.bytes > 0) {
                for bit in [3, 1000, 77_777] {
                    let found = verb(&Faults::at(number as u64, Fault::FlipBit(bit)).wrap(Arc::clone(&store)));
                    // Some bytes are read twice, and some nobody needs: what is said must be true of what is stored.
                    let other = found.ok().flatten().filter(|text| Some(text) != clean.as_ref());
                    assert!(other.is_none(), "{name} of {format}, bit {bit} of {step:?}: it said {other:?}");
                }
            }
        }
    }
}
