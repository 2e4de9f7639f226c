//! What trainers make of a step: several checkpoints in one folder, and files of their own beside them.
//!
//! accelerate and the transformers Trainer keep a model and its optimizer in folders of their own (`pytorch_model_fsdp_0`,
//! `optimizer_0`), with random states and schedulers beside them. Lightning's folders have `meta.pt` beside `.metadata`.

use std::collections::BTreeSet;
use std::sync::Arc;

use reshard_storage::{FileInfo, Store};

use super::{Judged, Step, StepState, StepsOptions, look, open};
use crate::error::Result;
use crate::layout_names::{METADATA_FILE, is_safetensors};

/// What folders of a sharded model are called, with a number.
const MODEL_PART: &str = "pytorch_model_fsdp_";

/// The file of Lightning that holds what is neither model nor optimizer.
const LIGHTNING_REST: &str = "meta.pt";

/// What accelerate and the Trainer write last: a step that has neither was cut short.
const WRITTEN_LAST: [&str; 2] = ["trainer_state.json", "random_states_0.pkl"];

/// Files of trainers beside checkpoints: a start, a number or nothing, and an end.
const COMPANIONS: [(&str, &str); 9] = [
    ("random_states_", ".pkl"),
    ("rng_state", ".pth"),
    ("scheduler", ".bin"),
    ("scheduler", ".pt"),
    ("sampler", ".bin"),
    ("dl_state_dict", ".bin"),
    ("custom_checkpoint_", ".pkl"),
    ("trainer_state", ".json"),
    ("training_args", ".bin"),
];

/// The folders of a step that hold a checkpoint each; none where the step is one itself.
pub(super) fn parts(files: &[FileInfo]) -> BTreeSet<String> {
    if files.iter().any(|file| file.path == METADATA_FILE) {
        return BTreeSet::new();
    }
    let folders = files.iter().filter_map(|file| file.path.split_once('/').map(|(folder, _)| folder));
    folders.filter(|name| is_part(name)).map(str::to_owned).collect()
}

fn is_part(name: &str) -> bool {
    [MODEL_PART, "optimizer_"].iter().any(|start| name.strip_prefix(start).is_some_and(is_number))
}

/// Whether a file of a step is of its model: sharded, whole, or the adapter of one.
fn is_of_model(path: &str) -> bool {
    path.starts_with(MODEL_PART)
        || is_safetensors(path)
        || ["pytorch_model", "adapter_model"].iter().any(|start| path.starts_with(start) && path.ends_with(".bin"))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Whether a file beside a step's checkpoints is known to be a trainer's, and goes with them.
pub(super) fn is_companion(step: &Step, name: &str) -> bool {
    if parts(&step.files).is_empty() {
        return step.name.ends_with(".ckpt") && name == LIGHTNING_REST;
    }
    COMPANIONS.iter().any(|(start, end)| {
        let middle = name.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
        middle.is_some_and(|middle| middle.is_empty() || is_number(middle.trim_start_matches('_')))
    })
}

/// The checkpoints of a step with the stores to reach them: itself, or its parts.
pub(super) fn members(step: &Step, options: &StepsOptions) -> Result<Vec<(Arc<dyn Store>, Step)>> {
    let parts = parts(&step.files);
    if parts.is_empty() {
        return Ok(vec![(open(&step.path, options)?, step.clone())]);
    }
    parts.iter().map(|name| part(step, name, options)).collect()
}

fn part(step: &Step, name: &str, options: &StepsOptions) -> Result<(Arc<dyn Store>, Step)> {
    let path = format!("{}/{name}", step.path.trim_end_matches('/'));
    let below = |file: &FileInfo| {
        let path = file.path.strip_prefix(name)?.strip_prefix('/')?.to_owned();
        Some(FileInfo { path, ..file.clone() })
    };
    let files: Vec<FileInfo> = step.files.iter().filter_map(below).collect();
    let store = open(&path, options)?;
    Ok((store, Step { name: format!("{}/{name}", step.name), path, files, ..step.clone() }))
}

/// What a step of several checkpoints is worth: as much as the worst of them.
pub(super) fn look_at_parts(step: &Step, parts: &BTreeSet<String>, options: &StepsOptions) -> Result<Judged> {
    let mut whole = Judged { state: StepState::Valid, format: None, removable: options.marker.is_none() };
    for name in parts {
        let judged = look(&part(step, name, options)?.1, options)?;
        whole.removable &= judged.removable;
        whole.format = judged.format;
        let why = match judged.state {
            StepState::Valid => continue,
            StepState::Incomplete { why } => why,
            StepState::Other => "no checkpoint".to_owned(),
        };
        if whole.state == StepState::Valid {
            whole.state = StepState::Incomplete { why: format!("{name}: {why}") };
        }
    }
    if whole.state == StepState::Valid && !step.files.iter().any(|file| is_of_model(&file.path)) {
        whole.state = StepState::Incomplete { why: "there is an optimizer and no model".to_owned() };
    }
    let finished = step.files.iter().any(|file| WRITTEN_LAST.contains(&file.path.as_str()));
    if whole.state == StepState::Valid && !finished {
        let why = format!("neither {} nor {} is there, which are written last", WRITTEN_LAST[0], WRITTEN_LAST[1]);
        whole.state = StepState::Incomplete { why };
    }
    Ok(whole)
}

/// Why a folder that is a complete checkpoint is none of Lightning's, which its name says that it is.
pub(super) fn lacks_rest(step: &Step) -> Option<String> {
    let there = step.files.iter().any(|file| file.path == LIGHTNING_REST);
    (step.name.ends_with(".ckpt") && !there).then(|| format!("{LIGHTNING_REST} is missing, which Lightning writes last"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_trainers_own_names_count() {
        for name in ["pytorch_model_fsdp_0", "optimizer_12"] {
            assert!(is_part(name), "{name}");
        }
        for name in ["optimizer", "optimizer_", "optimizer_a", "optimizer_0_old", "model"] {
            assert!(!is_part(name), "{name}");
        }
    }
}
