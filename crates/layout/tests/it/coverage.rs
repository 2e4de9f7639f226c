use proptest::prelude::*;
use reshard_layout::{Overlap, Region, coverage, coverage_up_to, volume_of};

use crate::space::{cut_up, elements, position, region_in, shapes};

/// Compares with counting how often every element occurs.
fn check(shape: &[u64], regions: &[Region]) -> Result<(), TestCaseError> {
    let found = coverage_up_to(shape, regions, usize::MAX).unwrap();
    prop_assert!(found.gaps_complete && !found.truncated);
    let mut counts = vec![0u32; volume_of(shape).unwrap() as usize];
    for element in regions.iter().flat_map(elements) {
        counts[position(&element, shape)] += 1;
    }
    prop_assert_eq!(found.is_exact(), counts.iter().all(|count| *count == 1));
    prop_assert_eq!(found.is_covered(), counts.iter().all(|count| *count > 0));
    for gap in &found.gaps {
        prop_assert!(!gap.is_empty() && gap.check_inside(shape).is_ok());
        for element in elements(gap) {
            let count = &mut counts[position(&element, shape)];
            prop_assert_eq!(*count, 0, "{} is in a gap and in a region, or in two gaps", position(&element, shape));
            *count = 1;
        }
    }
    prop_assert!(counts.iter().all(|count| *count > 0), "an element is missing from the gaps");
    prop_assert_eq!(found.overlaps, every_pair(regions));
    Ok(())
}

fn every_pair(regions: &[Region]) -> Vec<Overlap> {
    let mut found = Vec::new();
    for (first, a) in regions.iter().enumerate() {
        for (second, b) in regions.iter().enumerate().skip(first + 1) {
            found.extend(a.intersection(b).map(|region| Overlap { first, second, region }));
        }
    }
    found
}

fn cuts(most: usize) -> impl Strategy<Value = Vec<(u8, u8, u8)>> {
    prop::collection::vec(any::<(u8, u8, u8)>(), 0..most)
}

proptest! {
    #[test]
    fn boxes_at_will(
        (shape, regions) in shapes()
            .prop_flat_map(|shape| (Just(shape.clone()), prop::collection::vec(region_in(&shape), 0..12)))
    ) {
        check(&shape, &regions)?;
    }

    /// A tiling is exact; take regions away or add some, and exactly that is found.
    #[test]
    fn tilings_and_almost_tilings(
        (shape, regions, extra) in (shapes(), cuts(80))
            .prop_flat_map(|(shape, cuts)| {
                let regions = Just(cut_up(&shape, &cuts)).prop_shuffle();
                let extra = prop::collection::vec(region_in(&shape), 0..2);
                (Just(shape), regions, extra)
            }),
        removed in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        copied in prop::collection::vec(any::<prop::sample::Index>(), 0..2),
    ) {
        prop_assert!(coverage(&shape, &regions).unwrap().is_exact());
        let mut regions = regions;
        for index in copied {
            regions.push(regions[index.index(regions.len())].clone());
        }
        for index in removed {
            if !regions.is_empty() {
                regions.swap_remove(index.index(regions.len()));
            }
        }
        regions.extend(extra);
        check(&shape, &regions)?;
    }

    /// Hundreds of boxes, so that the join goes through its tree in every dimension.
    #[test]
    fn the_join_finds_exactly_the_pairs_that_overlap(
        (shape, regions) in (1..=5usize).prop_flat_map(|ndim| {
            let shape = vec![40u64; ndim];
            // Offsets out of few values, so that many coordinates are equal.
            let end = prop::collection::vec((0..20u64, 1..12u64), ndim);
            let boxes = prop::collection::vec(end, 150..500);
            (Just(shape), boxes)
        })
    ) {
        let boxes = regions.iter().map(|ends| {
            let (offsets, sizes): (Vec<u64>, Vec<u64>) = ends.iter().copied().unzip();
            Region::new(&offsets, &sizes).unwrap()
        });
        // The whole tensor among them leaves no gaps to look for.
        let regions: Vec<Region> = boxes.chain([Region::whole(&shape).unwrap()]).collect();
        let found = coverage_up_to(&shape, &regions, usize::MAX).unwrap();
        prop_assert_eq!(found.overlaps, every_pair(&regions));
    }
}

/// Volumes that agree do not make a tiling: one gap and one overlap of the same size.
#[test]
fn equal_volumes_do_not_hide_a_gap_and_an_overlap() {
    let region = |offsets: &[u64], sizes: &[u64]| Region::new(offsets, sizes).unwrap();
    let regions = [region(&[0, 0], &[2, 4]), region(&[2, 0], &[2, 2]), region(&[1, 2], &[1, 4])];
    let found = coverage(&[4, 4], &regions[..2]).unwrap();
    assert_eq!(found.gaps, [region(&[2, 2], &[2, 2])]);
    assert!(coverage(&[4, 4], &regions).is_err());
    let regions = [region(&[0, 0], &[2, 4]), region(&[2, 0], &[2, 2]), region(&[1, 0], &[1, 4])];
    let found = coverage(&[4, 4], &regions).unwrap();
    assert_eq!((found.gaps.len(), found.overlaps.len()), (1, 1));
    assert_eq!(found.gaps[0], region(&[2, 2], &[2, 2]));
}

/// Time grows no faster than n log² n where a quadratic method would take hours: long thin boxes in both directions,
/// which no tree of bounding boxes likes, and a heap of copies.
#[test]
fn hostile_arrangements_stay_near_linear() {
    let count = 20_000u64;
    let region = |offsets: &[u64], sizes: &[u64]| Region::new(offsets, sizes).unwrap();
    // Rows in the left half, columns in the right half.
    let mut sticks: Vec<Region> = (0..count).map(|at| region(&[at, 0], &[1, count])).collect();
    sticks.extend((0..count).map(|at| region(&[0, count + at], &[count, 1])));
    assert!(coverage(&[count, 2 * count], &sticks).unwrap().is_exact());
    let removed = sticks.swap_remove(777);
    assert_eq!(coverage(&[count, 2 * count], &sticks).unwrap().gaps, [removed]);
    // Everything crosses everything: bounded lists, bounded time.
    let mut crossing: Vec<Region> = (0..count).map(|at| region(&[at, 0], &[1, count])).collect();
    crossing.extend((0..count).map(|at| region(&[0, at], &[count, 1])));
    let found = coverage(&[count, count], &crossing).unwrap();
    assert!(found.truncated && !found.overlaps.is_empty() && found.gaps.is_empty());
    let copies = vec![region(&[0, 0], &[2, 2]); count as usize];
    let found = coverage(&[2, 3], &copies).unwrap();
    assert_eq!(found.gaps, [region(&[0, 2], &[2, 1])]);
}
