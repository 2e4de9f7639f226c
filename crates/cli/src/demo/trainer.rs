//! A two-layer network and AdamW, with parameters and both moments sharded over a mesh.
//!
//! As in real training, a rank holds only its own pieces. For a step it gathers what it needs, computes its share — its
//! samples (data parallel) and its hidden units (tensor parallel) — and updates its own pieces.

use std::sync::Arc;

use reshard::checkpoint::LoadedValue;
use reshard::formats::{KeyPath, PathSegment};
use reshard::layout::{Dims, Mesh, Placement, Region, local_regions};
use reshard::leaf::{LoadLeaf, LoadPiece, LoadTensor, SaveLeaf, SavePiece, SaveTensor, Scope};
use reshard::storage::Store;
use reshard::{
    Checkpoint, DType, Error, Group, LoadOptions, LoadState, Result, SaveOptions, SaveReport, SaveState, Value, load_with,
    save_with,
};

use super::arithmetic::{Exact, noise};

const INPUTS: usize = 12;
const HIDDEN: usize = 26;
const OUTPUTS: usize = 5;
const SAMPLES: u64 = 48;
const LEARNING_RATE: f64 = 0.01;
const BETAS: (f64, f64) = (0.9, 0.999);
const EPSILON: f64 = 1e-8;
const WEIGHT_DECAY: f64 = 0.01;

const NAMES: [&str; 2] = ["up.weight", "down.weight"];
const SHAPES: [[u64; 2]; 2] = [[HIDDEN as u64, INPUTS as u64], [OUTPUTS as u64, HIDDEN as u64]];

/// How many parameters the model has.
pub(super) fn parameter_count() -> u64 {
    SHAPES.iter().map(|s| s[0] * s[1]).sum()
}

/// One of a piece's three buffers.
type SlotOf = fn(&Piece) -> &Vec<f32>;

/// A mesh of data × tensor parallel ranks, and how each parameter is cut over it.
pub(super) struct Layout {
    pub(super) name: &'static str,
    mesh: [u64; 2],
    placements: [[Placement; 2]; 2],
}

impl Layout {
    /// 2 × 2: hidden units over the tensor-parallel ranks, the other dimension over the data-parallel ones.
    pub(super) fn data_and_tensor_parallel() -> Layout {
        Layout {
            name: "mesh dp=2 × tp=2, hidden units cut by tp, the other dimension by dp",
            mesh: [2, 2],
            placements: [[Placement::Shard(1), Placement::Shard(0)], [Placement::Shard(0), Placement::Shard(1)]],
        }
    }

    /// Rows of everything over all ranks, unevenly: 26 rows over 3 ranks are 9, 9, 8; 5 rows are 2, 2, 1.
    pub(super) fn fully_sharded(ranks: u64) -> Layout {
        Layout {
            name: "mesh dp=3, rows of every parameter cut by dp (9, 9 and 8 of 26)",
            mesh: [ranks, 1],
            placements: [[Placement::Shard(0), Placement::Replicate], [Placement::Shard(0), Placement::Replicate]],
        }
    }
}

/// A rank's piece of one parameter, with its moments.
struct Piece {
    parameter: usize,
    region: Region,
    weight: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
}

/// One rank of the training run.
pub(super) struct Trainer<'g, G: Group> {
    group: &'g G,
    mesh: [u64; 2],
    pieces: Vec<Piece>,
    step: u64,
    loss: f64,
}

