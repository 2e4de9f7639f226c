//! From a move to bytes: the contiguous stretches of a box between two strided layouts. Dimensions that are contiguous
//! on both sides are merged into the run, the rest become counters, so that a run costs no allocation.

use smallvec::SmallVec;

use crate::error::check_rank;
use crate::{ByteLayout, LayoutError};

/// One contiguous stretch of bytes of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Position in the source.
    pub src: u64,
    /// Position in the destination.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

/// One dimension that is stepped through between runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) count: u64,
    pub(crate) src: u64,
    pub(crate) dst: u64,
}

/// The runs of a move, in ascending source order where the source's strides have one.
#[derive(Clone, Debug)]
pub struct Runs {
    steps: SmallVec<[Step; 4]>,
    counters: SmallVec<[u64; 4]>,
    src: u64,
    dst: u64,
    run_len: u64,
    total: u64,
    remaining: u64,
}

/// The contiguous byte stretches of copying a box of `sizes` elements out of `src`, from its local element offsets
/// `src_offsets` on, to `dst` at `dst_offsets`.
pub fn runs(
    sizes: &[u64],
    src: &ByteLayout,
    src_offsets: &[u64],
    dst: &ByteLayout,
    dst_offsets: &[u64],
) -> Result<Runs, LayoutError> {
    if src.element_size() != dst.element_size() {
        return Err(LayoutError::ElementSize { field: "destination", expected: src.element_size(), actual: dst.element_size() });
    }
    let src_start = start_of(sizes, src, src_offsets, "src_offsets")?;
    let dst_start = start_of(sizes, dst, dst_offsets, "dst_offsets")?;
    let mut run_len = src.element_size();
    if sizes.contains(&0) {
        return Ok(Runs::new(SmallVec::new(), src_start, dst_start, run_len, 0));
    }
    let total_elements: u64 = sizes.iter().product();
    let mut steps: SmallVec<[Step; 4]> = sizes
        .iter()
        .zip(src.byte_strides().iter().zip(dst.byte_strides()))
        .filter(|(size, _)| **size != 1)
        .map(|(&count, (&src, &dst))| Step { count, src, dst })
        .collect();
    // The order of the copies is free: the smallest steps innermost find the longest runs, whatever order the
    // dimensions have (two column-major buffers are one run). Repeated elements (stride 0) go outermost.
    if !steps.is_sorted_by_key(|step| std::cmp::Reverse(source_order(step))) {
        steps.sort_by_key(|step| std::cmp::Reverse(source_order(step)));
    }
    while let Some(inner) = steps.last() {
        if inner.src != run_len || inner.dst != run_len {
            break;
        }
        run_len *= inner.count;
        steps.pop();
    }
    let total = total_elements / (run_len / src.element_size());
    merge_steps(&mut steps);
    Ok(Runs::new(steps, src_start, dst_start, run_len, total))
}

fn source_order(step: &Step) -> u64 {
    if step.src == 0 { u64::MAX } else { step.src }
}

/// Two neighbouring dimensions that are one dimension on both sides become one.
fn merge_steps(steps: &mut SmallVec<[Step; 4]>) {
    let mut dim = 1;
    while dim < steps.len() {
        let (outer, inner) = (steps[dim - 1], steps[dim]);
        let merges =
            inner.src.checked_mul(inner.count) == Some(outer.src) && inner.dst.checked_mul(inner.count) == Some(outer.dst);
        if merges {
            steps[dim - 1] = Step { count: outer.count * inner.count, ..inner };
            steps.remove(dim);
        } else {
            dim += 1;
        }
    }
}

/// The byte position of the box's first element, after checking that all of the box lies inside the layout.
fn start_of(sizes: &[u64], layout: &ByteLayout, offsets: &[u64], field: &'static str) -> Result<u64, LayoutError> {
    check_rank("sizes", layout.shape().len(), sizes.len())?;
    check_rank(field, layout.shape().len(), offsets.len())?;
    layout.check_end()?;
    let mut start = layout.base();
    for (dim, ((&offset, &size), &extent)) in offsets.iter().zip(sizes).zip(layout.shape()).enumerate() {
        if offset.checked_add(size).is_none_or(|end| end > extent) {
            return Err(LayoutError::OutsideLayout { field, dim, offset, size, extent });
        }
    }
    if !sizes.contains(&0) {
        // Every offset is below its extent here, so the sum stays below the end that was checked.
        start += offsets
            .iter()
            .zip(layout.byte_strides())
            .filter(|(offset, _)| **offset > 0)
            .map(|(offset, stride)| offset * stride)
            .sum::<u64>();
    }
    Ok(start)
}

impl Runs {
    fn new(steps: SmallVec<[Step; 4]>, src: u64, dst: u64, run_len: u64, total: u64) -> Runs {
        let counters = SmallVec::from_elem(0, steps.len());
        Runs { steps, counters, src, dst, run_len, total, remaining: total }
    }

