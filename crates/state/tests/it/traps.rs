//! One test per trap of this field that belongs to names, trees and optimizer state. The numbers are those of the list of
//! traps in the project's notes; what is missing here belongs to storage, the engine or the Python layer.

use indexmap::IndexMap;
use reshard_formats::{DType, KeyPath, PathSegment};
use reshard_layout::{Dims, LocalRegion, Mesh, Placement, Region, local_regions};
use reshard_state::*;

use crate::host::{
    Host, Leaf, adam_slots, assemble, by_names, float, group, int, inventory, live, same, set_optimizer_state, tensor,
};

fn layer(weight: u64, bias: u64) -> ModuleTree {
    ModuleTree::new().parameter("weight", Parameter::new(weight)).parameter("bias", Parameter::new(bias))
}

fn model() -> ModuleTree {
    ModuleTree::new().child("a", layer(1, 2)).child("b", layer(3, 4))
}

fn names() -> Names {
    Names::of(&model()).unwrap()
}

fn raw(state: &[(i64, Leaf)], groups: &[&[i64]]) -> RawOptimizer<Host> {
    RawOptimizer {
        state: state.iter().map(|(id, slots)| (Key::Int(*id), slots.clone())).collect(),
        param_groups: groups
            .iter()
            .map(|ids| group(ids.iter().map(|id| Key::Int(*id)).collect(), &[("lr", float(0.1))]))
            .collect(),
        ..Default::default()
    }
}

fn path(parts: &[&str]) -> KeyPath {
    parts.iter().map(|part| PathSegment::from(*part)).collect()
}

fn load(state: OptimizerState<Host>, live: &LiveOptimizer<Host>, names: &Names) -> (RawOptimizer<Host>, OptimizerReport) {
    let options = StateDictOptions::default();
    let (loads, report) = set_optimizer_state(state, std::slice::from_ref(live), names, &options).unwrap();
    (loads.into_iter().next().unwrap().into_raw(), report)
}

#[test]
fn t01_a_template_comes_from_the_checkpoint_and_nothing_is_stepped() {
    // The optimizer is fresh: it has no state, and none is made to find out what to load.
    let paths = [path(&["state", "a.weight", "exp_avg"]), path(&["state", "a.weight", "step"])];
    let shapes: [&[u64]; 2] = [&[4, 2], &[]];
    let entries = paths.iter().zip(shapes).map(|(path, shape)| StoredSlot { path, shape: Some(shape) });
    let params = [("a.weight".to_owned(), Dims::from_slice(&[4, 2]))].into_iter().collect();
    let plan = plan_slots(&params, entries);
    assert_eq!(plan.slots.iter().map(|slot| slot.by_parameter).collect::<Vec<_>>(), [true, false]);
    assert!(plan.slots.iter().all(|slot| slot.param.as_deref() == Some("a.weight")));
    let fresh = raw(&[], &[&[0, 1, 2, 3]]);
    let state = by_names(fresh.clone(), &live(&[&[1, 2, 3, 4]]), &names()).unwrap();
    assert!(state.state.is_empty());
    let (back, _) = load(state, &live(&[&[1, 2, 3, 4]]), &names());
    assert!(same(&back.into_tree(), &fresh.into_tree()));
}

#[test]
fn t02_a_learning_rate_that_is_a_tensor_stays_one() {
    let mut given = raw(&[], &[&[0]]);
    given.param_groups[0].options.insert(Key::from("lr"), tensor(Host::scalar(0.5)));
    let live = live(&[&[1]]);
    let (back, _) = load(by_names(given.clone(), &live, &names()).unwrap(), &live, &names());
    assert_eq!(back.param_groups[0].options[&Key::from("lr")].as_tensor(), Some(&Host::scalar(0.5)));
}

#[test]
fn t03_state_does_not_depend_on_gradients_or_on_what_is_trained_now() {
    // A parameter was trained, then frozen: its state is there and comes back, on either side.
    let mut frozen = model();
    frozen.children["a"].parameters["weight"].requires_grad = false;
    let names = Names::of(&frozen).unwrap();
    let live = live(&[&[1, 2]]);
    let given = raw(&[(0, adam_slots(&[2], 0.0, 4.0)), (1, adam_slots(&[2], 9.0, 4.0))], &[&[0, 1]]);
    let (back, report) = load(by_names(given.clone(), &live, &names).unwrap(), &live, &names);
    assert!(same(&back.into_tree(), &given.into_tree()));
    assert_eq!(report, OptimizerReport::default());
}

