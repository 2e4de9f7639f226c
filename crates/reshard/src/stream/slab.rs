//! Chunks whose elements do not lie in row-major order (a transposed, sliced or expanded tensor of a `torch.save` file),
//! read a slab at a time: as many rows as fit into a share of a fixed amount of memory.

use reshard_layout::{ByteLayout, Dims, LayoutError, Region, Run, Runs, copy_runs, runs};
use reshard_storage::Reader;

use super::BLOCK;
use crate::checkpoint::{Checkpoint, Computed};
use crate::error::{Geometry, Result, StorageContext};

/// Memory for the slabs of all threads together.
const ALL_SLABS: u64 = 128 << 20;
/// No slab is larger: more would not make reads any longer.
const MOST: u64 = 32 << 20;
/// A slab's stretch of the file is read in one piece when it is at most this many times the slab.
const WHOLE_RATIO: u64 = 2;
/// Runs closer than this are read together.
const GAP: u64 = 16 << 10;

/// A part of a strided chunk, in memory.
pub(super) struct Slab {
    /// Relative to the chunk.
    region: Region,
    /// How the region lies in `bytes`.
    layout: ByteLayout,
    bytes: Vec<u8>,
}

impl Slab {
    /// The bytes that a slab may have when a thread holds so many.
    pub(super) fn most(held: usize) -> u64 {
        (ALL_SLABS / (rayon::current_num_threads().max(1) * held.max(1)) as u64).clamp(BLOCK as u64, MOST)
    }

    /// Reads the slab that starts with `first` and goes on, in row-major order, towards the end of `all`; both are relative
    /// to the chunk, which lies in the file as `stored` says.
    pub(super) fn read(reader: &dyn Reader, stored: &ByteLayout, first: &Region, all: &Region, most: u64) -> Result<Slab> {
        let region = grown(first, all, stored, most).proven()?;
        let element = stored.element_size();
        let kept = distinct(&region, stored).proven()?;
        let zero = Dims::from_elem(0, region.ndim());
        // In the order of the file, so that what is contiguous there is read in one piece; the copy out of here turns it round.
        let packed = ByteLayout::strided(kept.sizes(), &file_order(kept.sizes(), stored.byte_strides()), element).proven()?;
        let doing = || format!("reading {}", reader.path());
        let all = runs(kept.sizes(), stored, kept.offsets(), &packed, &zero).proven()?;
        let (start, end) = (all.clone().next().map_or(0, |run| run.src), all.ends().0);
        let (bytes, strides) = if end - start <= packed.end().saturating_mul(WHOLE_RATIO).min(most) {
            let mut bytes = vec![0; (end - start) as usize];
            reader.read_at(start, &mut bytes).doing(doing)?;
            (bytes, stored.byte_strides())
        } else {
            let mut bytes = vec![0; packed.end() as usize];
            read_runs(reader, all, &mut bytes).doing(doing)?;
            (bytes, packed.byte_strides())
        };
        let repeats = |dim: usize| kept.sizes()[dim] < region.sizes()[dim];
        let strides: Dims =
            strides.iter().enumerate().map(|(dim, stride)| if repeats(dim) { 0 } else { stride / element }).collect();
        let layout = ByteLayout::strided(region.sizes(), &strides, element).proven()?;
        Ok(Slab { region, layout, bytes })
    }

    /// Computes such a slab, of a chunk that lies nowhere.
    pub(super) fn computed(
        checkpoint: &Checkpoint,
        computed: &Computed,
        stored: &ByteLayout,
        first: &Region,
        all: &Region,
        most: u64,
    ) -> Result<Slab> {
        let region = grown(first, all, stored, most).proven()?;
        let layout = ByteLayout::contiguous(region.sizes(), stored.element_size()).proven()?;
        let mut bytes = vec![0; layout.end() as usize];
        computed.read(checkpoint, stored, &region, &mut bytes)?;
        Ok(Slab { region, layout, bytes })
    }

    /// Whether all of a region of the chunk is here.
    pub(super) fn contains(&self, region: &Region) -> bool {
        self.region.contains(region)
    }

    /// Copies a region of the chunk to `target`, packed.
    pub(super) fn copy(&self, region: &Region, target: &mut [u8]) -> Result<()> {
        let from = region.within(&self.region).proven()?;
        let packed = ByteLayout::contiguous(region.sizes(), self.layout.element_size()).proven()?;
        let zero = Dims::from_elem(0, region.ndim());
        let all = runs(region.sizes(), &self.layout, from.offsets(), &packed, &zero).proven()?;
        copy_runs(&self.bytes, target, all).proven()
    }
}

/// Strides, in elements, of a packed buffer whose dimensions are nested as they are in the file.
fn file_order(sizes: &[u64], stored: &[u64]) -> Dims {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&dim| stored[dim]);
    let mut strides = Dims::from_elem(0, sizes.len());
    let mut next = 1;
    for dim in order {
        strides[dim] = next;
        next *= sizes[dim];
    }
    strides
}

/// What of a region has to be read: of a dimension that repeats its elements, the first.
fn distinct(region: &Region, stored: &ByteLayout) -> std::result::Result<Region, LayoutError> {
    let once = |(&size, &stride): (&u64, &u64)| if stride == 0 { size.min(1) } else { size };
    let sizes: Dims = region.sizes().iter().zip(stored.byte_strides()).map(once).collect();
    Region::new(region.offsets(), &sizes)
}

