//! Speed of the geometry: planning the moves of a resharding, checking coverage, finding overlaps and copying.
//! The names say what is measured; `moves_2d_grid` and `coverage` at 1,000,000 have bounds that the project keeps.

#![allow(clippy::expect_used)]

use std::hint::black_box;

use divan::{Bencher, counter::BytesCount};
use reshard_layout::{ByteLayout, ChunkIndex, Region, copy_runs, coverage, flat_pieces, moves, runs};

#[global_allocator]
static ALLOCATOR: divan::AllocProfiler = divan::AllocProfiler::system();

fn main() {
    divan::main();
}

fn region(offsets: &[u64], sizes: &[u64]) -> Region {
    Region::new(offsets, sizes).expect("a sound region")
}

/// The cells of a square of `size` × `size` that is cut every `step` elements.
fn grid(size: u64, step: u64) -> Vec<Region> {
    let count = size.div_ceil(step);
    let cuts: Vec<(u64, u64)> = (0..count).map(|at| (at * step, step.min(size - at * step))).collect();
    cuts.iter().flat_map(|row| cuts.iter().map(|column| region(&[row.0, column.0], &[row.1, column.1]))).collect()
}

/// A repeatable stream of numbers below a bound.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn shuffle(&mut self, regions: &mut [Region]) {
        for last in (1..regions.len()).rev() {
            regions.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// The ways in which a tensor of `count` chunks is cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Rows,
    Grid,
    ShuffledGrid,
    Bricks,
    FlatPieces,
    Boxes3d,
}

impl Cut {
    /// About `count` regions and the shape that they tile.
    fn make(self, count: u64) -> (Vec<u64>, Vec<Region>) {
        let side = count.isqrt();
        match self {
            Cut::Rows => (vec![count * 3, 64], (0..count).map(|at| region(&[at * 3, 0], &[3, 64])).collect()),
            Cut::Grid => (vec![side * 4; 2], grid(side * 4, 4)),
            Cut::ShuffledGrid => {
                let mut cells = grid(side * 4, 4);
                Numbers(1).shuffle(&mut cells);
                (vec![side * 4; 2], cells)
            }
            Cut::Bricks => {
                // Rows of bricks, every other row by half a brick, so that it is no grid.
                let mut bricks = Vec::new();
                for row in 0..side {
                    let shift = row % 2 * 2;
                    if shift > 0 {
                        bricks.push(region(&[row * 4, 0], &[4, shift]));
                    }
                    for column in 0..side {
                        let start = column * 4 + shift;
                        bricks.push(region(&[row * 4, start], &[4, 4.min(side * 4 - start)]));
                    }
                }
                Numbers(2).shuffle(&mut bricks);
                (vec![side * 4; 2], bricks)
            }
            Cut::FlatPieces => {
                let shape = vec![side, 240, 64];
                let elements = side * 240 * 64;
                let ranges = count * 4 / 5;
                let regions = (0..ranges)
                    .flat_map(|at| {
                        let (start, end) = (elements * at / ranges, elements * (at + 1) / ranges);
                        flat_pieces(&shape, start, end).expect("a range of the tensor")
                    })
                    .map(|piece| piece.region)
                    .collect();
                (shape, regions)
            }
            Cut::Boxes3d => {
                // A box is cut in two at a random place, over and over.
                let shape = vec![1 << 12; 3];
                let mut numbers = Numbers(3);
                let mut boxes = vec![region(&[0; 3], &shape)];
                while (boxes.len() as u64) < count {
                    let mut next = Vec::with_capacity(boxes.len() * 2);
                    for cell in boxes {
                        let dim = (0..3).max_by_key(|dim| cell.sizes()[*dim]).unwrap_or(0);
                        let size = cell.sizes()[dim];
                        if size < 2 {
                            next.push(cell);
                            continue;
                        }
                        let at = (size / 4 + numbers.below(size / 2)).clamp(1, size - 1);
                        let (mut offsets, mut sizes) = (cell.offsets().to_vec(), cell.sizes().to_vec());
                        sizes[dim] = at;
                        next.push(region(&offsets, &sizes));
                        (offsets[dim], sizes[dim]) = (offsets[dim] + at, size - at);
                        next.push(region(&offsets, &sizes));
                    }
                    boxes = next;
                }
                numbers.shuffle(&mut boxes);
                (shape, boxes)
            }
        }
    }
}

const CUTS: [Cut; 6] = [Cut::Rows, Cut::Grid, Cut::ShuffledGrid, Cut::Bricks, Cut::FlatPieces, Cut::Boxes3d];