impl<'g, G: Group> Trainer<'g, G> {
    pub(super) fn new(group: &'g G, layout: &Layout) -> Result<Trainer<'g, G>> {
        let mesh = Mesh::new(&layout.mesh)?;
        let mut pieces = Vec::new();
        for (parameter, shape) in SHAPES.iter().enumerate() {
            for local in local_regions(&mesh, &layout.placements[parameter], shape, group.rank() as u64)? {
                let region = local.global;
                let weight = elements(&region).map(|at| first_weight(parameter, at)).collect::<Vec<_>>();
                let zeros = vec![0.0; weight.len()];
                pieces.push(Piece { parameter, region, weight, exp_avg: zeros.clone(), exp_avg_sq: zeros });
            }
        }
        Ok(Trainer { group, mesh: layout.mesh, pieces, step: 0, loss: f64::NAN })
    }

    pub(super) fn loss(&self) -> f64 {
        self.loss
    }

    pub(super) fn train(&mut self, steps: u64) -> Result<()> {
        for _ in 0..steps {
            let whole = self.gather(|piece| &piece.weight)?;
            let (gradients, loss) = self.gradients(&whole)?;
            self.loss = loss;
            self.step += 1;
            let step = self.step;
            for piece in &mut self.pieces {
                let gradient = &gradients[piece.parameter];
                let columns = SHAPES[piece.parameter][1];
                for (i, at) in elements(&piece.region).enumerate() {
                    let g = gradient[(at[0] * columns + at[1]) as usize].value();
                    adamw(g, step, &mut piece.weight[i], &mut piece.exp_avg[i], &mut piece.exp_avg_sq[i]);
                }
            }
        }
        Ok(())
    }

    /// Every tensor whole: parameters and moments.
    pub(super) fn whole_tensors(&self) -> Result<Vec<(String, Vec<f32>)>> {
        let mut all = Vec::new();
        let slots: [(&str, SlotOf); 3] =
            [("model.", |p| &p.weight), ("exp_avg of ", |p| &p.exp_avg), ("exp_avg_sq of ", |p| &p.exp_avg_sq)];
        for (prefix, slot) in slots {
            for (name, values) in NAMES.iter().zip(self.gather(slot)?) {
                all.push((format!("{prefix}{name}"), values));
            }
        }
        Ok(all)
    }

    /// Assembles whole tensors from everyone's pieces.
    fn gather(&self, slot: SlotOf) -> Result<Vec<Vec<f32>>> {
        let mut message = Vec::new();
        for piece in &self.pieces {
            for (at, value) in elements(&piece.region).zip(slot(piece)) {
                let index = at[0] * SHAPES[piece.parameter][1] + at[1];
                message.extend((piece.parameter as u32).to_le_bytes());
                message.extend((index as u32).to_le_bytes());
                message.extend(value.to_le_bytes());
            }
        }
        let mut whole: Vec<Vec<f32>> = SHAPES.iter().map(|s| vec![0.0; (s[0] * s[1]) as usize]).collect();
        for bytes in self.group.all_gather(&message)? {
            for entry in bytes.as_chunks::<12>().0 {
                let word = |i: usize| [entry[i], entry[i + 1], entry[i + 2], entry[i + 3]];
                let (parameter, index) = (u32::from_le_bytes(word(0)) as usize, u32::from_le_bytes(word(4)) as usize);
                whole[parameter][index] = f32::from_le_bytes(word(8));
            }
        }
        Ok(whole)
    }

    /// The gradient of the mean squared error over all samples, and the error itself, as exact sums.
    fn gradients(&self, whole: &[Vec<f32>]) -> Result<(Vec<Vec<Exact>>, f64)> {
        let [data_ranks, tensor_ranks] = self.mesh;
        let (data, tensor) = (self.group.rank() as u64 / tensor_ranks, self.group.rank() as u64 % tensor_ranks);
        let step = (HIDDEN as u64).div_ceil(tensor_ranks);
        let units = ((tensor * step) as usize).min(HIDDEN)..(((tensor + 1) * step) as usize).min(HIDDEN);
        let samples: Vec<u64> = (0..SAMPLES).filter(|s| s % data_ranks == data).collect();
        let (up, down) = (&whole[0], &whole[1]);

        // Forward: this rank's hidden units; their share of every output, to be added to the other ranks' shares.
        let mut hidden = Vec::new();
        let mut shares = vec![Exact::default(); SAMPLES as usize * OUTPUTS];
        for &sample in &samples {
            let x = input(sample);
            let h: Vec<f64> = units.clone().map(|j| dot(&up[j * INPUTS..(j + 1) * INPUTS], &x).max(0.0)).collect();
            for (j, h) in units.clone().zip(&h) {
                for o in 0..OUTPUTS {
                    shares[sample as usize * OUTPUTS + o].add(Exact::of(f64::from(down[o * HIDDEN + j]) * h));
                }
            }
            hidden.push((sample, x, h));
        }
        let outputs = self.add_up(&shares)?;

        // Backward: this rank's samples and hidden units.
        let mut gradients: Vec<Vec<Exact>> = SHAPES.iter().map(|s| vec![Exact::default(); (s[0] * s[1]) as usize]).collect();
        let scale = 2.0 / (SAMPLES as f64 * OUTPUTS as f64);
        for (sample, x, h) in &hidden {
            let target = target(x);
            let error: Vec<f64> = (0..OUTPUTS).map(|o| outputs[*sample as usize * OUTPUTS + o].value() - target[o]).collect();
            for (j, h) in units.clone().zip(h) {
                let mut back = 0.0;
                for (o, error) in error.iter().enumerate() {
                    gradients[1][o * HIDDEN + j].add(Exact::of(scale * error * h));
                    back += f64::from(down[o * HIDDEN + j]) * error;
                }
                if *h > 0.0 {
                    for (i, x) in x.iter().enumerate() {
                        gradients[0][j * INPUTS + i].add(Exact::of(scale * back * x));
                    }
                }
            }
        }
        let summed = self.add_up(&gradients.concat())?;
        let (first, second) = summed.split_at(gradients[0].len());
        let mut loss = Exact::default();
        for sample in 0..SAMPLES {
            let target = target(&input(sample));
            for (o, target) in target.iter().enumerate() {
                loss.add(Exact::of((outputs[sample as usize * OUTPUTS + o].value() - target).powi(2)));
            }
        }
        Ok((vec![first.to_vec(), second.to_vec()], loss.value() / (SAMPLES as f64 * OUTPUTS as f64)))
    }

    /// Adds everyone's numbers; exact, so the ranks' order does not matter.
    fn add_up(&self, mine: &[Exact]) -> Result<Vec<Exact>> {
        let message: Vec<u8> = mine.iter().flat_map(|e| e.to_bytes()).collect();
        let mut sums = vec![Exact::default(); mine.len()];
        for bytes in self.group.all_gather(&message)? {
            for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<8>().0) {
                sum.add(Exact::from_bytes(*bytes));
            }
        }
        Ok(sums)
    }

