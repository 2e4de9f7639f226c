//! Who writes what, and where.
//!
//! [`local`] describes what one rank holds, [`global`] assigns every distinct region to one of its holders, [`files`] lays
//! a rank's records out end to end. All of it is arithmetic over descriptions: no memory is touched, nothing is written.

pub(crate) mod cache;
pub(crate) mod files;
pub(crate) mod global;
pub(crate) mod local;
