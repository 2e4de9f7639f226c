//! The decoder: one loop over the instructions, a stack of nodes, tables that only grow.
//!
//! Every instruction is at least one byte and makes at most a few table entries, so memory is bounded by a small
//! multiple of the input; what could multiply (copied text, memo numbers) has a limit of its own.

use std::collections::{HashMap, HashSet};

use super::document::{CLASS_BITS, Document, Global, GlobalId, Made, ObjectNode, SideText, Tables};
use super::error::PickleError;
use super::globals::{Builder, Policy, Unknown, acts, modern_module};
use super::limits::{Limits, MAX_COPIED_PER_INPUT_BYTE, MAX_INPUT_BYTES, MAX_TUPLE_LEN};
use super::memo::Memo;
use super::node::{Node, Tag};
use super::opcode as op;
use super::text::Number;

type Result<T> = std::result::Result<T, PickleError>;

/// Decodes a pickle of protocol 0 to 5 into inert data; nothing in it is ever run.
///
/// ```
/// use reshard_formats::pickle::{decode, Policy, View};
/// let document = decode(b"\x80\x04]\x94(K\x01K\x02e.", Policy::values())?;
/// let View::List(elements) = document.view(document.root()) else { panic!() };
/// assert_eq!(elements.len(), 2);
/// assert!(decode(b"cos\nsystem\n(S'true'\ntR.", Policy::values()).is_err());
/// # Ok::<(), reshard_formats::pickle::PickleError>(())
/// ```
pub fn decode(input: &[u8], policy: Policy) -> Result<Document<'_>> {
    decode_with_limits(input, policy, Limits::default())
}

/// [`decode`] with limits other than the default ones.
pub fn decode_with_limits(input: &[u8], policy: Policy, limits: Limits) -> Result<Document<'_>> {
    let most = limits.bytes.min(MAX_INPUT_BYTES);
    if input.len() as u64 > most {
        return Err(PickleError::Limit { what: "bytes", limit: most, at: 0 });
    }
    let mut machine = Machine {
        input,
        at: 0,
        pos: 0,
        stack: Vec::with_capacity(256),
        marks: Vec::new(),
        fence: 0,
        frame_end: usize::MAX,
        memo: Memo::new(limits.memo),
        tables: Tables::default(),
        global_ids: HashMap::new(),
        copied: 0,
        size_class: Node::ABSENT,
        frozen: HashSet::new(),
        policy,
        limits,
    };
    let root = machine.run()?;
    Ok(Document { input, root, consumed: machine.pos, tables: machine.tables })
}

