//! Archives that torch wrote: strided, shared, empty, old and new, big-endian; and those it wrote that hold no
//! plain memory.

use reshard_formats::{Content, DType, Key, RecordSpec, StoredTensor, TorchArchive, Tree, Value, value_record};
use serde_json::Value as Json;

use crate::record_write::record;
use crate::support::{error_text, fixture_names, gather, json_fixture, read_fixture, run_python, sha256, torch_python};

fn check_tensor(file: &[u8], tensor: &StoredTensor, expected: &Json, what: &str) {
    assert_eq!(tensor.dtype.name(), expected["dtype"], "{what}");
    let shape: Vec<u64> = serde_json::from_value(expected["shape"].clone()).unwrap();
    assert_eq!(tensor.shape.as_slice(), shape, "{what}");
    assert_eq!(tensor.requires_grad, expected["requires_grad"], "{what}");
    let data = gather(&file, tensor.dtype, &tensor.layout, tensor.form.big_endian);
    assert_eq!(sha256(&data), expected["sha256"], "{what}");
}

#[test]
fn plain_records_hold_one_tensor() {
    for case in json_fixture("records/plain/plain.json").as_array().unwrap() {
        let name = case["file"].as_str().unwrap();
        let file = read_fixture(&format!("records/plain/{name}"));
        let archive = TorchArchive::open_file(&file).unwrap();
        archive.verify_all().unwrap();
        let Content::Tensor(tensor) = archive.plain_content().unwrap() else {
            panic!("{name} is not a tensor");
        };
        assert!(tensor.layout.is_contiguous());
        assert_eq!(tensor.storage.length, tensor.layout.end() - tensor.layout.base());
        check_tensor(&file, &tensor, case, name);
    }
}

#[test]
fn everything_torch_saves_as_plain_memory_reads() {
    let expected = json_fixture("records/read/read.json");
    for (name, expected) in expected.as_object().unwrap() {
        let file = read_fixture(&format!("records/read/{name}.pt"));
        let archive = TorchArchive::open_file(&file).unwrap();
        archive.verify_all().unwrap();
        let Content::Tree(Tree::Dict(pairs)) = archive.plain_content().unwrap() else {
            panic!("{name} is not a dict");
        };
        let expected = expected.as_object().unwrap();
        assert_eq!(pairs.len(), expected.len(), "{name}");
        for ((key, expected), (found, tree)) in expected.iter().zip(&pairs) {
            assert_eq!(*found, Key::from(key.as_str()), "{name}");
            let Tree::Tensor(tensor) = tree else {
                panic!("{name} {key} is not a tensor");
            };
            check_tensor(&file, tensor, expected, &format!("{name} {key}"));
        }
    }
}

fn tensors(name: &str) -> (Vec<u8>, Vec<StoredTensor>) {
    let file = read_fixture(&format!("records/read/{name}.pt"));
    let archive = TorchArchive::open_file(&file).unwrap();
    let Content::Tree(tree) = archive.content().unwrap() else {
        panic!("{name} is not a tree");
    };
    let tensors = tree.tensors().into_iter().cloned().collect();
    drop(archive);
    (file, tensors)
}

#[test]
fn shared_storages_are_seen_as_one() {
    let (_, shared) = tensors("shared");
    assert_eq!(shared.len(), 4);
    assert!(shared.iter().all(|tensor| tensor.storage == shared[0].storage));
    let (_, apart) = tensors("parameter");
    assert_ne!(apart[0].storage, apart[1].storage);
    assert!(apart[0].parameter && apart[0].requires_grad);
    assert!(apart[1].parameter && !apart[1].requires_grad);
}

#[test]
fn byte_order_and_missing_checksums_are_reported() {
    let (_, big) = tensors("big_endian");
    assert!(big.iter().all(|tensor| tensor.form.big_endian));
    let (_, unchecked) = tensors("no_crc");
    assert!(unchecked.iter().all(|tensor| tensor.storage.crc32.is_none()));
    let (file, checked) = tensors("repacked");
    for tensor in checked {
        let start = tensor.storage.offset as usize;
        let data = &file[start..start + tensor.storage.length as usize];
        assert_eq!(tensor.storage.crc32, Some(crc32fast::hash(data)));
    }
}

