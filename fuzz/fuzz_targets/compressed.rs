//! Any bytes as a compressed record: of a tensor and of a value, as they are and behind a frame's mark.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use reshard::formats::metadata::Transforms;
use reshard::formats::{Chunk, Entry, EntryKind, FileId, Metadata, StorageInfo, TensorEntry, TensorProperties};
use reshard::layout::{Dims, Region};
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Publish, Store};
use reshard::{Checkpoint, DType};

fuzz_target!(|data: &[u8]| {
    for bytes in [data.to_vec(), [b"\x28\xb5\x2f\xfd".as_slice(), data].concat()] {
        let length = bytes.len() as u64;
        let descriptors = Some(vec!["stream.zstd/1".to_owned()]);
        let transforms = Some(Arc::new(Transforms { descriptors, ..Transforms::default() }));
        let storage = StorageInfo { file: FileId(0), offset: 0, length, transforms };
        let mut metadata = Metadata::new();
        metadata.files = vec!["__0_0.distcp".to_owned()];
        let shape = Dims::from_slice(&[64]);
        let chunks = vec![Chunk { region: Region::whole(&shape).unwrap(), storage: storage.clone() }];
        let properties = TensorProperties::new(DType::Float32);
        let tensor = EntryKind::Tensor(TensorEntry { properties, shape, chunks, extra: None });
        metadata.entries.insert("tensor".to_owned(), Entry { path: None, kind: tensor });
        metadata.entries.insert("value".to_owned(), Entry { path: None, kind: EntryKind::Bytes(storage) });
        let store = MemoryStore::new();
        store.publish("__0_0.distcp", &bytes, Publish::Create).unwrap();
        store.publish(".metadata", &metadata.encode().unwrap(), Publish::Create).unwrap();
        let Ok(checkpoint) = Checkpoint::open_store(Arc::new(store)) else { continue };
        let _ = checkpoint.check_expanded(["tensor", "value"]);
        let _ = checkpoint.read_value("value");
        if let Ok(found) = checkpoint.read_whole("tensor") {
            assert_eq!(found.len(), 256);
        }
    }
});
