//! A pickled object with tensors in it, as a tree: what a whole `.pt` file holds.

use crate::Value;

/// Containers down to tensors and plain values. `T` is what is known of a tensor: where it is stored when
/// reading, what it is when writing.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Tree<T> {
    /// A tensor.
    Tensor(T),
    /// Anything without tensors inside.
    Value(Value),
    /// A dict with a tensor somewhere inside.
    Dict(Vec<(Value, Tree<T>)>),
    /// A `collections.OrderedDict` with a tensor somewhere inside.
    OrderedDict(Vec<(Value, Tree<T>)>),
    /// A list with a tensor somewhere inside.
    List(Vec<Tree<T>>),
    /// A tuple with a tensor somewhere inside.
    Tuple(Vec<Tree<T>>),
    /// An object of a class that is not known to be data; it was not looked into.
    Opaque {
        /// The class, with its module.
        class: String,
    },
}

/// A leaf of a [`Tree`] with the path of keys and indices that leads to it.
pub type TreeLeaf<'t, T> = (Vec<Value>, &'t Tree<T>);

impl<T> Tree<T> {
    /// All tensors, plain values and opaque objects, in order, each with its path.
    ///
    /// A plain value is one leaf however much it contains.
    pub fn leaves(&self) -> Vec<TreeLeaf<'_, T>> {
        let mut leaves = Vec::new();
        let mut path = Vec::new();
        self.collect(&mut path, &mut leaves);
        leaves
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> Vec<&T> {
        let mut tensors = Vec::new();
        self.visit(&mut |tensor| tensors.push(tensor));
        tensors
    }

    fn visit<'t>(&'t self, found: &mut impl FnMut(&'t T)) {
        match self {
            Tree::Tensor(tensor) => found(tensor),
            Tree::Dict(pairs) | Tree::OrderedDict(pairs) => {
                pairs.iter().for_each(|(_, below)| below.visit(found));
            }
            Tree::List(items) | Tree::Tuple(items) => {
                items.iter().for_each(|below| below.visit(found));
            }
            Tree::Value(_) | Tree::Opaque { .. } => {}
        }
    }

    fn collect<'t>(&'t self, path: &mut Vec<Value>, leaves: &mut Vec<TreeLeaf<'t, T>>) {
        match self {
            Tree::Dict(pairs) | Tree::OrderedDict(pairs) => {
                for (key, below) in pairs {
                    path.push(key.clone());
                    below.collect(path, leaves);
                    path.pop();
                }
            }
            Tree::List(items) | Tree::Tuple(items) => {
                for (index, below) in items.iter().enumerate() {
                    path.push(Value::from(index as i64));
                    below.collect(path, leaves);
                    path.pop();
                }
            }
            Tree::Tensor(_) | Tree::Value(_) | Tree::Opaque { .. } => {
                leaves.push((path.clone(), self));
            }
        }
    }
}