#[test]
fn t04_some_state_is_not_all_state() {
    // Only one of two parameters ever got a gradient: exactly that is restored, and the other is reported.
    let live = live(&[&[1, 2]]);
    let given = raw(&[(1, adam_slots(&[2], 0.0, 1.0))], &[&[0, 1]]);
    let (back, report) = load(by_names(given, &live, &names()).unwrap(), &live, &names());
    assert_eq!(back.state.keys().collect::<Vec<_>>(), [&Key::Int(1)]);
    assert_eq!(report.absent, ["a.weight"]);
    // And per slot: a slot that only one of them has stays with that one.
    let mut uneven = adam_slots(&[2], 0.0, 1.0);
    if let Tree::Dict(slots) = &mut uneven {
        slots.insert(Key::from("max_exp_avg_sq"), tensor(Host::ramp(&[2], 3.0)));
    }
    let given = raw(&[(0, uneven), (1, adam_slots(&[2], 0.0, 1.0))], &[&[0, 1]]);
    let (back, _) = load(by_names(given.clone(), &live, &names()).unwrap(), &live, &names());
    assert!(same(&back.into_tree(), &given.into_tree()));
}

#[test]
fn t05_stateless_optimizers_have_no_state() {
    let live = live(&[&[1, 2]]);
    let given = raw(&[(0, Tree::dict()), (1, Tree::dict())], &[&[0, 1]]);
    let state = by_names(given, &live, &names()).unwrap();
    assert!(state.state.is_empty());
    let flat = flatten_optimizer(&state).unwrap();
    assert!(flat.keys().all(|key| key.starts_with("param_groups.")));
    let (back, _) = unflatten_optimizer(&flat, std::slice::from_ref(&live), &names()).unwrap();
    assert!(back.state.is_empty());
    let (back, _) = load(back, &live, &names());
    assert!(same(&back.into_tree(), &raw(&[], &[&[0, 1]]).into_tree()));
}

#[test]
fn t06_step_stays_what_it_was() {
    let live = live(&[&[1]]);
    let given = raw(&[(0, adam_slots(&[2], 0.0, 5.0))], &[&[0]]);
    let (back, _) = load(by_names(given, &live, &names()).unwrap(), &live, &names());
    let step = back.state[&Key::Int(0)].get("step").unwrap().as_tensor().unwrap();
    assert_eq!((step.dtype, step.shape.as_slice()), (DType::Float32, &[][..]));
}

#[test]
fn t08_values_that_are_no_tensors_are_set_too() {
    let live = live(&[&[1]]);
    let mut given = raw(&[(0, Tree::dict_of([("step", int(12))]))], &[&[0]]);
    given.param_groups[0].options.insert(Key::from("epoch"), int(7));
    let (back, _) = load(by_names(given.clone(), &live, &names()).unwrap(), &live, &names());
    assert!(same(&back.into_tree(), &given.into_tree()));
}

#[test]
fn t09_shared_parameters_load_by_any_of_their_names_in_both_forms() {
    let tied =
        ModuleTree::new().child("embed", layer(1, 2)).child("head", ModuleTree::new().parameter("weight", Parameter::new(1)));
    let names = Names::of(&tied).unwrap();
    assert_eq!(names.aliases("head.weight"), ["embed.weight", "head.weight"]);
    let live = live(&[&[1]]);
    for alias in ["embed.weight", "head.weight"] {
        let Tree::Dict(slots) = adam_slots(&[2], 0.0, 1.0) else { panic!() };
        let state = OptimizerState {
            state: [(alias.to_owned(), slots)].into_iter().collect(),
            user_state: Dict::new(),
            param_groups: vec![group(vec![alias.to_owned()], &[("lr", float(0.1))])],
            ..Default::default()
        };
        let flat = flatten_optimizer(&state).unwrap();
        let (back, report) = load(state, &live, &names);
        assert!(back.state.contains_key(&Key::Int(0)) && report == OptimizerReport::default());
        let (unflattened, left) = unflatten_optimizer(&flat, std::slice::from_ref(&live), &names).unwrap();
        assert_eq!(left, Leftovers::default());
        let (back, _) = load(unflattened, &live, &names);
        assert!(back.state.contains_key(&Key::Int(0)));
        // The model as well: stored once, set once, whichever name is given.
        let given = [alias, "embed.bias"];
        let set = set_model_state(&tied, given, |_| None, &StateDictOptions::default()).unwrap();
        assert_eq!(set.assignments.len(), 2);
    }
    let plan = get_model_state(&tied, &[], &StateDictOptions::default()).unwrap();
    assert_eq!(plan.entries["head.weight"].alias_of.as_deref(), Some("embed.weight"));
}

