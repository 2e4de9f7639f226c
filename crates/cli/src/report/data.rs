//! What the report page knows about a checkpoint, and the JSON that carries it.
//!
//! A checkpoint of 10,000 tensors in 80 chunks each has 800,000 chunks, yet only a few ways of cutting a tensor
//! and a few ways of dealing chunks to files. Both are tables here ([`ReportData::tilings`], [`ReportData::holders`])
//! and a tensor names a row of each, so such a page stays near a hundred bytes a tensor.
//! [`ReportBuilder`](super::ReportBuilder) fills the tables. The page reads numbers as doubles: exact up to 2^53.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::health::{Health, Numbers, Stats};

/// The version of this schema, in [`ReportData::schema`].
pub const SCHEMA: u32 = 2;

/// Everything the page shows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReportData {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Whether a server answers `/api/tensor`; the page then offers to load a tensor's values.
    pub live: bool,
    /// The checkpoint as a whole.
    pub checkpoint: Checkpoint,
    /// Names of the element types, for [`Tensors::dtype`].
    pub dtypes: Vec<String>,
    /// The data files.
    pub files: Vec<FileInfo>,
    /// The distinct ways in which tensors are cut, for [`Tensors::tiling`].
    pub tilings: Vec<Tiling>,
    /// The distinct ways in which chunks are dealt to files, for [`Tensors::holders`]: one file number per chunk, in
    /// the order of the tiling's chunks.
    pub holders: Vec<Vec<u32>>,
    /// The tensors, by columns.
    pub tensors: Tensors,
    /// Where in its file each chunk of a tensor lies: offset, length, offset, length, … by tensor number. Left out of
    /// big reports, where it would outweigh all the rest.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub places: BTreeMap<u32, Vec<u64>>,
    /// What the values look like, where they were looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numbers: Option<Numbers>,
    /// Plain values stored beside the tensors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<PlainValue>,
    /// How many there are, if not all of them are in [`Self::values`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values_found: Option<u64>,
    /// The optimizer's state, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<Optimizer>,
    /// How another checkpoint differs from this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<Diff>,
    /// Whether a server is comparing them right now: [`Self::diff`] then says only what is compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub comparing: bool,
    /// Why they could not be compared: [`Self::diff`] then says only what was to be compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_compared: Option<String>,
    /// The state of that other one's optimizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_optimizer: Option<Optimizer>,
    /// Whether that other one is well, as far as it was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_health: Option<Health>,
}

/// The checkpoint as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Short name: the last two parts of its address.
    pub name: String,
    /// Its whole address.
    pub location: String,
    /// The format, in words: `DCP`, `safetensors`, `torch.save`.
    pub format: String,
    /// Who wrote it, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writer: Option<String>,
    /// When it was published, ready to print.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<String>,
    /// The training step, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<i64>,
    /// Whether it is well, as far as it was looked at.
    pub health: Health,
    /// Any further facts, printed as they are: label and text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<(String, String)>,
}

/// One data file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Its path inside the checkpoint.
    pub path: String,
    /// Its size on storage.
    pub bytes: u64,
    /// The rank that wrote it, where the name tells. A chunk's rank is its file's rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
}

/// The tensors, by columns; row `i` of every column is tensor number `i`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tensors {
    /// Keys.
    pub key: Vec<String>,
    /// Row of [`ReportData::dtypes`].
    pub dtype: Vec<u32>,
    /// Bytes of the whole tensor, each element counted once.
    pub bytes: Vec<u64>,
    /// Row of [`ReportData::tilings`], which also holds the shape.
    pub tiling: Vec<u32>,
    /// Row of [`ReportData::holders`].
    pub holders: Vec<u32>,
}

/// How a tensor of one shape is cut into chunks. Chunks are ordered by their offsets, as a grid is read: row by row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tiling {
    /// The shape of the whole tensor.
    #[serde(rename = "s")]
    pub shape: Vec<u64>,
    /// The cuts.
    #[serde(flatten)]
    pub cuts: Cuts,
}

