//! Models of other formats in the folder of a new checkpoint. `.metadata` would be found in their place, so they are no path that is
//! free; and they are not ours, so nothing of them is ever removed.

use crate::layout_names::{META_FILE, is_safetensors, is_torch};

/// What lies in a folder without `.metadata`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Beside<'f> {
    /// The folder of a model in another format, known by this file.
    Model(&'f str),
    /// One `torch.save` file, as which the folder opened so far. Programs put such files beside their checkpoints, so it is no reason
    /// to refuse, but one to say something.
    File(&'f str),
}

/// Looks at the names alone: whether the files can be read does not matter to whoever would miss them.
pub(super) fn beside<'f>(files: impl Iterator<Item = &'f str> + Clone) -> Option<Beside<'f>> {
    if let Some(name) = files.clone().find(|path| is_model(path)) {
        return Some(Beside::Model(name));
    }
    let mut torch = files.filter(|path| !path.contains('/') && is_torch(path) && *path != META_FILE);
    torch.next().filter(|_| torch.next().is_none()).map(Beside::File)
}

fn is_model(path: &str) -> bool {
    match path.rsplit_once('/') {
        // DeepSpeed's and Megatron's marks lie at the root of a run, above the files themselves.
        None => {
            is_safetensors(path)
                || path == "latest_checkpointed_iteration.txt"
                || path == "latest_universal"
                || is_deepspeed(path)
        }
        Some((folder, name)) => !folder.contains('/') && is_deepspeed(name),
    }
}

fn is_deepspeed(name: &str) -> bool {
    name.ends_with("_model_states.pt") || name.ends_with("_optim_states.pt")
}

#[cfg(test)]
mod tests {
    use super::{Beside, beside};

    #[test]
    fn models_of_other_formats_are_known_by_their_files() {
        let found = |files: &'static [&'static str]| beside(files.iter().copied());
        assert_eq!(found(&[]), None);
        assert_eq!(found(&["config.json", "__0_0.distcp", "notes.txt"]), None);
        assert_eq!(found(&["config.json", "model.safetensors", "rng.pt"]), Some(Beside::Model("model.safetensors")));
        assert_eq!(found(&["model.safetensors.index.json"]), Some(Beside::Model("model.safetensors.index.json")));
        assert_eq!(found(&["latest_checkpointed_iteration.txt"]), Some(Beside::Model("latest_checkpointed_iteration.txt")));
        let deepspeed = Some(Beside::Model("global_step1/mp_rank_00_model_states.pt"));
        assert_eq!(found(&["global_step1/mp_rank_00_model_states.pt", "latest"]), deepspeed);
        assert_eq!(found(&["model.pt"]), Some(Beside::File("model.pt")));
        // Two of them were never a checkpoint by the folder's name, and Lightning's is a part of the checkpoint.
        assert_eq!(found(&["a.pt", "b.pt"]), None);
        assert_eq!(found(&["meta.pt"]), None);
        // Models below are found by their own folders.
        assert_eq!(found(&["export/model.safetensors", "step-1/.metadata"]), None);
    }
}
