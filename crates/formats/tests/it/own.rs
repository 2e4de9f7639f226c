//! The files that reshard adds to a checkpoint: what the first version wrote is read and written again byte by byte, and
//! nothing that is made of them does harm.

use indexmap::IndexMap;
use proptest::prelude::*;
use reshard_formats::own::{Checksums, EditNote, FileIndex, OwnFileError, Sidecar};
use reshard_formats::safetensors::Notes;
use reshard_formats::{DType, Metadata, PathSegment, SafetensorsFile, Value};
use twox_hash::XxHash3_64;

use crate::support::read_fixture;

/// Length of the tail that follows the index of a data file.
const TAIL: usize = 24;

fn data_file() -> Vec<u8> {
    read_fixture("own/first.distcp")
}

fn index_body(file: &[u8]) -> &[u8] {
    let (rest, tail) = file.split_at(file.len() - TAIL);
    let length = u64::from_le_bytes(tail[..8].try_into().unwrap()) as usize;
    &rest[rest.len() - length..]
}

/// A body with a mark and a checksum that are right.
fn sealed(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    let mut bytes = [magic.as_slice(), body].concat();
    bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
    bytes
}

/// A data file that holds nothing but this index.
fn indexed(body: &[u8]) -> Vec<u8> {
    let (length, hash) = (body.len() as u64, XxHash3_64::oneshot(body));
    [body, &length.to_le_bytes(), &hash.to_le_bytes(), b"RSHINDX1"].concat()
}

fn notes(values: Option<&str>, paths: Option<&str>) -> IndexMap<String, String> {
    let entries = [("reshard.values", values), ("reshard.paths", paths)];
    entries.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?.to_owned()))).collect()
}

#[test]
fn an_index_of_the_first_version_is_read_and_written_byte_by_byte() {
    let file = data_file();
    let index = FileIndex::read(&file).unwrap().unwrap();
    assert_eq!((index.rank, index.ranks, index.files), (0, 1, 1));
    let keys: Vec<_> = index.table.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(keys, ["model.w", "model.e", "steps.0", "steps.1.lr", "steps.1.name"]);
    let tensor = index.table[0].tensor.as_ref().unwrap();
    assert_eq!((tensor.dtype, tensor.shape.as_slice()), (DType::Float32, [2, 3].as_slice()));
    let path = ["steps".into(), PathSegment::Index(1), "lr".into()];
    assert_eq!(index.table[3].path.as_deref(), Some(path.as_slice()));
    for record in &index.records {
        let start = (record.sum.offset + record.sum.data_offset) as usize;
        let data = &file[start..start + record.sum.data_length as usize];
        assert_eq!(record.sum.sums, Some(Checksums::of(data)));
    }
    let bytes = index.encode().unwrap();
    assert!(file.ends_with(&bytes));
    assert_eq!(bytes.len(), index_body(&file).len() + TAIL);
}

#[test]
fn a_sidecar_of_the_first_version_is_read_and_written_byte_by_byte() {
    let bytes = read_fixture("own/first.sums");
    let side = Sidecar::decode(&bytes).unwrap();
    let index = FileIndex::read(&data_file()).unwrap().unwrap();
    assert_eq!((side.ranks, &side.save_id), (1, &index.save_id));
    assert_eq!(side.files[0].records, index.records.iter().map(|record| record.sum).collect::<Vec<_>>());
    let first = index.records[1].sum;
    assert_eq!(side.find("__0_0.distcp", first.offset), Some(&first));
    assert_eq!(side.encode().unwrap(), bytes);
}

#[test]
fn a_note_of_an_edit_of_the_first_version_is_read_and_written_byte_by_byte() {
    let bytes = read_fixture("own/edited.edit");
    let note = EditNote::decode(&bytes).unwrap();
    let metadata = Metadata::decode(&note.metadata).unwrap();
    assert!(metadata.entries.contains_key("epoch") && metadata.entries.contains_key("net.w"));
    assert_eq!(note.files[0], ("__0_0.distcp".to_owned(), data_file().len() as u64));
    assert_eq!(note.encode().unwrap(), bytes);
}

#[test]
fn notes_in_safetensors_of_the_first_version_are_read_and_written_byte_by_byte() {
    let file = SafetensorsFile::open(&read_fixture("own/notes.safetensors")).unwrap();
    let notes = Notes::decode(&file.metadata).unwrap();
    assert_eq!(notes.values["steps.1.lr"], Value::Float(0.5));
    assert_eq!(notes.paths["steps.0"], ["steps".into(), PathSegment::Index(0)]);
    for (name, text) in notes.encode().unwrap() {
        assert_eq!(text, file.metadata[&name], "{name}");
    }
}