/// 10,000 saved chunks against 17,689 wanted regions, index included: 39,601 moves, at most 20 ms.
#[divan::bench(sample_count = 50)]
fn moves_2d_grid(bencher: Bencher) {
    let (saved, wanted) = (grid(39_900, 400), grid(39_900, 300));
    let index = ChunkIndex::new(&[39_900, 39_900], saved.clone()).expect("an index");
    assert_eq!((wanted.len(), moves(&index, &wanted).len()), (17_689, 39_601));
    bencher.with_inputs(|| saved.clone()).bench_values(|saved| {
        let index = ChunkIndex::new(&[39_900, 39_900], saved).expect("an index");
        moves(&index, &wanted)
    });
}

/// Every tiling checked as it is: all must be found exact. One million chunks in at most 1 s.
#[divan::bench(args = growth(), sample_count = 5)]
fn coverage_exact(bencher: Bencher, (cut, count): (Cut, u64)) {
    let (shape, regions) = cut.make(count);
    bencher.bench(|| {
        let found = coverage(&shape, black_box(&regions)).expect("regions inside");
        assert!(found.is_exact());
    });
}

/// The same with one region missing and one doubled: both must be named.
#[divan::bench(args = growth(), sample_count = 3)]
fn coverage_broken(bencher: Bencher, (cut, count): (Cut, u64)) {
    let (shape, mut regions) = cut.make(count);
    let missing = regions.len() / 3;
    regions[missing] = regions[0].clone();
    bencher.bench(|| {
        let found = coverage(&shape, black_box(&regions)).expect("regions inside");
        assert_eq!((found.gaps.len(), found.overlaps.len()), (1, 1));
    });
}

#[divan::bench(args = growth(), sample_count = 3)]
fn index_build(bencher: Bencher, (cut, count): (Cut, u64)) {
    let (shape, regions) = cut.make(count);
    bencher.with_inputs(|| regions.clone()).bench_values(|regions| ChunkIndex::new(&shape, regions).expect("an index"));
}

/// 10,000 wanted regions, each a little larger than a stored one.
#[divan::bench(args = growth(), sample_count = 5)]
fn index_10k_queries(bencher: Bencher, (cut, count): (Cut, u64)) {
    let (shape, regions) = cut.make(count);
    let mut numbers = Numbers(7);
    let wanted: Vec<Region> = (0..10_000)
        .map(|_| {
            let stored = &regions[numbers.below(regions.len() as u64) as usize];
            let sizes: Vec<u64> =
                (0..shape.len()).map(|dim| (stored.sizes()[dim] + 1).min(shape[dim] - stored.offsets()[dim])).collect();
            region(stored.offsets(), &sizes)
        })
        .collect();
    let index = ChunkIndex::new(&shape, regions).expect("an index");
    bencher.bench(|| {
        let mut found = 0u64;
        for wanted in &wanted {
            index.for_each_overlap(wanted, |_, shared| found += shared.volume());
        }
        found
    });
}

fn growth() -> impl Iterator<Item = (Cut, u64)> {
    CUTS.into_iter().flat_map(|cut| [10_000, 100_000, 1_000_000].map(|count| (cut, count)))
}

/// Copies of 64 MiB whose runs are short: a block of columns out of a row-major matrix of 4-byte elements.
#[divan::bench(args = [1, 2, 4, 16, 256], sample_count = 5)]
fn copy_columns(bencher: Bencher, columns: u64) {
    let (rows, width) = ((16 << 20) / columns, 4 * columns);
    let src = vec![1u8; (rows * width * 4) as usize];
    let mut dst = vec![0u8; (rows * columns * 4) as usize];
    let wide = ByteLayout::contiguous(&[rows, width], 4).expect("a layout");
    let narrow = ByteLayout::contiguous(&[rows, columns], 4).expect("a layout");
    bencher.counter(BytesCount::new(dst.len())).bench_local(|| {
        let stretches = runs(&[rows, columns], &wide, &[0, columns], &narrow, &[0, 0]).expect("runs");
        copy_runs(&src, &mut dst, stretches).expect("a copy");
    });
}

/// 64 MiB out of a column-major matrix into a row-major one.
#[divan::bench(sample_count = 5)]
fn copy_transposed(bencher: Bencher) {
    let side = 4096;
    let src = vec![1u8; (side * side * 4) as usize];
    let mut dst = vec![0u8; src.len()];
    let column_major = ByteLayout::strided(&[side, side], &[1, side], 4).expect("a layout");
    let row_major = ByteLayout::contiguous(&[side, side], 4).expect("a layout");
    bencher.counter(BytesCount::new(dst.len())).bench_local(|| {
        let stretches = runs(&[side, side], &column_major, &[0, 0], &row_major, &[0, 0]).expect("runs");
        copy_runs(&src, &mut dst, stretches).expect("a copy");
    });
}
