//! What values would do to a reader that unpickles them: every value's record is decoded, whoever wrote the file.

use rayon::prelude::*;
use reshard_formats::TorchArchive;
use reshard_formats::pickle::acts;

use super::{Gathered, Severity, VerifyOptions};
use crate::checkpoint::{CatalogKind, Checkpoint, Format, LoadedValue, StoredFile, ValuePlace};
use crate::error::{ErrorKind, Result};
use crate::workers::Workers;

/// Adds what is wrong with values and was not found before: records that say two things, and ones that act.
pub(super) fn check(checkpoint: &Checkpoint, options: &VerifyOptions, mut gathered: Gathered) -> Result<Gathered> {
    let values: Vec<(&str, &ValuePlace)> = checkpoint
        .catalog()
        .entries
        .iter()
        .filter_map(|(key, entry)| match &entry.kind {
            CatalogKind::Value(place) => Some((key.as_str(), place)),
            CatalogKind::Tensor(_) => None,
        })
        .collect();
    let wrong = |key: &str| -> Option<String> {
        if options.control.is_cancelled() {
            return None;
        }
        match checkpoint.read_value(key) {
            Ok(LoadedValue::Opaque { class, classes, .. }) => {
                let found = std::iter::once(&class).chain(&classes).find(|class| acts(class))?;
                Some(format!("it names `{found}`: loading it with PyTorch would execute code"))
            }
            Ok(_) => None,
            Err(error) => (error.kind() == ErrorKind::Corrupt).then(|| error.full_text()),
        }
    };
    let found: Vec<Option<String>> =
        Workers::reading(checkpoint.store.as_ref()).run(|| values.par_iter().map(|(key, _)| wrong(key)).collect())?;
    options.control.check("verifying")?;
    if checkpoint.catalog().format == Format::Torch {
        whole_file(checkpoint, &mut gathered)?;
    }
    for ((key, place), what) in values.into_iter().zip(found) {
        let known = gathered.findings.iter().any(|f| f.severity == Severity::Error && f.key.as_deref() == Some(key));
        let Some(what) = what.filter(|_| !known) else { continue };
        let (file, offset) = match place {
            ValuePlace::Record { file, offset, .. } => (checkpoint.file_name(*file), Some(*offset)),
            _ => (checkpoint.file_name(0), None),
        };
        gathered.error(Some(key), file, offset, what);
    }
    Ok(gathered)
}

/// What the one pickle of a `torch.save` file names, which its values need not show.
fn whole_file(checkpoint: &Checkpoint, gathered: &mut Gathered) -> Result<()> {
    let file = StoredFile(checkpoint.reader(0)?.as_ref());
    let classes = TorchArchive::open_file(&file).and_then(|archive| archive.content_and_classes());
    // What cannot be read was found before.
    let found = classes.ok().and_then(|(_, classes)| classes.into_iter().find(|class| acts(class)));
    if let Some(found) = found {
        let what = format!("it names `{found}`: loading it with PyTorch would execute code");
        gathered.error(None, checkpoint.file_name(0), None, what);
    }
    Ok(())
}
