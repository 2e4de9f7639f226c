//! What options that several verbs share mean: sizes, ages, keys, formats.

use std::path::Path;
use std::time::Duration;

use reshard::Checkpoint;
use reshard::convert::ConvertOptions;
use reshard::mesh::Layout;
use reshard::select::{CastRules, Part, Rename, Selection, Unmatched};

use crate::args::{KeyArgs, LayoutArgs, WriteArgs};
use crate::failure::{Failure, Result};
use crate::human;
use crate::printer::Printer;

/// `5GB`, `512MiB`, `1_000_000`.
pub(crate) fn size(text: &str) -> Result<u64> {
    let wrong = || Failure::new(format!("invalid size {text:?}")).hint("write it like 5GB, 512MiB or 1000000");
    let plain: String = text.chars().filter(|c| *c != '_' && !c.is_whitespace()).collect();
    let cut = plain.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(plain.len());
    let (number, unit) = plain.split_at(cut);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1_000,
        "m" | "mb" => 1_000_000,
        "g" | "gb" => 1_000_000_000,
        "t" | "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(wrong()),
    };
    let bytes = number * factor as f64;
    if !(1.0..1e18).contains(&bytes) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// `90s`, `30min`, `12h`, `7d`.
pub(crate) fn age(text: &str) -> Result<Duration> {
    let wrong = || Failure::new(format!("invalid age {text:?}")).hint("write it like 90s, 30min, 12h or 7d");
    let cut = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(cut);
    let seconds = match unit {
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "w" => 604_800.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}

/// Which keys, and under which names.
pub(crate) fn selection(args: &KeyArgs) -> Result<Selection> {
    let mut selection = Selection::globs(&args.include)?;
    selection.exclude = Selection::globs(&args.exclude)?.include;
    selection.part = match (args.model_only, args.optimizer_only) {
        (true, _) => Part::Model,
        (_, true) => Part::Optimizer,
        _ => Part::All,
    };
    selection.strip_prefix = args.prefix.clone();
    selection.add_prefix = args.add_prefix.clone();
    selection.renames = renames(&args.renames.rename, args.renames.rename_file.as_deref())?;
    Ok(selection)
}

/// Renames that were typed, after those of a file.
pub(crate) fn renames(typed: &[String], file: Option<&Path>) -> Result<Vec<Rename>> {
    let mut renames = Vec::new();
    if let Some(path) = file {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::because(format!("cannot read renames from {}", path.display()), &error))?;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let place = || format!("line {} of {}", number + 1, path.display());
            renames.push(Rename::parse(line).map_err(|error| Failure::because(place(), &error))?);
        }
    }
    for text in typed {
        renames.push(Rename::parse(text)?);
    }
    Ok(renames)
}

/// A pattern that fits nothing is a mistake: this says which, and what may have been meant.
pub(crate) fn all_used(checkpoint: &Checkpoint, selection: &Selection) -> Result<()> {
    used(checkpoint, selection.unmatched(checkpoint))
}

/// The same for patterns that were looked for elsewhere.
pub(crate) fn used(checkpoint: &Checkpoint, unmatched: Vec<Unmatched>) -> Result<()> {
    let Some((what, near)) = Unmatched::in_words(&unmatched, &human::printable(checkpoint.path())) else { return Ok(()) };
    Err(Failure::new(what).hint(near.unwrap_or_else(|| "`reshard ls` lists the keys".to_owned())))
}

/// A mesh and how tensors lie on it. Without rules, a mesh of one dimension means FSDP's layout; what is assumed is said.
pub(crate) fn layout(printer: &mut Printer, args: &LayoutArgs) -> Result<Layout> {
    if !args.rule.is_empty() {
        return Ok(Layout::parse(&args.mesh, &args.rule)?);
    }
    if args.mesh.contains(',') {
        let layout = Layout::parse(&args.mesh, &args.rule)?;
        printer.note("no --rule: every tensor is replicated on every rank of the mesh");
        return Ok(layout);
    }
    let layout = Layout::fully_sharded(&args.mesh)?;
    printer.note("no --rule: Shard(0) for every tensor that has a dimension, as FSDP does");
    Ok(layout)
}

/// How to write, with which keys and casts.
pub(crate) fn convert_options(keys: &KeyArgs, casts: &[String], write: &WriteArgs) -> Result<ConvertOptions> {
    let mut options = ConvertOptions::default();
    options.selection = selection(keys)?;
    let mut rules = CastRules::new();
    for cast in casts {
        rules.parse(cast)?;
    }
    options.casts = rules;
    options.overwrite = write.overwrite;
    options.verify = !write.no_verify;
    options.sync = !write.no_sync;
    options.skip_opaque = write.skip_opaque;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ages_have_units() {
        for (text, bytes) in [("5GB", 5_000_000_000), ("512 MiB", 512 << 20), ("1_000", 1000), ("1.5k", 1500)] {
            assert_eq!(size(text).unwrap(), bytes);
        }
        for text in ["", "GB", "5 apples", "-1", "0", "1e30"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!(age("90s").unwrap(), Duration::from_secs(90));
        assert_eq!(age("1.5h").unwrap(), Duration::from_secs(5400));
        for text in ["5", "h", "-1h", "1y"] {
            assert!(age(text).is_err(), "{text}");
        }
    }
}
