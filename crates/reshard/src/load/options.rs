//! How to load.

use std::sync::Arc;

use crate::control::Control;

/// What to do about differences between the checkpoint and what is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Strictness {
    /// Any difference is an error before any byte moves. Keys that are not wanted are differences inside the top-level
    /// parts of which something is wanted: loading `model` alone from a checkpoint that has `optim` too is fine.
    #[default]
    Strict,
    /// Load what fits and report the rest.
    Lenient,
}

/// Which casts a load may make where element types differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CastPolicy {
    /// None: another dtype is a difference.
    #[default]
    Never,
    /// Those that keep every value.
    Widening,
    /// Any; narrowing ones are reported.
    Any,
}

/// When to compare checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Verify {
    /// Never.
    Never,
    /// Where a whole record passes through anyway.
    #[default]
    Whole,
    /// Always: records of which only a part is wanted are read whole, and what is stored twice (`.metadata` and the data
    /// files' own indexes) is compared.
    Always,
}

/// Maps a wanted key to the checkpoint's key; `None` for keys that are not to be loaded.
pub type KeyMap = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Says which names count: stored keys, or classes.
pub type KeyFilter = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// How to load.
#[derive(Clone)]
#[non_exhaustive]
pub struct LoadOptions {
    /// What to do about differences.
    pub strictness: Strictness,
    /// Which casts are allowed.
    pub cast: CastPolicy,
    /// When to compare checksums.
    pub verify: Verify,
    /// From wanted keys to stored ones.
    pub key_map: Option<KeyMap>,
    /// Which stored keys count when looking for unexpected ones; all when `None`.
    pub expected: Option<KeyFilter>,
    /// Top-level parts of the tree that are wanted even if nothing of them is: what is stored of them is unexpected then.
    pub parts: Vec<String>,
    /// Classes of values to hand out although only unpickling could bring them back; all when `None`. A wanted value of any
    /// other is an error before any tensor is touched.
    pub trusted: Option<KeyFilter>,
    /// Stretches of a file are read together when no more than this many unwanted bytes lie between them; `None` lets the
    /// kind of store decide (a page on a local disk, much more on an object store).
    pub max_gap: Option<u64>,
    /// Bytes of buffer per thread, for what cannot be read straight into its place.
    pub buffer: u64,
    /// Read what several ranks want once, and exchange it between them.
    pub exchange: bool,
    /// To watch and to cancel.
    pub control: Control,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            strictness: Strictness::Strict,
            cast: CastPolicy::Never,
            verify: Verify::Whole,
            key_map: None,
            expected: None,
            parts: Vec::new(),
            trusted: None,
            max_gap: None,
            buffer: 4 << 20,
            exchange: false,
            control: Control::new(),
        }
    }
}

impl std::fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadOptions")
            .field("strictness", &self.strictness)
            .field("cast", &self.cast)
            .field("verify", &self.verify)
            .field("key_map", &self.key_map.is_some())
            .field("parts", &self.parts)
            .field("max_gap", &self.max_gap)
            .field("buffer", &self.buffer)
            .field("exchange", &self.exchange)
            .finish_non_exhaustive()
    }
}
