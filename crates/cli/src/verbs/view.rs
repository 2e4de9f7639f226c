//! `reshard view check RULES PATH`: what rules would make of a checkpoint. `list` and `show`: the recipes.

use std::collections::BTreeMap;

use reshard::view::{View, ViewReport, recipes};
use reshard::{Checkpoint, OpenOptions};
use serde::Serialize;

use crate::args::{ViewAction, ViewArgs, ViewVerbArgs};
use crate::failure::{Failure, Result};
use crate::human;
use crate::printer::{Paint, Printer};
use crate::verbs::{Context, Outcome};

/// Keys of a rule that are shown unless all are asked for.
const SHOWN: usize = 3;

#[derive(Debug, Serialize)]
struct Checked<'a> {
    schema: u32,
    path: &'a str,
    #[serde(flatten)]
    report: &'a ViewReport,
}

#[derive(Debug, Serialize)]
struct Listed {
    schema: u32,
    recipes: Vec<ListedRecipe>,
}

#[derive(Debug, Serialize)]
struct ListedRecipe {
    name: &'static str,
    description: &'static str,
    parameters: &'static [&'static str],
}

pub(crate) fn run(context: &mut Context, args: &ViewVerbArgs) -> Result<Outcome> {
    match &args.action {
        ViewAction::Check { rules, path, reverse, set, all, output } => {
            let view = found(rules, *reverse, &parameters(set)?)?;
            let checkpoint = context.open(path)?;
            let report = view.check(&checkpoint)?;
            match output.json {
                true => context.printer.json(&Checked { schema: 1, path, report: &report })?,
                false => print(&mut context.printer, &report, *all)?,
            }
        }
        ViewAction::List { output } => {
            let named =
                |r: &reshard::view::Recipe| ListedRecipe { name: r.name, description: r.description, parameters: r.parameters };
            let listed = Listed { schema: 1, recipes: recipes().iter().map(named).collect() };
            if output.json {
                context.printer.json(&listed)?;
                return Ok(Outcome::Fine);
            }
            for recipe in listed.recipes {
                let name = context.printer.paint(Paint::Bold, recipe.name);
                context.printer.line(format!("{name}: {}", recipe.description))?;
                if !recipe.parameters.is_empty() {
                    context.printer.line(format!("  --set {}=…", recipe.parameters.join("=… --set ")))?;
                }
            }
        }
        ViewAction::Show { recipe } => match recipes().iter().find(|r| r.name == *recipe) {
            Some(recipe) => context.printer.line(recipe.text.trim_end())?,
            None => return Err(Failure::new(format!("unknown recipe {recipe:?}")).hint("`reshard view list` lists them")),
        },
    }
    Ok(Outcome::Fine)
}

fn print(printer: &mut Printer, report: &ViewReport, all: bool) -> Result<()> {
    for rule in &report.rules {
        let title = printer.paint(Paint::Bold, human::printable(&rule.rule));
        let (taken, made) = (human::count(rule.taken, "key"), human::count(rule.made.len() as u64, "key"));
        printer.line(format!("{title}: {taken} → {made}"))?;
        let most = if all { usize::MAX } else { SHOWN };
        for made in rule.made.iter().take(most) {
            let what = match (&made.dtype, &made.shape) {
                (Some(dtype), Some(shape)) => format!("{dtype} {shape:?}"),
                _ => "value".to_owned(),
            };
            let from = match made.from.as_slice() {
                [] => "nothing".to_owned(),
                [only] => human::printable(only),
                [first, last] => format!("{}, {}", human::printable(first), human::printable(last)),
                [first, .., last] => format!("{}, …, {}", human::printable(first), human::printable(last)),
            };
            printer.line(format!("  {}: {what} from {from}", human::printable(&made.key)))?;
        }
        if rule.made.len() > most {
            printer.line(format!("  and {} more; --all lists them all", rule.made.len() - most))?;
        }
    }
    if report.kept > 0 {
        printer.line(format!("kept as they are: {}", human::count(report.kept, "key")))?;
    }
    if !report.dropped.is_empty() {
        printer.line(format!("dropped: {}", human::count(report.dropped.len() as u64, "key")))?;
    }
    Ok(())
}

/// `NAME=NUMBER`.
fn parameters(set: &[String]) -> Result<BTreeMap<String, i64>> {
    let pair = |text: &String| {
        let wrong = || Failure::new(format!("invalid parameter {text:?}")).hint("write it like heads=32");
        let (name, value) = text.split_once('=').ok_or_else(wrong)?;
        Ok((name.trim().to_owned(), value.trim().parse().map_err(|_| wrong())?))
    };
    set.iter().map(pair).collect()
}

fn found(rules: &str, reverse: bool, parameters: &BTreeMap<String, i64>) -> Result<View> {
    let view = View::find(rules, parameters)?;
    Ok(if reverse { view.reversed()? } else { view })
}

impl Context {
    /// How to open a checkpoint seen through rules. Backwards, the last rules come first.
    pub(crate) fn open_through(&self, args: &ViewArgs) -> Result<OpenOptions> {
        let parameters = parameters(&args.set)?;
        let mut open = self.open.clone();
        open.views = View::find_all(&args.view, &parameters)?;
        if args.reverse {
            open.views = open.views.iter().rev().map(View::reversed).collect::<reshard::Result<_>>()?;
        }
        Ok(open)
    }

    /// Opens a checkpoint, seen through rules.
    pub(crate) fn open_seen(&self, path: &str, args: &ViewArgs) -> Result<Checkpoint> {
        self.open_as(path, &self.open_through(args)?)
    }
}
