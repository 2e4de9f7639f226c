//! The box of a computed tensor that encloses what a window shows of it.

use reshard_layout::{ByteLayout, Dims, Region};

use crate::error::{Error, Geometry, Result};

/// The box of a tensor of shape `shape` that holds all elements of a part of a chunk, and where they lie in that box, packed. The
/// chunk's elements lie in the tensor's row-major order as `layout` says.
pub(super) fn enclosing(shape: &[u64], layout: &ByteLayout, part: &Region) -> Result<(Region, ByteLayout)> {
    let element = layout.element_size().max(1);
    let ndim = shape.len();
    let strides = row_major(shape);
    let start = indices(layout.position(part.offsets()) / element, &strides);
    // How far each axis is gone along, and which ones are gone through from end to end.
    let mut reach = Dims::from_elem(0, ndim);
    let mut full = vec![false; ndim];
    for (&size, &stride) in part.sizes().iter().zip(layout.byte_strides()) {
        let (steps, step) = (size.saturating_sub(1), stride / element);
        if steps == 0 || step == 0 {
            continue;
        }
        let along = indices(step, &strides);
        let mut moved = (0..ndim).filter(|&axis| along[axis] > 0);
        match (moved.next(), moved.next()) {
            (Some(axis), None) if along[axis] * steps < shape[axis] => reach[axis] += along[axis] * steps,
            (Some(_), _) => {
                let far = indices(step * steps, &strides);
                let outer = far.iter().position(|far| *far > 0).unwrap_or(0);
                // One more, as what is inside may be carried over.
                reach[outer] += far[outer] + 1;
                full[outer + 1..].fill(true);
            }
            (None, _) => {}
        }
    }
    let mut offsets = Dims::from_elem(0, ndim);
    let mut sizes = Dims::from_elem(0, ndim);
    for axis in (0..ndim).rev() {
        let last = start[axis] + reach[axis];
        if last >= shape[axis] && axis > 0 {
            full[axis] = true;
            reach[axis - 1] += last / shape[axis].max(1);
        }
        (offsets[axis], sizes[axis]) = match full[axis] {
            true => (0, shape[axis]),
            false => (start[axis], last.min(shape[axis].saturating_sub(1)) + 1 - start[axis]),
        };
    }
    let region = Region::new(&offsets, &sizes).proven()?;
    region.check_inside(shape).map_err(|_| Error::internal("a window reaches outside the tensor that it shows"))?;
    // An axis from which something is carried over is whole, so that positions in the box are sums of strides, too.
    let packed = row_major(&sizes);
    let inside = |along: &[u64]| -> u64 { along.iter().zip(&packed).map(|(at, stride)| at * stride).sum() };
    let window: Dims = layout.byte_strides().iter().map(|stride| inside(&indices(stride / element, &strides))).collect();
    // A dimension of one index goes nowhere, wherever its stride would lead.
    let window: Dims = window.iter().zip(part.sizes()).map(|(&stride, &size)| if size > 1 { stride } else { 0 }).collect();
    let first: Dims = start.iter().zip(&offsets).map(|(start, offset)| start - offset).collect();
    let base = inside(&first) * element;
    Ok((region, ByteLayout::strided(part.sizes(), &window, element).proven()?.try_at(base).proven()?))
}

fn row_major(shape: &[u64]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis]);
    }
    strides
}

/// A number of elements as steps along each axis.
fn indices(mut position: u64, strides: &[u64]) -> Dims {
    strides
        .iter()
        .map(|&stride| {
            let index = position / stride.max(1);
            position %= stride.max(1);
            index
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(shape: &[u64], layout: &ByteLayout, part: &Region) -> u64 {
        let (region, window) = enclosing(shape, layout, part).unwrap();
        let (element, strides, packed) = (layout.element_size(), row_major(shape), row_major(region.sizes()));
        let mut index = vec![0u64; part.ndim()];
        for flat in 0..part.volume() {
            let mut rest = flat;
            for dim in (0..part.ndim()).rev() {
                index[dim] = rest % part.sizes()[dim];
                rest /= part.sizes()[dim];
            }
            let global: Vec<u64> = index.iter().zip(part.offsets()).map(|(at, offset)| at + offset).collect();
            let at = indices(layout.position(&global) / element, &strides);
            let mut expected = 0;
            for axis in 0..shape.len() {
                assert!(region.offsets()[axis] <= at[axis] && at[axis] < region.end(axis), "{region} has not {at:?}");
                expected += (at[axis] - region.offsets()[axis]) * packed[axis];
            }
            assert_eq!(window.position(&index), expected * element, "{shape:?} {layout:?} {part}");
        }
        region.volume()
    }

    #[test]
    fn the_box_of_a_transposed_slice_is_exact() {
        let layout = ByteLayout::strided(&[7, 5], &[1, 7], 4).unwrap();
        let part = Region::new(&[2, 1], &[3, 4]).unwrap();
        assert_eq!(check(&[5, 7], &layout, &part), 12);
        // All of it as one row: rows as they are touched.
        let layout = ByteLayout::contiguous(&[35], 2).unwrap();
        assert_eq!(check(&[5, 7], &layout, &Region::new(&[8], &[3]).unwrap()), 3);
        assert_eq!(check(&[5, 7], &layout, &Region::new(&[12], &[4]).unwrap()), 14);
    }

    proptest! {
        #[test]
        fn windows_of_any_kind_are_found_in_their_box(
            shape in prop::collection::vec(1u64..6, 1..4),
            choice in 0u64..1000,
            cut in prop::collection::vec((0u64..6, 1u64..6), 4),
        ) {
            let total: u64 = shape.iter().product();
            let ndim = shape.len();
            // The tensor flattened, in another shape, its dimensions turned round: windows that wrap and carry.
            let size = (1..=total).filter(|size| total.is_multiple_of(*size)).nth(choice as usize % 4).unwrap_or(1);
            let layout = match choice % 3 {
                0 => ByteLayout::contiguous(&[size, total / size], 2).unwrap(),
                1 => ByteLayout::contiguous(&[total / size, size], 2).unwrap().permuted(&[1, 0]).unwrap(),
                _ => {
                    let mut order: Vec<usize> = (0..ndim).collect();
                    order.rotate_left(choice as usize % ndim);
                    ByteLayout::contiguous(&shape, 2).unwrap().permuted(&order).unwrap()
                }
            };
            let (offsets, sizes): (Vec<u64>, Vec<u64>) = layout
                .shape()
                .iter()
                .zip(&cut)
                .map(|(&size, &(offset, length))| { let offset = offset % size; (offset, length.min(size - offset)) })
                .unzip();
            check(&shape, &layout, &Region::new(&offsets, &sizes).unwrap());
        }
    }
}
