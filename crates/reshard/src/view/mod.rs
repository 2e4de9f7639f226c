//! Views: a checkpoint seen through rules.
//!
//! A view makes a catalog from a catalog. Renaming changes keys, stacking adds a coordinate, splitting takes a box of a box,
//! joining puts boxes beside each other, transposing orders strides anew, padding adds a box with nothing behind it. No byte
//! is moved or read: whoever loads, converts or compares reads exactly the bytes of what it wants, from where they are.
//! [`Checkpoint::through`] gives a checkpoint like any other, and so views can be put behind each other.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::view::View;
//!
//! let view = View::parse_rule(r#"{ from = "model.{name...}", to = "{name...}" }"#, &Default::default())?;
//! let checkpoint = reshard::Checkpoint::open(path)?.through(&view)?;
//! assert!(checkpoint.keys().any(|key| key == "embed.weight"));
//! # Ok::<(), reshard::Error>(())
//! ```

mod apply;
mod family;
mod parse;
mod pattern;
mod recipes;
mod rules;
mod steps;
mod tensor;

use std::collections::{BTreeMap, BTreeSet};

use reshard_formats::Value;

use self::apply::{Applied, applied};
pub use self::apply::{Made, RuleReport, ViewReport};
pub use self::recipes::{Recipe, recipes};
use self::rules::Rules;
use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue, ValuePlace};
use crate::error::{Error, Result};

/// Rules by which a checkpoint is seen.
#[derive(Debug, Clone)]
pub struct View {
    origin: String,
    rules: Rules,
}

impl View {
    /// Reads rules from TOML. `origin` is what the text is called in messages: a file's name. `parameters` are values for the
    /// numbers that the rules leave open.
    pub fn parse(text: &str, origin: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        Ok(View { origin: origin.to_owned(), rules: parse::rules(text, origin, parameters)? })
    }

    /// One rule, written as an inline table: `{ from = "a.{x}", to = "b.{x}", steps = [{ transpose = [0, 1] }] }`.
    pub fn parse_rule(text: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        View::parse(&format!("rule = [{text}]"), "the rule", parameters)
    }

    /// Rules that come with reshard, by name; [`recipes`] lists them.
    pub fn recipe(name: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        match recipes().iter().find(|recipe| recipe.name == name) {
            Some(recipe) => View::parse(recipe.text, &format!("recipe {name}"), parameters),
            None => {
                let known: Vec<&str> = recipes().iter().map(|recipe| recipe.name).collect();
                Err(Error::invalid(format!("{name:?} is neither a file nor a recipe; recipes: {}", known.join(", "))))
            }
        }
    }

    /// Rules by what a person writes: one rule as an inline table, the name of a file, or that of a recipe.
    pub fn find(what: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        if what.trim_start().starts_with('{') {
            return View::parse_rule(what, parameters);
        }
        let path = std::path::Path::new(what);
        if path.is_file() {
            let text = std::fs::read_to_string(path);
            let text = text.map_err(|error| Error::invalid(format!("cannot read rules from {what}: {error}")))?;
            return View::parse(&text, what, parameters);
        }
        if what.contains('/') || what.ends_with(".toml") {
            return Err(Error::invalid(format!("the file of rules {what} does not exist")));
        }
        View::recipe(what, parameters)
    }

    /// The rules that undo these; an error names the first that nothing undoes.
    pub fn reversed(&self) -> Result<View> {
        let rules = self.rules.reversed().map_err(|why| Error::invalid(format!("{}: {why}", self.origin)))?;
        Ok(View { origin: format!("{}, reversed", self.origin), rules })
    }

    /// What the view would make of a checkpoint, from metadata alone.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<ViewReport> {
        Ok(self.applied(checkpoint)?.report)
    }

    fn applied(&self, checkpoint: &Checkpoint) -> Result<Applied> {
        let wrong = |why: String| Error::invalid(format!("{} on {}: {why}", self.origin, checkpoint.path()));
        applied(checkpoint.catalog(), &self.rules).map_err(wrong)
    }
}

