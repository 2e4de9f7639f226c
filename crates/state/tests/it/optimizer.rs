//! Optimizer state: ids and names, groups, the flattened form.

use reshard_formats::Value;
use reshard_state::*;

use crate::host::{
    Host, Leaf, Loaded, adam_slots, by_names, float, group, int, leaves, live, same, set_optimizer_state, tensor, text,
};

fn model() -> ModuleTree {
    let layer = |w: u64, b: u64| ModuleTree::new().parameter("weight", Parameter::new(w)).parameter("bias", Parameter::new(b));
    ModuleTree::new().child("a", layer(1, 2)).child("b", layer(3, 4)).wrapped(Wrapper::Ddp)
}

fn names() -> Names {
    Names::of(&model()).unwrap()
}

fn raw(state: &[(i64, Leaf)], groups: Vec<ParamGroup<Key, Host>>) -> RawOptimizer<Host> {
    RawOptimizer {
        state: state.iter().map(|(id, slots)| (Key::Int(*id), slots.clone())).collect(),
        param_groups: groups,
        ..Default::default()
    }
}

fn ids(ids: &[i64]) -> Vec<Key> {
    ids.iter().map(|id| Key::Int(*id)).collect()
}

#[test]
fn ids_become_names_and_names_become_ids_again() {
    let live = live(&[&[3, 1], &[4]]);
    let given = raw(
        &[(0, adam_slots(&[2], 0.0, 3.0)), (2, adam_slots(&[2], 5.0, 3.0))],
        vec![group(ids(&[0, 1]), &[("lr", float(0.1))]), group(ids(&[2]), &[("lr", float(0.2))])],
    );
    let named = by_names(given.clone(), &live, &names()).unwrap();
    assert_eq!(named.state.keys().collect::<Vec<_>>(), ["b.weight", "b.bias"]);
    assert_eq!(named.param_groups[0].params, ["b.weight", "a.weight"]);
    let (loads, _) = set_optimizer_state(named, &[live], &names(), &StateDictOptions::default()).unwrap();
    let back = loads.into_iter().next().unwrap().into_raw();
    assert!(same(&back.into_tree(), &given.into_tree()));
}

#[test]
fn several_optimizers_share_one_tree_and_take_their_parts_back() {
    let (first, second) = (live(&[&[1, 2]]), live(&[&[3], &[4]]));
    let one = raw(&[(0, adam_slots(&[2], 0.0, 1.0))], vec![group(ids(&[0, 1]), &[("lr", float(0.1))])]);
    let two = raw(
        &[(1, adam_slots(&[3], 9.0, 2.0))],
        vec![group(ids(&[0]), &[("lr", float(0.2))]), group(ids(&[1]), &[("lr", float(0.3)), ("tag", text("x"))])],
    );
    let names = names();
    let parts = vec![by_names(one.clone(), &first, &names).unwrap(), by_names(two.clone(), &second, &names).unwrap()];
    let combined = combine(parts).unwrap();
    assert_eq!(combined.param_groups.len(), 3);
    let options = StateDictOptions::default();
    let (loads, report) = set_optimizer_state(combined, &[first, second], &names, &options).unwrap();
    assert_eq!(report.absent, ["a.bias", "b.weight"]);
    let raws: Vec<_> = loads.into_iter().map(Loaded::into_raw).collect();
    assert!(same(&raws[0].clone().into_tree(), &one.into_tree()));
    assert!(same(&raws[1].clone().into_tree(), &two.into_tree()));
}

#[test]
fn a_parameter_in_two_optimizers_is_an_error_that_names_it() {
    let state = || OptimizerState { param_groups: vec![group(vec!["a.bias".to_owned()], &[])], ..Default::default() };
    let error = combine::<Host>(vec![state(), state()]).unwrap_err();
    assert!(matches!(&error, StateError::SharedBetweenOptimizers { name, .. } if name == "a.bias"));
}

