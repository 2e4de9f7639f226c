//! Old or new, whoever writes: every writer stopped before, failing at, and failing after every single step of its I/O, with an
//! old checkpoint in place and without, on local files, in memory, and on a store that behaves as object stores do.

use std::any::Any;
use std::sync::{Arc, LazyLock};

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::edit::{EditOptions, edit};
use reshard::formats::PathSegment;
use reshard::formats::{Chunk, Entry, EntryKind, FileId, Metadata, StorageInfo, StorageMeta, TensorEntry, TensorProperties};
use reshard::layout::{Dims, Placement, Region};
use reshard::leaf::SavePiece;
use reshard::merge::merge;
use reshard::mesh::Layout;
use reshard::records::{RecordContent, RecordToWrite, begin, publish_records, write_records};
use reshard::recover::{RecoverOptions, recover};
use reshard::relayout::relayout;
use reshard::save::Compression;
use reshard::storage::faulty::{Failure, Fault, Faults, Rule, When};
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Operation, Store};
use reshard::{
    AsyncSaver, Checkpoint, DType, Error, ErrorKind, Group, Result, SaveOptions, SaveState, Solo, Value, run_threads, save_with,
};

use crate::layouts::{Cut, Memory, Whole, add_to_save, held, store_at};
use crate::object_like::Ordered;

const RANKS: usize = 2;
pub(crate) const OLD: u64 = 1;
pub(crate) const NEW: u64 = 2;

/// The content of a checkpoint, by its number.
fn generation(number: u64) -> Vec<Whole> {
    // Numbers that an average of equals leaves as they are.
    let mut floats = Whole::new("model.a", DType::Float32, &[6, 4], number);
    floats.bytes = (0..24).flat_map(|i| ((i + 100 * number) as f32).to_le_bytes()).collect();
    vec![
        floats,
        Whole::new("model.b", DType::Int64, &[64], number * 10 + 2),
        Whole::new("model.large", DType::UInt8, &[9_000], number * 10 + 3),
    ]
}

fn state_of<'m>(wholes: &[Whole], memories: &'m [Vec<Memory>], number: u64) -> SaveState<'m> {
    let mut state = SaveState::new();
    for (whole, memory) in wholes.iter().zip(memories) {
        add_to_save(&mut state, whole, memory);
    }
    state.insert_value("step", Value::from(number as i64)).unwrap();
    state
}

fn overwriting() -> SaveOptions {
    let mut options = SaveOptions::default();
    options.overwrite = true;
    options
}

/// What every rank must agree on: all of them fine, or all of them failed.
fn one(results: Vec<Result<reshard::SaveReport>>) -> Result<()> {
    let failed = results.iter().filter(|r| r.is_err()).count();
    assert!(failed == 0 || failed == results.len(), "{failed} of {} ranks failed", results.len());
    results.into_iter().find_map(Result::err).map_or(Ok(()), Err)
}

pub(crate) fn saving(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let wholes = generation(number);
    let cut = Cut { mesh: vec![RANKS as u64], placements: vec![Placement::Shard(0)] };
    one(run_threads(RANKS, |group| {
        let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut, group.rank() as u64, false)).collect();
        save_with(&group, &state_of(&wholes, &memories, number), store, &overwriting())
    }))
}

pub(crate) fn saving_in_the_background(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let wholes = generation(number);
    let cut = Cut { mesh: vec![1], placements: vec![Placement::Replicate] };
    let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut, 0, false)).collect();
    let saver = AsyncSaver::new(1 << 20);
    let group: Arc<dyn Group> = Arc::new(Solo);
    saver.save(group, &state_of(&wholes, &memories, number), Arc::clone(store), overwriting())?.wait().map(drop)
}

/// A checkpoint to read from, on a store of its own that never fails.
pub(crate) fn source(number: u64) -> Checkpoint {
    static STORES: LazyLock<Vec<Arc<dyn Store>>> = LazyLock::new(|| {
        let make = |number| {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::shared(&format!("matrix-source-{number}"), ""));
            saving(number, &store).unwrap();
            store
        };
        vec![make(OLD), make(NEW)]
    });
    Checkpoint::open_store(Arc::clone(&STORES[number as usize - 1])).unwrap()
}

