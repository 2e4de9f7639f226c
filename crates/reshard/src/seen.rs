//! A stored tensor seen in another way: its chunks' regions and windows rewritten, no byte moved.

use reshard_formats::DType;
use reshard_layout::{ByteLayout, Dims, LayoutError, Region, SeenBox};

use crate::checkpoint::{CatalogTensor, ChunkLocation, Computed, Formula, Input, SeenLocation, StoredChunk};

/// A tensor that falls apart into more chunks than this is refused.
pub(crate) const MOST_CHUNKS: usize = 1 << 20;

/// What to do with a rule's tensor may fail by its geometry, or because of what it holds.
pub(crate) type Outcome<T> = Result<T, String>;

fn text(error: LayoutError) -> String {
    error.to_string()
}

/// The numbers of the stored chunk's elements, where this chunk has them.
fn window(chunk: &StoredChunk) -> Result<ByteLayout, LayoutError> {
    let sizes = chunk.region.sizes();
    match &chunk.location {
        ChunkLocation::Seen(seen) => Ok(seen.window.clone()),
        ChunkLocation::Fill(_) | ChunkLocation::Live => ByteLayout::strided(sizes, &Dims::from_elem(0, sizes.len()), 1),
        ChunkLocation::Record { .. } | ChunkLocation::Data(_) | ChunkLocation::Computed(_) => ByteLayout::contiguous(sizes, 1),
    }
}

/// A chunk with another region, whose elements lie in the stored chunk as a window says.
fn with_window(chunk: &StoredChunk, dtype: DType, seen: SeenBox) -> StoredChunk {
    let SeenBox { region, layout } = seen;
    let location = match &chunk.location {
        ChunkLocation::Seen(location) => ChunkLocation::Seen(Box::new(SeenLocation { window: layout, ..(**location).clone() })),
        ChunkLocation::Fill(_) | ChunkLocation::Live => chunk.location.clone(),
        // All of it as it is: nothing to see through.
        location if region.sizes() == chunk.region.sizes() && layout.is_contiguous() && layout.base() == 0 => location.clone(),
        location => {
            let (stored, region) = (location.clone(), chunk.region.clone());
            ChunkLocation::Seen(Box::new(SeenLocation { stored, dtype, region, window: layout }))
        }
    };
    StoredChunk { region, file: chunk.file, location }
}

/// A tensor of another shape, each of whose chunks is made from one of this.
fn mapped(
    tensor: &CatalogTensor,
    shape: &[u64],
    mut each: impl FnMut(SeenBox, &mut Vec<SeenBox>) -> Result<(), LayoutError>,
) -> Result<CatalogTensor, LayoutError> {
    let mut chunks = Vec::with_capacity(tensor.chunks.len());
    let mut boxes = Vec::new();
    for chunk in &tensor.chunks {
        each(SeenBox::new(chunk.region.clone(), window(chunk)?)?, &mut boxes)?;
        chunks.extend(boxes.drain(..).map(|seen| with_window(chunk, tensor.dtype, seen)));
        if chunks.len() > MOST_CHUNKS {
            return Err(LayoutError::TooManyRegions { field: "the view of a tensor", limit: MOST_CHUNKS as u64 });
        }
    }
    Ok(CatalogTensor::new(tensor.dtype, Dims::from_slice(shape), tensor.requires_grad, chunks))
}

/// A dimension that counts from the end when it is negative.
pub(crate) fn dimension(dim: i64, ndim: usize) -> Outcome<usize> {
    let found = if dim < 0 { dim.saturating_add(ndim as i64) } else { dim };
    match usize::try_from(found).ok().filter(|&dim| dim < ndim) {
        Some(dim) => Ok(dim),
        None => Err(format!("dimension {dim} does not exist in a tensor of {ndim} dimensions")),
    }
}