#[test]
fn a_group_split_into_two_keeps_its_options_and_two_groups_joined_must_agree() {
    let names = names();
    let given = OptimizerState {
        param_groups: vec![group(vec!["a.weight".into(), "a.bias".into()], &[("lr", float(0.7))])],
        ..Default::default()
    };
    let options = StateDictOptions::default();
    let (loads, _) = set_optimizer_state(given, &[live(&[&[2], &[1]])], &names, &options).unwrap();
    for group in &loads[0].param_groups {
        assert!(same(&group.options[&Key::from("lr")], &float(0.7)));
    }
    let given = OptimizerState {
        param_groups: vec![
            group(vec!["a.weight".into()], &[("lr", float(0.7))]),
            group(vec!["a.bias".into()], &[("lr", float(0.8))]),
        ],
        ..Default::default()
    };
    let error = set_optimizer_state(given, &[live(&[&[1, 2]])], &names, &options).unwrap_err().to_string();
    assert!(error.contains("'lr' is 0.7 for 'a.weight' and 0.8 for 'a.bias'"), "{error}");
}

#[test]
fn live_options_are_never_removed_and_unknown_ones_are_kept() {
    let names = names();
    let mut optimizer = live(&[&[1]]);
    optimizer.param_groups[0].options.insert(Key::from("fused"), Tree::Value(Value::Bool(true)));
    let given = OptimizerState {
        param_groups: vec![group(vec!["a.weight".into()], &[("lr", float(0.7)), ("my_own", text("kept"))])],
        ..Default::default()
    };
    let (loads, _) = set_optimizer_state(given, &[optimizer], &names, &StateDictOptions::default()).unwrap();
    let options = &loads[0].param_groups[0].options;
    assert!(options.contains_key(&Key::from("fused")) && options.contains_key(&Key::from("my_own")));
    assert!(same(&options[&Key::from("lr")], &float(0.7)));
}

#[test]
fn empty_groups_come_back_with_their_options() {
    let names = names();
    let given = OptimizerState {
        param_groups: vec![
            group(vec![], &[("lr", float(0.1)), ("betas", Tree::Tuple(vec![float(0.9), float(0.95)]))]),
            group(vec!["a.weight".into()], &[("lr", float(0.2))]),
            group(vec![], &[("lr", float(0.3))]),
        ],
        ..Default::default()
    };
    let live = live(&[&[1], &[], &[]]);
    let (loads, report) = set_optimizer_state(given, &[live], &names, &StateDictOptions::default()).unwrap();
    let lr = |at: usize| loads[0].param_groups[at].options[&Key::from("lr")].clone();
    assert!(same(&lr(0), &float(0.2)) && same(&lr(1), &float(0.1)) && same(&lr(2), &float(0.3)));
    assert!(loads[0].param_groups[1].options.contains_key(&Key::from("betas")));
    assert!(report.unmatched_groups.is_empty());
}

#[test]
fn empty_groups_that_can_not_be_told_apart_keep_what_they_have() {
    let given = OptimizerState {
        param_groups: vec![group(vec![], &[("lr", float(0.1))]), group(vec![], &[("lr", float(0.2))])],
        ..Default::default()
    };
    let live = live(&[&[]]);
    let (loads, report) = set_optimizer_state(given, &[live], &names(), &StateDictOptions::default()).unwrap();
    assert_eq!(report.unmatched_groups, [(0, 0)]);
    assert!(same(&loads[0].param_groups[0].options[&Key::from("lr")], &float(0.5)));
}

#[test]
fn integer_keys_are_read_for_one_optimizer_made_the_same_way() {
    let names = names();
    let given = raw(&[(1, adam_slots(&[2], 0.0, 1.0))], vec![group(ids(&[0, 1]), &[("lr", float(0.1))])]);
    let read = read_optimizer_state(given.clone(), &[live(&[&[3, 1]])], &names).unwrap();
    assert_eq!(read.state.keys().collect::<Vec<_>>(), ["a.weight"]);
    let other = read_optimizer_state(given.clone(), &[live(&[&[3], &[1]])], &names).unwrap_err().to_string();
    assert!(other.contains("[2]") && other.contains("[1, 1]"), "{other}");
    assert!(read_optimizer_state(given, &[live(&[&[3, 1]]), live(&[&[2]])], &names).is_err());
}