fn conversion() -> ConvertOptions {
    let mut options = ConvertOptions::default();
    options.overwrite = true;
    options
}

fn converting_to(number: u64, store: &Arc<dyn Store>, target: ConvertTarget) -> Result<()> {
    convert(&source(number), &Destination::folder(Arc::clone(store)), target, &conversion()).map(drop)
}

pub(crate) fn converting(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    converting_to(number, store, ConvertTarget::Dcp { ranks: 2 })
}

pub(crate) fn to_one_file(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    converting_to(number, store, ConvertTarget::Safetensors { max_shard_size: None })
}

pub(crate) fn to_several_files(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    converting_to(number, store, ConvertTarget::Safetensors { max_shard_size: Some(600) })
}

pub(crate) fn to_torch(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    converting_to(number, store, ConvertTarget::Torch)
}

/// A conversion whose records are compressed.
pub(crate) fn compressing(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let mut options = conversion();
    options.compression = Some(Compression::Zstd);
    convert(&source(number), &Destination::folder(Arc::clone(store)), ConvertTarget::Dcp { ranks: 2 }, &options).map(drop)
}

pub(crate) fn saving_compressed(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let wholes = generation(number);
    let cut = Cut { mesh: vec![RANKS as u64], placements: vec![Placement::Shard(0)] };
    one(run_threads(RANKS, |group| {
        let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut, group.rank() as u64, false)).collect();
        let mut options = overwriting();
        options.compression = Some(Compression::Zstd);
        save_with(&group, &state_of(&wholes, &memories, number), store, &options)
    }))
}

/// What a run goes on from: weights, and an optimizer's state that knows its step.
fn trained(number: u64) -> Checkpoint {
    trained_to(number, number)
}

/// The same, at some step.
pub(crate) fn trained_to(number: u64, step: u64) -> Checkpoint {
    let trained: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let wholes = generation(number);
    let cut = Cut { mesh: vec![1], placements: vec![Placement::Replicate] };
    let memories: Vec<Vec<Memory>> = wholes.iter().map(|w| held(w, &cut, 0, false)).collect();
    let mut state = state_of(&wholes, &memories, step);
    state.insert_value("optim.state.a.step", Value::from(step as i64)).unwrap();
    state.insert_value("optim.param_groups.0.lr", Value::from(0.5)).unwrap();
    save_with(&Solo, &state, &trained, &overwriting()).unwrap();
    Checkpoint::open_store(trained).unwrap()
}

/// A universal checkpoint of DeepSpeed, of a model that is trained.
pub(crate) fn to_universal(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    convert(&trained(number), &Destination::folder(Arc::clone(store)), ConvertTarget::Universal, &conversion()).map(drop)
}

/// A folder of Megatron, which opens folders below it by their addresses.
pub(crate) fn to_megatron(number: u64, destination: &Destination) -> Result<()> {
    convert(&trained(number), destination, ConvertTarget::Megatron { ranks: 2 }, &conversion()).map(drop)
}

/// A folder as a hub has it: a model in files of a size, and nothing else.
pub(crate) fn to_hugging_face(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    converting_to(number, store, ConvertTarget::HuggingFace { max_shard_size: Some(600) })
}

pub(crate) fn laying_out_anew(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let layout = Layout::parse("dp=3", &["*=S(0)"]).unwrap();
    relayout(&source(number), store, &layout, &conversion()).map(drop)
}

pub(crate) fn merging(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let (a, b) = (source(number), source(number));
    let target = ConvertTarget::Dcp { ranks: 2 };
    merge(&[&a, &b], &[], &Destination::folder(Arc::clone(store)), target, &conversion()).map(drop)
}

fn edited(source: &Checkpoint, number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let mut options = EditOptions::default();
    options.set = vec![("step".to_owned(), None, Value::from(number as i64))];
    edit(source, store, &options).map(drop)
}

pub(crate) fn editing(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    edited(&source(number), number, store)
}

/// An edit of what is not DCP, and so is written anew.
fn editing_a_torch_file(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let file: Arc<dyn Store> = Arc::new(MemoryStore::new());
    to_torch(number, &file)?;
    edited(&Checkpoint::open_store(file)?, number, store)
}

