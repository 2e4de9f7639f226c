//! What an archive holds: a tensor, a plain value, or a tree of both.
//!
//! A pickle can share parts, so that a hundred bytes describe a billion leaves, and can even contain
//! itself. One pass over the document measures every part once, whatever refers to it; only what is
//! proven finite and small enough is then made into a tree.

use std::collections::{HashMap, HashSet};

use super::archive::TorchArchive;
use super::error::RecordError;
use super::tensor::{Rebuilder, StoredTensor, TensorKind};
use crate::Value;
use crate::pickle::{Document, GlobalId, MAX_DEPTH, Node, Policy, TREE_BYTES_FLOOR, Unknown, View, decode};
use crate::torch_file::Tree;

/// Bytes of tree that are made for each byte of pickle at most, past the floor: a node of a tree is larger than
/// a plain value, so this is more than for plain values.
const TREE_BYTES_PER_PICKLE_BYTE: u64 = 512;

/// What an archive holds.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Content {
    /// One tensor.
    Tensor(StoredTensor),
    /// A plain value without tensors.
    Value(Value),
    /// Containers with tensors in them.
    Tree(Tree<StoredTensor>),
    /// An object that names a class which is not known to be data. It was not opened; its bytes can be
    /// carried along.
    Opaque {
        /// The class, with its module.
        class: String,
    },
}

impl TorchArchive<'_> {
    /// What the archive holds. Classes that aren't known to be data are never run nor opened: an object
    /// of one is [`Content::Opaque`], or [`Tree::Opaque`] beside tensors.
    pub fn content(&self) -> Result<Content, RecordError> {
        self.decoded(Policy::torch().with_unknown(Unknown::Carry))
    }

    /// What the archive holds; an error that names the class and its position if it names one that isn't
    /// known to be data.
    pub fn plain_content(&self) -> Result<Content, RecordError> {
        self.decoded(Policy::torch())
    }

    fn decoded(&self, policy: Policy) -> Result<Content, RecordError> {
        let bytes = self.pickle()?;
        let document = decode(&bytes, policy).map_err(RecordError::Pickle)?;
        let mut builder = Builder {
            document: &document,
            rebuilder: Rebuilder::new(self, &document),
            measures: HashMap::new(),
            path: Vec::new(),
        };
        let root = document.root();
        let measure = builder.measure(root, 0)?;
        let limit = (bytes.len() as u64).saturating_mul(TREE_BYTES_PER_PICKLE_BYTE).saturating_add(TREE_BYTES_FLOOR as u64);
        if measure.cost() > limit {
            return Err(RecordError::malformed("its pickle describes more values than are accepted", 0));
        }
        if measure.below == Below::Opaque {
            let class = builder.first_opaque(root).unwrap_or_default();
            return Ok(Content::Opaque { class });
        }
        Ok(match builder.tree(root)? {
            Tree::Tensor(tensor) => Content::Tensor(tensor),
            Tree::Value(value) => Content::Value(value),
            Tree::Opaque { class } => Content::Opaque { class },
            tree => Content::Tree(tree),
        })
    }
}

/// What is the most remarkable thing at or below a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Below {
    Plain,
    Opaque,
    Tensor,
}

#[derive(Clone, Copy)]
struct Measure {
    below: Below,
    /// Values and bytes of text once shared parts are copied.
    values: u64,
    bytes: u64,
}

impl Measure {
    const ONE: Measure = Measure { below: Below::Plain, values: 1, bytes: 0 };

    /// Bytes that the tree takes at most.
    fn cost(&self) -> u64 {
        let node = match self.below {
            Below::Tensor => size_of::<(Value, Tree<StoredTensor>)>(),
            Below::Plain | Below::Opaque => size_of::<Value>(),
        };
        self.values.saturating_mul(node as u64).saturating_add(self.bytes)
    }

    fn add(&mut self, other: Measure) {
        self.below = self.below.max(other.below);
        self.values = self.values.saturating_add(other.values);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

struct Builder<'r, 'a> {
    document: &'r Document<'r>,
    rebuilder: Rebuilder<'r, 'a>,
    /// Containers measured so far; none while one is being measured.
    measures: HashMap<Node, Option<Measure>>,
    /// The way to where the builder is, for errors.
    path: Vec<Segment<'r>>,
}

enum Segment<'r> {
    Key(&'r Document<'r>, Node),
    Index(usize),
}

impl<'r> Builder<'r, '_> {
    fn measure(&mut self, node: Node, depth: usize) -> Result<Measure, RecordError> {
        if depth > MAX_DEPTH {
            return Err(RecordError::malformed(format!("its pickle is nested more than {MAX_DEPTH} deep"), 0));
        }
        let document = self.document;
        let text = |len: usize| Measure { bytes: len as u64, ..Measure::ONE };
        match document.view(node) {
            View::Str(text_) => return Ok(text(text_.len())),
            View::Bytes(bytes) | View::ByteArray(bytes) => return Ok(text(bytes.len())),
            View::BigInt(int) => return Ok(text(int.bits() as usize / 8)),
            View::Global(id) => {
                let known = document.global(id).is_known();
                return Ok(Measure { below: if known { Below::Plain } else { Below::Opaque }, ..Measure::ONE });
            }
            View::Object(object) if self.is_tensor(object.class) => {
                return Ok(Measure { below: Below::Tensor, ..Measure::ONE });
            }
            View::None | View::Bool(_) | View::Int(_) | View::Float(_) | View::Complex(..) => {
                return Ok(Measure::ONE);
            }
            _ => {}
        }
        match self.measures.get(&node) {
            Some(Some(measure)) => return Ok(*measure),
            Some(None) => {
                return Err(RecordError::malformed("its pickle contains itself", 0));
            }
            None => {}
        }
        self.measures.insert(node, None);
        let mut measure = Measure::ONE;
        let mut children = Vec::new();
        match document.view(node) {
            View::Tuple(items) | View::Size(items) | View::List(items) | View::Set(items) | View::FrozenSet(items) => {
                children.extend_from_slice(items)
            }
            View::Dict(pairs) => children.extend(pairs.iter().flatten()),
            View::Object(object) => {
                if !document.global(object.class).is_known() {
                    measure.below = Below::Opaque;
                }
                children.push(object.args);
                children.extend(object.state);
                children.extend_from_slice(object.items);
                children.extend(object.pairs.iter().flatten());
            }
            View::Persistent(_) => measure.below = Below::Tensor,
            _ => {}
        }
        for child in children {
            measure.add(self.measure(child, depth + 1)?);
        }
        self.measures.insert(node, Some(measure));
        Ok(measure)
    }

