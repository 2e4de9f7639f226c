use proptest::prelude::*;
use reshard_layout::{flat_pieces, flat_range, volume_of};

use crate::space::{elements, position, region_in, shapes};

proptest! {
    #[test]
    fn pieces_are_the_elements_of_the_range_in_order(shape in shapes(), ends in (any::<u16>(), any::<u16>())) {
        let total = volume_of(&shape).unwrap();
        let at = |end: u16| u64::from(end) * (total + 1) / 65_536;
        let (start, end) = (at(ends.0).min(at(ends.1)), at(ends.0).max(at(ends.1)));
        let pieces = flat_pieces(&shape, start, end).unwrap();
        prop_assert!(pieces.len() <= (2 * shape.len()).saturating_sub(1).max(1));
        let mut next = start;
        for piece in &pieces {
            prop_assert_eq!(piece.start, next - start);
            prop_assert_eq!(flat_range(&shape, &piece.region).unwrap(), Some(next..next + piece.region.volume()));
            for element in elements(&piece.region) {
                prop_assert_eq!(position(&element, &shape) as u64, next);
                next += 1;
            }
        }
        prop_assert_eq!(next, end);
    }

    #[test]
    fn a_region_is_a_flat_range_exactly_when_its_positions_are_consecutive(
        (shape, region) in shapes().prop_flat_map(|shape| (Just(shape.clone()), region_in(&shape)))
    ) {
        let positions: Vec<u64> = elements(&region).iter().map(|it| position(it, &shape) as u64).collect();
        let expected = match (positions.first(), positions.last()) {
            (Some(first), Some(last)) => {
                (last - first + 1 == positions.len() as u64).then_some(*first..last + 1)
            }
            _ => Some(0..0),
        };
        prop_assert_eq!(flat_range(&shape, &region).unwrap(), expected);
    }

    #[test]
    fn any_numbers_give_pieces_or_an_error(
        shape in prop::collection::vec(any::<u64>(), 0..6), start in any::<u64>(), end in any::<u64>()
    ) {
        if let Ok(pieces) = flat_pieces(&shape, start, end) {
            prop_assert!(pieces.len() <= (2 * shape.len()).max(1));
        }
    }
}
