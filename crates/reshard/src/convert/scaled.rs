//! Block-scaled weights on their way into another file: where a cast asks for their values, codes times scales are written under
//! the weight's name, and neither codes nor scales. Where none does, both stay as they are.

use std::collections::HashMap;

use reshard_formats::PathSegment;

use super::ConvertOptions;
use crate::cast::holds_values;
use crate::checkpoint::{CatalogTensor, Checkpoint, ScaledWeight};
use crate::error::{Error, Result};
use crate::select::Selected;

/// What a selected key is of a block-scaled weight.
pub(super) enum Role<'p> {
    /// Nothing of one.
    Plain,
    /// Codes in place of which the weight's values are written.
    Weight(&'p CatalogTensor),
    /// Scales of such codes, which are not written.
    Gone,
    /// Codes or scales that stay as they are.
    Kept,
}

/// Finds what each selected key is. Keys of weights that become values get the weights' names.
pub(super) fn roles<'p>(source: &'p Checkpoint, options: &ConvertOptions, items: &mut [Selected<'p>]) -> Result<Vec<Role<'p>>> {
    if options.casts.is_empty() {
        return Ok(items.iter().map(|_| Role::Plain).collect());
    }
    let mut by_codes: HashMap<&str, (&str, &'p ScaledWeight)> = HashMap::new();
    let mut wrong: HashMap<&str, &str> = HashMap::new();
    for (name, weight) in source.scaled_weights() {
        match weight {
            Ok(weight) => drop(by_codes.insert(&weight.codes, (name, weight))),
            Err(why) => drop(wrong.insert(name, why)),
        }
    }
    let mut scales: HashMap<&str, bool> = by_codes.values().map(|(_, weight)| (weight.scales.as_str(), false)).collect();
    let mut roles = Vec::with_capacity(items.len());
    for item in items.iter_mut() {
        if let Some(why) = wrong.get(item.stored.strip_suffix("_blocks").unwrap_or(item.stored)).or(wrong.get(item.stored))
            && options.casts.asked(&item.key).is_some_and(|dtype| dtype.name() != item.entry.dtype_name())
        {
            return Err(Error::unsupported(format!("{why}: a cast of codes alone gives other numbers")));
        }
        let Some((name, weight)) = by_codes.get(item.stored) else {
            roles.push(Role::Plain);
            continue;
        };
        // A packed weight has another name than its codes.
        let packed = item.stored != *name;
        let key = if packed { item.key.strip_suffix("_blocks").unwrap_or(&item.key) } else { &item.key };
        let asked = options.casts.asked(key).filter(|dtype| dtype.name() != item.entry.dtype_name());
        roles.push(match (asked, weight.tensor()) {
            (Some(dtype), _) if !holds_values(dtype) => {
                let (codes, scales) = (&weight.codes, &weight.scales);
                let why = "their values need a float of 16 bits or more";
                return Err(Error::unsupported(format!(
                    "{codes:?} is codes scaled by {scales:?}, and {why}, not {}",
                    dtype.name()
                )));
            }
            (Some(_), Some(tensor)) => {
                scales.insert(&weight.scales, true);
                item.key = key.to_owned();
                if let Some(PathSegment::Key(last)) = item.path.last_mut().filter(|_| packed) {
                    *last = last.strip_suffix("_blocks").unwrap_or(last).to_owned();
                }
                Role::Weight(tensor)
            }
            _ => Role::Kept,
        });
    }
    for (item, role) in items.iter().zip(&mut roles) {
        match scales.get(item.stored) {
            Some(true) => *role = Role::Gone,
            Some(false) => *role = Role::Kept,
            None => {}
        }
    }
    Ok(roles)
}
