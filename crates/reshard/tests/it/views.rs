//! Views: random rules on random trees against the same done on whole arrays, sharded on both sides, and back again.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use proptest::prelude::*;
use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget, convert};
use reshard::diff::diff;
use reshard::layout::Region;
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, Scope};
use reshard::load::Verify;
use reshard::verify::{VerifyOptions, verify};
use reshard::view::View;
use reshard::{Checkpoint, DType, LoadOptions, LoadState, SaveOptions, Value, load_with, run_threads};

use crate::corpus;
use crate::layouts::{Cut, Whole, fitted};

/// A whole array of two-byte elements, in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array {
    pub(crate) shape: Vec<u64>,
    pub(crate) data: Vec<[u8; 2]>,
}

impl Array {
    fn of(whole: &Whole) -> Array {
        let bytes = whole.slice(&Region::whole(&whole.shape).unwrap());
        Array { shape: whole.shape.clone(), data: bytes.as_chunks::<2>().0.to_vec() }
    }

    /// An array whose elements are picked from others by their indices.
    pub(crate) fn pick(shape: Vec<u64>, mut at: impl FnMut(&[u64]) -> [u8; 2]) -> Array {
        let count: u64 = shape.iter().product();
        let mut data = Vec::with_capacity(count as usize);
        for flat in 0..count {
            let (mut rest, mut index) = (flat, vec![0; shape.len()]);
            for dim in (0..shape.len()).rev() {
                index[dim] = rest % shape[dim];
                rest /= shape[dim];
            }
            data.push(at(&index));
        }
        Array { shape, data }
    }

    pub(crate) fn get(&self, index: &[u64]) -> [u8; 2] {
        self.data[index.iter().zip(&self.shape).fold(0, |flat, (at, size)| flat * size + at) as usize]
    }

    fn permuted(&self, order: &[usize]) -> Array {
        let shape = order.iter().map(|&dim| self.shape[dim]).collect();
        Array::pick(shape, |index| {
            let mut old = vec![0; order.len()];
            order.iter().zip(index).for_each(|(&dim, at)| old[dim] = *at);
            self.get(&old)
        })
    }

    fn reshaped(&self, shape: &[u64]) -> Array {
        Array { shape: shape.to_vec(), data: self.data.clone() }
    }

    fn sliced(&self, dim: usize, start: u64, length: u64) -> Array {
        let mut shape = self.shape.clone();
        shape[dim] = length;
        Array::pick(shape, |index| {
            let mut old = index.to_vec();
            old[dim] += start;
            self.get(&old)
        })
    }

    pub(crate) fn joined(arrays: &[Array], dim: usize) -> Array {
        let mut shape = arrays[0].shape.clone();
        shape[dim] = arrays.iter().map(|array| array.shape[dim]).sum();
        Array::pick(shape, |index| {
            let mut old = index.to_vec();
            let mut number = 0;
            while old[dim] >= arrays[number].shape[dim] {
                old[dim] -= arrays[number].shape[dim];
                number += 1;
            }
            arrays[number].get(&old)
        })
    }

    pub(crate) fn with_dim(&self, dim: usize) -> Array {
        let mut shape = self.shape.clone();
        shape.insert(dim, 1);
        self.reshaped(&shape)
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.data.iter().flatten().copied().collect()
    }
}

/// One random step of one tensor, as text and as done on an array. All have an inverse.
pub(crate) fn step(array: &Array, choice: u64, text: &mut String) -> Array {
    let ndim = array.shape.len();
    let (a, b) = (choice as usize % ndim, (choice / 7) as usize % ndim);
    match choice % 4 {
        0 => {
            write!(text, "{{ transpose = [{a}, {b}] }}, ").unwrap();
            let mut order: Vec<usize> = (0..ndim).collect();
            order.swap(a, b);
            array.permuted(&order)
        }
        1 => {
            let mut order: Vec<usize> = (0..ndim).collect();
            order.rotate_left(a);
            write!(text, "{{ permute = {order:?} }}, ").unwrap();
            array.permuted(&order)
        }
        2 => {
            let size = array.shape[a];
            let factor = (1..=size).rev().find(|f| size.is_multiple_of(*f) && f * f <= size.max(1)).unwrap_or(1);
            write!(text, "{{ unflatten = {a}, sizes = [{factor}, -1] }}, ").unwrap();
            let mut shape = array.shape.clone();
            shape[a] = factor;
            shape.insert(a + 1, size / factor);
            array.reshaped(&shape)
        }
        _ if ndim > 1 => {
            let a = a.min(ndim - 2);
            let (x, y) = (array.shape[a], array.shape[a + 1]);
            write!(text, "{{ flatten = [{a}, {}], sizes = [{x}, {y}] }}, ", a + 1).unwrap();
            let mut shape = array.shape.clone();
            shape[a] = x * y;
            shape.remove(a + 1);
            array.reshaped(&shape)
        }
        _ => array.clone(),
    }
}