#[test]
fn t10_buffers_lose_wrappers_like_parameters_and_non_persistent_ones_are_left_out() {
    let norm = ModuleTree::new().buffer("mean", 1, true).buffer("cache", 2, false).wrapped(Wrapper::ActivationCheckpoint);
    let tree = ModuleTree::new().child("norm", norm).wrapped(Wrapper::Compiled).wrapped(Wrapper::Ddp);
    let plan = get_model_state(&tree, &[], &StateDictOptions::default()).unwrap();
    assert_eq!(plan.entries.keys().collect::<Vec<_>>(), ["norm.mean"]);
    assert_eq!(plan.entries["norm.mean"].raw, "module._orig_mod.norm._checkpoint_wrapped_module.mean");
}

#[test]
fn t11_wrappers_in_any_order_and_around_a_leaf_leave_no_trace() {
    let orders = [
        vec![Wrapper::Compiled, Wrapper::ActivationCheckpoint, Wrapper::Fsdp1],
        vec![Wrapper::ActivationCheckpoint, Wrapper::Compiled, Wrapper::Fsdp2],
        vec![Wrapper::Fsdp1, Wrapper::ActivationCheckpoint, Wrapper::Compiled, Wrapper::Compiled],
    ];
    for order in orders {
        let leaf = order.iter().fold(layer(1, 2), |module, wrapper| module.wrapped(wrapper.clone()));
        let tree = ModuleTree::new().child("leaf", leaf).wrapped(Wrapper::Fsdp1).wrapped(Wrapper::Ddp);
        let names = Names::of(&tree).unwrap();
        assert!(names.get("leaf.weight").is_some() && names.get("leaf.bias").is_some(), "{order:?}");
        // The members of a flat parameter carry wrappers in their own names.
        let raw = names.get("leaf.weight").unwrap().raw.clone();
        assert_eq!(canonical_below(&tree, &raw), "leaf.weight");
    }
}

#[test]
fn t12_sharding_rounds_up_like_torch_chunk() {
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank: 0, world: 4 };
    let flat = FlatParameter::packed("f", DType::Float32, vec![FlatMember::new("a", &[6])], 0, sharding, false).unwrap();
    let sizes: Vec<u64> = (0..4).map(|rank| flat.shard_range(rank)).map(|range| range.end - range.start).collect();
    assert_eq!(sizes, [2, 2, 2, 0]);
}

#[test]
fn t15_the_shape_of_the_whole_is_the_recorded_one() {
    // Three ranks, five rows: neither local size times ranks nor the largest end of this rank's regions.
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank: 0, world: 3 };
    let flat = FlatParameter::packed("f", DType::Float32, vec![FlatMember::new("w", &[5, 2])], 0, sharding, true).unwrap();
    let tree = ModuleTree { manages: Some(Box::new(flat)), ..ModuleTree::new() }.parameter("w", Parameter::new(1));
    let given = raw(&[(0, Tree::dict_of([("exp_avg", tensor(Host::ramp(&[4], 0.0)))]))], &[&[0]]);
    let (names, flats) = (Names::of(&tree).unwrap(), FlatModel::of(&tree).unwrap());
    let state = sharded_optim_state(given, &live(&[&[1]]), &names, &flats).unwrap();
    assert_eq!(state.state["w"][&Key::from("exp_avg")].as_tensor().unwrap().shape(), [5, 2]);
}

