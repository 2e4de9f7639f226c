//! Properties over random models, groups, flat parameters and trees.

use proptest::collection::vec;
use proptest::prelude::*;
use reshard_formats::DType;
use reshard_state::*;

use crate::host::{Host, assemble, by_names, float, group, made, same, set_optimizer_state};

/// A module tree without wrappers; identities are given afterwards.
fn plain_module() -> impl Strategy<Value = ModuleTree> {
    let leaf = (0_usize..3, any::<bool>(), any::<bool>()).prop_map(|(parameters, buffer, extra)| {
        let mut tree = ModuleTree::new();
        for index in 0..parameters {
            tree = tree.parameter(["weight", "bias", "scale"][index], Parameter::new(0));
        }
        if buffer {
            tree = tree.buffer("mean", 0, true);
        }
        tree.extra_state = extra;
        tree
    });
    leaf.prop_recursive(3, 12, 3, |inner| {
        // A child may well be called what a wrapper calls its own.
        (vec(inner, 0..3), any::<bool>()).prop_map(|(children, module)| {
            let mut tree = ModuleTree::new().parameter("own", Parameter::new(0));
            for (index, child) in children.into_iter().enumerate() {
                tree = tree.child(if module { ["module", "a", "b"][index] } else { ["x", "y", "z"][index] }, child);
            }
            tree
        })
    })
}

fn number(tree: &mut ModuleTree, next: &mut u64) {
    for parameter in tree.parameters.values_mut() {
        *next += 1;
        parameter.identity = Identity(*next);
    }
    for buffer in tree.buffers.values_mut() {
        *next += 1;
        buffer.identity = Identity(*next);
    }
    tree.children.values_mut().for_each(|child| number(child, next));
}

fn wrapper() -> impl Strategy<Value = Wrapper> {
    prop_oneof![
        Just(Wrapper::Ddp),
        Just(Wrapper::Fsdp1),
        Just(Wrapper::Fsdp2),
        Just(Wrapper::Compiled),
        Just(Wrapper::ActivationCheckpoint)
    ]
}

/// Wraps every module of the tree in the next few wrappers of an endless list.
fn wrap(tree: ModuleTree, wrappers: &mut impl Iterator<Item = Vec<Wrapper>>) -> ModuleTree {
    let own = wrappers.next().unwrap_or_default();
    let children = tree.children.iter().map(|(name, child)| (name.clone(), wrap(child.clone(), wrappers))).collect();
    own.into_iter().fold(ModuleTree { children, ..tree }, ModuleTree::wrapped)
}

