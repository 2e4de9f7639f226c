use proptest::prelude::*;
use reshard_layout::{ChunkIndex, Region, flat_pieces, moves, volume_of};

use crate::space::{cut_up, region_in, shapes};

/// The moves by trying every pair.
fn every_pair(stored: &[Region], wanted: &[Region]) -> Vec<(usize, usize, Region)> {
    let mut found = Vec::new();
    for (position, region) in wanted.iter().enumerate() {
        for (chunk, stored) in stored.iter().enumerate() {
            found.extend(stored.intersection(region).map(|shared| (chunk, position, shared)));
        }
    }
    found
}

fn compare(shape: &[u64], stored: Vec<Region>, wanted: &[Region]) -> Result<(), TestCaseError> {
    let expected = every_pair(&stored, wanted);
    let index = ChunkIndex::new(shape, stored).unwrap();
    let found: Vec<_> = moves(&index, wanted).into_iter().map(|it| (it.chunk, it.wanted, it.region)).collect();
    prop_assert_eq!(found, expected);
    Ok(())
}

/// Regions of every kind that occurs: tilings, grids, flat pieces, and boxes that overlap at will.
fn stored_in(shape: &[u64]) -> BoxedStrategy<Vec<Region>> {
    let (whole, flat) = (shape.to_vec(), shape.to_vec());
    let tiling = prop::collection::vec(any::<(u8, u8, u8)>(), 0..60).prop_map(move |cuts| cut_up(&whole, &cuts));
    let boxes = prop::collection::vec(region_in(shape), 0..80);
    let total = volume_of(shape).unwrap();
    let pieces = prop::collection::vec(0..=total, 0..20).prop_map(move |mut ends| {
        ends.extend([0, total]);
        ends.sort_unstable();
        ends.windows(2)
            .flat_map(|range| flat_pieces(&flat, range[0], range[1]).unwrap())
            .map(|piece| piece.region)
            .collect::<Vec<_>>()
    });
    let size = shape.to_vec();
    let grid = prop::collection::vec(1..4u64, shape.len()).prop_map(move |counts| grid(&size, &counts));
    prop_oneof![tiling, boxes, pieces, grid].prop_flat_map(|regions| Just(regions).prop_shuffle()).boxed()
}

/// Cells by the rule of `torch.chunk` in every dimension, empty ones included.
fn grid(shape: &[u64], counts: &[u64]) -> Vec<Region> {
    let mut cells = vec![(Vec::new(), Vec::new())];
    for (size, count) in shape.iter().zip(counts) {
        let step = size.div_ceil(*count);
        let cut = |at: u64| ((at * step).min(*size), step.min(size - (at * step).min(*size)));
        cells = cells
            .into_iter()
            .flat_map(|(offsets, sizes): (Vec<u64>, Vec<u64>)| {
                (0..*count)
                    .map(cut)
                    .map(move |(offset, size)| ([offsets.as_slice(), &[offset]].concat(), [sizes.as_slice(), &[size]].concat()))
            })
            .collect();
    }
    cells.iter().map(|(offsets, sizes)| Region::new(offsets, sizes).unwrap()).collect()
}

proptest! {
    #[test]
    fn moves_are_what_trying_every_pair_finds(
        (shape, stored, wanted) in shapes().prop_flat_map(|shape| {
            let wanted = prop::collection::vec(region_in(&shape), 0..12);
            (Just(shape.clone()), stored_in(&shape), wanted)
        })
    ) {
        compare(&shape, stored, &wanted)?;
    }

    /// Many boxes over a wide space, so that the tree has many levels.
    #[test]
    fn deep_trees_find_the_same(
        (shape, stored, wanted) in (1..=5usize).prop_flat_map(|ndim| {
            let shape = vec![1000u64; ndim];
            let boxes = prop::collection::vec(region_in(&shape), 100..400);
            (Just(shape.clone()), boxes, prop::collection::vec(region_in(&shape), 5))
        })
    ) {
        compare(&shape, stored, &wanted)?;
    }
}