pub(crate) fn recovering(_number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let mut options = RecoverOptions::default();
    options.replace = true;
    recover(store, &options).map(drop)
}

/// The writer under another library's planner, here a planner of one rank.
pub(crate) fn writing_records(number: u64, store: &Arc<dyn Store>) -> Result<()> {
    let options = overwriting();
    let save = begin(store.as_ref(), None, &options)?;
    let wholes = generation(number);
    let mut records: Vec<RecordToWrite<'_>> = Vec::new();
    for whole in &wholes {
        let region = Region::whole(&whole.shape).unwrap();
        let piece = SavePiece::contiguous(region, whole.dtype, &whole.bytes).unwrap();
        let shape = Dims::from_slice(&whole.shape);
        let content = RecordContent::Tensor { dtype: whole.dtype, requires_grad: false, shape, piece };
        records.push(RecordToWrite { key: whole.key.clone(), path: None, content });
    }
    let step = reshard::formats::value_record(&Value::from(number as i64), None).unwrap();
    records.push(RecordToWrite { key: "step".into(), path: None, content: RecordContent::Bytes(step) });
    let written = write_records(store.as_ref(), &save, 0, 1, records, &options)?;
    let mut metadata = Metadata::new();
    metadata.files = vec![written.records[0].file.clone()];
    metadata.storage_meta = Some(StorageMeta { save_id: Some(save.save_id.clone()), ..StorageMeta::default() });
    let place = |i: usize| StorageInfo::new(FileId(0), written.records[i].offset, written.records[i].length);
    for (i, whole) in wholes.iter().enumerate() {
        let chunks = vec![Chunk { region: Region::whole(&whole.shape).unwrap(), storage: place(i) }];
        let (properties, shape) = (TensorProperties::new(whole.dtype), Dims::from_slice(&whole.shape));
        let kind = EntryKind::Tensor(TensorEntry { properties, shape, chunks, extra: None });
        metadata.entries.insert(whole.key.clone(), Entry { path: Some(vec![PathSegment::Key(whole.key.clone())]), kind });
    }
    let kind = EntryKind::Bytes(place(wholes.len()));
    metadata.entries.insert("step".into(), Entry { path: Some(vec![PathSegment::Key("step".into())]), kind });
    publish_records(store.as_ref(), &save, &[written.sums], &metadata.encode().unwrap(), None, &options).map(drop)
}

/// What a save leaves that is stopped when all its data is written and `.metadata` is not.
pub(crate) fn unpublished(store: &Arc<dyn Store>) {
    let faults = Faults::new();
    let when = When::Nth { operation: Some(Operation::Publish), path: ".metadata".into(), nth: 0 };
    faults.add(Rule { when, fault: Fault::Crash });
    saving(NEW, &faults.wrap(Arc::clone(store))).unwrap_err();
}

pub(crate) type Write = fn(u64, &Arc<dyn Store>) -> Result<()>;

/// A writer, and what lies at the path before.
struct Case {
    new: Write,
    /// Writes the old checkpoint; `None` for a path that holds none.
    old: Option<Write>,
    /// Leaves the data of an unpublished save there too.
    unpublished: bool,
    /// Whether it can be run again over what a stopped run left.
    again: bool,
}

fn case(new: Write, old: Option<Write>) -> Case {
    Case { new, old, unpublished: false, again: true }
}

/// Which generation lies there, bit for bit; `None` when there is no checkpoint. Anything in between fails the test.
pub(crate) fn found(store: &Arc<dyn Store>, when: &str) -> Option<u64> {
    let checkpoint = match Checkpoint::open_store(Arc::clone(store)) {
        Ok(checkpoint) => checkpoint,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Incomplete) => return None,
        Err(error) => panic!("{when}: a reader sees neither old nor new: {}", error.full_text()),
    };
    // Some formats have a model alone, under names of its own.
    let own = |key: &str| if checkpoint.entry(key).is_ok() { key.to_owned() } else { key.replace("model.", "") };
    let read = |key: &str| checkpoint.read_whole(&own(key)).unwrap_or_else(|error| panic!("{when}: {}", error.full_text()));
    let number = if checkpoint.entry("step").is_ok() {
        let step = checkpoint.value("step").unwrap_or_else(|error| panic!("{when}: {}", error.full_text()));
        (OLD..=NEW).find(|n| step == Value::from(*n as i64)).expect("a step that was saved")
    } else {
        let first = read("model.a");
        (OLD..=NEW).find(|n| generation(*n)[0].bytes == first).unwrap_or_else(|| panic!("{when}: no weights that were saved"))
    };
    for whole in generation(number) {
        assert!(read(&whole.key) == whole.bytes, "{when}: {} of generation {number} differs", whole.key);
    }
    Some(number)
}

