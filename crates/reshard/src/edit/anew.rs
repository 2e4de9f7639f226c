//! Edits of checkpoints whose files a DCP checkpoint cannot share: everything that stays is written anew.

use std::sync::Arc;

use reshard_formats::PathSegment;
use reshard_storage::Store;

use super::{EditOptions, EditReport};
use crate::checkpoint::{Checkpoint, Format, LoadedValue};
use crate::convert::output::{OutputOptions, PlanValue};
use crate::convert::{ConvertOptions, Destination, Planned, Target, plan_of, write_plan};
use crate::error::Result;
use crate::select::Glob;

pub(super) fn edit_anew(
    source: &Checkpoint,
    destination: &Arc<dyn Store>,
    options: &EditOptions,
    mut report: EditReport,
) -> Result<EditReport> {
    let mut converting = ConvertOptions::default();
    converting.selection.exclude.clone_from(&options.drop);
    converting.selection.renames.clone_from(&options.renames);
    converting.skip_opaque = options.skip_opaque;
    converting.control = options.control.clone();
    let is_set = |key: &str| options.set.iter().any(|(set, ..)| set == key);
    // What is set takes the place of what is there, which need not be readable. (Something has to be left to plan.)
    let (replaced, others): (Vec<_>, Vec<_>) =
        converting.selection.apply(source)?.into_iter().partition(|item| is_set(&item.key));
    if !others.is_empty() {
        for item in replaced {
            converting.selection.exclude.push(Glob::literal(item.stored)?);
        }
    }
    let Planned { plan, skipped, .. } = plan_of(source, &converting, Format::Dcp)?;
    let mut values: Vec<PlanValue> = plan.values.iter().filter(|value| !is_set(&value.key)).cloned().collect();
    values.extend(options.set.iter().map(|(key, path, value)| PlanValue {
        key: key.clone(),
        path: path.clone().unwrap_or_else(|| vec![PathSegment::Key(key.clone())]),
        value: LoadedValue::Plain(value.clone()),
    }));
    let kept = plan.tensors.iter().enumerate().filter(|(_, tensor)| !is_set(&tensor.key));
    let kept = kept.map(|(i, tensor)| (i, tensor.clone())).collect();
    let plan = plan.remapped(kept, values)?;
    for key in source.keys().filter(|key| !skipped.iter().any(|skipped| skipped == key)) {
        let name = options.renames.iter().fold(key.to_owned(), |name, rename| rename.apply(&name));
        if options.drop.iter().any(|glob| glob.matches(key)) {
            report.dropped.push(key.to_owned());
        } else if name != key {
            report.renamed.push((key.to_owned(), name));
        }
    }
    let output = OutputOptions::new(converting.sync, &options.control, &[source]);
    let to = Destination::folder(Arc::clone(destination));
    let written = write_plan(&plan, &[source], &to, Target::Dcp { ranks: 1 }, &converting, &output)?;
    report.set = options.set.iter().map(|(key, ..)| key.clone()).collect();
    (report.skipped, report.bytes) = (skipped, written.bytes);
    Ok(report)
}
