//! Any bytes as a torch archive; every tensor that comes out must lie inside the input.
#![no_main]

use libfuzzer_sys::fuzz_target;
use reshard_formats::{Content, StoredTensor, TorchArchive};

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
    match archive.content() {
        Ok(Content::Tensor(tensor)) => check(&tensor, len),
        Ok(Content::Tree(tree)) => {
            tree.tensors().into_iter().for_each(|tensor| check(tensor, len));
            let _ = tree.leaves();
        }
        _ => {}
    }
});
