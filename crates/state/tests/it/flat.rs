//! Flat parameters: geometry, state by members, loading, and every way members can contradict each other.

use reshard_formats::{DType, Value};
use reshard_state::*;

use crate::host::{Host, Leaf, adam_slots, assemble, float, group, inventory, live, made, tensor, text};

const SHAPES: [(&str, &[u64]); 3] = [("a.weight", &[3, 4]), ("a.bias", &[3]), ("b.weight", &[2, 2])];

fn flat(rank: u64, world: u64, strategy: ShardingStrategy, orig: bool) -> FlatParameter {
    let members = SHAPES.iter().map(|(name, shape)| FlatMember::new(name, shape)).collect();
    let sharding = FlatSharding { strategy, rank, world };
    FlatParameter::packed("_flat_param", DType::Float32, members, if orig { 4 } else { 0 }, sharding, orig).unwrap()
}

/// A model with one flat parameter (identity 9), or with the original parameters (1, 2, 3).
fn model(flat: FlatParameter) -> ModuleTree {
    let child = |name: &str| ModuleTree::new().child(name, ModuleTree::new());
    let tree = if flat.use_orig_params() {
        let a = ModuleTree::new().parameter("weight", Parameter::new(1)).parameter("bias", Parameter::new(2));
        let b = ModuleTree::new().parameter("weight", Parameter::new(3));
        ModuleTree { manages: Some(Box::new(flat)), ..ModuleTree::new() }.child("a", a).child("b", b)
    } else {
        let parameter = Parameter { flat: Some(Box::new(flat)), ..Parameter::new(9) };
        child("a").child("b", ModuleTree::new()).parameter("_flat_param", parameter)
    };
    tree.wrapped(Wrapper::Fsdp1)
}

fn live_of(orig: bool) -> LiveOptimizer<Host> {
    if orig { live(&[&[1, 2, 3]]) } else { live(&[&[9]]) }
}

/// Whole slots of all members, each different.
fn full_state() -> OptimizerState<SlotTensor<Host>> {
    let mut state = OptimizerState::default();
    for (index, (name, shape)) in SHAPES.iter().enumerate() {
        let Tree::Dict(slots) = adam_slots(shape, 100.0 * index as f32, 7.0).map(&mut SlotTensor::Whole) else { panic!() };
        state.state.insert((*name).to_owned(), slots);
    }
    let params = SHAPES.iter().map(|(name, _)| (*name).to_owned()).collect();
    let options = [(Key::from("lr"), float(0.25))].into_iter().collect();
    state.param_groups.push(ParamGroup { params, options });
    state
}

fn load(
    given: OptimizerState<SlotTensor<Host>>,
    flat: FlatParameter,
    target: LoadTarget,
) -> Result<(OptimizerLoad<Host>, OptimizerReport), StateError> {
    let orig = flat.use_orig_params();
    let model = model(flat);
    let (names, flats) = (Names::of(&model).unwrap(), FlatModel::of(&model).unwrap());
    let (mut loads, report) = optim_state_to_load(given, &[live_of(orig)], &names, &flats, target, &StateDictOptions::default())?;
    Ok((loads.remove(0), report))
}

/// The optimizer's raw state that a load makes.
fn loaded(load: &OptimizerLoad<Host>) -> RawOptimizer<Host> {
    let slots = |slots: &indexmap::IndexMap<Key, LoadSlot<Host>>| {
        Tree::Dict(slots.iter().map(|(slot, how)| (slot.clone(), made(how))).collect())
    };
    let state = load.state.iter().map(|(key, own)| (key.clone(), slots(own))).collect();
    let groups = load.param_groups.iter().map(|own| group(own.params.clone(), &[("lr", float(0.25))]));
    RawOptimizer { state, param_groups: groups.collect(), ..Default::default() }
}