#[test]
fn t16_fsdp_over_tensor_parallel_shards_is_strided() {
    let mesh = Mesh::new(&[2, 2]).unwrap();
    let placements = [Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard(0)];
    let whole = Host::ramp(&[8, 3], 0.0);
    let layout = |rank| {
        let regions = local_regions(&mesh, &placements, &[8, 3], rank).unwrap();
        ParamLayout::from_regions(&[8, 3], &[2, 3], regions).unwrap()
    };
    let mut parts = Vec::new();
    for rank in 0..4 {
        let layout = layout(rank);
        // Whole rows, each at its place in the local tensor.
        let mut local = Host::ramp(&[2, 3], 0.0);
        for piece in &layout.pieces {
            let (from, to) = (piece.region.offsets()[0] as usize * 12, piece.at[0] as usize * 12);
            let length = piece.region.sizes()[0] as usize * 12;
            local.data[to..to + length].copy_from_slice(&whole.data[from..from + length]);
        }
        let mut state = OptimizerState::default();
        let slots = [(Key::from("exp_avg"), Tree::Tensor(SlotTensor::Whole(local)))].into_iter().collect();
        state.state.insert("w".to_owned(), slots);
        adopt_layouts(&mut state, &[("w".to_owned(), layout)].into_iter().collect());
        parts.push(state.state["w"][&Key::from("exp_avg")].as_tensor().unwrap().clone());
    }
    assert_eq!(assemble(&parts.iter().collect::<Vec<_>>()), whole);
    // Rank 2 (second of the data-parallel, first of the tensor-parallel ranks) holds rows 2 and 3, not 4 and 5.
    assert_eq!(layout(2).pieces[0].region.offsets()[0], 2);
}

#[test]
fn t17_replicated_state_that_differs_between_ranks_is_an_error() {
    let state = |lr: f64| -> Inventory {
        let slots = [(Key::from("scale"), float(lr))].into_iter().collect();
        inventory(&OptimizerState::<SlotTensor<Host>> {
            state: [("w".to_owned(), slots)].into_iter().collect(),
            ..Default::default()
        })
    };
    let error = full_optim_state(&[state(0.5), state(0.25)], Recipients::All, false).unwrap_err().to_string();
    assert!(error.contains("'scale' of 'w'") && error.contains("0.5") && error.contains("0.25"), "{error}");
}

#[test]
fn t19_one_rank_is_named_as_the_owner_of_what_is_distributed() {
    let offered = [("w".to_owned(), (DType::Float32, Dims::from_slice(&[4])))].into_iter().collect();
    let wanted = [("w".to_owned(), (0..2).map(|rank| (rank, Region::new(&[rank * 2], &[2]).unwrap())).collect())];
    let (plan, _) = broadcast_plan(0, &offered, &wanted.into_iter().collect()).unwrap();
    assert_eq!(plan.steps[0].from, [TransferPart { rank: 0, region: Region::whole(&[4]).unwrap() }]);
    assert_eq!(plan.steps[0].to.len(), 2);
}

#[test]
fn t20_broadcasts_go_by_name_in_the_owners_order_and_tolerate_extra_keys() {
    let offer = |keys: &[&str]| -> IndexMap<String, (DType, Dims)> {
        keys.iter().map(|key| ((*key).to_owned(), (DType::Float32, Dims::from_slice(&[2])))).collect()
    };
    let want = |keys: &[&str]| -> IndexMap<String, Vec<(u64, Region)>> {
        keys.iter().map(|key| ((*key).to_owned(), vec![(1, Region::whole(&[2]).unwrap())])).collect()
    };
    let offered = offer(&["z", "extra", "a"]);
    // Two ranks list their keys in different orders: the steps are the same.
    let (one, missing) = broadcast_plan(0, &offered, &want(&["a", "z", "lost"])).unwrap();
    let (other, _) = broadcast_plan(0, &offered, &want(&["lost", "z", "a"])).unwrap();
    assert_eq!(one.steps.iter().map(|step| step.key.as_str()).collect::<Vec<_>>(), ["z", "a"]);
    assert_eq!(one, other);
    assert_eq!(missing, ["lost"]);
}

