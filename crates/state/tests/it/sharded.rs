//! Loading optimizer state by the model's own layout.

use indexmap::IndexMap;
use reshard_formats::{DType, KeyPath, PathSegment};
use reshard_layout::{Dims, Mesh, Placement, Region};
use reshard_state::*;

fn path(parts: &[&str]) -> KeyPath {
    parts.iter().map(|part| PathSegment::from(*part)).collect()
}

struct Checkpoint(Vec<(String, KeyPath, EntryFacts)>);

impl Checkpoint {
    fn new() -> Checkpoint {
        let mut all = Checkpoint(Vec::new());
        for (name, shape) in [("a.weight", &[8, 4][..]), ("a.bias", &[8][..])] {
            all.add(&["optim", "state", name, "exp_avg"], Some(shape));
            all.add(&["optim", "state", name, "step"], Some(&[]));
        }
        all.add(&["optim", "state", "a.weight", "row"], Some(&[8]));
        all.add(&["optim", "param_groups", "0", "lr"], None);
        all.add(&["optim", "state", "gone.weight", "exp_avg"], Some(&[5, 2]));
        all.add(&["model", "a.weight"], Some(&[8, 4]));
        all
    }

    fn add(&mut self, parts: &[&str], shape: Option<&[u64]>) {
        let facts = match shape {
            Some(shape) => EntryFacts::Tensor { dtype: DType::Float32, shape: Dims::from_slice(shape) },
            None => EntryFacts::Bytes,
        };
        self.0.push((parts.join("."), path(parts), facts));
    }

    fn entries(&self) -> impl Iterator<Item = CheckpointEntry<'_>> {
        self.0.iter().map(|(key, path, facts)| CheckpointEntry { key, path, facts: facts.clone() })
    }
}

fn plan(params: &IndexMap<String, ParamLayout>, odd: OddSlots) -> ShardedOptimizerPlan {
    plan_sharded_optimizer(params, "optim", Checkpoint::new().entries(), odd, &IndexMap::new()).unwrap()
}

fn regions(target: &SlotTarget) -> Vec<String> {
    target.layout.pieces.iter().map(|piece| piece.region.to_string()).collect()
}

fn params(layout: impl Fn(&[u64]) -> ParamLayout) -> IndexMap<String, ParamLayout> {
    [("a.weight".to_owned(), layout(&[8, 4])), ("a.bias".to_owned(), layout(&[8]))].into_iter().collect()
}

#[test]
fn every_slot_gets_the_layout_of_its_parameter() {
    let mesh = Mesh::new(&[3]).unwrap();
    let params = params(|shape| ParamLayout::placed(&mesh, &[Placement::Shard(0)], shape, 1).unwrap());
    let plan = plan(&params, OddSlots::Whole);
    assert_eq!(regions(&plan.tensors["optim.state.a.weight.exp_avg"]), ["[3:6, 0:4]"]);
    assert_eq!(regions(&plan.tensors["optim.state.a.bias.exp_avg"]), ["[3:6]"]);
    assert!(plan.tensors["optim.state.a.weight.step"].replicated);
    // Another shape than the parameter's: whole, and said so.
    assert!(plan.tensors["optim.state.a.weight.row"].replicated);
    assert_eq!(plan.odd, ["optim.state.a.weight.row"]);
    assert_eq!(plan.unknown_params, ["gone.weight"]);
    assert_eq!(plan.values, ["optim.param_groups.0.lr"]);
    assert!(!plan.tensors.contains_key("model.a.weight"));
}

#[test]
fn odd_slots_are_cut_when_asked_and_may_have_a_layout_of_their_own() {
    let params = params(|shape| ParamLayout::replicated(shape).unwrap());
    let cut = plan(&params, OddSlots::Chunked { rank: 1, world: 3 });
    assert_eq!(regions(&cut.tensors["optim.state.a.weight.row"]), ["[3:6]"]);
    assert_eq!(regions(&cut.tensors["optim.state.gone.weight.exp_avg"]), ["[2:4, 0:2]"]);
    let own: IndexMap<(String, String), ParamLayout> =
        [(("a.weight".to_owned(), "row".to_owned()), ParamLayout::chunked(&[8], 0, 4).unwrap())].into_iter().collect();
    let plan = plan_sharded_optimizer(&params, "optim", Checkpoint::new().entries(), OddSlots::Whole, &own).unwrap();
    assert_eq!(regions(&plan.tensors["optim.state.a.weight.row"]), ["[0:2]"]);
}