    /// Saves parameters, moments, steps, the optimizer's settings and the step, under PyTorch's names.
    pub(super) fn save(&self, store: &Arc<dyn Store>, options: &SaveOptions) -> Result<SaveReport> {
        let memory: Vec<[Vec<u8>; 3]> =
            self.pieces.iter().map(|p| [bytes(&p.weight), bytes(&p.exp_avg), bytes(&p.exp_avg_sq)]).collect();
        let step = (self.step as f32).to_le_bytes();
        let mut state = SaveState::new();
        for (parameter, name) in NAMES.iter().enumerate() {
            for (slot, path) in tensor_paths(name).into_iter().enumerate() {
                let mine = self.pieces.iter().zip(&memory).filter(|(p, _)| p.parameter == parameter);
                let pieces = mine
                    .map(|(piece, memory)| SavePiece::contiguous(piece.region.clone(), DType::Float32, &memory[slot]))
                    .collect::<Result<Vec<_>>>()?;
                let shape = Dims::from_slice(&SHAPES[parameter]);
                let tensor = SaveTensor { dtype: DType::Float32, shape, requires_grad: false, pieces };
                state.insert(dotted(&path), Some(path), Scope::Shared, SaveLeaf::Tensor(tensor))?;
            }
            let path = slot_path(name, "step");
            let piece = SavePiece::contiguous(Region::whole(&[])?, DType::Float32, &step)?;
            let tensor = SaveTensor { dtype: DType::Float32, shape: Dims::new(), requires_grad: false, pieces: vec![piece] };
            state.insert(dotted(&path), Some(path), Scope::Shared, SaveLeaf::Tensor(tensor))?;
        }
        for (path, value) in settings() {
            state.insert(dotted(&path), Some(path), Scope::Shared, SaveLeaf::Value(value))?;
        }
        state.insert_value("step", Value::from(self.step as i64))?;
        save_with(self.group, &state, store, options)
    }

