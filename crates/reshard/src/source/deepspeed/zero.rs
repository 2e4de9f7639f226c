//! Weights and optimizer state of one tensor parallel rank, from the files of its data parallel ranks.

use indexmap::IndexMap;
use rayon::prelude::*;
use reshard_formats::Value;
use reshard_state::{Dict, Key, Tree};

use super::names::{RankFile, TagFiles};
use super::partition::{self, Piece};
use super::{ModelRank, disagree, text};
use crate::error::{Error, Result};
use crate::source::folder::Folder;
use crate::source::tensors::{self, FlatPart, Parts};
use crate::source::values::{integer, integers};
use crate::workers::Workers;

/// Flat groups are padded to a multiple of their ranks times this at most; more left over means that the files do not
/// belong together.
const MAX_ALIGNMENT: u64 = 4096;

/// A parameter of one tensor parallel rank.
#[derive(Debug, Default, Clone)]
pub(super) struct Parameter {
    pub(super) weight: Option<Parts>,
    /// The optimizer's state: tensors of the parameter's shape, and counters.
    pub(super) slots: Dict<Parts>,
}

/// All of them, and the optimizer's groups.
#[derive(Debug, Default)]
pub(super) struct Parameters {
    pub(super) by_name: IndexMap<String, Parameter>,
    pub(super) groups: Vec<Dict<Parts>>,
}

/// The files read so far.
pub(super) struct Opening<'f> {
    folder: &'f Folder,
    files: Vec<String>,
    writer: Option<String>,
}

impl<'f> Opening<'f> {
    pub(super) fn new(folder: &'f Folder) -> Opening<'f> {
        Opening { folder, files: Vec::new(), writer: None }
    }

    /// Reads the structure of files, many at once.
    fn read(&mut self, names: &[String]) -> Result<Vec<Tree<Parts>>> {
        let first = self.files.len();
        self.files.extend_from_slice(names);
        let (store, path) = (self.folder.store.as_ref(), self.folder.path.as_str());
        Workers::reading(store).run(|| {
            let read = |(i, name): (usize, &String)| tensors::read_file(store, path, name, (first + i) as u32);
            names.par_iter().enumerate().with_max_len(1).map(read).collect::<Result<Vec<_>>>()
        })?
    }

    pub(super) fn finish(self) -> (Vec<String>, String) {
        (self.files, self.writer.unwrap_or_else(|| "DeepSpeed".into()))
    }
}

/// Reads what belongs to one tensor parallel rank.
pub(super) fn read_rank(opening: &mut Opening<'_>, named: &TagFiles, model: u64) -> Result<ModelRank> {
    let folder = opening.folder;
    let of_rank = |files: &std::collections::BTreeMap<RankFile, String>| -> Vec<(Option<u64>, String)> {
        files.iter().filter(|(rank, _)| rank.model == model).map(|(rank, name)| (rank.data, name.clone())).collect()
    };
    let optimizer_names: Vec<(Option<u64>, String)> = of_rank(&named.optimizer);
    let mut model_names = of_rank(&named.model);
    // ZeRO-3 writes one for each rank; a shared one beside them holds experts or nothing.
    if model_names.iter().any(|(data, _)| data.is_some()) {
        model_names.retain(|(data, _)| data.is_some());
    }
    let just = |names: &[(Option<u64>, String)]| names.iter().map(|(_, name)| name.clone()).collect::<Vec<_>>();
    let optimizers = opening.read(&just(&optimizer_names))?;
    let models = opening.read(&just(&model_names))?;
    let Some(first) = models.first() else {
        return Err(Error::internal("a rank without a model file"));
    };
    if let Some(version) = first.get("ds_version").and_then(text) {
        opening.writer = Some(format!("DeepSpeed {version}"));
    }
    let rank =
        Rank { folder, optimizer_names: &optimizer_names, optimizers: &optimizers, model_names: &model_names, models: &models };
    rank.check_complete()?;
    rank.check_steps()?;
    let parameters = rank.parameters()?;
    let mut models = models;
    Ok(ModelRank { model: models.swap_remove(0), parameters })
}

/// The trees of one tensor parallel rank's files.
struct Rank<'r> {
    folder: &'r Folder,
    optimizer_names: &'r [(Option<u64>, String)],
    optimizers: &'r [Tree<Parts>],
    model_names: &'r [(Option<u64>, String)],
    models: &'r [Tree<Parts>],
}

