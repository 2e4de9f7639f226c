//! Part of reshard.