#[test]
fn a_tensor_parallel_slice_is_read_at_its_offset() {
    // Rows 4..8 of the weight belong to this tensor-parallel rank, and within them it holds the second half.
    let slice = Region::new(&[4, 0], &[4, 4]).unwrap();
    let inner = ParamLayout::chunked(&[4, 4], 1, 2).unwrap();
    let nested = inner.inside(&[8, 4], &slice).unwrap();
    let params: IndexMap<String, ParamLayout> = [("a.weight".to_owned(), nested)].into_iter().collect();
    let plan = plan(&params, OddSlots::Whole);
    let target = &plan.tensors["optim.state.a.weight.exp_avg"];
    assert_eq!(regions(target), ["[6:8, 0:4]"]);
    assert_eq!(target.layout.local_shape.as_slice(), [2, 4]);
    assert!(ParamLayout::chunked(&[4, 4], 1, 2).unwrap().inside(&[8, 4], &Region::new(&[0, 0], &[5, 4]).unwrap()).is_err());
    assert!(ParamLayout::chunked(&[4, 4], 1, 2).unwrap().inside(&[6, 4], &slice).is_err());
}

#[test]
fn a_strided_layout_is_several_regions_of_one_local_tensor() {
    let mesh = Mesh::new(&[2, 2]).unwrap();
    let placements = [Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard(0)];
    let params = params(|shape| ParamLayout::placed(&mesh, &placements, shape, 3).unwrap());
    let plan = plan(&params, OddSlots::Whole);
    let target = &plan.tensors["optim.state.a.weight.exp_avg"];
    let held: u64 = target.layout.pieces.iter().map(|piece| piece.region.volume()).sum();
    assert_eq!((held, target.layout.local_shape.as_slice()), (8, &[2, 4][..]));
}

#[test]
fn a_flat_member_is_read_straight_into_its_shard() {
    let members = vec![FlatMember::new("a.weight", &[8, 4]), FlatMember::new("a.bias", &[8])];
    let sharding = FlatSharding { strategy: ShardingStrategy::FullShard, rank: 1, world: 3 };
    let flat = FlatParameter::packed("f", DType::Float32, members, 0, sharding, false).unwrap();
    let layout = ParamLayout::flat_member(&flat, 0).unwrap();
    assert_eq!(layout.local_shape.as_slice(), [14]);
    let starts: Vec<u64> = layout.pieces.iter().map(|piece| piece.start).collect();
    let regions: Vec<String> = layout.pieces.iter().map(|piece| piece.region.to_string()).collect();
    assert_eq!((starts, regions), (vec![0, 2], vec!["[3:4, 2:4]".to_owned(), "[4:7, 0:4]".to_owned()]));
    assert!(ParamLayout::flat_member(&flat.clone().at_rank(0), 1).unwrap().pieces.is_empty());
}

#[test]
fn the_tree_has_the_structure_of_the_checkpoint() {
    let plan = plan(&params(|shape| ParamLayout::replicated(shape).unwrap()), OddSlots::Whole);
    let tree = plan.tree(|key| Some(Tree::<()>::Value(reshard_formats::Value::from(key)))).unwrap();
    let optim = &tree[&Key::from("optim")];
    assert!(optim.get("state").unwrap().get("a.weight").unwrap().get("step").is_some());
    assert!(optim.get("param_groups").unwrap().get("0").unwrap().get("lr").is_some());
}

#[test]
fn a_flattened_optimizer_and_one_at_the_root_are_read_too() {
    let mut flat = Checkpoint(Vec::new());
    flat.add(&["optim", "state.a.weight.exp_avg"], Some(&[8, 4]));
    flat.add(&["optim", "state.a.weight.block.0.factor"], Some(&[4, 4]));
    flat.add(&["optim", "param_groups.a.weight.lr"], None);
    let params = params(|shape| ParamLayout::chunked(shape, 0, 2).unwrap());
    let plan = plan_sharded_optimizer(&params, "optim", flat.entries(), OddSlots::Whole, &IndexMap::new()).unwrap();
    assert_eq!(regions(&plan.tensors["optim.state.a.weight.exp_avg"]), ["[0:4, 0:4]"]);
    assert_eq!(plan.tensors["optim.state.a.weight.block.0.factor"].param.as_deref(), Some("a.weight"));
    let mut root = Checkpoint(Vec::new());
    root.add(&["state", "a.bias", "exp_avg"], Some(&[8]));
    let plan = plan_sharded_optimizer(&params, "", root.entries(), OddSlots::Whole, &IndexMap::new()).unwrap();
    assert_eq!(regions(&plan.tensors["state.a.bias.exp_avg"]), ["[0:4]"]);
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
