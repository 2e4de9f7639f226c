//! Our results against PyTorch's own, key by key and bit by bit. The files and the script that made them are in
//! `tests/fixtures`. Where PyTorch fails and ours does not, `KNOWN_FAILURES` says why.

use std::collections::{BTreeMap, BTreeSet};

use indexmap::IndexMap;
use reshard_formats::{DType, Value};
use reshard_layout::{Dims, Mesh, Placement, Region, local_regions};
use reshard_state::*;
use serde_json::Value as Json;

use crate::host::{Host, assemble, build, inventory, set_optimizer_state};

/// Case, field, and why PyTorch has no answer there.
const KNOWN_FAILURES: [(&str, &str, &str); 6] = [
    ("fsdp1_flat.buffers", "sharded", EXTRA_STATE_IS_NO_ATTRIBUTE),
    ("fsdp1_flat.buffers", "model", EXTRA_STATE_IS_NO_ATTRIBUTE),
    ("fsdp1_flat.buffers", "trained_keys", EXTRA_STATE_IS_NO_ATTRIBUTE),
    ("fsdp1_orig.buffers", "sharded", EXTRA_STATE_IS_NO_ATTRIBUTE),
    ("fsdp1_orig.buffers", "model", EXTRA_STATE_IS_NO_ATTRIBUTE),
    ("fsdp1_orig.buffers", "trained_keys", EXTRA_STATE_IS_NO_ATTRIBUTE),
];

/// `_get_fqns` walks the name of a module's extra state as if it were an attribute once the module is wrapped by FSDP1.
const EXTRA_STATE_IS_NO_ATTRIBUTE: &str = "has no attribute '_extra_state'";

/// A tensor of a fixture: plain, or the local part of a distributed one.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Spread {
    Plain,
    Placed(Mesh, Vec<Placement>),
    Shards(Vec<(Region, Host)>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Fx {
    shape: Dims,
    local: Host,
    spread: Spread,
}

impl TensorLike for Fx {
    fn dtype(&self) -> DType {
        self.local.dtype
    }

    fn shape(&self) -> &[u64] {
        &self.shape
    }

    fn scalar(&self) -> Option<&[u8]> {
        (self.spread == Spread::Plain && self.numel() == 1).then_some(self.local.data.as_slice())
    }
}

fn dims(json: &Json) -> Dims {
    json.as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).collect()
}

fn host(dtype: &Json, shape: &Json, hex: &Json) -> Host {
    let text = hex.as_str().unwrap();
    let data = (0..text.len() / 2).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap()).collect();
    Host { dtype: DType::from_name(dtype.as_str().unwrap()).unwrap(), shape: dims(shape), data }
}

fn decode(json: &Json) -> Tree<Fx> {
    match json {
        Json::Null => Tree::Value(Value::None),
        Json::Bool(value) => Tree::Value(Value::Bool(*value)),
        Json::Number(number) => Tree::Value(Value::from(number.as_i64().unwrap())),
        Json::String(text) => Tree::Value(Value::from(text.as_str())),
        Json::Array(_) => panic!("a bare array"),
        Json::Object(object) => {
            let (tag, body) = object.iter().next().unwrap();
            let items = || body.as_array().unwrap().iter().map(decode).collect();
            match tag.as_str() {
                "$f" => {
                    let bytes = host(&Json::from("float64"), &Json::from(Vec::<u64>::new()), body).data;
                    Tree::Value(Value::Float(f64::from_le_bytes(bytes.try_into().unwrap())))
                }
                "$l" => Tree::List(items()),
                "$u" => Tree::Tuple(items()),
                "$m" => Tree::Dict(
                    body.as_array()
                        .unwrap()
                        .iter()
                        .map(|entry| {
                            let key = match &entry[0] {
                                Json::String(text) => Key::from(text.as_str()),
                                number => Key::Int(number.as_i64().unwrap()),
                            };
                            (key, decode(&entry[1]))
                        })
                        .collect(),
                ),
                "$t" => {
                    let local = host(&body[0], &body[1], &body[2]);
                    Tree::Tensor(Fx { shape: local.shape.clone(), local, spread: Spread::Plain })
                }
                "$d" => {
                    let mesh = Mesh::with_ranks(&dims(&body[4]), &dims(&body[5])).unwrap();
                    let placements = body[6].as_array().unwrap().iter().map(|place| match place[0].as_str().unwrap() {
                        "replicate" => Placement::Replicate,
                        "shard" => Placement::Shard(place[1].as_u64().unwrap() as usize),
                        _ => Placement::StridedShard {
                            dim: place[1].as_u64().unwrap() as usize,
                            split_factor: place[2].as_u64().unwrap(),
                        },
                    });
                    let spread = Spread::Placed(mesh, placements.collect());
                    Tree::Tensor(Fx { shape: dims(&body[1]), local: host(&body[0], &body[2], &body[3]), spread })
                }
                "$s" => {
                    let shards = body[2].as_array().unwrap().iter().map(|shard| {
                        let region = Region::new(&dims(&shard[0]), &dims(&shard[1])).unwrap();
                        (region, host(&body[0], &shard[1], &shard[2]))
                    });
                    let local = Host::zeros(DType::from_name(body[0].as_str().unwrap()).unwrap(), &[0]);
                    Tree::Tensor(Fx { shape: dims(&body[1]), local, spread: Spread::Shards(shards.collect()) })
                }
                other => panic!("unknown tag {other}"),
            }
        }
    }
}

