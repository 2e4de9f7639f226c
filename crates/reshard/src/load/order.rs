//! The order in which a move's elements lie in the file. A transposed tensor is read in the file's order and turned round in a
//! buffer: read in its own order, every part would touch all of the file.

use reshard_layout::{ByteLayout, Dims, LayoutError, Region};

/// The dimensions of a move, by how far apart their elements lie in the file.
pub(super) struct FileOrder {
    /// From the outermost dimension in the file to the innermost; `None` where they are in order already.
    order: Option<Vec<usize>>,
    sizes: Dims,
}

impl FileOrder {
    pub(super) fn new(stored: &ByteLayout, sizes: &[u64]) -> FileOrder {
        let strides = stored.byte_strides();
        let moving: Vec<usize> = (0..sizes.len()).filter(|&dim| sizes[dim] > 1).collect();
        let sizes = Dims::from_slice(sizes);
        if moving.is_sorted_by_key(|&dim| std::cmp::Reverse(strides[dim])) {
            return FileOrder { order: None, sizes };
        }
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
        FileOrder { order: Some(order), sizes }
    }

    /// Whether the file's order is the tensor's.
    pub(super) fn is_own(&self) -> bool {
        self.order.is_none()
    }

    /// Boxes of at most so many elements, in the file's order.
    pub(super) fn parts(&self, volume: u64) -> Result<impl Iterator<Item = Result<Region, LayoutError>> + use<>, LayoutError> {
        let order = self.order.clone();
        let sizes: Dims = match &order {
            Some(order) => order.iter().map(|&dim| self.sizes[dim]).collect(),
            None => self.sizes.clone(),
        };
        let parts = Region::whole(&sizes)?.cut_to(volume);
        Ok(parts.map(move |part| match &order {
            None => Ok(part),
            Some(order) => {
                let (mut offsets, mut sizes) = (Dims::from_elem(0, order.len()), Dims::from_elem(0, order.len()));
                for (at, &dim) in order.iter().enumerate() {
                    (offsets[dim], sizes[dim]) = (part.offsets()[at], part.sizes()[at]);
                }
                Region::new(&offsets, &sizes)
            }
        }))
    }

    /// A buffer of a box's elements, without gaps, in the file's order.
    pub(super) fn layout(&self, sizes: &[u64], element: u64) -> Result<ByteLayout, LayoutError> {
        let Some(order) = &self.order else { return ByteLayout::contiguous(sizes, element) };
        let filed: Dims = order.iter().map(|&dim| sizes[dim]).collect();
        let mut back = vec![0; order.len()];
        for (at, &dim) in order.iter().enumerate() {
            back[dim] = at;
        }
        ByteLayout::contiguous(&filed, element)?.permuted(&back)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_follow_the_file_and_hold_every_element_once() {
        let stored = ByteLayout::strided(&[4, 3, 6], &[3, 1, 12], 2).unwrap();
        let order = FileOrder::new(&stored, &[4, 3, 6]);
        assert!(!order.is_own());
        let mut positions = Vec::new();
        for part in order.parts(7).unwrap() {
            let part = part.unwrap();
            let packed = order.layout(part.sizes(), 2).unwrap();
            assert_eq!(packed.end(), part.volume() * 2);
            positions.push(stored.position(part.offsets()));
        }
        assert!(positions.is_sorted(), "{positions:?}");
        let all: u64 = order.parts(7).unwrap().map(|part| part.unwrap().volume()).sum();
        assert_eq!(all, 72);
        // A dimension of one index has no order.
        assert!(FileOrder::new(&ByteLayout::strided(&[4, 1, 6], &[6, 1, 1], 2).unwrap(), &[4, 1, 6]).is_own());
        assert!(FileOrder::new(&ByteLayout::contiguous(&[4, 3], 2).unwrap(), &[2, 3]).is_own());
    }
}
