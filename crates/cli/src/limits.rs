//! The limits by which a page judges numbers, and what is not as usual about them: a verdict names the rules that it leaves out.

use reshard::health::{HEALTH_RULES, HealthLimits};

/// Limits of rules.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    /// As the rules take them.
    pub(crate) limits: HealthLimits,
    /// Rules that nothing can break: they are off, or their limit is infinite.
    pub(crate) off: Vec<String>,
    /// Rules with another limit than usual, as `large-weight=1000`.
    pub(crate) other: Vec<String>,
}

impl Limits {
    /// What texts such as `large-weight=1e3` and `no-state=off` say; the last about a rule counts.
    pub(crate) fn parse(texts: &[String]) -> reshard::Result<Limits> {
        let limits = HealthLimits::of_texts(texts)?;
        let (mut off, mut other) = (Vec::new(), Vec::new());
        for rule in HEALTH_RULES {
            match limits.shown(rule) {
                Some(limit) if limit == rule.limit => {}
                Some(Some(limit)) => other.push(format!("{}={limit}", rule.name)),
                Some(None) | None => off.push(rule.name.to_owned()),
            }
        }
        Ok(Limits { limits, off, other })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_usual_is_known() {
        let texts = ["nan=off", "large-weight=1e3", "large-update=1", "large-update=off", "mostly-zero=inf"].map(str::to_owned);
        let found = Limits::parse(&texts).unwrap();
        assert_eq!(found.off, ["nan", "mostly-zero", "large-update"]);
        assert_eq!(found.other, ["large-weight=1000"]);
        assert!(Limits::parse(&["nan=1".to_owned()]).is_err());
    }
}
