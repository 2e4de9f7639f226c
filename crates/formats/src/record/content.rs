//! What an archive holds: a tensor, a plain value, or a tree of both.
//!
//! A pickle can share parts, so that a hundred bytes describe a billion leaves, and can even contain
//! itself. One pass over the document measures every part once, whatever refers to it; only what is
//! proven finite and small enough is then made into a tree.

use std::collections::{HashMap, HashSet};

use super::archive::TorchArchive;
use super::error::RecordError;
use super::tensor::{Rebuilder, StoredTensor, TensorKind};
use crate::pickle::{
    Document, GlobalId, MAX_DEPTH, Node, PickleError, Policy, TREE_BYTES_FLOOR, Unknown, View, decode, key_token,
};
use crate::{Dict, Key, Tree, Value, key_of};

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
        Ok(self.content_and_classes()?.0)
    }

    /// What the archive holds, and every class that its pickle names and that isn't known to be data, wherever it names
    /// it. With such a class anywhere in it, one tensor or one value is [`Content::Opaque`] as a whole: unpickling would
    /// import the class, even if nothing of it were left in the result.
    pub fn content_and_classes(&self) -> Result<(Content, Vec<String>), RecordError> {
        let bytes = self.pickle()?;
        let policy = Policy::torch().with_unknown(Unknown::Carry);
        let (content, classes) = match decode(&bytes, policy) {
            Ok(document) => (self.built(&document, bytes.len())?, unknown_classes(&document)),
            // An object that contains itself, which is for its own library to read; or something that plain data never is.
            Err(error @ PickleError::Ambiguous { .. }) => match decode(&bytes, policy.lax()).map(|d| unknown_classes(&d)) {
                Ok(classes) if !classes.is_empty() => (Content::Opaque { class: classes[0].clone() }, classes),
                _ => return Err(RecordError::Pickle(error)),
            },
            Err(error) => return Err(RecordError::Pickle(error)),
        };
        Ok(match (content, classes) {
            (Content::Tensor(_) | Content::Value(_), classes) if !classes.is_empty() => {
                (Content::Opaque { class: classes[0].clone() }, classes)
            }
            both => both,
        })
    }

    /// What the archive holds; an error that names the class and its position if it names one that isn't
    /// known to be data.
    pub fn plain_content(&self) -> Result<Content, RecordError> {
        let bytes = self.pickle()?;
        let document = decode(&bytes, Policy::torch()).map_err(RecordError::Pickle)?;
        let content = self.built(&document, bytes.len())?;
        let opaque = match &content {
            Content::Opaque { class } => Some((self.root().to_owned(), class.clone())),
            Content::Tree(tree) => tree.leaves().into_iter().find_map(|(path, leaf)| match leaf {
                Tree::Opaque(opaque) => Some((key_text(&path), opaque.class.clone())),
                _ => None,
            }),
            _ => None,
        };
        match opaque {
            Some((key, what)) => Err(RecordError::Unsupported { key, what }),
            None => Ok(content),
        }
    }

    /// What the archive holds as a tree, however little of it is a tensor: objects of classes that aren't known to be data
    /// are [`Tree::Opaque`] where they lie, and hide nothing that lies beside them.
    pub fn tree(&self) -> Result<Tree<StoredTensor>, RecordError> {
        let bytes = self.pickle()?;
        let policy = Policy::torch().with_unknown(Unknown::Carry);
        let document = match decode(&bytes, policy) {
            Err(PickleError::Ambiguous { .. }) => decode(&bytes, policy.lax()),
            decoded => decoded,
        };
        match self.measured(&document.map_err(RecordError::Pickle)?, bytes.len())? {
            Err(class) => Ok(Tree::opaque(class)),
            Ok((mut builder, root, _)) => builder.tree(root),
        }
    }

    fn built(&self, document: &Document<'_>, length: usize) -> Result<Content, RecordError> {
        let (mut builder, root, below) = match self.measured(document, length)? {
            Err(class) => return Ok(Content::Opaque { class }),
            Ok(measured) => measured,
        };
        if below == Below::Opaque {
            let class = builder.first_opaque(root).unwrap_or_default();
            return Ok(Content::Opaque { class });
        }
        Ok(match builder.tree(root)? {
            Tree::Tensor(tensor) => Content::Tensor(tensor),
            Tree::Value(value) => Content::Value(value),
            Tree::Opaque(opaque) => Content::Opaque { class: opaque.class },
            tree => Content::Tree(tree),
        })
    }

    /// A builder for a document that is finite and small enough; or what it is that makes it no tree.
    fn measured<'r>(&'r self, document: &'r Document<'r>, length: usize) -> Result<Measured<'r>, RecordError> {
        let mut builder =
            Builder { document, rebuilder: Rebuilder::new(self, document), measures: HashMap::new(), path: Vec::new() };
        let root = document.root();
        let measure = match builder.measure(root, 0) {
            // Nothing is wrong with it, but it is no tree.
            Err(RecordError::Unsupported { what, .. }) => return Ok(Err(what)),
            measured => measured?,
        };
        let limit = (length as u64).saturating_mul(TREE_BYTES_PER_PICKLE_BYTE).saturating_add(TREE_BYTES_FLOOR as u64);
        if measure.cost() > limit {
            return Err(RecordError::malformed("its pickle describes more values than are accepted", 0));
        }
        Ok(Ok((builder, root, measure.below)))
    }
}

