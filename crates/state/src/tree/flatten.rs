//! Flattening to dotted keys, by the rules of DCP, so that keys and paths are the same as PyTorch's: dicts are always opened,
//! lists only where a tensor, a dict or such a list is in them, tuples never.

use indexmap::IndexMap;
use reshard_formats::{KeyPath, PathSegment, Value};

use super::paths::path_text;
use crate::{Dict, MAX_DEPTH, StateError, Tree, dotted};

/// One leaf of a flattened tree.
#[derive(Clone, Debug)]
pub struct FlattenedLeaf<T> {
    /// Where it was.
    pub path: KeyPath,
    /// What it is. Not necessarily a tensor or a value: a list of plain values is one leaf too.
    pub leaf: Tree<T>,
}

/// A flattened tree: dotted key to leaf, in the order of the tree.
pub type Flattened<T> = IndexMap<String, FlattenedLeaf<T>>;

/// Flattens a state dict.
pub fn flatten<T>(state: Dict<T>) -> Result<Flattened<T>, StateError> {
    let mut flat = Flattened::new();
    let mut path = KeyPath::new();
    for (key, value) in state {
        path.push(PathSegment::Key(key.to_string()));
        visit(value, &mut path, &mut flat)?;
        path.pop();
    }
    Ok(flat)
}

fn visit<T>(tree: Tree<T>, path: &mut KeyPath, out: &mut Flattened<T>) -> Result<(), StateError> {
    if path.len() > MAX_DEPTH {
        return Err(StateError::TooDeep { limit: MAX_DEPTH });
    }
    // A container that came as a plain value obeys the same rules as one of the tree.
    let tree = match tree {
        // Tuples are leaves, and so is what is in them: it keeps its types.
        Tree::Value(value @ (Value::List(_) | Value::Dict(_) | Value::OrderedDict(_))) => Tree::from_value(value),
        other => other,
    };
    if is_leaf(&tree) {
        let key = dotted(path);
        if let Some(first) = out.get(&key) {
            return Err(StateError::DuplicateKey { key, first: path_text(&first.path), second: path_text(path) });
        }
        out.insert(key, FlattenedLeaf { path: path.clone(), leaf: tree });
        return Ok(());
    }
    match tree {
        Tree::Dict(dict) => {
            for (key, value) in dict {
                path.push(PathSegment::Key(key.to_string()));
                visit(value, path, out)?;
                path.pop();
            }
        }
        Tree::List(items) => {
            for (index, item) in (0_i64..).zip(items) {
                path.push(PathSegment::Index(index));
                visit(item, path, out)?;
                path.pop();
            }
        }
        _ => {}
    }
    Ok(())
}

/// Whether flattening stops here.
fn is_leaf<T>(tree: &Tree<T>) -> bool {
    match tree {
        Tree::Dict(_) => false,
        Tree::List(items) => items.iter().all(keeps_shut),
        _ => true,
    }
}

/// Whether this element gives its container no reason to be opened.
fn keeps_shut<T>(element: &Tree<T>) -> bool {
    match element {
        Tree::Tensor(_) => false,
        Tree::Dict(_) | Tree::List(_) => is_leaf(element),
        _ => true,
    }
}