fn sharded(raw: RawOptimizer<Host>, flat: FlatParameter) -> OptimizerState<SlotTensor<Host>> {
    let orig = flat.use_orig_params();
    let model = model(flat);
    let (names, flats) = (Names::of(&model).unwrap(), FlatModel::of(&model).unwrap());
    sharded_optim_state(raw, &live_of(orig), &names, &flats).unwrap()
}

#[test]
fn shards_are_cut_like_torch_chunk_with_padding_at_the_end() {
    let one = flat(0, 4, ShardingStrategy::FullShard, false);
    assert_eq!((one.total(), one.shard_len()), (19, 5));
    assert_eq!(one.shard_range(3), 15..19);
    assert_eq!(flat(0, 10, ShardingStrategy::FullShard, false).shard_range(9), 18..19);
    assert_eq!(flat(0, 32, ShardingStrategy::FullShard, false).shard_range(20), 19..19);
    assert_eq!(flat(1, 4, ShardingStrategy::NoShard, false).shard_range(1), 0..19);
    // Alignment: 12, 3 padded to 4, 4; and the whole padded to the group's size.
    let aligned = flat(0, 3, ShardingStrategy::FullShard, true);
    assert_eq!((aligned.total(), aligned.shard_len()), (21, 7));
    assert_eq!(aligned.member_range(1, 1), Some(MemberRange { range: 0..2, in_shard: 5 }));
    assert_eq!(aligned.member_range(1, 0), None);
    let regions = one.member_regions(0, 1).unwrap();
    assert_eq!(regions.iter().map(|piece| piece.region.to_string()).collect::<Vec<_>>(), ["[1:2, 1:4]", "[2:3, 0:2]"]);
}

#[test]
fn contradictory_descriptions_are_refused() {
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank: 0, world: 2 };
    let members = || vec![FlatMember::new("a", &[2, 2])];
    let make =
        |extents: &[Extent], sharding| FlatParameter::from_extents("f", DType::Float32, members(), extents, sharding, false);
    assert!(make(&[Extent { member: Some(0), numel: 4 }], sharding).is_ok());
    assert!(make(&[Extent { member: Some(0), numel: 5 }], sharding).is_err());
    assert!(make(&[Extent { member: Some(1), numel: 4 }], sharding).is_err());
    assert!(make(&[], sharding).is_err());
    assert!(make(&[Extent { member: None, numel: u64::MAX }, Extent { member: Some(0), numel: 4 }], sharding).is_err());
    assert!(make(&[Extent { member: Some(0), numel: 4 }], FlatSharding { rank: 2, ..sharding }).is_err());
}

#[test]
fn loading_and_reading_back_is_the_identity_for_every_strategy() {
    use ShardingStrategy::*;
    for (strategy, orig) in
        [FullShard, ShardGradOp, NoShard, HybridShard, HybridShardZero2].into_iter().flat_map(|s| [(s, false), (s, true)])
    {
        for world in [1, 2, 3, 5, 24] {
            let states: Vec<_> = (0..world)
                .map(|rank| {
                    let (load, _) = load(full_state(), flat(rank, world, strategy, orig), LoadTarget::Ids).unwrap();
                    sharded(loaded(&load), flat(rank, world, strategy, orig))
                })
                .collect();
            for (name, slots) in full_state().state {
                for (slot, value) in slots {
                    let Tree::Tensor(SlotTensor::Whole(whole)) = value else { panic!() };
                    let parts: Vec<_> =
                        states.iter().filter_map(|state| state.state.get(&name)?.get(&slot)?.as_tensor()).collect();
                    assert_eq!(assemble(&parts), whole, "{strategy:?} {orig} {world} {name} {slot}");
                }
            }
        }
    }
}