/// The indices `start..start + length` of a dimension.
pub(crate) fn sliced(tensor: &CatalogTensor, dim: usize, start: u64, length: u64) -> Outcome<CatalogTensor> {
    let mut offsets = Dims::from_elem(0, tensor.shape.len());
    let mut shape = tensor.shape.clone();
    if start.checked_add(length).is_none_or(|end| end > shape[dim]) {
        return Err(format!("{start}:{} of dimension {dim} is outside shape {:?}", start.saturating_add(length), &shape[..]));
    }
    (offsets[dim], shape[dim]) = (start, length);
    let part = Region::new(&offsets, &shape).map_err(text)?;
    let cut = |seen: SeenBox, into: &mut Vec<SeenBox>| {
        into.extend(seen.sliced(&part)?);
        Ok(())
    };
    mapped(tensor, &shape, cut).map_err(text)
}

/// The dimensions in another order.
pub(crate) fn permuted(tensor: &CatalogTensor, order: &[usize]) -> Outcome<CatalogTensor> {
    let ndim = tensor.shape.len();
    if order.len() != ndim || order.iter().any(|&dim| dim >= ndim) {
        return Err(format!("the order {order:?} is not one of the {ndim} dimensions of shape {:?}", &tensor.shape[..]));
    }
    let shape: Dims = order.iter().map(|&dim| tensor.shape[dim]).collect();
    let turn = |seen: SeenBox, into: &mut Vec<SeenBox>| {
        into.push(seen.permuted(order)?);
        Ok(())
    };
    mapped(tensor, &shape, turn).map_err(text)
}

/// The same elements in row-major order, in another shape.
pub(crate) fn reshaped(tensor: &CatalogTensor, shape: &[u64]) -> Outcome<CatalogTensor> {
    let from = tensor.shape.clone();
    let reshape = |seen: SeenBox, into: &mut Vec<SeenBox>| {
        into.extend(seen.reshaped(&from, shape, MOST_CHUNKS)?);
        Ok(())
    };
    if reshard_layout::volume_of(&from).map_err(text)? != reshard_layout::volume_of(shape).map_err(text)? {
        return Err(LayoutError::Reshape { from, to: Dims::from_slice(shape) }.to_string());
    }
    mapped(tensor, shape, reshape).map_err(text)
}

/// Tensors of one type beside each other along a dimension.
pub(crate) fn concatenated(tensors: Vec<CatalogTensor>, dim: usize) -> Outcome<CatalogTensor> {
    let Some(first) = tensors.first() else { return Err("no tensors to join".to_owned()) };
    let (dtype, requires_grad) = (first.dtype, first.requires_grad);
    let mut shape = first.shape.clone();
    shape[dim] = 0;
    let mut chunks = Vec::new();
    for tensor in tensors {
        let fits = tensor.shape.len() == shape.len()
            && tensor.shape.iter().zip(&shape).enumerate().all(|(at, (a, b))| at == dim || a == b);
        if !fits {
            let (a, b) = (&tensor.shape[..], &shape[..]);
            return Err(format!("shapes {a:?} and {b:?} differ in another dimension than {dim}, along which they are joined"));
        }
        if tensor.dtype != dtype {
            return Err(format!("{} and {} cannot be joined; cast one of them first", tensor.dtype.name(), dtype.name()));
        }
        for mut chunk in tensor.chunks {
            let mut by = Dims::from_elem(0, shape.len());
            by[dim] = shape[dim];
            // A plain place knows its own region: where it stays whole, only its tensor's coordinates move.
            chunk.region = chunk.region.translated(&by).map_err(text)?;
            chunks.push(chunk);
        }
        let end = shape[dim].checked_add(tensor.shape[dim]);
        shape[dim] = end.ok_or_else(|| "the joined tensor is too large".to_owned())?;
        if chunks.len() > MOST_CHUNKS {
            return Err(format!("the joined tensor has more than {MOST_CHUNKS} chunks"));
        }
    }
    reshard_layout::volume_of(&shape).map_err(text)?;
    Ok(CatalogTensor::new(dtype, shape, requires_grad, chunks))
}

/// With one more dimension of one index.
pub(crate) fn with_dim(tensor: &CatalogTensor, dim: usize) -> Outcome<CatalogTensor> {
    let mut shape = tensor.shape.clone();
    if dim > shape.len() {
        return Err(format!("dimension {dim} does not exist in a tensor of {} dimensions", shape.len() + 1));
    }
    shape.insert(dim, 1);
    let more = |seen: SeenBox, into: &mut Vec<SeenBox>| {
        into.push(seen.with_dim(dim, 0)?);
        Ok(())
    };
    mapped(tensor, &shape, more).map_err(text)
}

