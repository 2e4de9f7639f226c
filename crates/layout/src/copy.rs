//! The strided copy: bounds are checked once for the whole move, then the innermost dimension is copied by loops that
//! know the length of a run at compile time, because a call to `memcpy` for each four-byte column is most of the cost.

use crate::runs::{Run, Step};
use crate::{LayoutError, Runs};

/// Rows and columns of a tile when the two innermost dimensions lie crosswise in source and destination.
const TILE: usize = 32;

/// Copies the bytes of all remaining runs. Positions of runs are positions in the two slices.
pub fn copy_runs(src: &[u8], dst: &mut [u8], runs: Runs) -> Result<(), LayoutError> {
    let (src_end, dst_end) = runs.ends();
    check_length("source", src.len(), src_end)?;
    check_length("destination", dst.len(), dst_end)?;
    if runs.count_runs() == 0 {
        return Ok(());
    }
    if !runs.is_untouched() {
        for Run { src: from, dst: to, len } in runs {
            let (from, to, len) = (from as usize, to as usize, len as usize);
            dst[to..to + len].copy_from_slice(&src[from..from + len]);
        }
        return Ok(());
    }
    let len = runs.run_len() as usize;
    let (from, to) = runs.position();
    let (src, dst) = (&src[from as usize..], &mut dst[to as usize..]);
    match len {
        1 => nest(src, dst, runs.steps(), &line::<1>),
        2 => nest(src, dst, runs.steps(), &line::<2>),
        4 => nest(src, dst, runs.steps(), &line::<4>),
        8 => nest(src, dst, runs.steps(), &line::<8>),
        16 => nest(src, dst, runs.steps(), &line::<16>),
        _ => nest(src, dst, runs.steps(), &|src: &[u8], dst: &mut [u8], step: Line| {
            for index in 0..step.count {
                let (from, to) = (index * step.src, index * step.dst);
                dst[to..to + len].copy_from_slice(&src[from..from + len]);
            }
        }),
    }
    Ok(())
}

fn check_length(field: &'static str, actual: usize, needed: u64) -> Result<(), LayoutError> {
    let actual = actual as u64;
    if needed > actual { Err(LayoutError::ShortBuffer { field, needed, actual }) } else { Ok(()) }
}

/// A step whose positions are known to lie inside both buffers.
#[derive(Clone, Copy)]
struct Line {
    count: usize,
    src: usize,
    dst: usize,
}

impl Line {
    fn new(step: &Step) -> Line {
        // Fits: every position lies inside a slice, which was checked. A step that is never taken may be anything.
        Line { count: step.count as usize, src: step.src as usize, dst: step.dst as usize }
    }
}

/// Walks the outer dimensions and copies the innermost one with `line`.
fn nest(src: &[u8], dst: &mut [u8], steps: &[Step], line: &impl Fn(&[u8], &mut [u8], Line)) {
    match steps {
        [] => line(src, dst, Line { count: 1, src: 0, dst: 0 }),
        [inner] => line(src, dst, Line::new(inner)),
        // The destination is contiguous across the lines and not along them: in tiles, so that each cache line of
        // either side is used up while it is there.
        [outer, inner] if inner.dst > outer.dst && inner.dst > 64 => {
            tiles(src, dst, Line::new(outer), Line::new(inner), line);
        }
        [outer, inner @ ..] => {
            let outer = Line::new(outer);
            for index in 0..outer.count {
                nest(&src[index * outer.src..], &mut dst[index * outer.dst..], inner, line);
            }
        }
    }
}

fn tiles(src: &[u8], dst: &mut [u8], outer: Line, inner: Line, line: &impl Fn(&[u8], &mut [u8], Line)) {
    for column in (0..inner.count).step_by(TILE) {
        let part = Line { count: TILE.min(inner.count - column), ..inner };
        for row in 0..outer.count {
            let from = row * outer.src + column * inner.src;
            let to = row * outer.dst + column * inner.dst;
            line(&src[from..], &mut dst[to..], part);
        }
    }
}

/// Copies `step.count` runs of `N` bytes.
fn line<const N: usize>(src: &[u8], dst: &mut [u8], step: Line) {
    if step.dst == N && step.src >= N {
        let (to, _) = dst.as_chunks_mut::<N>();
        for (to, from) in to.iter_mut().zip(src.chunks(step.src)).take(step.count) {
            if let Some(from) = from.first_chunk::<N>() {
                *to = *from;
            }
        }
    } else if step.src == N && step.dst >= N {
        let (from, _) = src.as_chunks::<N>();
        for (from, to) in from.iter().zip(dst.chunks_mut(step.dst)).take(step.count) {
            if let Some(to) = to.first_chunk_mut::<N>() {
                *to = *from;
            }
        }
    } else {
        for index in 0..step.count {
            let (from, to) = (index * step.src, index * step.dst);
            dst[to..to + N].copy_from_slice(&src[from..from + N]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ByteLayout, runs};

    #[test]
    fn short_buffers_are_refused_before_anything_is_copied() {
        let layout = ByteLayout::contiguous(&[4], 4).unwrap();
        let all = runs(&[4], &layout, &[0], &layout, &[0]).unwrap();
        let mut dst = [7u8; 16];
        assert!(matches!(
            copy_runs(&[0; 15], &mut dst, all.clone()),
            Err(LayoutError::ShortBuffer { field: "source", needed: 16, actual: 15 })
        ));
        assert!(matches!(copy_runs(&[0; 16], &mut dst[..3], all), Err(LayoutError::ShortBuffer { field: "destination", .. })));
        assert_eq!(dst, [7; 16]);
    }

    #[test]
    fn a_transposed_copy_goes_through_tiles() {
        let (rows, columns) = (70u64, 45u64);
        let src: Vec<u8> = (0..rows * columns).flat_map(|value| (value as u32).to_le_bytes()).collect();
        let row_major = ByteLayout::contiguous(&[rows, columns], 4).unwrap();
        let column_major = ByteLayout::strided(&[rows, columns], &[1, rows], 4).unwrap();
        let mut dst = vec![0; src.len()];
        copy_runs(&src, &mut dst, runs(&[rows, columns], &row_major, &[0, 0], &column_major, &[0, 0]).unwrap()).unwrap();
        for row in 0..rows {
            for column in 0..columns {
                let at = ((column * rows + row) * 4) as usize;
                assert_eq!(dst[at..at + 4], ((row * columns + column) as u32).to_le_bytes());
            }
        }
    }

    #[test]
    fn a_half_consumed_move_copies_the_rest() {
        let layout = ByteLayout::contiguous(&[3, 4], 1).unwrap();
        let mut part = runs(&[3, 2], &layout, &[0, 1], &layout, &[0, 1]).unwrap();
        part.next();
        let src: Vec<u8> = (1..=12).collect();
        let mut dst = [0; 12];
        copy_runs(&src, &mut dst, part).unwrap();
        assert_eq!(dst, [0, 0, 0, 0, 0, 6, 7, 0, 0, 10, 11, 0]);
    }
}
