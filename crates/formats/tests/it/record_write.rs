//! Records that we write: the same bytes as torch's, and readable by torch and by other zip readers.

use std::fs;
use std::io::Read;

use proptest::prelude::*;
use reshard_formats::{DType, ReadAt, RecordFrame, RecordSpec, TorchArchive, pickle_record};

use crate::support::{json_fixture, read_fixture, run_python, torch_python};

pub(crate) fn record(spec: &RecordSpec<'_>, data: &[u8]) -> Vec<u8> {
    let frame = RecordFrame::new(spec).unwrap();
    assert_eq!(frame.data_offset() % 64, 0);
    assert_eq!(frame.data_offset(), frame.head.len() as u64);
    assert_eq!(frame.data_len(), data.len() as u64);
    let whole = [frame.head.as_slice(), data, &frame.tail(crc32fast::hash(data))].concat();
    assert_eq!(frame.total_len(), whole.len() as u64);
    whole
}

fn spec<'a>(dtype: DType, shape: &'a [u64]) -> RecordSpec<'a> {
    RecordSpec { dtype, shape, requires_grad: false, note: None }
}

/// The bytes that the fixtures' script puts into its tensors.
fn counting(dtype: DType, len: u64) -> Vec<u8> {
    let modulus = if dtype == DType::Bool { 2 } else { 60 };
    (0..len).map(|at| (at % modulus) as u8).collect()
}

#[test]
fn plain_records_have_torchs_own_bytes() {
    let index = json_fixture("records/plain/plain.json");
    let cases = index.as_array().unwrap();
    assert!(cases.len() > 30);
    for case in cases {
        let file = case["file"].as_str().unwrap();
        let dtype = DType::from_name(case["dtype"].as_str().unwrap()).unwrap();
        let shape: Vec<u64> = serde_json::from_value(case["shape"].clone()).unwrap();
        let spec = RecordSpec { requires_grad: case["requires_grad"].as_bool().unwrap(), ..spec(dtype, &shape) };
        let len = shape.iter().product::<u64>() * dtype.size();
        let ours = record(&spec, &counting(dtype, len));
        let theirs = read_fixture(&format!("records/plain/{file}"));
        assert!(ours == theirs, "{file} differs");
    }
    assert_eq!(pickle_record(b"\x80\x02K\x05.", None).unwrap(), read_fixture("records/plain/five.pt"));
}

#[test]
fn past_4_gib_head_and_tail_are_torchs_own_bytes() {
    let frame = RecordFrame::new(&spec(DType::UInt8, &[(1 << 32) + 5])).unwrap();
    let tail = read_fixture("records/zip64/tail.bin");
    assert_eq!(frame.head, read_fixture("records/zip64/head.bin"));
    // The CRC of that many zeros, which torch computed, stands right behind the data.
    let crc32 = u32::from_le_bytes(*tail[4..].first_chunk().unwrap());
    assert_eq!(frame.tail(crc32), tail);
    assert_eq!(frame.total_len(), frame.head.len() as u64 + (1 << 32) + 5 + tail.len() as u64);
}

/// A record whose data is a hole: head and tail in memory, any length between.
struct Hollow {
    head: Vec<u8>,
    data_len: u64,
    tail: Vec<u8>,
}

impl ReadAt for Hollow {
    fn len(&self) -> u64 {
        self.head.len() as u64 + self.data_len + self.tail.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        let tail = self.head.len() as u64 + self.data_len;
        for (at, byte) in (offset..).zip(buf) {
            *byte = if at < self.head.len() as u64 {
                self.head[at as usize]
            } else if at < tail {
                0
            } else {
                self.tail[(at - tail) as usize]
            };
        }
        Ok(())
    }
}

#[test]
fn every_size_around_the_zip64_limits_reads_back() {
    let limit = u64::from(u32::MAX);
    let sizes = (limit - 1200..limit + 3).step_by(7).chain([limit - 1, limit, limit + 1, 1 << 33, 1 << 45, (1 << 62) + 1]);
    for size in sizes {
        let note: &[u8] = b"far away";
        let frame = RecordFrame::new(&RecordSpec { note: Some(note), ..spec(DType::Int8, &[size]) }).unwrap();
        let hollow = Hollow { tail: frame.tail(0x1234_5678), head: frame.head.clone(), data_len: size };
        assert_eq!(hollow.len(), frame.total_len(), "{size}");
        let archive = TorchArchive::open_file(&hollow).unwrap();
        let entry = archive.entry("data/0").unwrap();
        assert_eq!((entry.size, entry.crc32), (size, Some(0x1234_5678)));
        assert_eq!(archive.data_offset(entry).unwrap(), frame.data_offset());
        assert_eq!(archive.note().unwrap().unwrap(), note);
        let end = archive.entry("version").unwrap();
        assert_eq!(archive.read(end, 8).unwrap(), b"3\n");
        assert_eq!(archive.data_offset(end).unwrap() % 64, 0);
    }
}

