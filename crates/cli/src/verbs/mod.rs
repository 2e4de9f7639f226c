//! One file a verb: what was typed becomes what it means, is done, and is told.

mod completions;
mod convert;
mod demo;
mod diff;
mod digest;
mod edit;
mod inspect;
mod latest;
mod ls;
mod man;
mod merge;
mod plan;
mod prune;
mod recover;
mod relayout;
mod report;
mod serve;
mod show;
mod stats;
mod trend;
mod verify;
mod view;

use std::ffi::OsString;

use clap::Parser;
use reshard::{Checkpoint, ErrorKind, OpenOptions, ParameterMap};

use crate::args::{Cli, GlobalArgs, Verb};
use crate::failure::{Failure, Result};
use crate::meaning;
use crate::paths;
use crate::printer::{ColorChoice, Printer};

/// How a command ended that could run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing is wrong.
    Fine,
    /// Something was checked and is bad.
    Bad,
}

const FINE: u8 = 0;
const BAD: u8 = 1;
const COULD_NOT_RUN: u8 = 2;

/// What every verb is given.
pub(crate) struct Context {
    /// Where output goes.
    pub(crate) printer: Printer,
    /// How to open checkpoints.
    pub(crate) open: OpenOptions,
    /// How this program was called, for commands that can be pasted.
    pub(crate) program: String,
}

impl Context {
    fn new(printer: Printer, program: String) -> Context {
        Context { printer, open: OpenOptions::default(), program }
    }

    fn opening(&mut self, global: &GlobalArgs) -> Result<()> {
        self.open.store.follow_symlinks = global.follow_symlinks;
        self.open.expanded_limit = global.expanded_limit.as_deref().map(meaning::size).transpose()?;
        let map = global.parameter_map.as_deref().map(ParameterMap::read).transpose()?;
        self.open.parameter_map = map.map(std::sync::Arc::new);
        Ok(())
    }

    /// Tells a verdict. The exit code is the verdict's also where the reader has left before its end, as `head` does.
    pub(crate) fn told(&mut self, tell: impl FnOnce(&mut Printer) -> Result<()>) -> Result<()> {
        match tell(&mut self.printer) {
            Err(failure) if failure.reader_left() => Ok(()),
            done => done,
        }
    }

    /// Opens a checkpoint.
    pub(crate) fn open(&self, path: &str) -> Result<Checkpoint> {
        self.open_as(path, &self.open)
    }

    /// Opens a checkpoint in a certain way.
    fn open_as(&self, path: &str, open: &OpenOptions) -> Result<Checkpoint> {
        Checkpoint::open_with(path, open).map_err(|error| not_opened(path, error))
    }
}

/// A checkpoint that was not opened, with what may have been meant.
fn not_opened(path: &str, error: reshard::Error) -> Failure {
    let hint = (error.kind() == ErrorKind::NotFound).then(|| paths::meant(path)).flatten();
    let failure = Failure::from(error);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// The whole program: parses what was typed, runs it, and gives the exit code. `program` is what a shell would call it by.
pub fn run(program: &str, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    if let Some(odd) = arguments.iter().find(|argument| argument.to_str().is_none()) {
        let failure = Failure::new(format!("the argument {odd:?} is not valid UTF-8"))
            .hint("rename the file, or reach it through a link whose name is");
        Printer::new(ColorChoice::default(), false).failure(&failure);
        return COULD_NOT_RUN;
    }
    let cli = match Cli::try_parse_from(std::iter::once(OsString::from("reshard")).chain(arguments)) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are data; a reader that left is no error.
            drop(error.print());
            return if error.use_stderr() { COULD_NOT_RUN } else { FINE };
        }
    };
    let mut context = Context::new(Printer::new(cli.global.color, cli.global.quiet), program.to_owned());
    let outcome = context.opening(&cli.global);
    let outcome = outcome
        .and_then(|()| run_verb(&mut context, cli.verb))
        .and_then(|outcome| context.told(Printer::finish).map(|()| outcome));
    match outcome {
        Ok(Outcome::Fine) => FINE,
        Ok(Outcome::Bad) => BAD,
        // `reshard ls … | head` is a good way to use it.
        Err(failure) if failure.reader_left() => FINE,
        Err(failure) => {
            context.printer.failure(&failure);
            COULD_NOT_RUN
        }
    }
}

fn run_verb(context: &mut Context, verb: Verb) -> Result<Outcome> {
    match verb {
        Verb::Inspect(args) => inspect::run(context, &args),
        Verb::Ls(args) => ls::run(context, &args),
        Verb::Show(args) => show::run(context, &args),
        Verb::Stats(args) => stats::run(context, &args),
        Verb::Digest(args) => digest::run(context, &args),
        Verb::Verify(args) => verify::run(context, &args),
        Verb::Diff(args) => diff::run(context, &args),
        Verb::Trend(args) => trend::run(context, &args),
        Verb::Convert(args) => convert::run(context, &args),
        Verb::Relayout(args) => relayout::run(context, &args),
        Verb::Plan(args) => plan::run(context, &args),
        Verb::Merge(args) => merge::run(context, &args),
        Verb::View(args) => view::run(context, &args),
        Verb::Edit(args) => edit::run(context, &args),
        Verb::Recover(args) => recover::run(context, &args),
        Verb::Latest(args) => latest::run(context, &args),
        Verb::Prune(args) => prune::run(context, &args),
        Verb::Report(args) => report::run(context, &args),
        Verb::Serve(args) => serve::run(context, &args),
        Verb::Demo(args) => demo::run(context, &args),
        Verb::Completions(args) => completions::run(context, &args),
        Verb::Man(args) => man::run(context, &args),
    }
}
