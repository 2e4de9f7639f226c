//! Trees: flattening by DCP's rules and back.

use reshard_formats::{KeyPath, PathSegment, Value};
use reshard_state::*;

use crate::host::{Host, Leaf, int, tensor};

fn root(tree: Leaf) -> Dict<Host> {
    match tree {
        Tree::Dict(dict) => dict,
        other => panic!("{other:?}"),
    }
}

fn one() -> Leaf {
    tensor(Host::scalar(1.0))
}

fn keys(flat: &Flattened<Host>) -> Vec<&str> {
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
fn two_leaves_with_one_key_are_an_error_that_names_both() {
    let tree = root(Tree::dict_of([("a", Tree::dict_of([("b", int(1))])), ("a.b", int(2))]));
    let error = flatten(tree).unwrap_err().to_string();
    assert!(error.contains("'a.b'") && error.contains("['a', 'b']") && error.contains("['a.b']"), "{error}");
}

#[test]
fn a_plain_value_that_is_a_container_obeys_the_same_rules() {
    let value = Value::Dict(vec![(Value::from("x"), Value::List(vec![Value::Dict(vec![(Value::from(1_i64), Value::None)])]))]);
    let flat: Flattened<Host> = flatten(root(Tree::dict_of([("v", Tree::Value(value))]))).unwrap();
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
    let deep: KeyPath = (0..=MAX_DEPTH).map(|_| PathSegment::from("a")).collect();
    assert!(matches!(unflatten_entries::<Host>([("a".to_owned(), deep, int(1))]), Err(StateError::TooDeep { .. })));
}
