//! Values that are carried through unopened: kept as a pickle of their own, written back as they were.

use std::collections::HashMap;
use std::sync::Arc;

use super::decode::decode;
use super::document::{Document, Made, View};
use super::encode::{BATCH, Encoder, Slot};
use super::error::PickleError;
use super::globals::{Policy, Unknown};
use super::limits::MAX_DEPTH;
use super::node::Node;
use super::opcode as op;
use crate::value::Value;

/// A value that nobody looked into: an unknown field of a file, kept so that writing the file gives it back.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Carried {
    pickle: Arc<[u8]>,
}

impl Carried {
    /// The value as a pickle of its own, of protocol 4.
    pub fn as_pickle(&self) -> &[u8] {
        &self.pickle
    }

    /// Carries a plain value. Equal values are carried as equal bytes, wherever they come from.
    pub fn from_value(value: &Value) -> Result<Carried, PickleError> {
        let pickle = super::write_value(value, 4)?;
        let document = decode(&pickle, Policy::values())?;
        document.carry(document.root())
    }

    /// The value, if it is a plain one.
    pub fn to_value(&self) -> Result<Value, PickleError> {
        super::read_value(&self.pickle)
    }
}

impl Document<'_> {
    /// Takes everything below a node along, sharing and cycles included.
    pub fn carry(&self, node: Node) -> Result<Carried, PickleError> {
        let mut encoder = Encoder::new(4)?;
        encoder.graph(self, node)?;
        Ok(Carried { pickle: encoder.finish().into() })
    }
}

impl Encoder {
    /// Writes a carried value.
    pub fn carried(&mut self, carried: &Carried) -> Result<(), PickleError> {
        let policy = Policy::values().with_unknown(Unknown::Carry).lax();
        let document = decode(&carried.pickle, policy)?;
        self.graph(&document, document.root())
    }

    /// Writes everything below a node, each shared part once.
    ///
    /// Work waits on a list instead of the call stack. As in CPython, a list or dict gets its memo slot before its
    /// elements, a tuple or object after its parts; one that turns up inside its own parts is written twice, and
    /// the outer copy dropped in favour of the inner.
    fn graph(&mut self, document: &Document<'_>, root: Node) -> Result<(), PickleError> {
        let budget = document.input.len().saturating_mul(16).saturating_add(1 << 16);
        let mut graph = Graph { document, slots: HashMap::new(), todo: vec![Task::Write(root)], budget, open_marks: 0 };
        while let Some(task) = graph.todo.pop() {
            graph.step(self, task)?;
        }
        Ok(())
    }
}

enum Task {
    Write(Node),
    Op(u8),
    EndTuple(Node, usize),
    /// The class and arguments are written.
    EndObject(Node, u8, usize),
    Memoize(Node),
}

struct Graph<'d, 'a> {
    document: &'d Document<'a>,
    slots: HashMap<Node, Slot>,
    todo: Vec<Task>,
    budget: usize,
    open_marks: usize,
}

impl Graph<'_, '_> {
    fn step(&mut self, encoder: &mut Encoder, task: Task) -> Result<(), PickleError> {
        self.budget = self.budget.checked_sub(1).ok_or(PickleError::Limit {
            what: "steps to write a value that contains itself",
            limit: (self.document.input.len() as u64).saturating_mul(16),
            at: 0,
        })?;
        encoder.frame_break();
        match task {
            Task::Op(opcode) => {
                self.count_mark(opcode)?;
                encoder.raw(&[opcode]);
            }
            Task::Memoize(node) => self.memoize(encoder, node),
            Task::EndTuple(node, len) => {
                self.open_marks -= usize::from(Encoder::tuple_needs_mark(len));
                if let Some(&slot) = self.slots.get(&node) {
                    if Encoder::tuple_needs_mark(len) {
                        encoder.raw(&[op::POP_MARK]);
                    } else {
                        (0..len).for_each(|_| encoder.raw(&[op::POP]));
                    }
                    encoder.get(slot);
                } else {
                    encoder.tuple(len);
                    self.memoize(encoder, node);
                }
            }
            Task::EndObject(node, opcode, parts) => {
                if let Some(&slot) = self.slots.get(&node) {
                    (0..parts).for_each(|_| encoder.raw(&[op::POP]));
                    encoder.get(slot);
                } else {
                    encoder.raw(&[opcode]);
                    self.memoize(encoder, node);
                    self.fill_object(node);
                }
            }
            Task::Write(node) => self.write(encoder, node)?,
        }
        Ok(())
    }

