//! Mutated checkpoints: what verify calls sound loads exactly what was saved, and nothing panics.
//!
//! A seeded run of a few hundred mutations a format; `RESHARD_MUTATIONS=20000` makes it a campaign (`make fuzz`), and
//! `RESHARD_SEED` starts it elsewhere. Each mutation is a chain of one to three changes of bytes, of whole files, or of what
//! `.metadata` says, encoded anew.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use reshard::checkpoint::CatalogKind;
use reshard::convert::{ConvertOptions, Destination, Target, convert};
use reshard::digest::{DigestOptions, digest};
use reshard::edit::{EditOptions, edit};
use reshard::formats::metadata::{Entry, EntryKind};
use reshard::formats::{Metadata, PathSegment};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, Scope};
use reshard::load::{Cast, Verify};
use reshard::save::Compression;
use reshard::select::{Glob, Part, Rename};
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Publish, Store};
use reshard::verify::{VerifyOptions, verify_store};
use reshard::{Checkpoint, DType, LoadOptions, LoadState, SaveOptions, Solo, Value, load_with};

use crate::corpus;
use crate::layouts::Whole;

type Files = BTreeMap<String, Vec<u8>>;

/// A small generator, so that a run can be repeated from its seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// A checkpoint to mutate.
struct Original {
    name: &'static str,
    files: Files,
    /// Files of the same names, of another save of the same layout.
    other: Files,
    /// Which files may be mutated.
    mutable: fn(&str) -> bool,
    /// Whether `.metadata` is also changed by what it means.
    meaning: bool,
    /// Whether what was loaded must be the same; else it must only load.
    same: bool,
}

fn mutations() -> usize {
    std::env::var("RESHARD_MUTATIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(250)
}

fn seed() -> u64 {
    std::env::var("RESHARD_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn stored(files: &Files) -> Arc<dyn Store> {
    let store = MemoryStore::new();
    for (name, bytes) in files {
        store.publish(name, bytes, Publish::Create).unwrap();
    }
    Arc::new(store)
}

fn files_of(store: &dyn Store) -> Files {
    let names = store.list("").unwrap();
    names.into_iter().map(|file| (file.path.clone(), store.read(&file.path, 1 << 30).unwrap())).collect()
}

fn folder(path: &Path) -> Files {
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap())).collect()
}

/// A save of ours, of tensors with content by `salt`.
fn ours(salt: u64) -> Files {
    ours_with(salt, &SaveOptions::default())
}

fn ours_with(salt: u64, options: &SaveOptions) -> Files {
    let wholes: Vec<Whole> = [
        ("model.a", DType::Float32, &[6, 10][..]),
        ("model.b", DType::Float32, &[6, 10]),
        ("model.c", DType::BFloat16, &[7, 3, 5]),
        ("model.scalar", DType::Int64, &[]),
        ("model.empty", DType::Float32, &[0, 4]),
        ("optim.state.a.exp_avg", DType::Float32, &[6, 10]),
    ]
    .into_iter()
    .enumerate()
    .map(|(i, (key, dtype, shape))| Whole::new(key, dtype, shape, salt + i as u64))
    .collect();
    let values = vec![
        ("optim.lr".to_owned(), Value::from(salt as f64)),
        ("name".to_owned(), Value::from(format!("a name {salt}"))),
        ("step".to_owned(), Value::from(salt as i64)),
    ];
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    corpus::save_state(&wholes, &values, &corpus::columns(2), &store, options);
    files_of(store.as_ref())
}

/// What a conversion of it writes.
fn converted(files: &Files, target: Target, compression: Option<Compression>) -> Files {
    let source = Checkpoint::open_store(stored(files)).unwrap();
    let destination: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let mut options = ConvertOptions::default();
    options.compression = compression;
    if matches!(target, Target::Safetensors { .. }) {
        options.selection.part = Part::Model;
    }
    convert(&source, &Destination::folder(destination.clone()), target, &options).unwrap();
    files_of(destination.as_ref())
}