/// Regions of one tensor, and their bytes.
type Parts = Vec<(Region, Vec<u8>)>;

/// Tensors, the rules for them, and what they make.
#[derive(Debug)]
struct Case {
    wholes: Vec<Whole>,
    rules: String,
    expected: BTreeMap<String, Array>,
}

/// A model of layers with experts, and rules that stack, join and turn them in a random way, the optimizer's slots too.
fn case(layers: u64, experts: u64, shape: [u64; 2], choices: &[u64], parts: u64, dim: u64) -> Case {
    let mut wholes = Vec::new();
    let mut expected = BTreeMap::new();
    let mut text = String::from("rest = \"error\"\n");
    let stack_dim = (choices[0] % 3) as usize;
    let (concat_dim, groups) = ((dim % 2) as usize, if choices[1].is_multiple_of(2) { 1 } else { 2 });
    let mut one = String::new();
    let mut two = String::new();
    for (family, before, after) in [(0, "model.", ""), (1, "optim.state.", ".exp_avg"), (2, "ema.", "")] {
        for layer in 0..layers {
            let mut stacked = Vec::new();
            for expert in 0..experts {
                let key = format!("{before}l.{layer}.e.{expert}.w{after}");
                let whole = Whole::new(&key, DType::BFloat16, &shape, 1 + family * 100 + layer * 10 + expert);
                one.clear();
                let mut array = Array::of(&whole);
                for choice in &choices[2..4] {
                    array = step(&array, *choice, &mut one);
                }
                stacked.push(array.with_dim(stack_dim.min(array.shape.len())));
                wholes.push(whole);
            }
            let at = stack_dim.min(stacked[0].shape.len() - 1);
            let mut array = Array::joined(&stacked, at);
            write!(one, "{{ stack = \"e\", dim = {at} }}, ").unwrap();
            for choice in &choices[4..] {
                array = step(&array, *choice, &mut one);
            }
            expected.insert(format!("{before}layers.{layer}.experts{after}"), array);

            let mut joined = Vec::new();
            for part in 0..parts {
                let mut own = shape;
                own[concat_dim] = 2 * (part + 1);
                let key = format!("{before}l.{layer}.p{part}{after}");
                let whole = Whole::new(&key, DType::BFloat16, &own, 1000 + family * 100 + layer * 10 + part);
                joined.push(Array::of(&whole));
                wholes.push(whole);
            }
            // Group by group: the parts' own halves beside each other.
            let mut pieces = Vec::new();
            for group in 0..groups {
                for array in &joined {
                    let length = array.shape[concat_dim] / groups;
                    pieces.push(array.sliced(concat_dim, group * length, length));
                }
            }
            two.clear();
            let ratio: Vec<u64> = (1..=parts).collect();
            write!(two, "{{ concat = {concat_dim}, ratio = {ratio:?}, groups = {groups} }}, ").unwrap();
            let mut array = Array::joined(&pieces, concat_dim);
            for choice in &choices[4..] {
                array = step(&array, *choice, &mut two);
            }
            expected.insert(format!("{before}layers.{layer}.joined{after}"), array);
        }
    }
    let from: Vec<String> = (0..parts).map(|part| format!("\"l.{{i}}.p{part}\"")).collect();
    writeln!(text, "[[rule]]\nfrom = \"l.{{i}}.e.{{e}}.w\"\nto = \"layers.{{i}}.experts\"\nsteps = [{one}]").unwrap();
    writeln!(text, "[[rule]]\nfrom = [{}]\nto = \"layers.{{i}}.joined\"\nsteps = [{two}]", from.join(", ")).unwrap();
    Case { wholes, rules: text, expected }
}