#[test]
fn t21_hybrid_sharding_counts_ranks_within_the_sharding_group() {
    // World rank 3 of 4 is rank 1 of its sharding group of 2.
    let sharding = FlatSharding { strategy: ShardingStrategy::HybridShard, rank: 1, world: 2 };
    let flat = FlatParameter::packed("f", DType::Float32, vec![FlatMember::new("w", &[6])], 0, sharding, false).unwrap();
    assert_eq!(flat.shard_range(flat.sharding().rank), 3..6);
    assert!(FlatParameter::packed("f", DType::Float32, vec![], 0, FlatSharding { rank: 3, ..sharding }, false).is_err());
}

#[test]
fn t22_the_order_of_parameters_may_differ_between_ranks() {
    let (here, there) = (live(&[&[1, 2, 3]]), live(&[&[3, 1, 2]]));
    let given = raw(&[(0, adam_slots(&[2], 0.0, 1.0)), (2, adam_slots(&[2], 50.0, 1.0))], &[&[0, 1, 2]]);
    let state = by_names(given.clone(), &here, &names()).unwrap();
    let (moved, _) = load(state, &there, &names());
    assert!(same(&moved.state[&Key::Int(1)], &given.state[&Key::Int(0)]));
    assert!(same(&moved.state[&Key::Int(0)], &given.state[&Key::Int(2)]));
    let (back, _) = load(by_names(moved, &there, &names()).unwrap(), &here, &names());
    assert!(same(&back.into_tree(), &given.into_tree()));
}

#[test]
fn t23_frozen_and_trained_members_share_a_flat_parameter_and_empty_parts_have_slots() {
    let mut frozen = FlatMember::new("w", &[4]);
    frozen.requires_grad = false;
    let members = vec![frozen, FlatMember::new("v", &[4])];
    for rank in 0..2 {
        let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank, world: 2 };
        let flat = FlatParameter::packed("f", DType::Float32, members.clone(), 4, sharding, true).unwrap();
        let tree = ModuleTree { manages: Some(Box::new(flat)), ..ModuleTree::new() }
            .parameter("w", Parameter::new(1).frozen())
            .parameter("v", Parameter::new(2));
        let (names, flats) = (Names::of(&tree).unwrap(), FlatModel::of(&tree).unwrap());
        let Tree::Dict(slots) = adam_slots(&[4], 0.0, 1.0).map(&mut SlotTensor::Whole) else { panic!() };
        let given = OptimizerState {
            state: [("v".to_owned(), slots)].into_iter().collect(),
            user_state: Dict::new(),
            param_groups: vec![],
            ..Default::default()
        };
        let live = [live(&[&[1, 2]])];
        let options = StateDictOptions::default();
        let (loads, report) = optim_state_to_load(given.clone(), &live, &names, &flats, LoadTarget::Ids, &options).unwrap();
        assert_eq!(loads[0].state.len(), usize::from(rank == 1));
        assert_eq!(report.absent, ["w"]);
        let (loads, _) = optim_state_to_load(given, &live, &names, &flats, LoadTarget::Names, &options).unwrap();
        assert_eq!(loads[0].state[&Key::from("v")].len(), 3);
    }
}

#[test]
fn t24_slots_keep_their_dimensions() {
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank: 0, world: 2 };
    let flat =
        FlatParameter::packed("_flat_param", DType::Float32, vec![FlatMember::new("w", &[4])], 0, sharding, false).unwrap();
    let parameter = Parameter { flat: Some(Box::new(flat)), ..Parameter::new(9) };
    let tree = ModuleTree::new().parameter("_flat_param", parameter);
    let slots = Tree::dict_of([("zero", tensor(Host::scalar(1.0))), ("one", tensor(Host::f32(&[1], [2.0])))]);
    let given = raw(&[(0, slots)], &[&[0]]);
    let (names, flats) = (Names::of(&tree).unwrap(), FlatModel::of(&tree).unwrap());
    let live = live(&[&[9]]);
    let state = sharded_optim_state(given, &live, &names, &flats).unwrap();
    let options = StateDictOptions::default();
    let (loads, _) = optim_state_to_load(state, &[live], &names, &flats, LoadTarget::Ids, &options).unwrap();
    let shape = |slot: &str| match crate::host::made(&loads[0].state[&Key::Int(0)][&Key::from(slot)]) {
        Tree::Tensor(host) => host.shape.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!((shape("zero"), shape("one")), (vec![], vec![1]));
}

