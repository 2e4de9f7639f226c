//! Typed slices in and out: what goes in as numbers comes back as numbers, sharded or whole.

use half::{bf16, f16};
use reshard::layout::{Mesh, Placement, local_shape};
use reshard::{
    Checkpoint, Element, ErrorKind, Group, LoadOptions, LoadState, SaveOptions, SaveState, Solo, load_with, run_threads,
    save_with,
};

use crate::corpus;

fn round_trip<T: Element + PartialEq + std::fmt::Debug>(values: &[T]) {
    let folder = tempfile::tempdir().unwrap();
    let store = corpus::local(folder.path());
    let mut state = SaveState::new();
    state.tensor("x", &[values.len() as u64], values).unwrap();
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    let checkpoint = Checkpoint::open_store(store).unwrap();
    assert_eq!(checkpoint.tensor("x").unwrap().dtype, T::DTYPE);
    assert_eq!(checkpoint.read::<T>("x").unwrap(), values);
    let mut memory = vec![T::ZERO; values.len()];
    checkpoint.read_into("x", &mut memory).unwrap();
    assert_eq!(memory, values);
}

#[test]
fn every_element_type_comes_back() {
    round_trip(&[1.5f32, -0.0, f32::INFINITY]);
    round_trip(&[1.5f64, f64::MIN_POSITIVE]);
    round_trip(&[f16::from_f32(1.5), f16::MAX]);
    round_trip(&[bf16::from_f32(1.5), bf16::MIN]);
    round_trip(&[float8::F8E4M3::from_f32(1.5), float8::F8E4M3::from_f32(-2.0)]);
    round_trip(&[float8::F8E5M2::from_f32(1.5)]);
    round_trip(&[i8::MIN, 0, 1]);
    round_trip(&[i16::MIN, 0]);
    round_trip(&[i32::MIN, 7]);
    round_trip(&[i64::MIN, 7]);
    round_trip(&[u8::MAX, 7]);
    round_trip(&[u16::MAX]);
    round_trip(&[u32::MAX]);
    round_trip(&[u64::MAX]);
}

#[test]
fn slices_are_those_of_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let store = corpus::local(folder.path());
    let values: Vec<i32> = (0..5 * 7).collect();
    let mut state = SaveState::new();
    state.tensor("x", &[5, 7], &values).unwrap();
    state.value("step", 3).unwrap();
    save_with(&Solo, &state, &store, &SaveOptions::default()).unwrap();
    let checkpoint = Checkpoint::open_store(store).unwrap();
    assert_eq!(checkpoint.read_slice::<i32>("x", [1..3, 2..4]).unwrap(), [9, 10, 16, 17]);
    assert_eq!(checkpoint.read_slice::<i32>("x", 4..5).unwrap(), (28..35).collect::<Vec<_>>());
    assert!(checkpoint.read_slice::<i32>("x", 2..2).unwrap().is_empty());
    let mut two = [0i32; 2];
    checkpoint.read_slice_into("x", &[0..2, 6..7], &mut two).unwrap();
    assert_eq!(two, [6, 13]);

    // Each mistake is an error that names the key.
    let wrong = |error: reshard::Error, kind| {
        assert!(error.kind() == kind && error.full_text().contains('x'), "{error:?}");
    };
    wrong(checkpoint.read::<f32>("x").unwrap_err(), ErrorKind::Mismatch);
    wrong(checkpoint.read_slice::<i32>("x", 0..6).unwrap_err(), ErrorKind::Invalid);
    wrong(checkpoint.read_slice::<i32>("x", &[0..1, 0..1, 0..1]).unwrap_err(), ErrorKind::Invalid);
    wrong(checkpoint.read_into("x", &mut two).unwrap_err(), ErrorKind::Invalid);
    wrong(state.tensor("xx", &[5], &values).unwrap_err(), ErrorKind::Invalid);
}

/// Ranks hold rows, columns, replicas and strided shards of one matrix; others load it another way.
#[test]
fn shards_of_one_mesh_load_as_shards_of_another() {
    use Placement::{Replicate, Shard};
    const SHAPE: [u64; 2] = [7, 5];
    let strided = Placement::StridedShard { dim: 0, split_factor: 2 };
    let layouts: [(&[u64], Vec<Placement>); 4] = [
        (&[4], vec![Shard(0)]),
        (&[3], vec![Shard(1)]),
        (&[2, 2], vec![Replicate, Shard(0)]),
        (&[2, 2], vec![strided, Shard(0)]),
    ];
    let part = |mesh: &Mesh, placements: &[Placement], rank: usize| -> Vec<f32> {
        let regions = reshard::layout::local_regions(mesh, placements, &SHAPE, rank as u64).unwrap();
        let local = local_shape(mesh, placements, &SHAPE, rank as u64).unwrap();
        let mut values = vec![0.0; local.iter().product::<u64>() as usize];
        for region in regions.iter().filter(|region| !region.global.is_empty()) {
            let (offsets, sizes) = (region.global.offsets(), region.global.sizes());
            for (row, column) in (0..sizes[0]).flat_map(|row| (0..sizes[1]).map(move |column| (row, column))) {
                let at = (region.local[0] + row) * local[1] + region.local[1] + column;
                values[at as usize] = ((offsets[0] + row) * SHAPE[1] + offsets[1] + column) as f32;
            }
        }
        values
    };
    for (from, from_placements) in &layouts {
        for (to, to_placements) in &layouts {
            let folder = tempfile::tempdir().unwrap();
            let store = corpus::local(folder.path());
            for done in run_threads(from.iter().product::<u64>() as usize, |group| {
                let mesh = Mesh::new(from)?;
                let values = part(&mesh, from_placements, group.rank());
                let mut state = SaveState::of(&group);
                state.shard("matrix", &mesh, from_placements, &SHAPE, &values)?;
                save_with(&group, &state, &store, &SaveOptions::default())
            }) {
                done.unwrap();
            }
            for done in run_threads(to.iter().product::<u64>() as usize, |group| {
                let mesh = Mesh::new(to)?;
                let meant = part(&mesh, to_placements, group.rank());
                let mut values = vec![-1.0f32; meant.len()];
                let mut state = LoadState::of(&group);
                state.shard("matrix", &mesh, to_placements, &SHAPE, &mut values)?;
                load_with(&group, &Checkpoint::open_store(store.clone())?, &mut state, &LoadOptions::default())?;
                drop(state);
                assert_eq!(values, meant, "{from:?} {from_placements:?} -> {to:?} {to_placements:?}");
                Ok(())
            }) {
                done.unwrap();
            }
        }
    }
    // A shard of the wrong length is named.
    let mesh = Mesh::new(&[4]).unwrap();
    let error = SaveState::new().shard("matrix", &mesh, &[Shard(0)], &SHAPE, &[1.0f32]).unwrap_err();
    assert!(error.to_string().contains("\"matrix\"") && error.to_string().contains("10 elements"), "{error}");
}

#[test]
fn arrays_come_back_as_they_were() {
    let path = "memory://typed-arrays";
    let array = ndarray::arr2(&[[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    let transposed = array.t();
    let mut state = SaveState::new();
    state.array("a", &array).unwrap();
    let error = state.array("c", &transposed).unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("\"c\""), "{error}");
    reshard::save(&Solo, path, &state).unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(checkpoint.read_array::<f32>("a").unwrap(), array.clone().into_dyn());
    assert_eq!(checkpoint.read_array::<f64>("a").unwrap_err().kind(), ErrorKind::Mismatch);
}
