//! Rules as text: TOML. Whatever is wrong is said with line, column, the rule and what is allowed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use reshard_formats::DType;
use toml_edit::{Document, Item, TableLike, Value};

use super::pattern::{Pattern, kinds_of};
use super::rules::{Action, PadValue, Position, Rest, Rule, Rules, Sizes, SlotRule, Step};
use super::steps::parts_before;
use crate::cast::holds_values;
use crate::error::{Error, Result};
use crate::select::dtype_named;

/// Numbers that rules name, such as `heads`.
pub(super) type Parameters = BTreeMap<String, i64>;

/// No text of rules is longer.
pub(super) const MOST_BYTES: usize = 1 << 20;
/// No text has more names in its rules, as each is compiled.
const MOST_NAMES: usize = 20_000;

const TOP: &[&str] = &["description", "rest", "prefixes", "optimizers", "dequantise", "parameters", "slots", "rule"];
const RULE: &[&str] = &["name", "from", "to", "drop", "steps", "optional"];
const ACTIONS: &[&str] = &[
    "stack",
    "unstack",
    "concat",
    "split",
    "transpose",
    "permute",
    "reshape",
    "unflatten",
    "flatten",
    "slice",
    "pad",
    "truncate",
    "cast",
    "dequantise",
    "quantise",
    "lora",
];

/// A mistake, where it is.
struct Wrong {
    span: Option<Range<usize>>,
    what: String,
}

type Parsed<T> = std::result::Result<T, Wrong>;

fn wrong<T>(span: Option<Range<usize>>, what: impl Into<String>) -> Parsed<T> {
    Err(Wrong { span, what: what.into() })
}

/// Reads rules. `origin` is what the text is called in messages, `given` are parameters' values.
pub(super) fn rules(text: &str, origin: &str, given: &Parameters) -> Result<Rules> {
    if text.len() > MOST_BYTES {
        return Err(Error::invalid(format!("{origin} is longer than rules are, which have at most {MOST_BYTES} bytes")));
    }
    let place = |span: Option<Range<usize>>| match span {
        Some(span) => {
            let at = position(text, span.start);
            format!("{origin}:{}:{}", at.line, at.column)
        }
        None => origin.to_owned(),
    };
    let document = Document::parse(text).map_err(|error| {
        let first = error.message().lines().next().unwrap_or("invalid TOML").to_owned();
        Error::invalid(format!("{}: {first}", place(error.span())))
    })?;
    let reader = Reader { text, given, names: Cell::new(0), last: Cell::new((0, Position { line: 1, column: 1 })) };
    reader.read(document.as_table()).map_err(|Wrong { span, what }| Error::invalid(format!("{}: {what}", place(span))))
}

/// The names of the parameters that a text has; none of one that cannot be read, which is said when it is.
pub(super) fn declared(text: &str) -> Vec<String> {
    let Ok(document) = Document::parse(text.get(..MOST_BYTES).unwrap_or(text)) else { return Vec::new() };
    let table = document.as_table().get("parameters").and_then(Item::as_table_like);
    table.into_iter().flat_map(|table| table.iter()).map(|(name, _)| name.to_owned()).collect()
}

fn position(text: &str, at: usize) -> Position {
    let before = text.get(..at).unwrap_or(text);
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Position { line: before.matches('\n').count() + 1, column: before[start..].chars().count() + 1 }
}

struct Reader<'t> {
    text: &'t str,
    given: &'t Parameters,
    /// How many names there were.
    names: Cell<usize>,
    /// The last position that was looked for; most come after it.
    last: Cell<(usize, Position)>,
}