fn edited(files: &Files) -> Files {
    let source = Checkpoint::open_store(stored(files)).unwrap();
    let destination: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let mut options = EditOptions::default();
    options.drop = vec![Glob::new("optim.lr").unwrap()];
    options.renames = vec![Rename::new("model.a", "model.renamed").unwrap()];
    options.set = vec![("extra".to_owned(), None, Value::from("new"))];
    edit(&source, &destination, &options).unwrap();
    files_of(destination.as_ref())
}

/// Everything that a load brings: by key, its place in the tree, and a tensor's dtype, shape, flag and bytes, or the value.
fn content(checkpoint: &Checkpoint) -> reshard::Result<BTreeMap<String, String>> {
    // Without checksums on the way: the verdict of verify alone has to be enough.
    let mut options = DigestOptions::default();
    options.verify = false;
    let mut found: BTreeMap<String, String> =
        digest(checkpoint, &options)?.entries.into_iter().map(|(key, entry)| (key, format!("{entry:?}"))).collect();
    for (key, entry) in &checkpoint.catalog().entries {
        let grad = matches!(&entry.kind, CatalogKind::Tensor(tensor) if tensor.requires_grad);
        found.insert(format!("{key} in the tree"), format!("{:?} {grad}", entry.path));
    }
    Ok(found)
}

/// Loads everything, strictly, with every check there is.
fn load_all(checkpoint: &Checkpoint) -> reshard::Result<Vec<Cast>> {
    let mut memories: Vec<(String, Vec<u8>)> = Vec::new();
    for (key, entry) in &checkpoint.catalog().entries {
        if let CatalogKind::Tensor(tensor) = &entry.kind {
            memories.push((key.clone(), vec![0; tensor.bytes() as usize]));
        }
    }
    let mut state = LoadState::new();
    for (key, memory) in &mut memories {
        let tensor = checkpoint.tensor(key)?;
        let whole = reshard::layout::Region::whole(&tensor.shape)?;
        let piece = LoadPiece::contiguous(whole, tensor.dtype, memory)?;
        let wanted = LoadTensor { dtype: tensor.dtype, shape: tensor.shape.clone(), pieces: vec![piece] };
        state.insert(key.clone(), Scope::Shared, LoadLeaf::Tensor(wanted))?;
    }
    for (key, entry) in &checkpoint.catalog().entries {
        if let CatalogKind::Value(_) = entry.kind {
            state.insert(key.clone(), Scope::Shared, LoadLeaf::Value)?;
        }
    }
    let mut options = LoadOptions::default();
    options.verify = Verify::Always;
    Ok(load_with(&Solo, checkpoint, &mut state, &options)?.report.casts)
}

/// One change of bytes, or of whole files.
fn change_bytes(files: &mut Files, original: &Original, replaced: &mut bool, dice: &mut Dice) -> String {
    let names: Vec<String> = files.keys().filter(|name| (original.mutable)(name)).cloned().collect();
    if names.is_empty() {
        return "nothing left".into();
    }
    let name = dice.pick(&names).clone();
    let length = files[&name].len();
    let (at, other) = (dice.below(length), dice.below(length));
    let run = 1 + dice.below(16);
    let kind = dice.below(14);
    let Some(bytes) = files.get_mut(&name) else { return "nothing".into() };
    match kind {
        _ if bytes.is_empty() => bytes.push(7),
        0..=3 => bytes[at] ^= 1 << dice.below(8),
        4 => bytes[at] = dice.next() as u8,
        5 => bytes[at] = *dice.pick(&[0, 1, 0x7f, 0x80, 0xff, b'.', b'0', b'u', b'R', b'N']),
        6 => drop(bytes.drain(at..(at + run).min(length))),
        7 => {
            let inserted: Vec<u8> = (0..run).map(|_| dice.next() as u8).collect();
            drop(bytes.splice(at..at, inserted));
        }
        8 => {
            let copied: Vec<u8> = bytes[at..(at + run).min(length)].to_vec();
            drop(bytes.splice(other..other, copied));
        }
        9 => {
            let run = run.min(length - at.max(other));
            for i in 0..run {
                bytes.swap(at + i, other + i);
            }
        }
        10 => bytes[at..(at + 40 * run).min(length)].fill(0),
        11 => bytes.truncate(at),
        12 => {
            let second = dice.pick(&names).clone();
            let (a, b) = (files[&name].clone(), files[&second].clone());
            files.insert(name.clone(), b);
            files.insert(second, a);
        }
        _ => match original.other.get(&name) {
            Some(other) if !*replaced && dice.below(2) == 0 => {
                *replaced = true;
                files.insert(name.clone(), other.clone());
            }
            _ => drop(files.remove(&name)),
        },
    }
    format!("{name}: change {kind} at {at}, {other}, {run}")
}

