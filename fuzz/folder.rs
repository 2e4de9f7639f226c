//! Folders of trainers out of any bytes: what the fuzz target `folder` and a test of the engine have in common.
//!
//! An input is a list of files. Of a `torch.save` file it has the pickle and the sizes of storages; the archive around them is made
//! here, with right checksums, so that mutations reach what the pickle means and not only the zip reader.

use std::sync::Arc;

use reshard::Checkpoint;
use reshard::checkpoint::CatalogKind;
use reshard::layout::Region;
use reshard::storage::memory::MemoryStore;
use reshard::storage::{Publish, Store};
use reshard::verify::{VerifyOptions, verify};

/// No input has more files, and no storage is larger.
const MAX_FILES: usize = 256;
const MAX_STORAGE: u16 = 4096;
/// Tensors that say to be larger are not read.
const MAX_READ: u64 = 1 << 20;

fn taken<'d>(data: &mut &'d [u8], count: usize) -> &'d [u8] {
    let (front, rest) = data.split_at(count.min(data.len()));
    *data = rest;
    front
}

fn number(data: &mut &[u8], bytes: usize) -> usize {
    taken(data, bytes).iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// The files of an input.
pub(super) fn files(mut data: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    while !data.is_empty() && files.len() < MAX_FILES {
        let length = number(&mut data, 1);
        let name = String::from_utf8_lossy(taken(&mut data, length)).into_owned();
        let length = number(&mut data, 4);
        let body = taken(&mut data, length);
        let count = number(&mut data, 1);
        let sizes: Vec<usize> = (0..count).map(|_| number(&mut data, 2).min(usize::from(MAX_STORAGE))).collect();
        let is_torch = [".pt", ".bin"].iter().any(|suffix| name.ends_with(suffix));
        files.push((name, if is_torch { archive(body, &sizes) } else { body.to_vec() }));
    }
    files
}

/// A zip of stored entries, as torch.save makes it.
fn archive(pickle: &[u8], storages: &[usize]) -> Vec<u8> {
    let mut entries = vec![("data.pkl".to_owned(), pickle.to_vec()), ("byteorder".to_owned(), b"little".to_vec())];
    let data = |size: usize| (0..size).map(|i| (i % 7) as u8).collect::<Vec<u8>>();
    entries.extend(storages.iter().enumerate().map(|(i, size)| (format!("data/{i}"), data(*size))));
    entries.push(("version".to_owned(), b"3\n".to_vec()));
    let mut bytes = Vec::new();
    let mut directory = Vec::new();
    let count = entries.len() as u16;
    for (name, data) in entries {
        let name = format!("archive/{name}");
        let at = bytes.len() as u32;
        let mut shared = Vec::new();
        for field in [20u16, 0, 0, 0, 0] {
            shared.extend(field.to_le_bytes());
        }
        for field in [crc32fast::hash(&data), data.len() as u32, data.len() as u32] {
            shared.extend(field.to_le_bytes());
        }
        shared.extend((name.len() as u16).to_le_bytes());
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&shared);
        bytes.extend(0u16.to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(&data);
        directory.extend(b"PK\x01\x02");
        directory.extend(20u16.to_le_bytes());
        directory.extend(&shared);
        directory.extend([0; 12]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let at = bytes.len() as u32;
    bytes.extend(&directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    for field in [count, count] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.extend((directory.len() as u32).to_le_bytes());
    bytes.extend(at.to_le_bytes());
    bytes.extend(0u16.to_le_bytes());
    bytes
}

/// Opens a folder of these files and reads what it says it holds. Whether it is opened; it must end, and without harm.
pub(super) fn check(files: &[(String, Vec<u8>)]) -> bool {
    let store = MemoryStore::new();
    for (name, bytes) in files {
        // A name that no store takes is no file.
        let _ = store.publish(name, bytes, Publish::Replace);
    }
    let Ok(checkpoint) = Checkpoint::open_store(Arc::new(store)) else { return false };
    let _ = checkpoint.check_expanded(checkpoint.keys());
    let keys: Vec<String> = checkpoint.keys().map(str::to_owned).collect();
    for key in &keys {
        match checkpoint.entry(key).map(|entry| &entry.kind) {
            Ok(CatalogKind::Tensor(tensor)) => {
                for chunk in &tensor.chunks {
                    assert!(chunk.region.check_inside(&tensor.shape).is_ok(), "{key:?}: {} is outside", chunk.region);
                }
                if let Ok(whole) = Region::whole(&tensor.shape)
                    && tensor.bytes() <= MAX_READ
                {
                    let read = checkpoint.read_bytes(key, &whole);
                    assert!(read.is_err() || read.is_ok_and(|bytes| bytes.len() as u64 == tensor.bytes()));
                }
            }
            Ok(_) => drop(checkpoint.read_value(key)),
            Err(error) => panic!("{key:?} was listed: {error}"),
        }
    }
    let _ = verify(&checkpoint, &VerifyOptions::default());
    true
}
