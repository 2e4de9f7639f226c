//! Changing trees without touching tensors: choosing leaves, renaming keys, moving prefixes, merging several trees.

use indexmap::IndexMap;
use reshard_formats::{KeyPath, PathSegment};

use crate::error::MergeConflict;
use crate::flatten::path_text;
use crate::{Dict, Flat, FlatLeaf, StateError, Tree, dotted};

/// Keeps the leaves for which `keep` says so.
pub fn filter<T>(flat: Flat<T>, mut keep: impl FnMut(&str, &FlatLeaf<T>) -> bool) -> Flat<T> {
    flat.into_iter().filter(|(key, leaf)| keep(key, leaf)).collect()
}

/// New names for flattened keys: whole keys first, then the longest prefix that fits. A prefix ends where a dot is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Renames {
    exact: IndexMap<String, String>,
    prefixes: Vec<(String, String)>,
}

impl Renames {
    /// No renames.
    pub fn new() -> Renames {
        Renames::default()
    }

    /// Adds a new name for one key.
    #[must_use]
    pub fn key(mut self, from: &str, to: &str) -> Renames {
        self.exact.insert(from.to_owned(), to.to_owned());
        self
    }

    /// Moves everything below one prefix to another; an empty one stands for the root.
    #[must_use]
    pub fn prefix(mut self, from: &str, to: &str) -> Renames {
        self.prefixes.push((from.to_owned(), to.to_owned()));
        self
    }

    /// The new name of a key.
    pub fn apply(&self, key: &str) -> String {
        if let Some(to) = self.exact.get(key) {
            return to.clone();
        }
        let best = self.prefixes.iter().filter_map(|(from, to)| Some((from.len(), to, below(key, from)?)));
        match best.max_by_key(|(length, ..)| *length) {
            Some((_, to, rest)) => join(to, rest),
            None => key.to_owned(),
        }
    }

