//! Answers of PyTorch itself, recorded by `tests/fixtures/make_placements.py`.

use reshard_layout::{ChunkSharding, Mesh, Placement, Region, local_regions, local_shape};
use serde::Deserialize;

#[derive(Deserialize)]
struct Fixtures {
    torch: String,
    cases: Vec<Case>,
    chunks: Vec<Chunked>,
}

#[derive(Deserialize)]
struct Case {
    shape: Vec<u64>,
    mesh: Vec<u64>,
    ranks: Vec<u64>,
    placements: Vec<serde_json::Value>,
    answers: Vec<Answer>,
}

#[derive(Deserialize)]
struct Answer {
    rank: u64,
    local_shape: Vec<u64>,
    global_offset: Vec<u64>,
    /// Per tensor dimension the stretches `[start, length]` of global indices, in local order.
    held: Vec<Vec<(u64, u64)>>,
}

#[derive(Deserialize)]
struct Chunked {
    dim: usize,
    ranks: Vec<u64>,
    shape: Vec<u64>,
    shards: Vec<Shard>,
}

#[derive(Deserialize)]
struct Shard {
    rank: u64,
    offsets: Vec<u64>,
    sizes: Vec<u64>,
}

fn fixtures() -> Fixtures {
    serde_json::from_str(include_str!("../fixtures/placements.json")).unwrap()
}

fn placement(value: &serde_json::Value) -> Placement {
    let number = |key: &str| value.get(key).and_then(serde_json::Value::as_u64);
    match (number("shard"), number("strided"), number("split_factor")) {
        (Some(dim), _, _) => Placement::Shard(dim as usize),
        (_, Some(dim), Some(split_factor)) => Placement::StridedShard { dim: dim as usize, split_factor },
        _ => {
            assert_eq!(value, "replicate");
            Placement::Replicate
        }
    }
}

#[test]
fn placements_give_what_pytorch_gives() {
    let fixtures = fixtures();
    assert!(fixtures.torch.starts_with("2."), "made by torch {}", fixtures.torch);
    let (mut ranks, mut strided) = (0, 0);
    for case in &fixtures.cases {
        let mesh = Mesh::with_ranks(&case.mesh, &case.ranks).unwrap();
        let placements: Vec<Placement> = case.placements.iter().map(placement).collect();
        let name = format!("{:?} on {:?} by {placements:?}", case.shape, case.mesh);
        for answer in &case.answers {
            ranks += 1;
            let local = local_shape(&mesh, &placements, &case.shape, answer.rank).unwrap();
            assert_eq!(local.as_slice(), answer.local_shape, "{name}, rank {}", answer.rank);
            let regions = local_regions(&mesh, &placements, &case.shape, answer.rank).unwrap();
            assert_eq!(regions[0].global.offsets(), answer.global_offset, "{name}, rank {}", answer.rank);
            if answer.local_shape.contains(&0) {
                assert_eq!((regions.len(), regions[0].global.sizes()), (1, answer.local_shape.as_slice()), "{name}");
                continue;
            }
            strided += usize::from(regions.len() > 1);
            let found: Vec<(Region, Vec<u64>)> = regions.into_iter().map(|it| (it.global, it.local.to_vec())).collect();
            assert_eq!(found, product(&answer.held), "{name}, rank {}", answer.rank);
        }
    }
    assert!(fixtures.cases.len() > 200 && ranks > 2000 && strided > 200, "{ranks} ranks, {strided} strided");
}

/// Every combination of one stretch per dimension, with its place in the local tensor, in row-major order.
fn product(held: &[Vec<(u64, u64)>]) -> Vec<(Region, Vec<u64>)> {
    let mut all = vec![(Vec::new(), Vec::new(), Vec::new())];
    for dim in held {
        let mut next = Vec::new();
        for (offsets, sizes, local) in all {
            let mut passed = 0;
            for (start, length) in dim {
                let with = |list: &Vec<u64>, number: u64| [list.as_slice(), &[number]].concat();
                next.push((with(&offsets, *start), with(&sizes, *length), with(&local, passed)));
                passed += length;
            }
        }
        all = next;
    }
    all.into_iter().map(|(offsets, sizes, local)| (Region::new(&offsets, &sizes).unwrap(), local)).collect()
}

#[test]
fn chunk_shardings_give_what_pytorch_gives() {
    let fixtures = fixtures();
    assert!(!fixtures.chunks.is_empty());
    for case in fixtures.chunks {
        let found = ChunkSharding::new(case.dim, &case.ranks).unwrap().regions(&case.shape).unwrap();
        assert_eq!(found.len(), case.shards.len());
        for ((region, rank), shard) in found.iter().zip(&case.shards) {
            assert_eq!((rank, region.sizes()), (&shard.rank, shard.sizes.as_slice()));
            // PyTorch gives an empty shard an offset past the tensor, which its own validation then refuses.
            let inside: Vec<u64> = shard.offsets.iter().zip(&case.shape).map(|(at, size)| *at.min(size)).collect();
            assert_eq!(region.offsets(), inside, "dimension {} of {:?}", case.dim, case.shape);
        }
    }
}