pub(crate) fn view(text: &str) -> View {
    View::parse(text, "rules.toml", &BTreeMap::new()).unwrap()
}

/// What ranks that hold a tensor in this way load, put together again.
pub(crate) fn loaded(checkpoint: &Checkpoint, cut: &Cut, expected: &BTreeMap<String, Array>, options: &LoadOptions) {
    let results = run_threads(cut.ranks() as usize, |group| {
        let rank = reshard::Group::rank(&group) as u64;
        let mut memory: Vec<(String, Vec<u64>, Parts)> = expected
            .iter()
            .map(|(key, array)| {
                let pieces = fitted(cut, array.shape.len()).pieces(&array.shape, rank);
                let pieces = pieces.into_iter().map(|r| (r.clone(), vec![0xee; r.volume() as usize * 2])).collect();
                (key.clone(), array.shape.clone(), pieces)
            })
            .collect();
        let mut state = LoadState::new();
        for (key, shape, pieces) in &mut memory {
            let pieces = pieces
                .iter_mut()
                .map(|(region, bytes)| LoadPiece::contiguous(region.clone(), DType::BFloat16, bytes))
                .collect::<reshard::Result<_>>()?;
            let wanted = LoadTensor { dtype: DType::BFloat16, shape: shape.as_slice().into(), pieces };
            state.insert(key.clone(), Scope::Shared, LoadLeaf::Tensor(wanted))?;
        }
        load_with(&group, checkpoint, &mut state, options)?;
        drop(state);
        for (key, _, pieces) in memory {
            for (region, bytes) in pieces {
                let whole = &expected[&key];
                let part = Array::pick(region.sizes().to_vec(), |index| {
                    let global: Vec<u64> = index.iter().zip(region.offsets()).map(|(a, b)| a + b).collect();
                    whole.get(&global)
                });
                assert_eq!(bytes, part.bytes(), "{key} {region}");
            }
        }
        Ok(())
    });
    for result in results {
        result.unwrap();
    }
}

