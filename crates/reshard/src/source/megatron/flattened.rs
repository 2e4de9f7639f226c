//! Tensors that Megatron core up to 0.14 flattened (`fully_sharded_model_space`, `fully_sharded_bucket_space`).
//!
//! A tensor of shape [X, Y] that ranks hold in parts of [x, y] is stored as one of [X/x, Y/y, x·y], each part flattened along the
//! last axis and cut there wherever a data parallel rank's range ends. The metadata's `mcore_data` has the shape that it
//! had. So each stored range is a range of a flattened part: a few boxes of the tensor.

use std::collections::HashMap;

use indexmap::IndexMap;
use reshard_formats::metadata::ExtraFields;
use reshard_formats::{DType, Value};
use reshard_layout::{ByteLayout, Dims, LayoutError, flat_pieces, volume_of};

use crate::checkpoint::{Catalog, CatalogEntry, CatalogKind, CatalogTensor, ChunkLocation, SeenLocation, StoredChunk};
use crate::error::{Error, Result};
use crate::layout_names::METADATA_FILE;
use crate::source::tensors::Disagrees;
use crate::source::values::{field, integers};

/// The field of the metadata that Megatron adds.
const FIELD: &str = "mcore_data";
/// In it, the shape that a tensor had before it was flattened.
const SHAPE: &str = "nd_reformulated_orig_global_shape";

/// The shapes of tensors that are stored flattened, by key.
pub(in crate::source) fn shapes(extra: &ExtraFields, path: &str, file: &str) -> Result<HashMap<String, Vec<u64>>> {
    let mut shapes = HashMap::new();
    let Some((_, carried)) = extra.iter().find(|(name, _)| name == FIELD) else { return Ok(shapes) };
    let value = carried.to_value().map_err(|error| Error::format(path, file, "Megatron's part of DCP metadata", error))?;
    let Value::Dict(tensors) = &value else { return Ok(shapes) };
    for (key, of_tensor) in tensors {
        let (Value::Str(key), Some(shape)) = (key, field(of_tensor, SHAPE)) else { continue };
        let Some(shape) = integers(shape) else {
            let detail = format!("{FIELD} has no shape for {key:?}, but {}", shape.python_repr());
            return Err(Error::format(path, file, "Megatron's part of DCP metadata", Disagrees(detail)));
        };
        shapes.insert(key.clone(), shape);
    }
    Ok(shapes)
}

/// The catalog's entries, with these tensors in the shapes that they had.
pub(super) fn restored(
    catalog: &Catalog,
    path: &str,
    shapes: &HashMap<String, Vec<u64>>,
) -> Result<IndexMap<String, CatalogEntry>> {
    let mut entries = IndexMap::with_capacity(catalog.entries.len());
    for (key, entry) in &catalog.entries {
        let entry = match (&entry.kind, shapes.get(key)) {
            (CatalogKind::Tensor(tensor), Some(shape)) => {
                let wrong = |detail: String| {
                    let detail = format!("{key:?} {detail}: sizes disagree");
                    Error::format(path, METADATA_FILE, "DCP metadata of Megatron", Disagrees(detail))
                };
                CatalogEntry::tensor(entry.path.clone(), unflattened(tensor, shape).map_err(wrong)?)
            }
            _ => entry.copied(),
        };
        entries.insert(key.clone(), entry);
    }
    Ok(entries)
}

/// A tensor of the shape it had, made of ranges of its flattened parts.
fn unflattened(tensor: &CatalogTensor, shape: &[u64]) -> std::result::Result<CatalogTensor, String> {
    let stored = tensor.shape.as_slice();
    let disagree = || format!("is stored as {stored:?}, which is not a flattened form of {shape:?}");
    let Some((length, grid)) = stored.split_last().filter(|(_, grid)| grid.len() == shape.len()) else {
        return Err(disagree());
    };
    if shape.iter().zip(grid).any(|(size, parts)| *parts == 0 || !size.is_multiple_of(*parts)) {
        return Err(disagree());
    }
    let part: Dims = shape.iter().zip(grid).map(|(size, parts)| size / parts).collect();
    if volume_of(&part) != Ok(*length) || volume_of(shape).is_err() {
        return Err(disagree());
    }
    let mut chunks = Vec::with_capacity(tensor.chunks.len());
    for chunk in &tensor.chunks {
        let (offsets, sizes) = (chunk.region.offsets(), chunk.region.sizes());
        let (Some((start, cell)), Some((count, ones))) = (offsets.split_last(), sizes.split_last()) else {
            return Err(disagree());
        };
        if ones.iter().any(|size| *size != 1) {
            return Err(format!("has a chunk of {sizes:?}, which is more than one part"));
        }
        let to: Dims = cell.iter().zip(&part).map(|(at, size)| at * size).collect();
        ranges(&mut chunks, chunk, tensor.dtype, &part, (*start, *count), &to).map_err(|error| error.to_string())?;
    }
    Ok(CatalogTensor::new(tensor.dtype, Dims::from_slice(shape), tensor.requires_grad, chunks))
}

