//! Which keys, and under which names: globs, parts of the tree, prefixes and renames.
//!
//! ```
//! # let path = "../formats/tests/corpus/torch-2.13/fsdp2_w4/checkpoint";
//! use reshard::digest::{DigestOptions, digest};
//! use reshard::select::Selection;
//!
//! let mut options = DigestOptions::default();
//! options.selection = Selection::globs(&["model.*.weight"])?;
//! let digest = digest(&reshard::Checkpoint::open(path)?, &options)?;
//! assert!(digest.entries.keys().all(|key| key.ends_with(".weight")));
//! # Ok::<(), reshard::Error>(())
//! ```

mod part;
mod unmatched;

use std::collections::HashMap;

use globset::GlobBuilder;
use regex::Regex;
use reshard_formats::{DType, KeyPath, PathSegment};

use self::part::PartOf;
pub(crate) use self::unmatched::unmatched_names;
pub use self::unmatched::{Unmatched, unmatched_globs};
use crate::checkpoint::{CatalogEntry, Checkpoint};
use crate::error::{Error, Result};

/// A pattern for keys: `*` stands for any text (dots and slashes too), `?` for one ASCII character, `[ab]` for one of
/// several, `{a,b}` for one of several texts; a backslash takes a special character as it is.
#[derive(Debug, Clone)]
pub struct Glob(globset::GlobMatcher);

impl Glob {
    /// Parses a pattern.
    pub fn new(text: &str) -> Result<Glob> {
        GlobBuilder::new(text)
            .backslash_escape(true)
            .empty_alternates(true)
            .build()
            .map(|glob| Glob(glob.compile_matcher()))
            .map_err(|error| Error::invalid(format!("invalid pattern {text:?}: {}", error.kind())))
    }

    /// The pattern that only one key fits.
    pub fn literal(key: &str) -> Result<Glob> {
        let mut text = String::with_capacity(key.len());
        for c in key.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '{' | '}' | '!' | '\\') {
                text.push('\\');
            }
            text.push(c);
        }
        Glob::new(&text)
    }

    /// Whether a key fits the pattern.
    pub fn matches(&self, key: &str) -> bool {
        self.0.is_match(key)
    }

    /// The pattern as it was given.
    pub fn text(&self) -> &str {
        self.0.glob().glob()
    }
}

/// A rename: what the regular expression matches becomes the template, in which `$1` and `${name}` stand for groups.
#[derive(Debug, Clone)]
pub struct Rename {
    regex: Regex,
    template: String,
}

impl Rename {
    /// A rename of everything that `regex` matches, anywhere in a key.
    pub fn new(regex: &str, template: &str) -> Result<Rename> {
        let regex = Regex::new(regex).map_err(|e| Error::invalid(format!("invalid regular expression {regex:?}: {e}")))?;
        Ok(Rename { regex, template: template.to_owned() })
    }

    /// Parses `REGEX=TEMPLATE`, cut at the last `=` that is not escaped by a backslash.
    pub fn parse(text: &str) -> Result<Rename> {
        let cut = text.char_indices().rev().find(|&(i, c)| c == '=' && !text[..i].ends_with('\\')).map(|(i, _)| i);
        match cut {
            Some(cut) => Rename::new(&text[..cut], &text[cut + 1..]),
            None => Err(Error::invalid(format!("the rename {text:?} has no `=` between the expression and its template"))),
        }
    }

    /// The new name.
    pub fn apply(&self, key: &str) -> String {
        self.regex.replace_all(key, self.template.as_str()).into_owned()
    }
}

/// A part of a training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Part {
    /// Everything.
    #[default]
    All,
    /// The model's parameters and buffers, under the names that the model has for them.
    Model,
    /// The optimizer's state.
    Optimizer,
}

/// Which keys, and under which names. The default is all keys under their own.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Selection {
    /// Only keys that match one of these; all when empty.
    pub include: Vec<Glob>,
    /// No keys that match one of these.
    pub exclude: Vec<Glob>,
    /// Only this part, told by where a key sits in the tree.
    pub part: Part,
    /// Only keys that start so, and without it.
    pub strip_prefix: Option<String>,
    /// Put before every key.
    pub add_prefix: Option<String>,
    /// One after the other, after the prefixes.
    pub renames: Vec<Rename>,
}

/// A selected key.
#[derive(Debug)]
pub(crate) struct Selected<'c> {
    /// The key in the checkpoint.
    pub(crate) stored: &'c str,
    /// The key to use.
    pub(crate) key: String,
    /// Where it is to sit in the tree.
    pub(crate) path: KeyPath,
    pub(crate) entry: &'c CatalogEntry,
}

