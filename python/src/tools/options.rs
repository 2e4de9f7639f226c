//! The tools' options, as the typed dicts of `reshard._tools` name them. What is left out is for the engine to decide.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyMapping, PyString};
use reshard::OpenOptions;
use reshard::checkpoint::Format;
use reshard::convert::{ConvertOptions, Target as ConvertTarget};
use reshard::select::{CastRules, Glob, Part, Rename, Selection};
use reshard::steps::{Best, Retention};

use crate::checkpoint::read_map;
use crate::errors::{Raise, invalid};
use crate::options::{Storage, parsed_compression};
use crate::view::{View, views_of};

/// One text, or several.
#[derive(Default)]
pub(crate) struct Texts(pub(crate) Vec<String>);

impl<'py> FromPyObject<'_, 'py> for Texts {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Texts> {
        match given.cast::<PyString>() {
            Ok(text) => Ok(Texts(vec![text.extract()?])),
            Err(_) => Ok(Texts(given.try_iter()?.map(|text| text?.extract()).collect::<PyResult<_>>()?)),
        }
    }
}

/// From regular expressions to what replaces them, in their order.
pub(crate) struct Renames(Vec<(String, String)>);

impl<'py> FromPyObject<'_, 'py> for Renames {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Renames> {
        Ok(Renames(given.cast::<PyMapping>()?.items()?.extract()?))
    }
}

impl Renames {
    pub(crate) fn compiled(given: Option<&Renames>, py: Python<'_>) -> PyResult<Vec<Rename>> {
        let pairs = given.map(|renames| renames.0.as_slice()).unwrap_or_default();
        pairs.iter().map(|(regex, template)| Rename::new(regex, template).or_raise(py)).collect()
    }
}

/// Which keys, under which names, seen through which rules.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Selecting {
    include: Option<Texts>,
    #[pyo3(default)]
    exclude: Option<Texts>,
    #[pyo3(default)]
    keys: Option<Texts>,
    #[pyo3(default)]
    part: Option<String>,
    #[pyo3(default)]
    prefix: Option<String>,
    #[pyo3(default)]
    add_prefix: Option<String>,
    #[pyo3(default)]
    pub(crate) rename: Option<Renames>,
    #[pyo3(default)]
    view: Option<Vec<Py<View>>>,
    #[pyo3(default)]
    parameter_map: Option<String>,
}

impl Selecting {
    pub(crate) fn selection(&self, py: Python<'_>) -> PyResult<Selection> {
        let mut selection = Selection::default();
        selection.include = globs(py, self.include.as_ref())?;
        for key in self.keys.iter().flat_map(|keys| &keys.0) {
            let escaped: String = key.chars().flat_map(|c| if c.is_alphanumeric() { vec![c] } else { vec!['\\', c] }).collect();
            selection.include.push(Glob::new(&escaped).or_raise(py)?);
        }
        selection.exclude = globs(py, self.exclude.as_ref())?;
        selection.part = match self.part.as_deref() {
            None => Part::All,
            Some("model") => Part::Model,
            Some("optimizer") => Part::Optimizer,
            Some(other) => return Err(invalid(py, format!("part is \"model\" or \"optimizer\", not {other:?}"))),
        };
        selection.strip_prefix = self.prefix.clone();
        selection.add_prefix = self.add_prefix.clone();
        selection.renames = Renames::compiled(self.rename.as_ref(), py)?;
        Ok(selection)
    }

    /// How to open what is selected from.
    pub(crate) fn open(&mut self, py: Python<'_>, storage_options: Option<Storage>) -> PyResult<OpenOptions> {
        let mut open = open_options(storage_options);
        open.views = views_of(self.view.take());
        open.parameter_map = read_map(self.parameter_map.as_deref()).or_raise(py)?;
        Ok(open)
    }
}

/// How to open, with a store's settings.
pub(crate) fn open_options(storage_options: Option<Storage>) -> OpenOptions {
    let mut open = OpenOptions::default();
    open.store = storage_options.unwrap_or_default().0;
    open
}

