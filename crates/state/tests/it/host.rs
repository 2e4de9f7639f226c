//! A tensor in host memory for the tests, and the execution of plans over it.

use reshard_formats::{DType, KeyPath, PathSegment, Value};
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
pub(crate) fn made(slot: &LoadSlot<Host>) -> Leaf {
    match slot {
        LoadSlot::Build { dtype, shape, copies } => Tree::Tensor(build(*dtype, shape, copies)),
        LoadSlot::Keep(tree) => whole(tree.clone()),
    }
}

/// A tree of whole slot tensors as a tree of tensors.
pub(crate) fn whole<T>(tree: Tree<SlotTensor<T>>) -> Tree<T> {
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

fn whole_dict<T>(dict: Dict<SlotTensor<T>>) -> Dict<T> {
    dict.into_iter().map(|(key, value)| (key, whole(value))).collect()
}

/// An optimizer's own state by names, where no parameter is flat.
pub(crate) fn by_names<T: TensorLike>(
    raw: RawOptimizer<T>,
    live: &LiveOptimizer<T>,
    names: &Names,
) -> Result<OptimizerState<T>, StateError> {
    let state = sharded_optim_state(raw, live, names, &FlatModel::default())?;
    let group =
        |group: ParamGroup<String, SlotTensor<T>>| ParamGroup { params: group.params, options: whole_dict(group.options) };
    Ok(OptimizerState {
        state: state.state.into_iter().map(|(name, slots)| (name, whole_dict(slots))).collect(),
        user_state: whole_dict(state.user_state),
        owned_state: state.owned_state.into_iter().map(|(name, own)| (name, whole_dict(own))).collect(),
        param_groups: state.param_groups.into_iter().map(group).collect(),
    })
}

/// What one optimizer loads, where no parameter is flat.
#[derive(Debug)]
pub(crate) struct Loaded<T> {
    state: Dict<T>,
    pub(crate) user_state: Dict<T>,
    pub(crate) param_groups: Vec<ParamGroup<Key, T>>,
}

impl<T> Loaded<T> {
    /// As the optimizer's own `load_state_dict` takes it.
    pub(crate) fn into_raw(self) -> RawOptimizer<T> {
        let mut state = self.state;
        state.extend(self.user_state);
        RawOptimizer { state, param_groups: self.param_groups, ..RawOptimizer::default() }
    }
}

/// Plans a load of whole tensors, where no parameter is flat.
pub(crate) fn set_optimizer_state<T: TensorLike>(
    given: OptimizerState<T>,
    live: &[LiveOptimizer<T>],
    names: &Names,
    options: &StateDictOptions,
) -> Result<(Vec<Loaded<T>>, OptimizerReport), StateError> {
    let lift = |dict: Dict<T>| dict.into_iter().map(|(key, value)| (key, value.map(&mut SlotTensor::Whole))).collect();
    let given = OptimizerState {
        state: given.state.into_iter().map(|(name, slots)| (name, lift(slots))).collect(),
        user_state: lift(given.user_state),
        owned_state: given.owned_state.into_iter().map(|(name, own)| (name, lift(own))).collect(),
        param_groups: given
            .param_groups
            .into_iter()
            .map(|group| ParamGroup { params: group.params, options: lift(group.options) })
            .collect(),
    };
    let flats = FlatModel::default();
    let (loads, report) = optim_state_to_load(given, live, names, &flats, LoadTarget::Ids, options)?;
    let slot = |slot: LoadSlot<T>| match slot {
        LoadSlot::Keep(tree) => whole(tree),
        LoadSlot::Build { .. } => panic!("nothing is to be built where no parameter is flat"),
    };
    let loaded = |load: OptimizerLoad<T>| Loaded {
        state: load
            .state
            .into_iter()
            .map(|(key, slots)| (key, Tree::Dict(slots.into_iter().map(|(name, how)| (name, slot(how))).collect())))
            .collect(),
        user_state: whole_dict(load.user_state),
        param_groups: load
            .param_groups
            .into_iter()
            .map(|group| ParamGroup { params: group.params, options: whole_dict(group.options) })
            .collect(),
    };
    Ok((loads.into_iter().map(loaded).collect(), report))
}

/// What a rank tells of its slots.
pub(crate) fn inventory<T: TensorLike>(state: &OptimizerState<SlotTensor<T>>) -> Inventory {
    let facts = |value: &Tree<SlotTensor<T>>| match value {
        Tree::Tensor(SlotTensor::Sharded { dtype, shape, pieces }) => SlotFacts::Regions {
            dtype: *dtype,
            shape: shape.clone(),
            regions: pieces.iter().map(|piece| piece.region.clone()).collect(),
        },
        Tree::Tensor(SlotTensor::Whole(tensor)) => SlotFacts::Same {
            dtype: tensor.dtype(),
            shape: Dims::from_slice(tensor.shape()),
            scalar: tensor.scalar().map(<[u8]>::to_vec),
        },
        other => other.to_value().map_or(SlotFacts::Other("an opaque value"), SlotFacts::Plain),
    };
    let slots = |slots: &Dict<SlotTensor<T>>| slots.iter().map(|(slot, value)| (slot.to_string(), facts(value))).collect();
    state.state.iter().map(|(name, dict)| (name.clone(), slots(dict))).collect()
}

/// The leaves below dicts with their paths, in which keys are text.
pub(crate) fn leaves(dict: &Dict<Host>, path: &[PathSegment]) -> Vec<(String, KeyPath, Leaf)> {
    let mut found = Vec::new();
    for (key, value) in dict {
        let below: KeyPath = path.iter().cloned().chain([PathSegment::Key(key.to_string())]).collect();
        match value {
            Tree::Dict(dict) => found.extend(leaves(dict, &below)),
            leaf => found.push((dotted(&below), below, leaf.clone())),
        }
    }
    found
}