/// A group's parameters and each rank's flat tensors.
struct Shapes {
    names: Vec<(String, Vec<u64>)>,
    /// Elements of padding behind each parameter.
    paddings: Vec<u64>,
}

impl Rank<'_> {
    fn file(&self, rank: usize) -> &str {
        self.optimizer_names.get(rank).map_or("?", |(_, name)| name.as_str())
    }

    /// Every data parallel rank has its files.
    fn check_complete(&self) -> Result<()> {
        let Some(first) = self.optimizers.first() else { return Ok(()) };
        let promised = match first.get("optimizer_state_dict").and_then(|state| state.get("partition_count")) {
            Some(Tree::Value(count)) => integer(count),
            Some(Tree::List(counts)) => counts.iter().filter_map(|c| c.to_value().as_ref().and_then(integer)).max(),
            _ => None,
        };
        let named = [(self.optimizer_names, "optimizer"), (self.model_names, "model")];
        for (names, what) in named {
            if names.iter().all(|(data, _)| data.is_none()) {
                continue;
            }
            let there: Vec<u64> = names.iter().filter_map(|(data, _)| *data).collect();
            let world = promised.unwrap_or(0).max(there.iter().max().map_or(0, |last| last + 1));
            if let Some(missing) = (0..world).find(|rank| !there.contains(rank)) {
                let like = names.first().map_or("", |(_, name)| name.as_str());
                let file = like.replacen(&format!("pp_rank_{}_", there.first().unwrap_or(&0)), &format!("pp_rank_{missing}_"), 1);
                let detail = format!(
                    "the {what} file of rank {missing}, {file}, is missing; the checkpoint was written by {world} data parallel \
                     ranks, and all their files are needed: copy it from the machine that wrote it, or open an older tag"
                );
                return Err(Error::Incomplete { path: self.folder.path.clone(), detail });
            }
        }
        Ok(())
    }

    /// All files are of one step.
    fn check_steps(&self) -> Result<()> {
        let mut seen: Option<(f64, &str, &str)> = None;
        let mut compare = |step: Option<f64>, what: &'static str, file| -> Result<()> {
            let Some(step) = step else { return Ok(()) };
            match seen {
                Some((other, was, first)) if was == what && other != step => {
                    let detail = format!(
                        "it is of {what} {step}, and {first} of {what} {other}: files of two saves are mixed; open a tag whose \
                         files are of one"
                    );
                    Err(disagree(self.folder, file, detail))
                }
                _ => {
                    seen = Some((step, what, file));
                    Ok(())
                }
            }
        };
        for (model, (_, name)) in self.models.iter().zip(self.model_names) {
            let step = model.get("global_steps").and_then(|step| step.to_value()).as_ref().and_then(integer);
            compare(step.map(|step| step as f64), "step", name)?;
        }
        for (rank, optimizer) in self.optimizers.iter().enumerate() {
            let step = match states(optimizer).into_iter().next().and_then(|state| state.get("step")) {
                Some(Tree::Tensor(step)) => step.scalar(self.folder.store.as_ref(), self.file(rank))?,
                Some(Tree::Value(step)) => integer(step).map(|step| step as f64),
                _ => None,
            };
            compare(step, "optimizer step", self.file(rank))?;
        }
        Ok(())
    }

    fn parameters(&self) -> Result<Parameters> {
        let mut all = Parameters::default();
        let shapes = self.shapes()?;
        if !self.optimizers.is_empty() {
            let stage3 =
                self.optimizers[0].get("optimizer_state_dict").is_some_and(|state| state.get("fp32_flat_groups").is_some());
            if stage3 {
                self.stage_3(&shapes, &mut all)?;
            } else {
                self.stage_2(&shapes, &mut all)?;
            }
            all.groups = self.groups(&shapes, stage3);
        }
        self.others(&mut all)?;
        Ok(all)
    }

    /// Names and shapes in the order in which they were flattened, one list for each group.
    fn shapes(&self) -> Result<Vec<Shapes>> {
        let file = self.model_names.first().map_or("?", |(_, name)| name.as_str());
        let Some(model) = self.models.first() else { return Ok(Vec::new()) };
        let groups: Vec<&Tree<Parts>> = match model.get("param_shapes") {
            Some(Tree::List(groups)) => groups.iter().collect(),
            // Before groups had lists of their own.
            Some(group @ Tree::Dict(_)) => vec![group],
            _ if self.optimizers.is_empty() => return Ok(Vec::new()),
            _ => return Err(disagree(self.folder, file, "it has no param_shapes, by which the partitions are told apart")),
        };
        let paddings = self.optimizers.first().and_then(|o| o.get("optimizer_state_dict")?.get("param_alignment_paddings"));
        let mut shapes = Vec::new();
        for (i, group) in groups.into_iter().enumerate() {
            let mut names = Vec::new();
            for (key, shape) in group.as_dict().into_iter().flatten() {
                let (Key::Str(name), Some(shape)) = (key, dims(shape)) else {
                    return Err(disagree(self.folder, file, format!("the shape of {key:?} in param_shapes is not known")));
                };
                names.push((name.clone(), shape));
            }
            let numbers = |list: &Tree<Parts>| list.to_value().and_then(|list| integers(&list));
            let padding = match paddings {
                Some(Tree::List(lists)) => lists.get(i).and_then(numbers).unwrap_or_default(),
                _ => Vec::new(),
            };
            if !padding.is_empty() && padding.len() != names.len() {
                let detail = format!("it pads {} parameters of group {i}, which has {}", padding.len(), names.len());
                return Err(disagree(self.folder, self.file(0), detail));
            }
            shapes.push(Shapes { names, paddings: padding });
        }
        Ok(shapes)
    }

    /// Each rank's flat tensors below a key of the optimizer's state.
    fn flat(&self, key: &str) -> Result<Vec<Vec<FlatPart>>> {
        let mut all = Vec::new();
        for (rank, optimizer) in self.optimizers.iter().enumerate() {
            let found = optimizer.get("optimizer_state_dict").and_then(|state| state.get(key));
            let flat = match found {
                Some(Tree::List(items)) => items.iter().map(|item| item.as_tensor().and_then(Parts::flat)).collect(),
                _ => None,
            };
            let missing = || {
                let detail = format!(
                    "it has no list of flat tensors {key}: the optimizer's layout is not known; convert the checkpoint with \
                     DeepSpeed's ds_to_universal and open the result"
                );
                disagree(self.folder, self.file(rank), detail)
            };
            all.push(flat.ok_or_else(missing)?);
        }
        Ok(all)
    }

    fn stage_2(&self, shapes: &[Shapes], all: &mut Parameters) -> Result<()> {
        let weights = self.flat("single_partition_of_fp32_groups")?;
        for (g, shapes) in shapes.iter().enumerate() {
            // Of each rank the one flat tensor of this group. Padding is stripped from the last ones: the first is whole.
            let parts = self.column(&weights, g, "single_partition_of_fp32_groups")?;
            let partition = parts.first().and_then(|part| part.first()).map_or(0, |part| part.elements);
            let mut offset = 0u64;
            let mut planned = Vec::new();
            for (i, (name, shape)) in shapes.names.iter().enumerate() {
                let elements = volume(shape).ok_or_else(|| self.too_large(name))?;
                planned.push((name, shape, offset, elements));
                let behind = shapes.paddings.get(i).copied().unwrap_or(0);
                offset = offset.checked_add(elements).and_then(|o| o.checked_add(behind)).ok_or_else(|| self.too_large(name))?;
            }
            let ranks = parts.len() as u64;
            let whole = partition.saturating_mul(ranks);
            if offset > whole || whole - offset >= MAX_ALIGNMENT.saturating_mul(ranks) {
                let detail = format!(
                    "{ranks} partitions of {partition} elements hold group {g}, whose parameters have {offset}: the files are not \
                     of one checkpoint"
                );
                return Err(disagree(self.folder, self.file(0), detail));
            }
            // Only now: numbers that do not fit together may be of any size.
            let cut = |(name, shape, at, elements)| (name, shape, partition::of_group(at, elements, partition));
            let planned: Vec<_> = planned.into_iter().map(cut).collect();
            self.check_parts(g, &planned)?;
            self.place_group(&planned, g, &parts, all)?;
        }
        Ok(())
    }

    /// A rank's file names the parameters of which it has a part: another rank's file in its place is known by them. All but those
    /// without elements, which count as a part of wherever they begin.
    fn check_parts(&self, group: usize, planned: &[(&String, &Vec<u64>, Vec<Piece>)]) -> Result<()> {
        for (rank, optimizer) in self.optimizers.iter().enumerate() {
            let mappings = optimizer.get("optimizer_state_dict").and_then(|state| state.get("param_slice_mappings"));
            let Some(Tree::List(mappings)) = mappings else { continue };
            let Some(mapping) = mappings.get(group) else { continue };
            for (name, _, pieces) in planned.iter().filter(|(_, _, pieces)| !pieces.is_empty()) {
                let (has, should) = (mapping.get(name.as_str()).is_some(), pieces.iter().any(|piece| piece.rank == rank));
                if has && !should {
                    let detail = format!("it has a part of {name:?}, of which rank {rank} has none: it is another rank's file");
                    return Err(disagree(self.folder, self.file(rank), detail));
                }
            }
        }
        Ok(())
    }

    fn stage_3(&self, shapes: &[Shapes], all: &mut Parameters) -> Result<()> {
        let weights = self.flat("fp32_flat_groups")?;
        let ranks = self.optimizers.len() as u64;
        let grouped = weights.iter().all(|parts| parts.len() == shapes.len());
        // A group of shapes is a sub-group; where their numbers differ, all of them count as one.
        let mut offset = 0u64;
        for (g, shapes) in shapes.iter().enumerate() {
            if grouped {
                offset = 0;
            }
            let mut planned = Vec::new();
            for (name, shape) in &shapes.names {
                let elements = volume(shape).ok_or_else(|| self.too_large(name))?;
                planned.push((name, shape, partition::of_parameter(offset, elements, ranks)));
                offset = offset.checked_add(elements.div_ceil(ranks.max(1))).ok_or_else(|| self.too_large(name))?;
            }
            let parts = if grouped { self.column(&weights, g, "fp32_flat_groups")? } else { weights.clone() };
            let first: u64 = parts.first().map_or(0, |parts| parts.iter().map(|part| part.elements).sum());
            if grouped && first != offset {
                let detail = format!(
                    "sub-group {g} has {first} elements a rank, its parameters {offset}: the files are not of one checkpoint"
                );
                return Err(disagree(self.folder, self.file(0), detail));
            }
            self.place_group(&planned, if grouped { g } else { usize::MAX }, &parts, all)?;
        }
        Ok(())
    }

    /// Of each rank the flat tensor of one group.
    fn column(&self, parts: &[Vec<FlatPart>], group: usize, key: &str) -> Result<Vec<Vec<FlatPart>>> {
        let of_rank = |(rank, parts): (usize, &Vec<FlatPart>)| {
            let none =
                || disagree(self.folder, self.file(rank), format!("{key} has {} groups, and no group {group}", parts.len()));
            parts.get(group).map(|part| vec![part.clone()]).ok_or_else(none)
        };
        parts.iter().enumerate().map(of_rank).collect()
    }

    fn place_group(
        &self,
        planned: &[(&String, &Vec<u64>, Vec<Piece>)],
        group: usize,
        weights: &[Vec<FlatPart>],
        all: &mut Parameters,
    ) -> Result<()> {
        let slots = self.slots(group)?;
        for (name, shape, pieces) in planned {
            let mut parameter = Parameter { weight: Some(self.placed(name, shape, pieces, weights)?), slots: Dict::new() };
            for (slot, what) in &slots {
                let value = match what {
                    Slot::Flat(parts) => Tree::Tensor(self.placed(name, shape, pieces, parts)?),
                    Slot::Whole(tree) => tree.clone(),
                };
                parameter.slots.insert(Key::from(slot.as_str()), value);
            }
            if all.by_name.insert((*name).clone(), parameter).is_some() {
                return Err(disagree(self.folder, self.file(0), format!("the parameter {name:?} is in two groups")));
            }
        }
        Ok(())
    }

    fn placed(&self, name: &str, shape: &[u64], pieces: &[Piece], parts: &[Vec<FlatPart>]) -> Result<Parts> {
        let dtype = parts.iter().flatten().next().map_or(reshard_formats::DType::Float32, |part| part.dtype);
        let mut tensor = Parts::new(dtype, shape);
        match partition::place(&mut tensor, pieces, parts)
            .map_err(|e| disagree(self.folder, "param_shapes", format!("{name:?}: {e}")))?
        {
            Ok(()) => Ok(tensor),
            Err(rank) => {
                let detail = format!("its partition ends before the part of {name:?} that it should hold: sizes disagree");
                Err(disagree(self.folder, self.file(rank), detail))
            }
        }
    }

    /// The optimizer's state of a group: flat tensors of all ranks, or what is one for the whole group.
    fn slots(&self, group: usize) -> Result<Vec<(String, Slot)>> {
        let Some(first) = self.optimizers.first() else { return Ok(Vec::new()) };
        let all = states(first);
        let Some(state) = all.get(if group == usize::MAX { 0 } else { group }).and_then(|state| state.as_dict()) else {
            return Ok(Vec::new());
        };
        let mut slots = Vec::new();
        for (key, value) in state {
            let Key::Str(slot) = key else { continue };
            let one = match value {
                Tree::Tensor(tensor) => tensor.shape.is_empty(),
                _ => true,
            };
            if one {
                slots.push((slot.clone(), Slot::Whole(value.clone())));
                continue;
            }
            let mut parts = Vec::new();
            for (rank, optimizer) in self.optimizers.iter().enumerate() {
                let states = states(optimizer);
                let groups = if group == usize::MAX { 0..states.len() } else { group..group + 1 };
                let of_rank = groups.map(|g| states.get(g)?.get(slot)?.as_tensor()?.flat()).collect::<Option<Vec<_>>>();
                let unknown = || {
                    let detail = format!(
                        "the optimizer's {slot:?} of group {group} is not a flat tensor: an unknown optimizer layout; convert \
                         the checkpoint with DeepSpeed's ds_to_universal and open the result"
                    );
                    disagree(self.folder, self.file(rank), detail)
                };
                parts.push(of_rank.ok_or_else(unknown)?);
            }
            slots.push((slot.clone(), Slot::Flat(parts)));
        }
        Ok(slots)
    }

    /// Options of each group, and the names of its members.
    fn groups(&self, shapes: &[Shapes], stage3: bool) -> Vec<Dict<Parts>> {
        let Some(state) = self.optimizers.first().and_then(|optimizer| optimizer.get("optimizer_state_dict")) else {
            return Vec::new();
        };
        let inner = if stage3 { state.get("optimizer_state_dict") } else { state.get("base_optimizer_state") };
        let names = |indices: &mut dyn Iterator<Item = usize>| {
            let names = indices.filter_map(|i| shapes.get(i)).flat_map(|group| &group.names);
            names.map(|(name, _)| Tree::Value(Value::Str(name.clone()))).collect::<Vec<_>>()
        };
        let Some(Tree::List(groups)) = inner.and_then(|inner| inner.get("param_groups")) else {
            let only_names = |g| Dict::from_iter([(Key::from("params"), Tree::List(names(&mut std::iter::once(g))))]);
            return (0..shapes.len()).map(only_names).collect();
        };
        let mut all = Vec::new();
        let mut next = 0;
        for (g, group) in groups.iter().enumerate() {
            let Some(options) = group.as_dict() else { continue };
            let members = match options.get(&Key::from("params")) {
                Some(Tree::List(members)) => members.len(),
                _ => 1,
            };
            // ZeRO-3 has one flat tensor for each sub-group, ZeRO-2 one for each group.
            let params = if stage3 { names(&mut (next..next + members)) } else { names(&mut std::iter::once(g)) };
            next += members;
            let mut out: Dict<Parts> = options.clone();
            out.insert(Key::from("params"), Tree::List(params));
            all.push(out);
        }
        all
    }

    /// Weights that no optimizer holds: frozen ones, and buffers.
    fn others(&self, all: &mut Parameters) -> Result<()> {
        let Some(first) = self.models.first() else { return Ok(()) };
        let cut = self.models.len() > 1 || self.model_names.iter().any(|(data, _)| data.is_some());
        if cut {
            let files: Vec<&str> = self.model_names.iter().map(|(_, name)| name.as_str()).collect();
            for (name, weight) in frozen_weights(self.folder, &files, self.models)? {
                all.by_name.entry(name).or_default().weight = Some(weight);
            }
        }
        let buffers = first.get("buffer_names").and_then(|names| names.to_value());
        let is_buffer = |name: &str| match &buffers {
            Some(Value::List(names)) => names.iter().any(|n| matches!(n, Value::Str(n) if n == name)),
            _ => true,
        };
        for (key, value) in first.get("module").and_then(Tree::as_dict).into_iter().flatten() {
            let (Key::Str(name), Tree::Tensor(tensor)) = (key, value) else { continue };
            // In ZeRO-3 what is no buffer is an empty stand-in for a parameter.
            if !all.by_name.contains_key(name) && (!cut || is_buffer(name)) && !self.is_shared(name) {
                all.by_name.insert(name.clone(), Parameter { weight: Some(tensor.clone()), slots: Dict::new() });
            }
        }
        Ok(())
    }

    fn is_shared(&self, name: &str) -> bool {
        let shared = self.models.first().and_then(|model| model.get("shared_params"));
        shared.and_then(Tree::as_dict).is_some_and(|shared| shared.contains_key(&Key::from(name)))
    }

    fn too_large(&self, name: &str) -> Error {
        disagree(self.folder, self.file(0), format!("the shape of {name:?} has more elements than 64 bits can count"))
    }
}

