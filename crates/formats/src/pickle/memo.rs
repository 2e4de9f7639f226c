//! The memo: numbered slots that a pickle fills and reads back.

use std::collections::HashMap;

use super::error::PickleError;
use super::limits::MEMO_SLACK;
use super::node::Node;

/// Slots, in a table where numbers are dense as CPython writes them and in a map where they are not.
#[derive(Debug)]
pub(super) struct Memo {
    dense: Vec<Node>,
    sparse: HashMap<u64, Node>,
    filled: usize,
    limit: usize,
    /// What was read lately, by number. A million chunks refer to a few thousand keys whose slots lie far apart;
    /// this keeps them together in the processor's caches.
    recent: Vec<(u64, Node)>,
}

const RECENT_BITS: u32 = 12;

/// Where a slot's number would be among the recent ones.
fn recent_place(index: u64) -> usize {
    (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - RECENT_BITS)) as usize
}

impl Memo {
    pub(super) fn new(limit: usize) -> Memo {
        Memo { dense: Vec::new(), sparse: HashMap::new(), filled: 0, limit, recent: Vec::new() }
    }

    /// What a slot holds, if it is in the table and needs nothing done.
    #[inline]
    pub(super) fn ready(&self, index: usize) -> Option<Node> {
        self.dense.get(index).copied().filter(|node| !node.is_placeholder())
    }

    /// [`ready`](Self::ready) for numbers that may be far apart.
    #[inline]
    pub(super) fn ready_far(&mut self, index: u32) -> Option<Node> {
        let index = u64::from(index);
        if let Some(&(known, node)) = self.recent.get(recent_place(index))
            && known == index
        {
            return Some(node);
        }
        let node = self.ready(index as usize)?;
        if self.recent.is_empty() {
            self.recent.resize(1 << RECENT_BITS, (u64::MAX, Node::ABSENT));
        }
        if let Some(slot) = self.recent.get_mut(recent_place(index)) {
            *slot = (index, node);
        }
        Some(node)
    }

    pub(super) fn get(&self, index: u64, at: usize) -> Result<Node, PickleError> {
        match self.dense.get(index as usize) {
            Some(&node) if node != Node::ABSENT => Ok(node),
            _ => self.sparse.get(&index).copied().ok_or(PickleError::Memo { index, at }),
        }
    }

    /// Fills the next slot: its number is the count of filled ones.
    #[inline]
    pub(super) fn push(&mut self, node: Node, at: usize) -> Result<(), PickleError> {
        if self.filled == self.dense.len() && self.filled < self.limit {
            self.dense.push(node);
            self.filled += 1;
            return Ok(());
        }
        self.put(self.filled as u64, node, at)
    }

    pub(super) fn put(&mut self, index: u64, node: Node, at: usize) -> Result<(), PickleError> {
        if self.filled >= self.limit {
            return Err(PickleError::Limit { what: "memo slots", limit: self.limit as u64, at });
        }
        if let Some(slot) = self.recent.get_mut(recent_place(index)) {
            *slot = (u64::MAX, Node::ABSENT);
        }
        // Holes never outnumber filled slots by more than the slack.
        let dense_until = 2 * self.filled + MEMO_SLACK;
        let previous = if index < dense_until as u64 && !self.sparse.contains_key(&index) {
            let index = index as usize;
            if self.dense.len() <= index {
                self.dense.resize(index + 1, Node::ABSENT);
            }
            std::mem::replace(&mut self.dense[index], node)
        } else {
            self.sparse.insert(index, node).unwrap_or(Node::ABSENT)
        };
        if previous == Node::ABSENT {
            self.filled += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_far_ahead_allocate_nothing_and_are_found() {
        let mut memo = Memo::new(100);
        memo.push(Node::small_int(7), 0).unwrap();
        memo.put(u64::MAX, Node::small_int(8), 0).unwrap();
        memo.put(1 << 32, Node::small_int(9), 0).unwrap();
        assert!(memo.dense.capacity() < 10_000);
        assert_eq!(memo.get(0, 0), Ok(Node::small_int(7)));
        assert_eq!(memo.get(u64::MAX, 0), Ok(Node::small_int(8)));
        assert_eq!(memo.get(1 << 32, 0), Ok(Node::small_int(9)));
        assert_eq!(memo.get(1, 5), Err(PickleError::Memo { index: 1, at: 5 }));
        // As CPython: the next slot's number is the count of filled ones.
        memo.push(Node::NONE, 0).unwrap();
        assert_eq!(memo.get(3, 0), Ok(Node::NONE));
    }

    #[test]
    fn slots_may_start_at_one_as_python_2_wrote_them() {
        let mut memo = Memo::new(100);
        for i in 1..=50 {
            memo.put(i, Node::small_int(i as i64), 0).unwrap();
        }
        assert!(memo.sparse.is_empty());
        assert_eq!(memo.get(50, 0), Ok(Node::small_int(50)));
        assert!(memo.get(0, 0).is_err());
    }

    #[test]
    fn a_slot_that_is_filled_again_is_read_anew() {
        let mut memo = Memo::new(10_000);
        for i in 0..5000 {
            memo.push(Node::small_int(i), 0).unwrap();
        }
        assert_eq!(memo.ready_far(4000), Some(Node::small_int(4000)));
        memo.put(4000, Node::NONE, 0).unwrap();
        assert_eq!(memo.ready_far(4000), Some(Node::NONE));
        assert_eq!(memo.ready_far(5000), None);
        assert!((0..5000).filter(|i| *i != 4000).all(|i| memo.ready_far(i) == Some(Node::small_int(i64::from(i)))));
    }

    #[test]
    fn growth_is_limited() {
        let mut memo = Memo::new(3);
        for _ in 0..3 {
            memo.push(Node::NONE, 0).unwrap();
        }
        assert!(matches!(memo.push(Node::NONE, 9), Err(PickleError::Limit { what: "memo slots", at: 9, .. })));
        assert!(memo.put(77, Node::NONE, 9).is_err());
    }
}