/// One change of what `.metadata` says.
fn change_meaning(files: &mut Files, dice: &mut Dice) -> String {
    let Some(mut metadata) = files.get(".metadata").and_then(|bytes| Metadata::decode(bytes).ok()) else { return "none".into() };
    let count = metadata.entries.len();
    if count < 2 {
        return "too few".into();
    }
    let (a, b) = (dice.below(count), dice.below(count));
    let kind = dice.below(9);
    let swapped = |entry: &Entry| entry.kind.clone();
    match kind {
        0 => {
            let (first, second) = (swapped(&metadata.entries[a]), swapped(&metadata.entries[b]));
            metadata.entries[a].kind = second;
            metadata.entries[b].kind = first;
        }
        1 => drop(metadata.entries.shift_remove_index(a)),
        2 => {
            if let Some((key, entry)) = metadata.entries.shift_remove_index(a) {
                let key = format!("{key}x");
                let path = vec![PathSegment::Key(key.clone())];
                metadata.entries.insert(key, Entry { path: Some(path), ..entry });
            }
        }
        3 => metadata.entries[a].path = metadata.entries[b].path.clone(),
        4 => {
            let key = metadata.entries.get_index(a).map(|(key, _)| key.clone()).unwrap_or_default();
            metadata.entries[a].path = Some(vec![PathSegment::Key(key)]);
        }
        5 => {
            if let Some(meta) = &mut metadata.storage_meta {
                meta.save_id = Some("another".into());
            }
        }
        _ => match &mut metadata.entries[a].kind {
            EntryKind::Bytes(info) => info.offset += 64,
            EntryKind::Tensor(tensor) if kind == 6 => {
                let count = tensor.chunks.len();
                if count > 1 {
                    let (first, second) = (tensor.chunks[0].storage.clone(), tensor.chunks[count - 1].storage.clone());
                    tensor.chunks[0].storage = second;
                    tensor.chunks[count - 1].storage = first;
                }
            }
            EntryKind::Tensor(tensor) if kind == 7 => tensor.properties.requires_grad ^= true,
            EntryKind::Tensor(tensor) => drop(tensor.chunks.pop()),
        },
    }
    if let Ok(bytes) = metadata.encode() {
        files.insert(".metadata".into(), bytes);
    }
    format!("meaning {kind} of {a} and {b}")
}

/// Mutates and checks; what was called sound and loaded otherwise.
fn campaign(original: &Original) {
    let checkpoint = Checkpoint::open_store(stored(&original.files)).unwrap();
    let expected = content(&checkpoint).unwrap();
    load_all(&checkpoint).unwrap();
    let untouched = verify_store(stored(&original.files), &VerifyOptions::default()).unwrap();
    assert!(untouched.findings.is_empty(), "{}: {:?}", original.name, untouched.findings);
    let (mut sound, mut wrong) = (0, Vec::new());
    let count = mutations();
    for number in 0..count {
        let mut dice = Dice(seed().wrapping_mul(0x1000_0000).wrapping_add(number as u64));
        let mut files = original.files.clone();
        let mut replaced = false;
        let mut how = Vec::new();
        for _ in 0..1 + dice.below(3) {
            how.push(match original.meaning && dice.below(5) == 0 {
                true => change_meaning(&mut files, &mut dice),
                false => change_bytes(&mut files, original, &mut replaced, &mut dice),
            });
        }
        let store = stored(&files);
        if !verify_store(store.clone(), &VerifyOptions::default()).is_ok_and(|report| report.is_sound()) {
            continue;
        }
        sound += 1;
        let loaded = Checkpoint::open_store(store).and_then(|checkpoint| {
            load_all(&checkpoint)?;
            content(&checkpoint)
        });
        match loaded {
            Ok(found) if !original.same || found == expected => {}
            Ok(found) => {
                let differs =
                    |(key, value): (&String, &String)| (expected.get(key) != Some(value)).then(|| (key.clone(), value.clone()));
                let gone: Vec<&String> = expected.keys().filter(|key| !found.contains_key(*key)).collect();
                let what: Vec<_> = found.iter().filter_map(differs).take(3).collect();
                wrong.push(format!("{number} {how:?}: {what:?}, gone {gone:?}"));
            }
            Err(error) => wrong.push(format!("{number} {how:?}: {}", error.full_text())),
        }
    }
    println!("{}: {count} mutations, {sound} sound, {} wrong", original.name, wrong.len());
    wrong.truncate(12);
    assert!(wrong.is_empty(), "{}: verify called sound what loads otherwise:\n{}", original.name, wrong.join("\n"));
}

