//! DTensors and ShardedTensors: what one rank holds, and what the rest of the object says of the whole. The classes are recognised by
//! name and read as the data they are made of; none is imported.

use reshard_layout::{Dims, Placement};

use super::error::RecordError;
use super::tensor::{Fail, Rebuilder, StoredTensor};
use crate::pickle::{Document, Global, Node, View};

/// More dimensions than a device mesh has.
const MAX_MESH_DIMS: usize = 16;

/// More ranks than any job has; a lying file cannot make us count further.
const MAX_MESH_RANKS: u64 = 1 << 20;

/// What a rank's part of a tensor is a part of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorSharding {
    /// A DTensor, of which the stored tensor is what a rank holds.
    Mesh {
        /// The shape of the whole.
        shape: Dims,
        /// The shape of the device mesh.
        mesh: Dims,
        /// Where on it the rank stands that wrote the part.
        coordinate: Dims,
        /// How each dimension of the mesh cuts the tensor.
        placements: Vec<Placement>,
    },
    /// A ShardedTensor. The stored tensor is empty; what a rank holds are any number of shards.
    Shards {
        /// The shape of the whole.
        shape: Dims,
        /// Where each begins, and what it holds.
        shards: Vec<(Dims, StoredTensor)>,
    },
}

/// Whether this is the class of what FSDP1 saves where it has no device mesh, and of its local state dicts.
pub(super) fn is_sharded_tensor(class: &Global<'_>) -> bool {
    class.name() == "ShardedTensor" && class.module().starts_with("torch.distributed._shard.")
}

/// Whether this is PyTorch's class, in any of the modules it has lived in.
pub(super) fn is_dtensor(class: &Global<'_>) -> bool {
    class.name() == "DTensor" && class.module().starts_with("torch.distributed.")
}

impl Rebuilder<'_, '_> {
    /// The local tensor of a DTensor, with what it is a part of.
    pub(super) fn dtensor(&mut self, state: Node, fail: &Fail<'_>, depth: usize) -> Result<StoredTensor, RecordError> {
        let document = self.document();
        let missing = |what: &str| fail.unsupported(format!("a DTensor without {what}"));
        let local = attribute(document, state, "_local_tensor").ok_or_else(|| missing("its local tensor"))?;
        let spec = attribute(document, state, "_spec").ok_or_else(|| missing("its specification"))?;
        let sharding = sharding(document, spec).map_err(|what| fail.unsupported(format!("a DTensor {what}")))?;
        let mut tensor = self.nested(local, fail, depth + 1)?;
        if tensor.sharding.is_some() {
            return Err(fail.bad("a DTensor in a DTensor"));
        }
        tensor.sharding = Some(Box::new(sharding));
        Ok(tensor)
    }

    /// The local shards of a ShardedTensor. Its state is a tuple: the shards, what is said of all, and what only its own ranks need.
    pub(super) fn sharded_tensor(&mut self, state: Node, fail: &Fail<'_>, depth: usize) -> Result<StoredTensor, RecordError> {
        let document = self.document();
        let unknown = |what: &str| fail.unsupported(format!("a ShardedTensor {what}"));
        let Some([listed, metadata, ..]) = document.as_tuple(state) else { return Err(unknown("of unknown form")) };
        let shape = attribute(document, *metadata, "size").and_then(|node| numbers(document, node));
        let shape = shape.ok_or_else(|| unknown("of unknown shape"))?;
        let properties = attribute(document, *metadata, "tensor_properties").and_then(|node| document.as_object(node)?.state);
        let dtype = properties.and_then(|state| match items(document, state) {
            Some(fields) => fields.first().copied(),
            None => attribute(document, state, "dtype"),
        });
        let dtype = self.dtype(dtype.ok_or_else(|| unknown("of unknown element type"))?, fail)?;
        let mut shards = Vec::new();
        for shard in items(document, *listed).ok_or_else(|| unknown("without shards"))? {
            let place = attribute(document, *shard, "metadata").ok_or_else(|| unknown("with a shard without a place"))?;
            let field = |name: &str| attribute(document, place, name).and_then(|node| numbers(document, node));
            let (Some(offsets), Some(sizes)) = (field("shard_offsets"), field("shard_sizes")) else {
                return Err(unknown("with a shard without a place"));
            };
            let tensor = attribute(document, *shard, "tensor").ok_or_else(|| unknown("with a shard without a tensor"))?;
            let tensor = self.nested(tensor, fail, depth + 1)?;
            if tensor.sharding.is_some() || tensor.shape != sizes || tensor.dtype != dtype {
                return Err(fail.bad(format!(
                    "a ShardedTensor of {dtype} with a shard of sizes {:?} that holds {} of shape {:?}",
                    sizes.as_slice(),
                    tensor.dtype,
                    tensor.shape.as_slice()
                )));
            }
            let ends = offsets.iter().zip(&sizes).map(|(offset, size)| offset.checked_add(*size));
            let inside = ends.zip(&shape).all(|(end, size)| end.is_some_and(|end| end <= *size));
            if offsets.len() != shape.len() || sizes.len() != shape.len() || !inside {
                return Err(fail.bad("a ShardedTensor with a shard outside of it"));
            }
            shards.push((offsets, tensor));
        }
        StoredTensor::empty(dtype, TensorSharding::Shards { shape, shards }, fail)
    }
}

