//! What sources build their catalogs of: trees of tensors that know where their parts lie, and `torch.save` files read as
//! such trees.

use indexmap::IndexMap;
use reshard_formats::record::{Content, StoredTensor, TensorSharding};
use reshard_formats::{DType, ElementForm, SafetensorsFile, TorchArchive, Value};
use reshard_layout::{ByteLayout, Dims, LayoutError, Mesh, Placement, Region, flat_pieces, local_regions, local_shape};
use reshard_state::{Dict, Key, Tree, flatten, key_of};
use reshard_storage::{Reader, Store};

use crate::checkpoint::{
    CatalogEntry, CatalogTensor, ChunkLocation, DataLocation, StoredChunk, StoredCrc, StoredFile, ValueLocation,
};
use crate::error::{Error, Result, StorageContext};

/// The key of a file that holds one thing and no tree.
pub(super) const ONLY: &str = "value";

/// What two numbers or files say differently, or what a file says of regions that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Disagrees(pub(super) String);

impl From<LayoutError> for Disagrees {
    fn from(error: LayoutError) -> Disagrees {
        Disagrees(error.to_string())
    }
}

/// A tensor and the regions of it that lie in files.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    pub(super) dtype: DType,
    pub(super) shape: Dims,
    pub(super) requires_grad: bool,
    /// Whether it is one rank's part of a DTensor or ShardedTensor, and other files may hold more of it.
    pub(super) part: bool,
    pub(super) chunks: Vec<StoredChunk>,
}

/// A one-dimensional stretch of elements in a file: a rank's part of a flattened group of parameters.
#[derive(Debug, Clone)]
pub(super) struct FlatPart {
    pub(super) dtype: DType,
    pub(super) file: u32,
    pub(super) elements: u64,
    start: u64,
    form: ElementForm,
    checksum: Option<StoredCrc>,
}

impl Parts {
    pub(super) fn new(dtype: DType, shape: &[u64]) -> Parts {
        Parts { dtype, shape: Dims::from_slice(shape), requires_grad: false, part: false, chunks: Vec::new() }
    }

    fn stored(mut tensor: StoredTensor, file: u32) -> Result<Parts, Disagrees> {
        let sharding = tensor.sharding.take();
        let storage = tensor.storage;
        let checksum = storage.crc32.map(|crc32| StoredCrc { offset: storage.offset, length: storage.length, crc32 });
        let data = DataLocation { layout: tensor.layout, form: tensor.form, checksum };
        let chunk = StoredChunk { region: Region::whole(&tensor.shape)?, file, location: ChunkLocation::Data(Box::new(data)) };
        let (dtype, requires_grad) = (tensor.dtype, tensor.requires_grad);
        let local = Parts { dtype, shape: tensor.shape, requires_grad, part: false, chunks: vec![chunk] };
        match sharding.map(|sharding| *sharding) {
            None => Ok(local),
            Some(TensorSharding::Mesh { shape, mesh, coordinate, placements }) => {
                let mesh = Mesh::new(&mesh)?;
                let Some(rank) = mesh.rank_at(&coordinate) else {
                    return Err(Disagrees("a rank does not stand on its mesh".to_owned()));
                };
                Parts::of_rank(local, &mesh, &placements, &shape, rank)
            }
            Some(TensorSharding::Shards { shape, shards }) => {
                let mut parts = Parts { part: true, ..Parts::new(dtype, &shape) };
                for (offsets, tensor) in shards {
                    parts.requires_grad |= tensor.requires_grad;
                    let shard = Parts::stored(tensor, file)?;
                    let region = Region::whole(&shard.shape)?;
                    if !region.is_empty() {
                        parts.add_cut(&shard, &region, &offsets)?;
                    }
                }
                Ok(parts)
            }
            Some(_) => Err(Disagrees("a tensor is sharded in a way that this version does not know".to_owned())),
        }
    }