#[test]
fn ids_that_became_digits_are_ids_still() {
    let given = RawOptimizer {
        state: [(Key::from("1"), adam_slots(&[2], 0.0, 1.0))].into_iter().collect(),
        param_groups: vec![group(ids(&[0, 1]), &[])],
        ..Default::default()
    };
    let read = read_optimizer_state(given, &[live(&[&[3, 1]])], &names()).unwrap();
    assert_eq!(read.state.keys().collect::<Vec<_>>(), ["a.weight"]);
}

#[test]
fn ids_with_names_beside_them_go_by_the_names() {
    let listed = |names: &[&str]| Tree::List(names.iter().map(|name| text(name)).collect());
    let given = raw(
        &[(0, adam_slots(&[2], 0.0, 1.0))],
        vec![group(ids(&[0, 1]), &[("param_names", listed(&["module.b.bias", "a.bias"]))])],
    );
    let read = read_optimizer_state(given, &[live(&[&[1, 2, 3, 4]])], &names()).unwrap();
    assert_eq!(read.state.keys().collect::<Vec<_>>(), ["b.bias"]);
    assert_eq!(read.param_groups[0].params, ["b.bias", "a.bias"]);
}

#[test]
fn user_defined_state_is_carried_through() {
    let names = names();
    let given = RawOptimizer {
        state: [
            (Key::Int(0), adam_slots(&[2], 0.0, 1.0)),
            (Key::from("global_scale"), tensor(Host::scalar(8.0))),
            (Key::from("mine"), Tree::dict_of([("x", int(1))])),
        ]
        .into_iter()
        .collect(),
        param_groups: vec![group(ids(&[0]), &[])],
        ..Default::default()
    };
    let optimizer = live(&[&[1]]);
    let state = by_names(given.clone(), &optimizer, &names).unwrap();
    assert_eq!(state.user_state.len(), 2);
    let (loads, _) = set_optimizer_state(state, std::slice::from_ref(&optimizer), &names, &Default::default()).unwrap();
    let raw = loads.into_iter().next().unwrap().into_raw();
    assert!(raw.state.contains_key(&Key::from("global_scale")) && raw.state.contains_key(&Key::from("mine")));
}

fn shampoo() -> Leaf {
    let factors =
        Tree::dict_of([(Key::Int(0), tensor(Host::ramp(&[2, 2], 0.0))), (Key::Int(1), tensor(Host::ramp(&[2, 2], 4.0)))]);
    let block = Tree::dict_of([("factors", factors), ("scale", float(0.5))]);
    Tree::dict_of([("step", tensor(Host::scalar(3.0))), ("block_0", block)])
}

#[test]
fn nested_slots_with_keys_that_are_no_strings_survive_both_forms() {
    let names = names();
    let optimizer = live(&[&[1]]);
    let given = raw(&[(0, shampoo())], vec![group(ids(&[0]), &[("lr", float(0.1))])]);
    let state = by_names(given, &optimizer, &names).unwrap();
    let flat = flatten_optimizer(&state).unwrap();
    assert!(flat.contains_key("state.a.weight.block_0.factors.1"));
    assert!(flat.contains_key("param_groups.a.weight.lr"));
    let (back, left) = unflatten_optimizer(&flat, &[optimizer], &names).unwrap();
    assert_eq!(left, Leftovers::default());
    assert!(same(&back.into_tree(), &state.into_tree()));
}

