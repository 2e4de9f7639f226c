//! Archives that lie: each is an error that says what and where, quickly and without much memory.

use reshard_formats::{RecordError, TorchArchive};
use serde_json::Value as Json;

use crate::support::{error_text, fixture_names, json_fixture, read_fixture};

fn words(case: &Json) -> Vec<&str> {
    let words = case.as_array().unwrap().iter();
    words.map(|word| word.as_str().unwrap()).collect()
}

#[test]
fn archives_that_lie_do_not_open() {
    let expected = json_fixture("records/hostile/hostile.json");
    let cases = expected["archives"].as_object().unwrap();
    assert!(cases.len() > 30);
    for (name, case) in cases {
        let file = read_fixture(&format!("records/hostile/{name}.pt"));
        let error = TorchArchive::open_file(&file).err();
        let error = error.unwrap_or_else(|| panic!("{name} opens"));
        let text = error_text(&error);
        for word in words(case) {
            assert!(text.contains(word), "{name}: {text:?} lacks {word:?}");
        }
    }
}

#[test]
fn every_file_of_the_hostile_folder_is_listed() {
    let expected = json_fixture("records/hostile/hostile.json");
    let listed = |kind: &str| expected[kind].as_object().unwrap().len();
    let files = fixture_names("records/hostile", "pt");
    assert_eq!(files.len(), listed("archives") + listed("contents"));
}

#[test]
fn every_truncation_of_a_record_is_refused() {
    for name in ["plain/float32_2_3", "plain/five", "read/repacked"] {
        let file = read_fixture(&format!("records/{name}.pt"));
        TorchArchive::open_file(&file).unwrap();
        for len in 0..file.len() {
            let error = TorchArchive::open(&file, 0, len as u64).err();
            assert!(error.is_some(), "{name} opens when cut to {len} bytes");
            let from = TorchArchive::open(&file, len as u64 + 1, (file.len() - len - 1) as u64);
            assert!(
                from.is_err(),
                "{name} opens without its first {len} + 1 bytes"
            );
        }
    }
}

#[test]
fn a_place_outside_the_file_is_refused() {
    let file = read_fixture("records/plain/five.pt");
    let len = file.len() as u64;
    for (offset, length) in [
        (0, len + 1),
        (1, len),
        (len, 1),
        (u64::MAX, 1),
        (1, u64::MAX),
    ] {
        let error = TorchArchive::open(&file, offset, length).unwrap_err();
        assert!(matches!(error, RecordError::OutsideFile { .. }), "{error}");
    }
}

#[test]
fn a_flipped_bit_in_an_entry_is_found_and_named() {
    let file = read_fixture("records/plain/float32_2_3.pt");
    let place = {
        let archive = TorchArchive::open_file(&file).unwrap();
        archive.verify_all().unwrap();
        archive
            .data_offset(archive.entry("data/0").unwrap())
            .unwrap()
    };
    let mut file = file;
    file[place as usize + 5] ^= 1;
    let archive = TorchArchive::open_file(&file).unwrap();
    let error = archive.verify_all().unwrap_err();
    let RecordError::Checksum {
        entry,
        offset,
        expected,
        actual,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((entry.as_str(), *offset), ("archive/data/0", place));
    assert_ne!(expected, actual);
}