    /// Loads this rank's pieces, whatever layout they were saved in.
    pub(super) fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let mut memory: Vec<[Vec<u8>; 3]> =
            self.pieces.iter().map(|p| [bytes(&p.weight), bytes(&p.exp_avg), bytes(&p.exp_avg_sq)]).collect();
        let mut wanted: Vec<(KeyPath, usize, Vec<LoadPiece<'_>>)> = Vec::new();
        for (parameter, name) in NAMES.iter().enumerate() {
            for path in tensor_paths(name) {
                wanted.push((path, parameter, Vec::new()));
            }
        }
        for (piece, memory) in self.pieces.iter().zip(&mut memory) {
            for (slot, bytes) in memory.iter_mut().enumerate() {
                let load_piece = LoadPiece::contiguous(piece.region.clone(), DType::Float32, bytes)?;
                wanted[piece.parameter * 3 + slot].2.push(load_piece);
            }
        }
        let mut steps = [[0u8; 4]; NAMES.len()];
        let mut state = LoadState::new();
        for (path, parameter, pieces) in wanted {
            let tensor = LoadTensor { dtype: DType::Float32, shape: Dims::from_slice(&SHAPES[parameter]), pieces };
            state.insert(dotted(&path), Scope::Shared, LoadLeaf::Tensor(tensor))?;
        }
        for (name, step) in NAMES.iter().zip(&mut steps) {
            state.insert_bytes(dotted(&slot_path(name, "step")), DType::Float32, &[], step)?;
        }
        for (path, _) in settings() {
            state.insert_value(dotted(&path))?;
        }
        state.insert_value("step")?;
        let loaded = load_with(self.group, checkpoint, &mut state, &LoadOptions::default())?;
        drop(state);
        for (path, value) in settings() {
            if loaded.values.get(&dotted(&path)) != Some(&LoadedValue::Plain(value)) {
                return Err(Error::Internal { detail: format!("the optimizer's {} came back changed", dotted(&path)) });
            }
        }
        self.step = f32::from_le_bytes(steps[0]) as u64;
        for (piece, memory) in self.pieces.iter_mut().zip(&memory) {
            piece.weight = floats(&memory[0]);
            piece.exp_avg = floats(&memory[1]);
            piece.exp_avg_sq = floats(&memory[2]);
        }
        Ok(())
    }
}

/// One element's update, which needs nothing but that element's own numbers.
fn adamw(gradient: f64, step: u64, weight: &mut f32, exp_avg: &mut f32, exp_avg_sq: &mut f32) {
    let (beta1, beta2) = BETAS;
    *weight = (f64::from(*weight) * (1.0 - LEARNING_RATE * WEIGHT_DECAY)) as f32;
    *exp_avg = (beta1 * f64::from(*exp_avg) + (1.0 - beta1) * gradient) as f32;
    *exp_avg_sq = (beta2 * f64::from(*exp_avg_sq) + (1.0 - beta2) * gradient * gradient) as f32;
    let first = f64::from(*exp_avg) / (1.0 - beta1.powi(step as i32));
    let second = f64::from(*exp_avg_sq) / (1.0 - beta2.powi(step as i32));
    *weight = (f64::from(*weight) - LEARNING_RATE * first / (second.sqrt() + EPSILON)) as f32;
}

/// The tensors of one parameter: itself and its moments.
fn tensor_paths(name: &str) -> [KeyPath; 3] {
    [vec!["model".into(), name.into()], slot_path(name, "exp_avg"), slot_path(name, "exp_avg_sq")]
}

fn slot_path(name: &str, slot: &str) -> KeyPath {
    vec!["optim".into(), "state".into(), name.into(), slot.into()]
}

fn settings() -> Vec<(KeyPath, Value)> {
    let group = |key: &str| -> KeyPath { vec!["optim".into(), "param_groups".into(), PathSegment::Index(0), key.into()] };
    let names = NAMES.iter().map(|name| Value::Str((*name).into())).collect();
    vec![
        (group("lr"), Value::Float(LEARNING_RATE)),
        (group("betas"), Value::Tuple(vec![Value::Float(BETAS.0), Value::Float(BETAS.1)])),
        (group("eps"), Value::Float(EPSILON)),
        (group("weight_decay"), Value::Float(WEIGHT_DECAY)),
        (group("params"), Value::List(names)),
    ]
}

fn dotted(path: &KeyPath) -> String {
    reshard::state::dotted(path)
}

fn elements(region: &Region) -> impl Iterator<Item = [u64; 2]> + use<> {
    let (offsets, sizes) = ([region.offsets()[0], region.offsets()[1]], [region.sizes()[0], region.sizes()[1]]);
    (0..sizes[0]).flat_map(move |i| (0..sizes[1]).map(move |j| [offsets[0] + i, offsets[1] + j]))
}

fn first_weight(parameter: usize, at: [u64; 2]) -> f32 {
    (noise(parameter as u64 + 1, at[0] * SHAPES[parameter][1] + at[1]) * 0.4) as f32
}

fn input(sample: u64) -> Vec<f64> {
    (0..INPUTS as u64).map(|i| noise(11, sample * INPUTS as u64 + i)).collect()
}

/// What the model is to learn: a fixed smooth function.
fn target(x: &[f64]) -> Vec<f64> {
    (0..OUTPUTS).map(|o| (x[o] * x[o + 1] + 0.5 * x[(o + 5) % INPUTS]) * 0.8).collect()
}

fn dot(weights: &[f32], x: &[f64]) -> f64 {
    weights.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