#[test]
fn keys_of_every_kind_come_back_as_they_were() {
    let pair = Key::Other(Value::Tuple(vec![Value::Int(0_i64.into()), Value::Int(1_i64.into())]));
    let keys = [
        Key::Int(-3),
        Key::from("7"),
        pair,
        Key::Other(Value::Float(1.5)),
        Key::Int(1),
        Key::from("1.5.2"),
        Key::Other(Value::None),
        Key::Other(Value::Bool(true)),
        Key::from("with.a.dot"),
        Key::from(""),
    ];
    let nested: Dict<Host> = keys.iter().zip(0..).map(|(key, n)| (key.clone(), Tree::dict_of([("x", int(n))]))).collect();
    let slots: Dict<Host> = [(Key::from("blocks"), Tree::Dict(nested))].into_iter().collect();
    let state = OptimizerState {
        state: [("a.weight".to_owned(), slots)].into_iter().collect(),
        param_groups: vec![group(vec!["a.weight".to_owned()], &[("lr", float(0.1))])],
        ..Default::default()
    };
    let flat = flatten_optimizer(&state).unwrap();
    let (back, left) = unflatten_optimizer(&flat, &[live(&[&[1]])], &names()).unwrap();
    assert_eq!(left, Leftovers::default());
    assert!(same(&back.into_tree(), &state.clone().into_tree()));

    // Through the nested form's paths, which know text only.
    let tree = state.into_tree();
    let Tree::Dict(root) = tree.clone() else { panic!("not a dict") };
    let types = KeyTypes::of(&root);
    let types = KeyTypes::from_value(&types.to_value()).unwrap();
    let text = unflatten_entries(leaves(&root, &[])).unwrap();
    assert!(!same(&Tree::Dict(text.clone()), &tree));
    assert!(same(&Tree::Dict(types.restore(text)), &tree));
    assert!(KeyTypes::from_value(&Value::Int(1_i64.into())).is_none());
}

#[test]
fn nested_user_defined_state_survives_the_flattened_form() {
    let names = names();
    let optimizer = live(&[&[1]]);
    let own = Tree::dict_of([("scale", float(8.0)), ("history", Tree::dict_of([(Key::Int(4), int(1))]))]);
    let mut given = raw(&[(0, adam_slots(&[2], 0.0, 1.0))], vec![group(ids(&[0]), &[("lr", float(0.1))])]);
    given.state.insert(Key::from("scaler"), own.clone());
    given.state.insert(Key::Int(-1), int(5));
    let state = by_names(given, &optimizer, &names).unwrap();
    let mut flat = flatten_optimizer(&state).unwrap();
    // Another stage of a pipeline: its slots are nobody's here, and no user's own either.
    flat.insert("state.stage_1.weight.step".into(), float(1.0));
    flat.insert("param_groups.stage_1.weight.lr".into(), float(0.1));
    let (back, left) = unflatten_optimizer(&flat, &[optimizer], &names).unwrap();
    assert_eq!(left.unexpected, ["state.stage_1.weight.step", "param_groups.stage_1.weight.lr"]);
    assert!(same(&back.user_state[&Key::from("scaler")], &own));
    assert!(same(&back.into_tree(), &state.into_tree()));
}

#[test]
fn every_optimizer_gets_its_own_user_defined_state_back() {
    let names = names();
    let (first, second) = (live(&[&[1, 2]]), live(&[&[3], &[4]]));
    let make = |members: &[&[i64]], scale: f64| {
        let groups = members.iter().map(|members| group(ids(members), &[("lr", float(0.1))])).collect();
        let mut raw = raw(&[(0, adam_slots(&[2], 0.0, 1.0))], groups);
        raw.state.insert(Key::from("scaler"), Tree::dict_of([("scale", float(scale))]));
        raw
    };
    let (one, two) = (make(&[&[0, 1]], 2.0), make(&[&[0], &[1]], 4.0));
    let parts = vec![by_names(one, &first, &names).unwrap(), by_names(two, &second, &names).unwrap()];
    let combined = combine(parts).unwrap();
    let optimizers = [second, first];
    let nested = RawOptimizer::from_tree(combined.clone().into_tree()).unwrap();
    let nested = OptimizerState::from_named(nested, &names).unwrap();
    let (flat, left) = unflatten_optimizer(&flatten_optimizer(&combined).unwrap(), &optimizers, &names).unwrap();
    assert_eq!(left, Leftovers::default());
    for given in [combined.clone(), nested, flat] {
        let (loads, _) = set_optimizer_state(given, &optimizers, &names, &Default::default()).unwrap();
        let scales: Vec<_> = loads.iter().map(|load| load.user_state[&Key::from("scaler")].clone()).collect();
        assert!(same(&scales[0], &Tree::dict_of([("scale", float(4.0))])));
        assert!(same(&scales[1], &Tree::dict_of([("scale", float(2.0))])));
    }
    let strict = StateDictOptions::default();
    let (loads, report) = set_optimizer_state(combined, &optimizers[..1], &names, &strict).unwrap();
    assert_eq!(loads.len(), 1);
    assert!(report.unexpected.contains(&"user_state.a.weight".to_owned()), "{:?}", report.unexpected);
}