    fn is_tensor(&self, class: GlobalId) -> bool {
        TensorKind::of(&self.document.global(class)).is_some()
    }

    /// Builds the tree below a node that has been measured, so that depth and size are known to be sane.
    fn tree(&mut self, node: Node) -> Result<Tree<StoredTensor>, RecordError> {
        let document = self.document;
        let measure = self.measure(node, 0)?;
        if measure.below == Below::Plain {
            return Ok(Tree::Value(self.value(node)?));
        }
        match document.view(node) {
            View::Object(object) if self.is_tensor(object.class) => {
                let path = &self.path;
                let tensor = self.rebuilder.tensor(node, &|| path_text(path))?;
                Ok(Tree::Tensor(tensor))
            }
            View::Dict(pairs) => Ok(Tree::Dict(self.pairs(pairs)?)),
            View::Object(object) if document.global(object.class).is_known() => {
                let class = document.global(object.class);
                match document.as_dict(node) {
                    Some(pairs) if class.name() == "OrderedDict" => Ok(Tree::OrderedDict(self.pairs(pairs)?)),
                    Some(pairs) => Ok(Tree::Dict(self.pairs(pairs)?)),
                    None => Ok(Tree::Opaque { class: class.path() }),
                }
            }
            View::List(items) => Ok(Tree::List(self.items(items)?)),
            View::Tuple(items) => Ok(Tree::Tuple(self.items(items)?)),
            View::Persistent(_) => {
                Err(RecordError::Unsupported { key: path_text(&self.path), what: "a storage without a tensor".to_owned() })
            }
            other => Ok(Tree::Opaque { class: self.first_opaque(node).unwrap_or_else(|| other.kind().to_owned()) }),
        }
    }

    fn items(&mut self, items: &'r [Node]) -> Result<Vec<Tree<StoredTensor>>, RecordError> {
        let mut trees = Vec::with_capacity(items.len());
        for (index, &item) in items.iter().enumerate() {
            self.path.push(Segment::Index(index));
            trees.push(self.tree(item)?);
            self.path.pop();
        }
        Ok(trees)
    }

    fn pairs(&mut self, pairs: &'r [[Node; 2]]) -> Result<Vec<(Value, Tree<StoredTensor>)>, RecordError> {
        let document = self.document;
        let mut seen = HashSet::with_capacity(pairs.len());
        let mut trees = Vec::with_capacity(pairs.len());
        for &[key, below] in pairs {
            self.path.push(Segment::Key(document, key));
            let value = self.value(key)?;
            if !seen.insert(value.python_repr()) {
                return Err(RecordError::BadTensor { key: path_text(&self.path), reason: "this key occurs twice".to_owned() });
            }
            trees.push((value, self.tree(below)?));
            self.path.pop();
        }
        Ok(trees)
    }

    fn value(&self, node: Node) -> Result<Value, RecordError> {
        self.document.to_value(node).map_err(RecordError::Pickle)
    }

    /// The first class that is not known to be data, at or below a measured node.
    fn first_opaque(&self, node: Node) -> Option<String> {
        let document = self.document;
        let mut todo = vec![node];
        let mut seen = HashSet::new();
        while let Some(node) = todo.pop() {
            if !seen.insert(node) {
                continue;
            }
            match document.view(node) {
                View::Global(id) if !document.global(id).is_known() => {
                    return Some(document.global(id).path());
                }
                View::Object(object) => {
                    let class = document.global(object.class);
                    if !class.is_known() {
                        return Some(class.path());
                    }
                    todo.extend(object.pairs.iter().rev().flatten());
                    todo.extend(object.items.iter().rev());
                    todo.extend(object.state);
                    todo.push(object.args);
                }
                View::Tuple(items) | View::List(items) | View::Set(items) | View::FrozenSet(items) => {
                    todo.extend(items.iter().rev())
                }
                View::Dict(pairs) => todo.extend(pairs.iter().rev().flatten()),
                _ => {}
            }
        }
        None
    }
}

fn path_text(path: &[Segment<'_>]) -> String {
    if path.is_empty() {
        return "the pickled object".to_owned();
    }
    let segments = path.iter().map(|segment| match segment {
        Segment::Index(index) => index.to_string(),
        Segment::Key(document, node) => match document.view(*node) {
            View::Str(key) => key.to_owned(),
            View::Int(key) => key.to_string(),
            other => format!("<{}>", other.kind()),
        },
    });
    segments.collect::<Vec<_>>().join(".")
}
