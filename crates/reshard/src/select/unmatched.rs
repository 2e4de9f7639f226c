//! Patterns that fit nothing: nearly always a mistake, which would otherwise pass in silence.

use super::{CastRules, Glob, Selection};
use crate::checkpoint::Checkpoint;
use crate::mismatch::near_names;

/// A pattern that no key fits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unmatched {
    /// The pattern, prefix or expression as it was given.
    pub pattern: String,
    /// Keys that look like it.
    pub near: Vec<String>,
}

impl Unmatched {
    /// What to say of patterns that no key fits, and what may have been meant; `None` when there are none.
    pub fn in_words(all: &[Unmatched], path: &str) -> Option<(String, Option<String>)> {
        let first = all.first()?;
        let quoted =
            |texts: &mut dyn Iterator<Item = &String>| texts.map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ");
        let what = format!("no key of {path} fits {}", quoted(&mut all.iter().map(|unused| &unused.pattern)));
        let near = (!first.near.is_empty()).then(|| format!("did you mean {}?", quoted(&mut first.near.iter())));
        Some((what, near))
    }
}

fn told(pattern: &str, checkpoint: &Checkpoint) -> Unmatched {
    let plain: String = pattern.chars().filter(|c| !matches!(c, '*' | '?' | '[' | ']' | '{' | '}' | '^' | '$' | '\\')).collect();
    Unmatched { pattern: pattern.to_owned(), near: near_names(plain.trim_matches('.'), checkpoint.keys()) }
}

/// Those of some patterns that no key fits.
pub fn unmatched_globs<'g>(globs: impl IntoIterator<Item = &'g Glob>, checkpoint: &Checkpoint) -> Vec<Unmatched> {
    let unused = globs.into_iter().filter(|glob| !checkpoint.keys().any(|key| glob.matches(key)));
    unused.map(|glob| told(glob.text(), checkpoint)).collect()
}

/// Those of some patterns for the names that a selection gives which fit neither such a name nor a key.
pub(crate) fn unmatched_names<'g>(
    globs: impl IntoIterator<Item = &'g Glob>,
    selection: &Selection,
    checkpoint: &Checkpoint,
) -> Vec<Unmatched> {
    let Ok(names) = selection.names(checkpoint) else { return Vec::new() };
    let unused = globs.into_iter().filter(|glob| !names.iter().any(|name| glob.matches(name)));
    unused.map(|glob| told(glob.text(), checkpoint)).collect()
}

impl Selection {
    /// The patterns, prefixes and renames that no key fits.
    pub fn unmatched(&self, checkpoint: &Checkpoint) -> Vec<Unmatched> {
        let mut unused = unmatched_globs(self.include.iter().chain(&self.exclude), checkpoint);
        if let Some(prefix) = &self.strip_prefix
            && !checkpoint.keys().any(|key| key.starts_with(prefix.as_str()))
        {
            unused.push(told(prefix, checkpoint));
        }
        // A rename is tried on what the ones before it made.
        let bare = Selection { renames: Vec::new(), ..self.clone() };
        let Ok(selected) = bare.apply(checkpoint) else { return unused };
        let mut names: Vec<String> = selected.into_iter().map(|item| item.key).collect();
        for rename in &self.renames {
            if !names.is_empty() && !names.iter().any(|name| rename.regex.is_match(name)) {
                unused.push(told(rename.regex.as_str(), checkpoint));
            }
            names.iter_mut().for_each(|name| *name = rename.apply(name));
        }
        unused
    }
}

impl CastRules {
    /// The patterns that no selected key fits.
    pub fn unmatched(&self, selection: &Selection, checkpoint: &Checkpoint) -> Vec<Unmatched> {
        unmatched_names(self.rules.iter().map(|(glob, _)| glob), selection, checkpoint)
    }
}
