//! Names, options and the model's part of the calls.

use indexmap::IndexMap;
use reshard_formats::DType;
use reshard_state::*;

fn linear(weight: u64, bias: u64) -> ModuleTree {
    ModuleTree::new().parameter("weight", Parameter::new(weight)).parameter("bias", Parameter::new(bias))
}

fn model() -> ModuleTree {
    ModuleTree::new()
        .child("up", linear(1, 2))
        .child("norm", ModuleTree::new().buffer("scale", 10, true).buffer("cache", 11, false).with_extra_state())
        .child("down", linear(3, 4))
}

fn keys(model: &ModuleTree, options: &StateDictOptions) -> Vec<String> {
    get_model_state(model, &[], options).unwrap().entries.into_keys().collect()
}

#[test]
fn a_ddp_child_called_module_is_hidden_and_a_users_own_is_not() {
    let wrapped = ModuleTree::new().child("module", linear(1, 2)).wrapped(Wrapper::Ddp);
    let names = Names::of(&wrapped).unwrap();
    assert!(names.get("module.weight").is_some());
    assert_eq!(names.get("module.weight").unwrap().raw, "module.module.weight");
    assert_eq!(names.canonical("module.module.weight"), ["module.weight"]);
}

#[test]
fn name_modifiers_hide_an_attribute() {
    let modifiers: IndexMap<String, String> = [("inner".to_owned(), "_wrapped".to_owned())].into_iter().collect();
    let tree = ModuleTree::new().child("_wrapped", linear(1, 2)).wrapped(Wrapper::Custom(modifiers));
    let tree = ModuleTree::new().child("block", tree).wrapped(Wrapper::Fsdp2).wrapped(Wrapper::Compiled);
    assert_eq!(keys(&tree, &StateDictOptions::default()), ["block.weight", "block.bias"]);
}

#[test]
fn a_wrapper_without_what_it_wraps_is_refused() {
    let broken = ModuleTree { wrapper: Wrapper::Ddp, ..ModuleTree::new() };
    assert!(matches!(Names::of(&broken), Err(StateError::InvalidModule { .. })));
}

#[test]
fn two_different_things_with_one_name_are_refused() {
    let tree = ModuleTree::new()
        .child("_orig_mod", ModuleTree::new().parameter("w", Parameter::new(1)))
        .parameter("w", Parameter::new(2));
    let tree = ModuleTree { wrapper: Wrapper::Compiled, ..tree };
    let error = Names::of(&tree).unwrap_err().to_string();
    assert!(error.contains("'_orig_mod.w'"), "{error}");
}

#[test]
fn submodules_keep_or_drop_their_prefixes() {
    let tree = model().wrapped(Wrapper::Ddp);
    let keep = get_model_state(&tree, &["up"], &StateDictOptions::default()).unwrap();
    assert_eq!(keep.entries.keys().collect::<Vec<_>>(), ["up.weight", "up.bias"]);
    let drop = StateDictOptions { keep_submodule_prefixes: false, ..Default::default() };
    let dropped = get_model_state(&tree, &["module.up"], &drop).unwrap();
    assert_eq!(dropped.entries.keys().collect::<Vec<_>>(), ["weight", "bias"]);
    assert_eq!(dropped.entries["weight"].name, "up.weight");
    let error = get_model_state(&tree, &["up", "down"], &drop).unwrap_err();
    assert!(matches!(&error, StateError::PrefixConflict { key, .. } if key == "weight"), "{error}");
    assert!(matches!(get_model_state(&tree, &["side"], &drop), Err(StateError::UnknownName { .. })));
}

