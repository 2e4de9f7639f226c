//! Where a parameter's elements lie in the flat partitions of the ranks.

use crate::error::Result;
use crate::source::tensors::{Disagrees, FlatPart, Parts};

/// A stretch of a parameter's flattened elements in one rank's partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// The rank's number.
    pub(super) rank: usize,
    /// First and one past the last element of the parameter.
    pub(super) start: u64,
    pub(super) end: u64,
    /// Where it starts in the partition.
    pub(super) at: u64,
}

/// ZeRO-1 and 2: the parameters of a group lie end to end in one flat tensor, cut into equal partitions. The element
/// `offset` of it is the parameter's first; a partition has `partition` elements.
pub(super) fn of_group(offset: u64, elements: u64, partition: u64) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut at, end) = (offset, offset + elements);
    while at < end && partition > 0 {
        let rank = at / partition;
        let until = end.min((rank + 1) * partition);
        pieces.push(Piece { rank: rank as usize, start: at - offset, end: until - offset, at: at % partition });
        at = until;
    }
    pieces
}

/// ZeRO-3: every parameter is cut by itself, into as many equal parts as there are ranks, the last ones padded. `offset`
/// is where its part starts in each rank's flat tensor.
pub(super) fn of_parameter(offset: u64, elements: u64, ranks: u64) -> Vec<Piece> {
    let part = elements.div_ceil(ranks.max(1));
    let piece = |rank: u64| {
        let start = rank * part;
        let end = elements.min(start + part);
        (start < end).then_some(Piece { rank: rank as usize, start, end, at: offset })
    };
    (0..ranks).map_while(piece).collect()
}

/// Adds the pieces to a tensor. `parts` has each rank's flat tensors in order; they count as one. False, and nothing of
/// use was added, where a rank's are too short: its number.
pub(super) fn place(tensor: &mut Parts, pieces: &[Piece], parts: &[Vec<FlatPart>]) -> Result<Result<(), usize>, Disagrees> {
    for piece in pieces {
        let Some(stretches) = parts.get(piece.rank) else { return Ok(Err(piece.rank)) };
        let mut skip = piece.at;
        let mut start = piece.start;
        for stretch in stretches {
            if start == piece.end {
                break;
            }
            if skip >= stretch.elements {
                skip -= stretch.elements;
                continue;
            }
            let end = piece.end.min(start + (stretch.elements - skip));
            tensor.add_flat(start, end, stretch, skip)?;
            (start, skip) = (end, 0);
        }
        if start < piece.end {
            return Ok(Err(piece.rank));
        }
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn brute(pieces: &[Piece]) -> Vec<(usize, u64)> {
        pieces.iter().flat_map(|p| (p.start..p.end).map(|i| (p.rank, p.at + i - p.start))).collect()
    }

    #[test]
    fn a_group_is_cut_where_its_partitions_end() {
        for (offset, elements, partition) in [(0, 10, 4), (3, 10, 4), (4, 4, 4), (7, 1, 4), (0, 0, 4), (5, 3, 100)] {
            let expected: Vec<_> = (offset..offset + elements).map(|i| ((i / partition) as usize, i % partition)).collect();
            assert_eq!(brute(&of_group(offset, elements, partition)), expected);
        }
        assert!(of_group(0, 5, 0).is_empty());
    }

    #[test]
    fn a_parameter_is_cut_by_itself_and_padded_at_its_end() {
        for (elements, ranks) in [(10u64, 3u64), (9, 3), (1, 4), (5, 4), (0, 2), (7, 1)] {
            let part = elements.div_ceil(ranks);
            let expected: Vec<_> = (0..elements).map(|i| ((i / part) as usize, 6 + i % part)).collect();
            assert_eq!(brute(&of_parameter(6, elements, ranks)), expected);
        }
    }
}
