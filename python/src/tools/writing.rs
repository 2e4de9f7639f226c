//! Tools that write a checkpoint out of others: convert, relayout, merge, edit. Options come as dicts.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use reshard::checkpoint::Format;
use reshard::convert::{ConvertOptions, Destination, Target as ConvertTarget};
use reshard::edit::EditOptions;
use reshard::mesh::Layout;
use reshard::select::{CastRules, Glob, Part, Rename, Selection};
use reshard::{Checkpoint, OpenOptions};

use crate::errors::{Raise, invalid};
use crate::options::{Control, Storage, store_with};
use crate::reports::report;
use crate::run::run;
use crate::value::plain;
use crate::view::{View, views_of};

/// How to open, with a store's settings.
pub(crate) fn open_options(storage_options: Option<Storage>) -> OpenOptions {
    let mut open = OpenOptions::default();
    open.store = storage_options.unwrap_or_default().0;
    open
}

/// [`open_options`], with the views that a tool's options name.
pub(crate) fn open_through(storage_options: Option<Storage>, options: &Bound<'_, PyDict>) -> PyResult<OpenOptions> {
    let mut open = open_options(storage_options);
    let views: Option<Vec<Py<View>>> = given(options, "view")?;
    open.views = views_of(views);
    Ok(open)
}

fn given<'py, T: FromPyObjectOwned<'py>>(options: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<T>> {
    match options.get_item(name)?.filter(|value| !value.is_none()) {
        Some(value) => value.extract().map(Some).map_err(Into::into),
        None => Ok(None),
    }
}

/// Patterns for keys, given as globs or as the keys themselves.
fn globs(py: Python<'_>, patterns: Option<Vec<String>>, exact: Option<Vec<String>>) -> PyResult<Vec<Glob>> {
    let mut found = Vec::new();
    for text in patterns.into_iter().flatten() {
        found.push(Glob::new(&text).or_raise(py)?);
    }
    for key in exact.into_iter().flatten() {
        let escaped: String = key.chars().flat_map(|c| if c.is_alphanumeric() { vec![c] } else { vec!['\\', c] }).collect();
        found.push(Glob::new(&escaped).or_raise(py)?);
    }
    Ok(found)
}

/// Which keys, and under which names, by name.
pub(crate) fn selection(py: Python<'_>, options: &Bound<'_, PyDict>) -> PyResult<Selection> {
    let mut selection = Selection::default();
    selection.include = globs(py, given(options, "include")?, given(options, "keys")?)?;
    selection.exclude = globs(py, given(options, "exclude")?, None)?;
    selection.part = match given::<String>(options, "part")?.as_deref() {
        None => Part::All,
        Some("model") => Part::Model,
        Some("optimizer") => Part::Optimizer,
        Some(other) => return Err(invalid(py, format!("part is \"model\" or \"optimizer\", not {other:?}"))),
    };
    selection.strip_prefix = given(options, "prefix")?;
    selection.add_prefix = given(options, "add_prefix")?;
    selection.renames = renames(py, options)?;
    Ok(selection)
}

pub(crate) fn renames(py: Python<'_>, options: &Bound<'_, PyDict>) -> PyResult<Vec<Rename>> {
    let pairs: Option<Vec<(String, String)>> = given(options, "rename")?;
    pairs.into_iter().flatten().map(|(regex, template)| Rename::new(&regex, &template).or_raise(py)).collect()
}

fn convert_options(py: Python<'_>, options: &Bound<'_, PyDict>, control: &Control) -> PyResult<ConvertOptions> {
    let mut chosen = ConvertOptions::default();
    chosen.selection = selection(py, options)?;
    let mut casts = CastRules::new();
    for rule in given::<Vec<String>>(options, "cast")?.into_iter().flatten() {
        casts.parse(&rule).or_raise(py)?;
    }
    chosen.casts = casts;
    chosen.overwrite = given(options, "overwrite")?.unwrap_or(chosen.overwrite);
    chosen.verify = given(options, "verify")?.unwrap_or(chosen.verify);
    chosen.sync = given(options, "sync")?.unwrap_or(chosen.sync);
    chosen.skip_opaque = given(options, "skip_opaque")?.unwrap_or(chosen.skip_opaque);
    chosen.control = control.inner.clone();
    Ok(chosen)
}

/// The format to write: asked for, or told by the destination's name, or the one of the source.
fn target(py: Python<'_>, options: &Bound<'_, PyDict>, destination: &str, source: Option<Format>) -> PyResult<ConvertTarget> {
    let asked: Option<String> = given(options, "to")?;
    let named = || match destination.trim_end_matches('/').rsplit('.').next() {
        Some("safetensors") => Some("safetensors".to_owned()),
        Some("pt" | "pth" | "bin" | "ckpt") => Some("torch".to_owned()),
        _ => None,
    };
    let like = || source.map(|format| format.name().to_owned());
    let max_shard_size: Option<u64> = given(options, "max_shard_size")?;
    let ranks: usize = given(options, "ranks")?.unwrap_or(1);
    if ranks == 0 {
        return Err(invalid(py, "a checkpoint is saved by at least one rank"));
    }
    let format = asked.or_else(named).or_else(like);
    if format.as_deref() != Some("safetensors") && max_shard_size.is_some() {
        return Err(invalid(py, "max_shard_size is for safetensors alone"));
    }
    if format.as_deref() != Some("dcp") && ranks > 1 {
        return Err(invalid(py, "ranks is for DCP alone"));
    }
    match format.as_deref() {
        Some("dcp") => Ok(ConvertTarget::Dcp { ranks }),
        Some("safetensors") => Ok(ConvertTarget::Safetensors { max_shard_size }),
        Some("torch") => Ok(ConvertTarget::Torch),
        Some(other) => Err(invalid(py, format!("to is \"dcp\", \"safetensors\" or \"torch\", not {other:?}"))),
        None => {
            let detail = format!(
                "the name {destination:?} does not tell the format to write: pass to=\"dcp\", \"safetensors\" or \"torch\""
            );
            Err(invalid(py, detail))
        }
    }
}

/// Writes a checkpoint in another format.
#[pyfunction]
#[pyo3(signature = (source, destination, options, control, storage_options=None))]
pub(crate) fn convert<'py>(
    py: Python<'py>,
    source: String,
    destination: String,
    options: &Bound<'_, PyDict>,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let chosen = convert_options(py, options, control)?;
    let target = target(py, options, &destination, None)?;
    let open = open_through(storage_options, options)?;
    let found = run(py, &control.inner, move || {
        let source = Checkpoint::open_with(&source, &open)?;
        reshard::convert::convert(&source, &Destination::parse(&destination, target, &open.store)?, target, &chosen)
    })?;
    report(py, "ConvertReport", &found.or_raise(py)?)
}