/// The cuts of a [`Tiling`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Cuts {
    /// Not cut: one chunk holds it all.
    #[default]
    #[serde(rename = "w")]
    Whole,
    /// A grid: for each dimension the cut positions, from 0 to the size of that dimension.
    #[serde(rename = "g")]
    Grid(Vec<Vec<u64>>),
    /// Anything else (flat shards, gaps, overlaps): for each chunk its offsets, then its sizes.
    #[serde(rename = "b")]
    Boxes(Vec<u64>),
}

/// A plain value stored beside the tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlainValue {
    /// Its key.
    pub key: String,
    /// Its type, in one word.
    pub kind: String,
    /// It, printed.
    pub text: String,
}

/// An optimizer's state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Optimizer {
    /// The optimizer's name, where it can be told from its slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What its keys start with, such as `optim.`.
    #[serde(default)]
    pub root: String,
    /// The param groups, in their order.
    pub groups: Vec<ParamGroup>,
}

/// One param group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// Its name, or its number as text.
    pub name: String,
    /// How many parameters it holds.
    pub params: u64,
    /// Hyperparameters, printed: name and text.
    pub options: Vec<(String, String)>,
    /// The slots of its parameters.
    pub slots: Vec<Slot>,
}

/// One slot (`exp_avg`, `step`) of all the parameters of a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// How many parameters have it.
    pub tensors: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Element types found in it.
    pub dtypes: Vec<String>,
}

/// How another checkpoint (B) differs from the one the report is about (A).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Diff {
    /// What to call A beside B: the part of its address that tells them apart.
    pub name_a: String,
    /// What to call B beside A.
    pub name_b: String,
    /// B's whole address.
    pub location: String,
    /// Bytes of B's tensors.
    pub bytes: u64,
    /// How many tensors B has.
    pub tensors: u64,
    /// Whether values were compared, or shapes and dtypes alone.
    pub values_compared: bool,
    /// Differences up to this size count as none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tolerance: Option<f64>,
    /// Tensors in both that differ.
    pub changed: Vec<Changed>,
    /// Tensors of A that B lacks, by number.
    pub only_a: Vec<u32>,
    /// Tensors of B that A lacks.
    pub only_b: Vec<OtherTensor>,
    /// Plain values that differ; `None` where one side lacks it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plain: Vec<ChangedValue>,
}

/// A tensor that is in both checkpoints and differs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Changed {
    /// Its number in A.
    pub tensor: u32,
    /// B's element type, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// B's shape, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<Vec<u64>>,
    /// Largest absolute difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_abs: Option<f64>,
    /// Mean absolute difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_abs: Option<f64>,
    /// Largest relative difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rel: Option<f64>,
    /// Mean relative difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_rel: Option<f64>,
    /// ‖Δw‖ / ‖w‖.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved: Option<f64>,
    /// The cosine of the angle between both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Elements that are NaN or infinite in B alone.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub newly_bad: u64,
    /// Whether it is all zero in B and was not in A.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub newly_zero: bool,
    /// Index of the first element that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<Vec<u64>>,
}

/// A tensor of B alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OtherTensor {
    /// Its key.
    pub key: String,
    /// Its element type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: u64,
}

/// A plain value that differs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChangedValue {
    /// Its key.
    pub key: String,
    /// A's value, printed.
    pub a: Option<String>,
    /// B's value, printed.
    pub b: Option<String>,
}

/// What `/api/tensor` answers: one tensor, looked at on demand.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TensorDetail {
    /// Its key.
    pub key: String,
    /// Statistics and, where they make sense for the element type, a histogram.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stats: Option<Stats>,
    /// A corner of its values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<Sample>,
    /// Where each chunk lies in its file: offset, length, … in the order of the tiling's chunks (by offsets).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<u64>,
    /// A plain value, printed, when the key is not a tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A small two-dimensional corner of a tensor's values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The slice shown, as one would write it: `[0, :8, :8]`.
    pub slice: String,
    /// Rows of values. What is not finite is text (`nan`, `inf`, `-inf`), as are complex numbers.
    pub rows: Vec<Vec<SampleValue>>,
}

/// One value of a [`Sample`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SampleValue {
    /// A finite number.
    Number(f64),
    /// Anything else, printed.
    Text(String),
}

#[allow(clippy::trivially_copy_pass_by_ref)]
pub(super) fn is_zero(count: &u64) -> bool {
    *count == 0
}
