//! Flattening to dotted keys and back, by the rules of DCP, so that keys and paths are the same as PyTorch's:
//! dicts are always opened, lists only where a tensor, a dict or such a list is in them, tuples never.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use reshard_formats::{KeyPath, PathSegment, Value};

use crate::{Dict, Key, MAX_DEPTH, StateError, Tree};

/// The most list elements that may be invented for indices that no key names.
pub const MAX_LIST_GAPS: u64 = 1 << 16;

/// Which release's rules to flatten by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlattenRules {
    /// PyTorch 2.4 and later: every dict is opened.
    #[default]
    Current,
    /// PyTorch 2.3 and earlier: a dict without a tensor anywhere inside is one leaf.
    V2_3,
}

/// One leaf of a flattened tree.
#[derive(Clone, Debug)]
pub struct FlatLeaf<T> {
    /// Where it was.
    pub path: KeyPath,
    /// What it is. Not necessarily a tensor or a value: a list of plain values is one leaf too.
    pub leaf: Tree<T>,
}

/// A flattened tree: dotted key to leaf, in the order of the tree.
pub type Flat<T> = IndexMap<String, FlatLeaf<T>>;

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

/// A path for messages: `['a', 0, 'b.c']`.
pub fn path_text(path: &[PathSegment]) -> String {
    let parts: Vec<String> = path
        .iter()
        .map(|segment| match segment {
            PathSegment::Key(text) => format!("'{text}'"),
            PathSegment::Index(number) => number.to_string(),
        })
        .collect();
    format!("[{}]", parts.join(", "))
}

/// Flattens a state dict by the current rules.
pub fn flatten<T>(state: Dict<T>) -> Result<Flat<T>, StateError> {
    flatten_by(state, FlattenRules::Current)
}

/// Flattens a state dict by the rules of a release.
pub fn flatten_by<T>(state: Dict<T>, rules: FlattenRules) -> Result<Flat<T>, StateError> {
    let mut flat = Flat::new();
    let mut path = KeyPath::new();
    for (key, value) in state {
        path.push(PathSegment::Key(key.to_string()));
        visit(value, &mut path, rules, &mut flat)?;
        path.pop();
    }
    Ok(flat)
}

fn visit<T>(tree: Tree<T>, path: &mut KeyPath, rules: FlattenRules, out: &mut Flat<T>) -> Result<(), StateError> {
    if path.len() > MAX_DEPTH {
        return Err(StateError::TooDeep { limit: MAX_DEPTH });
    }
    // A container that came as a plain value obeys the same rules as one of the tree.
    let tree = match tree {
        // Tuples are leaves, and so is what is in them: it keeps its types.
        Tree::Value(value @ (Value::List(_) | Value::Dict(_) | Value::OrderedDict(_))) => Tree::from_value(value),
        other => other,
    };
    if is_leaf(&tree, rules) {
        let key = dotted(path);
        if let Some(first) = out.get(&key) {
            return Err(StateError::DuplicateKey { key, first: path_text(&first.path), second: path_text(path) });
        }
        out.insert(key, FlatLeaf { path: path.clone(), leaf: tree });
        return Ok(());
    }
    match tree {
        Tree::Dict(dict) => {
            for (key, value) in dict {
                path.push(PathSegment::Key(key.to_string()));
                visit(value, path, rules, out)?;
                path.pop();
            }
        }
        Tree::List(items) => {
            for (index, item) in (0_i64..).zip(items) {
                path.push(PathSegment::Index(index));
                visit(item, path, rules, out)?;
                path.pop();
            }
        }
        _ => {}
    }
    Ok(())
}

/// Whether flattening stops here.
pub fn is_leaf<T>(tree: &Tree<T>, rules: FlattenRules) -> bool {
    match (tree, rules) {
        (Tree::Dict(_), FlattenRules::Current) => false,
        (Tree::Dict(dict), FlattenRules::V2_3) => dict.values().all(|value| keeps_shut(value, rules)),
        (Tree::List(items), _) => items.iter().all(|item| keeps_shut(item, rules)),
        _ => true,
    }
}

/// Whether this element gives its container no reason to be opened.
fn keeps_shut<T>(element: &Tree<T>, rules: FlattenRules) -> bool {
    match element {
        Tree::Tensor(_) => false,
        Tree::Dict(_) | Tree::List(_) => is_leaf(element, rules),
        _ => true,
    }
}

/// Builds the nested tree from flattened leaves and their paths.
pub fn unflatten<T>(flat: Flat<T>) -> Result<Dict<T>, StateError> {
    unflatten_entries(flat.into_iter().map(|(key, leaf)| (key, leaf.path, leaf.leaf)))
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
