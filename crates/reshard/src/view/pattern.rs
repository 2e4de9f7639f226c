//! Names with captures: `model.layers.{layer}.mlp.{part:gate|up}_proj.weight`.
//!
//! `{name}` is a stretch without a dot, `{name:int}` a whole number, `{name:0..61}` one below 61, `{name:a|b}` one of these words,
//! `{name...}` anything, dots too, or nothing. `{stage*8+layer}` and `{layer+4}` are numbers that others make; read backwards, they give those others.

use std::collections::BTreeMap;

use regex::{Regex, RegexBuilder};

/// What the captures of a pattern stand for.
pub(super) type Captures = BTreeMap<String, String>;

/// A pattern for keys.
#[derive(Debug, Clone)]
pub(super) struct Pattern {
    text: String,
    pieces: Vec<Piece>,
    regex: Regex,
}

#[derive(Debug, Clone, PartialEq)]
enum Piece {
    Text(String),
    Capture {
        name: String,
        kind: Kind,
    },
    /// `outer * factor + inner + add`, each part of which may be absent.
    Number {
        outer: Option<(String, u64)>,
        inner: Option<String>,
        add: u64,
    },
}

/// The kinds that captures have in some patterns, by name.
pub(super) type Kinds = BTreeMap<String, Kind>;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kind {
    Segment,
    Int,
    /// From the first number to the one before the second.
    Range(u64, u64),
    Words(Vec<String>),
    Rest,
}

/// A whole number as it is written: no signs, no leading zeros.
const INT: &str = "(?:0|[1-9][0-9]{0,17})";
/// No pattern takes more bytes once it is compiled.
const MOST_STATES: usize = 1 << 20;

impl Pattern {
    /// Reads a pattern; names in sums are looked up in `parameters`.
    pub(super) fn parse(text: &str, parameters: &BTreeMap<String, i64>) -> Result<Pattern, String> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(open) = rest.find('{') {
            let literal = &rest[..open];
            if literal.contains('}') {
                return Err(format!("{text:?} has a }} without its {{"));
            }
            let close = rest[open..].find('}').ok_or_else(|| format!("{text:?} has a {{ without its }}"))? + open;
            if !literal.is_empty() {
                pieces.push(Piece::Text(literal.to_owned()));
            }
            pieces.push(piece(&rest[open + 1..close], parameters).map_err(|why| format!("{text:?}: {why}"))?);
            rest = &rest[close + 1..];
        }
        if rest.contains('}') {
            return Err(format!("{text:?} has a }} without its {{"));
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest.to_owned()));
        }
        if pieces.is_empty() {
            return Err("a pattern is empty".to_owned());
        }
        let regex = expression(&pieces).map_err(|error| format!("{text:?}: {error}"))?;
        Ok(Pattern { text: text.to_owned(), pieces, regex })
    }

    /// This pattern, in which captures without a kind have the kind that they have in others: `{name}` of a new name is what
    /// `{name...}` of an old one captured, and has to be found again when the rule is reversed.
    pub(super) fn with_kinds(mut self, known: &Kinds) -> Result<Pattern, String> {
        for piece in &mut self.pieces {
            if let Piece::Capture { name, kind: kind @ Kind::Segment } = piece
                && let Some(found) = known.get(name.as_str())
            {
                *kind = found.clone();
            }
        }
        self.regex = expression(&self.pieces).map_err(|error| format!("{:?}: {error}", self.text))?;
        Ok(self)
    }

    /// As it was written.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The names of its captures.
    pub(super) fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(_) => {}
                Piece::Capture { name, .. } => names.push(name),
                Piece::Number { outer, inner, .. } => {
                    names.extend(outer.as_ref().map(|(name, _)| name.as_str()).into_iter().chain(inner.as_deref()));
                }
            }
        }
        names.sort_unstable();
        names.dedup();
        names
    }

    /// What its captures are in a name; `None` when the name is another.
    pub(super) fn captures(&self, name: &str) -> Option<Captures> {
        // Most names of most checkpoints differ in their first words.
        if let Some(Piece::Text(first)) = self.pieces.first()
            && !name.starts_with(first.as_str())
        {
            return None;
        }
        if let Some(Piece::Text(last)) = self.pieces.last()
            && !name.ends_with(last.as_str())
        {
            return None;
        }
        let found = self.regex.captures(name)?;
        let mut captures = Captures::new();
        let mut put = |name: &str, value: String| match captures.get(name) {
            Some(before) => *before == value,
            None => captures.insert(name.to_owned(), value).is_none(),
        };
        let groups = found.iter().skip(1);
        for (piece, group) in self.pieces.iter().filter(|piece| !matches!(piece, Piece::Text(_))).zip(groups) {
            let text = group?.as_str();
            let same = match piece {
                Piece::Text(_) => true,
                Piece::Capture { name, kind: Kind::Range(start, end) } => {
                    text.parse::<u64>().is_ok_and(|number| (*start..*end).contains(&number)) && put(name, text.to_owned())
                }
                Piece::Capture { name, .. } => put(name, text.to_owned()),
                Piece::Number { outer, inner, add } => {
                    let number = text.parse::<u64>().ok()?.checked_sub(*add)?;
                    match (outer, inner) {
                        (Some((outer, factor)), Some(inner)) => {
                            put(outer, (number / factor).to_string()) && put(inner, (number % factor).to_string())
                        }
                        (Some((outer, factor)), None) => {
                            number.is_multiple_of(*factor) && put(outer, (number / factor).to_string())
                        }
                        (None, Some(inner)) => put(inner, number.to_string()),
                        (None, None) => number == 0,
                    }
                }
            };
            if !same {
                return None;
            }
        }
        Some(captures)
    }

    /// The name that captures make.
    pub(super) fn name(&self, captures: &Captures) -> Result<String, String> {
        let mut name = String::new();
        let value =
            |capture: &str| captures.get(capture).ok_or_else(|| format!("nothing says what {{{capture}}} of {:?} is", self.text));
        let number = |capture: &str| {
            let text = value(capture)?;
            text.parse::<u64>().map_err(|_| format!("{{{capture}}} of {:?} is {text:?}, which is not an integer", self.text))
        };
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => name.push_str(text),
                Piece::Capture { name: capture, .. } => name.push_str(value(capture)?),
                Piece::Number { outer, inner, add } => {
                    let mut sum = *add;
                    if let Some(inner) = inner {
                        let inner_value = number(inner)?;
                        if let Some((_, factor)) = outer
                            && inner_value >= *factor
                        {
                            return Err(format!("{{{inner}}} of {:?} is {inner_value}, not below {factor}", self.text));
                        }
                        sum = sum.saturating_add(inner_value);
                    }
                    if let Some((outer, factor)) = outer {
                        sum = sum.saturating_add(number(outer)?.saturating_mul(*factor));
                    }
                    name.push_str(&sum.to_string());
                }
            }
        }
        match name.is_empty() {
            true => Err(format!("{:?} makes an empty name", self.text)),
            false => Ok(name),
        }
    }
}