/// The flat parameter of one of two ranks of tensor parallelism: columns of one member, all of another, rows of the third.
fn sliced(tensor_rank: u64, rank: u64, world: u64, orig: bool) -> FlatParameter {
    let members = vec![
        FlatMember::new("a.weight", &[3, 2]).slice_of(&[3, 4], &[0, 2 * tensor_rank]),
        FlatMember::new("a.bias", &[3]),
        FlatMember::new("b.weight", &[1, 2]).slice_of(&[2, 2], &[tensor_rank, 0]),
    ];
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank, world };
    FlatParameter::packed("_flat_param", DType::Float32, members, if orig { 4 } else { 0 }, sharding, orig).unwrap()
}

#[test]
fn slices_by_tensor_parallelism_inside_of_flat_parameters_are_regions_of_the_whole() {
    for (world, orig) in [1, 2, 3, 7].into_iter().flat_map(|world| [(world, false), (world, true)]) {
        let ranks = (0..2).flat_map(|tensor_rank| (0..world).map(move |rank| (tensor_rank, rank)));
        let states: Vec<_> = ranks
            .map(|(tensor_rank, rank)| {
                let flat = || sliced(tensor_rank, rank, world, orig);
                let (load, _) = load(full_state(), flat(), LoadTarget::Ids).unwrap();
                sharded(loaded(&load), flat())
            })
            .collect();
        for (name, slots) in full_state().state {
            for (slot, value) in slots {
                let Tree::Tensor(SlotTensor::Whole(whole)) = value else { panic!() };
                let parts: Vec<_> = states.iter().filter_map(|state| state.state.get(&name)?.get(&slot)?.as_tensor()).collect();
                assert_eq!(assemble(&parts), whole, "{world} {orig} {name} {slot}");
            }
        }
    }
    let names = Names::of(&model(sliced(1, 0, 2, false))).unwrap();
    assert_eq!(names.get("a.weight").unwrap().facts.as_ref().unwrap().shape.as_slice(), [3, 4]);
    let one = sliced(1, 0, 1, false);
    let regions = one.member_regions(2, one.sharding().rank).unwrap();
    let shape = one.members()[2].whole_shape();
    assert_eq!((shape.as_slice(), regions[0].region.offsets()), ([2, 2].as_slice(), [1, 0].as_slice()));
    let outside = vec![FlatMember::new("w", &[6, 2]).slice_of(&[6, 4], &[0, 3])];
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank: 0, world: 2 };
    assert!(FlatParameter::packed("_flat_param", DType::Float32, outside, 0, sharding, false).is_err());
}

#[test]
fn a_rank_that_holds_nothing_gets_empty_slots_only_for_optimizers_by_name() {
    let rank = flat(23, 24, ShardingStrategy::FullShard, true);
    let (by_id, _) = load(full_state(), rank.clone(), LoadTarget::Ids).unwrap();
    assert!(by_id.state.is_empty());
    let (by_name, _) = load(full_state(), rank, LoadTarget::Names).unwrap();
    let slots = &by_name.state[&Key::from("_fsdp_wrapped_module.a.weight")];
    let Tree::Tensor(empty) = made(&slots[&Key::from("exp_avg")]) else { panic!() };
    assert_eq!(empty.shape.as_slice(), [0]);
    let Tree::Tensor(step) = made(&slots[&Key::from("step")]) else { panic!() };
    assert_eq!(step, Host::scalar(7.0));
}

#[test]
fn members_without_state_are_zeros_in_moments_but_no_step_can_be_made_up() {
    let mut given = full_state();
    given.state.shift_remove("a.weight");
    for slots in given.state.values_mut() {
        slots.shift_remove(&Key::from("step"));
    }
    let (load, report) = load(given.clone(), flat(0, 2, ShardingStrategy::FullShard, false), LoadTarget::Ids).unwrap();
    let Tree::Tensor(moment) = made(&load.state[&Key::Int(0)][&Key::from("exp_avg")]) else { panic!() };
    assert_eq!(moment, Host::f32(&[10], [0.0; 10]));
    assert_eq!(report.absent, ["a.weight"]);
    assert!(report.zero_filled.contains(&("a.weight".to_owned(), "exp_avg".to_owned())));
    let mut given = full_state();
    given.state.shift_remove("a.bias");
    let error = load_error(given);
    assert!(error.contains("'step'") && error.contains("'a.bias'") && error.contains("'a.weight'"), "{error}");
}