/// Frozen weights of ZeRO-3: a fragment in each rank's model file.
pub(super) fn frozen_weights(folder: &Folder, files: &[&str], models: &[Tree<Parts>]) -> Result<Vec<(String, Parts)>> {
    let mut weights = Vec::new();
    let shapes = models.first().and_then(|model| model.get("frozen_param_shapes")).and_then(Tree::as_dict);
    for (key, shape) in shapes.into_iter().flatten() {
        let (Key::Str(name), Some(shape)) = (key, dims(shape)) else { continue };
        let mut parts = Vec::new();
        for (model, file) in models.iter().zip(files) {
            let fragment = model.get("frozen_param_fragments").and_then(|fragments| fragments.get(name));
            let flat = fragment.and_then(Tree::as_tensor).and_then(Parts::flat);
            let missing = || disagree(folder, file, format!("it has no fragment of the frozen parameter {name:?}"));
            parts.push(vec![flat.ok_or_else(missing)?]);
        }
        let many = || disagree(folder, files.first().unwrap_or(&"?"), format!("the shape of {name:?} has too many elements"));
        let pieces = partition::of_parameter(0, volume(&shape).ok_or_else(many)?, parts.len() as u64);
        let dtype = parts.iter().flatten().next().map_or(reshard_formats::DType::Float32, |part| part.dtype);
        let mut tensor = Parts::new(dtype, &shape);
        if let Err(rank) = partition::place(&mut tensor, &pieces, &parts)
            .map_err(|e| disagree(folder, "frozen_param_shapes", format!("{name:?}: {e}")))?
        {
            let file = files.get(rank).unwrap_or(&"?");
            return Err(disagree(folder, file, format!("its fragment of {name:?} is too short: sizes disagree")));
        }
        weights.push((name.clone(), tensor));
    }
    Ok(weights)
}