#[test]
fn frozen_parameters_are_left_out_when_asked_and_then_not_missed() {
    let mut tree = model();
    tree.children["up"].parameters["weight"].requires_grad = false;
    let options = StateDictOptions { ignore_frozen_params: true, ..Default::default() };
    let trained = keys(&tree, &options);
    assert!(!trained.contains(&"up.weight".to_owned()) && trained.contains(&"up.bias".to_owned()));
    let set = set_model_state(&tree, trained.iter().map(String::as_str), |_| None, &options).unwrap();
    assert!(set.differences.is_empty());
    let strict = set_model_state(&tree, trained.iter().map(String::as_str), |_| None, &StateDictOptions::default());
    assert!(strict.unwrap_err().to_string().contains("'up.weight'"));
}

#[test]
fn differences_come_all_at_once_with_hints() {
    let tree = model();
    let given = ["up.weight", "up.biass", "norm.scale", "norm._extra_state", "down.weight", "down.bias", "other"];
    let error = set_model_state(&tree, given, |_| None, &StateDictOptions::default()).unwrap_err().to_string();
    assert!(error.contains("'up.bias' (there is 'up.biass')") && error.contains("'other'"), "{error}");
    let lenient = StateDictOptions { strict: false, ..Default::default() };
    let set = set_model_state(&tree, given, |_| None, &lenient).unwrap();
    assert_eq!(set.differences.missing, ["up.bias"]);
    assert_eq!(set.differences.unexpected, ["up.biass", "other"]);
    assert_eq!(set.assignments.len(), 5);
}

#[test]
fn shapes_and_dtypes_never_fit_by_leniency() {
    let facts = TensorFacts::new(DType::Float32, &[2, 3]);
    let tree = ModuleTree::new()
        .parameter("a", Parameter::new(1).with_facts(facts.clone()))
        .parameter("b", Parameter::new(2).with_facts(facts));
    let given = |key: &str| match key {
        "a" => Some(TensorFacts::new(DType::Float32, &[3, 2])),
        _ => Some(TensorFacts::new(DType::BFloat16, &[2, 3])),
    };
    let lenient = StateDictOptions { strict: false, ..Default::default() };
    let error = set_model_state(&tree, ["a", "b"], given, &lenient).unwrap_err().to_string();
    assert!(error.contains("[3, 2]") && error.contains("bfloat16"), "{error}");
}

#[test]
fn flat_parameters_have_no_key_of_their_own() {
    let error = set_model_state(&model(), ["up._flat_param"], |_| None, &StateDictOptions::default()).unwrap_err();
    assert!(error.to_string().contains("_flat_param"), "{error}");
}

#[test]
fn options_obey_their_rules() {
    let options = StateDictOptions::default();
    assert!(options.check().is_ok());
    assert_eq!(options.recipients(), Recipients::Own);
    let alone = StateDictOptions { broadcast_from_rank0: true, ..options.clone() };
    assert!(matches!(alone.check(), Err(StateError::InvalidOptions { .. })));
    let full = StateDictOptions { full_state_dict: true, ..options.clone() };
    assert_eq!(full.recipients(), Recipients::All);
    let offloaded = StateDictOptions { cpu_offload: true, ..full.clone() };
    assert_eq!(offloaded.recipients(), Recipients::Ranks(vec![0]));
    assert!(!offloaded.recipients().includes(1));
    let chosen = StateDictOptions { full_state_dict_ranks: Some(vec![2]), ..full.clone() };
    assert!(chosen.recipients().includes(2));
    let nowhere = StateDictOptions { full_state_dict_ranks: Some(vec![2]), ..options.clone() };
    assert!(nowhere.check().is_err());
    // What may be empty when it is set, and what may not.
    assert!(matches!(options.check_given(Some(0), None, false), Err(StateError::Empty { what: "model" })));
    assert!(matches!(options.check_given(None, Some(0), false), Err(StateError::Empty { what: "optimizer" })));
    assert!(StateDictOptions { strict: false, ..options.clone() }.check_given(Some(0), None, false).is_ok());
    let elsewhere = StateDictOptions { broadcast_from_rank0: true, ..full };
    assert!(elsewhere.check_given(Some(0), Some(0), false).is_ok());
    assert!(options.check_given(Some(0), None, true).is_ok());
}