/// Without a dimension of one index.
pub(crate) fn without_dim(tensor: &CatalogTensor, dim: usize) -> Outcome<CatalogTensor> {
    let mut shape = tensor.shape.clone();
    shape.remove(dim);
    let less = |seen: SeenBox, into: &mut Vec<SeenBox>| {
        into.push(seen.without_dim(dim)?);
        Ok(())
    };
    mapped(tensor, &shape, less).map_err(text)
}

/// Grown to `size` along a dimension; what is new is a value, or what the loaded tensor holds.
pub(crate) fn padded(tensor: CatalogTensor, dim: usize, size: u64, location: ChunkLocation) -> Outcome<CatalogTensor> {
    let old = tensor.shape[dim];
    if size < old {
        return Err(format!("dimension {dim} of shape {:?} cannot be padded to {size}; truncate it", &tensor.shape[..]));
    }
    let mut shape = tensor.shape.clone();
    shape[dim] = size;
    reshard_layout::volume_of(&shape).map_err(text)?;
    let mut chunks = tensor.chunks;
    let mut offsets = Dims::from_elem(0, shape.len());
    let mut sizes = shape.clone();
    (offsets[dim], sizes[dim]) = (old, size - old);
    let region = Region::new(&offsets, &sizes).map_err(text)?;
    if !region.is_empty() {
        chunks.push(StoredChunk { region, file: StoredChunk::NO_FILE, location });
    }
    Ok(CatalogTensor::new(tensor.dtype, shape, tensor.requires_grad, chunks))
}

/// Of another element type, to which each chunk is cast while it is read.
pub(crate) fn cast(tensor: CatalogTensor, dtype: DType) -> Outcome<CatalogTensor> {
    let from = tensor.dtype;
    if from == dtype {
        return Ok(tensor);
    }
    if !crate::cast::can_cast(from, dtype) {
        return Err(format!("no cast from {} to {}", from.name(), dtype.name()));
    }
    let is_cast = |chunk: &StoredChunk| matches!(&chunk.location, ChunkLocation::Seen(seen) if seen.dtype != from);
    // What a view casts is cast once while it is read; what is to be cast again is an input of its own.
    let tensor = match tensor.chunks.iter().any(is_cast) {
        true => Computed::new(Formula::Same, vec![Input { key: "what is cast again".to_owned(), tensor }])?.into_tensor()?,
        false => tensor,
    };
    let mut chunks = tensor.chunks;
    for chunk in &mut chunks {
        chunk.location = match std::mem::replace(&mut chunk.location, ChunkLocation::Live) {
            ChunkLocation::Fill(value) => {
                let mut filled = vec![0; dtype.size() as usize];
                crate::cast::cast(from, &value, dtype, &mut filled).map_err(|e| e.to_string())?;
                ChunkLocation::Fill(filled.into_boxed_slice())
            }
            location @ (ChunkLocation::Seen(_) | ChunkLocation::Live) => location,
            stored => {
                let window = ByteLayout::contiguous(chunk.region.sizes(), 1).map_err(text)?;
                ChunkLocation::Seen(Box::new(SeenLocation { stored, dtype: from, region: chunk.region.clone(), window }))
            }
        };
    }
    Ok(CatalogTensor::new(dtype, tensor.shape, tensor.requires_grad, chunks))
}

/// A weight with a low-rank update added to it, of the weight's own type: weight, A and B.
pub(crate) fn low_rank(inputs: Vec<Input>, scale: f32, transposed: bool) -> Outcome<CatalogTensor> {
    let Some(dtype) = inputs.first().map(|weight| weight.tensor.dtype) else { return Err("there is no weight".to_owned()) };
    if !crate::cast::holds_values(dtype) {
        return Err(format!("the weight is {}, to which nothing can be added", dtype.name()));
    }
    cast(Computed::new(Formula::LowRank { scale, transposed }, inputs)?.into_tensor()?, dtype)
}
