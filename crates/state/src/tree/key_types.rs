//! Keys that their text does not give back. Flattening turns every key of a dict into text and joins them by dots, so that
//! a number comes back as digits, a tuple as its text, and a key with a dot in it as two. What each of those was is noted
//! here beside the flattened tree, by the dotted place of what it leads to. So are dicts of which flattening leaves nothing:
//! empty ones, and containers that hold only such.

use indexmap::IndexMap;
use reshard_formats::Value;

use super::key_of;
use crate::{Dict, Key, Tree};

/// The keys of a tree that text alone does not give back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyTypes {
    by_place: IndexMap<String, Key>,
    /// Containers without any leaf.
    empty: IndexMap<String, Value>,
}

impl KeyTypes {
    /// Notes the keys below a dict that are no text. Enough where a path keeps keys apart.
    pub fn of<T>(dict: &Dict<T>) -> KeyTypes {
        let mut types = KeyTypes::default();
        types.note_dict("", dict, &|key| key.as_str().is_none());
        types
    }

    /// Notes what flattening does not give back of a dict whose containers are values: keys that are no text, and containers
    /// without a leaf.
    pub fn note_values<T>(&mut self, place: &str, dict: &Dict<T>) {
        self.note_dict(place, dict, &|key| key.as_str().is_none());
        for (key, value) in dict {
            self.note_empty(&join(place, &key.to_string()), value);
        }
    }

    fn note_empty<T>(&mut self, place: &str, tree: &Tree<T>) {
        if let Some(value) = without_leaves(tree) {
            self.empty.insert(place.to_owned(), value);
            return;
        }
        match tree {
            Tree::Dict(dict) => {
                for (key, value) in dict {
                    self.note_empty(&join(place, &key.to_string()), value);
                }
            }
            Tree::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    self.note_empty(&join(place, &index.to_string()), item);
                }
            }
            _ => {}
        }
    }

    /// Whether text tells everything.
    pub fn is_empty(&self) -> bool {
        self.by_place.is_empty() && self.empty.is_empty()
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

    /// Gives the keys below a dict their types back, and puts containers without a leaf where they were. Only keys that are
    /// text now change.
    pub fn restore<T>(&self, dict: Dict<T>) -> Dict<T> {
        if self.is_empty() {
            return dict;
        }
        let mut dict = self.restore_dict("", dict);
        for (place, value) in &self.empty {
            self.put_in_dict(&mut dict, place, place, value);
        }
        dict
    }

    /// Puts a container at a dotted place below a dict, unless something is there.
    fn put_in_dict<T>(&self, dict: &mut Dict<T>, whole: &str, rest: &str, value: &Value) {
        let leads = |key: &&Key| {
            let text = key.to_string();
            rest == text || rest.strip_prefix(text.as_str()).is_some_and(|after| after.starts_with('.'))
        };
        let Some(key) = dict.keys().filter(leads).max_by_key(|key| key.to_string().len()).cloned() else {
            let key = self.by_place.get(whole).cloned().unwrap_or_else(|| Key::from(rest));
            dict.insert(key, containers(value));
            return;
        };
        let after = rest.get(key.to_string().len() + 1..);
        if let (Some(after), Some(below)) = (after, dict.get_mut(&key)) {
            self.put_below(below, whole, after, value);
        }
    }

    fn put_below<T>(&self, tree: &mut Tree<T>, whole: &str, rest: &str, value: &Value) {
        match tree {
            Tree::Dict(dict) => self.put_in_dict(dict, whole, rest, value),
            Tree::List(items) => {
                let (index, after) = rest.split_once('.').map_or((rest, None), |(index, after)| (index, Some(after)));
                let Ok(index) = index.parse::<usize>() else { return };
                let length = items.len();
                match (items.get_mut(index), after) {
                    (Some(item), Some(after)) => self.put_below(item, whole, after, value),
                    // What stands for a gap.
                    (Some(item @ Tree::Value(Value::None)), None) => *item = containers(value),
                    (None, None) if index == length => items.push(containers(value)),
                    _ => {}
                }
            }
            _ => {}
        }
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
        let pair = |place: &String, value: Value| Value::Tuple(vec![Value::Str(place.clone()), value]);
        let keys = self.by_place.iter().map(|(place, key)| pair(place, key.to_value()));
        let empty = self.empty.iter().map(|(place, value)| pair(place, value.clone()));
        Value::Tuple(keys.chain(empty).collect())
    }

    /// Reads them back; None if it is not what [`KeyTypes::to_value`] makes.
    pub fn from_value(value: &Value) -> Option<KeyTypes> {
        let (Value::Tuple(pairs) | Value::List(pairs)) = value else { return None };
        let mut by_place = IndexMap::new();
        let mut empty = IndexMap::new();
        for pair in pairs {
            let (Value::Tuple(pair) | Value::List(pair)) = pair else { return None };
            let [Value::Str(place), key] = pair.as_slice() else { return None };
            match key {
                // Neither can be a key.
                Value::Dict(_) | Value::List(_) => drop(empty.insert(place.clone(), key.clone())),
                key => drop(by_place.insert(place.clone(), key_of(key.clone()))),
            }
        }
        Some(KeyTypes { by_place, empty })
    }
}

/// A container of which flattening leaves nothing, as a value. A list without dicts is a leaf itself.
fn without_leaves<T>(tree: &Tree<T>) -> Option<Value> {
    match tree {
        Tree::Dict(dict) => {
            let below = dict.iter().map(|(key, value)| Some((key.to_value(), without_leaves(value)?)));
            below.collect::<Option<Vec<_>>>().map(Value::Dict)
        }
        Tree::List(items) if !items.is_empty() => items.iter().map(without_leaves).collect::<Option<Vec<_>>>().map(Value::List),
        _ => None,
    }
}

/// The other way.
fn containers<T>(value: &Value) -> Tree<T> {
    match value {
        Value::Dict(entries) => Tree::Dict(entries.iter().map(|(key, value)| (key_of(key.clone()), containers(value))).collect()),
        Value::List(items) => Tree::List(items.iter().map(containers).collect()),
        other => Tree::Value(other.clone()),
    }
}

fn join(place: &str, key: &str) -> String {
    if place.is_empty() { key.to_owned() } else { format!("{place}.{key}") }
}