    /// A rank's part of a DTensor of a shape, where `local` is what the rank holds.
    pub(super) fn of_rank(
        local: Parts,
        mesh: &Mesh,
        placements: &[Placement],
        shape: &[u64],
        rank: u64,
    ) -> Result<Parts, Disagrees> {
        let expected = local_shape(mesh, placements, shape, rank)?;
        if expected != local.shape {
            return Err(Disagrees(format!(
                "a DTensor of shape {shape:?} should have a part of shape {:?} here, and has one of {:?}",
                expected.as_slice(),
                local.shape.as_slice()
            )));
        }
        let mut parts = Parts { requires_grad: local.requires_grad, part: true, ..Parts::new(local.dtype, shape) };
        for region in local_regions(mesh, placements, shape, rank)? {
            if !region.global.is_empty() {
                let inner = Region::new(&region.local, region.global.sizes())?;
                parts.add_cut(&local, &inner, region.global.offsets())?;
            }
        }
        // An empty tensor is whole everywhere.
        if parts.elements() == 0 {
            return Ok(Parts { part: false, shape: parts.shape, ..local });
        }
        Ok(parts)
    }

    /// The number in a tensor of one float32, read.
    pub(super) fn scalar(&self, store: &dyn Store, name: &str) -> Result<Option<f64>> {
        let [StoredChunk { location: ChunkLocation::Data(data), .. }] = self.chunks.as_slice() else { return Ok(None) };
        if self.dtype != DType::Float32 || self.elements() != 1 {
            return Ok(None);
        }
        let mut bytes = [0; 4];
        let reader = store.open_reader(name).doing(|| format!("opening {name}"))?;
        reader.read_at(data.layout.base(), &mut bytes).doing(|| format!("reading {name}"))?;
        if !data.form.is_plain(self.dtype) {
            data.form.decode(self.dtype, &mut bytes);
        }
        Ok(Some(f32::from_le_bytes(bytes).into()))
    }

    /// The checksum of its bytes, where they are one stored stretch that holds nothing else.
    pub(super) fn own_checksum(&self) -> Option<u32> {
        let [StoredChunk { location: ChunkLocation::Data(data), .. }] = self.chunks.as_slice() else { return None };
        data.checksum.filter(|sum| self.elements().checked_mul(self.dtype.size()) == Some(sum.length)).map(|sum| sum.crc32)
    }

    /// Whether its chunks are all of it.
    pub(super) fn is_whole(&self) -> bool {
        let held: u64 = self.chunks.iter().map(|chunk| chunk.region.volume()).fold(0, u64::saturating_add);
        !self.part || held == self.elements()
    }

    pub(super) fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product: u64, size| product.saturating_mul(*size))
    }

    /// The tensor's elements as one stretch, if they lie in a file in order.
    pub(super) fn flat(&self) -> Option<FlatPart> {
        let [StoredChunk { region, file, location: ChunkLocation::Data(data) }] = self.chunks.as_slice() else { return None };
        if !data.layout.is_contiguous() || region.sizes() != self.shape.as_slice() {
            return None;
        }
        let start = data.layout.base();
        let (dtype, elements) = (self.dtype, self.elements());
        Some(FlatPart { dtype, file: *file, elements, start, form: data.form, checksum: data.checksum })
    }

    /// Adds the elements `[start, end)` of the flattened tensor, which lie at element `at` of a stretch.
    pub(super) fn add_flat(&mut self, start: u64, end: u64, part: &FlatPart, at: u64) -> Result<(), Disagrees> {
        let inside = at.checked_add(end - start).is_some_and(|last| last <= part.elements);
        if !inside || part.dtype != self.dtype {
            return Err(Disagrees("a part of a tensor lies outside its stretch".to_owned()));
        }
        let size = self.dtype.size();
        for piece in flat_pieces(&self.shape, start, end)? {
            // Inside the stretch, whose end was proven to lie inside its file.
            let base = part.start + (at + piece.start) * size;
            let layout = ByteLayout::contiguous(piece.region.sizes(), size)?.try_at(base)?;
            let data = DataLocation { layout, form: part.form, checksum: part.checksum };
            self.chunks.push(StoredChunk {
                region: piece.region,
                file: part.file,
                location: ChunkLocation::Data(Box::new(data)),
            });
        }
        Ok(())
    }

    /// Adds what another tensor has inside `region`; its first element comes to `to`.
    pub(super) fn add_cut(&mut self, other: &Parts, region: &Region, to: &[u64]) -> Result<(), Disagrees> {
        let size = other.dtype.size();
        for chunk in &other.chunks {
            let Some(overlap) = chunk.region.intersection(region) else { continue };
            let ChunkLocation::Data(data) = &chunk.location else {
                return Err(Disagrees("a record cannot be cut".to_owned()));
            };
            let inner = overlap.within(&chunk.region)?;
            let strides: Dims = data.layout.byte_strides().iter().map(|stride| stride / size).collect();
            let layout = ByteLayout::strided(inner.sizes(), &strides, size)?.try_at(data.layout.position(inner.offsets()))?;
            let location = ChunkLocation::Data(Box::new(DataLocation { layout, ..(**data).clone() }));
            let region = overlap.within(region)?.translated(to)?;
            self.chunks.push(StoredChunk { region, file: chunk.file, location });
        }
        Ok(())
    }

    /// The same elements under another shape of the same volume; none where they do not lie in one stretch.
    pub(super) fn reshaped(&self, shape: &[u64]) -> Result<Option<Parts>, Disagrees> {
        let mut parts = Parts::new(self.dtype, shape);
        let Some(flat) = self.flat().filter(|flat| flat.elements == parts.elements()) else { return Ok(None) };
        parts.add_flat(0, flat.elements, &flat, 0)?;
        Ok(Some(parts))
    }

    pub(super) fn into_catalog(self) -> CatalogTensor {
        CatalogTensor::new(self.dtype, self.shape, self.requires_grad, self.chunks)
    }
}