pub(crate) const MODEL_PARTS: &[&str] =
    &["model", "models", "module", "state_dict", "model_state_dict", "model_state", "net", "network"];
const OPTIMIZER_PARTS: &[&str] =
    &["optim", "optimizer", "optimizers", "optim_state", "optimizer_state", "optim_state_dict", "optimizer_state_dict"];

impl Selection {
    /// Keys that fit one of these globs.
    pub fn globs<S: AsRef<str>>(include: &[S]) -> Result<Selection> {
        let include = include.iter().map(|text| Glob::new(text.as_ref())).collect::<Result<_>>()?;
        Ok(Selection { include, ..Selection::default() })
    }

    /// Refuses patterns that fit no key: what they were meant for would not be looked at.
    pub(crate) fn check_used(&self, checkpoint: &Checkpoint) -> Result<()> {
        match Unmatched::in_words(&self.unmatched(checkpoint), checkpoint.path()) {
            None => Ok(()),
            Some((what, None)) => Err(Error::invalid(what)),
            Some((what, Some(near))) => Err(Error::invalid(format!("{what}; {near}"))),
        }
    }

    /// [`Selection::apply`], for whoever is going to read all that is selected: refused where the keys would take far more than
    /// the bytes that are stored of them.
    pub(crate) fn to_read<'c>(&self, checkpoint: &'c Checkpoint) -> Result<Vec<Selected<'c>>> {
        let selected = self.apply(checkpoint)?;
        checkpoint.check_expanded(selected.iter().map(|item| item.stored))?;
        Ok(selected)
    }

    /// The selected keys of a checkpoint, in its order, with their new names and paths.
    pub(crate) fn apply<'c>(&self, checkpoint: &'c Checkpoint) -> Result<Vec<Selected<'c>>> {
        let mut selected = Vec::new();
        let mut taken: HashMap<String, &str> = HashMap::new();
        let part = PartOf::of(self.part, checkpoint);
        for (stored, entry) in &checkpoint.catalog().entries {
            if !self.wants(stored) {
                continue;
            }
            let Some(own) = part.name(stored, entry) else { continue };
            // A prefix that was asked for is the stored key's.
            let Some((key, stripped)) = self.new_name(stored, own) else { continue };
            if let Some(other) = taken.insert(key.clone(), stored) {
                return Err(Error::invalid(format!("{other:?} and {stored:?} would both be named {key:?}")));
            }
            let path = new_path(stored, entry.path.as_ref(), &key, (!stripped.is_empty()).then_some(stripped));
            selected.push(Selected { stored, key, path, entry });
        }
        Ok(selected)
    }

    /// The selected keys, of which there is one at least unless the checkpoint has none at all: what is written empty by
    /// mistake is found out too late.
    pub(crate) fn apply_some<'c>(&self, checkpoint: &'c Checkpoint) -> Result<Vec<Selected<'c>>> {
        let selected = self.apply(checkpoint)?;
        if !selected.is_empty() || checkpoint.catalog().entries.is_empty() {
            return Ok(selected);
        }
        let path = checkpoint.path();
        Err(Error::invalid(match self.part {
            Part::Model => format!("no key of {path} is a model's, or none that was chosen"),
            Part::Optimizer => format!("no key of {path} is an optimizer's, or none that was chosen"),
            Part::All => format!("no key of {path} is chosen"),
        }))
    }

    /// [`Selection::apply_some`], for whoever is going to read and write all of them.
    pub(crate) fn to_write<'c>(&self, checkpoint: &'c Checkpoint) -> Result<Vec<Selected<'c>>> {
        let selected = self.apply_some(checkpoint)?;
        checkpoint.check_expanded(selected.iter().map(|item| item.stored))?;
        Ok(selected)
    }

    /// The names of the selected keys, in the order of the checkpoint.
    pub fn names(&self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        Ok(self.apply(checkpoint)?.into_iter().map(|item| item.key).collect())
    }

    /// Whether the globs want a key, by its name in the checkpoint.
    pub fn wants(&self, key: &str) -> bool {
        let included = self.include.is_empty() || self.include.iter().any(|glob| glob.matches(key));
        included && !self.exclude.iter().any(|glob| glob.matches(key))
    }

    /// The new name of a key that its part calls `own`, and what was taken from its start; `None` when it lacks the prefix.
    fn new_name<'k>(&self, key: &'k str, own: &'k str) -> Option<(String, &'k str)> {
        let kept = match &self.strip_prefix {
            Some(prefix) => key.strip_prefix(prefix.as_str())?,
            None => own,
        };
        let stripped = key.strip_suffix(kept).unwrap_or_default();
        let mut name = kept.to_owned();
        if let Some(prefix) = &self.add_prefix {
            name.insert_str(0, prefix);
        }
        for rename in &self.renames {
            name = rename.apply(&name);
        }
        Some((name, stripped))
    }
}