#[test]
fn a_dtype_keeps_its_code() {
    let written = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu \
                   float4_e2m1fn_x2 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128";
    for (code, name) in written.split_whitespace().enumerate() {
        assert_eq!(DType::from_code(code as u8).map(DType::name), Some(name));
    }
}

#[test]
fn an_index_that_contradicts_itself_is_refused() {
    let index = FileIndex::read(&data_file()).unwrap().unwrap();
    let refused = |change: fn(&mut FileIndex), why: &str| {
        let mut index = index.clone();
        change(&mut index);
        let error = FileIndex::read(&index.encode().unwrap()).unwrap_err();
        assert!(matches!(&error, OwnFileError::Content(text) if text.contains(why)), "{error}");
    };
    refused(|index| index.records[0].key = 99, "not in the table");
    refused(|index| index.records.swap(0, 1), "is invalid");
    refused(|index| index.records[0].sum.data_length = u64::MAX, "is invalid");
    refused(|index| index.records[0].region = None, "not a part of \"model.w\"");
    refused(|index| index.table[0].tensor.as_mut().unwrap().shape[0] = 1, "not a part of \"model.w\"");
    refused(|index| index.table[0].tensor = None, "not a part of \"model.w\"");
}

#[test]
fn a_sidecar_whose_files_are_not_sorted_is_refused() {
    let mut side = Sidecar::decode(&read_fixture("own/first.sums")).unwrap();
    side.files.push(side.files[0].clone());
    let error = Sidecar::decode(&side.encode().unwrap()).unwrap_err();
    assert!(matches!(error, OwnFileError::Content(_)), "{error}");
}

#[test]
fn every_flipped_byte_is_found() {
    let flipped = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0x10;
        bytes
    };
    let (side, note, file) = (read_fixture("own/first.sums"), read_fixture("own/edited.edit"), data_file());
    (0..side.len()).for_each(|at| assert!(Sidecar::decode(&flipped(&side, at)).is_err(), "{at}"));
    (0..note.len()).for_each(|at| assert!(EditNote::decode(&flipped(&note, at)).is_err(), "{at}"));
    let start = file.len() - TAIL - index_body(&file).len();
    (start..file.len()).for_each(|at| assert!(FileIndex::read(&flipped(&file, at)).is_err(), "{at}"));
}

/// What comes out of changed bytes must survive being written and read again.
fn check_all(body: &[u8]) {
    if let Ok(side) = Sidecar::decode(&sealed(b"RSHSUMS1", body)) {
        assert_eq!(Sidecar::decode(&side.encode().unwrap()).unwrap(), side);
    }
    if let Ok(note) = EditNote::decode(&sealed(b"RSHEDIT1", body)) {
        assert_eq!(EditNote::decode(&note.encode().unwrap()).unwrap(), note);
    }
    if let Ok(Some(index)) = FileIndex::read(&indexed(body)) {
        assert_eq!(FileIndex::read(&index.encode().unwrap()).unwrap().unwrap(), index);
    }
    let text = String::from_utf8_lossy(body);
    for metadata in [notes(Some(&text), None), notes(None, Some(&text))] {
        if let Ok(notes) = Notes::decode(&metadata) {
            let again = Notes::decode(&notes.encode().unwrap().into_iter().collect()).unwrap();
            assert_eq!(again.paths, notes.paths);
            assert_eq!(again.values.len(), notes.values.len());
        }
    }
}

/// Bodies of real files, and of none.
fn bodies() -> Vec<Vec<u8>> {
    let inside = |name: &str| {
        let bytes = read_fixture(name);
        bytes[8..bytes.len() - 8].to_vec()
    };
    let file = SafetensorsFile::open(&read_fixture("own/notes.safetensors")).unwrap();
    let texts = file.metadata.values().map(|text| text.clone().into_bytes());
    [inside("own/first.sums"), inside("own/edited.edit"), index_body(&data_file()).to_vec()].into_iter().chain(texts).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn changed_bodies_under_a_right_checksum_end_in_a_value_or_an_error(
        body in proptest::sample::select(bodies()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut body = body;
        for (at, byte) in changes {
            let at = at.index(body.len());
            body[at] = byte;
        }
        if let Some(cut) = cut {
            body.truncate(cut.index(body.len()));
        }
        check_all(&body);
    }

    #[test]
    fn any_bytes_end_in_a_value_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        check_all(&bytes);
        let _ = (Sidecar::decode(&bytes), EditNote::decode(&bytes), FileIndex::read(&bytes));
    }
}