impl Checkpoint {
    /// The checkpoint seen through a view. Every rule is checked against the metadata before anything is read, and then
    /// nothing is but what has become one and must be the same, such as step counters.
    pub fn through(self, view: &View) -> Result<Checkpoint> {
        let Applied { mut entries, same, names, group_lists, .. } = view.applied(&self)?;
        for keys in &same {
            self.check_same(view, keys)?;
        }
        let mut groups = Groups { names: &names, homes: BTreeMap::new() };
        for (number, key) in group_lists.into_iter().enumerate() {
            if let Some(entry) = entries.get_mut(&key)
                && let LoadedValue::Plain(value) = self.read_value(&key)?
            {
                let what = |why: String| Error::invalid(format!("{} on {}: {key:?}: {why}", view.origin, self.path));
                entry.kind = CatalogKind::Value(ValuePlace::Inline(groups.renamed(number, value).map_err(what)?));
            }
        }
        Ok(self.seen_as(entries))
    }

    /// Compares what became one.
    fn check_same(&self, view: &View, keys: &[String]) -> Result<()> {
        let Some((first, others)) = keys.split_first() else { return Ok(()) };
        let content = |key: &str| -> Result<(Vec<u8>, Option<LoadedValue>)> {
            Ok(match &self.entry(key)?.kind {
                CatalogKind::Tensor(_) => (self.read_whole(key)?, None),
                CatalogKind::Value(_) => (Vec::new(), Some(self.read_value(key)?)),
            })
        };
        let expected = content(first)?;
        for other in others {
            if content(other)? != expected {
                let what = format!("{first:?} and {other:?} become one, and do not hold the same");
                return Err(Error::invalid(format!("{} on {}: {what}", view.origin, self.path)));
            }
        }
        Ok(())
    }
}

/// The parameters of an optimizer's groups, under their new names.
struct Groups<'n> {
    names: &'n BTreeMap<String, BTreeSet<String>>,
    /// The group of each new name: one tensor cannot be of two.
    homes: BTreeMap<String, usize>,
}

impl Groups<'_> {
    /// A list of groups, or the names of the parameters of group `number`.
    fn renamed(&mut self, number: usize, value: Value) -> Result<Value, String> {
        let Value::List(items) = value else { return Ok(value) };
        if !items.iter().any(|item| matches!(item, Value::Dict(_))) {
            return self.params(number, items);
        }
        let mut groups = Vec::with_capacity(items.len());
        for (number, group) in items.into_iter().enumerate() {
            let Value::Dict(pairs) = group else {
                groups.push(group);
                continue;
            };
            let mut renamed = Vec::with_capacity(pairs.len());
            for (key, value) in pairs {
                renamed.push(match value {
                    Value::List(params) if text(&key) == Some("params") => (key, self.params(number, params)?),
                    other => (key, other),
                });
            }
            groups.push(Value::Dict(renamed));
        }
        Ok(Value::List(groups))
    }

    fn params(&mut self, number: usize, params: Vec<Value>) -> Result<Value, String> {
        let mut renamed = Vec::new();
        for param in params {
            let Some(new) = text(&param).and_then(|name| self.names.get(name)) else {
                renamed.push(param);
                continue;
            };
            for name in new {
                match self.homes.insert(name.clone(), number) {
                    None => renamed.push(Value::from(name.as_str())),
                    Some(other) if other == number => {}
                    Some(_) => return Err(format!("{name:?} is made from parameters of several groups")),
                }
            }
        }
        Ok(Value::List(renamed))
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Str(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_name_the_new_parameters_once_and_none_is_of_two() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let names = BTreeMap::from([
            ("e.0".to_owned(), set(&["e"])),
            ("e.1".to_owned(), set(&["e"])),
            ("qk".to_owned(), set(&["k", "q"])),
        ]);
        let list = |names: &[&str]| Value::List(names.iter().map(|name| Value::from(*name)).collect());
        let mut groups = Groups { names: &names, homes: BTreeMap::new() };
        assert_eq!(groups.renamed(0, list(&["e.0", "e.1", "qk", "other"])), Ok(list(&["e", "k", "q", "other"])));
        assert!(groups.renamed(1, list(&["e.1"])).unwrap_err().contains("several groups"));
        let group = |params: Value| Value::List(vec![Value::Dict(vec![(Value::from("params"), params)])]);
        let mut groups = Groups { names: &names, homes: BTreeMap::new() };
        assert_eq!(groups.renamed(0, group(list(&["e.0", "e.1"]))), Ok(group(list(&["e"]))));
    }
}
