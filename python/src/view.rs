//! Rules through which a checkpoint is seen.

use std::collections::BTreeMap;

use pyo3::prelude::*;

use crate::errors::Raise;

/// Rules for a view.
#[pyclass(module = "reshard._reshard", frozen)]
pub(crate) struct View {
    pub(crate) inner: reshard::view::View,
}

#[pymethods]
impl View {
    /// Rules by what a person writes: one rule, the name of a file, or that of a recipe.
    #[staticmethod]
    fn find(py: Python<'_>, rules: &str, parameters: BTreeMap<String, i64>) -> PyResult<View> {
        Ok(View { inner: py.detach(|| reshard::view::View::find(rules, &parameters)).or_raise(py)? })
    }

    /// Rules as text.
    #[staticmethod]
    fn parse(py: Python<'_>, text: &str, origin: &str, parameters: BTreeMap<String, i64>) -> PyResult<View> {
        Ok(View { inner: reshard::view::View::parse(text, origin, &parameters).or_raise(py)? })
    }

    /// The rules that undo these.
    fn reversed(&self, py: Python<'_>) -> PyResult<View> {
        Ok(View { inner: self.inner.reversed().or_raise(py)? })
    }
}

/// The engine's views of a list.
pub(crate) fn views_of(views: Option<Vec<Py<View>>>) -> Vec<reshard::view::View> {
    views.into_iter().flatten().map(|view| view.get().inner.clone()).collect()
}

/// The names of the recipes, what they are for, and the parameters they need.
#[pyfunction]
pub(crate) fn recipes() -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
    reshard::view::recipes().iter().map(|recipe| (recipe.name, recipe.description, recipe.parameters.to_vec())).collect()
}