/// `first` and as much of what follows it in `all` as fits.
fn grown(first: &Region, all: &Region, stored: &ByteLayout, most: u64) -> std::result::Result<Region, LayoutError> {
    let offsets = first.offsets();
    let mut sizes = Dims::from_slice(first.sizes());
    for dim in (0..sizes.len()).rev() {
        let end = all.offsets()[dim] + all.sizes()[dim];
        let own = sizes[dim];
        sizes[dim] = 1;
        let row = distinct(&Region::new(offsets, &sizes)?, stored)?.volume() * stored.element_size();
        let left = end - offsets[dim];
        let fits = if stored.byte_strides()[dim] == 0 { left } else { (most / row.max(1)).min(left) };
        sizes[dim] = fits.max(own);
        // What follows in an outer dimension starts at the first element of the inner ones.
        if sizes[dim] < all.sizes()[dim] {
            break;
        }
    }
    Region::new(offsets, &sizes)
}

/// Reads runs into their places; short ones that lie close together as one stretch.
pub(super) fn read_runs(reader: &dyn Reader, all: Runs, bytes: &mut [u8]) -> reshard_storage::Result<()> {
    let mut group: Vec<Run> = Vec::new();
    let mut span: Vec<u8> = Vec::new();
    let mut flush = |group: &mut Vec<Run>, bytes: &mut [u8]| -> reshard_storage::Result<()> {
        match group.as_slice() {
            [] => return Ok(()),
            [only] => reader.read_at(only.src, &mut bytes[only.dst as usize..(only.dst + only.len) as usize])?,
            [first, .., last] => {
                span.resize((last.src + last.len - first.src) as usize, 0);
                reader.read_at(first.src, &mut span)?;
                for run in group.iter() {
                    let from = (run.src - first.src) as usize;
                    let part = &span[from..from + run.len as usize];
                    bytes[run.dst as usize..(run.dst + run.len) as usize].copy_from_slice(part);
                }
            }
        }
        group.clear();
        Ok(())
    };
    for run in all {
        let near = match (group.first(), group.last()) {
            (Some(first), Some(last)) => {
                let end = last.src + last.len;
                run.src >= end && run.src - end <= GAP && run.src + run.len - first.src <= BLOCK as u64
            }
            _ => true,
        };
        if !near {
            flush(&mut group, bytes)?;
        }
        group.push(run);
    }
    flush(&mut group, bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use reshard_layout::flat_pieces;
    use reshard_storage::Store;
    use reshard_storage::memory::MemoryStore;

    use super::*;

    /// The elements of a region one by one, in row-major order.
    fn picked(file: &[u8], stored: &ByteLayout, region: &Region) -> Vec<u8> {
        let element = stored.element_size();
        let mut out = Vec::new();
        for flat in 0..region.volume() {
            let (mut rest, mut at) = (flat, stored.base());
            for dim in (0..region.ndim()).rev() {
                at += (region.offsets()[dim] + rest % region.sizes()[dim]) * stored.byte_strides()[dim];
                rest /= region.sizes()[dim];
            }
            out.extend_from_slice(&file[at as usize..(at + element) as usize]);
        }
        out
    }

    proptest! {
        #[test]
        fn slabs_of_any_size_give_the_elements_in_row_major_order(
            dims in prop::collection::vec((1u64..7, 0u64..40), 1..4),
            element in prop::sample::select(vec![1u64, 2, 4, 8]),
            block in 1u64..20,
            most in 1u64..400,
        ) {
            let (shape, strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
            let stored = ByteLayout::strided(&shape, &strides, element).unwrap().at(13);
            let file: Vec<u8> = (0..stored.end()).map(|i| (i * 31 % 251) as u8).collect();
            let store = MemoryStore::new();
            store.publish("f", &file, reshard_storage::Publish::Create).unwrap();
            let reader = store.open_reader("f").unwrap();
            let all = Region::whole(&shape).unwrap();
            let mut slab: Option<Slab> = None;
            let mut found = Vec::new();
            for start in (0..all.volume()).step_by(block as usize) {
                for piece in flat_pieces(&shape, start, (start + block).min(all.volume())).unwrap() {
                    if slab.as_ref().is_none_or(|slab| !slab.contains(&piece.region)) {
                        slab = Some(Slab::read(reader.as_ref(), &stored, &piece.region, &all, most).unwrap());
                    }
                    let mut bytes = vec![0; (piece.region.volume() * element) as usize];
                    slab.as_ref().unwrap().copy(&piece.region, &mut bytes).unwrap();
                    found.extend(bytes);
                }
            }
            prop_assert_eq!(found, picked(&file, &stored, &all));
        }
    }

    #[test]
    fn a_repeated_dimension_is_read_once_and_a_large_chunk_in_parts() {
        let store = MemoryStore::new();
        store.publish("f", &[7; 4000], reshard_storage::Publish::Create).unwrap();
        let reader = store.open_reader("f").unwrap();
        let expanded = ByteLayout::strided(&[1 << 40, 1000], &[0, 1], 4).unwrap();
        let all = Region::whole(&[1 << 40, 1000]).unwrap();
        let first = Region::new(&[0, 0], &[1, 10]).unwrap();
        let slab = Slab::read(reader.as_ref(), &expanded, &first, &all, 4000).unwrap();
        assert_eq!((slab.bytes.len(), slab.contains(&all)), (4000, true));
        let transposed = ByteLayout::strided(&[10, 100], &[1, 10], 4).unwrap();
        let all = Region::whole(&[10, 100]).unwrap();
        let slab = Slab::read(reader.as_ref(), &transposed, &first, &all, 1200).unwrap();
        assert_eq!((slab.region.sizes(), slab.bytes.len()), ([3, 100].as_slice(), 1200));
    }
}
