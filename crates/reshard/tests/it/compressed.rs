//! Records behind DCP's zstd transform: written, read in slices, verified, recovered; damage and bombs are refused.

use std::path::Path;

use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::digest::{DigestOptions, digest};
use reshard::formats::Metadata;
use reshard::formats::metadata::Transforms;
use reshard::layout::Region;
use reshard::mesh::Layout;
use reshard::recover::{RecoverOptions, recover};
use reshard::relayout::relayout;
use reshard::save::Compression;
use reshard::select::Glob;
use reshard::verify::{VerifyOptions, verify};
use reshard::{Checkpoint, DType, ErrorKind, SaveOptions, Value};

use crate::corpus::{self, local, open};
use crate::layouts::{Cut, Whole};
use crate::samples::{sorted, sound};

fn compressing() -> SaveOptions {
    let mut options = SaveOptions::default();
    options.compression = Some(Compression::Zstd);
    options.overwrite = true;
    options
}

/// The sample and tensors that compress well, one of them larger than a block.
fn state() -> (Vec<Whole>, Vec<(String, Value)>) {
    let (mut wholes, values) = corpus::sample();
    for (key, rows) in [("model.zeros", 40), ("model.long", 4000)] {
        let mut whole = Whole::new(key, DType::Float32, &[rows, 250], 0);
        whole.bytes = (0..rows * 250).flat_map(|i| ((i % 97) as f32).to_le_bytes()).collect();
        wholes.push(whole);
    }
    (wholes, values)
}

fn save(folder: &Path, cut: &Cut, options: &SaveOptions) {
    let (wholes, values) = state();
    corpus::save_state(&wholes, &values, cut, &local(folder), options);
}

fn size(folder: &Path) -> u64 {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn what_is_compressed_is_what_was_saved() {
    let plain = tempfile::tempdir().unwrap();
    save(plain.path(), &corpus::rows(2), &SaveOptions::default());
    let expected = sorted(&open(plain.path()));
    for (cut, files) in [(corpus::solo(), 1), (corpus::rows(3), 2), (corpus::columns(2), 1)] {
        let folder = tempfile::tempdir().unwrap();
        let mut options = compressing();
        options.files_per_rank = files;
        // Over a plain one, and over itself.
        save(folder.path(), &corpus::rows(2), &SaveOptions::default());
        for _ in 0..2 {
            save(folder.path(), &cut, &options);
            let found = open(folder.path());
            assert_eq!(sorted(&found), expected);
            sound(folder.path());
        }
        assert!(size(folder.path()) < size(plain.path()) / 2, "{} of {}", size(folder.path()), size(plain.path()));
    }
}

#[test]
fn any_slice_is_read() {
    let (wholes, _) = state();
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::columns(2), &compressing());
    let found = open(folder.path());
    let long = wholes.iter().find(|whole| whole.key == "model.long").unwrap();
    // Backwards and forwards: a decoder only goes forwards.
    for (row, column, rows, columns) in [(3990, 0, 10, 250), (0, 249, 4000, 1), (17, 3, 2, 9), (2000, 120, 100, 20), (0, 0, 1, 1)]
    {
        let region = Region::new(&[row, column], &[rows, columns]).unwrap();
        assert_eq!(found.read_bytes("model.long", &region).unwrap(), long.slice(&region), "{region}");
    }
}

#[test]
fn it_is_converted_both_ways_and_laid_out_anew() {
    let plain = tempfile::tempdir().unwrap();
    save(plain.path(), &corpus::rows(2), &SaveOptions::default());
    let expected = sorted(&open(plain.path()));
    let (packed, cut, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut options = ConvertOptions::default();
    options.compression = Some(Compression::Zstd);
    let to = |folder: &Path| Destination::folder(local(folder));
    convert(&open(plain.path()), &to(packed.path()), ConvertTarget::Dcp { ranks: 3 }, &options).unwrap();
    relayout(&open(packed.path()), &local(cut.path()), &Layout::parse("dp=2", &["*=S(0)"]).unwrap(), &options).unwrap();
    for folder in [&packed, &cut] {
        assert!(size(folder.path()) < size(plain.path()) / 2);
        assert_eq!(sorted(&open(folder.path())), expected);
        sound(folder.path());
    }
    let plainly = ConvertOptions::default();
    convert(&open(cut.path()), &to(back.path()), ConvertTarget::Safetensors { max_shard_size: None }, &plainly).unwrap();
    assert_eq!(sorted(&open(back.path())), expected);
    let error = convert(&open(cut.path()), &to(back.path()), ConvertTarget::Torch, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[test]
fn metadata_comes_back_with_its_transforms() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::rows(2), &compressing());
    let before = sorted(&open(folder.path()));
    std::fs::remove_file(folder.path().join(".metadata")).unwrap();
    recover(&local(folder.path()), &RecoverOptions::default()).unwrap();
    assert_eq!(sorted(&open(folder.path())), before);
    sound(folder.path());
}

/// Changes what `.metadata` says.
fn edited(folder: &Path, change: impl Fn(&mut Metadata)) {
    let path = folder.join(".metadata");
    let mut metadata = Metadata::decode(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut metadata);
    std::fs::write(path, metadata.encode().unwrap()).unwrap();
}

fn each_storage(metadata: &mut Metadata, change: impl Fn(&mut reshard::formats::StorageInfo)) {
    for entry in metadata.entries.values_mut() {
        match &mut entry.kind {
            reshard::formats::EntryKind::Tensor(tensor) => tensor.chunks.iter_mut().for_each(|c| change(&mut c.storage)),
            reshard::formats::EntryKind::Bytes(storage) => change(storage),
        }
    }
}

#[test]
fn a_transform_that_is_not_known_is_one_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::rows(1), &SaveOptions::default());
    edited(folder.path(), |metadata| {
        each_storage(metadata, |storage| {
            let descriptors = Some(vec!["stream.aes/3".to_owned()]);
            storage.transforms = Some(Transforms { descriptors, ..Transforms::default() }.into());
        });
    });
    let found = open(folder.path());
    for error in [found.read_whole("model.a").unwrap_err(), found.value("name").unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("stream.aes/3"), "{error}");
    }
}

