//! Keys that their text does not give back. Flattening turns every key of a dict into text and joins them by dots, so that
//! a number comes back as digits, a tuple as its text, and a key with a dot in it as two. What each of those was is noted
//! here beside the flattened tree, by the dotted place of what it leads to.

use indexmap::IndexMap;
use reshard_formats::Value;

use crate::tree::key_of;
use crate::{Dict, Key, Tree};

/// The keys of a tree that text alone does not give back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyTypes {
    by_place: IndexMap<String, Key>,
}

impl KeyTypes {
    /// Notes the keys below a dict that are no text. Enough where a path keeps keys apart.
    pub fn of<T>(dict: &Dict<T>) -> KeyTypes {
        let mut types = KeyTypes::default();
        types.note_dict("", dict, &|key| key.as_str().is_none());
        types
    }

    /// Whether text tells everything.
    pub fn is_empty(&self) -> bool {
        self.by_place.is_empty()
    }

    /// Notes more keys, of a dict at a place: those that are no text, and those whose text has dots in it.
    pub fn note_dotted<T>(&mut self, place: &str, dict: &Dict<T>) {
        self.note_dict(place, dict, &|key| key.as_str().is_none_or(|text| text.is_empty() || text.contains('.')));
    }

    fn note_dict<T>(&mut self, place: &str, dict: &Dict<T>, odd: &dyn Fn(&Key) -> bool) {
        for (key, value) in dict {
            let below = join(place, &key.to_string());
            if odd(key) {
                self.by_place.insert(below.clone(), key.clone());
            }
            self.note_tree(&below, value, odd);
        }
    }

    fn note_tree<T>(&mut self, place: &str, tree: &Tree<T>, odd: &dyn Fn(&Key) -> bool) {
        match tree {
            Tree::Dict(dict) => self.note_dict(place, dict, odd),
            Tree::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    self.note_tree(&join(place, &index.to_string()), item, odd);
                }
            }
            _ => {}
        }
    }

    /// Gives the keys below a dict their types back. Only keys that are text now change.
    pub fn restore<T>(&self, dict: Dict<T>) -> Dict<T> {
        if self.is_empty() { dict } else { self.restore_dict("", dict) }
    }

    fn restore_dict<T>(&self, place: &str, dict: Dict<T>) -> Dict<T> {
        dict.into_iter()
            .map(|(key, value)| {
                let below = join(place, &key.to_string());
                let value = self.restore_tree(&below, value);
                match (&key, self.by_place.get(&below)) {
                    (Key::Str(_), Some(typed)) => (typed.clone(), value),
                    _ => (key, value),
                }
            })
            .collect()
    }

    fn restore_tree<T>(&self, place: &str, tree: Tree<T>) -> Tree<T> {
        match tree {
            Tree::Dict(dict) => Tree::Dict(self.restore_dict(place, dict)),
            Tree::List(items) => {
                let items = items.into_iter().enumerate();
                Tree::List(items.map(|(index, item)| self.restore_tree(&join(place, &index.to_string()), item)).collect())
            }
            other => other,
        }
    }

    /// Splits the first key off a dotted rest below a place: the key, the place it leads to, and what is left. Of several
    /// noted keys that the rest may begin with the longest is taken.
    pub fn split_first<'a>(&self, place: &str, rest: &'a str) -> (Key, String, Option<&'a str>) {
        let dots = rest.match_indices('.').map(|(dot, _)| dot);
        let mut ends: Vec<usize> = dots.chain([rest.len()]).collect();
        let first = ends.first().copied().unwrap_or(rest.len());
        if self.is_empty() {
            ends.clear();
        }
        let noted = ends.into_iter().rev().find_map(|end| {
            let below = join(place, &rest[..end]);
            // What leads to the place may be one key with dots in it or the last of several.
            let key = self.by_place.get(&below).filter(|key| key.to_string() == rest[..end])?.clone();
            Some((key, below, end))
        });
        let (key, below, end) = noted.unwrap_or_else(|| (Key::from(&rest[..first]), join(place, &rest[..first]), first));
        (key, below, rest.get(end + 1..))
    }

    /// As one plain value: a tuple of pairs, which flattening leaves whole.
    pub fn to_value(&self) -> Value {
        let pair = |(place, key): (&String, &Key)| Value::Tuple(vec![Value::Str(place.clone()), key.to_value()]);
        Value::Tuple(self.by_place.iter().map(pair).collect())
    }

    /// Reads them back; None if it is not what [`KeyTypes::to_value`] makes.
    pub fn from_value(value: &Value) -> Option<KeyTypes> {
        let (Value::Tuple(pairs) | Value::List(pairs)) = value else { return None };
        let mut by_place = IndexMap::new();
        for pair in pairs {
            let (Value::Tuple(pair) | Value::List(pair)) = pair else { return None };
            let [Value::Str(place), key] = pair.as_slice() else { return None };
            by_place.insert(place.clone(), key_of(key.clone()));
        }
        Some(KeyTypes { by_place })
    }
}

fn join(place: &str, key: &str) -> String {
    if place.is_empty() { key.to_owned() } else { format!("{place}.{key}") }
}