/// Patterns for keys.
pub(crate) fn globs(py: Python<'_>, patterns: Option<&Texts>) -> PyResult<Vec<Glob>> {
    patterns.iter().flat_map(|patterns| &patterns.0).map(|text| Glob::new(text).or_raise(py)).collect()
}

/// What to write, and how.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Writing {
    #[pyo3(default)]
    to: Option<String>,
    #[pyo3(default)]
    ranks: Option<usize>,
    #[pyo3(default)]
    max_shard_size: Option<u64>,
    #[pyo3(default)]
    compression: Option<String>,
    #[pyo3(default)]
    cast: Option<Texts>,
    overwrite: Option<bool>,
    #[pyo3(default)]
    verify: Option<bool>,
    #[pyo3(default)]
    sync: Option<bool>,
    #[pyo3(default)]
    skip_opaque: Option<bool>,
}

impl Writing {
    pub(crate) fn options(&self, py: Python<'_>, selecting: &Selecting) -> PyResult<ConvertOptions> {
        let mut chosen = ConvertOptions::default();
        chosen.selection = selecting.selection(py)?;
        let mut casts = CastRules::new();
        for rule in self.cast.iter().flat_map(|rules| &rules.0) {
            casts.parse(rule).or_raise(py)?;
        }
        chosen.casts = casts;
        chosen.overwrite = self.overwrite.unwrap_or(chosen.overwrite);
        chosen.verify = self.verify.unwrap_or(chosen.verify);
        chosen.sync = self.sync.unwrap_or(chosen.sync);
        chosen.skip_opaque = self.skip_opaque.unwrap_or(chosen.skip_opaque);
        chosen.compression = self.compression.as_deref().map(|name| parsed_compression(py, name)).transpose()?;
        Ok(chosen)
    }

    /// The format to write: asked for, or told by the destination's name, or the one of the source.
    pub(crate) fn target(&self, destination: &str, source: Option<Format>) -> reshard::Result<ConvertTarget> {
        ConvertTarget::choose(self.to.as_deref(), destination, source, self.ranks, self.max_shard_size)
    }
}

/// Which steps to keep.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Keeping {
    keep_last: Option<usize>,
    #[pyo3(default)]
    keep_every: Option<u64>,
    #[pyo3(default)]
    keep_best: Option<String>,
    #[pyo3(default)]
    keep_younger: Option<f64>,
    #[pyo3(default)]
    budget: Option<u64>,
    #[pyo3(default)]
    fallback: bool,
    #[pyo3(default)]
    grace: Option<f64>,
    #[pyo3(default)]
    abandoned: bool,
}

impl Keeping {
    pub(crate) fn retention(&self, py: Python<'_>) -> PyResult<Retention> {
        let age = |seconds: f64| {
            let age = Duration::try_from_secs_f64(seconds);
            age.map_err(|_| invalid(py, format!("invalid age {seconds}: it is a number of seconds that is not negative")))
        };
        if self.keep_every == Some(0) {
            return Err(invalid(py, "invalid keep_every 0: it needs at least 1"));
        }
        let mut retention = Retention::default();
        retention.last = self.keep_last;
        retention.every = self.keep_every;
        retention.best = self.keep_best.as_deref().map(Best::parse).transpose().or_raise(py)?;
        retention.younger_than = self.keep_younger.map(age).transpose()?;
        retention.budget = self.budget;
        retention.fallback = self.fallback;
        retention.grace = self.grace.map_or(Ok(retention.grace), age)?;
        retention.abandoned = self.abandoned;
        Ok(retention)
    }
}

/// How to rebuild a `.metadata`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Recovering {
    pub(crate) replace: bool,
    #[pyo3(default)]
    pub(crate) accept_absent_ranks: bool,
    #[pyo3(default)]
    pub(crate) undo_edits: bool,
    #[pyo3(default)]
    pub(crate) dry_run: bool,
}