/// A builder, the root, and what is the most remarkable thing below it; or why there is no tree.
type Measured<'r> = Result<(Builder<'r, 'r>, Node, Below), String>;

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
            // With its hash, and its position in the table of hashes.
            Below::Tensor => size_of::<(u64, Key, Tree<StoredTensor>)>() + 2 * size_of::<usize>(),
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
            return Err(self.no_tree(format!("a value that is nested more than {MAX_DEPTH} deep")));
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
                return Err(self.no_tree("a value that contains itself".to_owned()));
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

    fn no_tree(&self, what: String) -> RecordError {
        RecordError::Unsupported { key: path_text(&self.path), what }
    }

    fn is_tensor(&self, class: GlobalId) -> bool {
        TensorKind::of(&self.document.global(class)).is_some()
    }

    /// Builds the tree below a node that has been measured, so that depth and size are known to be sane.
    fn tree(&mut self, node: Node) -> Result<Tree<StoredTensor>, RecordError> {
        let document = self.document;
        let measure = self.measure(node, 0)?;
        if measure.below == Below::Plain {
            return match self.value(node) {
                Ok(value) => Ok(Tree::Value(value)),
                Err(RecordError::Pickle(PickleError::NotPlain { what, .. })) => Ok(Tree::opaque(class_in(&what))),
                Err(error) => Err(error),
            };
        }
        match document.view(node) {
            View::Object(object) if self.is_tensor(object.class) => {
                let path = &self.path;
                match self.rebuilder.tensor(node, &|| path_text(path)) {
                    Ok(tensor) => Ok(Tree::Tensor(tensor)),
                    // One odd tensor does not hide the others.
                    Err(RecordError::Unsupported { what, .. }) => Ok(Tree::opaque(what)),
                    Err(error) => Err(error),
                }
            }
            View::Dict(pairs) => Ok(Tree::Dict(self.pairs(pairs)?)),
            View::Object(object) if document.global(object.class).is_known() => {
                let class = document.global(object.class);
                // Made empty and filled afterwards; what a state dict has besides, as attributes, is dropped if it is plain.
                let attributes = object.state.is_none_or(|state| self.value(state).is_ok());
                let filled = attributes && object.items.is_empty() && document.as_dict(node).is_some();
                match (class.name(), document.as_tuple(object.args)) {
                    ("OrderedDict", Some([])) if filled => Ok(Tree::Dict(self.pairs(object.pairs)?)),
                    ("defaultdict", Some([] | [_])) if filled => Ok(Tree::Dict(self.pairs(object.pairs)?)),
                    _ => Ok(Tree::opaque(class.path())),
                }
            }
            View::List(items) => Ok(Tree::List(self.items(items)?)),
            View::Tuple(items) => Ok(Tree::Tuple(self.items(items)?)),
            View::Persistent(_) => Ok(Tree::opaque("a storage without a tensor")),
            other => Ok(Tree::opaque(self.first_opaque(node).unwrap_or_else(|| other.kind().to_owned()))),
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

    fn pairs(&mut self, pairs: &'r [[Node; 2]]) -> Result<Dict<StoredTensor>, RecordError> {
        let document = self.document;
        let mut seen = HashSet::with_capacity(pairs.len());
        let mut trees = Dict::with_capacity(pairs.len());
        for &[key, below] in pairs {
            self.path.push(Segment::Key(document, key));
            let value = self.value(key)?;
            let mut token = Vec::new();
            if !key_token(&value, &mut token) || !seen.insert(token) {
                return Err(RecordError::BadTensor { key: path_text(&self.path), reason: "this key occurs twice".to_owned() });
            }
            let below = self.tree(below)?;
            trees.insert(key_of(value), below);
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

/// The classes that a pickle names and that aren't known to be data, each once.
fn unknown_classes(document: &Document<'_>) -> Vec<String> {
    document.globals().filter(|(_, global)| !global.is_known()).map(|(_, global)| global.path()).collect()
}

fn key_text(path: &[Value]) -> String {
    let segments = path.iter().map(|segment| match segment {
        Value::Str(key) => key.clone(),
        other => other.python_repr(),
    });
    segments.collect::<Vec<_>>().join(".")
}

/// The class that a message names, or the message.
fn class_in(what: &str) -> String {
    what.split('`').nth(1).unwrap_or(what).to_owned()
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