/// Adds the elements of a stored chunk, which are the range of `count` elements from `start` on of a flattened box of shape
/// `part` at `to`.
fn ranges(
    chunks: &mut Vec<StoredChunk>,
    chunk: &StoredChunk,
    dtype: DType,
    part: &[u64],
    (start, count): (u64, u64),
    to: &[u64],
) -> std::result::Result<(), LayoutError> {
    for piece in flat_pieces(part, start, start.saturating_add(count))? {
        let location = part_of(chunk, dtype, ByteLayout::contiguous(piece.region.sizes(), 1)?.try_at(piece.start)?)?;
        chunks.push(StoredChunk { region: piece.region.translated(to)?, file: chunk.file, location });
    }
    Ok(())
}

/// A part of a stored chunk: the elements whose numbers, in the chunk's row-major order, a window has.
pub(super) fn part_of(chunk: &StoredChunk, dtype: DType, window: ByteLayout) -> std::result::Result<ChunkLocation, LayoutError> {
    let location = match &chunk.location {
        ChunkLocation::Seen(seen) => SeenLocation { window: seen.window.through(&window)?, ..(**seen).clone() },
        stored => SeenLocation { stored: stored.clone(), dtype, region: chunk.region.clone(), window },
    };
    Ok(ChunkLocation::Seen(Box::new(location)))
}

#[cfg(test)]
mod tests {
    use reshard_layout::Region;

    use super::*;

    /// A tensor stored as `shape`, each chunk a range of one flattened part, whose record starts at the chunk's number.
    fn stored(shape: &[u64], chunks: &[(&[u64], u64)]) -> CatalogTensor {
        let chunk = |(number, (offsets, length)): (usize, &(&[u64], u64))| {
            let mut sizes = vec![1; offsets.len()];
            sizes[offsets.len() - 1] = *length;
            let location = ChunkLocation::Record { offset: number as u64, length: 0, transform: None };
            StoredChunk { region: Region::new(offsets, &sizes).unwrap(), file: 0, location }
        };
        let chunks = chunks.iter().enumerate().map(chunk).collect();
        CatalogTensor::new(DType::Float32, Dims::from_slice(shape), false, chunks)
    }

    /// For each element, the number of its chunk and its place in it.
    fn elements(tensor: &CatalogTensor) -> Vec<Option<(u64, u64)>> {
        let mut all = vec![None; tensor.elements() as usize];
        let whole = ByteLayout::contiguous(&tensor.shape, 1).unwrap();
        for chunk in &tensor.chunks {
            let ChunkLocation::Seen(seen) = &chunk.location else { panic!("a part of a record is seen") };
            let ChunkLocation::Record { offset, .. } = seen.stored else { panic!("of a record") };
            let own = ByteLayout::contiguous(chunk.region.sizes(), 1).unwrap();
            for element in 0..chunk.region.volume() {
                let mut rest = element;
                let at: Vec<u64> = own
                    .byte_strides()
                    .iter()
                    .map(|stride| {
                        let index = rest / stride;
                        rest %= stride;
                        index
                    })
                    .collect();
                let global: Vec<u64> = at.iter().zip(chunk.region.offsets()).map(|(a, b)| a + b).collect();
                let slot = &mut all[whole.position(&global) as usize];
                assert!(slot.replace((offset, seen.window.position(&at))).is_none(), "an element is there twice");
            }
        }
        all
    }

    #[test]
    fn flattened_parts_come_back_in_their_shape() {
        // [4, 6] in parts of [2, 3], each cut after four of its six elements.
        let mut chunks: Vec<(Vec<u64>, u64)> = Vec::new();
        for (i, j) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            chunks.extend([(vec![i, j, 0], 4), (vec![i, j, 4], 2)]);
        }
        let chunks: Vec<(&[u64], u64)> = chunks.iter().map(|(offsets, length)| (offsets.as_slice(), *length)).collect();
        let tensor = unflattened(&stored(&[2, 2, 6], &chunks), &[4, 6]).unwrap();
        for (number, found) in elements(&tensor).into_iter().enumerate() {
            let (row, column) = (number as u64 / 6, number as u64 % 6);
            let (part, inside) = ((row / 2) * 2 + column / 3, (row % 2) * 3 + column % 3);
            let expected = if inside < 4 { (part * 2, inside) } else { (part * 2 + 1, inside - 4) };
            assert_eq!(found, Some(expected), "element {number}");
        }
        // A vector, and a number.
        let tensor = unflattened(&stored(&[2, 3], &[(&[0, 0], 3), (&[1, 0], 3)]), &[6]).unwrap();
        assert_eq!(elements(&tensor), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)].map(Some));
        assert_eq!(elements(&unflattened(&stored(&[1], &[(&[0], 1)]), &[]).unwrap()), [Some((0, 0))]);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        for (shape, original) in [
            (&[2, 2, 6][..], &[4, 5][..]),
            (&[2, 2, 6], &[4, 6, 1]),
            (&[0, 2, 6], &[4, 6]),
            (&[2, 2, 5], &[4, 6]),
            (&[3, 2, 6], &[4, 6]),
            (&[1, 1, 1], &[u64::MAX, u64::MAX]),
            (&[], &[4]),
        ] {
            assert!(unflattened(&stored(shape, &[]), original).is_err(), "{shape:?} {original:?}");
        }
        let mut wide = stored(&[2, 6], &[(&[0, 0], 6)]);
        wide.chunks[0].region = Region::new(&[0, 0], &[2, 6]).unwrap();
        assert!(unflattened(&wide, &[12]).unwrap_err().contains("more than one part"));
    }
}