impl Reader<'_> {
    fn position(&self, at: usize) -> Position {
        let (start, mut found) = self.last.get();
        let Some(between) = self.text.get(start..at) else { return position(self.text, at) };
        for c in between.chars() {
            found = match c {
                '\n' => Position { line: found.line + 1, column: 1 },
                _ => Position { column: found.column + 1, ..found },
            };
        }
        self.last.set((at, found));
        found
    }

    fn read(&self, top: &dyn TableLike) -> Parsed<Rules> {
        only(top, TOP, "at the top of a view")?;
        let parameters = self.parameters(top)?;
        let rest = match text_of(top, "rest")? {
            None | Some(("keep", _)) => Rest::Keep,
            Some(("drop", _)) => Rest::Drop,
            Some(("error", _)) => Rest::Error,
            Some((other, span)) => return wrong(span, format!("rest is {other:?}; keep, drop and error are allowed")),
        };
        let mut slots = BTreeMap::new();
        if let Some(table) = table_of(top, "slots")? {
            for (name, item) in table.iter() {
                let rule = match item.as_str() {
                    Some("drop") => SlotRule::Drop,
                    Some("same") => SlotRule::Same,
                    Some("steps") => SlotRule::Steps,
                    _ => return wrong(item.span(), format!("slot {name:?} must be \"drop\", \"same\" or \"steps\"")),
                };
                slots.insert(name.to_owned(), rule);
            }
        }
        let mut rules = Vec::new();
        if let Some(item) = top.get("rule") {
            match (item.as_array_of_tables(), item.as_array()) {
                (Some(tables), _) => {
                    for (number, table) in tables.iter().enumerate() {
                        rules.push(self.rule(table, table.span(), number, &parameters)?);
                    }
                }
                (None, Some(array)) => {
                    for (number, value) in array.iter().enumerate() {
                        match value.as_inline_table() {
                            Some(table) => rules.push(self.rule(table, value.span(), number, &parameters)?),
                            None => return wrong(value.span(), "a rule is a table such as { from = \"a\", to = \"b\" }"),
                        }
                    }
                }
                _ => return wrong(item.span(), "rules are written as [[rule]]"),
            }
        }
        let words = |key| Ok(texts(top, key)?.into_iter().map(|(word, _)| word).collect());
        let dequantise = match top.get("dequantise") {
            None => None,
            Some(item) => Some(wide(item, "dequantise")?),
        };
        Ok(Rules { rules, rest, slots, prefixes: words("prefixes")?, optimizers: words("optimizers")?, dequantise })
    }

    /// Parameters with their defaults, in place of which the given values stand.
    fn parameters(&self, top: &dyn TableLike) -> Parsed<Parameters> {
        let mut parameters = Parameters::new();
        let table = table_of(top, "parameters")?;
        for (name, item) in table.iter().flat_map(|table| table.iter()) {
            let value = match (self.given.get(name), item.as_integer(), item.as_str()) {
                (Some(value), ..) => *value,
                (None, Some(default), _) => default,
                (None, None, Some(meaning)) => {
                    return wrong(item.span(), format!("the parameter {name:?} has no value: {meaning}"));
                }
                _ => return wrong(item.span(), format!("the parameter {name:?} is a number, or what it means as text")),
            };
            parameters.insert(name.to_owned(), value);
        }
        if let Some(unknown) = self.given.keys().find(|name| !parameters.contains_key(*name)) {
            let known: Vec<&str> = parameters.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            return wrong(None, format!("unknown parameter {unknown:?}; parameters: {known}"));
        }
        Ok(parameters)
    }

    fn rule(&self, table: &dyn TableLike, span: Option<Range<usize>>, number: usize, given: &Parameters) -> Parsed<Rule> {
        only(table, RULE, "in a rule")?;
        let pattern = |(text, span): (String, Option<Range<usize>>)| {
            self.names.set(self.names.get() + 1);
            if self.names.get() > MOST_NAMES {
                return wrong(span, format!("there are more than {MOST_NAMES} names in these rules"));
            }
            Pattern::parse(&text, given).map_err(|what| Wrong { span, what })
        };
        let from = texts(table, "from")?.into_iter().map(pattern).collect::<Parsed<Vec<_>>>()?;
        let to = texts(table, "to")?.into_iter().map(pattern).collect::<Parsed<Vec<_>>>()?;
        let kinds = kinds_of(&from);
        let to = to.into_iter().map(|name| name.with_kinds(&kinds)).collect::<std::result::Result<Vec<_>, _>>();
        let to = to.map_err(|what| Wrong { span: span.clone(), what })?;
        let drop = texts(table, "drop")?.into_iter().map(pattern).collect::<Parsed<Vec<_>>>()?;
        let at = span.clone().map_or(Position::default(), |span| self.position(span.start));
        let optional = match table.get("optional") {
            None => false,
            Some(item) => match item.as_bool() {
                Some(optional) => optional,
                None => return wrong(item.span(), "optional is true or false"),
            },
        };
        let drops = !drop.is_empty();
        if drops && !(from.is_empty() && to.is_empty() && table.get("steps").is_none()) {
            return wrong(span, "a rule that drops has neither from, to nor steps");
        }
        if !drops && (from.is_empty() || to.is_empty()) {
            return wrong(span, "a rule needs from and to, or drop");
        }
        let from = if drops { drop } else { from };
        let name = match text_of(table, "name")? {
            Some((name, _)) => name.to_owned(),
            None => from.first().map_or_else(|| format!("{}", number + 1), |first| first.text().to_owned()),
        };
        let mut steps = Vec::new();
        if let Some(item) = table.get("steps") {
            let Some(array) = item.as_array() else { return wrong(item.span(), "steps are a list of tables, [{ … }, …]") };
            for value in array {
                let Some(step) = value.as_inline_table() else {
                    return wrong(value.span(), "a step is a table such as { transpose = [0, 1] }");
                };
                steps.push(
                    self.step(step, value.span(), from.len(), given)
                        .map_err(|error| Wrong { what: format!("rule {name:?}: {}", error.what), ..error })?,
                );
            }
        }
        let rule = Rule { name, at, from, to, steps, optional };
        if !drops {
            check_names(&rule).map_err(|what| Wrong { span, what: format!("rule {:?}: {what}", rule.name) })?;
        }
        Ok(rule)
    }

    fn step(&self, table: &dyn TableLike, span: Option<Range<usize>>, parts: usize, given: &Parameters) -> Parsed<Step> {
        let found: Vec<&str> = table.iter().map(|(key, _)| key).filter(|key| ACTIONS.contains(key)).collect();
        let [word] = found[..] else {
            let known = ACTIONS.join(", ");
            return wrong(span, format!("a step does one of {known}; this one has {}", found.len()));
        };
        let Some(main) = table.get(word) else { return wrong(span, "a step is empty") };
        let options: &[&str] = match word {
            "stack" | "unstack" => &["dim"],
            "concat" | "split" => &["sizes", "ratio", "groups"],
            "reshape" => &["from"],
            "unflatten" | "flatten" => &["sizes"],
            "slice" => &["start", "stop"],
            "pad" => &["size", "value", "from"],
            "truncate" => &["size"],
            "cast" => &["from"],
            "dequantise" | "quantise" => &["block", "from"],
            "lora" => &["transposed"],
            _ => &[],
        };
        let allowed: Vec<&str> = [word, "of"].into_iter().chain(options.iter().copied()).collect();
        only(table, &allowed, &format!("in a step that does {word}"))?;
        let number = |item: &Item, what: &str| self.number(item, what, given);
        let option = |key: &str| table.get(key).map(|item| number(item, key)).transpose();
        let size = |key: &str| -> Parsed<Option<u64>> {
            match (option(key)?, table.get(key).and_then(Item::span)) {
                (None, _) => Ok(None),
                (Some(value), span) => match u64::try_from(value) {
                    Ok(value) => Ok(Some(value)),
                    Err(_) => wrong(span, format!("{key} is {value}; it is at least 0")),
                },
            }
        };
        let needed = |key: &str| -> Parsed<u64> {
            match size(key)? {
                Some(value) => Ok(value),
                None => wrong(span.clone(), format!("{word} needs {key}")),
            }
        };
        let list =
            |key: &str| -> Parsed<Option<Vec<i64>>> { table.get(key).map(|item| self.numbers(item, key, given)).transpose() };
        let text = |item: &Item, what: &str| match item.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => wrong(item.span(), format!("{what} must be text")),
        };
        let dtype = |item: &Item, what: &str| -> Parsed<DType> {
            let name = text(item, what)?;
            dtype_named(&name).ok_or(Wrong { span: item.span(), what: format!("unknown dtype {name:?}") })
        };
        let block = || -> Parsed<Option<Vec<u64>>> {
            let Some(found) = list("block")? else { return Ok(None) };
            let sizes: Option<Vec<u64>> = found.iter().map(|size| u64::try_from(*size).ok().filter(|size| *size > 0)).collect();
            match sizes.filter(|sizes| !sizes.is_empty()) {
                Some(sizes) => Ok(Some(sizes)),
                None => wrong(table.get("block").and_then(Item::span), "block is a list of sizes above 0, such as [128, 128]"),
            }
        };
        let codes = |item: &Item, what: &str| -> Parsed<DType> {
            match dtype(item, what)? {
                found @ (DType::Float8E4M3Fn | DType::Float8E5M2) => Ok(found),
                other => wrong(item.span(), format!("{what} is {}; float8_e4m3fn and float8_e5m2 are allowed", other.name())),
            }
        };
        let sizes = || -> Parsed<Option<Sizes>> {
            let positive = |key: &str, list: Vec<i64>| -> Parsed<Vec<u64>> {
                let all: Option<Vec<u64>> = list.iter().map(|n| u64::try_from(*n).ok().filter(|n| *n > 0)).collect();
                all.ok_or_else(|| Wrong { span: table.get(key).and_then(Item::span), what: format!("{key} must be above 0") })
            };
            match (list("sizes")?, list("ratio")?) {
                (Some(_), Some(_)) => wrong(span.clone(), "sizes and ratio exclude each other"),
                (Some(sizes), None) => Ok(Some(Sizes::Exact(positive("sizes", sizes)?))),
                (None, Some(ratio)) => Ok(Some(Sizes::Ratio(positive("ratio", ratio)?))),
                (None, None) => Ok(None),
            }
        };
        let groups = || -> Parsed<u64> {
            match size("groups")? {
                Some(0) => wrong(span.clone(), "groups is at least 1"),
                groups => Ok(groups.unwrap_or(1)),
            }
        };
        let action = match word {
            "stack" => Action::Stack { capture: text(main, word)?, dim: option("dim")?.unwrap_or(0) },
            "unstack" => Action::Unstack { capture: text(main, word)?, dim: option("dim")?.unwrap_or(0) },
            "concat" => Action::Concat { dim: number(main, word)?, sizes: sizes()?, groups: groups()? },
            "split" => Action::Split { dim: number(main, word)?, sizes: sizes()?, groups: groups()? },
            "transpose" => match self.numbers(main, word, given)?[..] {
                [a, b] => Action::Transpose(a, b),
                _ => return wrong(main.span(), "transpose names two dimensions, [0, 1]"),
            },
            "permute" => Action::Permute(self.numbers(main, word, given)?),
            "reshape" => Action::Reshape { to: self.numbers(main, word, given)?, from: list("from")? },
            "unflatten" => match list("sizes")? {
                Some(sizes) if !sizes.is_empty() => Action::Unflatten { dim: number(main, word)?, sizes },
                _ => return wrong(span, "unflatten needs sizes"),
            },
            "flatten" => match self.numbers(main, word, given)?[..] {
                [start, end] => Action::Flatten { start, end, sizes: list("sizes")? },
                _ => return wrong(main.span(), "flatten names the first and the last of the dimensions, [0, 1]"),
            },
            "slice" => Action::Slice { dim: number(main, word)?, start: size("start")?.unwrap_or(0), stop: size("stop")? },
            "pad" => {
                let value = match table.get("value") {
                    None => PadValue::Number(0.0),
                    Some(item) => match (item.as_str(), item.as_float(), item.as_integer()) {
                        (Some("live"), ..) => PadValue::Live,
                        (_, Some(number), _) => PadValue::Number(number),
                        (_, _, Some(number)) => PadValue::Number(number as f64),
                        _ => return wrong(item.span(), "value is a number, or \"live\" for what the loaded tensor holds"),
                    },
                };
                Action::Pad { dim: number(main, word)?, size: needed("size")?, value, from: size("from")? }
            }
            "truncate" => Action::Truncate { dim: number(main, word)?, size: needed("size")? },
            "dequantise" => {
                let from = table.get("from").map(|item| codes(item, "from")).transpose()?;
                Action::Dequantise { to: wide(main, word)?, block: block()?, from }
            }
            "quantise" => {
                let from = table.get("from").map(|item| wide(item, "from")).transpose()?;
                match block()? {
                    Some(block) => Action::Quantise { to: codes(main, word)?, block, from },
                    None => return wrong(span, "quantise needs block, such as [128, 128]"),
                }
            }
            "lora" => {
                let transposed = match table.get("transposed") {
                    None => false,
                    Some(item) => match item.as_bool() {
                        Some(transposed) => transposed,
                        None => return wrong(item.span(), "transposed is true or false"),
                    },
                };
                Action::Lora { scale: self.scale(main, given)?, transposed }
            }
            _ => {
                let from = table.get("from").map(|item| dtype(item, "from")).transpose()?;
                Action::Cast { to: dtype(main, word)?, from }
            }
        };
        let of = match list("of")? {
            None => None,
            Some(of) => {
                let all: Option<Vec<usize>> = of.iter().map(|n| usize::try_from(*n).ok()).collect();
                match all {
                    Some(all) if all.iter().all(|&part| part < parts.max(64)) => Some(all),
                    _ => return wrong(table.get("of").and_then(Item::span), "of lists positions of the rule's names, from 0"),
                }
            }
        };
        let at = span.map_or(Position::default(), |span| self.position(span.start));
        Ok(Step { action, of, at })
    }

    /// A whole number, a parameter's name, or a product of both such as `"heads*128"`.
    fn number(&self, item: &Item, what: &str, given: &Parameters) -> Parsed<i64> {
        if let Some(number) = item.as_integer() {
            return Ok(number);
        }
        let Some(text) = item.as_str() else {
            return wrong(item.span(), format!("{what} must be a whole number or a parameter"));
        };
        evaluated(text, given).map_err(|why| Wrong { span: item.span(), what: format!("{what}: {why}") })
    }

    /// A number, or a quotient of numbers and parameters such as `"alpha/rank"`.
    fn scale(&self, item: &Item, given: &Parameters) -> Parsed<f64> {
        let finite = |scale: f64| match scale.is_finite() {
            true => Ok(scale),
            false => wrong(item.span(), "lora is a finite number"),
        };
        if let Some(scale) = item.as_float().or_else(|| item.as_integer().map(|whole| whole as f64)) {
            return finite(scale);
        }
        let Some(text) = item.as_str() else {
            return wrong(item.span(), "lora is the scale of the update: a number, or a quotient such as \"alpha/rank\"");
        };
        let part = |text: &str| evaluated(text, given).map_err(|why| Wrong { span: item.span(), what: format!("lora: {why}") });
        match text.split_once('/') {
            Some((above, below)) => finite(part(above)? as f64 / part(below)? as f64),
            None => finite(part(text)? as f64),
        }
    }

    fn numbers(&self, item: &Item, what: &str, given: &Parameters) -> Parsed<Vec<i64>> {
        let Some(array) = item.as_array() else { return wrong(item.span(), format!("{what} must be a list of numbers")) };
        array
            .iter()
            .map(|value: &Value| self.number(&Item::Value(value.clone()), what, given))
            .collect::<Parsed<_>>()
            .map_err(|error| Wrong { span: error.span.or(item.span()), ..error })
    }
}

