use std::collections::HashMap;

use proptest::prelude::*;
use reshard_layout::{Mesh, Placement, Region, holders, local_regions, local_shape};

use crate::space::{elements, layouts, position};

/// The definition, on a list of indices: `torch.chunk`, padded with empty parts.
fn chunks(indices: &[u64], count: u64) -> Vec<Vec<u64>> {
    let size = indices.len().div_ceil(count as usize).max(1);
    let mut parts: Vec<Vec<u64>> = indices.chunks(size).map(<[u64]>::to_vec).collect();
    parts.resize(count as usize, Vec::new());
    parts
}

/// The global indices of a rank's local elements along each tensor dimension.
fn held(mesh: &Mesh, placements: &[Placement], shape: &[u64], rank: u64) -> Vec<Vec<u64>> {
    let coordinate = mesh.coordinate(rank).unwrap();
    let mut dims: Vec<Vec<u64>> = shape.iter().map(|size| (0..*size).collect()).collect();
    for (mesh_dim, placement) in placements.iter().enumerate() {
        let (count, at) = (mesh.shape()[mesh_dim], coordinate[mesh_dim] as usize);
        match *placement {
            Placement::Shard(dim) => dims[dim] = chunks(&dims[dim], count).swap_remove(at),
            Placement::StridedShard { dim, split_factor } => {
                let pieces = chunks(&dims[dim], split_factor);
                dims[dim] = pieces.iter().flat_map(|piece| chunks(piece, count).swap_remove(at)).collect();
            }
            _ => {}
        }
    }
    dims
}

fn cases() -> impl Strategy<Value = (Mesh, Vec<Placement>, Vec<u64>)> {
    let size = prop_oneof![1 => Just(0u64), 8 => 1..12u64];
    prop::collection::vec(size, 0..=5)
        .prop_filter("few enough elements to list", |shape| shape.iter().product::<u64>() <= 4000)
        .prop_flat_map(|shape| (layouts(shape.len()), Just(shape)))
        .prop_map(|((mesh, placements), shape)| (mesh, placements, shape))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_rank_holds_what_the_definition_says((mesh, placements, shape) in cases()) {
        let total: u64 = shape.iter().product();
        let mut holders_of = vec![Vec::new(); total as usize];
        for rank in mesh.ranks() {
            let expected = held(&mesh, &placements, &shape, *rank);
            let local = local_shape(&mesh, &placements, &shape, *rank).unwrap();
            let lengths: Vec<u64> = expected.iter().map(|dim| dim.len() as u64).collect();
            prop_assert_eq!(local.as_slice(), lengths.as_slice());
            let regions = local_regions(&mesh, &placements, &shape, *rank).unwrap();
            let mut filled = 0;
            for region in &regions {
                prop_assert!(region.global.check_inside(&shape).is_ok());
                filled += region.global.volume();
                for element in elements(&region.global) {
                    for dim in 0..shape.len() {
                        let at = region.local[dim] + element[dim] - region.global.offsets()[dim];
                        prop_assert_eq!(expected[dim][at as usize], element[dim]);
                    }
                    holders_of[position(&element, &shape)].push(*rank);
                }
            }
            prop_assert_eq!(filled, lengths.iter().product::<u64>());
            if filled == 0 {
                prop_assert_eq!(regions.len(), 1);
                for (dim, indices) in expected.iter().enumerate() {
                    prop_assert_eq!(regions[0].global.offsets()[dim], indices.first().copied().unwrap_or(shape[dim]));
                }
            }
        }
        // From the mesh alone the same ranks are known for every element.
        let found = holders(&mesh, &placements, &shape).unwrap();
        let mut seen: HashMap<&Region, ()> = HashMap::new();
        let mut covered = 0;
        for (region, ranks) in &found {
            prop_assert!(seen.insert(region, ()).is_none(), "{region} occurs twice");
            for element in elements(region) {
                covered += 1;
                prop_assert_eq!(&holders_of[position(&element, &shape)], ranks);
            }
        }
        prop_assert_eq!(covered, total);
        if total == 0 {
            prop_assert_eq!(&found[0].1, mesh.ranks());
        }
    }

    #[test]
    fn any_numbers_give_regions_or_an_error(
        mesh in prop::collection::vec(0..9u64, 0..4),
        dims in prop::collection::vec((0..8usize, any::<u64>(), 0..4u8), 0..4),
        shape in prop::collection::vec(prop_oneof![0..40u64, any::<u64>()], 0..4),
        rank in 0..600u64,
    ) {
        let placements: Vec<Placement> = dims
            .into_iter()
            .map(|(dim, split_factor, kind)| match kind {
                0 => Placement::Replicate,
                1 => Placement::Shard(dim),
                // Factors that give a list of regions worth building.
                2 => Placement::StridedShard { dim, split_factor: split_factor >> 52 },
                _ => Placement::Partial,
            })
            .collect();
        if let Ok(mesh) = Mesh::new(&mesh) {
            let _ = (local_regions(&mesh, &placements, &shape, rank), holders(&mesh, &placements, &shape));
        }
    }
}
