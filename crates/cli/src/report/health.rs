//! What the page knows about a checkpoint's health: what was looked at, what came of it, and what the numbers are.
//!
//! Nothing is called healthy that was not looked at: the verdict is made of three checks, and each says whether it was done.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::data::Diff;

/// Whether a checkpoint is well, as far as it was looked at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// The verdict.
    pub state: HealthState,
    /// What it rests on.
    pub checks: Checks,
    /// What was found; no page lists more than a thousand.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// How many there are in all.
    #[serde(default)]
    pub found: u64,
}

/// What can be looked at.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Checks {
    /// Keys, shapes, coverage, files and their lengths.
    pub structure: Check,
    /// Stored checksums against the data.
    pub checksums: Check,
    /// The elements' values.
    pub numbers: Check,
}

/// One of the checks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// What came of it.
    pub state: CheckState,
    /// In words.
    pub note: String,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// Nobody looked.
    #[default]
    Unchecked,
    /// A server is looking right now.
    Running,
    /// Nothing is wrong with what was looked at, but something was left out.
    Partial,
    /// Nothing is wrong.
    Fine,
    /// Something to know.
    Warning,
    /// Something is wrong.
    Bad,
}

/// A verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthState {
    /// Nobody looked.
    #[default]
    Unchecked,
    /// Nothing is wrong with what was looked at, but not everything was.
    Partial,
    /// Everything was looked at, and nothing is wrong.
    Healthy,
    /// Loadable, with something to know.
    Warning,
    /// The bytes are those that were saved; the numbers are no good.
    Unwell,
    /// Something is missing or damaged.
    Damaged,
}

/// One thing found wrong.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// What is wrong, in one sentence.
    pub text: String,
    /// Whether it makes the checkpoint bad, or is merely to know.
    #[serde(default)]
    pub bad: bool,
    /// The rule of health that it breaks, where it is about numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// The key it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The file it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// The place in that file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

/// Findings that a page lists.
const MOST: usize = 1000;

impl Check {
    /// A check and what to say of it.
    pub fn new(state: CheckState, note: impl Into<String>) -> Check {
        Check { state, note: note.into() }
    }
}

impl Health {
    /// The verdict that checks give.
    pub fn of(checks: Checks, mut findings: Vec<Finding>) -> Health {
        let all = [&checks.structure, &checks.checksums, &checks.numbers].map(|check| check.state);
        let state = if all[..2].contains(&CheckState::Bad) {
            HealthState::Damaged
        } else if all[2] == CheckState::Bad {
            HealthState::Unwell
        } else if all.contains(&CheckState::Warning) {
            HealthState::Warning
        } else if all.iter().all(|state| *state == CheckState::Fine) {
            HealthState::Healthy
        } else if all.contains(&CheckState::Fine) || all.contains(&CheckState::Partial) {
            HealthState::Partial
        } else {
            HealthState::Unchecked
        };
        findings.sort_by_key(|finding| !finding.bad);
        let found = findings.len() as u64;
        findings.truncate(MOST);
        Health { state, checks, findings, found }
    }
}

impl Health {
    /// The verdict once numbers are judged, too: what came of it, and what was found.
    pub fn with_numbers(self, (numbers, found): (Check, Vec<Finding>)) -> Health {
        Health::of(Checks { numbers, ..self.checks }, [self.findings, found].concat())
    }
}

/// What the values look like, by tensor number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Numbers {
    /// Statistics.
    pub stats: BTreeMap<u32, Stats>,
    /// The rules that a tensor breaks; the first says how grave it is.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub flags: BTreeMap<u32, Flag>,
    /// The next update over the weights, estimated from the optimizer's moments, by the number of the weights.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub updates: BTreeMap<u32, f64>,
    /// Statistics of B's tensors, by the numbers of A's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other: BTreeMap<u32, Stats>,
    /// The rules that B's tensors break, by the numbers of A's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other_flags: BTreeMap<u32, Flag>,
    /// The next update over the weights in B, by the numbers of A's tensors.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other_updates: BTreeMap<u32, f64>,
    /// The rules that tensors of B alone break, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub new_flags: BTreeMap<String, Flag>,
    /// What rules say of B's numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_check: Option<Check>,
}