/// Sums and differences of products and quotients of numbers and parameters.
fn evaluated(text: &str, given: &Parameters) -> std::result::Result<i64, String> {
    let value = |word: &str| -> std::result::Result<i64, String> {
        let word = word.trim();
        if let Ok(number) = word.parse::<i64>() {
            return Ok(number);
        }
        given.get(word).copied().ok_or_else(|| {
            let known: Vec<&str> = given.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            format!("{word:?} is neither a number nor a parameter; parameters: {known}")
        })
    };
    let overflow = || format!("{text:?} is too large");
    let product = |term: &str| -> std::result::Result<i64, String> {
        let mut factors = term.split_inclusive(['*', '/']);
        let first = factors.next().unwrap_or_default();
        let mut operator = first.chars().last().filter(|c| "*/".contains(*c));
        let mut total = value(first.trim_end_matches(['*', '/']))?;
        for factor in factors {
            let by = value(factor.trim_end_matches(['*', '/']))?;
            total = match operator {
                Some('/') => match total.checked_rem(by) {
                    Some(0) => total.checked_div(by).ok_or_else(overflow)?,
                    _ => return Err(format!("{text:?} is not an integer")),
                },
                _ => total.checked_mul(by).ok_or_else(overflow)?,
            };
            operator = factor.chars().last().filter(|c| "*/".contains(*c));
        }
        Ok(total)
    };
    let mut total = 0i64;
    for term in text.split('+') {
        let mut parts = term.split('-');
        let first = parts.next().unwrap_or_default();
        if !(first.trim().is_empty() && term.trim_start().starts_with('-')) {
            total = total.checked_add(product(first)?).ok_or_else(overflow)?;
        }
        for less in parts {
            total = total.checked_sub(product(less)?).ok_or_else(overflow)?;
        }
    }
    Ok(total)
}

