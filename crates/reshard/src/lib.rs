//! Save, load and reshard the state of distributed training.
//!
//! A group of ranks [`save()`]s a state dict of sharded tensors and plain values; any other group [`load()`]s it in any
//! other layout. [`Checkpoint`] opens what is on disk — a DCP folder, safetensors, a `torch.save` file — lists its keys
//! and reads any slice. Nothing here runs code from a file.
//!
//! Four ranks save rows, three ranks load columns, and one process reads a slice:
//!
//! ```
//! use reshard::layout::{Mesh, Placement::Shard};
//! use reshard::{Checkpoint, LoadState, SaveState, load, run_threads, save};
//!
//! let path = "memory://rows-and-columns"; // or a folder, s3://bucket/step-100, gs://…, az://…
//! run_threads(4, |group| {
//!     let rows = [1.0f32; 2 * 6]; // this rank's rows of a matrix of 8 × 6
//!     let mut state = SaveState::of(&group);
//!     state.shard("matrix", &Mesh::new(&[4])?, &[Shard(0)], &[8, 6], &rows)?;
//!     save(&group, path, &state)
//! });
//! run_threads(3, |group| {
//!     let mut columns = [0.0f32; 8 * 2];
//!     let mut state = LoadState::of(&group);
//!     state.shard("matrix", &Mesh::new(&[3])?, &[Shard(1)], &[8, 6], &mut columns)?;
//!     load(&group, path, &mut state)
//! });
//! assert_eq!(Checkpoint::open(path)?.read_slice::<f32>("matrix", &[0..1, 2..4])?, [1.0, 1.0]);
//! # Ok::<(), reshard::Error>(())
//! ```
//!
//! [`save_with`] and [`load_with`] take a store and options. Below them, [`SavePiece`] and [`LoadPiece`] are regions in
//! memory of any layout, also of a device ([`DeviceMemory`]). [`convert`], [`relayout`], [`merge()`], [`edit()`],
//! [`diff`](diff()), [`verify`](verify()) and [`recover`](recover()) are what the command line does.
#![deny(unsafe_code)]

mod cast;
mod checkpoint;
mod commit;
mod control;
mod convert;
mod diff;
mod digest;
#[cfg(doctest)]
mod doc_tests;
mod edit;
mod error;
pub mod group;
mod health;
mod layout_names;
mod leaf;
pub mod load;
mod memory;
mod merge;
mod mesh;
mod mismatch;
mod numbers;
mod plan;
pub mod records;
mod recover;
mod relayout;
mod report;
mod save;
mod scaled;
mod select;
mod source;
mod staging;
mod steps;
mod stream;
#[cfg(feature = "trace")]
mod trace;
mod typed;
mod verify;
mod view;
mod workers;

pub use checkpoint::{
    Catalog, CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, ChunkPlace, DataPlace, Format, LoadedValue, SeenPlace,
    StoredChunk, StoredCrc, ValuePlace, decode_record,
};
pub use control::Control;
pub use convert::{ConvertOptions, ConvertReport, Destination, Target as ConvertTarget, convert};
pub use diff::{DiffOptions, DiffReport, Differing, KeyDifference, ModuleChange, Tolerance, ValueDifference, diff};
pub use digest::{Digest, DigestEntry, DigestOptions, digest};
pub use edit::{EditOptions, EditReport, edit, setting_path};
pub use error::{Caller, Error, ErrorKind, RankFailure, Result};
pub use group::{Group, Solo, Threads, run_threads};
pub use health::{
    Checked, GroupHealth, HEALTH_RULES, HealthFinding, HealthLimits, HealthOptions, HealthReport, HealthRule, OptimizerGroup,
    OptimizerHealth, OptimizerSummary, ParamHealth, SlotShare, health, optimizer_summary, small_integer,
};
pub use leaf::{LoadLeaf, LoadPiece, LoadState, LoadTensor, SaveLeaf, SavePiece, SaveState, SaveTensor, Scope};
pub use load::{Cast, CastPolicy, KeyFilter, KeyMap, LoadOptions, LoadReport, Loaded, Strictness, Verify, load, load_with};
pub use memory::{DeviceMemory, DeviceMemoryMut, Source, StridedBox, Target};
pub use merge::{MergeReport, merge};
pub use mesh::{Layout, LayoutRule};
pub use mismatch::{Difference, Mismatch, near_names};
pub use numbers::{Percentiles, ScanOptions, StatsOptions, TensorStats, element_text, scan, stats};
pub use plan::cache::PlanCache;
pub use recover::{RecoverOptions, RecoverReport, UnusedFile, recover};
pub use relayout::{LoadEstimate, RankEstimate, estimate_load, relayout};
pub use report::{Phases, SaveReport};
pub use reshard_formats as formats;
pub use reshard_formats::{DType, KeyPath, PathSegment, Value};
pub use reshard_layout as layout;
pub use reshard_state as state;
pub use reshard_storage as storage;
pub use save::{AsyncSaver, SaveHandle, SaveOptions, SimulatedPlan, save, save_with, simulate_plan};
pub use select::{CastRules, Glob, Part, Rename, Selection, Unmatched, unmatched_globs};
pub use source::OpenOptions;
pub use staging::StagingPool;
pub use steps::{
    Best, Decision, FirstBad, PruneReport, Retention, Step, StepState, StepsMemory, StepsOptions, Trend, TrendOptions, TrendStep,
    TrendTensor, best, latest, prune, steps, trend,
};
#[cfg(feature = "trace")]
pub use trace::ChromeTrace;
pub use typed::Element;
pub use verify::{Finding, Severity, VerifyOptions, VerifyReport, verify, verify_path, verify_store};
pub use view::{Made, Recipe, RuleReport, View, ViewReport, recipes};
