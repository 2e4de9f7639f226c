//! What the property tests draw from, and the element-by-element view that they compare with.

use proptest::prelude::*;
use reshard_layout::{Mesh, Placement, Region};

/// Shapes of zero to five dimensions, some of size zero.
pub(crate) fn shapes() -> impl Strategy<Value = Vec<u64>> {
    let size = prop_oneof![1 => Just(0u64), 3 => Just(1), 12 => 2..6u64];
    prop::collection::vec(size, 0..=5)
}

/// A region inside a shape, possibly empty.
pub(crate) fn region_in(shape: &[u64]) -> impl Strategy<Value = Region> + use<> {
    let intervals: Vec<_> = shape.iter().map(|&size| (0..=size, 0..=size)).collect();
    intervals.prop_map(|ends| {
        let offsets: Vec<u64> = ends.iter().map(|(a, b)| *a.min(b)).collect();
        let sizes: Vec<u64> = ends.iter().map(|(a, b)| a.abs_diff(*b)).collect();
        Region::new(&offsets, &sizes).unwrap()
    })
}

/// Meshes of one to three dimensions with at most 64 ranks, in any order.
pub(crate) fn meshes() -> impl Strategy<Value = Mesh> {
    let shape = prop::collection::vec(1..=8u64, 1..=3).prop_filter("at most 64", |shape| shape.iter().product::<u64>() <= 64);
    shape.prop_flat_map(|shape| {
        let ranks: Vec<u64> = (0..shape.iter().product()).collect();
        (Just(shape), prop_oneof![Just(ranks.clone()), Just(ranks).prop_shuffle()])
            .prop_map(|(shape, ranks)| Mesh::with_ranks(&shape, &ranks).unwrap())
    })
}

/// A mesh and one placement per dimension of it, for a tensor of `ndim` dimensions.
pub(crate) fn layouts(ndim: usize) -> impl Strategy<Value = (Mesh, Vec<Placement>)> {
    meshes().prop_flat_map(move |mesh| {
        let kinds = if ndim == 0 {
            Just(Placement::Replicate).boxed()
        } else {
            prop_oneof![
                2 => Just(Placement::Replicate),
                5 => (0..ndim).prop_map(Placement::Shard),
                3 => (0..ndim, 1..7u64).prop_map(|(dim, split_factor)| Placement::StridedShard { dim, split_factor }),
            ]
            .boxed()
        };
        let placements = prop::collection::vec(kinds, mesh.ndim());
        (Just(mesh), placements)
    })
}

/// All elements of a region, in row-major order.
pub(crate) fn elements(region: &Region) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    for dim in 0..region.ndim() {
        let interval = region.offsets()[dim]..region.end(dim);
        all = all
            .into_iter()
            .flat_map(|element: Vec<u64>| interval.clone().map(move |at| element.iter().copied().chain([at]).collect()))
            .collect();
    }
    all
}

/// The row-major position of an element.
pub(crate) fn position(element: &[u64], shape: &[u64]) -> usize {
    element.iter().zip(shape).fold(0, |position, (at, size)| position * size + at) as usize
}

/// Cuts a shape into boxes: each cut is a choice of box, dimension and place, as fractions of 256.
pub(crate) fn cut_up(shape: &[u64], cuts: &[(u8, u8, u8)]) -> Vec<Region> {
    let mut boxes = vec![Region::whole(shape).unwrap()];
    if shape.is_empty() {
        return boxes;
    }
    for (which, dim, at) in cuts {
        let cell = boxes.swap_remove(usize::from(*which) * boxes.len() / 256);
        let dim = usize::from(*dim) * shape.len() / 256;
        let at = u64::from(*at) * (cell.sizes()[dim] + 1) / 256;
        let (mut offsets, mut sizes) = (cell.offsets().to_vec(), cell.sizes().to_vec());
        let rest = sizes[dim] - at;
        sizes[dim] = at;
        boxes.push(Region::new(&offsets, &sizes).unwrap());
        (offsets[dim], sizes[dim]) = (offsets[dim] + at, rest);
        boxes.push(Region::new(&offsets, &sizes).unwrap());
    }
    boxes
}