fn flat_parameter(name: &str, json: &Json) -> FlatParameter {
    let texts = |field: &str| -> Vec<String> {
        json[field].as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let members = texts("fqns").into_iter().enumerate().map(|(index, fqn)| {
        let aliases = json["shared"].as_array().unwrap().iter();
        let aliases = aliases.filter(|pair| pair[1].as_str() == Some(&fqn)).map(|pair| pair[0].as_str().unwrap().to_owned());
        FlatMember {
            slice: None,
            shape: dims(&json["shapes"][index]),
            requires_grad: json["requires_grad"][index].as_bool().unwrap(),
            aliases: aliases.collect(),
            name: fqn,
        }
    });
    let mut member = 0;
    let extents: Vec<Extent> = dims(&json["numels"])
        .into_iter()
        .zip(json["padding"].as_array().unwrap())
        .map(|(numel, padding)| {
            let is_padding = padding.as_bool().unwrap();
            member += usize::from(!is_padding);
            Extent { member: (!is_padding).then(|| member - 1), numel }
        })
        .collect();
    let strategy = match json["strategy"].as_str().unwrap() {
        "FULL_SHARD" => ShardingStrategy::FullShard,
        "SHARD_GRAD_OP" => ShardingStrategy::ShardGradOp,
        "NO_SHARD" => ShardingStrategy::NoShard,
        "HYBRID_SHARD" => ShardingStrategy::HybridShard,
        other => panic!("unknown strategy {other}"),
    };
    let sharding = FlatSharding { strategy, rank: json["rank"].as_u64().unwrap(), world: json["world"].as_u64().unwrap() };
    let dtype = DType::from_name(json["dtype"].as_str().unwrap()).unwrap();
    let orig = json["orig"].as_bool().unwrap();
    FlatParameter::from_extents(name, dtype, members.collect(), &extents, sharding, orig).unwrap()
}

fn module(json: &Json) -> ModuleTree {
    let mut tree = ModuleTree::new();
    tree.wrapper = match json["wrapper"].as_str().unwrap() {
        "none" => Wrapper::None,
        "ddp" => Wrapper::Ddp,
        "fsdp1" => Wrapper::Fsdp1,
        "fsdp2" => Wrapper::Fsdp2,
        "compiled" => Wrapper::Compiled,
        "activation_checkpoint" => Wrapper::ActivationCheckpoint,
        other => panic!("unknown wrapper {other}"),
    };
    for (name, parameter) in json["parameters"].as_object().unwrap() {
        let mut made = Parameter::new(parameter["id"].as_u64().unwrap());
        made.requires_grad = parameter["requires_grad"].as_bool().unwrap();
        if !parameter["flat"].is_null() {
            made.flat = Some(Box::new(flat_parameter(name, &parameter["flat"])));
        }
        tree = tree.parameter(name, made);
    }
    for (name, buffer) in json["buffers"].as_object().unwrap() {
        tree = tree.buffer(name, buffer["id"].as_u64().unwrap(), buffer["persistent"].as_bool().unwrap());
    }
    tree.extra_state = json["extra_state"].as_bool().unwrap();
    if !json["manages"].is_null() {
        tree.manages = Some(Box::new(flat_parameter("_flat_param", &json["manages"])));
    }
    for (name, child) in json["children"].as_object().unwrap() {
        tree = tree.child(name, module(child));
    }
    tree
}

struct Rank {
    model: ModuleTree,
    names: Names,
    flats: FlatModel,
    live: LiveOptimizer<Fx>,
    raw: RawOptimizer<Fx>,
    json: Json,
}

struct Case {
    name: String,
    ranks: Vec<Rank>,
}

impl Case {
    /// What PyTorch made, or None where it failed in a way that is known.
    fn expected(&self, rank: usize, field: &str) -> Option<Tree<Fx>> {
        let json = &self.ranks[rank].json[field];
        if let Some(error) = json.get("$error") {
            let known = KNOWN_FAILURES.iter().find(|(case, at, _)| *case == self.name && *at == field);
            let (_, _, why) = known.unwrap_or_else(|| panic!("{} {field}: PyTorch failed: {error}", self.name));
            assert!(error.as_str().unwrap().contains(why), "{} {field}: {error}", self.name);
            return None;
        }
        Some(decode(json))
    }

    fn is_fsdp1(&self) -> bool {
        self.name.starts_with("fsdp1")
    }

    /// This rank's state by names, with distributed tensors as parts.
    fn state(&self, rank: usize) -> OptimizerState<SlotTensor<Fx>> {
        let own = &self.ranks[rank];
        let flats = FlatModel::of(&own.model).unwrap();
        let state = sharded_optim_state(own.raw.clone(), &own.live, &own.names, &flats).unwrap();
        combine(vec![state]).unwrap()
    }

    /// The ranks that shard one copy between them: all of them, except for a hybrid, where it is the first half.
    fn shard_group(&self) -> usize {
        let hybrid = self.name.contains("hybrid");
        let alone = self.name.contains("no_shard");
        if alone {
            1
        } else if hybrid {
            self.ranks.len() / 2
        } else {
            self.ranks.len()
        }
    }
}

fn cases() -> Vec<Case> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let cases: Vec<Case> = files
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| {
            let json: Json = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            let ranks = json["ranks"].as_array().unwrap().iter().map(|rank| {
                let model = module(&rank["module"]);
                let groups = rank["live"].as_array().unwrap().iter().map(|group| {
                    let Tree::Dict(options) = decode(&group["options"]) else { panic!("options") };
                    ParamGroup { params: dims(&group["params"]).into_iter().map(Identity).collect(), options }
                });
                Rank {
                    names: Names::of(&model).unwrap(),
                    flats: FlatModel::of(&model).unwrap(),
                    live: LiveOptimizer { param_groups: groups.collect() },
                    raw: RawOptimizer::from_tree(decode(&rank["raw"])).unwrap(),
                    json: rank.clone(),
                    model,
                }
            });
            Case { name: path.file_stem().unwrap().to_str().unwrap().to_owned(), ranks: ranks.collect() }
        })
        .collect();
    assert!(cases.len() >= 54, "fixtures are missing");
    cases
}