/// What rules say of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Flag {
    /// Whether one of them makes it bad.
    pub bad: bool,
    /// Their names.
    pub rules: Vec<String>,
}

/// Statistics of a tensor's values. Those that have no finite value are left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    /// Smallest finite value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// Largest finite value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// Mean of the finite values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<f64>,
    /// Standard deviation of the finite values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub std: Option<f64>,
    /// Root mean square of the finite values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rms: Option<f64>,
    /// Elements looked at.
    pub count: u64,
    /// Elements equal to zero.
    pub zeros: u64,
    /// Elements that are not a number.
    pub nans: u64,
    /// Infinite elements.
    pub infs: u64,
    /// Elements so small that they have lost digits.
    #[serde(default, skip_serializing_if = "super::data::is_zero")]
    pub subnormals: u64,
    /// The 1st, 5th, 25th, 50th, 75th, 95th and 99th percentile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub percentiles: Vec<f64>,
    /// Counts by magnitude.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub magnitudes: Option<Magnitudes>,
    /// Counts of finite values in bins of equal width.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<Histogram>,
}

/// Counts of values by magnitude: the first is of those from 2^low up to 2^(low+1), and so on. Zeros are not in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Magnitudes {
    /// The exponent of the first count.
    pub low: i32,
    /// The counts.
    pub counts: Vec<u64>,
}

/// Counts of values in bins of equal width.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    /// Lower edge of the first bin.
    pub low: f64,
    /// Upper edge of the last bin.
    pub high: f64,
    /// Count in each bin.
    pub counts: Vec<u64>,
}

/// What `/api/numbers` answers: how far the scan behind the page is, and at its end what it found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Scan<'a> {
    /// Nobody asked for one.
    #[default]
    Off,
    /// So many bytes of so many are read.
    Running {
        /// Bytes read.
        done: u64,
        /// Bytes to read.
        total: u64,
    },
    /// It is done, or could not go on: the verdict says.
    Done {
        /// What the values look like, if they were read.
        #[serde(skip_serializing_if = "Option::is_none")]
        numbers: Option<&'a Numbers>,
        /// The verdict now.
        health: &'a Health,
        /// The verdict on what it is compared with.
        #[serde(skip_serializing_if = "Option::is_none")]
        other_health: Option<&'a Health>,
        /// How that differs.
        #[serde(skip_serializing_if = "Option::is_none")]
        diff: Option<&'a Diff>,
        /// Why that is not known.
        #[serde(skip_serializing_if = "Option::is_none")]
        not_compared: Option<&'a str>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(states: [CheckState; 3]) -> HealthState {
        let [structure, checksums, numbers] = states.map(|state| Check::new(state, ""));
        Health::of(Checks { structure, checksums, numbers }, Vec::new()).state
    }

    #[test]
    fn nothing_is_healthy_that_was_not_looked_at() {
        use CheckState::{Bad, Fine, Partial, Running, Unchecked, Warning};
        assert_eq!(verdict([Fine, Fine, Fine]), HealthState::Healthy);
        for missing in [
            [Fine, Unchecked, Fine],
            [Fine, Fine, Unchecked],
            [Unchecked, Fine, Fine],
            [Fine, Fine, Running],
            [Fine, Fine, Partial],
        ] {
            assert_eq!(verdict(missing), HealthState::Partial);
        }
        assert_eq!(verdict([Fine, Fine, Bad]), HealthState::Unwell);
        assert_eq!(verdict([Fine, Bad, Bad]), HealthState::Damaged);
        assert_eq!(verdict([Fine, Unchecked, Warning]), HealthState::Warning);
        assert_eq!(verdict([Unchecked; 3]), HealthState::Unchecked);
    }

    #[test]
    fn the_gravest_findings_are_kept() {
        let finding = |bad| Finding { bad, ..Finding::default() };
        let many = (0..MOST).map(|_| finding(false)).chain([finding(true)]).collect();
        let health = Health::of(Checks::default(), many);
        assert!(health.findings[0].bad && health.findings.len() == MOST && health.found == MOST as u64 + 1);
    }
}