/// What a `torch.save` file holds, with the places of its tensors; nothing of them is read. `number` is the file's in the
/// catalog to be.
pub(super) fn read_file(store: &dyn Store, path: &str, name: &str, number: u32) -> Result<Tree<Parts>> {
    let reader = store.open_reader(name).doing(|| format!("opening {name}"))?;
    let invalid = |e| Error::format(path, name, "torch.save file", e);
    let file = StoredFile(reader.as_ref());
    let archive = TorchArchive::open_file(&file).map_err(invalid)?;
    match archive.tree().map_err(invalid)? {
        Tree::Opaque(opaque) => Err(Error::Untrusted { path: path.to_owned(), key: name.to_owned(), class: opaque.class }),
        tree => converted(tree, number).map_err(|e| Error::format(path, name, "torch.save file", e)),
    }
}

/// What a `torch.save` record inside a file holds, likewise.
pub(super) fn read_record(
    reader: &dyn Reader,
    path: &str,
    name: &str,
    number: u32,
    offset: u64,
    length: u64,
) -> Result<Tree<Parts>> {
    let invalid = |e| Error::format(path, name, "torch.save record", e);
    let file = StoredFile(reader);
    let archive = TorchArchive::open(&file, offset, length).map_err(invalid)?;
    converted(archive.tree().map_err(invalid)?, number).map_err(|e| Error::format(path, name, "torch.save record", e))
}

/// The tensors of a safetensors file, and its texts.
pub(super) fn read_safetensors(
    store: &dyn Store,
    path: &str,
    name: &str,
    number: u32,
) -> Result<(IndexMap<String, Parts>, IndexMap<String, String>)> {
    let reader = store.open_reader(name).doing(|| format!("opening {name}"))?;
    let header = SafetensorsFile::open(&StoredFile(reader.as_ref()));
    let header = header.map_err(|e| Error::format(path, name, "safetensors file", e))?;
    let mut tensors = IndexMap::with_capacity(header.tensors.len());
    for (key, tensor) in header.tensors {
        let disagrees = |e| Error::format(path, name, "safetensors file", e);
        let layout = ByteLayout::contiguous(&tensor.shape, tensor.dtype.size());
        let layout = layout.and_then(|layout| layout.try_at(tensor.data_offset)).map_err(disagrees)?;
        let location = ChunkLocation::Data(Box::new(DataLocation { layout, form: ElementForm::default(), checksum: None }));
        let mut parts = Parts::new(tensor.dtype, &tensor.shape);
        parts.chunks.push(StoredChunk { region: Region::whole(&tensor.shape).map_err(disagrees)?, file: number, location });
        tensors.insert(key, parts);
    }
    Ok((tensors, header.metadata))
}

/// What a `torch.save` file that is a checkpoint by itself holds. One without tensors that names a class which is not known
/// to be data is one object, which is not looked into.
pub(super) fn read_whole(store: &dyn Store, path: &str, name: &str) -> Result<Tree<Parts>> {
    let reader = store.open_reader(name).doing(|| format!("opening {name}"))?;
    let invalid = |e| Error::format(path, name, "torch.save file", e);
    let file = StoredFile(reader.as_ref());
    let archive = TorchArchive::open_file(&file).map_err(invalid)?;
    let disagrees = |e| Error::format(path, name, "torch.save file", e);
    Ok(match archive.content().map_err(invalid)? {
        Content::Tensor(tensor) => Tree::Tensor(Parts::stored(tensor, 0).map_err(disagrees)?),
        Content::Value(value) => opened(value),
        Content::Tree(tree) => converted(tree, 0).map_err(disagrees)?,
        Content::Opaque { class } => Tree::opaque(class),
        _ => return Err(Error::unsupported(format!("{name} in {path} holds something this version does not know"))),
    })
}

