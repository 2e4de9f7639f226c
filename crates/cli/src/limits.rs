//! The limits by which a page judges numbers, and what is not as usual about them: a verdict names the rules that it leaves out.

use reshard::health::HealthLimits;

/// Limits of rules.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    /// As the rules take them.
    pub(crate) limits: HealthLimits,
    /// Rules that nothing can break: they are off, or their limit is infinite.
    pub(crate) off: Vec<String>,
    /// Rules with another limit than usual, as `large-weight=1e3`.
    pub(crate) other: Vec<String>,
}

impl Limits {
    /// What texts such as `large-weight=1e3` and `no-state=off` say; the last about a rule counts.
    pub(crate) fn parse(texts: &[String]) -> reshard::Result<Limits> {
        let mut found = Limits::default();
        for text in texts {
            found.limits.parse(text)?;
            let (rule, limit) = text.split_once('=').unwrap_or((text, ""));
            let (rule, limit) = (rule.trim(), limit.trim());
            found.off.retain(|known| known != rule);
            found.other.retain(|known| known.split('=').next() != Some(rule));
            match limit.parse::<f64>() {
                Ok(number) if number.is_finite() => found.other.push(format!("{rule}={limit}")),
                _ => found.off.push(rule.to_owned()),
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_usual_is_known() {
        let texts = ["nan=off", "large-weight=1e3", "large-update=1", "large-update=off", "mostly-zero=inf"].map(str::to_owned);
        let found = Limits::parse(&texts).unwrap();
        assert_eq!(found.off, ["nan", "large-update", "mostly-zero"]);
        assert_eq!(found.other, ["large-weight=1e3"]);
        assert!(Limits::parse(&["nan=1".to_owned()]).is_err());
    }
}
