//! What values would do to a reader that unpickles them: every value's record is decoded, whoever wrote the file.

use std::collections::{BTreeMap, HashSet};

use rayon::prelude::*;
use reshard_formats::TorchArchive;
use reshard_formats::pickle::acts;

use super::{FileKind, Gathered, Severity, VerifyOptions, file_kind};
use crate::checkpoint::{CatalogKind, Checkpoint, LoadedValue, StoredFile, ValueLocation};
use crate::error::{Result, chain};
use crate::packed::Compression;
use crate::workers::Workers;

/// What a value's record was found to be.
enum Found {
    Plain,
    /// Of a class that only its own library can read: nothing is wrong with it, and nothing in it was looked at.
    Opaque(String),
    Wrong(String),
    /// Nobody looked: it was cancelled.
    Unread,
}

/// Adds what is wrong with values and was not found before: records that say two things, and ones that act.
pub(super) fn check(checkpoint: &Checkpoint, options: &VerifyOptions, mut gathered: Gathered) -> Result<Gathered> {
    // Each place once, however many keys name it; a record that overlaps another was found before.
    let mut places: BTreeMap<(u32, u64, u64), Vec<&str>> = BTreeMap::new();
    let mut inline: Vec<(&str, &str)> = Vec::new();
    for (key, entry) in &checkpoint.catalog().entries {
        match &entry.kind {
            // What cannot be undone was found before.
            CatalogKind::Value(ValueLocation::Record { transform: Some(name), .. }) if Compression::of(name).is_none() => {}
            CatalogKind::Value(ValueLocation::Record { file, offset, length, .. }) => {
                places.entry((*file, *offset, *length)).or_default().push(key);
            }
            CatalogKind::Value(ValueLocation::Opaque { class }) => inline.push((key, class)),
            _ => {}
        }
    }
    let mut last = (0, 0);
    places.retain(|(file, offset, length), _| {
        let apart = *file != last.0 || *offset >= last.1;
        last = if apart { (*file, offset.saturating_add(*length)) } else { last };
        apart
    });
    let places: Vec<_> = places.into_iter().collect();
    let look = |key: &str| match checkpoint.read_value(key) {
        _ if options.control.is_cancelled() => Found::Unread,
        Ok(LoadedValue::Opaque { class, classes, .. }) => {
            match std::iter::once(&class).chain(&classes).find(|class| acts(class)) {
                Some(found) => Found::Wrong(format!("it names `{found}`: loading it with PyTorch would execute code")),
                None => Found::Opaque(class),
            }
        }
        Ok(_) => Found::Plain,
        // Also a disk that fails at last: what was not read is not vouched for.
        Err(error) => Found::Wrong(error.full_text()),
    };
    let found: Vec<Found> = Workers::reading(checkpoint.store.as_ref())
        .run(|| places.par_iter().map(|(_, keys)| keys.first().map_or(Found::Unread, |key| look(key))).collect())?;
    options.control.check("verifying")?;
    for file in 0..checkpoint.catalog().files.len() as u32 {
        if file_kind(checkpoint, file) == FileKind::Torch {
            whole_file(checkpoint, file, &mut gathered)?;
        }
    }
    let errors = gathered.findings.iter().filter(|f| f.severity == Severity::Error);
    let known: HashSet<String> = errors.clone().filter_map(|f| f.key.clone()).collect();
    // A file that is not there, or too short, was found once, and not for each of its keys.
    let broken: HashSet<String> = errors.filter(|f| f.key.is_none()).filter_map(|f| f.file.clone()).collect();
    for (((file, offset, _), keys), found) in places.into_iter().zip(found) {
        match found {
            Found::Opaque(class) => *gathered.opaque.entry(class).or_default() += keys.len() as u64,
            Found::Wrong(_) if broken.contains(checkpoint.file_name(file)) => {}
            Found::Wrong(what) => {
                for key in keys.into_iter().filter(|key| !known.contains(*key)) {
                    gathered.error(Some(key), checkpoint.file_name(file), Some(offset), what.clone());
                }
            }
            Found::Plain | Found::Unread => {}
        }
    }
    for (key, class) in inline {
        match acts(class) {
            true => {
                let what = format!("it names `{class}`: loading it with PyTorch would execute code");
                gathered.error(Some(key), checkpoint.file_name(0), None, what);
            }
            false => *gathered.opaque.entry(class.to_owned()).or_default() += 1,
        }
    }
    Ok(gathered)
}

/// What the one pickle of a `torch.save` file names, which its values need not show.
fn whole_file(checkpoint: &Checkpoint, number: u32, gathered: &mut Gathered) -> Result<()> {
    // A file that is missing was found before.
    let Ok(reader) = checkpoint.reader(number) else { return Ok(()) };
    let file = StoredFile(reader.as_ref());
    let classes = TorchArchive::open_file(&file).and_then(|archive| archive.content_and_classes());
    let classes = match classes {
        Ok((_, classes)) => classes,
        Err(error) => {
            if gathered.findings.iter().all(|f| f.severity != Severity::Error) {
                gathered.error(None, checkpoint.file_name(number), None, chain(&error));
            }
            return Ok(());
        }
    };
    let found = classes.into_iter().find(|class| acts(class));
    if let Some(found) = found {
        let what = format!("it names `{found}`: loading it with PyTorch would execute code");
        gathered.error(None, checkpoint.file_name(number), None, what);
    }
    Ok(())
}
