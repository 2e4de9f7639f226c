//! `reshard latest DIR`: the newest complete step.

use std::time::{Duration, UNIX_EPOCH};

use reshard::steps::{Step, StepState, StepsOptions, latest, linked_steps, steps};
use serde::Serialize;

use crate::args::LatestArgs;
use crate::failure::Result;
use crate::human;
use crate::paths;
use crate::printer::Paint;
use crate::progress::Progress;
use crate::table::{Side, Table};
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Latest<'a> {
    schema: u32,
    folder: &'a str,
    latest: Option<&'a Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<&'a [Step]>,
}

pub(crate) fn run(context: &mut Context, args: &LatestArgs) -> Result<Outcome> {
    let mut options = StepsOptions::default();
    options.store = context.open.store.clone();
    options.deep = args.deep;
    let (found, all) = {
        let _bar = Progress::watch(&context.printer, "latest", &options.control);
        let all = if args.all { Some(steps(&args.folder, &options)?) } else { None };
        (latest(&args.folder, &options)?, all)
    };
    for link in linked_steps(&args.folder, &options)? {
        context.printer.note(format!("{} is a symbolic link, which --follow-symlinks follows", human::printable(&link)));
    }
    if args.output.json {
        context.printer.json(&Latest { schema: 1, folder: &args.folder, latest: found.as_ref(), steps: all.as_deref() })?;
    } else {
        if let Some(all) = &all {
            print(context, all)?;
        }
        match &found {
            Some(step) if !args.all => context.printer.line(&step.path)?,
            Some(_) => {}
            None => {
                let plainly = || format!("no complete checkpoint in {}", args.folder);
                context.printer.note(paths::no_run(&args.folder).map_or_else(plainly, |failure| failure.to_string()));
            }
        }
    }
    Ok(if found.is_some() { Outcome::Fine } else { Outcome::Bad })
}

fn print(context: &mut Context, steps: &[Step]) -> Result<()> {
    let mut table = Table::new(&[Side::Left, Side::Left, Side::Right, Side::Left, Side::Left])
        .head(&["STEP", "STATE", "BYTES", "CHANGED", ""]);
    for step in steps {
        let (state, paint, why) = state_words(&step.state);
        let changed = step.modified.and_then(|at| human::date(UNIX_EPOCH + Duration::from_secs(at))).unwrap_or_default();
        let cells = [step.name.clone(), state.to_owned(), human::bytes(step.bytes), changed, why.to_owned()];
        table.painted(cells.into_iter().zip([None, Some(paint), None, Some(Paint::Dim), Some(Paint::Dim)]));
    }
    for line in table.lines(&context.printer) {
        context.printer.line(line)?;
    }
    Ok(())
}

pub(super) fn state_words(state: &StepState) -> (&'static str, Paint, &str) {
    match state {
        StepState::Valid => ("complete", Paint::Good, ""),
        StepState::Incomplete { why } => ("incomplete", Paint::Bad, why),
        _ => ("no checkpoint", Paint::Dim, ""),
    }
}
