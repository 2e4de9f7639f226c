//! A tensor in host memory for the tests, and the execution of plans over it.

use reshard_formats::{DType, Value};
use reshard_layout::{ByteLayout, Dims, copy_runs, runs};
use reshard_state::*;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) dtype: DType,
    pub(crate) shape: Dims,
    pub(crate) data: Vec<u8>,
}

impl Host {
    pub(crate) fn f32(shape: &[u64], values: impl IntoIterator<Item = f32>) -> Host {
        let data: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(data.len() as u64, numel(shape) * 4);
        Host { dtype: DType::Float32, shape: Dims::from_slice(shape), data }
    }

    pub(crate) fn scalar(value: f32) -> Host {
        Host::f32(&[], [value])
    }

    /// Every element is its own position, plus an offset.
    pub(crate) fn ramp(shape: &[u64], from: f32) -> Host {
        Host::f32(shape, (0..numel(shape)).map(|index| index as f32 + from))
    }

    pub(crate) fn zeros(dtype: DType, shape: &[u64]) -> Host {
        Host { dtype, shape: Dims::from_slice(shape), data: vec![0; (numel(shape) * dtype.size()) as usize] }
    }
}

impl TensorLike for Host {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> &[u64] {
        &self.shape
    }

    fn scalar(&self) -> Option<&[u8]> {
        (self.numel() == 1).then_some(self.data.as_slice())
    }
}

pub(crate) type Leaf = Tree<Host>;

pub(crate) fn tensor(host: Host) -> Leaf {
    Tree::Tensor(host)
}

pub(crate) fn float<T>(value: f64) -> Tree<T> {
    Tree::Value(Value::Float(value))
}

pub(crate) fn int<T>(value: i64) -> Tree<T> {
    Tree::Value(Value::from(value))
}

pub(crate) fn text<T>(value: &str) -> Tree<T> {
    Tree::Value(Value::from(value))
}

/// Carries out the copies of a plan.
pub(crate) fn build(dtype: DType, shape: &[u64], copies: &[BoxCopy<Host>]) -> Host {
    let mut made = Host::zeros(dtype, shape);
    for copy in copies {
        assert_eq!(copy.source.dtype, dtype);
        copy_runs(&copy.source.data, &mut made.data, copy.runs(dtype.size()).unwrap()).unwrap();
    }
    made
}

/// A slot of a load plan as a tree with the tensors made.
pub(crate) fn made(slot: &FlatSlot<Host>) -> Leaf {
    match slot {
        FlatSlot::Build { dtype, shape, copies } => Tree::Tensor(build(*dtype, shape, copies)),
        FlatSlot::Keep(tree) => whole(tree.clone()),
    }
}

/// A tree of whole slot tensors as a tree of tensors.
pub(crate) fn whole(tree: Tree<SlotTensor<Host>>) -> Leaf {
    tree.map(&mut |slot| match slot {
        SlotTensor::Whole(tensor) => tensor,
        SlotTensor::Sharded { .. } => panic!("a sharded slot where a whole one was expected"),
    })
}

/// Lays the pieces of one or several ranks into a whole tensor. Every element must be written.
pub(crate) fn assemble(parts: &[&SlotTensor<Host>]) -> Host {
    let first = parts[0];
    let mut whole = Host::zeros(first.dtype(), first.shape());
    let mut written = vec![false; whole.data.len()];
    let size = whole.dtype.size();
    let to = ByteLayout::contiguous(&whole.shape, size).unwrap();
    for part in parts {
        assert_eq!((part.dtype(), part.shape()), (first.dtype(), first.shape()));
        for piece in part.pieces().unwrap() {
            let from = ByteLayout::contiguous(&piece.within, size).unwrap().at(piece.start * size);
            let plan = || runs(piece.region.sizes(), &from, &piece.at, &to, piece.region.offsets()).unwrap();
            copy_runs(&piece.source.data, &mut whole.data, plan()).unwrap();
            for run in plan() {
                written[run.dst as usize..(run.dst + run.len) as usize].fill(true);
            }
        }
    }
    assert!(written.iter().all(|byte| *byte), "not every element is held by someone");
    whole
}

pub(crate) fn same(a: &Leaf, b: &Leaf) -> bool {
    a.same_as(b, &|a, b| a == b)
}

pub(crate) fn group<K>(params: Vec<K>, options: &[(&str, Leaf)]) -> ParamGroup<K, Host> {
    ParamGroup { params, options: options.iter().map(|(key, value)| (Key::from(*key), value.clone())).collect() }
}

pub(crate) fn live(groups: &[&[u64]]) -> LiveOptimizer<Host> {
    let groups = groups.iter().map(|ids| group(ids.iter().map(|id| Identity(*id)).collect(), &[("lr", float(0.5))]));
    LiveOptimizer { param_groups: groups.collect() }
}

pub(crate) fn adam_slots(shape: &[u64], from: f32, step: f32) -> Leaf {
    Tree::dict_of([
        ("step", tensor(Host::scalar(step))),
        ("exp_avg", tensor(Host::ramp(shape, from))),
        ("exp_avg_sq", tensor(Host::ramp(shape, from + 1000.0))),
    ])
}