fn named(tree: Tree<Fx>, names: &Names) -> OptimizerState<Fx> {
    OptimizerState::from_named(RawOptimizer::from_tree(tree).unwrap(), names).unwrap()
}

/// Groups with everything in them, members in order.
fn groups_text<T: std::fmt::Debug>(groups: &[ParamGroup<String, T>], plain: impl Fn(&Tree<T>) -> String) -> Vec<String> {
    groups
        .iter()
        .map(|group| {
            let options: BTreeMap<String, String> =
                group.options.iter().map(|(key, value)| (key.to_string(), plain(value))).collect();
            format!("{:?} {options:?}", group.params)
        })
        .collect()
}

fn plain_text<T>(tree: &Tree<T>) -> String {
    tree.to_value().map_or_else(|| tree.kind().to_owned(), |value| value.python_repr())
}

/// The local parts of a fixture's tensor as host tensors with their regions.
fn parts(fx: &Fx, rank: usize) -> Vec<SlotPiece<Host>> {
    match &fx.spread {
        Spread::Plain => vec![SlotPiece::contiguous(fx.local.clone(), 0, Region::whole(&fx.shape).unwrap())],
        Spread::Placed(mesh, placements) => local_regions(mesh, placements, &fx.shape, rank as u64)
            .unwrap()
            .into_iter()
            .map(|region| SlotPiece {
                source: fx.local.clone(),
                start: 0,
                within: fx.local.shape.clone(),
                at: region.local,
                region: region.global,
            })
            .collect(),
        Spread::Shards(shards) => {
            shards.iter().map(|(region, host)| SlotPiece::contiguous(host.clone(), 0, region.clone())).collect()
        }
    }
}

