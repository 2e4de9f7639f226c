//! What a checkpoint holds against what a template asks for. The structure is the checkpoint's: where the template has an
//! empty container, None, or an opaque value, whatever the checkpoint holds there is taken as it was saved.

use indexmap::{IndexMap, IndexSet};
use reshard_formats::{KeyPath, PathSegment};

use crate::{Dict, Flat, FlattenRules, Key, StateError, Tree, dotted, flatten_by, is_leaf};

/// How the keys of a checkpoint meet a template. Every key of either is in exactly one list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateMatch {
    /// In both.
    pub matched: Vec<String>,
    /// Only in the checkpoint, at a place where the template leaves the content open (or holds one leaf where the
    /// checkpoint has a container): loaded with the checkpoint's structure.
    pub by_checkpoint: Vec<String>,
    /// In the template, but the checkpoint holds a whole container of it as one leaf: the checkpoint's leaf replaces it.
    pub replaced: Vec<String>,
    /// Asked for, not in the checkpoint.
    pub missing: Vec<String>,
    /// In the checkpoint, not asked for.
    pub unexpected: Vec<String>,
}

/// Compares a template with the keys and paths of a checkpoint.
pub fn match_template<'a, T: Clone>(
    template: &Dict<T>,
    checkpoint: impl IntoIterator<Item = (&'a str, &'a KeyPath)>,
    rules: FlattenRules,
) -> Result<TemplateMatch, StateError> {
    let wanted: Flat<T> = flatten_by(template.clone(), rules)?;
    let mut result = TemplateMatch::default();
    let mut seen: IndexSet<&str> = IndexSet::new();
    let mut opened: IndexSet<String> = IndexSet::new();
    for (key, path) in checkpoint {
        seen.insert(key);
        if wanted.contains_key(key) {
            result.matched.push(key.to_owned());
            continue;
        }
        match meets(template, path, rules) {
            Meeting::Open => result.by_checkpoint.push(key.to_owned()),
            Meeting::Leaf(prefix) => {
                opened.insert(prefix);
                result.by_checkpoint.push(key.to_owned());
            }
            Meeting::Container => result.by_checkpoint.push(key.to_owned()),
            Meeting::Nothing => result.unexpected.push(key.to_owned()),
        }
    }
    // A template key below a key that the checkpoint holds whole is not missing: the whole replaces it.
    for (key, leaf) in &wanted {
        if seen.contains(key.as_str()) {
            continue;
        }
        let whole = (1..leaf.path.len()).any(|length| seen.contains(dotted(&leaf.path[..length]).as_str()));
        if whole || opened.contains(key) {
            result.replaced.push(key.clone());
        } else {
            result.missing.push(key.clone());
        }
    }
    Ok(result)
}

enum Meeting {
    /// The template says nothing about what belongs there.
    Open,
    /// The path runs through a leaf of the template, whose key is given.
    Leaf(String),
    /// The path ends at a container of the template.
    Container,
    Nothing,
}

fn meets<T>(template: &Dict<T>, path: &[PathSegment], rules: FlattenRules) -> Meeting {
    let Some((first, rest)) = path.split_first() else {
        return Meeting::Nothing;
    };
    let text = dotted(std::slice::from_ref(first));
    let Some(mut current) = lookup(template, &text) else { return Meeting::Nothing };
    for (depth, segment) in rest.iter().enumerate() {
        let here = || dotted(&path[..=depth]);
        let next = match (current, segment) {
            (Tree::Dict(dict), _) if dict.is_empty() => return Meeting::Open,
            (tree, _) if is_leaf(tree, rules) => return Meeting::Leaf(here()),
            (Tree::Dict(dict), segment) => lookup(dict, &dotted(std::slice::from_ref(segment))),
            (Tree::List(items), PathSegment::Index(index)) => usize::try_from(*index).ok().and_then(|i| items.get(i)),
            (Tree::List(_), PathSegment::Key(_)) => return Meeting::Leaf(here()),
            _ => return Meeting::Leaf(here()),
        };
        match next {
            Some(tree) => current = tree,
            None => return Meeting::Nothing,
        }
    }
    Meeting::Container
}

/// The entry whose key has this text. Strings are found at once; other keys are few.
fn lookup<'a, T>(dict: &'a Dict<T>, text: &str) -> Option<&'a Tree<T>> {
    dict.get(&Key::from(text)).or_else(|| {
        let others = dict.iter().filter(|(key, _)| key.as_str().is_none());
        others.into_iter().find(|(key, _)| key.to_string() == text).map(|(_, tree)| tree)
    })
}

/// The nested structure of a checkpoint itself, with a leaf for every key that `leaf` gives one for.
pub fn structure_of_checkpoint<'a, T>(
    entries: impl IntoIterator<Item = (&'a str, &'a KeyPath)>,
    mut leaf: impl FnMut(&str) -> Option<Tree<T>>,
) -> Result<Dict<T>, StateError> {
    let chosen = entries
        .into_iter()
        .filter_map(|(key, path)| leaf(key).map(|tree| (key.to_owned(), path.clone(), tree)))
        .collect::<Vec<_>>();
    crate::unflatten_entries(chosen)
}

/// Presence of keys by name, for callers that only compare: missing and unexpected keys of two key sets, in order.
pub fn compare_keys<V, W>(wanted: &IndexMap<String, V>, found: &IndexMap<String, W>) -> (Vec<String>, Vec<String>) {
    let missing = wanted.keys().filter(|key| !found.contains_key(*key)).cloned().collect();
    let unexpected = found.keys().filter(|key| !wanted.contains_key(*key)).cloned().collect();
    (missing, unexpected)
}
