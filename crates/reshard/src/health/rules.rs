//! The rules of health: what each says, how grave it is to break it, and from which number on.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::verify::Severity;

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HealthRule {
    /// Its name, by which its limit is set.
    pub name: &'static str,
    /// How grave it is.
    pub severity: Severity,
    /// What it says of what it finds; `{limit}` is its limit.
    pub says: &'static str,
    /// From which number on, where it has one.
    pub limit: Option<f64>,
}

const fn rule(name: &'static str, severity: Severity, limit: Option<f64>, says: &'static str) -> HealthRule {
    HealthRule { name, severity, says, limit }
}

/// Every rule.
pub const HEALTH_RULES: &[HealthRule] = &[
    rule("nan", Severity::Error, None, "a floating-point tensor has elements that are NaN"),
    rule("inf", Severity::Error, None, "a floating-point tensor has elements that are infinite"),
    rule("large-weight", Severity::Error, Some(1e4), "a weight is larger in magnitude than {limit}"),
    rule(
        "outlier-weight",
        Severity::Error,
        Some(1e3),
        "a weight's RMS is more than {limit} times that of weights of its name in other layers",
    ),
    rule(
        "zero-weight",
        Severity::Warning,
        None,
        "all elements of a weight matrix are zero, or of a norm's weight while those of others are not",
    ),
    rule("mostly-zero", Severity::Warning, Some(0.99), "more than this share of a weight matrix is zero"),
    rule("constant-weight", Severity::Warning, None, "all elements of a weight matrix are the same"),
    rule("subnormal", Severity::Warning, Some(0.5), "more than this share of a weight is subnormal and has lost digits"),
    rule(
        "no-scales",
        Severity::Warning,
        None,
        "a weight is stored as codes whose scales are missing or do not fit: its numbers are unknown",
    ),
    rule("nan-value", Severity::Warning, None, "a plain value is NaN, or holds one"),
    rule("negative-second-moment", Severity::Error, None, "a second moment, a mean of squares, is negative"),
    rule("large-second-moment", Severity::Error, Some(1e8), "a second moment is larger than {limit}: gradients explode"),
    rule(
        "dead-parameter",
        Severity::Warning,
        None,
        "a second moment is all zero after a step: no gradient reaches the parameter",
    ),
    rule("steps-differ", Severity::Warning, None, "parameters of one optimizer have taken different numbers of steps"),
    rule("no-state", Severity::Warning, None, "a parameter has no optimizer state although others have"),
    rule(
        "large-update",
        Severity::Warning,
        Some(0.1),
        "the next update, estimated, is more than this share of the weights (not of biases)",
    ),
];

/// From which numbers on rules are broken, and which are not looked at.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HealthLimits {
    /// By the name of the rule; `None` for one that is off.
    set: BTreeMap<&'static str, Option<f64>>,
}

impl HealthLimits {
    /// What texts such as `large-weight=1e3` and `no-state=off` say; the last about a rule counts.
    pub fn of_texts(texts: &[String]) -> Result<HealthLimits> {
        let mut limits = HealthLimits::default();
        for text in texts {
            limits.parse(text)?;
        }
        Ok(limits)
    }

    /// Sets the limit of a rule.
    pub fn set(&mut self, name: &str, limit: f64) -> Result<()> {
        let rule = find(name)?;
        if rule.limit.is_none() {
            return Err(Error::invalid(format!("the rule {name} has no limit: it can only be turned off")));
        }
        if limit.is_nan() || limit < 0.0 {
            return Err(Error::invalid(format!("invalid limit {limit} of {name}: no magnitude, count or share is below zero")));
        }
        self.set.insert(rule.name, Some(limit));
        Ok(())
    }

    /// Turns a rule off.
    pub fn turn_off(&mut self, name: &str) -> Result<()> {
        self.set.insert(find(name)?.name, None);
        Ok(())
    }

    /// Sets what a text such as `large-weight=1e3` or `no-state=off` says.
    pub fn parse(&mut self, text: &str) -> Result<()> {
        match text.split_once('=') {
            Some((name, "off")) => self.turn_off(name.trim()),
            Some((name, limit)) => match limit.trim().parse() {
                Ok(limit) => self.set(name.trim(), limit),
                Err(_) => Err(Error::invalid(format!("invalid limit {text:?}: {limit:?} is neither a number nor off"))),
            },
            None => Err(Error::invalid(format!("invalid limit {text:?}: write it like large-weight=1e3 or no-state=off"))),
        }
    }

    /// The limit of a rule in words of the table of rules: a number, nothing where it has none, `None` where it is off.
    pub fn shown(&self, rule: &HealthRule) -> Option<Option<f64>> {
        self.is_on(rule.name).then(|| Some(self.of(rule.name)).filter(|limit| limit.is_finite()))
    }

    /// Whether a rule is looked at.
    pub(super) fn is_on(&self, name: &str) -> bool {
        self.set.get(name) != Some(&None)
    }

    /// The limit of a rule; infinite for one without.
    pub(super) fn of(&self, name: &str) -> f64 {
        let default = HEALTH_RULES.iter().find(|rule| rule.name == name).and_then(|rule| rule.limit);
        self.set.get(name).copied().flatten().or(default).unwrap_or(f64::INFINITY)
    }
}

fn find(name: &str) -> Result<&'static HealthRule> {
    HEALTH_RULES.iter().find(|rule| rule.name == name).ok_or_else(|| {
        let names: Vec<&str> = HEALTH_RULES.iter().map(|rule| rule.name).collect();
        Error::invalid(format!("unknown rule {name:?}; rules: {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_set_by_name_and_rules_turned_off() {
        let mut limits = HealthLimits::default();
        assert_eq!(limits.of("large-weight"), 1e4);
        limits.parse("large-weight=1e3").unwrap();
        limits.parse("no-state=off").unwrap();
        assert_eq!((limits.of("large-weight"), limits.is_on("no-state"), limits.is_on("nan")), (1e3, false, true));
        for wrong in ["large-weight", "large=1", "nan=1", "large-weight=much", "large-weight=NaN", "large-weight=-1"] {
            assert!(limits.parse(wrong).is_err(), "{wrong}");
        }
    }
}