/// A slot of ours over host tensors.
fn hosted(slot: &SlotTensor<Fx>, rank: usize) -> SlotTensor<Host> {
    match slot {
        SlotTensor::Whole(fx) if fx.spread == Spread::Plain => SlotTensor::Whole(fx.local.clone()),
        SlotTensor::Whole(fx) => SlotTensor::Sharded { dtype: fx.local.dtype, shape: fx.shape.clone(), pieces: parts(fx, rank) },
        SlotTensor::Sharded { dtype, shape, pieces } => SlotTensor::Sharded {
            dtype: *dtype,
            shape: shape.clone(),
            pieces: pieces
                .iter()
                .map(|piece| SlotPiece {
                    source: piece.source.local.clone(),
                    start: piece.start,
                    within: piece.within.clone(),
                    at: piece.at.clone(),
                    region: piece.region.clone(),
                })
                .collect(),
        },
    }
}

type Hosted = OptimizerState<SlotTensor<Host>>;

fn hosted_state(state: OptimizerState<SlotTensor<Fx>>, rank: usize) -> Hosted {
    let dict = |dict: Dict<SlotTensor<Fx>>| -> Dict<SlotTensor<Host>> {
        dict.into_iter().map(|(key, value)| (key, value.map(&mut |slot| hosted(&slot, rank)))).collect()
    };
    OptimizerState {
        state: state.state.into_iter().map(|(name, slots)| (name, dict(slots))).collect(),
        user_state: dict(state.user_state),
        param_groups: state
            .param_groups
            .into_iter()
            .map(|group| ParamGroup { params: group.params, options: dict(group.options) })
            .collect(),
        ..Default::default()
    }
}

/// Whole slots from the states of all ranks that hold parts.
fn full_slots(states: &[Hosted]) -> BTreeMap<(String, String), Result<Host, String>> {
    let inventories: Vec<Inventory> = states.iter().map(inventory).collect();
    let plan = full_optim_state(&inventories, Recipients::All, false).unwrap();
    let slot = |rank: u64, param: &str, slot: &str| &states[rank as usize].state[param][&Key::from(slot)];
    let mut result = BTreeMap::new();
    let mut peak = 0;
    for (step, (param, name)) in plan.tensors.steps.iter().zip(&plan.slots) {
        let copies: Vec<BoxCopy<Host>> = step
            .from
            .iter()
            .map(|part| {
                let Tree::Tensor(tensor) = slot(part.rank, param, name) else { panic!("{param} {name}") };
                let pieces = tensor.pieces().unwrap();
                let piece = pieces.iter().find(|piece| piece.region == part.region).unwrap();
                BoxCopy {
                    source: piece.source.clone(),
                    source_start: piece.start,
                    source_shape: piece.within.clone(),
                    source_at: piece.at.clone(),
                    sizes: Dims::from_slice(piece.region.sizes()),
                    dest_start: 0,
                    dest_shape: step.shape.clone(),
                    dest_at: Dims::from_slice(piece.region.offsets()),
                }
            })
            .collect();
        let whole = build(step.dtype, &step.shape, &copies);
        peak = peak.max(whole.data.len() as u64);
        result.insert((param.clone(), name.clone()), Ok(whole));
    }
    assert_eq!(plan.tensors.peak_bytes, peak);
    for (param, name, rank) in plan.values {
        let value = match slot(rank, &param, &name) {
            Tree::Tensor(SlotTensor::Whole(host)) => Ok(host.clone()),
            other => Err(plain_text(other)),
        };
        result.insert((param, name), value);
    }
    result
}

