//! Trees: flattening by DCP's rules and back, renames, merges, templates.

use reshard_formats::{KeyPath, PathSegment, Value};
use reshard_state::*;

use crate::host::{Host, Leaf, float, int, same, tensor, text};

fn root(tree: Leaf) -> Dict<Host> {
    match tree {
        Tree::Dict(dict) => dict,
        other => panic!("{other:?}"),
    }
}

fn one() -> Leaf {
    tensor(Host::scalar(1.0))
}

fn keys(flat: &Flat<Host>) -> Vec<&str> {
    flat.keys().map(String::as_str).collect()
}

#[test]
fn dicts_are_opened_lists_only_for_tensors_and_dicts_tuples_never() {
    let tree = root(Tree::dict_of([
        ("plain", Tree::List(vec![int(1), int(2)])),
        ("tensors", Tree::List(vec![int(7), one()])),
        ("deep", Tree::List(vec![Tree::List(vec![int(1)]), Tree::List(vec![one()])])),
        ("dicts", Tree::List(vec![Tree::dict_of([("a", int(1))]), int(2)])),
        ("tuple", Tree::Tuple(vec![one(), int(1)])),
        ("nested", Tree::dict_of([("a", Tree::dict_of([("b", int(5))]))])),
        ("empty_list", Tree::List(vec![])),
        ("empty_dict", Tree::dict()),
        ("none", Tree::Value(Value::None)),
    ]));
    let flat = flatten(tree).unwrap();
    assert_eq!(
        keys(&flat),
        [
            "plain",
            "tensors.0",
            "tensors.1",
            "deep.0",
            "deep.1.0",
            "dicts.0.a",
            "dicts.1",
            "tuple",
            "nested.a.b",
            "empty_list",
            "none"
        ]
    );
    assert_eq!(flat["deep.1.0"].path, vec![PathSegment::from("deep"), PathSegment::Index(1), PathSegment::Index(0)]);
    assert!(matches!(flat["deep.0"].leaf, Tree::List(_)));
    assert!(matches!(flat["tuple"].leaf, Tree::Tuple(_)));
}

#[test]
fn before_2_4_a_dict_without_tensors_is_one_leaf() {
    let tree = root(Tree::dict_of([
        ("config", Tree::dict_of([("a", Tree::dict_of([("b", int(5))]))])),
        ("model", Tree::dict_of([("w", one()), ("n", int(1))])),
    ]));
    let flat = flatten_by(tree, FlattenRules::V2_3).unwrap();
    assert_eq!(keys(&flat), ["config", "model.w", "model.n"]);
}

#[test]
fn keys_that_are_no_strings_flatten_to_their_text() {
    let tree = root(Tree::dict_of([(
        Key::from("state"),
        Tree::dict_of([
            (Key::Int(3), Tree::dict_of([(Key::Other(Value::Bool(true)), one())])),
            (Key::Other(Value::Tuple(vec![Value::from(1_i64), Value::from("x")])), int(2)),
        ]),
    )]));
    let flat = flatten(tree.clone()).unwrap();
    assert_eq!(keys(&flat), ["state.3.True", "state.(1, 'x')"]);
    // A live tree gives the keys their types back.
    let back = Tree::Dict(unflatten(flat).unwrap());
    assert!(!same(&back, &Tree::Dict(tree.clone())));
    let typed = back.with_key_types_of(&Tree::Dict(tree.clone()));
    assert!(same(&typed, &Tree::Dict(tree)));
}

#[test]
fn two_leaves_with_one_key_are_an_error_that_names_both() {
    let tree = root(Tree::dict_of([("a", Tree::dict_of([("b", int(1))])), ("a.b", int(2))]));
    let error = flatten(tree).unwrap_err().to_string();
    assert!(error.contains("'a.b'") && error.contains("['a', 'b']") && error.contains("['a.b']"), "{error}");
}

#[test]
fn a_plain_value_that_is_a_container_obeys_the_same_rules() {
    let value = Value::Dict(vec![(Value::from("x"), Value::List(vec![Value::Dict(vec![(Value::from(1_i64), Value::None)])]))]);
    let flat: Flat<Host> = flatten(root(Tree::dict_of([("v", Tree::Value(value))]))).unwrap();
    assert_eq!(keys(&flat), ["v.x.0.1"]);
}

#[test]
fn unflatten_fills_gaps_with_none_and_refuses_absurd_ones() {
    let path = |index: i64| -> KeyPath { vec![PathSegment::from("a"), PathSegment::Index(index)] };
    let tree: Dict<Host> = unflatten_entries([("a.2".to_owned(), path(2), int(5))]).unwrap();
    let Tree::List(items) = &tree[&Key::from("a")] else { panic!() };
    assert!(items.len() == 3 && matches!(items[0], Tree::Value(Value::None)));
    for index in [1 << 40, i64::MAX] {
        let error = unflatten_entries::<Host>([("a".to_owned(), path(index), int(5))]).unwrap_err();
        assert!(matches!(error, StateError::SparseList { .. }), "{error}");
    }
    let error = unflatten_entries::<Host>([("a".to_owned(), path(-1), int(5))]).unwrap_err();
    assert!(matches!(error, StateError::PathConflict { .. }));
}

