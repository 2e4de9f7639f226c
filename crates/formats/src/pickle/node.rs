//! A value inside a [`Document`](super::Document): eight bytes, copied freely.
//!
//! Small values (integers, strings and tuples included) live in the node itself as numbers or as a
//! range; what can change after it was made (lists, dicts, sets, objects) is an index into a table.

/// One value of a document; look at it with [`Document::view`](super::Document::view).
///
/// Equal nodes are the same value. Different nodes may still be equal values, because a pickle may
/// write the same thing twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node(u64);

const TAG_BITS: u32 = 5;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
const START_BITS: u32 = 32;
/// Ranges (strings, tuples) of at least this length don't fit a node.
pub(super) const MAX_INLINE_LEN: usize = (1 << (64 - TAG_BITS - START_BITS)) - 1;
const MAX_INLINE_INT: i64 = (1 << (63 - TAG_BITS)) - 1;
const MIN_INLINE_INT: i64 = -MAX_INLINE_INT - 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Tag {
    /// A memo slot or an optional field that holds nothing.
    Absent = 0,
    /// Only in the memo: a tuple whose one element is the tuple of this range, made when it is asked for.
    Wrapped,
    None,
    False,
    True,
    Int,
    /// Index into the table of integers past 59 bits.
    WideInt,
    Float,
    Str,
    Bytes,
    ByteArray,
    /// Index into the table of texts that aren't plain ranges of the input.
    SideStr,
    SideBytes,
    SideByteArray,
    Tuple,
    List,
    Dict,
    Set,
    FrozenSet,
    Global,
    Object,
    Persistent,
    Complex,
    /// `torch.Size`, a range like a tuple.
    Size,
}

const TAGS: [Tag; 24] = [
    Tag::Absent,
    Tag::Wrapped,
    Tag::None,
    Tag::False,
    Tag::True,
    Tag::Int,
    Tag::WideInt,
    Tag::Float,
    Tag::Str,
    Tag::Bytes,
    Tag::ByteArray,
    Tag::SideStr,
    Tag::SideBytes,
    Tag::SideByteArray,
    Tag::Tuple,
    Tag::List,
    Tag::Dict,
    Tag::Set,
    Tag::FrozenSet,
    Tag::Global,
    Tag::Object,
    Tag::Persistent,
    Tag::Complex,
    Tag::Size,
];

impl Node {
    pub(crate) const ABSENT: Node = Node(Tag::Absent as u64);
    pub(super) const NONE: Node = Node(Tag::None as u64);
    pub(crate) const EMPTY_TUPLE: Node = Node(Tag::Tuple as u64);

    pub(super) const fn bool(value: bool) -> Node {
        Node(if value { Tag::True as u64 } else { Tag::False as u64 })
    }

    #[inline]
    pub(super) const fn int(value: i64) -> Option<Node> {
        if value <= MAX_INLINE_INT && value >= MIN_INLINE_INT { Some(Node::small_int(value)) } else { None }
    }

    /// An integer known to fit (32 bits and less).
    #[inline]
    pub(super) const fn small_int(value: i64) -> Node {
        Node(((value as u64) << TAG_BITS) | Tag::Int as u64)
    }

    #[inline]
    pub(super) const fn index(tag: Tag, index: u32) -> Node {
        Node(((index as u64) << TAG_BITS) | tag as u64)
    }

    /// A range; `None` when it doesn't fit.
    #[inline]
    pub(super) const fn range(tag: Tag, start: usize, len: usize) -> Option<Node> {
        if start > u32::MAX as usize || len > MAX_INLINE_LEN {
            return None;
        }
        Some(Node((((len as u64) << START_BITS) | start as u64) << TAG_BITS | tag as u64))
    }

    #[inline]
    pub(super) fn tag(self) -> Tag {
        // The mask leaves 32 values, of which only those in the table are ever made.
        TAGS.get((self.0 & TAG_MASK) as usize).copied().unwrap_or(Tag::Absent)
    }

    /// Spreads the node over `bits` bits, for small caches keyed by nodes.
    #[inline]
    pub(crate) const fn spread(self, bits: u32) -> usize {
        (self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
    }

    /// Whether this is a memo slot that can't be handed out as it is.
    #[inline]
    pub(super) const fn is_placeholder(self) -> bool {
        (self.0 & TAG_MASK) <= Tag::Wrapped as u64
    }

    /// The same payload under another tag.
    pub(super) const fn retagged(self, tag: Tag) -> Node {
        Node((self.0 & !TAG_MASK) | tag as u64)
    }

    #[inline]
    pub(super) const fn as_small_int(self) -> i64 {
        (self.0 as i64) >> TAG_BITS
    }

    #[inline]
    pub(super) const fn as_index(self) -> usize {
        (self.0 >> TAG_BITS) as usize
    }

    /// (start, length) of a range.
    #[inline]
    pub(super) const fn as_range(self) -> (usize, usize) {
        let payload = self.0 >> TAG_BITS;
        ((payload & u32::MAX as u64) as usize, (payload >> START_BITS) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_up_to_59_bits_fit_and_come_back() {
        for v in [0, 1, -1, 255, i64::from(i32::MIN), MAX_INLINE_INT, MIN_INLINE_INT] {
            let n = Node::int(v).unwrap();
            assert_eq!((n.tag(), n.as_small_int()), (Tag::Int, v));
        }
        assert_eq!(Node::int(MAX_INLINE_INT + 1), None);
        assert_eq!(Node::int(MIN_INLINE_INT - 1), None);
        assert_eq!(Node::int(i64::MIN), None);
    }

    #[test]
    fn ranges_come_back_and_refuse_what_does_not_fit() {
        let n = Node::range(Tag::Tuple, u32::MAX as usize, MAX_INLINE_LEN).unwrap();
        assert_eq!((n.tag(), n.as_range()), (Tag::Tuple, (u32::MAX as usize, MAX_INLINE_LEN)));
        assert_eq!(Node::range(Tag::Str, u32::MAX as usize + 1, 0), None);
        assert_eq!(Node::range(Tag::Str, 0, MAX_INLINE_LEN + 1), None);
        assert_eq!(Node::range(Tag::Tuple, 0, 0), Some(Node::EMPTY_TUPLE));
    }

    #[test]
    fn every_tag_is_at_its_own_place() {
        for (i, tag) in TAGS.iter().enumerate() {
            assert_eq!(*tag as usize, i);
        }
    }
}
