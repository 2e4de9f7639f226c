//! Property tests against brute force, element by element, and fixtures made by PyTorch.

#![allow(clippy::unwrap_used)]

mod coverage;
mod fixtures;
mod flat;
mod index;
mod placement;
mod region;
mod reshard;
mod runs;
mod space;