#[test]
fn paths_that_do_not_fit_together_are_errors_that_name_the_key() {
    let path = |parts: &[&str]| -> KeyPath { parts.iter().map(|part| PathSegment::from(*part)).collect() };
    let cases: [(KeyPath, KeyPath); 3] = [
        (path(&["a"]), path(&["a", "b"])),
        (path(&["a", "b"]), path(&["a"])),
        (vec![PathSegment::from("a"), PathSegment::Index(0)], path(&["a", "b"])),
    ];
    for (first, second) in cases {
        let entries = [("first".to_owned(), first, int(1)), ("second".to_owned(), second, int(2))];
        let error = unflatten_entries::<Host>(entries).unwrap_err().to_string();
        assert!(error.contains("'second'"), "{error}");
    }
    let error = unflatten_entries::<Host>([("x".to_owned(), KeyPath::new(), int(1))]).unwrap_err();
    assert!(matches!(error, StateError::PathConflict { .. }));
}

#[test]
fn depth_is_bounded() {
    let mut tree = int(1);
    for _ in 0..MAX_DEPTH + 2 {
        tree = Tree::dict_of([("a", tree)]);
    }
    assert!(matches!(flatten(root(tree)), Err(StateError::TooDeep { .. })));
}

#[test]
fn renames_change_keys_and_paths_and_name_collisions() {
    let tree = root(Tree::dict_of([("model", Tree::dict_of([("layers.0.w", one()), ("layers.1.w", one())]))]));
    let flat = flatten(tree).unwrap();
    let renamed = Renames::new().prefix("model.layers", "model.blocks").apply_to(flat.clone()).unwrap();
    let nested = unflatten(renamed).unwrap();
    assert!(nested[&Key::from("model")].get("blocks.0.w").is_some());
    let collide = Renames::new().key("model.layers.0.w", "model.layers.1.w").apply_to(flat).unwrap_err();
    assert!(collide.to_string().contains("'model.layers.1.w'"), "{collide}");
}

#[test]
fn filter_keeps_what_is_chosen() {
    let flat = flatten(root(Tree::dict_of([("a", int(1)), ("b", one())]))).unwrap();
    let kept = filter(flat, |_, leaf| leaf.leaf.has_tensor());
    assert_eq!(keys(&kept), ["b"]);
}

#[test]
fn merge_joins_dicts_and_names_every_conflict() {
    let a = root(Tree::dict_of([("model", Tree::dict_of([("x", one()), ("n", int(1))]))]));
    let b = root(Tree::dict_of([("model", Tree::dict_of([("y", one()), ("n", int(1))])), ("step", int(3))]));
    let merged = merge([("a".to_owned(), a.clone()), ("b".to_owned(), b)], |a, b| a == b).unwrap();
    assert_eq!(merged[&Key::from("model")].as_dict().unwrap().len(), 3);
    let c = root(Tree::dict_of([("model", Tree::dict_of([("x", tensor(Host::scalar(2.0))), ("n", text("1"))]))]));
    let error = merge([("rank 0".to_owned(), a), ("rank 1".to_owned(), c)], |a, b| a == b).unwrap_err();
    let StateError::MergeConflicts { conflicts } = &error else { panic!("{error}") };
    assert_eq!(conflicts.len(), 2);
    assert!(error.to_string().contains("'model.x' is in both rank 0 and rank 1"), "{error}");
}

#[test]
fn a_leaf_of_the_template_yields_to_a_container_of_the_checkpoint_and_the_other_way_round() {
    let template = root(Tree::dict_of([
        ("list", Tree::List(vec![int(1)])),
        ("whole", Tree::dict_of([("a", one()), ("b", one())])),
        ("gone", float(1.0)),
    ]));
    let list: KeyPath = vec![PathSegment::from("list"), PathSegment::Index(0)];
    let whole: KeyPath = vec![PathSegment::from("whole")];
    let extra: KeyPath = vec![PathSegment::from("extra")];
    let checkpoint = [("list.0", &list), ("whole", &whole), ("extra", &extra)];
    let found = match_template(&template, checkpoint, FlattenRules::Current).unwrap();
    assert_eq!(found.by_checkpoint, ["list.0", "whole"]);
    assert_eq!(found.replaced, ["list", "whole.a", "whole.b"]);
    assert_eq!(found.missing, ["gone"]);
    assert_eq!(found.unexpected, ["extra"]);
}
