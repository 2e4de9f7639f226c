//! Nested state: dicts, lists and tuples over tensors, plain values and opaque ones, in order. What a `torch.save` file holds,
//! what a checkpoint's keys and paths stand for, and what a program has in its hands.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::Value;
use indexmap::IndexMap;

/// A key of a dict. Optimizers use names and numbers; what else Python allows is kept as a value.
#[derive(Clone, Debug)]
pub enum Key {
    /// A string.
    Str(String),
    /// An integer, such as a parameter id.
    Int(i64),
    /// Any other plain value that may be a key: a bool, a tuple, None, …
    Other(Value),
}

impl Key {
    /// The string, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Key::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The key as a plain value.
    pub fn to_value(&self) -> Value {
        match self {
            Key::Str(text) => Value::Str(text.clone()),
            Key::Int(number) => Value::Int((*number).into()),
            Key::Other(value) => value.clone(),
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        match (self, other) {
            (Key::Str(a), Key::Str(b)) => a == b,
            (Key::Int(a), Key::Int(b)) => a == b,
            // Text tells all plain values apart that can be keys, and unlike a float it always equals itself.
            (Key::Other(a), Key::Other(b)) => a.python_repr() == b.python_repr(),
            _ => false,
        }
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Key::Str(text) => text.hash(state),
            Key::Int(number) => number.hash(state),
            Key::Other(value) => value.python_repr().hash(state),
        }
    }
}

/// As Python's `str()` shows it, which is what flattened keys are made of.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Str(text) => f.write_str(text),
            Key::Int(number) => write!(f, "{number}"),
            Key::Other(value) => f.write_str(&value.python_repr()),
        }
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Key {
        Key::Str(text.to_owned())
    }
}

impl From<String> for Key {
    fn from(text: String) -> Key {
        Key::Str(text)
    }
}

impl From<i64> for Key {
    fn from(number: i64) -> Key {
        Key::Int(number)
    }
}

/// A dict in its own order.
pub type Dict<T> = IndexMap<Key, Tree<T>>;

/// Something that is neither a tensor nor a plain value, carried through whole and never looked into.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Opaque {
    /// What it is, for messages: usually a class name.
    pub class: String,
    /// The caller's own number for it.
    pub handle: u64,
}

/// A state dict or a part of one. `T` is what is known of a tensor: where it is stored when reading, what it is when writing.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree<T> {
    /// A mapping: a dict, an ordered one, a `defaultdict`.
    Dict(Dict<T>),
    /// A list.
    List(Vec<Tree<T>>),
    /// A tuple. Flattening never looks into one, which is what DCP does.
    Tuple(Vec<Tree<T>>),
    /// A tensor.
    Tensor(T),
    /// A number, a string, None, bytes, …; in what a file holds also containers without tensors inside.
    Value(Value),
    /// Anything else.
    Opaque(Opaque),
}

/// A leaf of a [`Tree`] with the path of keys and indices that leads to it.
pub type TreeLeaf<'t, T> = (Vec<Value>, &'t Tree<T>);

impl<T> Tree<T> {
    /// An empty dict.
    pub fn dict() -> Tree<T> {
        Tree::Dict(Dict::new())
    }