fn part_of(word: &str) -> Option<Part> {
    if MODEL_PARTS.contains(&word) {
        Some(Part::Model)
    } else if is_optimizer(word) {
        Some(Part::Optimizer)
    } else {
        None
    }
}

/// Whether a word is one for an optimizer; where there are several, as in Lightning's checkpoints, each has a number.
fn is_optimizer(word: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbered = word.rsplit_once('_').filter(|(_, last)| number(last));
    OPTIMIZER_PARTS.contains(&numbered.map_or(word, |(word, _)| word))
}

/// The word for an optimizer that a key begins with, and what follows it and a dot.
pub(crate) fn below_optimizer(key: &str) -> Option<(&str, &str)> {
    key.split_once('.').filter(|(word, _)| is_optimizer(word))
}

/// Slots that Megatron names before the parameter: `optimizer.state.exp_avg.<parameter>`.
pub(crate) const LEADING_SLOTS: &[&str] =
    &["param", "fp32_param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "momentum_buffer"];

/// The part in which a key sits, by the first two segments above it: `model`, or `app.model` as in PyTorch's recipes.
pub(crate) fn part_by_path(entry: &CatalogEntry) -> Option<Part> {
    let (_, above) = entry.path.as_deref()?.split_last()?;
    above.iter().take(2).find_map(|segment| match segment {
        PathSegment::Key(word) => part_of(word),
        PathSegment::Index(_) => None,
    })
}

/// Where a renamed key sits: in the containers it was in, as far as its new name still starts with them.
pub(crate) fn new_path(stored: &str, path: Option<&KeyPath>, key: &str, stripped: Option<&str>) -> KeyPath {
    let alone = || vec![PathSegment::Key(key.to_owned())];
    let Some(path) = path else { return alone() };
    if stored == key {
        return path.clone();
    }
    let text = |segment: &PathSegment| match segment {
        PathSegment::Key(word) => word.clone(),
        PathSegment::Index(index) => index.to_string(),
    };
    let mut segments = path.as_slice();
    if let Some(mut prefix) = stripped {
        while let Some((first, rest)) = segments.split_first() {
            let Some(shorter) = prefix.strip_prefix(text(first).as_str()).and_then(|p| p.strip_prefix('.')) else { break };
            prefix = shorter;
            segments = rest;
        }
        if !prefix.is_empty() {
            return alone();
        }
        if segments.iter().map(text).collect::<Vec<_>>().join(".") == key && !segments.is_empty() {
            return segments.to_vec();
        }
    }
    let mut kept = KeyPath::new();
    let mut rest = key;
    for segment in segments.iter().take(segments.len().saturating_sub(1)) {
        let Some(shorter) = rest.strip_prefix(text(segment).as_str()).and_then(|p| p.strip_prefix('.')) else { break };
        if shorter.is_empty() {
            break;
        }
        rest = shorter;
        kept.push(segment.clone());
    }
    kept.push(PathSegment::Key(rest.to_owned()));
    kept
}

/// Casts by pattern: the first that fits decides.
#[derive(Debug, Clone, Default)]
pub struct CastRules {
    rules: Vec<(Glob, DType)>,
}

impl CastRules {
    /// No casts.
    pub fn new() -> CastRules {
        CastRules::default()
    }

    /// Adds a rule: floating-point tensors whose key fits become `dtype`. Other tensors are left as they are unless the
    /// rule is for an exact key, so that `*=bfloat16` does not touch step counters and masks.
    pub fn add(&mut self, pattern: &str, dtype: DType) -> Result<()> {
        self.rules.push((Glob::new(pattern)?, dtype));
        Ok(())
    }

    /// Parses `bf16` or `GLOB=bf16`; short names of types are understood.
    pub fn parse(&mut self, text: &str) -> Result<()> {
        let (pattern, name) = text.rsplit_once('=').unwrap_or(("*", text));
        let dtype = dtype_named(name)
            .ok_or_else(|| Error::invalid(format!("unknown dtype {:?}", name.strip_prefix("torch.").unwrap_or(name))))?;
        self.add(pattern, dtype)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The type that the first rule for a key names, whatever the tensor is.
    pub(crate) fn asked(&self, key: &str) -> Option<DType> {
        self.rules.iter().find(|(glob, _)| glob.matches(key)).map(|(_, dtype)| *dtype)
    }

    /// The element type that a tensor is to have.
    pub(crate) fn wanted(&self, key: &str, stored: DType) -> DType {
        let rule = self.rules.iter().find(|(glob, _)| glob.matches(key));
        match rule {
            Some((glob, dtype)) if is_float(stored) || glob.text() == key => *dtype,
            _ => stored,
        }
    }
}

/// A dtype by one of its names: `bfloat16`, `torch.bfloat16`, `bf16`.
pub(crate) fn dtype_named(name: &str) -> Option<DType> {
    let name = name.strip_prefix("torch.").unwrap_or(name);
    let long = match name {
        "bf16" => "bfloat16",
        "fp16" | "f16" | "half" => "float16",
        "fp32" | "f32" | "float" => "float32",
        "fp64" | "f64" | "double" => "float64",
        "fp8" | "f8e4m3" | "e4m3" => "float8_e4m3fn",
        "f8e5m2" | "e5m2" => "float8_e5m2",
        other => other,
    };
    DType::from_name(long)
}

/// Whether elements are real floating-point numbers.
pub(crate) fn is_float(dtype: DType) -> bool {
    dtype.name().starts_with("float") && dtype.name() != "float4_e2m1fn_x2" || dtype == DType::BFloat16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_as_people_expect() {
        for (pattern, yes, no) in [
            ("model.*", vec!["model.a", "model.a.b"], vec!["model", "xmodel.a"]),
            ("*.weight", vec!["a.weight", ".weight"], vec!["weight", "a.weights"]),
            ("layers.?.w", vec!["layers.1.w"], vec!["layers.12.w"]),
            ("layers.[0-3].w", vec!["layers.0.w", "layers.3.w"], vec!["layers.4.w"]),
            ("layers.[!0].w", vec!["layers.1.w"], vec!["layers.0.w"]),
            ("{a,b.*}", vec!["a", "b.c"], vec!["b", "ab"]),
            ("{a,}.b", vec!["a.b", ".b"], vec!["b"]),
            ("**.w", vec!["a/b.w", "größe.w"], vec!["w"]),
            ("größe.*", vec!["größe.w"], vec!["große.w"]),
            ("a+(b)|c", vec!["a+(b)|c"], vec!["aab", "c"]),
            ("\\*", vec!["*"], vec!["a"]),
        ] {
            let glob = Glob::new(pattern).unwrap();
            for key in yes {
                assert!(glob.matches(key), "{pattern} {key}");
            }
            for key in no {
                assert!(!glob.matches(key), "{pattern} {key}");
            }
        }
        for bad in ["[", "{a", "a\\", "[z-a]", "a}"] {
            assert!(Glob::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn renames_use_groups() {
        let rename = Rename::parse(r"^layers\.(\d+)\.=blocks.$1.").unwrap();
        assert_eq!(rename.apply("layers.12.w"), "blocks.12.w");
        assert_eq!(rename.apply("x.layers.12.w"), "x.layers.12.w");
        assert!(Rename::parse("no template").is_err());
    }

    #[test]
    fn casts_leave_counters_alone() {
        let mut rules = CastRules::new();
        rules.parse("*.norm.*=fp32").unwrap();
        rules.parse("bf16").unwrap();
        assert_eq!(rules.wanted("a.norm.w", DType::Float16), DType::Float32);
        assert_eq!(rules.wanted("a.w", DType::Float32), DType::BFloat16);
        assert_eq!(rules.wanted("a.step", DType::Int64), DType::Int64);
        assert!(rules.parse("x=int3").is_err());
    }

    #[test]
    fn paths_follow_names() {
        let path = |words: &[&str]| words.iter().map(|w| PathSegment::Key((*w).to_owned())).collect::<KeyPath>();
        let old = path(&["model", "layers.0.w"]);
        let old = Some(&old);
        let stored = "model.layers.0.w";
        assert_eq!(new_path(stored, old, stored, None), path(&["model", "layers.0.w"]));
        assert_eq!(new_path(stored, old, "layers.0.w", Some("model.")), path(&["layers.0.w"]));
        assert_eq!(new_path(stored, old, "model.blocks.0.w", None), path(&["model", "blocks.0.w"]));
        assert_eq!(new_path(stored, old, "other", None), path(&["other"]));
        assert_eq!(new_path(stored, old, "0.w", Some("model.layers.")), path(&["0.w"]));
    }
}
