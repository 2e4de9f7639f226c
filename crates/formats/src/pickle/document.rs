//! A decoded pickle: flat tables of values that refer to each other by index.
//!
//! Nothing in here nests, so dropping is a handful of deallocations however deep the pickle was. A document
//! may be deep, may share parts and may even contain itself; [`read_value`](super::read_value) and
//! [`Document::to_value`] are the bounded way to a tree. Code that walks a document itself must count its depth
//! against [`MAX_DEPTH`](super::MAX_DEPTH).

use num_bigint::BigInt;

use super::globals::Builder;
use super::node::{Node, Tag};

/// A decoded pickle that still borrows its strings from the input.
#[derive(Debug)]
pub struct Document<'a> {
    pub(super) input: &'a [u8],
    pub(super) root: Node,
    pub(super) consumed: usize,
    pub(super) tables: Tables<'a>,
}

/// The tables a document is made of; filled by the decoder.
#[derive(Debug, Default)]
pub(super) struct Tables<'a> {
    /// Elements of tuples and of containers that were filled in one go.
    pub(super) elements: Vec<Node>,
    pub(super) containers: Vec<Container>,
    /// Elements of containers that were filled in several goes.
    pub(super) spilled: Vec<Vec<Node>>,
    pub(super) objects: Vec<ObjectNode>,
    pub(super) extras: Vec<Extra>,
    pub(super) globals: Vec<Global<'a>>,
    pub(super) persistent: Vec<Node>,
    pub(super) floats: Vec<f64>,
    pub(super) complexes: Vec<(f64, f64)>,
    pub(super) wide_ints: Vec<BigInt>,
    pub(super) texts: Vec<SideText>,
}

/// A list, dict or set: a range of `elements`, or an entry of `spilled`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Container {
    pub(super) start: u32,
    /// [`SPILLED`] when `start` is an index into `spilled`.
    pub(super) len: u32,
}

pub(super) const SPILLED: u32 = u32::MAX;

/// How an object was made; what it takes to write it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// `class(*args)`.
    Call,
    /// `class.__new__(class, *args)`.
    New,
    /// `class.__new__(class, *args, **kwargs)`: the arguments are the tuple `(args, kwargs)`.
    NewWithKeywords,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ObjectNode {
    pub(super) args: Node,
    /// Index of the class, with `Made` in the top two bits.
    pub(super) class: u32,
    /// Index into `extras` plus one; 0 for none.
    pub(super) extra: u32,
}

pub(super) const CLASS_BITS: u32 = 30;

/// In the place of `Made`: made by `__new__` without arguments, and `args` holds the state. Almost every object is.
pub(super) const STATE_ONLY: u32 = 3;

/// What was added to an object after it was made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extra {
    pub(super) state: Node,
    /// Index into `containers` plus one.
    pub(super) items: u32,
    pub(super) pairs: u32,
}

#[derive(Debug)]
pub(super) enum SideText {
    Input { start: usize, len: usize },
    Owned(Box<[u8]>),
}

/// A class or function by name.
#[derive(Debug, Clone, Copy)]
pub struct Global<'a> {
    pub(super) module: &'a str,
    pub(super) name: &'a str,
    pub(super) known: bool,
    pub(super) builder: Builder,
    pub(super) at: usize,
}

impl<'a> Global<'a> {
    /// The module, with Python 3's spelling.
    pub fn module(&self) -> &'a str {
        self.module
    }

    /// The name inside the module.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Whether the policy's list has it; only ever false under [`Unknown::Carry`](super::Unknown::Carry).
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// Whether this is `module.name`.
    pub fn is(&self, module: &str, name: &str) -> bool {
        self.module == module && self.name == name
    }

    /// `module.name`.
    pub fn path(&self) -> String {
        format!("{}.{}", self.module, self.name)
    }

    /// Byte position at which the pickle first names it.
    pub fn position(&self) -> usize {
        self.at
    }
}

