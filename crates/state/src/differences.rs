//! What was given against what is wanted: one report of every difference, which is either returned or the error itself.

use std::fmt;

use reshard_formats::DType;
use reshard_layout::Dims;

use crate::StateError;
use crate::error::list;

/// Every difference between two sets of named things.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Wanted, not given.
    pub missing: Vec<String>,
    /// Given, not wanted.
    pub unexpected: Vec<String>,
    /// Missing names with the unexpected name that looks most like them.
    pub hints: Vec<(String, String)>,
    /// Given with another shape: key, given, wanted.
    pub shapes: Vec<(String, Dims, Dims)>,
    /// Given with another dtype: key, given, wanted.
    pub dtypes: Vec<(String, DType, DType)>,
}

impl Differences {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.shapes.is_empty() && self.dtypes.is_empty()
    }

    /// The error, if differences are not allowed. Shapes and dtypes never are: no leniency makes them fit.
    pub fn into_result(mut self, strict: bool) -> Result<Differences, StateError> {
        let fits = self.shapes.is_empty() && self.dtypes.is_empty();
        if fits && (self.is_empty() || !strict) {
            return Ok(self);
        }
        self.find_hints();
        Err(StateError::Differences(Box::new(self)))
    }

    fn find_hints(&mut self) {
        // Quadratic in the number of names that differ: worth it for a typo, not for two unrelated models.
        if self.missing.len().saturating_mul(self.unexpected.len()) > 10_000 {
            return;
        }
        self.hints = self
            .missing
            .iter()
            .filter_map(|name| {
                let near = crate::names::nearest(name, self.unexpected.iter().map(String::as_str))?;
                Some((name.clone(), near))
            })
            .collect();
    }
}

/// With the words of `nn.Module.load_state_dict`, which people search logs for.
impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            let names = list(&self.missing, |name| {
                let hint = self.hints.iter().find(|(missing, _)| missing == name);
                match hint {
                    Some((_, near)) => format!("'{name}' (there is '{near}')"),
                    None => format!("'{name}'"),
                }
            });
            parts.push(format!("Missing key(s) in state_dict: {names}"));
        }
        if !self.unexpected.is_empty() {
            let names = list(&self.unexpected, |name| format!("'{name}'"));
            parts.push(format!("Unexpected key(s) in state_dict: {names}"));
        }
        if !self.shapes.is_empty() {
            let shapes = list(&self.shapes, |(key, given, wanted)| {
                format!("size mismatch for '{key}': it has shape {:?}, wanted {:?}", given.as_slice(), wanted.as_slice())
            });
            parts.push(shapes);
        }
        if !self.dtypes.is_empty() {
            let dtypes =
                list(&self.dtypes, |(key, given, wanted)| format!("'{key}' is {}, wanted {}", given.name(), wanted.name()));
            parts.push(dtypes);
        }
        f.write_str(&parts.join("; "))
    }
}
