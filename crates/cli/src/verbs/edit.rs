//! `reshard edit SRC DST`: keys dropped or renamed, values set, data files linked.

use reshard::edit::{EditOptions, EditReport, edit, setting_path};
use reshard::formats::Int;
use reshard::select::{Selection, unmatched_globs};
use reshard::{ErrorKind, Value};
use serde::Serialize;
use serde_json::Value as Json;

use crate::args::EditArgs;
use crate::failure::{Failure, Result};
use crate::human;
use crate::interrupt;
use crate::meaning;
use crate::printer::Paint;
use crate::progress::Progress;
use crate::verbs::{Context, Outcome};

#[derive(Debug, Serialize)]
struct Edited<'a> {
    schema: u32,
    #[serde(flatten)]
    report: &'a EditReport,
}

pub(crate) fn run(context: &mut Context, args: &EditArgs) -> Result<Outcome> {
    let mut options = EditOptions::default();
    options.drop = Selection::globs(&args.drop)?.include;
    options.renames = meaning::renames(&args.renames.rename, args.renames.rename_file.as_deref())?;
    options.skip_opaque = args.skip_opaque;
    let settings = args.set.iter().map(|text| setting(text)).collect::<Result<Vec<_>>>()?;
    let source = context.open(&args.source)?;
    options.set = settings.into_iter().map(|(key, value)| (key.clone(), setting_path(&source, &key), value)).collect();
    meaning::used(&source, unmatched_globs(&options.drop, &source))?;
    let mut renamed = Selection::default();
    (renamed.exclude, renamed.renames) = (options.drop.clone(), options.renames.clone());
    meaning::all_used(&source, &renamed)?;
    let store = context.store(&args.destination)?;
    let report = {
        interrupt::cancels(&options.control);
        let _bar = Progress::watch(&context.printer, "edit", &options.control);
        edit(&source, &store, &options).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                Failure::new(format!("{} is not empty", args.destination)).hint("an edited checkpoint needs a path of its own")
            }
            ErrorKind::Untrusted => Failure::from(error).hint("leave it out with --skip-opaque, or by its key with --drop"),
            _ => Failure::from(error),
        })?
    };
    if args.output.json {
        context.printer.json(&Edited { schema: 1, report: &report })?;
        return Ok(Outcome::Fine);
    }
    let printer = &mut context.printer;
    let title = printer.paint(Paint::Bold, human::printable(&report.to));
    let mut facts = vec![
        format!("{} dropped", human::count(report.dropped.len() as u64, "key")),
        format!("{} renamed", human::exact(report.renamed.len() as u64)),
        format!("{} set", human::exact(report.set.len() as u64)),
    ];
    // Files are shared, or everything is written anew.
    if report.bytes > 0 {
        facts.push(format!("{} written", human::bytes(report.bytes)));
    } else {
        facts.push(format!("{} linked", human::count(report.linked, "data file")));
        facts.push(format!("{} copied", human::exact(report.copied)));
    }
    printer.line(format!("{title}: {}", facts.join(" · ")))?;
    for key in &report.skipped {
        printer.line(format!("  skipped {}: only unpickling could bring it back", human::printable(key)))?;
    }
    Ok(Outcome::Fine)
}

/// `KEY=VALUE`: JSON where it is that, text otherwise.
fn setting(text: &str) -> Result<(String, Value)> {
    let wrong =
        || Failure::new(format!("invalid setting {text:?}")).hint("write it like step=100, name=\"run 7\" or betas=[0.9,0.95]");
    let (key, value) = text.split_once('=').ok_or_else(wrong)?;
    if key.is_empty() {
        return Err(wrong());
    }
    let value = match serde_json::from_str::<Json>(value) {
        Ok(json) => plain(&json),
        Err(_) => Value::Str(value.to_owned()),
    };
    Ok((key.to_owned(), value))
}

fn plain(json: &Json) -> Value {
    match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(small), _) => Value::Int(Int::from(small)),
            (None, Some(large)) => Value::Int(Int::from(large)),
            _ => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::Str(text.clone()),
        Json::Array(items) => Value::List(items.iter().map(plain).collect()),
        Json::Object(pairs) => Value::Dict(pairs.iter().map(|(key, value)| (Value::Str(key.clone()), plain(value))).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_json_or_text() {
        let value = |text: &str| setting(text).unwrap().1.python_repr();
        assert_eq!(value("a=1"), "1");
        assert_eq!(value("a=0.5"), "0.5");
        assert_eq!(value("a=null"), "None");
        assert_eq!(value("a=[1,true,\"x\"]"), "[1, True, 'x']");
        assert_eq!(value("a=run 7=b"), "'run 7=b'");
        assert!(setting("a").is_err() && setting("=1").is_err());
    }
}