#[test]
fn members_that_disagree_in_the_flattened_form_are_named() {
    let flat: FlattenedOptimizer<Host> =
        [("param_groups.a.weight.lr".to_owned(), float(0.1)), ("param_groups.a.bias.lr".to_owned(), float(0.2))]
            .into_iter()
            .collect();
    let error = unflatten_optimizer(&flat, &[live(&[&[1, 2]])], &names()).unwrap_err().to_string();
    assert!(error.contains("'lr' is 0.1 for 'a.weight' and 0.2 for 'a.bias'"), "{error}");
}

#[test]
fn what_the_flattened_form_has_too_much_or_too_little_is_reported() {
    let flat: FlattenedOptimizer<Host> = [
        ("state.gone.weight.step".to_owned(), float(1.0)),
        ("param_groups.gone.weight.lr".to_owned(), float(0.1)),
        ("state.scale".to_owned(), float(2.0)),
        ("param_groups.a.weight.lr".to_owned(), float(0.1)),
    ]
    .into_iter()
    .collect();
    let (state, left) = unflatten_optimizer(&flat, &[live(&[&[1, 2]])], &names()).unwrap();
    assert_eq!(left.unexpected, ["state.gone.weight.step", "param_groups.gone.weight.lr"]);
    assert_eq!(left.missing, ["a.bias"]);
    assert!(state.user_state.contains_key(&Key::from("scale")));
}

#[test]
fn a_missing_parameter_is_an_error_when_strict_and_a_report_otherwise() {
    let listed = || vec![group(vec!["a.weight".into()], &[])];
    let given = || {
        let Tree::Dict(slots) = adam_slots(&[2], 0.0, 1.0) else { panic!("slots are a dict") };
        let state = [("a.weight".to_owned(), slots)].into_iter().collect();
        OptimizerState { state, param_groups: listed(), ..Default::default() }
    };
    let live = live(&[&[1, 2]]);
    let strict = set_optimizer_state::<Host>(given(), std::slice::from_ref(&live), &names(), &Default::default());
    assert!(strict.unwrap_err().to_string().contains("'a.bias'"));
    let lenient = StateDictOptions { strict: false, ..Default::default() };
    let (_, report) = set_optimizer_state::<Host>(given(), std::slice::from_ref(&live), &names(), &lenient).unwrap();
    assert_eq!((report.missing, report.absent), (vec!["a.bias".to_owned()], vec![]));
    // An optimizer that had not run has nothing that could be missing, if it is this one at all.
    let fresh = OptimizerState { param_groups: listed(), ..Default::default() };
    let (_, report) = set_optimizer_state::<Host>(fresh, std::slice::from_ref(&live), &names(), &Default::default()).unwrap();
    assert_eq!((report.missing, report.absent), (vec![], vec!["a.weight".to_owned(), "a.bias".to_owned()]));
    let other = OptimizerState { param_groups: vec![group(vec!["b.weight".into()], &[])], ..Default::default() };
    let strict = set_optimizer_state::<Host>(other, &[live], &names(), &Default::default());
    assert!(strict.unwrap_err().to_string().contains("'a.weight'"));
}

#[test]
fn rekeying_needs_to_know_every_parameter() {
    let given = raw(&[(0, adam_slots(&[2], 0.0, 1.0))], vec![group(ids(&[0, 1]), &[])]);
    let mapping = [(Key::Int(0), Key::from("b")), (Key::Int(1), Key::from("a"))].into_iter().collect();
    let rekeyed = rekey(given.clone(), &mapping).unwrap();
    assert_eq!(rekeyed.param_groups[0].params, [Key::from("a"), Key::from("b")]);
    assert!(rekeyed.state.contains_key(&Key::from("b")));
    let short = [(Key::Int(0), Key::from("b"))].into_iter().collect();
    assert!(rekey(given, &short).is_err());
}
