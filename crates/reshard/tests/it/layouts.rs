//! Random trees, layouts and groups, and the memory that goes with them.

use std::sync::Arc;

use proptest::prelude::*;
use reshard::layout::{ByteLayout, Dims, Mesh, Placement, Region, local_regions, local_shape};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::memory::{Source, Target};
use reshard::storage::{Address, Store, StoreOptions};
use reshard::{DType, LoadState, SaveState};

/// A tensor by its content alone.
#[derive(Debug, Clone)]
pub(crate) struct Whole {
    pub(crate) key: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

impl Whole {
    pub(crate) fn new(key: &str, dtype: DType, shape: &[u64], seed: u64) -> Whole {
        let count = shape.iter().product::<u64>() * dtype.size();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let bytes = (0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 32) as u8
            })
            .collect();
        Whole { key: key.into(), dtype, shape: shape.to_vec(), bytes }
    }

    /// The bytes of a region, packed, picked element by element.
    pub(crate) fn slice(&self, region: &Region) -> Vec<u8> {
        let size = self.dtype.size() as usize;
        let mut out = Vec::new();
        let mut index = vec![0u64; region.ndim()];
        for _ in 0..region.volume() {
            let mut position = 0u64;
            for (d, i) in index.iter().enumerate() {
                position = position * self.shape[d] + region.offsets()[d] + i;
            }
            out.extend_from_slice(&self.bytes[position as usize * size..][..size]);
            for d in (0..index.len()).rev() {
                index[d] += 1;
                if index[d] < region.sizes()[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        out
    }
}

/// How a tensor is cut over a group.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    pub(crate) mesh: Vec<u64>,
    pub(crate) placements: Vec<Placement>,
}

impl Cut {
    pub(crate) fn ranks(&self) -> u64 {
        self.mesh.iter().product()
    }

    /// What a rank holds: global regions and the memory that holds them, each piece in memory of its own.
    pub(crate) fn pieces(&self, shape: &[u64], rank: u64) -> Vec<Region> {
        let mesh = Mesh::new(&self.mesh).unwrap();
        let _ = local_shape(&mesh, &self.placements, shape, rank).unwrap();
        local_regions(&mesh, &self.placements, shape, rank).unwrap().into_iter().map(|l| l.global).collect()
    }
}

/// A rank's memory for one tensor: packed, or with the last dimension padded so that rows are not adjacent.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub(crate) region: Region,
    pub(crate) layout: ByteLayout,
    pub(crate) bytes: Vec<u8>,
}

impl Memory {
    pub(crate) fn new(region: Region, dtype: DType, padded: bool) -> Memory {
        let sizes = region.sizes();
        let mut strides = Dims::from_elem(1, sizes.len());
        for d in (0..sizes.len().saturating_sub(1)).rev() {
            let pad = if padded && d + 2 == sizes.len() { 3 } else { 0 };
            strides[d] = strides[d + 1] * (sizes[d + 1] + pad).max(1);
        }
        let layout = ByteLayout::strided(sizes, &strides, dtype.size()).unwrap();
        let bytes = vec![0xa5; layout.end() as usize];
        Memory { region, layout, bytes }
    }

    pub(crate) fn fill(&mut self, packed: &[u8]) {
        self.visit(packed.len() as u64, |memory, run| {
            memory[run.1..run.1 + run.2].copy_from_slice(&packed[run.0..run.0 + run.2]);
        });
    }

    pub(crate) fn packed(&mut self, dtype: DType) -> Vec<u8> {
        let mut out = vec![0; (self.region.volume() * dtype.size()) as usize];
        let length = out.len() as u64;
        self.visit(length, |memory, run| out[run.0..run.0 + run.2].copy_from_slice(&memory[run.1..run.1 + run.2]));
        out
    }

    fn visit(&mut self, length: u64, mut f: impl FnMut(&mut [u8], (usize, usize, usize))) {
        let packed = ByteLayout::contiguous(self.region.sizes(), self.layout.element_size()).unwrap();
        assert_eq!(packed.end(), length);
        let zero = Dims::from_elem(0, self.region.ndim());
        for run in reshard::layout::runs(self.region.sizes(), &packed, &zero, &self.layout, &zero).unwrap() {
            f(&mut self.bytes, (run.src as usize, run.dst as usize, run.len as usize));
        }
    }
}

/// Fills a rank's memory for saving.
pub(crate) fn held(whole: &Whole, cut: &Cut, rank: u64, padded: bool) -> Vec<Memory> {
    cut.pieces(&whole.shape, rank)
        .into_iter()
        .map(|region| {
            let packed = whole.slice(&region);
            let mut memory = Memory::new(region, whole.dtype, padded);
            memory.fill(&packed);
            memory
        })
        .collect()
}

pub(crate) fn add_to_save<'a>(state: &mut SaveState<'a>, whole: &Whole, memories: &'a [Memory]) {
    let pieces =
        memories.iter().map(|m| SavePiece::new(m.region.clone(), m.layout.clone(), Source::new(&m.bytes)).unwrap()).collect();
    let tensor = SaveTensor { dtype: whole.dtype, shape: Dims::from_slice(&whole.shape), requires_grad: false, pieces };
    state.insert(whole.key.clone(), None, Scope::Shared, SaveLeaf::Tensor(tensor)).unwrap();
}

pub(crate) fn add_to_load<'a>(state: &mut LoadState<'a>, whole: &Whole, memories: &'a mut [Memory]) {
    let pieces = memories
        .iter_mut()
        .map(|m| LoadPiece::new(m.region.clone(), m.layout.clone(), Target::new(&mut m.bytes)).unwrap())
        .collect();
    let tensor = LoadTensor { dtype: whole.dtype, shape: Dims::from_slice(&whole.shape), pieces };
    state.insert(whole.key.clone(), Scope::Shared, LoadLeaf::Tensor(tensor)).unwrap();
}

pub(crate) fn store_at(path: &std::path::Path) -> Arc<dyn Store> {
    let address = Address::parse(path.to_str().unwrap()).unwrap();
    reshard::storage::open(&address, &StoreOptions::default()).unwrap()
}

pub(crate) fn any_cut(most_ranks: u64) -> impl Strategy<Value = Cut> {
    let mesh =
        prop::collection::vec(1u64..=4, 1..=3).prop_filter("too many ranks", move |m| m.iter().product::<u64>() <= most_ranks);
    mesh.prop_flat_map(|mesh| {
        let dims = mesh.len();
        let placement = prop_oneof![
            2 => Just(Placement::Replicate),
            4 => (0usize..3).prop_map(Placement::Shard),
        ];
        (Just(mesh), prop::collection::vec(placement, dims))
    })
    .prop_map(|(mesh, placements)| Cut { mesh, placements })
}

/// The same cut for a tensor of fewer dimensions.
pub(crate) fn fitted(cut: &Cut, ndim: usize) -> Cut {
    let placements = cut
        .placements
        .iter()
        .map(|p| match p {
            Placement::Shard(_) if ndim == 0 => Placement::Replicate,
            Placement::Shard(d) => Placement::Shard(d % ndim),
            other => *other,
        })
        .collect();
    Cut { mesh: cut.mesh.clone(), placements }
}
