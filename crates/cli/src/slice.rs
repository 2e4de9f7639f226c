//! A slice as it is written in Python, and the region of a tensor that it means.

use reshard::layout::Region;

use crate::failure::{Failure, Result};

/// What was typed, item by item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    items: Vec<Item>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Index(i64),
    Range(Option<i64>, Option<i64>),
    Rest,
}

/// What it means for one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Meaning {
    /// The elements.
    pub(crate) region: Region,
    /// The dimensions that remain: those not taken away by an index.
    pub(crate) shape: Vec<u64>,
}

impl Slice {
    /// Parses `0:4,:,-1` or `[..., 0]`.
    pub(crate) fn parse(text: &str) -> Result<Slice> {
        let wrong = |why: &str| {
            Failure::new(format!("invalid slice {text:?}: {why}"))
                .hint("write it as in Python: `0:4,:`, `-1`, `...,0`; steps are not known")
        };
        let inner = text.trim();
        let inner = inner.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(inner);
        let number = |part: &str| part.trim().parse::<i64>().map_err(|_| wrong(&format!("{:?} is not an integer", part.trim())));
        let bound = |part: &str| if part.trim().is_empty() { Ok(None) } else { number(part).map(Some) };
        let mut items = Vec::new();
        for part in inner.split(',').map(str::trim) {
            items.push(match part.split(':').collect::<Vec<_>>()[..] {
                ["..." | "…"] => Item::Rest,
                [""] if inner.is_empty() => continue,
                [index] => Item::Index(number(index)?),
                [start, end] => Item::Range(bound(start)?, bound(end)?),
                _ => return Err(wrong("there are too many colons")),
            });
        }
        if items.iter().filter(|item| **item == Item::Rest).count() > 1 {
            return Err(wrong("`...` can stand only once"));
        }
        Ok(Slice { items })
    }

    /// The region of a tensor of `shape`; ranges are cut to the tensor as Python does, an index must be inside.
    pub(crate) fn of(&self, shape: &[u64]) -> Result<Meaning> {
        let given = self.items.iter().filter(|item| **item != Item::Rest).count();
        if given > shape.len() {
            return Err(Failure::new(format!("the slice has {given} dimensions, the tensor has {}", shape.len())));
        }
        let all = Item::Range(None, None);
        let mut items: Vec<Item> = Vec::with_capacity(shape.len());
        for item in &self.items {
            match item {
                Item::Rest => items.extend(std::iter::repeat_n(all, shape.len() - given)),
                item => items.push(*item),
            }
        }
        items.resize(shape.len(), all);
        let (mut offsets, mut sizes, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (dim, (item, &size)) in items.iter().zip(shape).enumerate() {
            // Python counts from the end for negative numbers and cuts what lies outside.
            let place = |at: i64| if at < 0 { size.saturating_sub(at.unsigned_abs()) } else { size.min(at.unsigned_abs()) };
            let (start, end) = match *item {
                Item::Index(at) => {
                    let inside = if at < 0 { at.unsigned_abs() <= size } else { at.unsigned_abs() < size };
                    if !inside {
                        return Err(Failure::new(format!("index {at} is outside of dimension {dim}, which has {size} elements")));
                    }
                    (place(at), place(at) + 1)
                }
                Item::Range(start, end) => (start.map_or(0, place), end.map_or(size, place)),
                Item::Rest => (0, size),
            };
            let length = end.saturating_sub(start);
            offsets.push(start);
            sizes.push(length);
            if !matches!(item, Item::Index(_)) {
                kept.push(length);
            }
        }
        let region = Region::new(&offsets, &sizes).map_err(|error| Failure::because("invalid slice", &error))?;
        Ok(Meaning { region, shape: kept })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(text: &str, shape: &[u64]) -> (String, Vec<u64>) {
        let meaning = Slice::parse(text).unwrap().of(shape).unwrap();
        (meaning.region.to_string(), meaning.shape)
    }

    #[test]
    fn slices_mean_what_they_mean_in_python() {
        for (text, region, kept) in [
            ("0:4,:", "[0:4, 0:6]", vec![4, 6]),
            ("[-2:, 1]", "[8:10, 1:2]", vec![2]),
            ("...,0", "[0:10, 0:1]", vec![10]),
            ("-1", "[9:10, 0:6]", vec![6]),
            ("5:100,:-1", "[5:10, 0:5]", vec![5, 5]),
            ("", "[0:10, 0:6]", vec![10, 6]),
        ] {
            assert_eq!(meaning(text, &[10, 6]), (region.to_owned(), kept), "{text}");
        }
        assert_eq!(meaning("7:3", &[10]).1, [0]);
        assert_eq!(meaning("...", &[]).1, Vec::<u64>::new());
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["a", "1:2:3", "...,...", "1,,2"] {
            assert!(Slice::parse(text).is_err(), "{text}");
        }
        for text in ["10", "-11", "0,0,0"] {
            assert!(Slice::parse(text).unwrap().of(&[10, 6]).is_err(), "{text}");
        }
    }
}
