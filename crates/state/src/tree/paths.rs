//! Dotted keys, and nested trees out of keys and paths.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use reshard_formats::{KeyPath, PathSegment, Value};

use crate::{Dict, Key, MAX_DEPTH, StateError, Tree};

/// The most list elements that may be invented for indices that no key names.
const MAX_LIST_GAPS: u64 = 1 << 16;

/// The dotted key of a path.
pub fn dotted(path: &[PathSegment]) -> String {
    let mut key = String::new();
    for (index, segment) in path.iter().enumerate() {
        if index > 0 {
            key.push('.');
        }
        match segment {
            PathSegment::Key(text) => key.push_str(text),
            PathSegment::Index(number) => key.push_str(&number.to_string()),
        }
    }
    key
}

/// What follows the prefix in the key (empty where they are equal), or None where the key is not below it.
pub(crate) fn below<'a>(key: &'a str, prefix: &str) -> Option<&'a str> {
    if prefix.is_empty() {
        return Some(key);
    }
    let rest = key.strip_prefix(prefix)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

pub(crate) fn join(prefix: &str, rest: &str) -> String {
    match (prefix.is_empty(), rest.is_empty()) {
        (true, _) => rest.to_owned(),
        (_, true) => prefix.to_owned(),
        _ => format!("{prefix}.{rest}"),
    }
}

/// A path for messages: `['a', 0, 'b.c']`.
pub(super) fn path_text(path: &[PathSegment]) -> String {
    let parts: Vec<String> = path
        .iter()
        .map(|segment| match segment {
            PathSegment::Key(text) => format!("'{text}'"),
            PathSegment::Index(number) => number.to_string(),
        })
        .collect();
    format!("[{}]", parts.join(", "))
}

/// Builds the nested tree from keys, paths and leaves. The structure is that of the paths, so a checkpoint's own paths
/// give the structure the checkpoint was saved with, whatever a template of today looks like.
pub fn unflatten_entries<T>(entries: impl IntoIterator<Item = (String, KeyPath, Tree<T>)>) -> Result<Dict<T>, StateError> {
    let mut root: IndexMap<Key, Node<T>> = IndexMap::new();
    for (key, path, leaf) in entries {
        insert(&mut root, &key, &path, leaf)?;
    }
    let mut gaps = 0;
    root.into_iter().map(|(key, node)| Ok((key, node.build(&mut gaps)?))).collect()
}

enum Node<T> {
    Leaf(Tree<T>),
    Dict(IndexMap<Key, Node<T>>),
    /// Elements by index: gaps are filled at the end, when it is known how many there are.
    List(BTreeMap<u64, Node<T>>, String),
}

impl<T> Node<T> {
    fn for_children_like(segment: &PathSegment, key: &str) -> Node<T> {
        match segment {
            PathSegment::Key(_) => Node::Dict(IndexMap::new()),
            PathSegment::Index(_) => Node::List(BTreeMap::new(), key.to_owned()),
        }
    }

    fn build(self, gaps: &mut u64) -> Result<Tree<T>, StateError> {
        match self {
            Node::Leaf(tree) => Ok(tree),
            Node::Dict(dict) => {
                let dict = dict.into_iter().map(|(key, node)| Ok((key, node.build(gaps)?)));
                Ok(Tree::Dict(dict.collect::<Result<_, StateError>>()?))
            }
            Node::List(elements, key) => {
                let length = elements.keys().next_back().map_or(0, |last| last.saturating_add(1));
                let missing = length - elements.len() as u64;
                *gaps = gaps.saturating_add(missing);
                if *gaps > MAX_LIST_GAPS {
                    return Err(StateError::SparseList { key, gaps: *gaps, limit: MAX_LIST_GAPS });
                }
                let mut list = Vec::new();
                for (index, node) in elements {
                    while (list.len() as u64) < index {
                        // Where an empty dict stood in a list nothing was saved; PyTorch puts None there.
                        list.push(Tree::Value(Value::None));
                    }
                    list.push(node.build(gaps)?);
                }
                Ok(Tree::List(list))
            }
        }
    }
}

fn insert<T>(root: &mut IndexMap<Key, Node<T>>, key: &str, path: &[PathSegment], leaf: Tree<T>) -> Result<(), StateError> {
    if path.len() > MAX_DEPTH {
        return Err(StateError::TooDeep { limit: MAX_DEPTH });
    }
    let conflict = |reason: String| StateError::PathConflict { key: key.to_owned(), reason };
    let Some((first, rest)) = path.split_first() else {
        return Err(conflict("it is empty".to_owned()));
    };
    let mut slot = place(root, first);
    for segment in rest {
        let node = slot.get_or_insert_with(|| Node::for_children_like(segment, key));
        slot = match (node, segment) {
            (Node::Dict(dict), segment) => place(dict, segment),
            (Node::List(elements, _), PathSegment::Index(index)) => {
                let index = u64::try_from(*index).map_err(|_| conflict(format!("the index {index} is negative")))?;
                Place::Element(elements, index)
            }
            (Node::List(..), PathSegment::Key(text)) => {
                return Err(conflict(format!("'{text}' is looked up in a list")));
            }
            (Node::Leaf(tree), _) => {
                return Err(conflict(format!("it runs through {}", tree.kind())));
            }
        };
    }
    if slot.is_taken() {
        return Err(conflict(format!("{} is taken already", path_text(path))));
    }
    slot.get_or_insert_with(|| Node::Leaf(leaf));
    Ok(())
}

fn place<'a, T>(dict: &'a mut IndexMap<Key, Node<T>>, segment: &PathSegment) -> Place<'a, T> {
    let key = match segment {
        PathSegment::Key(text) => Key::Str(text.clone()),
        PathSegment::Index(index) => Key::Int(*index),
    };
    Place::Entry(dict, key)
}

/// A place in the tree under construction that may not exist yet.
enum Place<'a, T> {
    Entry(&'a mut IndexMap<Key, Node<T>>, Key),
    Element(&'a mut BTreeMap<u64, Node<T>>, u64),
}

impl<'a, T> Place<'a, T> {
    fn is_taken(&self) -> bool {
        match self {
            Place::Entry(dict, key) => dict.contains_key(key),
            Place::Element(elements, index) => elements.contains_key(index),
        }
    }

    fn get_or_insert_with(self, make: impl FnOnce() -> Node<T>) -> &'a mut Node<T> {
        match self {
            Place::Entry(dict, key) => dict.entry(key).or_insert_with(make),
            Place::Element(elements, index) => elements.entry(index).or_insert_with(make),
        }
    }
}
