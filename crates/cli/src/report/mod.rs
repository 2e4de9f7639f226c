//! The report: one self-contained page about a checkpoint, and the loopback server that shows it live.
//!
//! [`data`] and [`health`] are what the page knows, [`build`] makes it small, [`render`](mod@render) joins it with the page's assets,
//! [`serve`] answers the page's requests for one tensor at a time. Nothing here reads a checkpoint: the
//! verbs `report` and `serve` fill a [`ReportBuilder`] and implement [`LiveSource`].

pub mod build;
pub mod data;
pub mod health;
pub mod render;
pub mod serve;

pub use build::{ChunkInput, ReportBuilder, TensorInput};
pub use data::*;
pub use health::*;
pub use render::{RenderError, render};
pub use serve::{LiveSource, ServeError, ServeOptions, Server, StopHandle};
