//! Part of reshard.
#![forbid(unsafe_code)]