/// The kinds of captures that have one.
pub(super) fn kinds_of(patterns: &[Pattern]) -> Kinds {
    let pieces = patterns.iter().flat_map(|pattern| &pattern.pieces);
    let kinds = pieces.filter_map(|piece| match piece {
        Piece::Capture { name, kind } if *kind != Kind::Segment => Some((name.clone(), kind.clone())),
        _ => None,
    });
    kinds.collect()
}

/// The expression that finds the pieces of a pattern in a name.
fn expression(pieces: &[Piece]) -> Result<Regex, regex::Error> {
    let mut expression = String::from("^");
    for piece in pieces {
        match piece {
            Piece::Text(text) => expression.push_str(&regex::escape(text)),
            Piece::Capture { kind: Kind::Segment, .. } => expression.push_str("([^.]+)"),
            Piece::Capture { kind: Kind::Rest, .. } => expression.push_str("(.*)"),
            Piece::Capture { kind: Kind::Int | Kind::Range(..), .. } | Piece::Number { .. } => {
                expression.push_str(&format!("({INT})"));
            }
            Piece::Capture { kind: Kind::Words(words), .. } => {
                let words: Vec<String> = words.iter().map(|word| regex::escape(word)).collect();
                expression.push_str(&format!("({})", words.join("|")));
            }
        }
    }
    expression.push('$');
    RegexBuilder::new(&expression).size_limit(MOST_STATES).dfa_size_limit(MOST_STATES).build()
}