#[test]
fn shapes_that_no_file_can_hold_are_refused() {
    for shape in [&[u64::MAX][..], &[1 << 40, 1 << 40], &[1 << 40, 0, 1 << 40], &[1 << 62, 2], &[1; 65]] {
        let error = RecordFrame::new(&spec(DType::Float64, shape)).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
    }
}

#[test]
fn the_zip_crate_reads_our_records() {
    let note = b"{\"key\": \"model.weight\"}";
    let data = counting(DType::Float32, 24);
    let bytes = record(&RecordSpec { note: Some(note), ..spec(DType::Float32, &[2, 3]) }, &data);
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(bytes)).unwrap();
    assert_eq!(archive.len(), 8);
    // Reading to the end makes the crate compare checksums.
    for index in 0..archive.len() {
        let mut content = Vec::new();
        let mut entry = archive.by_index(index).unwrap();
        entry.read_to_end(&mut content).unwrap();
        match entry.name().unwrap().as_ref() {
            "archive/data/0" => assert_eq!(content, data),
            "archive/.reshard" => assert_eq!(content, note),
            _ => {}
        }
    }
}

#[test]
fn torch_loads_our_records_and_maps_them() {
    let Some(python) = torch_python() else { return };
    let folder = tempfile::tempdir().unwrap();
    for &dtype in DType::ALL {
        for shape in [&[][..], &[0], &[5], &[2, 3], &[3, 1, 2, 2], &[1000, 3]] {
            let len = shape.iter().product::<u64>() * dtype.size();
            let name = shape.iter().map(|size| format!("_{size}"));
            let name = format!("{}{}.pt", dtype.name(), name.collect::<String>());
            let spec = RecordSpec { note: Some(b"a note"), ..spec(dtype, shape) };
            let bytes = record(&spec, &counting(dtype, len));
            fs::write(folder.path().join(name), bytes).unwrap();
        }
    }
    let program = r#"
import sys, pathlib, torch, warnings
from torch.utils.serialization import config
warnings.simplefilter("ignore")
count = 0
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    base = next(n for n in sorted(map(str, vars(torch).values()), key=len, reverse=True) if n.startswith("torch.")
                and isinstance(getattr(torch, n[6:], None), torch.dtype) and (path.stem + "_").startswith(n[6:] + "_"))
    dtype = getattr(torch, base[6:])
    shape = [int(size) for size in path.stem[len(base) - 6:].split("_") if size]
    for options in ({}, {"mmap": True}):
        tensor = torch.load(path, weights_only=True, **options)
        assert tensor.dtype == dtype and list(tensor.shape) == shape, (path, tensor.dtype, tensor.shape)
        assert tensor.is_contiguous() and not tensor.requires_grad
        if tensor.numel():
            data = bytes(tensor.flatten().view(torch.uint8).tolist())
            modulus = 2 if dtype == torch.bool else 60
            assert data == bytes(at % modulus for at in range(len(data))), path
        count += 1
    with config.patch({"load.calculate_storage_offsets": True}):
        torch.load(path, weights_only=True, mmap=True)
print(count)
"#;
    let count = run_python(&python, program, &[folder.path()]);
    assert_eq!(count.trim(), (DType::ALL.len() * 6 * 2).to_string());
}

fn dtypes() -> impl Strategy<Value = DType> {
    proptest::sample::select(DType::ALL)
}

proptest! {
    #[test]
    fn any_record_reads_back(
        dtype in dtypes(),
        shape in proptest::collection::vec(0u64..6, 0..6),
        note in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..300)),
        before in 0usize..200,
    ) {
        let len = shape.iter().product::<u64>() * dtype.size();
        let data: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
        let spec = RecordSpec { note: note.as_deref(), ..spec(dtype, &shape) };
        let whole = record(&spec, &data);
        let file = [vec![0xab; before], whole.clone(), vec![0xcd; 99]].concat();
        let archive = TorchArchive::open(&file, before as u64, whole.len() as u64).unwrap();
        archive.verify_all().unwrap();
        prop_assert_eq!(archive.note().unwrap(), note);
        let entry = archive.entry("data/0").unwrap();
        prop_assert_eq!(archive.read(entry, u64::MAX).unwrap(), data);
    }
}