/// One named piece of the optimizer's state.
enum Slot {
    /// Flat tensors of each rank.
    Flat(Vec<Vec<FlatPart>>),
    /// One for the whole group: a step.
    Whole(Tree<Parts>),
}

/// The states of the groups, or sub-groups, in order.
fn states(optimizer: &Tree<Parts>) -> Vec<&Tree<Parts>> {
    let Some(outer) = optimizer.get("optimizer_state_dict") else { return Vec::new() };
    let inner = outer.get("base_optimizer_state").or_else(|| outer.get("optimizer_state_dict"));
    match inner {
        // As DeepSpeed wrote it with elastic checkpoints.
        Some(Tree::List(groups)) => groups.iter().collect(),
        Some(inner) => {
            let Some(states) = inner.get("state").and_then(Tree::as_dict) else { return Vec::new() };
            let mut numbered: Vec<(i64, &Tree<Parts>)> = states
                .iter()
                .filter_map(|(key, state)| match key {
                    Key::Int(number) => Some((*number, state)),
                    _ => None,
                })
                .collect();
            numbered.sort_by_key(|(number, _)| *number);
            numbered.into_iter().map(|(_, state)| state).collect()
        }
        None => Vec::new(),
    }
}

pub(super) fn dims(shape: &Tree<Parts>) -> Option<Vec<u64>> {
    integers(&shape.to_value()?)
}

fn volume(shape: &[u64]) -> Option<u64> {
    reshard_layout::volume_of(shape).ok()
}