/// The entries of a tree, flattened by DCP's rules.
pub(super) fn entries(tree: Tree<Parts>, path: &str, name: &str) -> Result<IndexMap<String, CatalogEntry>> {
    let tree = match tree {
        Tree::Dict(dict) => dict,
        other => Dict::from_iter([(Key::from(ONLY), other)]),
    };
    let flat = flatten(tree).map_err(|e| Error::format(path, name, "state dict", e))?;
    let mut entries = IndexMap::with_capacity(flat.len());
    for (key, leaf) in flat {
        let entry = match leaf.leaf {
            Tree::Tensor(tensor) if !tensor.is_whole() => {
                let shape = tensor.shape.as_slice();
                let class = format!("DTensor or ShardedTensor of shape {shape:?}, of which one rank's part is here");
                CatalogEntry::value(Some(leaf.path), ValueLocation::Opaque { class })
            }
            Tree::Tensor(tensor) => CatalogEntry::tensor(Some(leaf.path), tensor.into_catalog()),
            Tree::Opaque(opaque) => CatalogEntry::value(Some(leaf.path), ValueLocation::Opaque { class: opaque.class }),
            other => match other.to_value() {
                Some(value) => CatalogEntry::value(Some(leaf.path), ValueLocation::Inline(value)),
                None => {
                    let class = opaque_in(&other).unwrap_or("a tuple with tensors").to_owned();
                    CatalogEntry::value(Some(leaf.path), ValueLocation::Opaque { class })
                }
            },
        };
        entries.insert(key, entry);
    }
    Ok(entries)
}

/// Whether it is a container with nothing in it, or None.
pub(super) fn is_vacant(tree: &Tree<Parts>) -> bool {
    match tree {
        Tree::Dict(dict) => dict.is_empty(),
        Tree::List(items) | Tree::Tuple(items) => items.is_empty(),
        Tree::Value(value) => matches!(value, Value::None),
        Tree::Tensor(_) | Tree::Opaque(_) => false,
    }
}

/// The first class in a tree that only its own library can read.
fn opaque_in(tree: &Tree<Parts>) -> Option<&str> {
    match tree {
        Tree::Opaque(opaque) => Some(&opaque.class),
        Tree::List(items) | Tree::Tuple(items) => items.iter().find_map(opaque_in),
        Tree::Dict(dict) => dict.iter().find_map(|(_, below)| opaque_in(below)),
        _ => None,
    }
}

/// Files keep plain parts as one value; flattening looks into dicts, so they are opened here.
fn converted(tree: Tree<StoredTensor>, number: u32) -> Result<Tree<Parts>, Disagrees> {
    let all = |items: Vec<Tree<StoredTensor>>| {
        items.into_iter().map(|below| converted(below, number)).collect::<Result<Vec<_>, Disagrees>>()
    };
    Ok(match tree {
        Tree::Tensor(tensor) => Tree::Tensor(Parts::stored(tensor, number)?),
        Tree::Value(value) => opened(value),
        Tree::Dict(dict) => {
            let pairs = dict.into_iter().map(|(key, below)| Ok((key, converted(below, number)?)));
            Tree::Dict(pairs.collect::<Result<_, Disagrees>>()?)
        }
        Tree::List(items) => Tree::List(all(items)?),
        Tree::Tuple(items) => Tree::Tuple(all(items)?),
        Tree::Opaque(opaque) => Tree::Opaque(opaque),
    })
}

/// A plain value as a tree, opened as far as flattening looks into it: tuples, and what is in them, stay what they are.
fn opened(value: Value) -> Tree<Parts> {
    match value {
        Value::List(items) => Tree::List(items.into_iter().map(opened).collect()),
        Value::Dict(pairs) | Value::OrderedDict(pairs) => {
            Tree::Dict(pairs.into_iter().map(|(key, value)| (key_of(key), opened(value))).collect())
        }
        other => Tree::Value(other),
    }
}