fn leaves(tree: &ModuleTree) -> Vec<(String, LeafKind, Option<Identity>)> {
    Names::of(tree).unwrap().leaves().map(|leaf| (leaf.name.clone(), leaf.kind, leaf.identity)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn names_do_not_depend_on_wrappers(mut tree in plain_module(), wrappers in vec(vec(wrapper(), 0..4), 1..20)) {
        number(&mut tree, &mut 0);
        let wrapped = wrap(tree.clone(), &mut wrappers.into_iter().cycle());
        prop_assert_eq!(leaves(&tree), leaves(&wrapped));
        let names = Names::of(&wrapped).unwrap();
        for leaf in names.leaves() {
            prop_assert_eq!(canonical_below(&wrapped, &leaf.raw), leaf.name.clone());
            prop_assert_eq!(names.canonical(&leaf.raw), [leaf.name.clone()]);
        }
    }

    #[test]
    fn ids_and_names_are_a_bijection(order in Just((1_u64..9).collect::<Vec<_>>()).prop_shuffle(), cuts in vec(0_usize..9, 0..3), with_state in vec(any::<bool>(), 8)) {
        let mut model = ModuleTree::new();
        for id in 1..9 {
            model = model.child(&format!("layer{id}"), ModuleTree::new().parameter("weight", Parameter::new(id)));
        }
        let names = Names::of(&model.wrapped(Wrapper::Ddp)).unwrap();
        let mut bounds: Vec<usize> = cuts.into_iter().map(|cut| cut.min(8)).chain([0, 8]).collect();
        bounds.sort_unstable();
        let optimizer = LiveOptimizer {
            param_groups: bounds
                .windows(2)
                .map(|pair| group(order[pair[0]..pair[1]].iter().map(|id| Identity(*id)).collect(), &[]))
                .collect(),
        };
        let slots = |id: usize| Tree::dict_of([("step", float(id as f64))]);
        let raw = RawOptimizer {
            state: (0..8).filter(|id| with_state[*id]).map(|id| (Key::Int(id as i64), slots(id))).collect(),
            param_groups: bounds
                .windows(2)
                .enumerate()
                .map(|(index, pair)| {
                    let params = (pair[0]..pair[1]).map(|id| Key::Int(id as i64)).collect();
                    group(params, &[("lr", float(index as f64))])
                })
                .collect(), ..Default::default() };
        let named = by_names(raw.clone(), &optimizer, &names).unwrap();
        prop_assert_eq!(named.state.len(), with_state.iter().filter(|with| **with).count());
        // Any other order of groups in the checkpoint gives the same.
        let mut turned = named;
        turned.param_groups.reverse();
        // Groups without members are known by their order alone, which has just been turned.
        if turned.param_groups.iter().filter(|group| group.params.is_empty()).count() < 2 {
            let (loads, _) = set_optimizer_state(turned, &[optimizer], &names, &StateDictOptions::default()).unwrap();
            let loaded = loads.into_iter().next().unwrap().into_raw();
            prop_assert!(same(&loaded.into_tree(), &raw.into_tree()));
        }
    }

    #[test]
    fn flattening_into_shards_and_back_is_the_identity(
        shapes in vec(vec(0_u64..4, 1..4), 1..5),
        world in 1_u64..7,
        aligned in 0_u64..5,
        orig in any::<bool>(),
        whole_shards in any::<bool>(),
    ) {
        let strategy = if whole_shards { ShardingStrategy::NoShard } else { ShardingStrategy::FullShard };
        let members: Vec<FlatMember> =
            shapes.iter().enumerate().map(|(index, shape)| FlatMember::new(&format!("p{index}"), shape)).collect();
        let slots: Vec<Host> = shapes.iter().enumerate().map(|(index, shape)| Host::ramp(shape, 1000.0 * index as f32 + 1.0)).collect();
        let mut states = Vec::new();
        for rank in 0..world {
            let sharding = FlatSharding { strategy, rank, world };
            let flat = FlatParameter::packed("_flat_param", DType::Float32, members.clone(), aligned, sharding, orig).unwrap();
            let (tree, live) = if orig {
                let mut tree = ModuleTree { manages: Some(Box::new(flat)), ..ModuleTree::new() };
                for (id, member) in (1..).zip(&members) {
                    tree = tree.parameter(&member.name, Parameter::new(id));
                }
                let ids: Vec<u64> = (1..=members.len() as u64).collect();
                (tree, crate::host::live(&[&ids]))
            } else {
                let parameter = Parameter { flat: Some(Box::new(flat)), ..Parameter::new(1) };
                (ModuleTree::new().parameter("_flat_param", parameter), crate::host::live(&[&[1]]))
            };
            let (names, flats) = (Names::of(&tree).unwrap(), FlatModel::of(&tree).unwrap());
            let given = OptimizerState {
                state: members
                    .iter()
                    .zip(&slots)
                    .map(|(member, slot)| {
                        let slots = [(Key::from("m"), Tree::Tensor(SlotTensor::Whole(slot.clone())))];
                        (member.name.clone(), slots.into_iter().collect())
                    })
                    .collect(),
                user_state: Dict::new(),
                param_groups: vec![], ..Default::default() };
            let options = StateDictOptions::default();
            let live = [live];
            // A slot of one element is a scalar by every rule unless its parameter has one element too.
            let (loads, _) = optim_state_to_load(given, &live, &names, &flats, LoadTarget::Names, &options).unwrap();
            let load = &loads[0];
            let raw = RawOptimizer {
                state: load
                    .state
                    .iter()
                    .map(|(key, slots)| {
                        (key.clone(), Tree::Dict(slots.iter().map(|(slot, how)| (slot.clone(), made(how))).collect()))
                    })
                    .collect(),
                param_groups: vec![], ..Default::default() };
            states.push(sharded_optim_state(raw, &live[0], &names, &flats).unwrap());
        }
        for (member, slot) in members.iter().zip(&slots) {
            let parts: Vec<&SlotTensor<Host>> =
                states.iter().filter_map(|state| state.state.get(&member.name)?.get(&Key::from("m"))?.as_tensor()).collect();
            prop_assert!(!parts.is_empty());
            prop_assert_eq!(&assemble(&parts), slot);
        }
    }
}