type Made = (Arc<dyn Store>, Box<dyn Any>);

/// A folder in memory where there is one: what is tested is the order of steps, not the disk.
fn local() -> Made {
    let base = std::path::Path::new("/dev/shm");
    let folder = if base.is_dir() { tempfile::tempdir_in(base) } else { tempfile::tempdir() }.unwrap();
    (store_at(folder.path()), Box::new(folder))
}

fn memory() -> Made {
    (Arc::new(MemoryStore::new()), Box::new(()))
}

fn objects() -> Made {
    (Arc::new(Ordered::default()), Box::new(()))
}

/// A kind of store by name, and how one is made.
type Kind = (&'static str, fn() -> Made);

const STORES: [Kind; 3] = [("local", local), ("memory", memory), ("objects", objects)];

fn start(case: &Case, make: fn() -> Made) -> (Made, Option<u64>) {
    let made = make();
    if let Some(old) = case.old {
        old(OLD, &made.0).unwrap();
    }
    if case.unpublished {
        unpublished(&made.0);
    }
    let before = found(&made.0, "at the start");
    assert_eq!(before, case.old.map(|_| OLD));
    (made, before)
}

fn all_faults(case: &Case, stores: &[Kind]) {
    for (kind, make) in stores {
        let ((store, _keep), _) = start(case, *make);
        let counting = Faults::new();
        (case.new)(NEW, &counting.wrap(Arc::clone(&store))).unwrap();
        assert_eq!(found(&store, kind), Some(NEW));
        let clean = store.list("").unwrap().len();
        let mut seen = [0usize; 2];
        for (number, step) in counting.log().into_iter().enumerate() {
            let faults = match step.operation.is_mutating() {
                true => &[Fault::Crash, Fault::Fail(Failure::Device), Fault::FailLate(Failure::Device)][..],
                false => &[Fault::Fail(Failure::Device)][..],
            };
            for fault in faults {
                let ((store, _keep), before) = start(case, *make);
                let result = (case.new)(NEW, &Faults::at(number as u64, *fault).wrap(Arc::clone(&store)));
                let when = format!("{kind}, {fault:?} at {step:?}, which gave {:?}", result.as_ref().map_err(Error::full_text));
                let after = found(&store, &when);
                assert!(after == before || after == Some(NEW), "{when}: found {after:?}");
                assert!(result.is_err() || after == Some(NEW), "{when}: it returned, so it is there");
                seen[usize::from(after == Some(NEW))] += 1;
                // Whatever was left behind, running it again repairs and sweeps it. One object that is there already is refused.
                let whole = store.exists("model.safetensors").unwrap() || store.exists("checkpoint.pt").unwrap();
                if case.again && !(whole && store.capabilities().ordered_writes && after == Some(NEW)) {
                    (case.new)(NEW, &store).unwrap_or_else(|error| panic!("{when}: again: {}", error.full_text()));
                    assert_eq!(found(&store, &when), Some(NEW));
                    let files = store.list("").unwrap();
                    assert_eq!(files.len(), clean, "{when}: leftovers: {files:?}");
                }
            }
        }
        assert!(seen[0] > 0 && seen[1] > 0, "{kind}: both outcomes were seen: {seen:?}");
    }
}

/// An edit takes no path that holds something: whatever fails on the way to that answer, the old checkpoint stays.
#[test]
fn an_edit_over_a_checkpoint_is_refused_and_leaves_it_alone() {
    for (kind, make) in STORES {
        let case = case(editing, Some(saving));
        let ((store, _keep), _) = start(&case, make);
        let (files, counting) = (store.list("").unwrap(), Faults::new());
        let refused = editing(NEW, &counting.wrap(Arc::clone(&store))).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{kind}: {refused}");
        assert_eq!(store.list("").unwrap(), files, "{kind}");
        let steps = counting.log();
        assert!(!steps.is_empty());
        for (number, step) in steps.into_iter().enumerate() {
            for fault in [Fault::Crash, Fault::Fail(Failure::Device), Fault::FailLate(Failure::Device)] {
                let ((store, _keep), _) = start(&case, make);
                editing(NEW, &Faults::at(number as u64, fault).wrap(Arc::clone(&store))).unwrap_err();
                let when = format!("{kind}, {fault:?} at {step:?}");
                assert_eq!(found(&store, &when), Some(OLD), "{when}");
            }
        }
    }
}

macro_rules! matrix {
    ($($name:ident: $case:expr, $stores:expr;)*) => {
        $(#[test]
        fn $name() {
            all_faults(&$case, $stores);
        })*
    };
}

// One object cannot be replaced on a store without rename: these are refused there.
const RENAMING: &[Kind] = &[STORES[0], STORES[1]];

matrix! {
    a_save_to_a_free_path: case(saving, None), &STORES;
    a_save_over_a_checkpoint: case(saving, Some(saving)), &STORES;
    a_background_save_to_a_free_path: case(saving_in_the_background, None), &STORES;
    a_background_save_over_a_checkpoint: case(saving_in_the_background, Some(saving_in_the_background)), &STORES;
    a_conversion_to_a_free_path: case(converting, None), &STORES;
    a_conversion_over_a_checkpoint: case(converting, Some(saving)), &STORES;
    a_relayout_to_a_free_path: case(laying_out_anew, None), &STORES;
    a_relayout_over_a_checkpoint: case(laying_out_anew, Some(saving)), &STORES;
    a_merge_to_a_free_path: case(merging, None), &STORES;
    a_merge_over_a_checkpoint: case(merging, Some(saving)), &STORES;
    an_edit: Case { again: false, ..case(editing, None) }, &STORES;
    an_edit_that_writes_anew: Case { again: false, ..case(editing_a_torch_file, None) }, &STORES;
    a_recovery_of_a_lost_metadata: Case { unpublished: true, ..case(recovering, None) }, &STORES;
    a_recovery_over_an_older_checkpoint: Case { unpublished: true, ..case(recovering, Some(saving)) }, &STORES;
    records_to_a_free_path: case(writing_records, None), &STORES;
    records_over_a_checkpoint: case(writing_records, Some(writing_records)), &STORES;
    one_safetensors_file_to_a_free_path: case(to_one_file, None), &STORES;
    one_safetensors_file_over_another: case(to_one_file, Some(to_one_file)), RENAMING;
    one_safetensors_file_over_several: case(to_one_file, Some(to_several_files)), &STORES;
    several_safetensors_files_to_a_free_path: case(to_several_files, None), &STORES;
    several_safetensors_files_over_several: case(to_several_files, Some(to_several_files)), &STORES;
    several_safetensors_files_over_one: case(to_several_files, Some(to_one_file)), &STORES;
    a_compressed_save_to_a_free_path: case(saving_compressed, None), &STORES;
    a_compressed_save_over_a_checkpoint: case(saving_compressed, Some(saving)), &STORES;
    a_compressed_conversion_over_a_checkpoint: case(compressing, Some(saving_compressed)), &STORES;
    a_universal_checkpoint_to_a_free_path: Case { again: false, ..case(to_universal, None) }, &STORES;
    a_universal_checkpoint_over_another: Case { again: false, ..case(to_universal, Some(to_universal)) }, &STORES;
    a_hugging_face_folder_to_a_free_path: case(to_hugging_face, None), &STORES;
    a_hugging_face_folder_over_another: case(to_hugging_face, Some(to_hugging_face)), &STORES;
    a_torch_file_to_a_free_path: case(to_torch, None), &STORES;
    a_torch_file_over_another: case(to_torch, Some(to_torch)), RENAMING;
}
