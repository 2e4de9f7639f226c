//! Save, load and reshard the state of distributed training.
//!
//! A group of ranks [`save()`]s a state dict of sharded tensors and plain values; any other group [`load()`]s it in any
//! other layout. [`Checkpoint`] opens what is on disk — a DCP folder, safetensors, a `torch.save` file — lists its keys
//! and reads any slice. Nothing here runs code from a file.
#![deny(unsafe_code)]

mod cast;
mod checkpoint;
mod checksums;
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
mod layout_names;
mod leaf;
pub mod load;
mod memory;
mod merge;
mod mismatch;
mod notes;
mod plan;
pub mod records;
mod recover;
mod relayout;
mod report;
mod save;
mod select;
mod staging;
mod stats;
mod steps;
mod stream;
#[cfg(feature = "trace")]
mod trace;
mod verify;
mod workers;

pub use checkpoint::{
    Catalog, CatalogEntry, CatalogKind, CatalogTensor, Checkpoint, ChunkPlace, DataPlace, Format, LoadedValue, OpenOptions,
    StoredChunk, StoredCrc, ValuePlace, decode_record,
};
pub use control::Control;
pub use convert::{ConvertOptions, ConvertReport, Destination, Target as ConvertTarget, convert};
pub use diff::{DiffOptions, DiffReport, Differing, KeyDifference, Tolerance, ValueDifference, diff};
pub use digest::{Digest, DigestEntry, DigestOptions, digest};
pub use edit::{EditOptions, EditReport, edit, setting_path};
pub use error::{Error, ErrorKind, RankFailure, Result};
pub use group::{Group, Solo, Threads, run_threads};
pub use leaf::{LoadLeaf, LoadPiece, LoadState, LoadTensor, SaveLeaf, SavePiece, SaveState, SaveTensor, Scope};
pub use load::{Cast, CastPolicy, KeyFilter, KeyMap, LoadOptions, LoadReport, Loaded, Strictness, Verify, load};
pub use memory::{DeviceMemory, DeviceMemoryMut, Source, StridedBox, Target};
pub use merge::{MergeReport, merge};
pub use mismatch::{Difference, Mismatch};
pub use plan::cache::PlanCache;
pub use plan::simulate::{SimulatedPlan, simulate_plan};
pub use recover::{RecoverOptions, RecoverReport, UnusedFile, recover};
pub use relayout::{Layout, LayoutRule, LoadEstimate, RankEstimate, estimate_load, relayout};
pub use report::{Phases, SaveReport};
pub use reshard_formats as formats;
pub use reshard_formats::{DType, KeyPath, PathSegment, Value};
pub use reshard_layout as layout;
pub use reshard_state as state;
pub use reshard_storage as storage;
pub use save::{AsyncSaver, SaveHandle, SaveOptions, save};
pub use select::{CastRules, Glob, Part, Rename, Selection};
pub use staging::StagingPool;
pub use stats::{StatsOptions, TensorStats, element_text, stats};
pub use steps::{Best, Decision, PruneReport, Retention, Step, StepState, StepsMemory, StepsOptions, best, latest, prune, steps};
#[cfg(feature = "trace")]
pub use trace::ChromeTrace;
pub use verify::{Finding, Severity, VerifyOptions, VerifyReport, verify, verify_path, verify_store};
