//! Which slices of a whole tensor a rank's part has, as nanotron writes them down:
//! `0,8,None|None,None,None#8,16,None|None,None,None` is the rows 0 to 8 of the part, which are rows 8 to 16 of the whole.

use std::collections::HashSet;

use reshard_layout::Region;

use crate::source::tensors::Parts;

/// A slice of a dimension: where it starts and ends, where it says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slice {
    start: Option<u64>,
    end: Option<u64>,
}

/// A box of a rank's part, and the box of the whole that it is. With no slices, all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pair {
    local: Vec<Slice>,
    global: Vec<Slice>,
}

impl Pair {
    /// The part is the whole.
    pub(super) fn all() -> Pair {
        Pair { local: Vec::new(), global: Vec::new() }
    }
}

/// `(16, 8)`, also with NumPy's names of numbers in it.
pub(super) fn shape(text: &str) -> Result<Vec<u64>, String> {
    let wrong = || format!("its unsharded shape is {text:?}");
    let inner = text.trim().strip_prefix('(').and_then(|text| text.strip_suffix(')')).ok_or_else(wrong)?;
    let sizes = inner.split(',').map(str::trim).filter(|size| !size.is_empty()).map(|size| {
        let plain = size.split_once('(').and_then(|(_, number)| number.strip_suffix(')')).unwrap_or(size);
        plain.parse().map_err(|_| wrong())
    });
    sizes.collect()
}

/// All pairs of a file.
pub(super) fn pairs(text: &str) -> Result<Vec<Pair>, String> {
    let wrong = || format!("its slices are {text:?}, which is not understood");
    let slice = |text: &str| -> Option<Slice> {
        let numbers = text.split(',').map(|number| match number {
            "None" => Some(None),
            number => number.parse().ok().map(Some),
        });
        match numbers.collect::<Option<Vec<Option<u64>>>>()?[..] {
            [start, end, None | Some(1)] => Some(Slice { start, end }),
            _ => None,
        }
    };
    let slices = |text: &str| text.split('|').map(slice).collect::<Option<Vec<Slice>>>();
    let pair = |text: &str| {
        let (local, global) = text.split_once('#')?;
        Some(Pair { local: slices(local)?, global: slices(global)? })
    };
    text.split(';').map(|text| pair(text).ok_or_else(wrong)).collect()
}

/// The box that slices cut out of a tensor of a shape.
fn region(slices: &[Slice], shape: &[u64]) -> Result<Region, String> {
    let wrong = || format!("its slices do not fit a tensor of shape {shape:?}");
    if slices.len() > shape.len() {
        return Err(wrong());
    }
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    for (dim, slice) in slices.iter().enumerate() {
        // As Python cuts: never past the end.
        let start = slice.start.unwrap_or(0);
        let end = slice.end.unwrap_or(shape[dim]).min(shape[dim]);
        (offsets[dim], sizes[dim]) = (start, end.checked_sub(start).ok_or_else(wrong)?);
    }
    Region::new(&offsets, &sizes).map_err(|error| error.to_string())
}

/// Adds what a rank's part has to the whole. Ranks that hold the same box hold the same: what is there already is left.
pub(super) fn place(whole: &mut Parts, local: &Parts, pairs: &[Pair]) -> Result<(), String> {
    for pair in pairs {
        let (from, to) = (region(&pair.local, &local.shape)?, region(&pair.global, &whole.shape)?);
        if from.sizes() != to.sizes() {
            return Err(format!("a slice of {:?} should be one of {:?}: sizes disagree", from.sizes(), to.sizes()));
        }
        let before = whole.chunks.len();
        whole.add_cut(local, &from, to.offsets()).map_err(|error| error.to_string())?;
        let new = whole.chunks.split_off(before);
        let there: HashSet<Region> = whole.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        whole.chunks.extend(new.into_iter().filter(|chunk| !there.contains(&chunk.region)));
    }
    Ok(())
}

/// Whether the parts make up the whole.
pub(super) fn check_whole(whole: &Parts) -> Result<(), String> {
    let held = whole.chunks.iter().map(|chunk| chunk.region.volume()).fold(0, u64::saturating_add);
    match whole.elements() {
        all if all == held => Ok(()),
        all => Err(format!("have {held} of its {all} elements")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_read_as_they_are_written() {
        let read = pairs("0,8,None|None,None,None#8,16,None|None,None,None").unwrap();
        assert_eq!(region(&read[0].local, &[8, 4]).unwrap(), Region::new(&[0, 0], &[8, 4]).unwrap());
        assert_eq!(region(&read[0].global, &[16, 4]).unwrap(), Region::new(&[8, 0], &[8, 4]).unwrap());
        assert_eq!(pairs("0,2,None#0,2,None;2,4,None#6,8,None").unwrap().len(), 2);
        for text in ["", "0,2#0,2", "0,8,2#0,8,2", "a,b,None#0,1,None", "-1,3,None#0,4,None"] {
            assert!(pairs(text).is_err(), "{text}");
        }
        assert_eq!(shape("(16, 8)").unwrap(), [16, 8]);
        assert_eq!(shape("(np.int64(16), 8)").unwrap(), [16, 8]);
        assert_eq!(shape("(3,)").unwrap(), [3]);
        assert_eq!(shape("()").unwrap(), [0u64; 0]);
        assert!(shape("16, 8").is_err() && shape("(a,)").is_err());
    }
}