#[test]
fn a_tree_keeps_its_containers_and_plain_values() {
    let file = read_fixture("records/read/nested.pt");
    let archive = TorchArchive::open_file(&file).unwrap();
    let Content::Tree(Tree::Dict(pairs)) = archive.content().unwrap() else {
        panic!("not a dict");
    };
    let names: Vec<_> = pairs.keys().map(Key::to_string).collect();
    assert_eq!(names, ["model", "list", "lr"]);
    assert!(matches!(&pairs[0], Tree::Dict(below) if below.len() == 1));
    let Tree::List(items) = &pairs[1] else {
        panic!("{:?}", pairs[1]);
    };
    assert!(matches!(items[0], Tree::Tensor(_)));
    let one = Value::Dict(vec![(Value::from("x"), Value::from(1i64))]);
    assert_eq!(items[1], Tree::Value(one));
    assert_eq!(pairs[2], Tree::Value(Value::from(0.5)));
}

#[test]
fn what_is_no_plain_memory_is_refused_by_key() {
    let expected = json_fixture("records/refused/refused.json");
    let cases = expected.as_object().unwrap();
    assert_eq!(fixture_names("records/refused", "pt").len(), cases.len());
    for (name, words) in cases {
        let file = read_fixture(&format!("records/refused/{name}.pt"));
        let content = TorchArchive::open_file(&file).and_then(|archive| archive.plain_content());
        let text = error_text(&content.unwrap_err());
        for word in words.as_array().unwrap() {
            let word = word.as_str().unwrap();
            assert!(text.contains(word), "{name}: {text:?} lacks {word:?}");
        }
    }
}

#[test]
fn our_own_tensor_and_value_records_read_back() {
    let data: Vec<u8> = (0..24).collect();
    let spec = RecordSpec { dtype: DType::Float32, shape: &[2, 3], requires_grad: true, note: Some(b"note") };
    let file = [vec![7; 100], record(&spec, &data)].concat();
    let archive = TorchArchive::open(&file, 100, file.len() as u64 - 100).unwrap();
    let Content::Tensor(tensor) = archive.plain_content().unwrap() else {
        panic!("not a tensor");
    };
    assert_eq!(gather(&file, tensor.dtype, &tensor.layout, false), data);
    assert!(tensor.requires_grad);
    let value = Value::Dict(vec![
        (Value::from("lr"), Value::from(0.1)),
        (Value::from("betas"), Value::Tuple(vec![Value::from(0.9), Value::None])),
    ]);
    let file = value_record(&value, Some(b"key")).unwrap();
    let archive = TorchArchive::open_file(&file).unwrap();
    assert_eq!(archive.plain_content().unwrap(), Content::Value(value));
    assert_eq!(archive.note().unwrap().unwrap(), b"key");
}

/// Counts reads, as an object store would charge for them.
struct Counting<'a>(&'a [u8], std::cell::Cell<usize>);

impl reshard_formats::ReadAt for Counting<'_> {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.1.set(self.1.get() + 1);
        self.0.read_at(offset, buf)
    }
}

#[test]
fn opening_a_record_takes_two_reads_and_a_small_one_takes_one() {
    for (elements, reads) in [(10, 1), (100_000, 2)] {
        let data = vec![1; elements];
        let spec = RecordSpec { dtype: DType::Int8, shape: &[elements as u64], requires_grad: false, note: Some(b"note") };
        let file = record(&spec, &data);
        let counting = Counting(&file, std::cell::Cell::new(0));
        let archive = TorchArchive::open_file(&counting).unwrap();
        archive.content().unwrap();
        archive.note().unwrap().unwrap();
        assert_eq!(counting.1.get(), reads);
    }
}

#[test]
fn torch_loads_our_value_records() {
    let Some(python) = torch_python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("value.pt");
    let value = Value::List(vec![
        Value::from(i64::MIN),
        Value::from(2.5),
        Value::from("é"),
        Value::Size(vec![2, 3]),
        Value::DType(DType::BFloat16),
        Value::None,
    ]);
    std::fs::write(&path, value_record(&value, Some(b"note")).unwrap()).unwrap();
    let program = "import sys, torch\nprint(torch.load(sys.argv[1], weights_only=True))";
    let printed = run_python(&python, program, &[&path]);
    assert_eq!(printed.trim(), "[-9223372036854775808, 2.5, 'é', torch.Size([2, 3]), torch.bfloat16, None]");
}
