//! Any bytes as a torch archive; every tensor that comes out must lie inside the input, every plain value must survive being
//! written anew.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::{Content, StoredTensor, TorchArchive, value_record};

fn check(tensor: &StoredTensor, len: u64) {
    assert!(tensor.storage.offset + tensor.storage.length <= len);
    assert!(tensor.layout.base() >= tensor.storage.offset || tensor.layout.end() == tensor.layout.base());
    assert!(tensor.layout.end() <= tensor.storage.offset + tensor.storage.length);
    assert_eq!(tensor.layout.shape(), tensor.shape.as_slice());
}

fuzz_target!(|data: &[u8]| {
    let Ok(archive) = TorchArchive::open(&data, 0, data.len() as u64) else {
        return;
    };
    let len = data.len() as u64;
    let mut total = 0;
    for entry in archive.entries() {
        if let Ok(offset) = archive.data_offset(entry) {
            assert!(offset + entry.size <= len);
        }
        total += entry.size;
    }
    // Entries don't overlap, so together they are no larger than the archive.
    assert!(total <= len);
    let _ = archive.verify_all();
    let _ = archive.note();
    match archive.content_and_classes() {
        Ok((Content::Tensor(tensor), classes)) => {
            assert!(classes.is_empty());
            check(&tensor, len);
        }
        Ok((Content::Value(value), classes)) => {
            assert!(classes.is_empty());
            // What a planner of torch is given instead of these bytes holds the same value.
            if let Ok(record) = value_record(&value, None) {
                let again = TorchArchive::open_file(&record).and_then(|archive| archive.content());
                assert!(matches!(&again, Ok(Content::Value(same)) if *same == value), "{value:?} came back as {again:?}");
            }
        }
        Ok((Content::Tree(tree), _)) => {
            tree.tensors().into_iter().for_each(|tensor| check(tensor, len));
            let _ = tree.leaves();
        }
        _ => {}
    }
});
