use proptest::prelude::*;
use reshard_layout::{ByteLayout, Region, copy_runs, runs};

use crate::space::{elements, shapes};

/// A layout of a shape whose dimensions lie in any order, with padding between them; now and then one repeats.
fn layouts(shape: Vec<u64>, element_size: u64, repeats: bool) -> impl Strategy<Value = ByteLayout> {
    let order = Just((0..shape.len()).collect::<Vec<_>>());
    let order = prop_oneof![order.clone(), order.prop_shuffle()];
    let padding = prop::collection::vec(prop_oneof![3 => Just(0u64), 1 => 1..3u64], shape.len());
    let repeated = prop::collection::vec(prop::bool::weighted(if repeats { 0.1 } else { 0.0 }), shape.len());
    (order, padding, repeated, 0..40u64).prop_map(move |(order, padding, repeated, base)| {
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for dim in order.into_iter().rev() {
            strides[dim] = if repeated[dim] { 0 } else { stride };
            stride = stride * shape[dim].max(1) + padding[dim];
        }
        ByteLayout::strided(&shape, &strides, element_size).unwrap().at(base)
    })
}

fn offset_in(layout: &ByteLayout, element: &[u64]) -> usize {
    (layout.base() + element.iter().zip(layout.byte_strides()).map(|(at, stride)| at * stride).sum::<u64>()) as usize
}

#[derive(Debug, Clone)]
struct Case {
    sizes: Vec<u64>,
    src: ByteLayout,
    src_offsets: Vec<u64>,
    dst: ByteLayout,
    dst_offsets: Vec<u64>,
}

fn cases() -> impl Strategy<Value = Case> {
    (shapes(), prop::sample::select(vec![1u64, 2, 3, 4, 8, 16])).prop_flat_map(|(sizes, element_size)| {
        let margins = || prop::collection::vec((0..2u64, 0..2u64), sizes.len());
        (Just(sizes.clone()), margins(), margins()).prop_flat_map(move |(sizes, before, after)| {
            let around = |margins: &[(u64, u64)]| -> Vec<u64> {
                sizes.iter().zip(margins).map(|(size, (before, after))| before + size + after).collect()
            };
            let offsets = |margins: &[(u64, u64)]| margins.iter().map(|(before, _)| *before).collect::<Vec<_>>();
            (
                Just((sizes.clone(), offsets(&before), offsets(&after))),
                layouts(around(&before), element_size, true),
                layouts(around(&after), element_size, false),
            )
                .prop_map(|((sizes, src_offsets, dst_offsets), src, dst)| Case {
                    sizes,
                    src,
                    src_offsets,
                    dst,
                    dst_offsets,
                })
        })
    })
}

proptest! {
    #[test]
    fn copying_the_runs_copies_every_element(case in cases(), taken in 0..3usize) {
        let Case { sizes, src, src_offsets, dst, dst_offsets } = case;
        let element_size = src.element_size() as usize;
        let source: Vec<u8> = (0..src.end()).map(|at| (at * 7 + at / 251) as u8).collect();
        let mut expected = vec![0xAA; dst.end() as usize];
        for element in elements(&Region::whole(&sizes).unwrap()) {
            let at = |offsets: &[u64]| element.iter().zip(offsets).map(|(at, by)| at + by).collect::<Vec<_>>();
            let (from, to) = (offset_in(&src, &at(&src_offsets)), offset_in(&dst, &at(&dst_offsets)));
            expected[to..to + element_size].copy_from_slice(&source[from..from + element_size]);
        }
        let all = runs(&sizes, &src, &src_offsets, &dst, &dst_offsets).unwrap();
        prop_assert_eq!(all.bytes(), sizes.iter().product::<u64>() * element_size as u64);
        prop_assert_eq!(all.clone().count() as u64, all.count_runs());
        prop_assert!(all.clone().all(|run| run.len == all.run_len()));
        let ends = all.clone().fold((0, 0), |ends, run| (ends.0.max(run.src + run.len), ends.1.max(run.dst + run.len)));
        prop_assert_eq!(all.ends(), ends);

        let mut whole = vec![0xAA; dst.end() as usize];
        copy_runs(&source, &mut whole, all.clone()).unwrap();
        prop_assert_eq!(&whole, &expected);

        // The iterator says the same, and a move of which some runs were taken copies the others.
        let mut parts = vec![0xAA; dst.end() as usize];
        let mut rest = all;
        for run in rest.by_ref().take(taken) {
            let (from, to, len) = (run.src as usize, run.dst as usize, run.len as usize);
            parts[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        copy_runs(&source, &mut parts, rest).unwrap();
        prop_assert_eq!(&parts, &expected);
    }

    /// Two row-major buffers: no two runs that follow each other could have been one.
    #[test]
    fn runs_are_as_long_as_they_can_be(case in cases()) {
        let shape = |layout: &ByteLayout| ByteLayout::contiguous(layout.shape(), layout.element_size()).unwrap();
        let all = runs(&case.sizes, &shape(&case.src), &case.src_offsets, &shape(&case.dst), &case.dst_offsets).unwrap();
        let all: Vec<_> = all.collect();
        for pair in all.windows(2) {
            let (one, next) = (pair[0], pair[1]);
            prop_assert!(one.src + one.len <= next.src, "the source is read in ascending order");
            prop_assert!(one.src + one.len != next.src || one.dst + one.len != next.dst);
        }
    }

    #[test]
    fn any_numbers_give_runs_or_an_error(
        shape in prop::collection::vec(prop_oneof![0..9u64, any::<u64>()], 0..4),
        strides in prop::collection::vec(prop_oneof![0..9u64, any::<u64>()], 0..4),
        numbers in prop::collection::vec(prop_oneof![0..9u64, any::<u64>()], 0..4),
        base in any::<u64>(),
        element_size in prop_oneof![0..9u64, any::<u64>()],
    ) {
        let layouts = [
            ByteLayout::strided(&shape, &strides, element_size),
            ByteLayout::contiguous(&shape, element_size),
        ];
        for layout in layouts.into_iter().flatten() {
            let (at, other) = (layout.clone().at(base), layout);
            let _ = (at.end(), at.is_contiguous());
            for (src, dst) in [(&at, &other), (&other, &at)] {
                if let Ok(all) = runs(&numbers, src, &strides, dst, &numbers) {
                    let _ = (all.ends(), all.bytes(), all.clone().take(9).last());
                    let _ = copy_runs(&[0; 64], &mut [0; 64], all);
                }
            }
        }
    }
}