fn expected_slots(state: &OptimizerState<Fx>) -> BTreeMap<(String, String), Result<Host, String>> {
    let slots = state.state.iter().flat_map(|(param, slots)| {
        slots.iter().map(move |(slot, value)| {
            let value = match value {
                Tree::Tensor(fx) => Ok(fx.local.clone()),
                other => Err(plain_text(other)),
            };
            ((param.clone(), slot.to_string()), value)
        })
    });
    slots.collect()
}

#[test]
fn get_state_dict_gives_the_same_keys_groups_and_bytes() {
    for case in cases() {
        let states: Vec<_> = (0..case.ranks.len()).map(|rank| case.state(rank)).collect();
        let hosts: Vec<Hosted> = states.iter().cloned().enumerate().map(|(rank, state)| hosted_state(state, rank)).collect();
        let group = case.shard_group();
        for (rank, ours) in states.iter().enumerate() {
            let field = if case.is_fsdp1() { "fsdp_sharded" } else { "sharded" };
            for field in [field, "sharded"] {
                let Some(tree) = case.expected(rank, field) else { continue };
                let theirs = named(tree, &case.ranks[rank].names);
                let context = format!("{} rank {rank} {field}", case.name);
                assert_eq!(
                    groups_text(&ours.param_groups, plain_text),
                    groups_text(&theirs.param_groups, plain_text),
                    "{context}"
                );
                for name in ours.state.keys() {
                    assert!(theirs.state.contains_key(name), "{context}: {name} is only in ours");
                }
                for (name, slots) in &theirs.state {
                    // Without a collective a rank knows only what it holds; what it lacks, others of its group hold.
                    let holders: Vec<&Hosted> = hosts.iter().filter(|state| state.state.contains_key(name)).collect();
                    assert!(!holders.is_empty(), "{context}: nobody has {name}");
                    for (slot, value) in slots {
                        // Scalars come from ranks that hold something of the parameter; they must be somewhere.
                        let ours: Vec<&Tree<SlotTensor<Host>>> =
                            holders.iter().filter_map(|state| state.state[name].get(slot)).collect();
                        assert!(!ours.is_empty(), "{context}: nobody has {name} {slot}");
                        match value {
                            Tree::Tensor(fx) => {
                                let tensors = ours.iter().map(|tree| match tree {
                                    Tree::Tensor(tensor) => tensor,
                                    _ => panic!("{context}: {name} {slot} is not a tensor"),
                                });
                                let whole = assemble(&tensors.collect::<Vec<_>>());
                                assert_eq!(whole.shape, fx.shape, "{context}: {name} {slot}");
                                for part in parts(fx, rank) {
                                    let theirs = cut(&part.source, &part.within, &part.at, part.start, part.region.sizes());
                                    let ours = cut(&whole, &whole.shape, part.region.offsets(), 0, part.region.sizes());
                                    assert_eq!(ours, theirs, "{context}: {name} {slot} {}", part.region);
                                }
                            }
                            other => assert!(ours.iter().all(|tree| plain_text(tree) == plain_text(other)), "{context}: {slot}"),
                        }
                    }
                    for slot in holders.iter().flat_map(|state| state.state[name].keys()) {
                        assert!(slots.contains_key(slot), "{context}: {name} {slot} is only in ours");
                    }
                }
            }
        }
        if group < case.ranks.len() {
            // Ranks of other copies hold the same as those of the first.
            assert_eq!(full_slots(&hosts[..group]), full_slots(&hosts[hosts.len() - group..]), "{}", case.name);
        }
    }
}

/// A box out of a row-major box.
fn cut(source: &Host, within: &[u64], at: &[u64], start: u64, sizes: &[u64]) -> Vec<u8> {
    let copy = BoxCopy {
        source: source.clone(),
        source_start: start,
        source_shape: Dims::from_slice(within),
        source_at: Dims::from_slice(at),
        sizes: Dims::from_slice(sizes),
        dest_start: 0,
        dest_shape: Dims::from_slice(sizes),
        dest_at: Dims::from_elem(0, sizes.len()),
    };
    build(source.dtype, sizes, &[copy]).data
}