#[test]
fn t29_bytes_are_counted_for_every_dtype() {
    for (dtype, bytes) in [(DType::Bool, 6), (DType::Int64, 48), (DType::UInt8, 6), (DType::BFloat16, 12)] {
        let held = vec![(0, Region::whole(&[6]).unwrap())];
        let tensor = HeldTensor { key: "x".to_owned(), dtype, shape: Dims::from_slice(&[6]), held };
        assert_eq!(gather_plan(vec![tensor], Recipients::All).unwrap().peak_bytes, bytes);
    }
}

#[test]
fn t30_a_plain_slot_beside_a_sharded_parameter_is_a_part_not_a_replica() {
    let held = LocalRegion { global: Region::new(&[2, 0], &[2, 2]).unwrap(), local: Dims::from_slice(&[0, 0]) };
    let layout = ParamLayout::from_regions(&[4, 2], &[2, 2], vec![held]).unwrap();
    let params: IndexMap<String, ParamLayout> = [("w".to_owned(), layout)].into_iter().collect();
    let slots = [
        (Key::from("exp_avg"), Tree::Tensor(SlotTensor::Whole(Host::ramp(&[2, 2], 0.0)))),
        (Key::from("step"), Tree::Tensor(SlotTensor::Whole(Host::scalar(1.0)))),
    ];
    let mut state =
        OptimizerState { state: [("w".to_owned(), slots.into_iter().collect())].into_iter().collect(), ..Default::default() };
    adopt_layouts(&mut state, &params);
    assert!(matches!(state.state["w"][&Key::from("step")], Tree::Tensor(SlotTensor::Whole(_))));
    let slot = state.state["w"][&Key::from("exp_avg")].as_tensor().unwrap();
    assert_eq!(slot.shape(), [4, 2]);
    assert_eq!(slot.pieces().unwrap()[0].region, Region::new(&[2, 0], &[2, 2]).unwrap());
}

#[test]
fn t31_groups_are_known_by_their_members() {
    // Same options, other order, and one learning rate that changed since: members alone decide.
    let given = OptimizerState {
        param_groups: vec![
            group(vec!["b.weight".into(), "b.bias".into()], &[("lr", float(0.3)), ("tag", int(2))]),
            group(vec!["a.bias".into(), "a.weight".into()], &[("lr", float(0.3)), ("tag", int(1))]),
        ],
        ..Default::default()
    };
    let (back, _) = load(given, &live(&[&[1, 2], &[3, 4]]), &names());
    let tags: Vec<_> = back.param_groups.iter().map(|group| group.options[&Key::from("tag")].clone()).collect();
    assert!(same(&tags[0], &int(1)) && same(&tags[1], &int(2)));
}

#[test]
fn t32_a_slot_in_blocks_of_its_own_is_not_cut_like_its_parameter() {
    let params = [("w".to_owned(), Dims::from_slice(&[64, 4]))].into_iter().collect();
    let at = path(&["state", "w", "absmax"]);
    let plan = plan_slots(&params, [StoredSlot { path: &at, shape: Some(&[8]) }]);
    assert_eq!(plan.slots, [PlannedSlot { param: Some("w".to_owned()), by_parameter: false }]);
}

#[test]
fn t34_an_optimizer_by_names_loads_before_it_has_state() {
    let names = names();
    let Tree::Dict(slots) = adam_slots(&[2], 0.0, 1.0).map(&mut SlotTensor::Whole) else { panic!() };
    let given = OptimizerState {
        state: [("a.weight".to_owned(), slots)].into_iter().collect(),
        user_state: Dict::new(),
        param_groups: vec![ParamGroup { params: vec!["a.weight".to_owned()], options: Dict::new() }],
        ..Default::default()
    };
    let flats = FlatModel::of(&model()).unwrap();
    let options = StateDictOptions::default();
    let (loads, _) = optim_state_to_load(given, &[live(&[&[1]])], &names, &flats, LoadTarget::Names, &options).unwrap();
    assert_eq!(loads[0].state[&Key::from("a.weight")].len(), 3);
}