    /// Bytes of each run; all runs of a move are equally long.
    pub fn run_len(&self) -> u64 {
        self.run_len
    }

    /// Runs that are still to come.
    pub fn count_runs(&self) -> u64 {
        self.remaining
    }

    /// Bytes of all the runs that are still to come.
    pub fn bytes(&self) -> u64 {
        self.remaining * self.run_len
    }

    /// Whether no run was taken yet, so that `src`, `dst` and the steps describe the whole move.
    pub(crate) fn is_untouched(&self) -> bool {
        self.remaining == self.total
    }

    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Where the next run is, in the source and in the destination.
    pub(crate) fn position(&self) -> (u64, u64) {
        (self.src, self.dst)
    }

    /// One past the last byte that the move touches, in the source and in the destination; zero without runs.
    pub fn ends(&self) -> (u64, u64) {
        if self.remaining == 0 {
            return (0, 0);
        }
        let mut ends = (self.src + self.run_len, self.dst + self.run_len);
        for (step, counter) in self.steps.iter().zip(&self.counters) {
            ends.0 += (step.count - 1 - counter) * step.src;
            ends.1 += (step.count - 1 - counter) * step.dst;
        }
        ends
    }
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.remaining == 0 {
            return None;
        }
        self.remaining -= 1;
        let run = Run { src: self.src, dst: self.dst, len: self.run_len };
        for (step, counter) in self.steps.iter().zip(&mut self.counters).rev() {
            *counter += 1;
            if *counter < step.count {
                self.src += step.src;
                self.dst += step.dst;
                break;
            }
            *counter = 0;
            self.src -= (step.count - 1) * step.src;
            self.dst -= (step.count - 1) * step.dst;
        }
        Some(run)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match usize::try_from(self.remaining) {
            Ok(remaining) => (remaining, Some(remaining)),
            Err(_) => (usize::MAX, None),
        }
    }
}

impl std::iter::FusedIterator for Runs {}

#[cfg(test)]
mod tests {
    use super::*;

    fn contiguous(shape: &[u64]) -> ByteLayout {
        ByteLayout::contiguous(shape, 4).unwrap()
    }

    #[test]
    fn whole_rows_merge_into_one_run() {
        let all = runs(&[2, 5], &contiguous(&[8, 5]).at(100), &[3, 0], &contiguous(&[2, 5]), &[0, 0]).unwrap();
        assert_eq!((all.run_len(), all.count_runs(), all.bytes()), (40, 1, 40));
        assert_eq!(all.collect::<Vec<_>>(), [Run { src: 160, dst: 0, len: 40 }]);
    }

    #[test]
    fn columns_give_one_run_per_row() {
        let column = runs(&[3, 1], &contiguous(&[3, 4]), &[0, 2], &contiguous(&[3, 1]), &[0, 0]).unwrap();
        let found: Vec<_> = column.map(|run| (run.src, run.dst, run.len)).collect();
        assert_eq!(found, [(8, 0, 4), (24, 4, 4), (40, 8, 4)]);
    }

    #[test]
    fn two_column_major_buffers_are_one_run() {
        let layout = ByteLayout::strided(&[3, 4], &[1, 3], 4).unwrap();
        let all = runs(&[3, 4], &layout, &[0, 0], &layout, &[0, 0]).unwrap();
        assert_eq!((all.count_runs(), all.run_len()), (1, 48));
    }

    #[test]
    fn boxes_outside_their_layouts_are_refused_by_name() {
        let (src, dst) = (contiguous(&[3, 4]), contiguous(&[3, 4]));
        let error = runs(&[3, 2], &src, &[0, 3], &dst, &[0, 0]).unwrap_err();
        assert!(error.to_string().starts_with("src_offsets[1]"), "{error}");
        let error = runs(&[3, 2], &src, &[0, 0], &dst, &[u64::MAX, 0]).unwrap_err();
        assert!(error.to_string().starts_with("dst_offsets[0]"), "{error}");
        let other = ByteLayout::contiguous(&[3, 4], 2).unwrap();
        assert!(matches!(runs(&[1, 1], &src, &[0, 0], &other, &[0, 0]), Err(LayoutError::ElementSize { .. })));
        assert!(matches!(runs(&[1], &src, &[0, 0], &dst, &[0, 0]), Err(LayoutError::RankMismatch { .. })));
        let far = contiguous(&[3, 4]).at(u64::MAX);
        assert!(matches!(runs(&[1, 1], &src, &[0, 0], &far, &[0, 0]), Err(LayoutError::Overflow { .. })));
    }

    #[test]
    fn an_empty_box_has_no_runs() {
        let layout = contiguous(&[3, 0]);
        let none = runs(&[3, 0], &layout, &[0, 0], &layout, &[0, 0]).unwrap();
        assert_eq!((none.count_runs(), none.bytes(), none.ends()), (0, 0, (0, 0)));
        let scalar = contiguous(&[]);
        assert_eq!(runs(&[], &scalar, &[], &scalar, &[]).unwrap().count_runs(), 1);
    }
}
