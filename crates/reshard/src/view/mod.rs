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

mod adapter;
mod apply;
mod family;
mod parse;
mod pattern;
mod recipes;
mod rules;
mod slots;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;

use reshard_formats::Value;

use self::adapter::Adapter;
use self::apply::{Applied, applied};
pub use self::apply::{Made, RuleReport, ViewReport};
pub use self::recipes::{Recipe, recipes};
use self::rules::Rules;
use crate::checkpoint::{Catalog, CatalogKind, Checkpoint, LoadedValue, ValueLocation, Weights};
use crate::error::{Error, Result};

/// Rules by which a checkpoint is seen.
#[derive(Debug, Clone)]
pub struct View {
    origin: String,
    rules: Rules,
    /// A view that is an adapter has no rules.
    adapter: Option<Adapter>,
}

impl View {
    /// Reads rules from TOML. `origin` is what the text is called in messages: a file's name. `parameters` are values for the
    /// numbers that the rules leave open.
    pub fn parse(text: &str, origin: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        Ok(View { origin: origin.to_owned(), rules: parse::rules(text, origin, parameters)?, adapter: None })
    }

    /// One rule, written as an inline table: `{ from = "a.{x}", to = "b.{x}", steps = [{ transpose = [0, 1] }] }`.
    pub fn parse_rule(text: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        View::parse(&format!("rule = [{text}]"), "the rule", parameters)
    }

    /// Rules that come with reshard, by name; [`recipes`] lists them.
    pub fn recipe(name: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        View::parse(recipe(name)?.text, &format!("recipe {name}"), parameters)
    }

    /// A LoRA adapter that PEFT wrote, by the address of its folder: the base is seen with the adapter's updates added.
    pub fn adapter(path: &str) -> View {
        let adapter = Adapter::new(path);
        View { origin: adapter.origin(), rules: Rules::default(), adapter: Some(adapter) }
    }

    /// A view by what a person writes: one rule as an inline table, the name of a file of rules, the folder of a LoRA adapter, or
    /// the name of a recipe.
    pub fn find(what: &str, parameters: &BTreeMap<String, i64>) -> Result<View> {
        Written::read(what)?.view(parameters)
    }

    /// Views that are to be applied one after the other, each with those of the parameters that it has. One that none has is an
    /// error.
    pub fn find_all<S: AsRef<str>>(all: &[S], parameters: &BTreeMap<String, i64>) -> Result<Vec<View>> {
        let written = all.iter().map(|what| Written::read(what.as_ref())).collect::<Result<Vec<_>>>()?;
        if let [only] = written.as_slice() {
            return Ok(vec![only.view(parameters)?]);
        }
        let known: Vec<Vec<String>> = written.iter().map(Written::parameters).collect();
        if let Some(unknown) = parameters.keys().find(|name| !known.iter().any(|known| known.contains(name))) {
            let known: Vec<&str> = known.iter().flatten().map(String::as_str).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            return Err(Error::invalid(format!("no view has a parameter {unknown:?}; parameters: {known}")));
        }
        let own = |known: &Vec<String>| known.iter().filter_map(|name| Some((name.clone(), *parameters.get(name)?))).collect();
        written.iter().zip(&known).map(|(written, known)| written.view(&own(known))).collect()
    }

    /// The rules that undo these; an error names the first that nothing undoes.
    pub fn reversed(&self) -> Result<View> {
        if self.adapter.is_some() {
            return Err(Error::invalid(format!("{} cannot be reversed: nothing takes a sum apart; keep the base", self.origin)));
        }
        let rules = self.rules.reversed().map_err(|why| Error::invalid(format!("{}: {why}", self.origin)))?;
        Ok(View { origin: format!("{}, reversed", self.origin), rules, adapter: None })
    }

    /// What the view would make of a checkpoint, from metadata alone.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<ViewReport> {
        if let Some(adapter) = &self.adapter {
            return Ok(adapter.merged(checkpoint)?.report);
        }
        Ok(self.applied(checkpoint)?.report)
    }

    fn applied(&self, checkpoint: &Checkpoint) -> Result<Applied> {
        let wrong = |why: String| Error::invalid(format!("{} on {}: {why}", self.origin, checkpoint.path()));
        let Some(dtype) = self.rules.dequantise else { return applied(checkpoint.catalog(), &self.rules).map_err(wrong) };
        let weights = checkpoint.scaled_weights();
        let catalog = checkpoint.catalog().dequantised(weights, dtype).map_err(wrong)?;
        let mut applied = applied(&catalog, &self.rules).map_err(wrong)?;
        applied.report.rules.insert(0, dequantised(&catalog, weights));
        Ok(applied)
    }
}