fn load_error(given: OptimizerState<SlotTensor<Host>>) -> String {
    load(given, flat(0, 2, ShardingStrategy::FullShard, false), LoadTarget::Ids).unwrap_err().to_string()
}

fn with(name: &str, slot: &str, value: Leaf) -> OptimizerState<SlotTensor<Host>> {
    let mut given = full_state();
    given.state[name].insert(Key::from(slot), value.map(&mut SlotTensor::Whole));
    given
}

#[test]
fn members_that_contradict_each_other_are_named() {
    let error = load_error(with("a.bias", "step", tensor(Host::scalar(8.0))));
    assert!(error.contains("it is 7 (float32) for 'a.weight' and 8 (float32) for 'a.bias'"), "{error}");
    let error = load_error(with("a.bias", "extra", tensor(Host::scalar(8.0))));
    assert!(error.contains("'extra'") && error.contains("'a.bias' has it and 'a.weight' has not"), "{error}");
    let error = load_error(with("a.bias", "exp_avg", tensor(Host::zeros(DType::BFloat16, &[3]))));
    assert!(error.contains("float32") && error.contains("bfloat16") && error.contains("'a.bias'"), "{error}");
    let error = load_error(with("a.bias", "exp_avg", tensor(Host::ramp(&[4], 0.0))));
    assert!(error.contains("'a.bias'") && error.contains("[4]") && error.contains("[3]"), "{error}");
    let error = load_error(with("a.bias", "exp_avg", text("a string")));
    assert!(error.contains("one kind for 'a.weight' and of another for 'a.bias'"), "{error}");
}

#[test]
fn plain_values_and_none_have_their_own_rules() {
    let mut given = full_state();
    for slots in given.state.values_mut() {
        slots.insert(Key::from("count"), Tree::Value(Value::from(3_i64)));
        slots.insert(Key::from("nothing"), Tree::Value(Value::None));
    }
    let rank = flat(1, 2, ShardingStrategy::FullShard, false);
    let (ok, _) = load(given.clone(), rank, LoadTarget::Ids).unwrap();
    let slots = &ok.state[&Key::Int(0)];
    assert!(matches!(made(&slots[&Key::from("nothing")]), Tree::Value(Value::None)));
    assert!(crate::host::same(&made(&slots[&Key::from("count")]), &crate::host::int(3)));
    given.state["a.bias"].insert(Key::from("count"), Tree::Value(Value::from(4_i64)));
    assert!(load_error(given).contains("it is 3 for 'a.weight' and 4 for 'a.bias'"));
}

#[test]
fn parts_that_are_not_at_hand_are_named() {
    let mut given = full_state();
    let half = SlotPiece::contiguous(Host::ramp(&[1, 4], 0.0), 0, reshard_layout::Region::new(&[0, 0], &[1, 4]).unwrap());
    let slot = SlotTensor::Sharded { dtype: DType::Float32, shape: [3, 4].into_iter().collect(), pieces: vec![half] };
    given.state["a.weight"].insert(Key::from("exp_avg"), Tree::Tensor(slot));
    let error = load_error(given);
    assert!(error.contains("'a.weight.exp_avg' is incomplete") && error.contains("1:"), "{error}");
}

#[test]
fn slots_of_the_wrong_size_are_named_when_read() {
    let model = model(flat(0, 2, ShardingStrategy::FullShard, false));
    let raw = RawOptimizer {
        state: [(Key::Int(0), Tree::dict_of([("exp_avg", tensor(Host::ramp(&[7], 0.0)))]))].into_iter().collect(),
        param_groups: vec![group(vec![Key::Int(0)], &[])],
        ..Default::default()
    };
    let (names, flats) = (Names::of(&model).unwrap(), FlatModel::of(&model).unwrap());
    let error = sharded_optim_state(raw, &live(&[&[9]]), &names, &flats).unwrap_err();
    assert!(matches!(error, StateError::SlotShape { .. }), "{error}");
}

