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
//! assert_eq!(Checkpoint::open(path)?.read_slice::<f32>("matrix", [0..1, 2..4])?, [1.0, 1.0]);
//! # Ok::<(), reshard::Error>(())
//! ```
//!
//! The root of the crate is what such a program needs. Everything else is in the module of its name, with its options and
//! its report:
//!
//! | for | module |
//! |---|---|
//! | options of a save, background saves, plans that are kept | [`mod@save`], [`mod@records`] |
//! | options of a load: strictness, casts, names, checksums | [`mod@load`], [`mod@mismatch`] |
//! | pieces of tensors in memory of any layout, also of a device | [`leaf`], [`memory`] |
//! | what a checkpoint contains: keys, chunks, records | [`checkpoint`] |
//! | ranks: threads, MPI, groups of your own | [`group`] |
//! | another format, another layout, an average, an edited copy | [`mod@convert`], [`mod@relayout`], [`mod@merge`], [`mod@edit`] |
//! | is it sound, what differs, what do the numbers look like | [`mod@verify`], [`mod@digest`], [`mod@diff`], [`numbers`], [`mod@health`] |
//! | folders of steps: the newest, what may go, trends; a lost `.metadata` | [`mod@steps`], [`mod@recover`] |
//! | which keys, under which names; a checkpoint seen through rules | [`select`], [`view`] |
//! | watching and stopping what runs for a while | [`control`] |
//! | errors, by what a caller would do about them | [`error`] |
//!
//! Below them are the crates that this one is made of: [`layout`] (regions, meshes, placements), [`formats`] (files),
//! [`state`] (state dicts) and [`storage`] (folders and object stores).
#![deny(unsafe_code)]

mod cast;
pub mod checkpoint;
mod commit;
pub mod control;
pub mod convert;
pub mod diff;
pub mod digest;
#[cfg(doctest)]
mod doc_tests;
pub mod edit;
mod edit_note;
pub mod error;
pub mod group;
pub mod health;
mod layout_names;
pub mod leaf;
pub mod load;
pub mod memory;
pub mod merge;
pub mod mesh;
pub mod mismatch;
pub mod numbers;
mod packed;
mod plan;
pub mod records;
pub mod recover;
pub mod relayout;
mod report;
pub mod save;
mod scaled;
mod seen;
pub mod select;
mod source;
mod staging;
pub mod steps;
mod stream;
#[cfg(feature = "trace")]
pub mod trace;
mod typed;
pub mod verify;
pub mod view;
mod workers;

pub use checkpoint::Checkpoint;
pub use control::Control;
pub use error::{Error, ErrorKind, Result};
pub use group::{Group, Solo, run_threads};
pub use leaf::{LoadState, SaveState};
pub use load::{LoadOptions, LoadReport, load, load_with};
pub use reshard_formats as formats;
pub use reshard_formats::{DType, Value};
pub use reshard_layout as layout;
pub use reshard_state as state;
pub use reshard_storage as storage;
pub use save::{AsyncSaver, SaveOptions, SaveReport, save, save_with};
pub use source::{OpenOptions, ParameterMap};
pub use typed::{Element, Ranges};