#[test]
fn damage_is_found_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::solo(), &compressing());
    let path = folder.path().join("__0_0.distcp");
    let bytes = std::fs::read(&path).unwrap();
    let expected = sorted(&open(folder.path()));
    for at in (0..bytes.len()).step_by(bytes.len() / 60) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x20;
        std::fs::write(&path, &damaged).unwrap();
        let report = verify(&open(folder.path()), &VerifyOptions::default()).unwrap();
        assert!(!report.is_sound(), "byte {at} of {}", bytes.len());
        // What is read at all is what was saved, or an error.
        let found = open(folder.path());
        for (key, entry) in &expected {
            if let Ok(again) = digest(&found, &only(key)) {
                assert_eq!(again.entries.get(key), Some(entry), "byte {at}: {key}");
            }
        }
    }
}

fn only(key: &str) -> DigestOptions {
    let mut options = DigestOptions::default();
    options.selection.include = vec![Glob::literal(key).unwrap()];
    options
}

#[test]
fn a_record_that_expands_beyond_its_tensor_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut bomb = Whole::new("bomb", DType::UInt8, &[64 << 20], 0);
    bomb.bytes.fill(0);
    let small = Whole::new("small", DType::UInt8, &[4], 1);
    let values = vec![("text".to_owned(), Value::from("x"))];
    corpus::save_state(&[bomb, small], &values, &corpus::solo(), &local(folder.path()), &compressing());
    assert!(size(folder.path()) < 1 << 20);
    // A tensor of four bytes, and a value, that say to lie in the large record.
    edited(folder.path(), |metadata| {
        let large = match &metadata.entries["bomb"].kind {
            reshard::formats::EntryKind::Tensor(tensor) => tensor.chunks[0].storage.clone(),
            reshard::formats::EntryKind::Bytes(_) => unreachable!("a tensor was saved"),
        };
        for key in ["small", "text"] {
            match &mut metadata.entries[key].kind {
                reshard::formats::EntryKind::Tensor(tensor) => tensor.chunks[0].storage = large.clone(),
                reshard::formats::EntryKind::Bytes(storage) => *storage = large.clone(),
            }
        }
    });
    let found = open(folder.path());
    let error = found.read_whole("small").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("decompresses to more than"), "{error}");
    let mut options = reshard::OpenOptions::default();
    options.expanded_limit = Some(1 << 20);
    let strict = Checkpoint::open_with(folder.path().to_str().unwrap(), &options).unwrap();
    for error in [strict.value("text").unwrap_err(), strict.check_expanded(["text"]).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    }
    assert_eq!(strict.check_expanded(["bomb"]).unwrap_err().kind(), ErrorKind::Exhausted);
    assert_eq!(found.read_whole("bomb").unwrap().len(), 64 << 20);
}

#[test]
fn a_stored_record_that_says_to_be_huge_is_not_read() {
    const HUGE: u64 = 3 << 30;
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &corpus::solo(), &SaveOptions::default());
    // The file has as many bytes as it says, and hardly any of them lie on a disk.
    std::fs::OpenOptions::new().write(true).open(folder.path().join("__0_0.distcp")).unwrap().set_len(2 * HUGE).unwrap();
    edited(folder.path(), |metadata| {
        each_storage(metadata, |storage| {
            let descriptors = Some(vec!["stream.own/1".to_owned()]);
            storage.transforms = Some(Transforms { descriptors, ..Transforms::default() }.into());
            storage.length = HUGE;
        });
    });
    let found = open(folder.path());
    for key in ["model.a", "name"] {
        let error = found.stored_record(key, "__0_0.distcp", 0, HUGE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("the most is"), "{error}");
        // What is not too large is read: the wrong bytes, which their checksum shows.
        let error = found.stored_record(key, "__0_0.distcp", 0, 100).unwrap_err();
        assert!(error.to_string().contains("checksum"), "{error}");
    }
}
