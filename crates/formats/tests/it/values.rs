//! Plain values: round trips through our own pickles, and both ways through CPython's.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use num_bigint::BigInt;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use reshard_formats::pickle::{read_value, write_value};
use reshard_formats::{DType, Int, NumpyScalar, PathClass, PathValue, Value};

use crate::support::torch_python;

fn key() -> impl Strategy<Value = Value> + Clone {
    prop_oneof![
        4 => "[ -~äß✓😀\u{7f}\n\\\\'\"]{0,12}".prop_map(Value::Str),
        2 => any::<i64>().prop_map(Value::from),
        1 => (any::<i64>(), "[a-z]{0,3}").prop_map(|(i, s)| Value::Tuple(vec![Value::from(i), Value::Str(s)])),
    ]
}

fn leaf() -> impl Strategy<Value = Value> {
    let big = prop::collection::vec(any::<u8>(), 9..300).prop_map(|b| Value::Int(Int::from(BigInt::from_signed_bytes_le(&b))));
    let class = prop::sample::select(vec![PathClass::Posix, PathClass::PurePosix]);
    let scalar =
        prop::sample::select(vec!["i1", "i8", "u2", "f4", "f8", "c16", "M8[ms]", "m8[25D]", "m8"]).prop_flat_map(|code| {
            let len = NumpyScalar::size_of(code).unwrap();
            // Bytes below 0x70 keep floats from being NaN, which Python can't compare.
            prop::collection::vec(0u8..0x70, len)
                .prop_map(move |data| Value::Numpy(NumpyScalar { code: code.into(), little_endian: true, data }))
        });
    prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec![
            0i64,
            255,
            256,
            65535,
            65536,
            -1,
            i64::from(i32::MAX),
            i64::from(i32::MIN),
            i64::MAX,
            i64::MIN,
            1 << 40,
            -(1 << 47)
        ])
        .prop_map(Value::from),
        big,
        any::<f64>().prop_filter("NaN can't be compared in Python", |f| !f.is_nan()).prop_map(Value::from),
        // Zeros and infinities don't survive Python's own text of a complex number.
        (1..9999i32, -9999..-1i32).prop_map(|(a, b)| Value::Complex(f64::from(a) / 8.0, f64::from(b) / 16.0)),
        key(),
        ".{0,40}".prop_map(Value::Str),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::Bytes),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Value::ByteArray),
        prop::collection::vec(any::<i64>().prop_map(|d| d.unsigned_abs() as i64 & i64::MAX), 0..6).prop_map(Value::Size),
        prop::sample::select(vec![DType::Float32, DType::BFloat16, DType::Float8E4M3Fn, DType::Int64, DType::Complex64])
            .prop_map(Value::DType),
        prop::sample::select(vec!["cpu", "cuda:0", "cuda:3", "meta"]).prop_map(|d| Value::Device(d.into())),
        (class, "[a-z]{1,4}(/[a-z]{1,4}){0,3}").prop_map(|(class, text)| Value::Path(PathValue { class, text })),
        scalar,
    ]
}

/// Without equal keys, in Python's sense.
fn distinct(mut keys: Vec<Value>) -> Vec<Value> {
    let mut seen = std::collections::HashSet::new();
    keys.retain(|key| seen.insert(key.python_repr()));
    keys
}

fn value() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(5, 60, 8, |inner| {
        let keys = prop::collection::vec(key(), 0..8).prop_map(distinct).boxed();
        let pairs = (keys.clone(), prop::collection::vec(inner.clone(), 8))
            .prop_map(|(keys, values)| keys.into_iter().zip(values).collect::<Vec<_>>())
            .boxed();
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::List),
            prop::collection::vec(inner, 0..8).prop_map(Value::Tuple),
            pairs.clone().prop_map(Value::Dict),
            pairs.prop_map(Value::OrderedDict),
            keys.clone().prop_map(Value::Set),
            keys.prop_map(Value::FrozenSet),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values_come_back_from_every_protocol_we_write(value in value()) {
        for protocol in 2..=5 {
            let bytes = write_value(&value, protocol).unwrap();
            prop_assert_eq!(read_value(&bytes).unwrap(), value.clone(), "protocol {}", protocol);
        }
    }
}

#[test]
fn protocols_that_are_not_written_are_refused() {
    for protocol in [0, 1, 6] {
        assert!(write_value(&Value::None, protocol).is_err());
    }
}

#[test]
fn long_containers_are_written_in_batches_and_come_back() {
    let many: Vec<Value> = (0..2500i64).map(Value::from).collect();
    let pairs = many.iter().map(|v| (v.clone(), Value::from(format!("value {v:?}")))).collect();
    for value in [Value::List(many.clone()), Value::Tuple(many.clone()), Value::Set(many), Value::Dict(pairs)] {
        for protocol in 2..=5 {
            assert_eq!(read_value(&write_value(&value, protocol).unwrap()).unwrap(), value);
        }
    }
    let long = Value::List(vec![Value::from("x".repeat(100_000)), Value::Bytes(vec![7; 100_000])]);
    assert_eq!(read_value(&write_value(&long, 4).unwrap()).unwrap(), long);
}