/// What a person wrote for a view, as text.
enum Written {
    Rules { text: String, origin: String },
    Adapter(String),
}

impl Written {
    fn read(what: &str) -> Result<Written> {
        if what.trim_start().starts_with('{') {
            return Ok(Written::Rules { text: format!("rule = [{what}]"), origin: "the rule".to_owned() });
        }
        let path = std::path::Path::new(what);
        if path.is_file() {
            let unread = |error: std::io::Error| Error::invalid(format!("cannot read rules from {what}: {error}"));
            let mut text = String::new();
            // One byte more than rules have says that there are more.
            let most = parse::MOST_BYTES as u64 + 1;
            std::fs::File::open(path).and_then(|file| file.take(most).read_to_string(&mut text)).map_err(unread)?;
            return Ok(Written::Rules { text, origin: what.to_owned() });
        }
        if path.join(adapter::CONFIG).is_file() {
            return Ok(Written::Adapter(what.to_owned()));
        }
        if path.is_dir() {
            let hint = format!("a folder is a view when it holds a LoRA adapter, with {}", adapter::CONFIG);
            return Err(Error::invalid(format!("{what} is a folder without rules; {hint}")));
        }
        if what.contains('/') || what.ends_with(".toml") {
            return Err(Error::invalid(format!("the file of rules {what} does not exist")));
        }
        let recipe = recipe(what)?;
        Ok(Written::Rules { text: recipe.text.to_owned(), origin: format!("recipe {what}") })
    }

    /// The parameters that it has.
    fn parameters(&self) -> Vec<String> {
        match self {
            Written::Rules { text, .. } => parse::declared(text),
            Written::Adapter(_) => Vec::new(),
        }
    }

    fn view(&self, parameters: &BTreeMap<String, i64>) -> Result<View> {
        match (self, parameters.keys().next()) {
            (Written::Rules { text, origin }, _) => View::parse(text, origin, parameters),
            (Written::Adapter(path), None) => Ok(View::adapter(path)),
            (Written::Adapter(_), Some(name)) => {
                Err(Error::invalid(format!("there is no parameter {name:?}: an adapter has none")))
            }
        }
    }
}

fn recipe(name: &str) -> Result<&'static Recipe> {
    recipes().iter().find(|recipe| recipe.name == name).ok_or_else(|| {
        let known: Vec<&str> = recipes().iter().map(|recipe| recipe.name).collect();
        Error::invalid(format!("{name:?} is neither a file nor a recipe; recipes: {}", known.join(", ")))
    })
}

impl Checkpoint {
    /// The checkpoint seen through a view. Every rule is checked against the metadata before anything is read, and then
    /// nothing is but what has become one and must be the same, such as step counters.
    pub fn through(self, view: &View) -> Result<Checkpoint> {
        if let Some(adapter) = &view.adapter {
            return Ok(adapter.merged(&self)?.over(self));
        }
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
                entry.kind = CatalogKind::Value(ValueLocation::Inline(groups.renamed(number, value).map_err(what)?));
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

/// What became of block-scaled weights before any rule.
fn dequantised(catalog: &Catalog, weights: &Weights) -> RuleReport {
    let mut report = RuleReport { rule: "dequantise".to_owned(), ..RuleReport::default() };
    for (name, weight) in weights {
        let (Ok(weight), Some(CatalogKind::Tensor(tensor))) = (weight, catalog.entries.get(name).map(|entry| &entry.kind)) else {
            continue;
        };
        let from = vec![weight.codes.clone(), weight.scales.clone()];
        let (shape, dtype) = (Some(tensor.shape.to_vec()), Some(tensor.dtype.name().to_owned()));
        report.taken += 2;
        report.made.push(Made { key: name.clone(), shape, dtype, from });
    }
    report
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
