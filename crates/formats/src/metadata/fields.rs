//! Reading an object's fields by name, fast when a million objects have the same ones.

use super::error::MetadataError;
use super::types::ExtraFields;
use crate::pickle::{Document, GlobalId, Made, Node, Object, View};

/// The known fields of a class. A name is compared once; after that its node is recognised, because
/// a pickle refers to a string that it has written before.
pub(super) struct Fields<const N: usize> {
    names: [&'static str; N],
    nodes: [Node; N],
}

impl<const N: usize> Fields<N> {
    pub(super) fn new(names: [&'static str; N]) -> Self {
        Fields { names, nodes: [Node::ABSENT; N] }
    }

    /// Which field a key is; the field at `likely` is tried first.
    #[inline]
    fn position(&mut self, document: &Document<'_>, key: Node, likely: usize) -> Option<usize> {
        if likely < N && self.nodes[likely] == key {
            return Some(likely);
        }
        if let Some(found) = self.nodes.iter().position(|node| *node == key) {
            return Some(found);
        }
        let text = document.as_str(key)?;
        let found = self.names.iter().position(|name| *name == text)?;
        self.nodes[found] = key;
        Some(found)
    }

    /// The values of the known fields ([`Node::ABSENT`] where there is none); others go to `unknown`.
    #[inline]
    pub(super) fn read(
        &mut self,
        document: &Document<'_>,
        pairs: &[[Node; 2]],
        place: impl Fn() -> String,
        unknown: &mut ExtraFields,
    ) -> Result<[Node; N], MetadataError> {
        let mut values = [Node::ABSENT; N];
        for (i, [key, value]) in pairs.iter().enumerate() {
            match self.position(document, *key, i) {
                Some(field) if values[field] == Node::ABSENT => values[field] = *value,
                Some(field) => {
                    return Err(MetadataError::DuplicateKey { key: self.names[field].into(), place: place() });
                }
                None => unknown_field(document, *key, *value, &place, unknown)?,
            }
        }
        Ok(values)
    }
}

/// A field that every version of torch writes; absent is not zero, empty or None.
pub(super) fn required(node: Node, place: impl Fn() -> String, field: &'static str) -> Result<Node, MetadataError> {
    match node == Node::ABSENT {
        true => Err(MetadataError::MissingField { place: place(), field }),
        false => Ok(node),
    }
}

#[cold]
fn unknown_field(
    document: &Document<'_>,
    key: Node,
    value: Node,
    place: &impl Fn() -> String,
    unknown: &mut ExtraFields,
) -> Result<(), MetadataError> {
    let Some(name) = document.as_str(key) else {
        return Err(wrong_type(document, key, || format!("{}, name of a field", place()), "a str"));
    };
    if unknown.iter().any(|(known, _)| known == name) {
        return Err(MetadataError::DuplicateKey { key: name.into(), place: place() });
    }
    unknown.push((name.to_owned(), document.carry(value)?));
    Ok(())
}

/// The state dict of an instance of `class` that was made without arguments.
#[inline]
pub(super) fn state_of<'d>(document: &'d Document<'_>, node: Node, class: Option<GlobalId>) -> Option<&'d [[Node; 2]]> {
    let object = plain_instance(document, node, class)?;
    match object.state {
        // A class without fields has no state.
        None => Some(&[]),
        Some(state) => match document.view(state) {
            View::Dict(pairs) => Some(pairs),
            View::None => Some(&[]),
            _ => None,
        },
    }
}

/// An instance of `class`, made without arguments and neither list nor dict.
#[inline]
pub(super) fn plain_instance<'d>(document: &'d Document<'_>, node: Node, class: Option<GlobalId>) -> Option<Object<'d>> {
    let object = document.object(node)?;
    let plain = Some(object.class) == class
        && object.made != Made::NewWithKeywords
        && document.as_tuple(object.args).is_some_and(<[Node]>::is_empty)
        && object.items.is_empty()
        && object.pairs.is_empty();
    plain.then_some(object)
}

/// What a node is, for messages: an object by its class.
pub(super) fn describe(document: &Document<'_>, node: Node) -> String {
    match document.view(node) {
        View::Object(object) => {
            format!("an instance of `{}`", document.global(object.class).path())
        }
        View::Global(id) => format!("`{}`", document.global(id).path()),
        View::Int(value) => format!("the int {value}"),
        other => other.kind().to_owned(),
    }
}

#[cold]
pub(super) fn wrong_type(
    document: &Document<'_>,
    node: Node,
    place: impl Fn() -> String,
    expected: &'static str,
) -> MetadataError {
    MetadataError::Type { place: place(), expected, found: describe(document, node) }
}

/// A small table from nodes to numbers that forgets: a lookup costs the same whatever the file does.
pub(super) struct NodeCache {
    slots: Vec<(Node, u32)>,
}

const CACHE_BITS: u32 = 13;

impl NodeCache {
    pub(super) fn new() -> NodeCache {
        NodeCache { slots: vec![(Node::ABSENT, 0); 1 << CACHE_BITS] }
    }

    /// Nothing for a node that is absent: empty slots hold it.
    #[inline]
    pub(super) fn get(&self, node: Node) -> Option<u32> {
        match self.slots.get(node.spread(CACHE_BITS)) {
            Some(&(known, value)) if known == node && node != Node::ABSENT => Some(value),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn put(&mut self, node: Node, value: u32) {
        if let Some(slot) = self.slots.get_mut(node.spread(CACHE_BITS)) {
            *slot = (node, value);
        }
    }
}
