//! Metadata: every file of the corpus, odd but sound ones, round trips, and torch itself reading ours.

use std::fs;

use proptest::prelude::*;
use reshard_formats::metadata::{PlannerData, TensorExtra, Transforms};
use reshard_formats::pickle::Carried;
use reshard_formats::{
    Chunk, DType, Entry, EntryKind, FileId, MemoryFormat, Metadata, PathClass, PathSegment, StorageInfo, StorageMeta,
    TensorEntry, TensorProperties, Value,
};
use reshard_layout::{Dims, Region};

use crate::corpus::cases;
use crate::support::{fixture, json_fixture, read_fixture, run_python, torch_python};

/// What a write and a read give back: everything but strides, which only torch 2.15 knows and we don't write.
fn written(mut metadata: Metadata) -> Metadata {
    for entry in metadata.entries.values_mut() {
        if let EntryKind::Tensor(tensor) = &mut entry.kind {
            tensor.properties.strides = None;
        }
    }
    metadata
}

/// Files are numbered in order of appearance, so compare with paths in place of numbers.
fn with_paths(metadata: &Metadata) -> Vec<(String, String)> {
    let storage = |s: &StorageInfo| format!("{:?} {} {} {:?}", metadata.file(s.file), s.offset, s.length, s.transforms);
    let entries = metadata.entries.iter().map(|(key, entry)| {
        let text = match &entry.kind {
            EntryKind::Bytes(info) => storage(info),
            EntryKind::Tensor(t) => {
                let chunks: Vec<_> = t.chunks.iter().map(|c| (c.region.clone(), storage(&c.storage))).collect();
                format!("{:?} {:?} {chunks:?} {:?}", t.properties, t.shape, t.extra)
            }
        };
        (key.clone(), format!("{:?} {text}", entry.path))
    });
    let rest = format!(
        "{:?} {:?} {:?} {:?} {:?}",
        metadata.storage_meta, metadata.version, metadata.planner_data, metadata.unstored_paths, metadata.extra
    );
    let unreferenced = metadata.unreferenced.iter().map(|u| (u.key.clone(), format!("{:?} {}", u.offsets, storage(&u.storage))));
    entries.chain([(String::new(), rest)]).chain(unreferenced).collect()
}