#[test]
fn an_optimizer_by_names_may_call_a_flat_parameter_by_its_own() {
    let rank = flat(0, 1, ShardingStrategy::FullShard, false);
    let slots = Tree::dict_of([("sum", tensor(Host::ramp(&[19], 0.0)))]);
    let raw = RawOptimizer {
        state: [(Key::from("_fsdp_wrapped_module._flat_param"), slots), (Key::from("mine"), float(1.0))].into_iter().collect(),
        param_groups: vec![group(vec![Key::from("_fsdp_wrapped_module._flat_param")], &[])],
        ..Default::default()
    };
    let state = sharded(raw, rank);
    assert_eq!(state.state.keys().collect::<Vec<_>>(), ["a.weight", "a.bias", "b.weight"]);
    assert_eq!(state.param_groups[0].params, ["a.weight", "a.bias", "b.weight"]);
    assert!(state.user_state.contains_key(&Key::from("mine")));
}

#[test]
fn ranks_must_agree_about_what_is_the_same_everywhere() {
    let state = |step: f32| {
        let slots = adam_slots(&[19], 0.0, step);
        let raw = RawOptimizer {
            state: [(Key::Int(0), slots)].into_iter().collect(),
            param_groups: vec![group(vec![Key::Int(0)], &[])],
            ..Default::default()
        };
        inventory(&sharded(raw, flat(0, 1, ShardingStrategy::NoShard, false)))
    };
    assert!(full_optim_state(&[state(1.0), state(1.0)], Recipients::All, false).is_ok());
    let error = full_optim_state(&[state(1.0), state(2.0)], Recipients::All, false).unwrap_err().to_string();
    assert!(error.contains("'step' of 'a.bias'") && error.contains("rank 0") && error.contains("rank 1"), "{error}");
}

#[test]
fn state_of_one_world_loads_into_another() {
    for (from, to) in [(3, 2), (2, 5), (1, 4), (24, 3)] {
        for orig in [false, true] {
            // All parts of the old world, as if each had been read from a checkpoint.
            let mut gathered = full_state();
            for slots in gathered.state.values_mut() {
                for value in slots.values_mut() {
                    if let Tree::Tensor(SlotTensor::Whole(tensor)) = value.clone()
                        && !tensor.shape.is_empty()
                    {
                        let (dtype, shape) = (tensor.dtype, tensor.shape);
                        *value = Tree::Tensor(SlotTensor::Sharded { dtype, shape, pieces: Vec::new() });
                    }
                }
            }
            for rank in 0..from {
                let old = flat(rank, from, ShardingStrategy::FullShard, !orig);
                let (load, _) = load(full_state(), old.clone(), LoadTarget::Ids).unwrap();
                for (name, slots) in sharded(loaded(&load), old).state {
                    for (slot, value) in slots {
                        if let (
                            Tree::Tensor(SlotTensor::Sharded { pieces: own, .. }),
                            Some(Tree::Tensor(SlotTensor::Sharded { pieces, .. })),
                        ) = (value, gathered.state[&name].get_mut(&slot))
                        {
                            pieces.extend(own);
                        }
                    }
                }
            }
            for rank in 0..to {
                let new = flat(rank, to, ShardingStrategy::FullShard, orig);
                let (from_parts, _) = load(gathered.clone(), new.clone(), LoadTarget::Ids).unwrap();
                let (from_whole, _) = load(full_state(), new, LoadTarget::Ids).unwrap();
                assert!(
                    crate::host::same(&loaded(&from_parts).into_tree(), &loaded(&from_whole).into_tree()),
                    "{from} -> {to}, rank {rank}"
                );
            }
        }
    }
}
