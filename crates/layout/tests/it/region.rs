use std::collections::BTreeSet;

use proptest::prelude::*;
use reshard_layout::Region;

use crate::space::{elements, region_in, shapes};

fn set(region: &Region) -> BTreeSet<Vec<u64>> {
    elements(region).into_iter().collect()
}

fn pairs() -> impl Strategy<Value = (Vec<u64>, Region, Region)> {
    shapes().prop_flat_map(|shape| (Just(shape.clone()), region_in(&shape), region_in(&shape)))
}

proptest! {
    #[test]
    fn set_operations_match_sets_of_elements((shape, a, b) in pairs()) {
        let (in_a, in_b) = (set(&a), set(&b));
        prop_assert!(a.check_inside(&shape).is_ok());
        prop_assert_eq!(a.volume() as usize, in_a.len());
        prop_assert_eq!(a.is_empty(), in_a.is_empty());
        let both: BTreeSet<_> = in_a.intersection(&in_b).cloned().collect();
        prop_assert_eq!(a.intersection(&b).map(|shared| set(&shared)).unwrap_or_default(), both.clone());
        prop_assert_eq!(a.overlaps(&b), !both.is_empty());
        if !b.is_empty() {
            prop_assert_eq!(a.contains(&b), in_b.is_subset(&in_a));
        }
    }

    #[test]
    fn local_coordinates_and_back((_, a, b) in pairs()) {
        match a.within(&b) {
            Ok(local) => {
                prop_assert!(b.contains(&a) && local.check_inside(b.sizes()).is_ok());
                prop_assert_eq!(local.translated(b.offsets()).unwrap(), a);
            }
            Err(_) => prop_assert!(!b.contains(&a)),
        }
    }

    #[test]
    fn any_numbers_give_a_region_or_an_error(
        offsets in prop::collection::vec(any::<u64>(), 0..6),
        sizes in prop::collection::vec(any::<u64>(), 0..6),
        by in prop::collection::vec(any::<u64>(), 0..6),
    ) {
        if let Ok(region) = Region::new(&offsets, &sizes) {
            let _ = (region.volume(), region.to_string(), region.translated(&by), region.check_inside(&by));
            let _ = Region::whole(&sizes).map(|whole| (region.intersection(&whole), region.within(&whole)));
        }
    }
}