fn any(_: &str) -> bool {
    true
}

#[test]
fn our_own_checkpoints() {
    campaign(&Original { name: "ours", files: ours(1), other: ours(100), mutable: any, meaning: true, same: true });
}

#[test]
fn our_own_checkpoints_without_their_sidecar() {
    let bare = |salt| {
        let mut files = ours(salt);
        files.retain(|name, _| !name.ends_with(".sums"));
        files
    };
    let (files, other) = (bare(1), bare(100));
    campaign(&Original { name: "ours without sidecar", files, other, mutable: any, meaning: true, same: true });
}

#[test]
fn compressed_checkpoints() {
    let packed = |salt| {
        let mut options = SaveOptions::default();
        options.compression = Some(Compression::Zstd);
        ours_with(salt, &options)
    };
    campaign(&Original { name: "compressed", files: packed(1), other: packed(100), mutable: any, meaning: true, same: true });
}

#[test]
fn converted_checkpoints() {
    for (name, compression) in [("converted", None), ("converted and compressed", Some(Compression::Zstd))] {
        let made = |salt| converted(&ours(salt), Target::Dcp { ranks: 3 }, compression);
        campaign(&Original { name, files: made(1), other: made(100), mutable: any, meaning: true, same: true });
    }
}

/// Nothing protects the bytes of a safetensors file; what is called sound can be loaded all the same.
#[test]
fn safetensors() {
    for (name, max_shard_size) in [("safetensors", None), ("safetensors with an index", Some(300))] {
        let made = |salt| converted(&ours(salt), Target::Safetensors { max_shard_size }, None);
        campaign(&Original { name, files: made(1), other: made(100), mutable: any, meaning: false, same: false });
    }
}

#[test]
fn edited_checkpoints() {
    let (files, other) = (edited(&ours(1)), edited(&ours(100)));
    campaign(&Original { name: "edited", files, other, mutable: any, meaning: true, same: true });
}

#[test]
fn data_files_of_pytorch() {
    for (name, case) in [("torch 2.13", "torch-2.13/ddp_w2"), ("torch 2.5", "torch-2.5/zoo"), ("torch 2.15", "torch-2.15/zoo")] {
        let files = folder(&corpus::cases().into_iter().find(|(found, ..)| found == case).unwrap().1);
        let mutable = |name: &str| name.ends_with(".distcp");
        campaign(&Original { name, files, other: Files::new(), mutable, meaning: false, same: true });
    }
}

/// Nothing protects what PyTorch's `.metadata` says of a key; what is called sound can be loaded all the same.
#[test]
fn metadata_of_pytorch() {
    let files = folder(&corpus::cases().into_iter().find(|(found, ..)| found == "torch-2.13/ddp_w2").unwrap().1);
    let mutable = |name: &str| name == ".metadata";
    campaign(&Original { name: "torch .metadata", files, other: Files::new(), mutable, meaning: true, same: false });
}

#[test]
fn files_of_torch_save() {
    let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../formats/tests/records/read");
    for name in ["state_dict", "nested", "every_dtype", "shared", "strided"] {
        let files = Files::from([("x.pt".to_owned(), std::fs::read(records.join(format!("{name}.pt"))).unwrap())]);
        campaign(&Original { name, files, other: Files::new(), mutable: any, meaning: false, same: true });
    }
}
