//! Slots that only a checkpoint knows, and who sends what of a full state.

use indexmap::IndexMap;
use reshard_formats::{DType, KeyPath, PathSegment};
use reshard_layout::{Dims, Mesh, Placement};
use reshard_state::*;

fn path(parts: &[&str]) -> KeyPath {
    parts.iter().map(|part| PathSegment::from(*part)).collect()
}

fn params() -> IndexMap<String, Dims> {
    [("a.weight".to_owned(), Dims::from_slice(&[8, 4])), ("a.bias".to_owned(), Dims::from_slice(&[8]))].into_iter().collect()
}

fn planned(parts: &[&str], shape: Option<&[u64]>) -> PlannedSlot {
    plan_slots(&params(), [StoredSlot { path: &path(parts), shape }]).slots.remove(0)
}

#[test]
fn every_slot_gets_the_layout_of_its_parameter() {
    let slot = |name: &str, slot: &str, shape: &[u64]| planned(&["state", name, slot], Some(shape));
    let by = |name: &str, by_parameter| PlannedSlot { param: Some(name.to_owned()), by_parameter };
    assert_eq!(slot("a.weight", "exp_avg", &[8, 4]), by("a.weight", true));
    assert_eq!(slot("a.bias", "exp_avg", &[8]), by("a.bias", true));
    assert_eq!(slot("a.weight", "step", &[]), by("a.weight", false));
    // Another shape than the parameter's: whole.
    assert_eq!(slot("a.weight", "row", &[8]), by("a.weight", false));
    // A value belongs to whoever reads it.
    assert_eq!(planned(&["param_groups", "0", "lr"], None), PlannedSlot::default());
    assert_eq!(planned(&["state", "a.weight", "note"], None), PlannedSlot::default());
}

#[test]
fn parameters_that_the_model_lacks_are_named_once() {
    let paths = [path(&["state", "gone.weight", "exp_avg"]), path(&["state", "gone.weight", "step"])];
    let plan = plan_slots(&params(), paths.iter().map(|path| StoredSlot { path, shape: Some(&[5, 2]) }));
    assert_eq!(plan.unknown_params, ["gone.weight"]);
    assert!(plan.slots.iter().all(|slot| slot.param.as_deref() == Some("gone.weight") && !slot.by_parameter));
}

#[test]
fn an_optimizer_that_was_saved_flattened_is_read_too() {
    let slot = planned(&["state.a.weight.exp_avg"], Some(&[8, 4]));
    assert_eq!(slot, PlannedSlot { param: Some("a.weight".to_owned()), by_parameter: true });
    // The longest known name counts; what follows is the slot, however it is nested.
    assert_eq!(planned(&["state.a.weight.block.0.factor"], Some(&[4, 4])).param.as_deref(), Some("a.weight"));
    assert_eq!(planned(&["state.other.scale"], Some(&[4, 4])).param.as_deref(), Some("other"));
    assert_eq!(planned(&["param_groups.a.weight.lr"], Some(&[])).param, None);
}

#[test]
fn a_full_state_is_gathered_tensor_by_tensor_from_one_holder_per_region() {
    // Two copies of two shards: the copies share the sending.
    let mesh = Mesh::new(&[2, 2]).unwrap();
    let placements = [Placement::Replicate, Placement::Shard(0)];
    let tensor = |key: &str| HeldTensor::placed(key, DType::Float32, &mesh, &placements, &[5, 2]).unwrap();
    let plan = gather_plan(vec![tensor("a"), tensor("b")], Recipients::Ranks(vec![0])).unwrap();
    assert_eq!(plan.peak_bytes, 40);
    let senders = |step: usize| -> Vec<u64> { plan.steps[step].from.iter().map(|part| part.rank).collect() };
    assert_eq!((senders(0), senders(1)), (vec![0, 1], vec![2, 3]));
    let rows: Vec<String> = plan.steps[0].from.iter().map(|part| part.region.to_string()).collect();
    assert_eq!(rows, ["[0:3, 0:2]", "[3:5, 0:2]"]);
    // What nobody holds is named before anything moves.
    let mut torn = tensor("torn");
    torn.held.retain(|(rank, _)| *rank % 2 == 0);
    let error = gather_plan(vec![torn], Recipients::All).unwrap_err().to_string();
    assert!(error.contains("'torn'") && error.contains("3:5"), "{error}");
}
