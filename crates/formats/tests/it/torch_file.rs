//! Whole `.pt` files with many tensors: written by us, read by torch and by us.

use std::fs;

use reshard_formats::{Content, DType, FileTensor, Key, StoredTensor, TorchArchive, TorchFileWriter, Tree, Value};
use reshard_layout::Dims;

use crate::support::{gather, run_python, torch_python};

fn tensor(dtype: DType, shape: &[u64], storage: u64) -> FileTensor {
    FileTensor { dtype, shape: Dims::from_slice(shape), requires_grad: false, parameter: false, storage }
}

fn data_of(storage: u64, len: u64) -> Vec<u8> {
    (0..len).map(|at| ((at + storage) % 2) as u8).collect()
}

/// Writes every piece at its place, storages backwards, as parallel writers might.
fn write(tree: &Tree<FileTensor>, note: Option<&[u8]>) -> Vec<u8> {
    let writer = TorchFileWriter::new(tree, note).unwrap();
    let mut file = vec![0xee; writer.total_len() as usize];
    let mut put = |offset: u64, bytes: &[u8]| {
        file[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
    };
    put(0, writer.head());
    let mut crc32s = vec![0; writer.storages().len()];
    for (index, (offset, len)) in writer.placements().into_iter().enumerate().rev() {
        assert_eq!(offset % 64, 0);
        let data = data_of(writer.storages()[index], len);
        crc32s[index] = crc32fast::hash(&data);
        let (at, before) = writer.before(index).unwrap();
        assert_eq!(at + before.len() as u64, offset);
        put(at, &before);
        put(offset, &data);
        let (at, after) = writer.after(index, crc32s[index]).unwrap();
        assert_eq!(at, offset + len);
        put(at, &after);
    }
    assert!(writer.before(crc32s.len()).is_none());
    let (at, tail) = writer.tail(&crc32s).unwrap();
    put(at, &tail);
    assert_eq!(at + tail.len() as u64, writer.total_len());
    file
}

fn example() -> Tree<FileTensor> {
    let key = |text: &str| Key::from(text);
    let every = DType::ALL
        .iter()
        .enumerate()
        .map(|(index, &dtype)| (key(dtype.name()), Tree::Tensor(tensor(dtype, &[2, 3], index as u64))));
    let parameter = FileTensor { parameter: true, requires_grad: true, ..tensor(DType::Float32, &[4], 100) };
    let tied = FileTensor { requires_grad: true, ..tensor(DType::Float32, &[2, 2], 100) };
    Tree::dict_of([
        (key("model"), Tree::Dict(every.collect())),
        (key("p"), Tree::Tensor(parameter)),
        (key("tied"), Tree::Tensor(tied)),
        (
            Key::Int(7),
            Tree::List(vec![
                Tree::Tensor(tensor(DType::Int64, &[], 101)),
                Tree::Tuple(vec![Tree::Tensor(tensor(DType::Int16, &[0, 3], 102)), Tree::Value(Value::from(2.5))]),
            ]),
        ),
        (key("lr"), Tree::Value(Value::from(0.5))),
    ])
}

fn same(written: &Tree<FileTensor>, read: &Tree<StoredTensor>, file: &[u8]) {
    match (written, read) {
        (Tree::Tensor(written), Tree::Tensor(read)) => {
            assert_eq!((written.dtype, &written.shape), (read.dtype, &read.shape));
            assert_eq!(written.requires_grad, read.requires_grad);
            assert_eq!(written.parameter, read.parameter);
            let data = gather(&file, read.dtype, &read.layout, false);
            assert_eq!(data, data_of(written.storage, data.len() as u64));
        }
        (Tree::Value(written), Tree::Value(read)) => assert_eq!(written, read),
        (Tree::Dict(written), Tree::Dict(read)) => {
            assert_eq!(written.len(), read.len());
            for ((key, written), (found, read)) in written.iter().zip(read) {
                assert_eq!(key, found);
                same(written, read, file);
            }
        }
        (Tree::List(written), Tree::List(read)) | (Tree::Tuple(written), Tree::Tuple(read)) => {
            assert_eq!(written.len(), read.len());
            written.iter().zip(read).for_each(|(written, read)| same(written, read, file));
        }
        (written, read) => panic!("{written:?} was read as {read:?}"),
    }
}

#[test]
fn a_tree_of_tensors_reads_back_as_it_was() {
    let tree = example();
    let file = write(&tree, Some(b"a note"));
    let archive = TorchArchive::open_file(&file).unwrap();
    archive.verify_all().unwrap();
    assert_eq!(archive.note().unwrap().unwrap(), b"a note");
    let Content::Tree(read) = archive.plain_content().unwrap() else {
        panic!("not a tree");
    };
    same(&tree, &read, &file);
}

#[test]
fn many_tensors_read_back_and_stay_small() {
    let pairs = (0..5000u64).map(|index| {
        let key = format!("layers.{index}.weight");
        (Key::from(key), Tree::Tensor(tensor(DType::BFloat16, &[4], index)))
    });
    let tree = Tree::Dict(pairs.collect());
    let file = write(&tree, None);
    let archive = TorchArchive::open_file(&file).unwrap();
    let Content::Tree(read) = archive.content().unwrap() else {
        panic!("not a tree");
    };
    same(&tree, &read, &file);
    assert!(file.len() < 5000 * 330, "{} bytes", file.len());
}

#[test]
fn storages_of_different_size_cannot_be_one() {
    let tree = Tree::List(vec![Tree::Tensor(tensor(DType::Int8, &[4], 1)), Tree::Tensor(tensor(DType::Int8, &[5], 1))]);
    let error = TorchFileWriter::new(&tree, None).unwrap_err();
    assert!(error.to_string().contains("share a storage"), "{error}");
    let opaque = Tree::opaque("posix.system");
    let error = TorchFileWriter::new(&opaque, None).unwrap_err();
    assert!(error.to_string().contains("posix.system"), "{error}");
}

#[test]
fn torch_loads_our_files_and_maps_them() {
    let Some(python) = torch_python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.pt");
    fs::write(&path, write(&example(), Some(b"note"))).unwrap();
    let program = r#"
import sys, torch, warnings
warnings.simplefilter("ignore")
def check(tensor, storage):
    if tensor.numel():
        data = bytes(tensor.detach().flatten().view(torch.uint8).tolist())
        assert data == bytes((at + storage) % 2 for at in range(len(data))), tensor
for options in ({}, {"mmap": True}):
    state = torch.load(sys.argv[1], weights_only=True, **options)
    assert list(state) == ["model", "p", "tied", 7, "lr"]
    assert type(state["model"]) is dict
    for index, (name, tensor) in enumerate(state["model"].items()):
        assert str(tensor.dtype) == "torch." + name and list(tensor.shape) == [2, 3]
        check(tensor, index)
    assert type(state["p"]) is torch.nn.Parameter and state["p"].requires_grad
    assert state["tied"].requires_grad and state["tied"].data_ptr() == state["p"].data_ptr()
    check(state["p"], 100)
    number, (empty, value) = state[7]
    check(number, 101)
    assert number.dim() == 0 and list(empty.shape) == [0, 3] and value == 2.5 and state["lr"] == 0.5
print(len(state["model"]))
"#;
    let printed = run_python(&python, program, &[&path]);
    assert_eq!(printed.trim(), DType::ALL.len().to_string());
}