#[test]
fn the_full_state_is_the_same_bit_by_bit() {
    for case in cases() {
        let hosts: Vec<Hosted> = (0..case.shard_group()).map(|rank| hosted_state(case.state(rank), rank)).collect();
        let ours = full_slots(&hosts);
        for field in ["full", "fsdp_full"] {
            if field == "fsdp_full" && !case.is_fsdp1() {
                continue;
            }
            let Some(tree) = case.expected(0, field) else { continue };
            let theirs = expected_slots(&named(tree, &case.ranks[0].names));
            assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{} {field}", case.name);
            for (key, value) in theirs {
                assert_eq!(ours[&key], value, "{} {field} {key:?}", case.name);
            }
        }
    }
}

/// PyTorch gathers every slot into one buffer, and offloading to the CPU copies nothing when the buffer is there already:
/// all slots of its full state are views of the last one. Ours are each their own.
#[test]
fn offloading_a_full_state_does_not_mix_up_slots() {
    let case = cases().into_iter().find(|case| case.name == "fsdp1_orig.adamw").unwrap();
    let hosts: Vec<Hosted> = (0..case.shard_group()).map(|rank| hosted_state(case.state(rank), rank)).collect();
    let ours = full_slots(&hosts);
    let theirs = expected_slots(&named(case.expected(0, "fsdp_full_offloaded").unwrap(), &case.ranks[0].names));
    let key = |slot: &str| ("down.weight".to_owned(), slot.to_owned());
    assert_eq!(theirs[&key("exp_avg")], theirs[&key("exp_avg_sq")]);
    assert_ne!(ours[&key("exp_avg")], ours[&key("exp_avg_sq")]);
}

#[test]
fn optim_state_dict_to_load_makes_the_same_flat_slots() {
    let mut compared = 0;
    for case in cases().into_iter().filter(Case::is_fsdp1) {
        for (rank, own) in case.ranks.iter().enumerate() {
            let full = named(case.expected(0, "fsdp_full").unwrap(), &own.names);
            let whole = |dict: &Dict<Fx>| -> Dict<SlotTensor<Host>> {
                dict.iter()
                    .map(|(key, value)| (key.clone(), value.clone().map(&mut |fx: Fx| SlotTensor::Whole(fx.local))))
                    .collect()
            };
            let given = OptimizerState {
                state: full.state.iter().map(|(name, slots)| (name.clone(), whole(slots))).collect(),
                user_state: Dict::new(),
                param_groups: full
                    .param_groups
                    .iter()
                    .map(|group| ParamGroup { params: group.params.clone(), options: whole(&group.options) })
                    .collect(),
                ..Default::default()
            };
            let sharded = hosted_state(case.state(rank), rank);
            for (field, given) in [("to_load", given), ("to_load_sharded", sharded)] {
                let theirs = RawOptimizer::from_tree(case.expected(rank, field).unwrap()).unwrap();
                let live = LiveOptimizer {
                    param_groups: own
                        .live
                        .param_groups
                        .iter()
                        .map(|group| ParamGroup {
                            params: group.params.clone(),
                            options: group
                                .options
                                .iter()
                                .map(|(k, v)| (k.clone(), v.clone().map(&mut |fx: Fx| fx.local)))
                                .collect(),
                        })
                        .collect(),
                };
                let options = StateDictOptions::default();
                let (loads, _) = optim_state_to_load(given, &[live], &own.names, &own.flats, LoadTarget::Ids, &options).unwrap();
                let context = format!("{} rank {rank} {field}", case.name);
                let ours = &loads[0];
                let keys = |keys: Vec<&Key>| keys.into_iter().map(ToString::to_string).collect::<BTreeSet<_>>();
                assert_eq!(keys(ours.state.keys().collect()), keys(theirs.state.keys().collect()), "{context}");
                for (key, slots) in &theirs.state {
                    let Tree::Dict(slots) = slots else { panic!("{context}") };
                    assert_eq!(ours.state[key].len(), slots.len(), "{context} {key}");
                    for (slot, value) in slots {
                        let made = crate::host::made(&ours.state[key][slot]);
                        match value {
                            Tree::Tensor(fx) => {
                                assert_eq!(made.as_tensor().unwrap(), &fx.local, "{context} {key} {slot}");
                            }
                            other => assert_eq!(plain_text(&made), plain_text(other), "{context} {key} {slot}"),
                        }
                        compared += 1;
                    }
                }
                for (ours, theirs) in ours.param_groups.iter().zip(&theirs.param_groups) {
                    assert_eq!(ours.params, theirs.params, "{context}");
                    for (key, value) in &theirs.options {
                        assert_eq!(plain_text(&ours.options[key]), plain_text(value), "{context} {key}");
                    }
                }
            }
        }
    }
    assert!(compared > 200, "only {compared} slots were compared");
}