    /// Keeps account of open marks: what is carried must be decoded again, within the same limit.
    fn count_mark(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            op::MARK if self.open_marks >= MAX_DEPTH => {
                let limit = MAX_DEPTH as u64;
                return Err(PickleError::Limit { what: "levels of nesting", limit, at: 0 });
            }
            op::MARK => self.open_marks += 1,
            op::APPENDS | op::SETITEMS | op::ADDITEMS | op::FROZENSET | op::TUPLE => self.open_marks -= 1,
            _ => {}
        }
        Ok(())
    }

    fn memoize(&mut self, encoder: &mut Encoder, node: Node) {
        let slot = encoder.memoize();
        self.slots.insert(node, slot);
    }

    fn write(&mut self, encoder: &mut Encoder, node: Node) -> Result<(), PickleError> {
        if let Some(&slot) = self.slots.get(&node) {
            encoder.get(slot);
            return Ok(());
        }
        let document = self.document;
        match document.view(node) {
            View::None => encoder.none(),
            View::Bool(value) => encoder.bool(value),
            View::Int(value) => encoder.int(value),
            View::BigInt(value) => encoder.big_int(value)?,
            View::Float(value) => encoder.float(value),
            View::Complex(re, im) => {
                encoder.global("builtins", "complex");
                encoder.float(re);
                encoder.float(im);
                encoder.tuple(2);
                encoder.reduce();
            }
            View::Str(text) => {
                encoder.str_once(text);
                self.memoize(encoder, node);
            }
            View::Bytes(bytes) => {
                encoder.bytes(bytes);
                self.memoize(encoder, node);
            }
            View::ByteArray(bytes) => {
                encoder.byte_array(bytes);
                self.memoize(encoder, node);
            }
            View::Tuple([]) => encoder.tuple(0),
            View::Tuple(elements) => {
                if Encoder::tuple_needs_mark(elements.len()) {
                    self.count_mark(op::MARK)?;
                    encoder.mark();
                }
                self.todo.push(Task::EndTuple(node, elements.len()));
                self.all(elements);
            }
            View::Size(elements) => {
                encoder.global("torch", "Size");
                if Encoder::tuple_needs_mark(elements.len()) {
                    self.count_mark(op::MARK)?;
                    encoder.mark();
                }
                self.todo.extend([Task::Memoize(node), Task::Op(op::REDUCE), Task::Op(op::TUPLE1)]);
                self.todo.push(Task::Op(match elements.len() {
                    0 => op::EMPTY_TUPLE,
                    1 => op::TUPLE1,
                    2 => op::TUPLE2,
                    3 => op::TUPLE3,
                    _ => op::TUPLE,
                }));
                self.all(elements);
            }
            View::List(elements) => {
                encoder.empty_list();
                self.memoize(encoder, node);
                self.batches(elements, BATCH, op::APPENDS);
            }
            View::Dict(pairs) => {
                encoder.empty_dict();
                self.memoize(encoder, node);
                self.batches(pairs.as_flattened(), 2 * BATCH, op::SETITEMS);
            }
            View::Set(elements) => {
                encoder.raw(&[op::EMPTY_SET]);
                self.memoize(encoder, node);
                self.batches(elements, BATCH, op::ADDITEMS);
            }
            View::FrozenSet(elements) => {
                self.count_mark(op::MARK)?;
                encoder.mark();
                self.todo.extend([Task::Memoize(node), Task::Op(op::FROZENSET)]);
                self.all(elements);
            }
            View::Global(id) => {
                let global = document.global(id);
                encoder.global(global.module(), global.name());
            }
            View::Persistent(id) => {
                self.todo.extend([Task::Op(op::BINPERSID), Task::Write(id)]);
            }
            View::Object(object) => {
                let class = document.global(object.class);
                encoder.global(class.module(), class.name());
                match object.made {
                    Made::Call => self.todo.push(Task::EndObject(node, op::REDUCE, 2)),
                    Made::New => self.todo.push(Task::EndObject(node, op::NEWOBJ, 2)),
                    Made::NewWithKeywords => self.todo.push(Task::EndObject(node, op::NEWOBJ_EX, 3)),
                }
                match (object.made, document.as_tuple(object.args)) {
                    (Made::NewWithKeywords, Some(both)) => self.all(both),
                    _ => self.todo.push(Task::Write(object.args)),
                }
            }
        }
        Ok(())
    }

    /// Schedules elements to be written in order.
    fn all(&mut self, elements: &[Node]) {
        self.todo.extend(elements.iter().rev().map(|n| Task::Write(*n)));
    }

    fn batches(&mut self, elements: &[Node], batch: usize, opcode: u8) {
        for part in elements.chunks(batch).rev() {
            let single = match opcode {
                op::APPENDS if part.len() == 1 => Some(op::APPEND),
                op::SETITEMS if part.len() == 2 => Some(op::SETITEM),
                _ => None,
            };
            if let Some(single) = single {
                self.todo.push(Task::Op(single));
                self.all(part);
                continue;
            }
            self.todo.push(Task::Op(opcode));
            self.all(part);
            self.todo.push(Task::Op(op::MARK));
        }
    }

    /// Schedules what was added to an object after it was made.
    fn fill_object(&mut self, node: Node) {
        let Some(object) = self.document.object(node) else {
            return;
        };
        if let Some(state) = object.state {
            self.todo.extend([Task::Op(op::BUILD), Task::Write(state)]);
        }
        self.batches(object.pairs.as_flattened(), 2 * BATCH, op::SETITEMS);
        self.batches(object.items, BATCH, op::APPENDS);
    }
}