/// How many names a step's tensors have, where it matters.
fn parts_needed(action: &Action) -> Option<usize> {
    match action {
        Action::Dequantise { .. } => Some(2),
        Action::Quantise { .. } => Some(1),
        Action::Lora { .. } => Some(3),
        _ => None,
    }
}

/// Every capture of the new names must come from somewhere, and none may be lost on the way.
fn check_names(rule: &Rule) -> std::result::Result<(), String> {
    let mut known: Vec<String> = rule.from.iter().flat_map(|pattern| pattern.names()).map(str::to_owned).collect();
    let captures = |step: &Step| match &step.action {
        Action::Stack { capture, .. } => Some((capture.clone(), true)),
        Action::Unstack { capture, .. } => Some((capture.clone(), false)),
        _ => None,
    };
    for (capture, taken) in rule.steps.iter().filter_map(captures) {
        match (taken, known.contains(&capture)) {
            (true, false) => return Err(format!("stack names {{{capture}}}, which no pattern of from captures")),
            (false, true) => return Err(format!("unstack names {{{capture}}}, which is a capture already")),
            (true, true) => known.retain(|name| *name != capture),
            (false, false) => known.push(capture),
        }
    }
    for pattern in &rule.to {
        if let Some(name) = pattern.names().into_iter().find(|name| !known.iter().any(|known| known == name)) {
            return Err(format!("{:?} names {{{name}}}, which nothing captures", pattern.text()));
        }
    }
    let own = rule.from.first().map(Pattern::names).unwrap_or_default();
    if let Some(other) = rule.from.iter().find(|pattern| pattern.names() != own) {
        return Err(format!("{:?} and {:?} do not have the same captures", rule.from[0].text(), other.text()));
    }
    for (number, step) in rule.steps.iter().enumerate() {
        let (found, needs) = (parts_before(rule, number), parts_needed(&step.action));
        if let Some(needs) = needs.filter(|needs| *needs != found) {
            return Err(format!("{} needs tensors of {needs} names, in this order, and has {found}", step.action.word()));
        }
        if matches!(step.action, Action::Quantise { .. }) && rule.to.len() != 2 {
            return Err(format!("quantise makes tensors of 2 names, codes and scales, and to has {}", rule.to.len()));
        }
    }
    let parts = parts_before(rule, rule.steps.len());
    if parts != rule.to.len() {
        let hint = "concat makes one tensor of several, split several of one";
        return Err(format!("it makes tensors of {parts} names and to has {}; {hint}", rule.to.len()));
    }
    known.sort_unstable();
    known.dedup();
    for pattern in &rule.to {
        if let Some(lost) = known.iter().find(|name| !pattern.names().contains(&name.as_str())) {
            return Err(format!("{:?} does not name {{{lost}}}: several tensors would get one name", pattern.text()));
        }
    }
    Ok(())
}