#[test]
fn setting_what_was_got_gives_every_optimizer_its_own_state_back() {
    for case in cases().into_iter().filter(|case| !case.is_fsdp1()) {
        for (rank, own) in case.ranks.iter().enumerate() {
            let theirs = named(case.expected(rank, "sharded").unwrap(), &own.names);
            let (loads, report) =
                set_optimizer_state(theirs, std::slice::from_ref(&own.live), &own.names, &StateDictOptions::default()).unwrap();
            assert!(report.missing.is_empty() && report.unexpected.is_empty(), "{} {report:?}", case.name);
            let raw = loads.into_iter().next().unwrap().into_raw();
            let same = raw.into_tree().same_as(&own.raw.clone().into_tree(), &|a, b| a == b);
            assert!(same, "{} rank {rank}", case.name);
        }
    }
}

#[test]
fn model_keys_are_the_same() {
    for case in cases() {
        for (rank, own) in case.ranks.iter().enumerate() {
            let ours: BTreeSet<String> =
                get_model_state(&own.model, &[], &StateDictOptions::default()).unwrap().entries.into_keys().collect();
            match case.expected(rank, "model") {
                Some(tree) => {
                    let theirs: BTreeSet<String> = tree.as_dict().unwrap().keys().map(ToString::to_string).collect();
                    assert_eq!(ours, theirs, "{} rank {rank}", case.name);
                }
                None => assert!(ours.contains("norm._extra_state"), "{}", case.name),
            }
        }
        let options = StateDictOptions { ignore_frozen_params: true, ..Default::default() };
        if let Some(Tree::List(keys)) = case.expected(0, "trained_keys") {
            let theirs: BTreeSet<String> = keys.iter().map(|key| plain_text(key).trim_matches('\'').to_owned()).collect();
            let ours: BTreeSet<String> =
                get_model_state(&case.ranks[0].model, &[], &options).unwrap().entries.into_keys().collect();
            assert_eq!(ours, theirs, "{}", case.name);
        }
    }
}

#[test]
fn flattened_optimizer_keys_are_the_same() {
    for case in cases() {
        let Some(Tree::List(keys)) = case.expected(0, "flattened_keys") else { continue };
        let theirs: BTreeSet<String> = keys.iter().map(|key| plain_text(key).trim_matches('\'').to_owned()).collect();
        let mut ours: BTreeSet<String> = BTreeSet::new();
        for rank in 0..case.shard_group() {
            ours.extend(flatten_optimizer(&case.state(rank)).unwrap().into_keys());
        }
        assert_eq!(ours, theirs, "{}", case.name);
        // And back: the same state, group by group.
        let own = &case.ranks[0];
        let state = case.state(0);
        let whole: IndexMap<String, Tree<SlotTensor<Fx>>> = flatten_optimizer(&state).unwrap();
        let live = LiveOptimizer {
            param_groups: own
                .live
                .param_groups
                .iter()
                .map(|group| ParamGroup { params: group.params.clone(), options: Dict::new() })
                .collect(),
        };
        let (back, left) = unflatten_optimizer(&whole, &[live], &own.names).unwrap();
        assert_eq!(left, Leftovers::default(), "{}", case.name);
        assert!(back.into_tree().same_as(&state.into_tree(), &|a, b| a == b), "{}", case.name);
    }
}