/// Number of a class or function within a document; equal numbers, equal names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GlobalId(pub(super) u32);

/// An instance of a class, or the result of a call, as the data it would have been made from.
#[derive(Debug, Clone, Copy)]
pub struct Object<'d> {
    /// The class or function.
    pub class: GlobalId,
    /// How the object was made.
    pub made: Made,
    /// Arguments: a tuple (see [`Made`]).
    pub args: Node,
    /// What `__setstate__` would get.
    pub state: Option<Node>,
    /// What was appended, for list-like classes.
    pub items: &'d [Node],
    /// What was set by key, for dict-like classes.
    pub pairs: &'d [[Node; 2]],
}

/// One level of a value.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum View<'d> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// An integer past 64 bits.
    BigInt(&'d BigInt),
    /// A float.
    Float(f64),
    /// A complex number.
    Complex(f64, f64),
    /// A string.
    Str(&'d str),
    /// A bytes object.
    Bytes(&'d [u8]),
    /// A bytearray.
    ByteArray(&'d [u8]),
    /// A tuple.
    Tuple(&'d [Node]),
    /// A `torch.Size`: integers, unless the file lies.
    Size(&'d [Node]),
    /// A list.
    List(&'d [Node]),
    /// A dict as it was written: in order, a key that was set twice is there twice.
    Dict(&'d [[Node; 2]]),
    /// A set.
    Set(&'d [Node]),
    /// A frozenset.
    FrozenSet(&'d [Node]),
    /// A class or function itself: a dtype for instance.
    Global(GlobalId),
    /// An instance of a class or the result of a call.
    Object(Object<'d>),
    /// A reference to something outside of the pickle, such as a storage.
    Persistent(Node),
}

impl View<'_> {
    /// What this is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            View::None => "None",
            View::Bool(_) => "a bool",
            View::Int(_) | View::BigInt(_) => "an int",
            View::Float(_) => "a float",
            View::Complex(..) => "a complex number",
            View::Str(_) => "a str",
            View::Bytes(_) => "a bytes object",
            View::ByteArray(_) => "a bytearray",
            View::Tuple(_) => "a tuple",
            View::Size(_) => "a torch.Size",
            View::List(_) => "a list",
            View::Dict(_) => "a dict",
            View::Set(_) => "a set",
            View::FrozenSet(_) => "a frozenset",
            View::Global(_) => "a class or function",
            View::Object(_) => "an object",
            View::Persistent(_) => "a reference to a storage",
        }
    }
}

impl<'a> Document<'a> {
    /// The pickled value.
    pub fn root(&self) -> Node {
        self.root
    }

    /// How many bytes of the input belong to the pickle; there may be more behind it.
    pub fn consumed(&self) -> usize {
        self.consumed
    }

    /// What a node is, one level deep.
    pub fn view(&self, node: Node) -> View<'_> {
        let t = &self.tables;
        match node.tag() {
            Tag::Absent | Tag::Wrapped | Tag::None => View::None,
            Tag::False => View::Bool(false),
            Tag::True => View::Bool(true),
            Tag::Int => View::Int(node.as_small_int()),
            Tag::WideInt => match t.wide_ints.get(node.as_index()) {
                Some(big) => i64::try_from(big).map_or(View::BigInt(big), View::Int),
                None => View::None,
            },
            Tag::Float => View::Float(t.floats.get(node.as_index()).copied().unwrap_or_default()),
            Tag::Complex => {
                let (re, im) = t.complexes.get(node.as_index()).copied().unwrap_or_default();
                View::Complex(re, im)
            }
            // Strings were proven to be UTF-8 when they were decoded.
            Tag::Str | Tag::SideStr => View::Str(std::str::from_utf8(self.raw(node)).unwrap_or_default()),
            Tag::Bytes | Tag::SideBytes => View::Bytes(self.raw(node)),
            Tag::ByteArray | Tag::SideByteArray => View::ByteArray(self.raw(node)),
            Tag::Tuple => View::Tuple(self.tuple(node)),
            Tag::Size => View::Size(self.tuple(node)),
            Tag::List => View::List(self.container(node)),
            Tag::Dict => View::Dict(self.container(node).as_chunks().0),
            Tag::Set => View::Set(self.container(node)),
            Tag::FrozenSet => View::FrozenSet(self.container(node)),
            Tag::Global => View::Global(GlobalId(node.as_index() as u32)),
            Tag::Object => self.object_view(node),
            Tag::Persistent => View::Persistent(t.persistent.get(node.as_index()).copied().unwrap_or(Node::NONE)),
        }
    }

    /// The class or function of a number.
    pub fn global(&self, id: GlobalId) -> Global<'a> {
        let nothing = Global { module: "", name: "", known: false, builder: Builder::Object, at: 0 };
        self.tables.globals.get(id.0 as usize).copied().unwrap_or(nothing)
    }

    /// All classes and functions that the pickle names, in order of first appearance.
    pub fn globals(&self) -> impl Iterator<Item = (GlobalId, Global<'a>)> + '_ {
        self.tables.globals.iter().enumerate().map(|(i, g)| (GlobalId(i as u32), *g))
    }

    /// The number of `module.name`, if the pickle names it.
    pub fn find_global(&self, module: &str, name: &str) -> Option<GlobalId> {
        self.globals().find(|(_, g)| g.is(module, name)).map(|(id, _)| id)
    }

    /// The string, if it is one.
    pub fn as_str(&self, node: Node) -> Option<&str> {
        match self.view(node) {
            View::Str(s) => Some(s),
            _ => None,
        }
    }

    /// The integer, if it is one and fits 64 bits (`bool` is not one).
    #[inline]
    pub fn as_i64(&self, node: Node) -> Option<i64> {
        match node.tag() {
            Tag::Int => Some(node.as_small_int()),
            Tag::WideInt => self.tables.wide_ints.get(node.as_index()).and_then(|b| i64::try_from(b).ok()),
            _ => None,
        }
    }

    /// The integer, if it is one and fits 64 bits without sign.
    #[inline]
    pub fn as_u64(&self, node: Node) -> Option<u64> {
        match node.tag() {
            Tag::Int => u64::try_from(node.as_small_int()).ok(),
            Tag::WideInt => self.tables.wide_ints.get(node.as_index()).and_then(|b| u64::try_from(b).ok()),
            _ => None,
        }
    }

    /// The elements, if it is a tuple or a `torch.Size`.
    #[inline]
    pub fn as_dims(&self, node: Node) -> Option<&[Node]> {
        matches!(node.tag(), Tag::Tuple | Tag::Size).then(|| self.tuple(node))
    }

    /// The elements, if it is a tuple.
    #[inline]
    pub fn as_tuple(&self, node: Node) -> Option<&[Node]> {
        (node.tag() == Tag::Tuple).then(|| self.tuple(node))
    }

    /// The object, if it is one (and not a set written as a call).
    pub fn as_object(&self, node: Node) -> Option<Object<'_>> {
        match self.view(node) {
            View::Object(object) => Some(object),
            _ => None,
        }
    }

    /// The class or function, if the node is one.
    pub fn as_global(&self, node: Node) -> Option<Global<'a>> {
        match self.view(node) {
            View::Global(id) => Some(self.global(id)),
            _ => None,
        }
    }

    /// The pairs, if it is a dict, `OrderedDict` or `defaultdict`.
    pub fn as_dict(&self, node: Node) -> Option<&[[Node; 2]]> {
        match self.view(node) {
            View::Dict(pairs) => Some(pairs),
            View::Object(object) => {
                let class = self.global(object.class);
                let dict_like = matches!(class.name(), "OrderedDict" | "defaultdict" | "Counter");
                (class.module() == "collections" && dict_like).then_some(object.pairs)
            }
            _ => None,
        }
    }

    /// Whether it is a string.
    #[inline]
    pub(crate) fn is_str(&self, node: Node) -> bool {
        matches!(node.tag(), Tag::Str | Tag::SideStr)
    }

    /// Bytes of a string, bytes object or bytearray; empty for anything else.
    #[inline]
    pub(crate) fn raw(&self, node: Node) -> &[u8] {
        match node.tag() {
            Tag::Str | Tag::Bytes | Tag::ByteArray => {
                let (start, len) = node.as_range();
                self.input.get(start..start + len).unwrap_or_default()
            }
            Tag::SideStr | Tag::SideBytes | Tag::SideByteArray => match self.tables.texts.get(node.as_index()) {
                Some(SideText::Input { start, len }) => self.input.get(*start..start + len).unwrap_or_default(),
                Some(SideText::Owned(bytes)) => bytes,
                None => &[],
            },
            _ => &[],
        }
    }

    #[inline]
    fn tuple(&self, node: Node) -> &[Node] {
        let (start, len) = node.as_range();
        self.tables.elements.get(start..start + len).unwrap_or_default()
    }

    #[inline]
    fn container(&self, node: Node) -> &[Node] {
        self.tables.container(node.as_index())
    }

    fn object_view(&self, node: Node) -> View<'_> {
        let Some(object) = self.object(node) else {
            return View::None;
        };
        let builder = self.global(object.class).builder;
        let only_called = object.state.is_none() && object.items.is_empty() && object.pairs.is_empty();
        if matches!(builder, Builder::Set | Builder::FrozenSet) && object.made == Made::Call && only_called {
            // `set([1, 2])`, as protocols 0 to 3 spell it.
            let elements = match self.tuple(object.args) {
                [] => Some(&[][..]),
                [one] => self.view_sequence(*one),
                _ => None,
            };
            if let Some(elements) = elements {
                return if builder == Builder::Set { View::Set(elements) } else { View::FrozenSet(elements) };
            }
        }
        View::Object(object)
    }

    fn view_sequence(&self, node: Node) -> Option<&[Node]> {
        match node.tag() {
            Tag::List | Tag::Set | Tag::FrozenSet => Some(self.container(node)),
            Tag::Tuple => Some(self.tuple(node)),
            _ => None,
        }
    }

    /// The object behind a node, sets written as calls included.
    #[inline]
    pub(crate) fn object(&self, node: Node) -> Option<Object<'_>> {
        if node.tag() != Tag::Object {
            return None;
        }
        let object = self.tables.objects.get(node.as_index())?;
        let made = match object.class >> CLASS_BITS {
            0 => Made::Call,
            1 | STATE_ONLY => Made::New,
            _ => Made::NewWithKeywords,
        };
        let class = GlobalId(object.class & ((1 << CLASS_BITS) - 1));
        if object.class >> CLASS_BITS == STATE_ONLY {
            let (args, state) = (Node::EMPTY_TUPLE, Some(object.args));
            return Some(Object { class, made, args, state, items: &[], pairs: &[] });
        }
        let mut view = Object { class, made, args: object.args, state: None, items: &[], pairs: &[] };
        if object.extra != 0
            && let Some(extra) = self.tables.extras.get(object.extra as usize - 1)
        {
            view.state = (extra.state != Node::ABSENT).then_some(extra.state);
            if extra.items != 0 {
                view.items = self.tables.container(extra.items as usize - 1);
            }
            if extra.pairs != 0 {
                view.pairs = self.tables.container(extra.pairs as usize - 1).as_chunks().0;
            }
        }
        Some(view)
    }
}

impl Tables<'_> {
    #[inline]
    pub(super) fn container(&self, index: usize) -> &[Node] {
        match self.containers.get(index) {
            Some(&Container { start, len: SPILLED }) => self.spilled.get(start as usize).map_or(&[], Vec::as_slice),
            Some(&Container { start, len }) => {
                let start = start as usize;
                self.elements.get(start..start + len as usize).unwrap_or_default()
            }
            None => &[],
        }
    }
}