#[test]
fn repeated_strings_are_written_once() {
    let row = Value::Dict(vec![(Value::from("a rather long key of a dict"), Value::from(1))]);
    let one = write_value(&Value::List(vec![row.clone()]), 4).unwrap().len();
    let many = write_value(&Value::List(vec![row; 101]), 4).unwrap().len();
    assert!(many - one < 100 * 12, "{one} {many}");
}

/// Reads pickles of ours and compares them with what their text means, then pickles them with every protocol.
const PYTHON: &str = r#"
import collections, pathlib, pickle, struct, sys
from collections import OrderedDict
from pathlib import PosixPath, PurePosixPath
import numpy as np, torch
from torch import device
def read(n):
    data = sys.stdin.buffer.read(n)
    assert len(data) == n
    return data
def block():
    return read(struct.unpack("<I", read(4))[0])
def put(data):
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
def same(a, b):
    if type(a) is not type(b): return False
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict): return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, float): return struct.pack("d", a) == struct.pack("d", b)
    return a == b
inf, nan = float("inf"), float("nan")
while True:
    count = read(1)[0]
    if count == 0: break
    expected = eval(block().decode())
    for _ in range(count - 1):
        data = block()
        got = pickle.loads(data)
        assert same(got, expected), (got, expected)
    for protocol in range(6):
        put(pickle.dumps(expected, protocol))
    sys.stdout.buffer.flush()
"#;

/// A running Python that the test talks to in blocks.
struct Python {
    child: std::process::Child,
}

impl Python {
    fn start(python: &Path) -> Python {
        let child = Command::new(python).args(["-c", PYTHON]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Python { child: child.unwrap() }
    }

    /// Sends a value's text and pickles; gives back Python's pickles of it, protocols 0 to 5.
    fn exchange(&mut self, text: &str, pickles: &[Vec<u8>]) -> Vec<Vec<u8>> {
        use std::io::Read;
        let stdin = self.child.stdin.as_mut().unwrap();
        let mut message = vec![1 + pickles.len() as u8];
        for block in std::iter::once(text.as_bytes()).chain(pickles.iter().map(Vec::as_slice)) {
            message.extend((block.len() as u32).to_le_bytes());
            message.extend(block);
        }
        stdin.write_all(&message).unwrap_or_else(|e| panic!("{e}: python refused {text}"));
        stdin.flush().unwrap();
        let stdout = self.child.stdout.as_mut().unwrap();
        let mut block = || {
            let mut len = [0; 4];
            stdout.read_exact(&mut len).unwrap_or_else(|e| panic!("{e}: python refused {text}"));
            let mut data = vec![0; u32::from_le_bytes(len) as usize];
            stdout.read_exact(&mut data).unwrap();
            data
        };
        (0..6).map(|_| block()).collect()
    }

    fn finish(mut self) {
        self.child.stdin.take().unwrap().write_all(&[0]).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn cpython_reads_ours_and_we_read_cpythons() {
    let Some(python) = torch_python() else { return };
    let mut python = Python::start(&python);
    let mut runner = TestRunner::new(Config::default());
    for _ in 0..400 {
        let value = value().new_tree(&mut runner).unwrap().current();
        let ours: Vec<_> = (2..=5).map(|protocol| write_value(&value, protocol).unwrap()).collect();
        let theirs = python.exchange(&value.python_repr(), &ours);
        for (protocol, pickle) in theirs.iter().enumerate() {
            let read = read_value(pickle).unwrap_or_else(|e| panic!("protocol {protocol}: {e}: {}", value.python_repr()));
            assert_eq!(unordered(read), unordered(value.clone()), "protocol {protocol}: {}", value.python_repr());
        }
    }
    python.finish();
}

/// Python iterates sets in an order of its own.
fn unordered(value: Value) -> Value {
    let sorted = |mut elements: Vec<Value>| {
        elements.sort_by_key(Value::python_repr);
        elements
    };
    let all = |elements: Vec<Value>| elements.into_iter().map(unordered).collect();
    let pairs = |pairs: Vec<(Value, Value)>| pairs.into_iter().map(|(k, v)| (k, unordered(v))).collect();
    match value {
        Value::Set(elements) => Value::Set(sorted(elements)),
        Value::FrozenSet(elements) => Value::FrozenSet(sorted(elements)),
        Value::List(elements) => Value::List(all(elements)),
        Value::Tuple(elements) => Value::Tuple(all(elements)),
        Value::Dict(p) => Value::Dict(pairs(p)),
        Value::OrderedDict(p) => Value::OrderedDict(pairs(p)),
        other => other,
    }
}
