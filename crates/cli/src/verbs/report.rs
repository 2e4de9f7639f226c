//! `reshard report PATH [OTHER] -o FILE`: one page.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use crate::args::{PageArgs, ReportArgs};
use crate::failure::{Failure, Result};
use crate::human;
use crate::report::render;
use crate::report_data::{self, Comparison, Wanted};
use crate::verbs::{Context, Outcome, diff};

pub(crate) fn run(context: &mut Context, args: &ReportArgs) -> Result<Outcome> {
    let checkpoint = context.open_seen(&args.page.path, &args.page.view)?;
    let comparison = compared(context, &args.page)?;
    let wanted = Wanted { numbers: args.page.numbers()?, verify: args.page.verify, comparison, compare_later: false };
    let collected = report_data::collect(&checkpoint, &context.printer, &wanted)?;
    let page = render(&collected.data).map_err(|error| Failure::because("cannot make the page", &error))?;
    if args.output == "-" {
        context.printer.out().write_all(page.as_bytes())?;
        return Ok(Outcome::Fine);
    }
    write(Path::new(&args.output), page.as_bytes())
        .map_err(|error| Failure::because(format!("cannot write {}", args.output), &error))?;
    context.printer.line(format!("{} ({})", args.output, human::bytes(page.len() as u64)))?;
    Ok(Outcome::Fine)
}

/// Opens what to compare with.
pub(super) fn compared(context: &Context, args: &PageArgs) -> Result<Option<Comparison>> {
    let Some(other) = &args.other else { return Ok(None) };
    let other = Arc::new(context.open(other)?);
    Ok(Some(Comparison { other, tolerance: diff::tolerance(args.tolerance, None, None)?, elements: !args.shapes_only }))
}

/// The old page stays until the new one is complete. A link stays one, and what is no file (a pipe, a device) is written to and not
/// replaced.
fn write(path: &Path, page: &[u8]) -> std::io::Result<()> {
    let path = &match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => std::fs::canonicalize(path)?,
        _ => path.to_owned(),
    };
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return std::fs::OpenOptions::new().write(true).open(path)?.write_all(page);
    }
    let name = path.file_name().ok_or_else(|| std::io::Error::other("not a file name"))?;
    let mut staged_name = std::ffi::OsString::from(".");
    staged_name.push(name);
    staged_name.push(format!(".{}.part", std::process::id()));
    let staged = path.with_file_name(staged_name);
    let written = std::fs::write(&staged, page).and_then(|()| std::fs::rename(&staged, path));
    if written.is_err() {
        drop(std::fs::remove_file(&staged));
    }
    written
}