    /// Renames every leaf, paths included. Two leaves with one name are an error that names both.
    pub fn apply_to<T>(&self, flat: Flat<T>) -> Result<Flat<T>, StateError> {
        let mut renamed: Flat<T> = Flat::with_capacity(flat.len());
        for (key, mut leaf) in flat {
            let to = self.apply(&key);
            if to != key {
                leaf.path = renamed_path(&leaf.path, &key, &to);
            }
            if let Some(first) = renamed.get(&to) {
                let (first, second) = (path_text(&first.path), path_text(&leaf.path));
                return Err(StateError::DuplicateKey { key: to, first, second });
            }
            renamed.insert(to, leaf);
        }
        Ok(renamed)
    }
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

/// The path of a renamed key. Names contain dots themselves, so the new key alone does not say where a segment ends:
/// segments that the old and new key share at the front and at the back stay, what is between becomes one segment.
fn renamed_path(path: &[PathSegment], old: &str, new: &str) -> KeyPath {
    let mut front = 0;
    let (mut old_rest, mut new_rest) = (old, new);
    while front + 1 < path.len() {
        let text = dotted(&path[front..=front]);
        match (below(old_rest, &text), below(new_rest, &text)) {
            (Some(old_after), Some(new_after)) if !new_after.is_empty() => {
                (old_rest, new_rest) = (old_after, new_after);
                front += 1;
            }
            _ => break,
        }
    }
    let mut back = path.len();
    while back > front + 1 {
        let text = dotted(&path[back - 1..back]);
        let shorter = new_rest.strip_suffix(&text).and_then(|rest| rest.strip_suffix('.'));
        match shorter {
            Some(rest) if !rest.is_empty() => {
                new_rest = rest;
                back -= 1;
            }
            _ => break,
        }
    }
    let mut renamed = path[..front].to_vec();
    renamed.push(PathSegment::Key(new_rest.to_owned()));
    renamed.extend_from_slice(&path[back..]);
    renamed
}

/// Merges named trees into one. Dicts are merged entry by entry; anything else that is in two trees must be the same by
/// `same`, and all places where it is not are named in one error.
pub fn merge<T>(
    trees: impl IntoIterator<Item = (String, Dict<T>)>,
    same: impl Fn(&T, &T) -> bool,
) -> Result<Dict<T>, StateError> {
    let mut merged = Dict::new();
    // Who brought a dotted path first; every prefix of it is looked up from the longest.
    let mut owners: Vec<(String, Dict<()>)> = Vec::new();
    let mut conflicts = Vec::new();
    for (name, tree) in trees {
        let outline: Dict<()> = outline(&tree);
        merge_into(&mut merged, tree, &mut KeyPath::new(), &same, &mut |path| {
            let first = owners.iter().find(|(_, owned)| holds(owned, path)).map(|(name, _)| name.clone());
            conflicts.push(MergeConflict { path: dotted(path), first: first.unwrap_or_default(), second: name.clone() });
        });
        owners.push((name, outline));
    }
    if conflicts.is_empty() { Ok(merged) } else { Err(StateError::MergeConflicts { conflicts }) }
}

fn outline<T>(tree: &Dict<T>) -> Dict<()> {
    tree.iter()
        .map(|(key, value)| {
            let value = match value {
                Tree::Dict(dict) => Tree::Dict(outline(dict)),
                _ => Tree::Tensor(()),
            };
            (key.clone(), value)
        })
        .collect()
}

fn holds(tree: &Dict<()>, path: &[PathSegment]) -> bool {
    let Some((first, rest)) = path.split_first() else {
        return true;
    };
    let text = dotted(std::slice::from_ref(first));
    tree.iter().any(|(key, value)| {
        key.to_string() == text
            && match value {
                Tree::Dict(dict) => holds(dict, rest),
                _ => true,
            }
    })
}

fn merge_into<T>(
    target: &mut Dict<T>,
    source: Dict<T>,
    path: &mut KeyPath,
    same: &impl Fn(&T, &T) -> bool,
    conflict: &mut impl FnMut(&[PathSegment]),
) {
    for (key, value) in source {
        path.push(PathSegment::Key(key.to_string()));
        match (target.get_mut(&key), value) {
            (Some(Tree::Dict(into)), Tree::Dict(from)) => merge_into(into, from, path, same, conflict),
            (Some(existing), value) => {
                if !existing.same_as(&value, same) {
                    conflict(path);
                }
            }
            (None, value) => {
                target.insert(key, value);
            }
        }
        path.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(path: &[&str]) -> KeyPath {
        path.iter().map(|text| PathSegment::Key((*text).to_owned())).collect()
    }

    #[test]
    fn a_prefix_ends_at_a_dot() {
        let renames = Renames::new().prefix("model.layer", "model.block").prefix("", "old");
        assert_eq!(renames.apply("model.layer.0"), "model.block.0");
        assert_eq!(renames.apply("model.layer"), "model.block");
        assert_eq!(renames.apply("model.layers.0"), "old.model.layers.0");
    }

    #[test]
    fn a_whole_key_goes_before_a_prefix_and_the_longest_prefix_wins() {
        let renames = Renames::new().prefix("a", "x").prefix("a.b", "y").key("a.b.c", "z");
        assert_eq!(renames.apply("a.b.c"), "z");
        assert_eq!(renames.apply("a.b.d"), "y.d");
        assert_eq!(renames.apply("a.c"), "x.c");
    }

    #[test]
    fn a_renamed_path_keeps_the_segments_that_stay() {
        let path = keys(&["optim", "state", "layers.0.weight", "exp_avg"]);
        let renamed = renamed_path(&path, "optim.state.layers.0.weight.exp_avg", "optim.state.blocks.0.weight.exp_avg");
        assert_eq!(renamed, keys(&["optim", "state", "blocks.0.weight", "exp_avg"]));
        let path = keys(&["model", "layers.0.weight"]);
        assert_eq!(renamed_path(&path, "model.layers.0.weight", "model.blocks.0.weight"), keys(&["model", "blocks.0.weight"]));
        assert_eq!(dotted(&renamed_path(&keys(&["a", "b"]), "a.b", "c")), "c");
    }
}
