//! The limits that keep a lying file from hurting, by name.

/// Largest pickle that is decoded; positions inside one fit 32 bits.
pub const MAX_INPUT_BYTES: u64 = 0xffff_ffff;

/// Most values (containers, their elements and stack entries) that one pickle may make.
///
/// A checkpoint of 768,000 chunks makes 40 million.
pub const MAX_OBJECTS: usize = 1 << 29;

/// Most slots that a pickle may fill in its memo.
pub const MAX_MEMO: usize = 1 << 28;

/// How far a memo slot's number may run ahead of the number of filled slots and still be kept in a
/// table; numbers further ahead are kept in a map, so that one lying number allocates nothing.
pub(super) const MEMO_SLACK: usize = 1024;

/// Deepest nesting of containers, both of open marks while decoding and of values handed out as trees.
pub const MAX_DEPTH: usize = 1000;

/// Longest integer in bytes (524,288 bits): decimal conversion of longer ones is not linear.
pub const MAX_INT_BYTES: usize = 1 << 16;

/// Longest integer in decimal digits that is read from text, as CPython's own default.
pub const MAX_INT_DIGITS: usize = 4300;

/// Longest tuple.
pub const MAX_TUPLE_LEN: usize = (1 << 27) - 1;

/// Text and bytes that must be copied while decoding, at most this many bytes for each byte of input.
pub(super) const MAX_COPIED_PER_INPUT_BYTE: usize = 4;

/// Size of a tree once shared parts are written out, at most this many bytes for each byte of input …
///
/// A pickle of 100 bytes can describe a tree of 2^30 leaves.
pub const TREE_BYTES_PER_INPUT_BYTE: usize = 256;

/// … and this many in any case.
pub const TREE_BYTES_FLOOR: usize = 16 << 20;

/// What one decoding may use; `Limits::default()` is the constants of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of input.
    pub bytes: u64,
    /// Values made.
    pub objects: usize,
    /// Memo slots filled.
    pub memo: usize,
    /// Marks open at once.
    pub depth: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { bytes: MAX_INPUT_BYTES, objects: MAX_OBJECTS, memo: MAX_MEMO, depth: MAX_DEPTH }
    }
}