pub(super) struct Machine<'a> {
    pub(super) input: &'a [u8],
    /// Position of the current instruction, for errors.
    pub(super) at: usize,
    pub(super) pos: usize,
    pub(super) stack: Vec<Node>,
    marks: Vec<usize>,
    /// Stack height at the innermost mark; instructions can't take what is below.
    pub(super) fence: usize,
    /// Where the current frame ends; past everything outside of one.
    pub(super) frame_end: usize,
    pub(super) memo: Memo,
    pub(super) tables: Tables<'a>,
    global_ids: HashMap<(&'a str, &'a str), GlobalId>,
    copied: usize,
    /// The node of `torch.Size`, once it was named.
    size_class: Node,
    /// Containers and objects that a call has had as arguments: what it made of them is made.
    pub(super) frozen: HashSet<Node>,
    pub(super) policy: Policy,
    pub(super) limits: Limits,
}

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Node> {
        loop {
            if self.pos >= self.frame_end {
                self.end_frame()?;
            }
            self.at = self.pos;
            let Some(&opcode) = self.input.get(self.pos) else {
                return Err(PickleError::Truncated { at: self.at, needed: 1 });
            };
            self.pos += 1;
            match opcode {
                op::BININT1 => {
                    let [b] = self.take_array()?;
                    self.push(Node::small_int(i64::from(b)));
                }
                op::MEMOIZE => {
                    let top = self.top()?;
                    self.memo.push(top, self.at)?;
                }
                op::BINGET => {
                    let [b] = self.take_array()?;
                    self.recall(u64::from(b))?;
                }
                op::LONG_BINGET => {
                    let index = u32::from_le_bytes(self.take_array()?);
                    match self.memo.ready_far(index) {
                        Some(node) => self.push(node),
                        None => self.recall_placeholder(u64::from(index))?,
                    }
                }
                op::TUPLE1 => {
                    if !self.size_ahead()? {
                        self.tuple_of::<1>()?;
                    }
                }
                op::TUPLE2 => self.tuple_of::<2>()?,
                op::TUPLE3 => self.tuple_of::<3>()?,
                op::BININT2 => {
                    let value = u16::from_le_bytes(self.take_array()?);
                    self.push(Node::small_int(i64::from(value)));
                }
                op::BININT => {
                    let value = i32::from_le_bytes(self.take_array()?);
                    self.push(Node::small_int(i64::from(value)));
                }
                op::REDUCE => self.reduce()?,
                op::EMPTY_TUPLE => self.push(Node::EMPTY_TUPLE),
                op::NEWOBJ => self.new_object(Made::New)?,
                op::EMPTY_DICT => self.empty(Tag::Dict)?,
                op::MARK => self.mark()?,
                op::SETITEMS => {
                    let mark = self.pop_mark()?;
                    self.set_items(mark)?;
                }
                op::BUILD => self.build()?,
                op::SHORT_BINUNICODE => {
                    let [len] = self.take_array()?;
                    self.unicode(u64::from(len))?;
                }
                op::NONE => self.push(Node::NONE),
                op::NEWTRUE => self.push(Node::bool(true)),
                op::NEWFALSE => self.push(Node::bool(false)),
                op::EMPTY_LIST => self.empty(Tag::List)?,
                op::APPENDS => {
                    let mark = self.pop_mark()?;
                    self.append(mark)?;
                }
                op::STOP => {
                    let root = self.pop()?;
                    self.at_end()?;
                    return Ok(root);
                }
                _ => self.uncommon(opcode)?,
            }
        }
    }

    /// Readers that take a frame in one go read something else than these bytes when an instruction reaches across its end.
    #[cold]
    fn end_frame(&mut self) -> Result<()> {
        if self.pos > self.frame_end {
            return Err(PickleError::Ambiguous { what: "reaches across the end of a frame", at: self.at });
        }
        self.frame_end = usize::MAX;
        Ok(())
    }

    /// A pickle is one value and nothing else: what is left on the stack was made and dropped, and what follows is for
    /// somebody else to read.
    fn at_end(&self) -> Result<()> {
        let what = if !self.marks.is_empty() || !self.stack.is_empty() {
            "leaves values that are in no result"
        } else if self.pos < self.input.len() {
            "ends the pickle before its bytes end"
        } else {
            return Ok(());
        };
        Err(PickleError::Ambiguous { what, at: self.at })
    }

    // Operands.

    #[inline]
    pub(super) fn take_array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.input.get(self.pos..).and_then(|rest| rest.first_chunk::<N>()) {
            Some(bytes) => {
                self.pos += N;
                Ok(*bytes)
            }
            None => {
                let missing = N - (self.input.len() - self.pos).min(N);
                Err(PickleError::Truncated { at: self.at, needed: missing as u64 })
            }
        }
    }

    #[inline]
    pub(super) fn check_available(&self, len: u64) -> Result<()> {
        let there = (self.input.len() - self.pos) as u64;
        if len > there {
            return Err(PickleError::Truncated { at: self.at, needed: len - there });
        }
        Ok(())
    }

    #[inline]
    pub(super) fn take_range(&mut self, len: u64) -> Result<(usize, usize)> {
        self.check_available(len)?;
        let start = self.pos;
        self.pos += len as usize;
        Ok((start, len as usize))
    }

    /// Up to the next newline, which is consumed.
    pub(super) fn line(&mut self) -> Result<&'a [u8]> {
        let rest = &self.input[self.pos..];
        match rest.iter().position(|b| *b == b'\n') {
            Some(len) => {
                self.pos += len + 1;
                Ok(&rest[..len])
            }
            None => Err(PickleError::Truncated { at: self.at, needed: 1 }),
        }
    }

    pub(super) fn line_str(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.line()?).map_err(|_| PickleError::Unicode { at: self.at })
    }

    #[inline]
    pub(super) fn unicode(&mut self, len: u64) -> Result<()> {
        let (start, len) = self.take_range(len)?;
        if std::str::from_utf8(&self.input[start..start + len]).is_err() {
            return Err(PickleError::Unicode { at: self.at });
        }
        let node = self.input_range(Tag::Str, start, len)?;
        self.push(node);
        Ok(())
    }

    // Nodes.

    #[inline]
    pub(super) fn input_range(&mut self, tag: Tag, start: usize, len: usize) -> Result<Node> {
        match Node::range(tag, start, len) {
            Some(node) => Ok(node),
            None => self.side_text(side(tag), SideText::Input { start, len }),
        }
    }

    pub(super) fn side_text(&mut self, tag: Tag, text: SideText) -> Result<Node> {
        let index = self.table_index(self.tables.texts.len())?;
        self.tables.texts.push(text);
        Ok(Node::index(tag, index))
    }

    pub(super) fn copied_text(&mut self, tag: Tag, bytes: Vec<u8>) -> Result<()> {
        let limit = self.input.len().saturating_mul(MAX_COPIED_PER_INPUT_BYTE);
        self.copied = self.copied.saturating_add(bytes.len());
        if self.copied > limit {
            return Err(PickleError::Limit { what: "bytes of copied text", limit: limit as u64, at: self.at });
        }
        let node = self.side_text(tag, SideText::Owned(bytes.into_boxed_slice()))?;
        self.push(node);
        Ok(())
    }

    pub(super) fn number(&mut self, number: Number) -> Result<()> {
        let big = match number {
            Number::Bool(value) => {
                self.push(Node::bool(value));
                return Ok(());
            }
            Number::Small(value) => match Node::int(value) {
                Some(node) => {
                    self.push(node);
                    return Ok(());
                }
                None => value.into(),
            },
            Number::Big(big) => big,
        };
        let index = self.table_index(self.tables.wide_ints.len())?;
        self.tables.wide_ints.push(big);
        self.push(Node::index(Tag::WideInt, index));
        Ok(())
    }

    pub(super) fn float(&mut self, value: f64) -> Result<()> {
        let index = self.table_index(self.tables.floats.len())?;
        self.tables.floats.push(value);
        self.push(Node::index(Tag::Float, index));
        Ok(())
    }

    pub(super) fn persistent(&mut self, id: Node) -> Result<()> {
        let index = self.table_index(self.tables.persistent.len())?;
        self.tables.persistent.push(id);
        self.push(Node::index(Tag::Persistent, index));
        Ok(())
    }

    /// The index that the next entry of a table of `len` entries gets.
    #[inline]
    pub(super) fn table_index(&self, len: usize) -> Result<u32> {
        if len >= self.limits.objects {
            return Err(self.too_many_objects());
        }
        u32::try_from(len).map_err(|_| self.too_many_objects())
    }

    #[cold]
    pub(super) fn too_many_objects(&self) -> PickleError {
        PickleError::Limit { what: "objects", limit: self.limits.objects as u64, at: self.at }
    }

    // The stack.

    #[inline]
    pub(super) fn push(&mut self, node: Node) {
        self.stack.push(node);
    }

    #[inline]
    pub(super) fn top(&self) -> Result<Node> {
        match self.stack.last() {
            Some(&top) if self.stack.len() > self.fence => Ok(top),
            _ => Err(PickleError::StackUnderflow { at: self.at }),
        }
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Result<Node> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// Stack position of the lowest of the `count` topmost values.
    #[inline]
    pub(super) fn below(&self, count: usize) -> Result<usize> {
        match self.stack.len().checked_sub(count) {
            Some(from) if from >= self.fence => Ok(from),
            _ => Err(PickleError::StackUnderflow { at: self.at }),
        }
    }

    #[inline]
    fn mark(&mut self) -> Result<()> {
        if self.marks.len() >= self.limits.depth {
            let limit = self.limits.depth as u64;
            return Err(PickleError::Limit { what: "levels of nesting", limit, at: self.at });
        }
        self.fence = self.stack.len();
        self.marks.push(self.fence);
        Ok(())
    }

    /// Closes the innermost mark and gives the stack height it was set at.
    #[inline]
    pub(super) fn pop_mark(&mut self) -> Result<usize> {
        let mark = self.marks.pop().ok_or(PickleError::Type { expected: "an open mark", at: self.at })?;
        self.fence = self.marks.last().copied().unwrap_or(0);
        Ok(mark)
    }

    #[inline]
    pub(super) fn recall(&mut self, index: u64) -> Result<()> {
        match self.memo.ready(index as usize) {
            Some(node) => {
                self.push(node);
                Ok(())
            }
            None => self.recall_placeholder(index),
        }
    }

    #[cold]
    #[inline(never)]
    fn recall_placeholder(&mut self, index: u64) -> Result<()> {
        let mut node = self.memo.get(index, self.at)?;
        if node.is_placeholder() {
            self.push(node.retagged(Tag::Tuple));
            self.tuple_of::<1>()?;
            node = self.pop()?;
            self.memo.put(index, node, self.at)?;
        }
        self.push(node);
        Ok(())
    }

    /// `torch.Size((…))` in one step, when that is what the wrapping of a tuple is for.
    ///
    /// A checkpoint's metadata has three of these per chunk; done in one step, the wrapping tuple and the call need
    /// no table entries. Should the pickle refer to the wrapping tuple later, the memo still knows it.
    #[inline]
    fn size_ahead(&mut self) -> Result<bool> {
        let [.., class, inner] = self.stack[self.fence..] else {
            return Ok(false);
        };
        if class != self.size_class || inner.tag() != Tag::Tuple {
            return Ok(false);
        }
        match self.input.get(self.pos..) {
            Some([op::MEMOIZE, op::REDUCE, ..]) => {
                self.memo.push(inner.retagged(Tag::Wrapped), self.at)?;
                self.pos += 2;
            }
            Some([op::REDUCE, ..]) => self.pos += 1,
            _ => return Ok(false),
        }
        self.stack.pop();
        if let Some(top) = self.stack.last_mut() {
            *top = inner.retagged(Tag::Size);
        }
        Ok(true)
    }

    // Tuples and objects; what containers do is in `fill`.

    #[inline]
    pub(super) fn tuple_of<const N: usize>(&mut self) -> Result<()> {
        let from = self.below(N)?;
        let start = self.tables.elements.len();
        let node = Node::range(Tag::Tuple, start, N).ok_or_else(|| self.too_many_objects())?;
        self.tables.elements.extend_from_slice(&self.stack[from..]);
        self.stack.truncate(from);
        self.push(node);
        Ok(())
    }

    pub(super) fn tuple(&mut self, from: usize) -> Result<()> {
        let (start, len) = (self.tables.elements.len(), self.stack.len() - from);
        if len > MAX_TUPLE_LEN {
            let limit = MAX_TUPLE_LEN as u64;
            return Err(PickleError::Limit { what: "elements of a tuple", limit, at: self.at });
        }
        if start + len > self.limits.objects {
            return Err(self.too_many_objects());
        }
        let start = if len == 0 { 0 } else { start };
        let node = Node::range(Tag::Tuple, start, len).ok_or_else(|| self.too_many_objects())?;
        self.tables.elements.extend(self.stack.drain(from..));
        self.push(node);
        Ok(())
    }

    #[inline]
    pub(super) fn new_object(&mut self, made: Made) -> Result<()> {
        let (args, class) = (self.pop()?, self.pop()?);
        self.object(class, args, made)
    }

    #[inline]
    pub(super) fn object(&mut self, class: Node, args: Node, made: Made) -> Result<()> {
        let class = if made == Made::New { self.inner_class(class).unwrap_or(class) } else { class };
        if class.tag() != Tag::Global || args.tag() != Tag::Tuple {
            return Err(PickleError::Type { expected: "a class by name and a tuple of arguments", at: self.at });
        }
        self.freeze(args);
        let index = self.table_index(self.tables.objects.len())?;
        let class = class.as_index() as u32 | ((made as u32) << CLASS_BITS);
        self.tables.objects.push(ObjectNode { args, class, extra: 0 });
        self.push(Node::index(Tag::Object, index));
        Ok(())
    }

    /// The class in which another one is defined, of which an instance is made: `getattr(Outer, "Inner")`. Where objects of unknown
    /// classes are only carried, the outer one's name is enough; one that is known to be data has no such instances.
    fn inner_class(&self, node: Node) -> Option<Node> {
        if node.tag() != Tag::Object || self.policy.unknown() != Unknown::Carry {
            return None;
        }
        let call = self.tables.objects.get(node.as_index())?;
        let function = self.tables.globals.get((call.class & ((1 << CLASS_BITS) - 1)) as usize)?;
        let (start, len) = call.args.as_range();
        let [outer, name] = *self.tables.elements.get(start..start + len)? else { return None };
        let unknown = || self.tables.globals.get(outer.as_index()).is_some_and(|global| !global.known);
        let inner = function.is("builtins", "getattr") && outer.tag() == Tag::Global && self.input_str(name).is_some();
        (inner && unknown()).then_some(outer)
    }

    #[inline]
    fn reduce(&mut self) -> Result<()> {
        let (args, class) = (self.pop()?, self.pop()?);
        let builder = match self.tables.globals.get(class.as_index()) {
            Some(global) if class.tag() == Tag::Global => global.builder,
            _ => Builder::Object,
        };
        match builder {
            // Sets stay calls and are seen through when they are looked at: no copy of their elements.
            Builder::Object | Builder::Set | Builder::FrozenSet => self.object(class, args, Made::Call),
            Builder::Instance => self.build_instance(class, args),
            _ => self.build_plain(builder, args),
        }
    }

    pub(super) fn text_of(&self, node: Node) -> &str {
        let bytes = match (node.tag(), self.tables.texts.get(node.as_index())) {
            (Tag::SideStr, Some(SideText::Owned(bytes))) => bytes,
            (Tag::SideStr, Some(SideText::Input { start, len })) => &self.input[*start..start + len],
            _ => {
                let (start, len) = node.as_range();
                self.input.get(start..start + len).unwrap_or_default()
            }
        };
        std::str::from_utf8(bytes).unwrap_or_default()
    }

    /// A string that lies in the input as it is; names of classes always do.
    pub(super) fn input_str(&self, node: Node) -> Option<&'a str> {
        if node.tag() != Tag::Str {
            return None;
        }
        let (start, len) = node.as_range();
        self.input.get(start..start + len).and_then(|bytes| std::str::from_utf8(bytes).ok())
    }

    pub(super) fn global(&mut self, module: &'a str, name: &'a str) -> Result<()> {
        let id = match self.global_ids.get(&(module, name)) {
            Some(&id) => id,
            None => {
                let modern = modern_module(module, name);
                let known = self.policy.knows(modern, name);
                let refused = match self.policy.unknown() {
                    Unknown::Refuse => !known,
                    Unknown::Carry => false,
                    Unknown::CarryInert => !known && acts(&format!("{modern}.{name}")),
                };
                if refused {
                    let (module, name) = (module.to_owned(), name.to_owned());
                    return Err(PickleError::Refused { module, name, at: self.at });
                }
                let index = match self.global_ids.get(&(modern, name)) {
                    Some(id) => id.0,
                    None => {
                        let index = self.table_index(self.tables.globals.len())?;
                        if index >> CLASS_BITS != 0 {
                            return Err(self.too_many_objects());
                        }
                        let builder = Builder::of(modern, name);
                        self.tables.globals.push(Global { module: modern, name, known, builder, at: self.at });
                        index
                    }
                };
                self.global_ids.insert((module, name), GlobalId(index));
                self.global_ids.insert((modern, name), GlobalId(index));
                GlobalId(index)
            }
        };
        let node = Node::index(Tag::Global, id.0);
        if self.tables.globals.get(id.0 as usize).is_some_and(|g| g.builder == Builder::Size) {
            self.size_class = node;
        }
        self.push(node);
        Ok(())
    }
}

/// The tag of a text that doesn't fit a node.
fn side(tag: Tag) -> Tag {
    match tag {
        Tag::Str => Tag::SideStr,
        Tag::ByteArray => Tag::SideByteArray,
        _ => Tag::SideBytes,
    }
}