    /// A dict of the given entries; a repeated key keeps its first place and its last value, as in Python.
    pub fn dict_of<K: Into<Key>>(entries: impl IntoIterator<Item = (K, Tree<T>)>) -> Tree<T> {
        Tree::Dict(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
    }

    /// A plain value as a tree: containers become containers of the tree, so that a value leaf is never one.
    pub fn from_value(value: Value) -> Tree<T> {
        match value {
            Value::List(items) => Tree::List(items.into_iter().map(Tree::from_value).collect()),
            Value::Tuple(items) => Tree::Tuple(items.into_iter().map(Tree::from_value).collect()),
            Value::Dict(entries) | Value::OrderedDict(entries) => {
                Tree::Dict(entries.into_iter().map(|(key, value)| (key_of(key), Tree::from_value(value))).collect())
            }
            other => Tree::Value(other),
        }
    }

    /// The tree as one plain value, if there is neither a tensor nor an opaque value in it.
    pub fn to_value(&self) -> Option<Value> {
        Some(match self {
            Tree::Dict(dict) => {
                Value::Dict(dict.iter().map(|(key, value)| Some((key.to_value(), value.to_value()?))).collect::<Option<_>>()?)
            }
            Tree::List(items) => Value::List(items.iter().map(Tree::to_value).collect::<Option<_>>()?),
            Tree::Tuple(items) => Value::Tuple(items.iter().map(Tree::to_value).collect::<Option<_>>()?),
            Tree::Value(value) => value.clone(),
            Tree::Tensor(_) | Tree::Opaque(_) => return None,
        })
    }

    /// An object of a class that is not known to be data.
    pub fn opaque(class: impl Into<String>) -> Tree<T> {
        Tree::Opaque(Opaque { class: class.into(), handle: 0 })
    }

    /// All tensors, plain values and opaque objects, in order, each with its path. A plain value is one leaf however much it
    /// contains.
    pub fn leaves(&self) -> Vec<TreeLeaf<'_, T>> {
        let mut leaves = Vec::new();
        self.collect(&mut Vec::new(), &mut leaves);
        leaves
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> Vec<&T> {
        self.leaves().into_iter().filter_map(|(_, leaf)| leaf.as_tensor()).collect()
    }

    fn collect<'t>(&'t self, path: &mut Vec<Value>, leaves: &mut Vec<TreeLeaf<'t, T>>) {
        let mut visit = |key: Value, below: &'t Tree<T>| {
            path.push(key);
            below.collect(path, leaves);
            path.pop();
        };
        match self {
            Tree::Dict(dict) => dict.iter().for_each(|(key, below)| visit(key.to_value(), below)),
            Tree::List(items) | Tree::Tuple(items) => {
                items.iter().enumerate().for_each(|(index, below)| visit(Value::from(index as i64), below));
            }
            Tree::Tensor(_) | Tree::Value(_) | Tree::Opaque(_) => leaves.push((path.clone(), self)),
        }
    }

    /// The dict, if it is one.
    pub fn as_dict(&self) -> Option<&Dict<T>> {
        match self {
            Tree::Dict(dict) => Some(dict),
            _ => None,
        }
    }

    /// The tensor, if it is one.
    pub fn as_tensor(&self) -> Option<&T> {
        match self {
            Tree::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// The entry of a dict with this string key.
    pub fn get(&self, key: &str) -> Option<&Tree<T>> {
        self.as_dict()?.get(&Key::from(key))
    }

    /// The same tree over other tensors.
    pub fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Tree<U> {
        match self {
            Tree::Dict(dict) => Tree::Dict(dict.into_iter().map(|(key, value)| (key, value.map(f))).collect()),
            Tree::List(items) => Tree::List(items.into_iter().map(|item| item.map(f)).collect()),
            Tree::Tuple(items) => Tree::Tuple(items.into_iter().map(|item| item.map(f)).collect()),
            Tree::Tensor(tensor) => Tree::Tensor(f(tensor)),
            Tree::Value(value) => Tree::Value(value),
            Tree::Opaque(opaque) => Tree::Opaque(opaque),
        }
    }

    /// Whether two trees are the same, given what makes two tensors the same. The order of a dict does not count.
    pub fn same_as(&self, other: &Tree<T>, same: &impl Fn(&T, &T) -> bool) -> bool {
        match (self, other) {
            (Tree::Dict(a), Tree::Dict(b)) => {
                a.len() == b.len() && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| value.same_as(other, same)))
            }
            (Tree::List(a), Tree::List(b)) | (Tree::Tuple(a), Tree::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same_as(b, same))
            }
            (Tree::Tensor(a), Tree::Tensor(b)) => same(a, b),
            (Tree::Value(a), Tree::Value(b)) => a == b,
            (Tree::Opaque(a), Tree::Opaque(b)) => a == b,
            _ => false,
        }
    }

    /// Whether a tensor is anywhere inside.
    pub fn has_tensor(&self) -> bool {
        match self {
            Tree::Dict(dict) => dict.values().any(Tree::has_tensor),
            Tree::List(items) | Tree::Tuple(items) => items.iter().any(Tree::has_tensor),
            Tree::Tensor(_) => true,
            Tree::Value(_) | Tree::Opaque(_) => false,
        }
    }

    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Tree::Dict(_) => "a dict",
            Tree::List(_) => "a list",
            Tree::Tuple(_) => "a tuple",
            Tree::Tensor(_) => "a tensor",
            Tree::Value(_) => "a value",
            Tree::Opaque(_) => "an opaque value",
        }
    }
}

/// A plain value as a dict key: text and numbers get their own kind.
pub fn key_of(value: Value) -> Key {
    match value {
        Value::Str(text) => Key::Str(text),
        Value::Int(number) => match number.as_i64() {
            Some(small) => Key::Int(small),
            None => Key::Other(Value::Int(number)),
        },
        other => Key::Other(other),
    }
}