fn sharding(document: &Document<'_>, spec: Node) -> Result<TensorSharding, String> {
    let get = |name: &str| attribute(document, spec, name).ok_or_else(|| format!("whose specification has no {name}"));
    let mesh = get("mesh")?;
    let sizes = mesh_shape(document, mesh).ok_or("on a device mesh of unknown form")?;
    let coordinate = attribute(document, mesh, "_coordinate_on_dim").and_then(|node| numbers(document, node));
    let coordinate = coordinate.ok_or("on a device mesh that its rank is not part of")?;
    let ranks = sizes.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
    if ranks.is_none_or(|ranks| ranks > MAX_MESH_RANKS) {
        return Err("on a device mesh of more ranks than are accepted".into());
    }
    if sizes.len() > MAX_MESH_DIMS
        || coordinate.len() != sizes.len()
        || coordinate.iter().zip(&sizes).any(|(at, size)| at >= size)
    {
        return Err("whose rank does not stand on its device mesh".into());
    }
    let listed = items(document, get("placements")?).ok_or("with placements of unknown form")?;
    let placements = listed.iter().map(|node| placement(document, *node)).collect::<Result<Vec<_>, _>>()?;
    if placements.len() != sizes.len() {
        return Err("with another number of placements than mesh dimensions".into());
    }
    let meta = get("tensor_meta")?;
    // A named tuple: made of its fields in order.
    let shape = document.as_object(meta).and_then(|meta| document.as_tuple(meta.args)?.first().copied());
    let shape = shape.or_else(|| attribute(document, meta, "shape")).and_then(|node| numbers(document, node));
    let shape = shape.ok_or("of unknown shape")?;
    if let Some(order) = attribute(document, spec, "shard_order") {
        check_order(document, order)?;
    }
    Ok(TensorSharding::Mesh { shape, mesh: sizes, coordinate, placements })
}

/// Mesh dimensions that cut the same tensor dimension do so from the first to the last; another order is not known here.
fn check_order(document: &Document<'_>, order: Node) -> Result<(), String> {
    for entry in items(document, order).unwrap_or_default() {
        let Some(entry) = document.as_object(*entry) else { continue };
        let Some([_, dims]) = document.as_tuple(entry.args) else { continue };
        let dims = numbers(document, *dims).ok_or("with a shard order of unknown form")?;
        if !dims.is_sorted() {
            return Err("whose mesh dimensions cut it in another order than their own".into());
        }
    }
    Ok(())
}

fn placement(document: &Document<'_>, node: Node) -> Result<Placement, String> {
    let object = document.as_object(node).ok_or("with a placement of unknown form")?;
    let class = document.global(object.class);
    // From the arguments, the attributes, or a state that is a tuple of both.
    let number = |position: usize, name: &str| -> Option<u64> {
        let in_tuple = |node| items(document, node).and_then(|items| document.as_u64(*items.get(position)?));
        in_tuple(object.args).or_else(|| {
            let state = object.state?;
            let named = attribute(document, state, name).and_then(|node| document.as_u64(node));
            named.or_else(|| in_tuple(state))
        })
    };
    let unknown = || format!("with the placement {}", class.path());
    let dim = || number(0, "dim").and_then(|dim| usize::try_from(dim).ok()).ok_or_else(unknown);
    match class.name() {
        "Replicate" => Ok(Placement::Replicate),
        "Shard" => Ok(Placement::Shard(dim()?)),
        "_StridedShard" => {
            let split_factor =
                number(1, "split_factor").filter(|factor| (1..=MAX_MESH_RANKS).contains(factor)).ok_or_else(unknown)?;
            Ok(Placement::StridedShard { dim: dim()?, split_factor })
        }
        _ => Err(unknown()),
    }
}

/// The sizes of a device mesh: of its layout, or of its tensor of ranks (torch 2.9 and earlier).
fn mesh_shape(document: &Document<'_>, mesh: Node) -> Option<Dims> {
    if let Some(layout) = attribute(document, mesh, "_layout") {
        if let Some(axes) = attribute(document, layout, "axes").and_then(|axes| items(document, axes)) {
            return axes.iter().map(|axis| product(document, attribute(document, *axis, "shape")?)).collect();
        }
        let shape = attribute(document, layout, "shape").or_else(|| attribute(document, layout, "_shape"))?;
        return match items(document, shape) {
            Some(sizes) => sizes.iter().map(|size| product(document, *size)).collect(),
            None => Some(Dims::from_slice(&[document.as_u64(shape)?])),
        };
    }
    let ranks = attribute(document, mesh, "mesh").or_else(|| attribute(document, mesh, "_mesh"))?;
    let args = document.as_tuple(document.as_object(ranks)?.args)?;
    numbers(document, *args.get(2)?)
}

/// A number, or the product of the numbers in a tuple.
fn product(document: &Document<'_>, node: Node) -> Option<u64> {
    match items(document, node) {
        Some(_) => numbers(document, node)?.iter().try_fold(1u64, |product, size| product.checked_mul(*size)),
        None => document.as_u64(node),
    }
}

fn items<'d>(document: &'d Document<'_>, node: Node) -> Option<&'d [Node]> {
    match document.view(node) {
        View::Tuple(items) | View::List(items) | View::Size(items) => Some(items),
        _ => None,
    }
}

fn numbers(document: &Document<'_>, node: Node) -> Option<Dims> {
    items(document, node)?.iter().map(|node| document.as_u64(*node)).collect()
}

/// A field of an object, of its state, or of a state that is a tuple of dicts.
fn attribute(document: &Document<'_>, node: Node, name: &str) -> Option<Node> {
    let in_dict =
        |pairs: &[[Node; 2]]| pairs.iter().find(|[key, _]| document.as_str(*key) == Some(name)).map(|[_, value]| *value);
    let in_state = |state: Node| match document.view(state) {
        View::Dict(pairs) => in_dict(pairs),
        View::Tuple(states) => states.iter().find_map(|state| match document.view(*state) {
            View::Dict(pairs) => in_dict(pairs),
            _ => None,
        }),
        _ => None,
    };
    match document.view(node) {
        View::Object(object) => in_state(object.state?),
        _ => in_state(node),
    }
}
