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
}

impl Memo {
    pub(super) fn new(limit: usize) -> Memo {
        Memo { dense: Vec::new(), sparse: HashMap::new(), filled: 0, limit }
    }

    /// What a slot holds, if it is in the table and needs nothing done.
    #[inline]
    pub(super) fn ready(&self, index: usize) -> Option<Node> {
        self.dense.get(index).copied().filter(|node| !node.is_placeholder())
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
    fn growth_is_limited() {
        let mut memo = Memo::new(3);
        for _ in 0..3 {
            memo.push(Node::NONE, 0).unwrap();
        }
        assert!(matches!(memo.push(Node::NONE, 9), Err(PickleError::Limit { what: "memo slots", at: 9, .. })));
        assert!(memo.put(77, Node::NONE, 9).is_err());
    }
}