pub(crate) fn cuts() -> impl Strategy<Value = Cut> {
    prop_oneof![
        Just(corpus::solo()),
        (2u64..4).prop_map(corpus::rows),
        (2u64..4).prop_map(corpus::columns),
        Just(Cut {
            mesh: vec![2, 2],
            placements: vec![reshard::layout::Placement::Shard(0), reshard::layout::Placement::Shard(1)]
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn rules_do_what_the_same_does_to_whole_arrays_and_their_reverse_undoes_it(
        layers in 1u64..3, experts in 1u64..4, rows in 1u64..4, columns in 1u64..5,
        choices in prop::collection::vec(0u64..1000, 6), parts in 1u64..4, dim in 0u64..2,
        saved in cuts(), wanted in cuts(), always in any::<bool>(), exchange in any::<bool>(),
    ) {
        let case = case(layers, experts, [2 * rows, 2 * columns], &choices, parts, dim);
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source");
        let values = [("progress".to_owned(), Value::from(3))];
        corpus::save_state(&case.wholes, &values, &saved, &corpus::local(&source), &SaveOptions::default());
        let rules = view(&case.rules);
        let seen = corpus::open(&source).through(&rules).unwrap();
        let found: Vec<&str> = seen.keys().filter(|key| *key != "progress").collect();
        prop_assert_eq!(found.len(), case.expected.len());
        for (key, array) in &case.expected {
            prop_assert_eq!(&seen.tensor(key).unwrap().shape[..], &array.shape[..], "{}", key);
            prop_assert_eq!(seen.read_whole(key).unwrap(), array.bytes(), "{}", key);
        }
        let mut options = LoadOptions::default();
        options.verify = if always { Verify::Always } else { Verify::Whole };
        options.exchange = exchange;
        loaded(&seen, &wanted, &case.expected, &options);
        prop_assert!(verify(&seen, &VerifyOptions::default()).unwrap().is_sound());
        // Written through the view, and seen through its reverse: what it was.
        let target = ConvertTarget::Dcp { ranks: wanted.ranks() as usize };
        let made = folder.path().join("made");
        convert(&seen, &Destination::folder(corpus::local(&made)), target, &ConvertOptions::default()).unwrap();
        for (key, array) in &case.expected {
            prop_assert_eq!(corpus::open(&made).read_whole(key).unwrap(), array.bytes(), "{}", key);
        }
        let back = corpus::open(&made).through(&rules.reversed().unwrap()).unwrap();
        let difference = diff(&corpus::open(&source), &back, &reshard::diff::DiffOptions::default()).unwrap();
        prop_assert!(difference.is_same(), "{:?}", difference);
        // A view of a view: there and back without a file between.
        let twice = seen.through(&rules.reversed().unwrap()).unwrap();
        let difference = diff(&corpus::open(&source), &twice, &reshard::diff::DiffOptions::default()).unwrap();
        prop_assert!(difference.is_same(), "{:?}", difference);
    }
}

fn saved(wholes: &[Whole], values: &[(String, Value)]) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(wholes, values, &corpus::rows(2), &corpus::local(folder.path()), &SaveOptions::default());
    let checkpoint = corpus::open(folder.path());
    (folder, checkpoint)
}

fn refused(checkpoint: Checkpoint, rules: &str) -> String {
    checkpoint.through(&view(rules)).unwrap_err().to_string()
}

#[test]
fn rules_that_match_nothing_or_twice_or_leave_holes_name_rule_and_key() {
    let wholes =
        |names: &[&str]| -> Vec<Whole> { names.iter().map(|name| Whole::new(name, DType::BFloat16, &[4, 2], 1)).collect() };
    let open = |names: &[&str]| saved(&wholes(names), &[]);
    let (_folder, found) = open(&["a", "b"]);
    let text = refused(found, "[[rule]]\nname = \"none\"\nfrom = \"c.{x}\"\nto = \"d.{x}\"");
    assert!(text.contains("rule \"none\" (line 1): no key matches \"c.{x}\""), "{text}");
    let (_folder, found) = open(&["a"]);
    assert!(found.through(&view("[[rule]]\noptional = true\nfrom = \"c\"\nto = \"d\"")).is_ok());
    let (_folder, found) = open(&["a"]);
    let text = refused(found, "[[rule]]\nfrom = \"a\"\nto = \"b\"\n[[rule]]\nfrom = \"{x}\"\nto = \"c.{x}\"");
    assert!(text.contains("\"a\" is taken twice, by rule \"a\" (line 1) and rule \"{x}\" (line 4)"), "{text}");
    let (_folder, found) = open(&["e.0", "e.1", "e.3"]);
    let text = refused(found, "[[rule]]\nfrom = \"e.{i}\"\nto = \"e\"\nsteps = [{ stack = \"i\" }]");
    assert!(text.contains("{i} = 2 is missing") && text.contains("\"e.0\""), "{text}");
    let (_folder, found) = open(&["l.0.q", "l.0.k", "l.1.q"]);
    let text = refused(found, "[[rule]]\nfrom = [\"l.{i}.q\", \"l.{i}.k\"]\nto = \"l.{i}.qk\"\nsteps = [{ concat = 0 }]");
    assert!(text.contains("\"l.1.k\" does not exist"), "{text}");
    let (_folder, found) = open(&["a", "b"]);
    let text = refused(found, "[[rule]]\nfrom = \"a\"\nto = \"b\"");
    assert!(text.contains("\"a\" and \"b\" would both become \"b\""), "{text}");
    let (_folder, found) = open(&["a", "b"]);
    let text = refused(found, "rest = \"error\"\n[[rule]]\nfrom = \"a\"\nto = \"c\"");
    assert!(text.contains("no rule takes \"b\""), "{text}");
    let (_folder, found) = open(&["a"]);
    let text = refused(found, "[[rule]]\nfrom = \"a\"\nto = \"c\"\nsteps = [{ split = 0, sizes = [1, 2] }]\n");
    assert!(text.contains("[1, 2] share a dimension between 2, and there are 1"), "{text}");
    let (_folder, found) = open(&["a"]);
    let text = refused(found, "[[rule]]\nfrom = \"a\"\nto = \"c\"\nsteps = [{ transpose = [0, 2] }]\n");
    assert!(text.contains("transpose (line 4): dimension 2 does not exist") && text.contains("\"a\""), "{text}");
}

#[test]
fn padding_casting_and_slicing_are_what_they_say() {
    let wholes = [Whole::new("model.w", DType::BFloat16, &[3, 4], 7)];
    let (_folder, found) = saved(&wholes, &[]);
    let array = Array::of(&wholes[0]);
    let rules = "[[rule]]\nfrom = \"w\"\nto = \"w\"\nsteps = [{ pad = 0, size = 5, value = 1.0 }, { truncate = 1, size = 3 }]";
    let seen = found.through(&view(rules)).unwrap();
    let one = [0x80, 0x3f];
    let expected = Array::pick(vec![5, 3], |index| if index[0] < 3 { array.get(index) } else { one });
    assert_eq!(seen.read_whole("model.w").unwrap(), expected.bytes());
    // Written, with what was never stored.
    let folder = tempfile::tempdir().unwrap();
    let target = ConvertTarget::Safetensors { max_shard_size: None };
    convert(&seen, &Destination::folder(corpus::local(folder.path())), target, &ConvertOptions::default()).unwrap();
    assert_eq!(corpus::open(folder.path()).read_whole("model.w").unwrap(), expected.bytes());
    // A cast, and its values.
    let (_folder, found) = saved(&wholes, &[]);
    let rules = "[[rule]]\nfrom = \"w\"\nto = \"w\"\nsteps = [{ transpose = [0, 1] }, { cast = \"fp32\", from = \"bf16\" }]";
    let seen = found.through(&view(rules)).unwrap();
    let wide: Vec<u8> = array.permuted(&[1, 0]).data.iter().flat_map(|[a, b]| [0, 0, *a, *b]).collect();
    assert_eq!(seen.read_whole("model.w").unwrap(), wide);
    let folder = tempfile::tempdir().unwrap();
    convert(&seen, &Destination::folder(corpus::local(folder.path())), target, &ConvertOptions::default()).unwrap();
    assert_eq!(corpus::open(folder.path()).read_whole("model.w").unwrap(), wide);
}

#[test]
fn what_is_live_stays_as_it_is_and_cannot_be_written() {
    let wholes = [Whole::new("model.w", DType::BFloat16, &[3, 4], 7)];
    let (_folder, found) = saved(&wholes, &[]);
    let rules = "[[rule]]\nfrom = \"w\"\nto = \"w\"\nsteps = [{ pad = 0, size = 5, value = \"live\" }]";
    let seen = found.through(&view(rules)).unwrap();
    let mut memory = vec![0xaa; 40];
    let mut state = LoadState::new();
    let piece = LoadPiece::contiguous(Region::whole(&[5, 4]).unwrap(), DType::BFloat16, &mut memory).unwrap();
    let wanted = LoadTensor { dtype: DType::BFloat16, shape: [5, 4].as_slice().into(), pieces: vec![piece] };
    state.insert("model.w", Scope::Shared, LoadLeaf::Tensor(wanted)).unwrap();
    load_with(&reshard::Solo, &seen, &mut state, &LoadOptions::default()).unwrap();
    drop(state);
    assert_eq!(memory[..24], Array::of(&wholes[0]).bytes());
    assert_eq!(memory[24..], [0xaa; 16]);
    let folder = tempfile::tempdir().unwrap();
    let target = ConvertTarget::Safetensors { max_shard_size: None };
    let destination = Destination::folder(corpus::local(folder.path()));
    let error = convert(&seen, &destination, target, &ConvertOptions::default()).unwrap_err().to_string();
    assert!(error.contains("\"model.w\"") && error.contains("as they are in the tensor that is loaded"), "{error}");
}

#[test]
fn codes_are_not_cast_without_their_scales() {
    let codes = Whole::new("w", DType::Float8E4M3Fn, &[4, 4], 1);
    let scales = Whole::new("w_scale_inv", DType::Float32, &[1, 1], 2);
    let rules = "[[rule]]\nfrom = \"w\"\nto = \"v\"\nsteps = [{ cast = \"bfloat16\" }]\n";
    let (_folder, found) = saved(&[codes.clone(), scales], &[]);
    let text = refused(found, rules);
    assert!(text.contains("\"w\" is codes scaled by \"w_scale_inv\""), "{text}");
    let (_folder, found) = saved(&[codes], &[]);
    assert_eq!(found.through(&view(rules)).unwrap().keys().collect::<Vec<_>>(), ["v"]);
}

#[test]
fn slots_of_another_shape_follow_a_stated_rule_or_are_named() {
    let step = |key: &str, seed| Whole::new(key, DType::Float32, &[], seed);
    let matrix = |key: &str| Whole::new(key, DType::BFloat16, &[4, 2], 1);
    let rules = "[[rule]]\nfrom = \"e.{i}\"\nto = \"e\"\nsteps = [{ stack = \"i\" }]\n";
    let lr = |key: &str, value: f64| (key.to_owned(), Value::from(value));
    let groups = |keys: [(String, Value); 2]| keys.to_vec();
    let own = |a: f64, b: f64| groups([lr("optim.param_groups.e.0.lr", a), lr("optim.param_groups.e.1.lr", b)]);
    let tensors = |seed| {
        vec![matrix("model.e.0"), matrix("model.e.1"), step("optim.state.e.0.step", 5), step("optim.state.e.1.step", seed)]
    };
    let (_folder, found) = saved(&tensors(5), &own(0.1, 0.1));
    let seen = found.through(&view(rules)).unwrap();
    let keys: Vec<&str> = seen.keys().collect();
    assert_eq!(keys, ["model.e", "optim.state.e.step", "optim.param_groups.e.lr"]);
    assert_eq!(seen.read_whole("optim.state.e.step").unwrap(), step("", 5).slice(&Region::whole(&[]).unwrap()));
    // The reverse gives each its own again.
    let back = seen.through(&view(rules).reversed().unwrap()).unwrap();
    assert_eq!(back.value("optim.param_groups.e.1.lr").unwrap(), Value::from(0.1));
    assert_eq!(back.keys().count(), 6);
    // Steps or settings that differ cannot become one.
    let (_folder, found) = saved(&tensors(6), &[]);
    let text = refused(found, rules);
    assert!(
        text.contains("\"optim.state.e.0.step\" and \"optim.state.e.1.step\" become one, and do not hold the same"),
        "{text}"
    );
    let (_folder, found) = saved(&tensors(5), &own(0.1, 0.2));
    assert!(refused(found, rules).contains("do not hold the same"));
    // Factored moments.
    let mut factored = tensors(5);
    factored.extend([0, 1].map(|e| Whole::new(&format!("optim.state.e.{e}.row"), DType::Float32, &[4], 3)));
    let (_folder, found) = saved(&factored, &[]);
    let text = refused(found, rules);
    assert!(text.contains("\"optim.state.e.0.row\" has shape [4], its parameter [4, 2]"), "{text}");
    assert!(text.contains("[slots] row = \"drop\" or \"same\""), "{text}");
    let (_folder, found) = saved(&factored, &[]);
    let seen = found.through(&view(&format!("[slots]\nrow = \"drop\"\n{rules}"))).unwrap();
    assert!(seen.keys().all(|key| !key.contains("row")));
}

#[test]
fn slots_of_one_element_are_told_by_others_or_by_their_name() {
    let float = |key: &str, shape: &[u64]| Whole::new(key, DType::Float32, shape, 3);
    let slot = |parameter: &str, slot: &str, shape: &[u64]| float(&format!("optim.state.{parameter}.{slot}"), shape);
    let rules = "[[rule]]\nfrom = [\"a\", \"b\"]\nto = \"ab\"\nsteps = [{ concat = 0 }]\n";
    let shapes = |tensors: &[Whole], rules: &str| -> Vec<(String, Vec<u64>)> {
        let (_folder, found) = saved(tensors, &[]);
        let seen = found.through(&view(rules)).unwrap();
        let shape = |key: &str| seen.tensor(key).unwrap().shape.to_vec();
        seen.keys().filter(|key| key.contains("ab")).map(|key| (key.to_owned(), shape(key))).collect()
    };
    let key = |slot: &str, shape: &[u64]| (format!("optim.state.ab.{slot}"), shape.to_vec());
    // An optimizer's state by itself, one parameter of a single element.
    let mut tensors =
        vec![slot("a", "exp_avg", &[1]), slot("a", "step", &[]), slot("b", "exp_avg", &[3]), slot("b", "step", &[])];
    assert_eq!(shapes(&tensors, rules), [key("exp_avg", &[4]), key("step", &[])]);
    // And both: the names that PyTorch has.
    tensors[2] = slot("b", "exp_avg", &[1]);
    assert_eq!(shapes(&tensors, rules), [key("exp_avg", &[2]), key("step", &[])]);
    // A counter of the shape that its parameter happens to have.
    let counted = [float("a", &[1]), slot("a", "step", &[1]), float("b", &[2]), slot("b", "step", &[1])];
    assert_eq!(shapes(&counted, rules), [("ab".to_owned(), vec![3]), key("step", &[1])]);
    // Other names: nothing tells, another parameter tells, the rules tell.
    let mut other = vec![slot("a", "moment", &[1]), slot("b", "moment", &[1])];
    let (_folder, found) = saved(&other, &[]);
    let text = refused(found, rules);
    assert!(text.contains("\"optim.state.a.moment\" has one element") && text.contains("[slots] moment = "), "{text}");
    assert_eq!(shapes(&other, &format!("[slots]\nmoment = \"steps\"\n{rules}")), [key("moment", &[2])]);
    assert_eq!(shapes(&other, &format!("[slots]\nmoment = \"same\"\n{rules}")), [key("moment", &[1])]);
    other.push(slot("c", "moment", &[5]));
    assert_eq!(shapes(&other, rules), [key("moment", &[2])]);
    other.push(float("c", &[5, 2]));
    other[2] = slot("c", "moment", &[1]);
    assert_eq!(shapes(&other, rules), [key("moment", &[1])]);
    // Slots of two shapes, and no parameter that says which is its own.
    let factored = ["a", "b"].map(|name| [slot(name, "exp_avg", &[4, 2]), slot(name, "row", &[4])]).concat();
    let (_folder, found) = saved(&factored, &[]);
    let text = refused(found, rules);
    assert!(text.contains("the slots of \"a\" have several shapes") && text.contains("[slots] row = "), "{text}");
    assert_eq!(shapes(&factored, &format!("[slots]\nrow = \"drop\"\n{rules}")), [key("exp_avg", &[8, 2])]);
}

#[test]
fn a_damaged_record_is_found_through_a_view() {
    let wholes = [Whole::new("model.w", DType::BFloat16, &[300, 40], 7)];
    let folder = tempfile::tempdir().unwrap();
    corpus::save_state(&wholes, &[], &corpus::solo(), &corpus::local(folder.path()), &SaveOptions::default());
    let data = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().path());
    let mut data = data.filter(|p| p.extension().is_some_and(|e| e == "distcp"));
    let data = data.next().unwrap();
    let mut bytes = std::fs::read(&data).unwrap();
    let inside = wholes[0].slice(&Region::whole(&[300, 40]).unwrap());
    let at = bytes.windows(64).position(|w| w == &inside[1000..1064]).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&data, bytes).unwrap();
    let rules = "[[rule]]\nfrom = \"w\"\nto = [\"a\", \"b\"]\nsteps = [{ transpose = [0, 1] }, { split = 0 }]";
    let seen = || corpus::open(folder.path()).through(&view(rules)).unwrap();
    assert!(!verify(&seen(), &VerifyOptions::default()).unwrap().is_sound());
    let mut memory = vec![0; 20 * 300 * 2];
    let region = Region::whole(&[20, 300]).unwrap();
    let mut load = |always: Verify| {
        let mut state = LoadState::new();
        let piece = LoadPiece::contiguous(region.clone(), DType::BFloat16, &mut memory).unwrap();
        let wanted = LoadTensor { dtype: DType::BFloat16, shape: [20, 300].as_slice().into(), pieces: vec![piece] };
        state.insert("model.a", Scope::Shared, LoadLeaf::Tensor(wanted)).unwrap();
        let mut options = LoadOptions::default();
        options.verify = always;
        options.expected = Some(std::sync::Arc::new(|_| false));
        load_with(&reshard::Solo, &seen(), &mut state, &options).map(drop)
    };
    assert!(load(Verify::Always).unwrap_err().to_string().contains("checksum"));
    // A conversion compares what it reads.
    let target = ConvertTarget::Dcp { ranks: 2 };
    let made = tempfile::tempdir().unwrap();
    let error = convert(&seen(), &Destination::folder(corpus::local(made.path())), target, &ConvertOptions::default());
    assert!(error.unwrap_err().to_string().contains("checksum"));
}
