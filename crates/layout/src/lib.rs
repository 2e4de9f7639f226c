//! The geometry of sharded tensors: boxes, meshes, placements, flat ranges, and the overlaps between them.
//!
//! Everything that saves, loads or converts a sharded tensor is the same question: a tensor is cut into boxes in one
//! way by those who hold it and in another way by those who want it; which intersections have to move? This crate
//! answers it with numbers alone. It does no I/O, knows no dtype and no file format.
//!
//! ```
//! use reshard_layout::{ByteLayout, ChunkIndex, Region, copy_runs, moves, runs};
//!
//! // Saved by two ranks as rows, wanted by one rank as columns.
//! let saved = vec![Region::new(&[0, 0], &[2, 6])?, Region::new(&[2, 0], &[2, 6])?];
//! let wanted = [Region::new(&[0, 4], &[4, 2])?];
//! let index = ChunkIndex::new(&[4, 6], saved)?;
//! let chunks: [Vec<u8>; 2] = [(0..12).collect(), (12..24).collect()];
//! let mut local = vec![0u8; 8];
//! for found in moves(&index, &wanted) {
//!     let chunk = &index.regions()[found.chunk];
//!     let stretches = runs(
//!         found.region.sizes(),
//!         &ByteLayout::contiguous(chunk.sizes(), 1)?,
//!         found.region.within(chunk)?.offsets(),
//!         &ByteLayout::contiguous(wanted[0].sizes(), 1)?,
//!         found.region.within(&wanted[0])?.offsets(),
//!     )?;
//!     copy_runs(&chunks[found.chunk], &mut local, stretches)?;
//! }
//! assert_eq!(local, [4, 5, 10, 11, 16, 17, 22, 23]);
//! # Ok::<(), reshard_layout::LayoutError>(())
//! ```
#![forbid(unsafe_code)]

mod bytes;
mod copy;
mod coverage;
mod error;
mod flat;
mod index;
mod mesh;
mod placement;
mod region;
mod runs;
mod seen;
mod sharding;

pub use bytes::ByteLayout;
pub use copy::copy_runs;
pub use coverage::{Coverage, NAMED_LIMIT, Overlap, coverage, coverage_up_to};
pub use error::LayoutError;
pub use flat::{FlatPiece, flat_pieces, flat_range};
pub use index::{ChunkIndex, Move, moves};
pub use mesh::Mesh;
pub use placement::{LocalRegion, Placement, holders, local_regions, local_shape};
pub use region::{Region, volume_of};
pub use runs::{Run, Runs, runs};
pub use seen::SeenBox;
pub use sharding::{ChunkSharding, EnumerableSharding};

/// One number per dimension; tensors of up to four dimensions need no allocation.
pub type Dims = smallvec::SmallVec<[u64; 4]>;
