//! `reshard demo`: a sharded training run, saved on four ranks, resumed on three, shown to continue bit for bit.

mod arithmetic;
mod trainer;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use crate::human::shell_word;
use reshard::storage::{Address, Store, StoreOptions};
use reshard::{Checkpoint, Error, Group, Result, SaveOptions, run_threads};
use trainer::{Layout, Trainer};

/// Steps before the save, and after it.
const BEFORE: u64 = 40;
const AFTER: u64 = 40;

/// What one rank has at the end: every tensor whole, and the loss.
struct Ending {
    tensors: Vec<(String, Vec<f32>)>,
    loss: f64,
}

/// Runs the demo and leaves its checkpoint at `folder`, replacing one that an earlier run left. Returns whether the resumed
/// run equals the one that never stopped. `program` is how the command was called: what is shown at the end can be pasted.
pub fn run(out: &mut dyn Write, folder: &Path, program: &str) -> Result<bool> {
    let text = folder.to_str().ok_or_else(|| unprintable(folder))?;
    let address = Address::parse(text).map_err(|source| Error::Storage { doing: "opening the demo's folder".into(), source })?;
    let store = reshard::storage::open(&address, &StoreOptions::default())
        .map_err(|source| Error::Storage { doing: "opening the demo's folder".into(), source })?;
    let mut say = |line: String| {
        // Whoever closed the pipe has seen enough; the demo's outcome is its result.
        let _ = writeln!(out, "{line}");
    };
    let four = Layout::data_and_tensor_parallel();
    let three = Layout::fully_sharded(3);

    say(format!("A model of {} parameters learns on 4 ranks: {}.", trainer::parameter_count(), four.name));
    let unbroken = last(run_threads(4, |group| {
        let mut trainer = Trainer::new(&group, &four)?;
        trainer.train(BEFORE + AFTER)?;
        ending(&trainer)
    }))?;
    say(format!("  a run that never stops: {} steps, loss {:.6}", BEFORE + AFTER, unbroken.loss));

    let (reports, at_save) = save_on_four(&four, &store)?;
    say(format!(
        "  a run that saves after {BEFORE} steps, loss {at_save:.6}: {} bytes of tensors in {} files, most loaded rank {:.2} of the mean",
        reports.total_bytes, reports.files, reports.imbalance
    ));

    say(format!("It resumes on 3 ranks: {}.", three.name));
    let resumed = last(run_threads(3, |group| {
        let mut trainer = Trainer::new(&group, &three)?;
        let checkpoint = Checkpoint::open_store(Arc::clone(&store))?;
        trainer.load(&checkpoint)?;
        trainer.train(AFTER)?;
        ending(&trainer)
    }))?;
    say(format!("  {AFTER} more steps, loss {:.6}", resumed.loss));

    let mut equal = unbroken.loss.to_bits() == resumed.loss.to_bits();
    for ((name, a), (_, b)) in unbroken.tensors.iter().zip(&resumed.tensors) {
        let same = a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        equal &= same;
        say(format!("  {name:<28} {:>5} values: {}", a.len(), if same { "equal, bit for bit" } else { "DIFFERENT" }));
    }
    say(String::new());
    for line in arithmetic::WHY.lines() {
        say(line.to_owned());
    }
    say(String::new());
    say("The checkpoint is a torch.distributed.checkpoint folder. Try on it:".into());
    let at = shell_word(text);
    for verb in ["inspect", "ls", "verify", "digest"] {
        say(format!("  {program} {verb} {at}"));
    }
    say(format!("  {program} show {at} model.up.weight --slice 0:2,0:4"));
    say(format!("  {program} convert {at} demo.safetensors --to safetensors --model-only --overwrite"));
    say(format!("  {program} report {at} -o report.html"));
    Ok(equal)
}

fn save_on_four(layout: &Layout, store: &Arc<dyn Store>) -> Result<(reshard::SaveReport, f64)> {
    last(run_threads(4, |group| {
        let mut trainer = Trainer::new(&group, layout)?;
        trainer.train(BEFORE)?;
        let mut options = SaveOptions::default();
        options.overwrite = true;
        Ok((trainer.save(store, &options)?, trainer.loss()))
    }))
}

fn ending<G: Group>(trainer: &Trainer<'_, G>) -> Result<Ending> {
    Ok(Ending { tensors: trainer.whole_tensors()?, loss: trainer.loss() })
}

/// The last rank's result, or the first error.
fn last<T>(results: Vec<Result<T>>) -> Result<T> {
    let mut kept = None;
    for result in results {
        kept = Some(result?);
    }
    kept.ok_or_else(|| Error::Invalid { detail: "a group without ranks".into() })
}

fn unprintable(folder: &Path) -> Error {
    Error::Invalid { detail: format!("the folder {} is not text", folder.display()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resumed_run_equals_the_one_that_never_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let mut out = Vec::new();
        assert!(run(&mut out, &folder.path().join("ckpt"), "reshard").unwrap(), "{}", String::from_utf8_lossy(&out));
        // Twice: an earlier demo is replaced.
        assert!(run(&mut out, &folder.path().join("ckpt"), "reshard").unwrap());
        assert!(!String::from_utf8(out).unwrap().contains("DIFFERENT"));
    }
}