/// A type that can hold the values of codes.
fn wide(item: &Item, what: &str) -> Parsed<DType> {
    match item.as_str().and_then(dtype_named).filter(|dtype| holds_values(*dtype)) {
        Some(dtype) => Ok(dtype),
        None => wrong(item.span(), format!("{what} is \"bfloat16\", \"float16\", \"float32\" or \"float64\"")),
    }
}

/// An error for keys that mean nothing here.
fn only(table: &dyn TableLike, allowed: &[&str], place: &str) -> Parsed<()> {
    for (key, _) in table.iter() {
        if !allowed.contains(&key) {
            let span = table.get_key_value(key).and_then(|(key, _)| key.span());
            return wrong(span, format!("{key:?} is not allowed {place}; allowed: {}", allowed.join(", ")));
        }
    }
    Ok(())
}

fn table_of<'t>(table: &'t dyn TableLike, key: &str) -> Parsed<Option<&'t dyn TableLike>> {
    match table.get(key) {
        None => Ok(None),
        Some(item) => match item.as_table_like() {
            Some(below) => Ok(Some(below)),
            None => wrong(item.span(), format!("{key} is a table")),
        },
    }
}

/// A text of the file, and where it stands.
type Text<'t> = (&'t str, Option<Range<usize>>);

fn text_of<'t>(table: &'t dyn TableLike, key: &str) -> Parsed<Option<Text<'t>>> {
    match table.get(key) {
        None => Ok(None),
        Some(item) => match item.as_str() {
            Some(text) => Ok(Some((text, item.span()))),
            None => wrong(item.span(), format!("{key} must be text")),
        },
    }
}

