//! Rules that look at a weight beside others: those of the same name in other layers and experts, which are initialised and trained
//! alike.

use indexmap::IndexMap;

use super::HealthFinding;
use super::names::{is_bias, is_buffer};
use super::rules::HealthLimits;
use crate::checkpoint::Checkpoint;
use crate::numbers::TensorStats;
use crate::select::is_float;

/// A median of fewer says nothing of one of them.
const LEAST: usize = 3;

/// A weight, with what is known of its numbers.
struct Weight<'s> {
    key: &'s str,
    stats: &'s TensorStats,
    is_vector: bool,
}

impl Weight<'_> {
    fn is_zero(&self) -> bool {
        self.stats.zeros == self.stats.elements
    }
}

/// What rules say of weights beside those that are alike.
pub(super) fn judge<'s>(
    checkpoint: &Checkpoint,
    weights: impl Iterator<Item = (&'s str, &'s TensorStats)>,
    limits: &HealthLimits,
    found: &mut Vec<HealthFinding>,
) {
    // By their dimensions, too: in a sequence of modules numbers are all that tells a norm from a projection.
    let mut families: IndexMap<(String, usize), Vec<Weight<'s>>> = IndexMap::new();
    for (key, stats) in weights.filter(|(key, stats)| stats.elements > 1 && !is_bias(key) && !is_buffer(key)) {
        if let Ok(tensor) = checkpoint.values(key)
            && is_float(tensor.dtype)
        {
            let dimensions = tensor.shape.len();
            families.entry((family(key), dimensions)).or_default().push(Weight { key, stats, is_vector: dimensions == 1 });
        }
    }
    let vectors = || families.values().flatten().filter(|weight| weight.is_vector);
    let most_are_zero = 2 * vectors().filter(|weight| weight.is_zero()).count() >= vectors().count();
    for alike in families.values() {
        outliers(alike, limits, found);
        // Some models begin with scales of zero, in every layer or in all of them; one alone was zeroed.
        let is_fresh = if alike.len() > 1 { alike.iter().all(Weight::is_zero) } else { most_are_zero };
        for weight in alike.iter().filter(|weight| weight.is_vector && weight.is_zero() && !is_fresh) {
            let what = format!("all {} elements, unlike others", weight.stats.elements);
            HealthFinding::add(found, limits, "zero-weight", weight.key, None, what);
        }
    }
}

fn outliers(alike: &[Weight<'_>], limits: &HealthLimits, found: &mut Vec<HealthFinding>) {
    let mut sizes: Vec<f64> = alike.iter().filter_map(|weight| weight.stats.rms).collect();
    if sizes.len() < LEAST {
        return;
    }
    sizes.sort_by(f64::total_cmp);
    let median = sizes[(sizes.len() - 1) / 2];
    for weight in alike {
        let ratio = weight.stats.rms.map_or(0.0, |rms| rms / median);
        if median > 0.0 && ratio > limits.of("outlier-weight") {
            let what = format!("its RMS is {ratio:.3e} times that of others of its name");
            HealthFinding::add(found, limits, "outlier-weight", weight.key, Some(ratio), what);
        }
    }
}

/// The name that all layers, or all experts, have for a weight: its key without numbers.
fn family(key: &str) -> String {
    let part = |part: &str| if part.bytes().all(|byte| byte.is_ascii_digit()) { "*".to_owned() } else { part.to_owned() };
    key.split('.').map(part).collect::<Vec<_>>().join(".")
}
