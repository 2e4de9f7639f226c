//! Archives that lie: each is an error that says what and where, quickly and without much memory.

use reshard_formats::{Content, RecordError, TorchArchive, Tree, Value, pickle_record};
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
            assert!(from.is_err(), "{name} opens without its first {len} + 1 bytes");
        }
    }
}

#[test]
fn a_place_outside_the_file_is_refused() {
    let file = read_fixture("records/plain/five.pt");
    let len = file.len() as u64;
    for (offset, length) in [(0, len + 1), (1, len), (len, 1), (u64::MAX, 1), (1, u64::MAX)] {
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
        archive.data_offset(archive.entry("data/0").unwrap()).unwrap()
    };
    let mut file = file;
    file[place as usize + 5] ^= 1;
    let archive = TorchArchive::open_file(&file).unwrap();
    let error = archive.verify_all().unwrap_err();
    let RecordError::Checksum { entry, offset, expected, actual } = &error else {
        panic!("{error}");
    };
    assert_eq!((entry.as_str(), *offset), ("archive/data/0", place));
    assert_ne!(expected, actual);
}

fn refused_content(file: &[u8]) -> String {
    let archive = TorchArchive::open_file(&file).unwrap();
    let plain = archive.plain_content();
    // Nothing that is refused may come out as plain data when unknown classes are carried along.
    let carried = archive.content();
    match (plain, carried) {
        (Err(error), Err(_) | Ok(Content::Opaque { .. } | Content::Tree(_))) => error_text(&error),
        (plain, carried) => panic!("{plain:?}, {carried:?}"),
    }
}

#[test]
fn contents_that_lie_are_refused() {
    let expected = json_fixture("records/hostile/hostile.json");
    let cases = expected["contents"].as_object().unwrap();
    assert!(cases.len() > 30);
    for (name, case) in cases {
        let file = read_fixture(&format!("records/hostile/{name}.pt"));
        let text = refused_content(&file);
        for word in words(case) {
            assert!(text.contains(word), "{name}: {text:?} lacks {word:?}");
        }
    }
}

#[test]
fn a_class_that_is_not_data_is_carried_by_name_and_never_run() {
    let system = read_fixture("records/hostile/os_system.pt");
    let archive = TorchArchive::open_file(&system).unwrap();
    let Content::Opaque { class } = archive.content().unwrap() else {
        panic!("os.system is not opaque");
    };
    assert_eq!(class, "posix.system");

    let beside = read_fixture("records/hostile/os_system_beside_tensor.pt");
    let archive = TorchArchive::open_file(&beside).unwrap();
    let Content::Tree(tree) = archive.content().unwrap() else {
        panic!("not a tree");
    };
    let leaves = tree.leaves();
    assert!(matches!(leaves[0], (_, Tree::Tensor(_))));
    let (path, Tree::Opaque(opaque)) = &leaves[1] else {
        panic!("{leaves:?}");
    };
    assert_eq!((path.as_slice(), opaque.class.as_str()), (&[Value::from("b")][..], "posix.system"));
}

#[test]
fn nesting_a_million_deep_is_refused_quickly() {
    let lists = [b"\x80\x02".to_vec(), vec![b']'; 1_000_000], vec![b'a'; 999_999], b".".to_vec()];
    let tuples = [b"\x80\x02)".to_vec(), vec![0x85; 1_000_000], b".".to_vec()];
    for pickle in [lists.concat(), tuples.concat()] {
        let file = pickle_record(&pickle, None).unwrap();
        let text = refused_content(&file);
        assert!(text.contains("deep") || text.contains("nesting"), "{text}");
    }
}

#[test]
fn a_flipped_byte_anywhere_never_panics() {
    let file = read_fixture("records/read/shared.pt");
    for at in 0..file.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut file = file.clone();
            file[at] ^= flip;
            if let Ok(archive) = TorchArchive::open_file(&file) {
                let _ = archive.content();
                let _ = archive.note();
                let _ = archive.verify_all();
            }
        }
    }
}
