//! A folder of steps that someone keeps: what is complete, what is best, what may go. The engine decides.

use std::time::Duration;

use pyo3::prelude::*;
use reshard::steps::{Best, Retention, StepState, StepsMemory, StepsOptions};
use reshard::storage::Address;

use crate::errors::Raise;
use crate::options::Storage;
use crate::run::run;

/// One step of a folder.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct Step {
    number: u64,
    path: String,
    /// Why it is not complete; `None` when it is.
    why: Option<String>,
}

/// What removing did.
#[pyclass(module = "reshard._reshard", frozen, get_all)]
pub(crate) struct Pruned {
    /// Names of the steps that went.
    removed: Vec<String>,
    /// What could not be removed, and why.
    failed: Vec<String>,
}

/// A folder whose steps are named by a prefix and a number.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct StepFolder {
    root: String,
    options: StepsOptions,
}

#[pymethods]
impl StepFolder {
    /// Steps that hold the key `marker` are the caller's own, and only those are ever removed.
    #[new]
    #[pyo3(signature = (root, prefix, marker, storage_options=None))]
    fn new(root: String, prefix: String, marker: String, storage_options: Option<Storage>) -> PyResult<StepFolder> {
        let mut options = StepsOptions::default();
        options.store = storage_options.unwrap_or_default().0;
        options.prefix = Some(prefix);
        options.marker = Some(marker);
        options.memory = Some(StepsMemory::default());
        Ok(StepFolder { root, options })
    }

    /// The steps that are DCP checkpoints, complete or not, oldest first; anything else of such a name is left out.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<Step>> {
        let (root, options) = (self.root.clone(), self.options.clone());
        let found = run(py, &self.options.control, move || reshard::steps::steps(&root, &options))?.or_raise(py)?;
        let step = |step: reshard::steps::Step| {
            let why = match step.state {
                StepState::Valid if step.format.is_some_and(reshard::checkpoint::Format::is_dcp) => None,
                StepState::Incomplete { why } => Some(why),
                _ => return None,
            };
            Some(Step { number: step.number?, path: step.path, why })
        };
        Ok(found.into_iter().filter_map(step).collect())
    }

    /// The step with the best number under a key.
    fn best(&self, py: Python<'_>, key: String, largest: bool) -> PyResult<Option<u64>> {
        let (root, options) = (self.root.clone(), self.options.clone());
        let rule = Best::new(key, largest, 1);
        let found = run(py, &self.options.control, move || reshard::steps::best(&root, &rule, &options))?.or_raise(py)?;
        Ok(found.into_iter().next().and_then(|step| step.number))
    }

    /// Removes the steps that no rule keeps and saves that were abandoned longer ago than `grace` seconds.
    #[pyo3(signature = (grace, last=None, every=None, best=None, younger=None, budget=None, fallback=false))]
    #[allow(clippy::too_many_arguments)]
    fn prune(
        &self,
        py: Python<'_>,
        grace: f64,
        last: Option<usize>,
        every: Option<u64>,
        best: Option<(String, bool, usize)>,
        younger: Option<f64>,
        budget: Option<u64>,
        fallback: bool,
    ) -> PyResult<Pruned> {
        let mut rules = Retention::default();
        rules.grace = Duration::try_from_secs_f64(grace).unwrap_or(rules.grace);
        rules.last = last;
        rules.every = every;
        rules.younger_than = younger.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        rules.budget = budget;
        rules.fallback = fallback;
        rules.best = best.map(|(key, largest, count)| Best::new(key, largest, count));
        let (root, options) = (self.root.clone(), self.options.clone());
        let report =
            run(py, &self.options.control, move || reshard::steps::prune(&root, &rules, false, &options))?.or_raise(py)?;
        let removed = report.steps.into_iter().filter(|d| !d.keep).map(|d| d.step.name).collect();
        Ok(Pruned { removed, failed: report.failed })
    }
}

/// Whether a text is a path, or an address of a scheme that is known here.
#[pyfunction]
pub(crate) fn is_address(text: &str) -> bool {
    Address::parse(text).is_ok()
}