fn piece(text: &str, parameters: &BTreeMap<String, i64>) -> Result<Piece, String> {
    let is_name = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let named = |name: &str| match is_name(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("invalid name of a capture {name:?}: names are letters, digits and _")),
    };
    if let Some(name) = text.strip_suffix("...") {
        return Ok(Piece::Capture { name: named(name)?, kind: Kind::Rest });
    }
    let constant = |text: &str| -> Option<u64> {
        text.parse().ok().or_else(|| parameters.get(text).and_then(|value| u64::try_from(*value).ok()))
    };
    if let Some((name, kind)) = text.split_once(':') {
        let range = kind.split_once("..").map(|(start, end)| (constant(start.trim()), constant(end.trim())));
        let kind = match kind {
            "int" => Kind::Int,
            _ if range.is_some() => match range {
                Some((Some(start), Some(end))) if start < end => Kind::Range(start, end),
                _ => return Err(format!("invalid range {kind:?}: use 0..8, with numbers or parameters")),
            },
            words if words.split('|').all(|word| !word.is_empty()) => Kind::Words(words.split('|').map(str::to_owned).collect()),
            _ => return Err(format!("invalid kind of capture {kind:?}: use int, 0..8 or a|b|…")),
        };
        return Ok(Piece::Capture { name: named(name)?, kind });
    }
    if !text.contains(['+', '*']) {
        return Ok(Piece::Capture { name: named(text)?, kind: Kind::Segment });
    }
    let (mut outer, mut inner, mut add) = (None, None, 0u64);
    for term in text.split('+').map(str::trim) {
        if let Some((name, factor)) = term.split_once('*') {
            let factor = constant(factor.trim()).filter(|&factor| factor > 0);
            let factor = factor.ok_or_else(|| format!("{term:?} multiplies by no whole number above 0 and no parameter"))?;
            if outer.replace((named(name.trim())?, factor)).is_some() {
                return Err(format!("{text:?} multiplies twice"));
            }
        } else if let Some(constant) = constant(term) {
            add = add.saturating_add(constant);
        } else if inner.replace(named(term)?).is_some() {
            return Err(format!("{text:?} adds two captures; only one can be told from their sum"));
        }
    }
    Ok(Piece::Number { outer, inner, add })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        Pattern::parse(text, &BTreeMap::from([("per_stage".to_owned(), 8)])).unwrap()
    }

    #[test]
    fn captures_are_found_and_make_the_name_again() {
        for (text, name, captures) in [
            ("layers.{layer}.w{p:q|k}.weight", "layers.3.wk.weight", vec![("layer", "3"), ("p", "k")]),
            ("{all...}", "a.b.c", vec![("all", "a.b.c")]),
            ("{above...}embed.weight", "embed.weight", vec![("above", "")]),
            ("l.{layer:int}.{x}.{layer}", "l.10.y.10", vec![("layer", "10"), ("x", "y")]),
            ("l.{stage*per_stage+layer}", "l.19", vec![("layer", "3"), ("stage", "2")]),
            ("l.{layer+4}.w", "l.6.w", vec![("layer", "2")]),
            ("l.{layer:0..per_stage}.w", "l.7.w", vec![("layer", "7")]),
            ("l.{per_stage+0}.w", "l.8.w", vec![]),
        ] {
            let found = pattern(text).captures(name).unwrap();
            assert_eq!(found.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect::<Vec<_>>(), captures);
            assert_eq!(pattern(text).name(&found).unwrap(), name);
        }
    }

    #[test]
    fn other_names_do_not_match() {
        for (text, name) in [
            ("layers.{layer}.w", "layers.1.2.w"),
            ("l.{layer:int}", "l.x"),
            ("l.{layer:int}", "l.01"),
            ("{p:q|k}", "v"),
            ("{a}.{a}", "x.y"),
            ("l.{layer+4}", "l.3"),
            ("l.{layer:0..per_stage}", "l.8"),
            ("l.{layer:2..5}", "l.1"),
            ("l.{per_stage+0}", "l.9"),
            ("a+b", "aab"),
        ] {
            assert!(pattern(text).captures(name).is_none(), "{text} {name}");
        }
    }

    #[test]
    fn new_names_find_again_what_old_ones_captured() {
        let from = [pattern("model.{name...}.{part:A|B}"), pattern("{layer:int}.{x}")];
        let to = pattern("{part}.{name}.{layer}.{x}").with_kinds(&kinds_of(&from)).unwrap();
        let found = to.captures("A.b.c.d.3.e").unwrap();
        assert_eq!(found.get("name").map(String::as_str), Some("b.c.d"));
        assert!(to.captures("C.b.3.e").is_none() && to.captures("A.b.x.e").is_none());
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |text: &str| Pattern::parse(text, &BTreeMap::new()).unwrap_err();
        assert!(wrong("a{b").contains("without its }"));
        assert!(wrong("a}b").contains("without its {"));
        assert!(wrong("{a b}").contains("invalid name of a capture"));
        assert!(wrong("{a*x+b}").contains("no parameter"));
        assert!(wrong("{a+b}").contains("adds two captures"));
        assert!(wrong("{a:}").contains("invalid kind"));
        assert!(wrong("{a:3..2}").contains("invalid range"));
        assert!(wrong("{a:0..layers}").contains("invalid range"));
        assert!(wrong(&"{a}".repeat(100_000)).contains("size limit"));
        assert!(pattern("{a...}").name(&Captures::from([("a".into(), String::new())])).unwrap_err().contains("empty name"));
        assert!(pattern("{a}").name(&Captures::new()).unwrap_err().contains("{a}"));
        let too_far = Captures::from([("stage".into(), "0".into()), ("layer".into(), "9".into())]);
        assert!(pattern("{stage*per_stage+layer}").name(&too_far).unwrap_err().contains("not below 8"));
    }
}
