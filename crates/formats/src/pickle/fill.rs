//! Making and filling lists, dicts, sets and objects.
//!
//! A container is filled in batches. The first batch becomes a range of the shared element table; a second one
//! moves the elements to a vector of their own, so that elements are always one slice.

use super::decode::Machine;
use super::document::{CLASS_BITS, Container, Extra, Made, SPILLED, STATE_ONLY};
use super::error::PickleError;
use super::node::{Node, Tag};

type Result<T> = std::result::Result<T, PickleError>;

impl Machine<'_> {
    #[inline]
    pub(super) fn empty(&mut self, tag: Tag) -> Result<()> {
        let index = self.new_container()?;
        self.push(Node::index(tag, index));
        Ok(())
    }

    #[inline]
    fn new_container(&mut self) -> Result<u32> {
        let index = self.table_index(self.tables.containers.len())?;
        self.tables.containers.push(Container { start: 0, len: 0 });
        Ok(index)
    }

    /// A container of what is on the stack from `from` up.
    pub(super) fn container_from(&mut self, from: usize, tag: Tag) -> Result<()> {
        if tag == Tag::Dict && !(self.stack.len() - from).is_multiple_of(2) {
            return Err(PickleError::Type { expected: "keys and values in pairs", at: self.at });
        }
        let index = self.new_container()?;
        self.extend(index, from)?;
        self.push(Node::index(tag, index));
        Ok(())
    }

    /// Notes what a call has been given: from now on it must stay as it is, for the call has looked at it.
    #[inline]
    pub(super) fn freeze(&mut self, args: Node) {
        if args != Node::EMPTY_TUPLE {
            self.freeze_all(args);
        }
    }

    fn freeze_all(&mut self, args: Node) {
        let mut todo = vec![args];
        while let Some(node) = todo.pop() {
            match node.tag() {
                Tag::Tuple | Tag::Size => {
                    let (start, len) = node.as_range();
                    let elements = self.tables.elements.get(start..start + len).unwrap_or_default();
                    todo.extend(elements.iter().filter(|node| may_change(**node)));
                }
                Tag::List | Tag::Dict | Tag::Set | Tag::FrozenSet if self.frozen.insert(node) => {
                    todo.extend(self.tables.container(node.as_index()).iter().filter(|node| may_change(**node)));
                }
                // What is in an object was frozen or is its own state, which it is given before anyone uses it.
                Tag::Object if self.frozen.insert(node) => {}
                _ => {}
            }
        }
    }

    /// Refuses to change what a call has looked at: a reader that calls at once would not see the change.
    #[inline]
    fn check_changeable(&self, target: Node) -> Result<()> {
        if self.frozen.is_empty() || !self.frozen.contains(&target) {
            return Ok(());
        }
        Err(PickleError::Ambiguous { what: "changes a value that a call was given before", at: self.at })
    }

    /// Moves the stack from `from` up into a container.
    #[inline]
    fn extend(&mut self, index: u32, from: usize) -> Result<()> {
        let added = self.stack.len() - from;
        let start = self.tables.elements.len();
        if start + added > self.limits.objects {
            return Err(self.too_many_objects());
        }
        if added == 0 {
            return Ok(());
        }
        let Some(&Container { start: old_start, len: old_len }) = self.tables.containers.get(index as usize) else {
            return Err(self.too_many_objects());
        };
        let container = if old_len == 0 {
            let start = u32::try_from(start).map_err(|_| self.too_many_objects())?;
            let len = u32::try_from(added).ok().filter(|len| *len != SPILLED);
            self.tables.elements.extend_from_slice(&self.stack[from..]);
            Container { start, len: len.ok_or_else(|| self.too_many_objects())? }
        } else if old_len == SPILLED {
            if let Some(spilled) = self.tables.spilled.get_mut(old_start as usize) {
                spilled.extend_from_slice(&self.stack[from..]);
            }
            Container { start: old_start, len: SPILLED }
        } else {
            let slot = self.table_index(self.tables.spilled.len())?;
            let mut spilled = self.tables.container(index as usize).to_vec();
            spilled.extend_from_slice(&self.stack[from..]);
            self.tables.spilled.push(spilled);
            Container { start: slot, len: SPILLED }
        };
        self.tables.containers[index as usize] = container;
        self.stack.truncate(from);
        Ok(())
    }

    /// The container under stack position `from`.
    #[inline]
    fn target(&self, from: usize) -> Result<Node> {
        match from.checked_sub(1) {
            Some(below) if below >= self.fence => Ok(self.stack[below]),
            _ => Err(PickleError::StackUnderflow { at: self.at }),
        }
    }

    pub(super) fn append(&mut self, from: usize) -> Result<()> {
        let target = self.target(from)?;
        self.check_changeable(target)?;
        match target.tag() {
            Tag::List => self.extend(target.as_index() as u32, from),
            Tag::Object => {
                let extra = self.extra(target)?;
                let mut items = self.tables.extras[extra].items;
                if items == 0 {
                    items = self.new_container()? + 1;
                    self.tables.extras[extra].items = items;
                }
                self.extend(items - 1, from)
            }
            _ => Err(PickleError::Type { expected: "a list to append to", at: self.at }),
        }
    }

    #[inline]
    pub(super) fn set_items(&mut self, from: usize) -> Result<()> {
        if !(self.stack.len() - from).is_multiple_of(2) {
            return Err(PickleError::Type { expected: "keys and values in pairs", at: self.at });
        }
        let target = self.target(from)?;
        self.check_changeable(target)?;
        match target.tag() {
            Tag::Dict => self.extend(target.as_index() as u32, from),
            Tag::Object => {
                let extra = self.extra(target)?;
                let mut pairs = self.tables.extras[extra].pairs;
                if pairs == 0 {
                    pairs = self.new_container()? + 1;
                    self.tables.extras[extra].pairs = pairs;
                }
                self.extend(pairs - 1, from)
            }
            _ => Err(PickleError::Type { expected: "a dict to set items of", at: self.at }),
        }
    }

    pub(super) fn add_items(&mut self, from: usize) -> Result<()> {
        let target = self.target(from)?;
        self.check_changeable(target)?;
        match target.tag() {
            Tag::Set => self.extend(target.as_index() as u32, from),
            _ => Err(PickleError::Type { expected: "a set to add to", at: self.at }),
        }
    }

    #[inline]
    pub(super) fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        let target = self.top()?;
        if target.tag() != Tag::Object {
            return Err(PickleError::Type { expected: "an object to give a state to", at: self.at });
        }
        self.check_changeable(target)?;
        if let Some(object) = self.tables.objects.get_mut(target.as_index())
            && object.class >> CLASS_BITS == Made::New as u32
            && object.extra == 0
            && object.args == Node::EMPTY_TUPLE
        {
            object.args = state;
            object.class |= STATE_ONLY << CLASS_BITS;
            return Ok(());
        }
        let extra = self.extra(target)?;
        let slot = &mut self.tables.extras[extra].state;
        if *slot != Node::ABSENT {
            return Err(PickleError::Type { expected: "an object without a state", at: self.at });
        }
        *slot = state;
        Ok(())
    }

    /// Index of an object's extra parts, made when there are none yet.
    #[inline]
    fn extra(&mut self, object: Node) -> Result<usize> {
        let next = self.tables.extras.len();
        let Some(slot) = self.tables.objects.get_mut(object.as_index()) else {
            return Err(self.too_many_objects());
        };
        if slot.extra == 0 {
            let number = u32::try_from(next + 1);
            slot.extra = number.map_err(|_| PickleError::Limit { what: "objects", limit: u64::from(u32::MAX), at: self.at })?;
            let mut state = Node::ABSENT;
            if slot.class >> CLASS_BITS == STATE_ONLY {
                state = std::mem::replace(&mut slot.args, Node::EMPTY_TUPLE);
                slot.class = (slot.class & ((1 << CLASS_BITS) - 1)) | ((Made::New as u32) << CLASS_BITS);
            }
            self.tables.extras.push(Extra { state, items: 0, pairs: 0 });
            return Ok(next);
        }
        Ok(slot.extra as usize - 1)
    }
}

/// Whether a value can change after it was made, or has something in it that can.
fn may_change(node: Node) -> bool {
    matches!(node.tag(), Tag::Tuple | Tag::List | Tag::Dict | Tag::Set | Tag::FrozenSet | Tag::Object)
}