/// One text or several.
fn texts(table: &dyn TableLike, key: &str) -> Parsed<Vec<(String, Option<Range<usize>>)>> {
    let Some(item) = table.get(key) else { return Ok(Vec::new()) };
    if let Some(text) = item.as_str() {
        return Ok(vec![(text.to_owned(), item.span())]);
    }
    let Some(array) = item.as_array() else { return wrong(item.span(), format!("{key} must be text, or a list of texts")) };
    array
        .iter()
        .map(|value| match value.as_str() {
            Some(text) => Ok((text.to_owned(), value.span())),
            None => wrong(value.span(), format!("{key} must be text, or a list of texts")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        rules(text, "rules.toml", &Parameters::new()).unwrap_err().to_string()
    }

    #[test]
    fn mistakes_have_line_column_and_what_is_allowed() {
        assert!(error("a = ").starts_with("rules.toml:1:"), "{}", error("a = "));
        assert_eq!(
            error("# a\n  rests = 1").split(';').next().unwrap(),
            "rules.toml:2:3: \"rests\" is not allowed at the top of a view"
        );
        let text = "[[rule]]\nfrom = \"a\"\nto = \"b\"\nsteps = [{ transposed = [0, 1] }]";
        assert!(
            error(text).starts_with("rules.toml:4:10: rule \"a\": a step does one of stack, unstack, concat"),
            "{}",
            error(text)
        );
        let text = "[[rule]]\nfrom = \"a\"\nto = \"b\"\nsteps = [{ pad = 0 }]";
        assert_eq!(error(text), "rules.toml:4:10: rule \"a\": pad needs size");
        let text = "[[rule]]\nname = \"n\"\nfrom = \"a.{x}\"\nto = \"b\"";
        assert!(error(text).starts_with("rules.toml:1:1: rule \"n\": \"b\" does not name {x}"), "{}", error(text));
        let text = "[[rule]]\nfrom = \"a.{x\"\nto = \"b\"";
        assert!(error(text).starts_with("rules.toml:2:8: "), "{}", error(text));
        let text = "[[rule]]\nfrom = \"a\"\nto = \"b\"\nsteps = [{ unflatten = 0, sizes = [\"heads\", 2] }]";
        assert!(
            error(text).contains("rules.toml:4:36") && error(text).contains("\"heads\" is neither a number"),
            "{}",
            error(text)
        );
        assert!(error("[parameters]\nheads = \"the number of heads\"").contains("no value: the number of heads"));
        assert!(error("[[rule]]\ndrop = \"a\"\nto = \"b\"").contains("neither from, to nor steps"));
        assert!(error("[[rule]]\nfrom = \"a\"").contains("needs from and to"));
        let unknown = rules("", "r", &Parameters::from([("x".to_owned(), 1)])).unwrap_err().to_string();
        assert!(unknown.contains("unknown parameter \"x\""), "{unknown}");
    }

    #[test]
    fn sizes_are_computed_from_parameters() {
        let given = Parameters::from([("heads".to_owned(), 8), ("kv".to_owned(), 2)]);
        for (text, value) in [("heads", 8), ("heads/kv", 4), ("heads*16 + 2*kv", 132), ("heads-kv", 6), ("-1", -1)] {
            assert_eq!(evaluated(text, &given), Ok(value), "{text}");
        }
        assert!(evaluated("heads/3", &given).is_err());
        assert!(evaluated("9223372036854775807*heads", &given).is_err());
        let least = Parameters::from([("least".to_owned(), i64::MIN), ("minus".to_owned(), -1)]);
        assert!(evaluated("least/minus", &least).is_err() && evaluated("least*minus", &least).is_err());
    }

    #[test]
    fn a_whole_file_is_read_and_reversed() {
        let text = r#"
            description = "experts"
            rest = "error"
            [parameters]
            heads = 4
            [slots]
            row = "drop"
            [[rule]]
            from = ["l.{i}.e.{e}.gate", "l.{i}.e.{e}.up"]
            to = "l.{i}.w13"
            steps = [{ stack = "e" }, { transpose = [1, 2], of = [0] }, { concat = 1, ratio = [1, 1] }]
        "#;
        let found = rules(text, "r", &Parameters::new()).unwrap();
        assert_eq!((found.rest, found.rules.len(), found.rules[0].steps.len()), (Rest::Error, 1, 3));
        let back = found.reversed().unwrap();
        let words: Vec<&str> = back.rules[0].steps.iter().map(|step| step.action.word()).collect();
        assert_eq!(words, ["split", "transpose", "unstack"]);
        assert_eq!(back.rules[0].to[1].text(), "l.{i}.e.{e}.up");
        let lossy = "[[rule]]\nname = \"n\"\nfrom = \"a\"\nto = \"b\"\nsteps = [{ truncate = 0, size = 3 }]";
        let why = rules(lossy, "r", &Parameters::new()).unwrap().reversed().unwrap_err();
        assert_eq!(why, "rule \"n\" (line 1) cannot be reversed: truncate leaves elements out, which nothing brings back");
    }
}
