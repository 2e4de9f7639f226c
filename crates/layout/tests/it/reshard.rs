//! Everything together: a tensor saved by M ranks in one layout, loaded by N ranks in another.

use proptest::prelude::*;
use reshard_layout::{
    ByteLayout, ChunkIndex, Mesh, Placement, Region, copy_runs, coverage, holders, local_regions, local_shape, moves, runs,
};

use crate::space::{elements, layouts, position};

type Layout = (Mesh, Vec<Placement>);

fn cases() -> impl Strategy<Value = (Vec<u64>, Layout, Layout)> {
    let size = prop_oneof![1 => Just(0u64), 10 => 1..9u64];
    prop::collection::vec(size, 0..=5)
        .prop_filter("few enough elements to list", |shape| shape.iter().product::<u64>() <= 2000)
        .prop_flat_map(|shape| (layouts(shape.len()), layouts(shape.len()), Just(shape)))
        .prop_map(|(saved, wanted, shape)| (shape, saved, wanted))
}

fn value(position: usize) -> [u8; 4] {
    (position as u32 + 1).to_le_bytes()
}

fn check(shape: &[u64], saved: &Layout, wanted: &Layout) -> Result<(), TestCaseError> {
    // One holder of each region writes it.
    let chunks: Vec<Region> = holders(&saved.0, &saved.1, shape).unwrap().into_iter().map(|(region, _)| region).collect();
    prop_assert!(coverage(shape, &chunks).unwrap().is_exact());
    let data: Vec<Vec<u8>> =
        chunks.iter().map(|chunk| elements(chunk).iter().flat_map(|element| value(position(element, shape))).collect()).collect();
    let index = ChunkIndex::new(shape, chunks).unwrap();
    for rank in wanted.0.ranks() {
        let parts = local_regions(&wanted.0, &wanted.1, shape, *rank).unwrap();
        let local = ByteLayout::contiguous(&local_shape(&wanted.0, &wanted.1, shape, *rank).unwrap(), 4).unwrap();
        let mut loaded = vec![0u8; local.end() as usize];
        let regions: Vec<Region> = parts.iter().map(|part| part.global.clone()).collect();
        let mut moved = 0;
        for found in moves(&index, &regions) {
            let (chunk, part) = (&index.regions()[found.chunk], &parts[found.wanted]);
            let stored = ByteLayout::contiguous(chunk.sizes(), 4).unwrap();
            let from = found.region.within(chunk).unwrap();
            let to = found.region.within(&part.global).unwrap().translated(&part.local).unwrap();
            let all = runs(found.region.sizes(), &stored, from.offsets(), &local, to.offsets()).unwrap();
            moved += all.bytes();
            copy_runs(&data[found.chunk], &mut loaded, all).unwrap();
        }
        prop_assert_eq!(moved, local.end());
        for part in &parts {
            for element in elements(&part.global) {
                let at: Vec<u64> =
                    (0..shape.len()).map(|dim| part.local[dim] + element[dim] - part.global.offsets()[dim]).collect();
                let at = position(&at, local.shape()) * 4;
                prop_assert_eq!(&loaded[at..at + 4], &value(position(&element, shape)));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn what_m_ranks_saved_n_ranks_load((shape, saved, wanted) in cases()) {
        check(&shape, &saved, &wanted)?;
    }
}