/// Cuts a checkpoint for other ranks.
#[pyfunction]
#[pyo3(signature = (source, destination, mesh, rules, options, control, storage_options=None))]
#[expect(clippy::too_many_arguments, reason = "they are the tool's own")]
pub(crate) fn relayout<'py>(
    py: Python<'py>,
    source: String,
    destination: String,
    mesh: &str,
    rules: Vec<String>,
    options: &Bound<'_, PyDict>,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let chosen = convert_options(py, options, control)?;
    let layout = Layout::parse(mesh, &rules).or_raise(py)?;
    let open = open_through(storage_options, options)?;
    let found = run(py, &control.inner, move || {
        let source = Checkpoint::open_with(&source, &open)?;
        reshard::relayout::relayout(&source, &store_with(&destination, &open.store)?, &layout, &chosen)
    })?;
    report(py, "ConvertReport", &found.or_raise(py)?)
}

/// Averages checkpoints.
#[pyfunction]
#[pyo3(signature = (sources, destination, weights, options, control, storage_options=None))]
pub(crate) fn merge<'py>(
    py: Python<'py>,
    sources: Vec<String>,
    destination: String,
    weights: Vec<f64>,
    options: &Bound<'_, PyDict>,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let chosen = convert_options(py, options, control)?;
    let open = open_options(storage_options);
    let again = open.clone();
    let opened = run(py, &control.inner, move || {
        sources.iter().map(|path| Checkpoint::open_with(path, &again)).collect::<reshard::Result<Vec<_>>>()
    })?
    .or_raise(py)?;
    let format = opened.first().map(|source| source.catalog().format);
    let target = target(py, options, &destination, format)?;
    let found = run(py, &control.inner, move || {
        let destination = Destination::parse(&destination, target, &open.store)?;
        reshard::merge::merge(&opened.iter().collect::<Vec<_>>(), &weights, &destination, target, &chosen)
    })?;
    report(py, "MergeReport", &found.or_raise(py)?)
}

/// Drops and renames keys and sets values, without touching data.
#[pyfunction]
#[pyo3(signature = (source, destination, options, values, control, storage_options=None))]
pub(crate) fn edit<'py>(
    py: Python<'py>,
    source: String,
    destination: String,
    options: &Bound<'_, PyDict>,
    values: HashMap<String, Bound<'_, PyAny>>,
    control: &Control,
    storage_options: Option<Storage>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut chosen = EditOptions::default();
    chosen.drop = globs(py, given(options, "drop")?, None)?;
    chosen.renames = renames(py, options)?;
    chosen.control = control.inner.clone();
    for (key, value) in &values {
        let Some(value) = plain(value)? else {
            return Err(invalid(
                py,
                format!("the value for {key:?} is no plain data: numbers, text, lists and dicts can be set"),
            ));
        };
        chosen.set.push((key.clone(), None, value));
    }
    let open = open_options(storage_options);
    let found = run(py, &control.inner, move || {
        let source = Checkpoint::open_with(&source, &open)?;
        for (key, path, _) in &mut chosen.set {
            *path = reshard::edit::setting_path(&source, key);
        }
        reshard::edit::edit(&source, &store_with(&destination, &open.store)?, &chosen)
    })?;
    report(py, "EditReport", &found.or_raise(py)?)
}