fn assert_round_trip(metadata: &Metadata, name: &str) {
    let bytes = metadata.encode().unwrap_or_else(|e| panic!("{name}: {e}"));
    let again = Metadata::decode(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(with_paths(&again), with_paths(&written(metadata.clone())), "{name}");
}

#[test]
fn every_metadata_of_the_corpus_decodes_covers_and_comes_back() {
    let cases = cases();
    assert_eq!(cases.len(), 18);
    for case in cases {
        let name = case.display().to_string();
        let bytes = fs::read(case.join("checkpoint/.metadata")).unwrap();
        let metadata = Metadata::decode(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(!metadata.entries.is_empty() && !metadata.files.is_empty(), "{name}");
        assert!(metadata.entries.values().all(|entry| entry.path.is_some()), "{name}");
        assert!(metadata.unreferenced.is_empty() && metadata.extra.is_empty(), "{name}");
        let meta = metadata.storage_meta.as_ref().unwrap();
        assert_eq!(meta.checkpoint_id_class, Some(PathClass::Posix), "{name}");
        assert_eq!(metadata.version.is_some(), !name.contains("torch-2.5"), "{name}");
        let strides = metadata.entries.values().any(|entry| match &entry.kind {
            EntryKind::Tensor(tensor) => tensor.properties.strides.is_some(),
            EntryKind::Bytes(_) => false,
        });
        assert_eq!(strides, name.contains("torch-2.15"), "{name}");
        metadata.check_coverage().unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_round_trip(&metadata, &name);
    }
}

#[test]
fn odd_but_sound_metadata_decodes() {
    let expected = json_fixture("pickles/hostile/odd/expected.json");
    for (name, offsets) in expected.as_object().unwrap() {
        let bytes = read_fixture(&format!("pickles/hostile/odd/{name}"));
        let metadata = Metadata::decode(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        let found = metadata.entries.iter().map(|(key, entry)| {
            let offsets = match &entry.kind {
                EntryKind::Bytes(info) => vec![info.offset],
                EntryKind::Tensor(tensor) => tensor.chunks.iter().map(|chunk| chunk.storage.offset).collect(),
            };
            (key.clone(), serde_json::Value::from(offsets))
        });
        assert_eq!(&serde_json::Value::Object(found.collect()), offsets, "{name}");
        assert_round_trip(&metadata, name);
    }
    let odd = |name: &str| Metadata::decode(&read_fixture(&format!("pickles/hostile/odd/{name}"))).unwrap();
    assert_eq!(odd("records_of_unknown_keys").unreferenced.len(), 2);
    assert_eq!(odd("paths_of_keys_not_stored").unstored_paths.len(), 1);
    assert!(matches!(odd("planner_data_of_another_kind").planner_data, PlannerData::Other(_)));
    let extra = odd("extra_fields");
    assert_eq!(extra.extra[0].0, "note");
    assert_eq!(extra.extra[0].1.to_value().unwrap().python_repr(), "['of', 'metadata']");
    let EntryKind::Tensor(tensor) = &extra.entries["w"].kind else { panic!("not a tensor") };
    assert_eq!(tensor.extra.as_ref().unwrap().chunks.len(), 1);
    assert_eq!(tensor.chunks[0].storage.transforms.as_ref().unwrap().index_extra.len(), 1);
}

#[test]
fn unknown_classes_in_unknown_fields_are_carried_and_those_that_act_are_not() {
    // What Megatron wrote: its planner's own objects beside the data.
    let bytes = fs::read(fixture("../../reshard/tests/foreign/megatron-0.16/tp2_dp2/checkpoint/iter_0000007/.metadata"));
    let metadata = Metadata::decode(&bytes.unwrap()).unwrap();
    assert_eq!(metadata.extra.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["all_local_plans"]);
    let again = Metadata::decode(&metadata.encode().unwrap()).unwrap();
    assert!(again.extra == metadata.extra, "what is carried comes back as it was");
    let acting = read_fixture("pickles/hostile/metadata/unknown_class_as_a_field");
    assert!(Metadata::decode(&acting).unwrap_err().to_string().contains("pickle"));
}

#[test]
fn what_decoding_refuses_is_not_written() {
    let mut metadata = Metadata::new();
    let storage = StorageInfo::new(FileId(0), 0, 1);
    metadata.entries.insert("v".into(), Entry { path: None, kind: EntryKind::Bytes(storage) });
    assert!(metadata.encode().unwrap_err().to_string().contains("file number 0 does not exist"));
    metadata.files.push("../x".into());
    assert!(metadata.encode().unwrap_err().to_string().contains("../x"));
    metadata.files[0] = "x".into();
    metadata.encode().unwrap();
    metadata.entries[0].kind = EntryKind::Bytes(StorageInfo::new(FileId(0), u64::MAX, 1));
    assert!(metadata.encode().is_err());
}

fn carried(text: &str) -> Carried {
    Carried::from_value(&Value::Dict(vec![(Value::from(text), Value::Tuple(vec![Value::None]))])).unwrap()
}

fn storage() -> impl Strategy<Value = StorageInfo> {
    let transforms = prop_oneof![
        8 => Just(None),
        1 => prop::option::of(prop::collection::vec("[a-z]{1,5}", 0..3)).prop_map(|descriptors| {
            let (extra, index_extra) = (vec![("new".to_owned(), carried("info"))], Vec::new());
            Some(Transforms { descriptors, extra, index_extra }.into())
        }),
    ];
    (0u32..3, any::<u64>(), any::<u64>(), transforms).prop_map(|(file, offset, length, transforms)| StorageInfo {
        file: FileId(file),
        offset,
        length: length.min(u64::MAX - offset),
        transforms,
    })
}

fn tensor() -> impl Strategy<Value = EntryKind> {
    // Rows of one dimension, so that offsets differ; the other dimensions are whole.
    let shape = prop_oneof![
        Just(Vec::new()),
        (0u64..70_000, prop::collection::vec(0u64..300, 0..5)).prop_map(|(rows, rest)| [vec![rows], rest].concat()),
    ];
    (shape, 1u64..5, any::<(bool, bool, bool)>()).prop_flat_map(|(shape, parts, (grad, pin, extra))| {
        let rows = shape.first().copied().unwrap_or(1);
        let per = rows.div_ceil(parts).max(1);
        let regions: Vec<Region> = match shape.is_empty() {
            true => vec![Region::whole(&[]).unwrap()],
            false => (0..rows.div_ceil(per).max(1))
                .map(|part| {
                    let mut offsets = vec![0; shape.len()];
                    let mut sizes = shape.clone();
                    offsets[0] = part * per;
                    sizes[0] = per.min(rows - part * per);
                    Region::new(&offsets, &sizes).unwrap()
                })
                .collect(),
        };
        let properties = TensorProperties {
            requires_grad: grad,
            pin_memory: pin,
            memory_format: if pin { MemoryFormat::ChannelsLast } else { MemoryFormat::Preserve },
            ..TensorProperties::new(if grad { DType::Float32 } else { DType::Float8E5M2 })
        };
        let extra = extra.then(|| {
            let chunks = vec![(regions.len() - 1, vec![("new".to_owned(), carried("chunk"))])];
            Box::new(TensorExtra { tensor: vec![("more".to_owned(), carried("tensor"))], chunks })
        });
        prop::collection::vec(storage(), regions.len()).prop_map(move |storages| {
            let chunks = regions.iter().cloned().zip(storages);
            EntryKind::Tensor(TensorEntry {
                properties: properties.clone(),
                shape: Dims::from_slice(&shape),
                chunks: chunks.map(|(region, storage)| Chunk { region, storage }).collect(),
                extra: extra.clone(),
            })
        })
    })
}

fn metadata() -> impl Strategy<Value = Metadata> {
    let kind = prop_oneof![3 => tensor(), 1 => storage().prop_map(EntryKind::Bytes)];
    let segment = prop_oneof!["[a-zA-Zäß.]{0,8}".prop_map(PathSegment::Key), any::<i64>().prop_map(PathSegment::Index),];
    let path = prop::option::of(prop::collection::vec(segment, 0..6));
    let entries = prop::collection::vec(("[a-z.0-9ä]{0,300}", path, kind), 0..12);
    let meta = prop::option::of((prop::option::of("[a-z/]{1,9}"), any::<bool>(), prop::collection::vec("[a-z]{1,4}", 0..3)));
    (entries, meta, prop::option::of("[0-9.]{1,5}"), any::<bool>()).prop_map(|(entries, meta, version, extra)| {
        let mut metadata = Metadata { version, ..Metadata::new() };
        metadata.files = ["__0_0.distcp", "a/b.distcp", "c d"].map(str::to_owned).to_vec();
        for (key, path, kind) in entries {
            metadata.entries.insert(key, Entry { path, kind });
        }
        metadata.storage_meta = meta.map(|(checkpoint_id, path, modules)| StorageMeta {
            checkpoint_id_class: checkpoint_id.as_ref().and(path.then_some(PathClass::PurePosix)),
            checkpoint_id,
            modules,
            ..StorageMeta::default()
        });
        if extra {
            metadata.extra.push(("new field".into(), carried("metadata")));
        }
        metadata
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn metadata_comes_back(metadata in metadata()) {
        assert_round_trip(&metadata, "generated");
    }
}

/// Loads pairs of files with `pickle.load` and compares: what torch wrote, what we made of it.
const COMPARE: &str = r#"
import pickle, sys
from pathlib import Path
from torch.distributed.checkpoint.metadata import TensorProperties
folder = Path(sys.argv[1])
# Ours must load in an unchanged torch.
loaded = {f.stem: pickle.loads(f.read_bytes()) for f in sorted(folder.glob("*.ours"))}
# Only what torch 2.15 wrote needs help: its properties have a sixth value that older ones can't load.
plain = TensorProperties.__setstate__
TensorProperties.__setstate__ = lambda self, state: plain(self, state[:5])
def text(s): return repr(s).replace("\\", "/")
def check(theirs, b):
    a = pickle.loads(theirs.read_bytes())
    assert type(a) is type(b)
    # Absent in older files, and without a default on the class.
    a.storage_meta.__dict__.setdefault("modules", [])
    assert a == b, (a, b)
    assert a.state_dict_metadata == b.state_dict_metadata and list(a.state_dict_metadata) == list(b.state_dict_metadata)
    assert a.storage_data == b.storage_data and a.planner_data == b.planner_data
    assert {k.fqn: k.index for k in a.storage_data} .keys() == {k.fqn: k.index for k in b.storage_data}.keys()
    assert {(k, k.index) for k in a.storage_data} == {(k, k.index) for k in b.storage_data}
    assert text(a.storage_meta) == text(b.storage_meta)
for name, ours in loaded.items():
    check(folder / f"{name}.theirs", ours)
print(len(loaded))
"#;

#[test]
fn torch_loads_what_we_write_into_equal_objects() {
    let Some(python) = torch_python() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (number, case) in cases().into_iter().enumerate() {
        let theirs = fs::read(case.join("checkpoint/.metadata")).unwrap();
        let ours = Metadata::decode(&theirs).unwrap().encode().unwrap();
        fs::write(folder.path().join(format!("{number}.theirs")), theirs).unwrap();
        fs::write(folder.path().join(format!("{number}.ours")), ours).unwrap();
    }
    let printed = run_python(&python, COMPARE, &[folder.path()]);
    assert_eq!(printed.trim(), "18");
}
