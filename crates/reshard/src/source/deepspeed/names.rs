//! The files of a tag, by name.

use std::collections::BTreeMap;

/// A rank's place in the grid that DeepSpeed names its files after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankFile {
    /// Tensor parallel rank (with pipeline stages: model parallel).
    pub(super) model: u64,
    /// Data parallel rank; none for a file that all of them share.
    pub(super) data: Option<u64>,
}

/// The files of one tag, with their paths from the checkpoint's root.
#[derive(Debug, Default)]
pub(super) struct TagFiles {
    pub(super) model: BTreeMap<RankFile, String>,
    pub(super) optimizer: BTreeMap<RankFile, String>,
    /// Files of parts that are not understood: pipeline stages and experts in files of their own.
    pub(super) other: Option<String>,
}

const MODEL: &str = "_model_states.pt";
const OPTIMIZER: &str = "_optim_states.pt";

/// Whether a file, without its folder, is one of a tag.
pub(super) fn is_state_file(name: &str) -> bool {
    ((name.ends_with(MODEL) || name.ends_with(OPTIMIZER)) && grid(name).is_some()) || is_other(name)
}

/// A pipeline's layer (`layer_00-model_states.pt`, `layer_00-model_00-model_states.pt`) or an expert, in a file of its own.
fn is_other(name: &str) -> bool {
    let layer = name.starts_with("layer_") && name.ends_with("model_states.pt");
    layer || (name.starts_with("expp_rank_") && name.ends_with(OPTIMIZER))
}

/// `[bf16_|fp16_]zero_pp_rank_D_mp_rank_M_…` or `mp_rank_M_…`.
fn grid(name: &str) -> Option<RankFile> {
    let stem = name.strip_suffix(MODEL).or_else(|| name.strip_suffix(OPTIMIZER))?;
    let stem = stem.strip_prefix("bf16_").or_else(|| stem.strip_prefix("fp16_")).unwrap_or(stem);
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    match stem.strip_prefix("zero_pp_rank_") {
        Some(rest) => {
            let (data, model) = rest.split_once("_mp_rank_")?;
            Some(RankFile { model: number(model)?, data: Some(number(data)?) })
        }
        None => Some(RankFile { model: number(stem.strip_prefix("mp_rank_")?)?, data: None }),
    }
}

/// The files below `prefix` (empty, or a folder with `/` at its end).
pub(super) fn tag_files<'f>(files: impl Iterator<Item = &'f str>, prefix: &str) -> TagFiles {
    let mut found = TagFiles::default();
    for path in files {
        let Some(name) = path.strip_prefix(prefix).filter(|name| !name.contains('/') && is_state_file(name)) else { continue };
        match grid(name) {
            Some(rank) if name.ends_with(MODEL) => drop(found.model.insert(rank, path.to_owned())),
            Some(rank) => drop(found.optimizer.insert(rank, path.to_owned())),
            None => found.other = Some(path.to_owned()),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_which_rank_wrote_them() {
        let rank = |model, data| Some(RankFile { model, data });
        assert_eq!(grid("zero_pp_rank_3_mp_rank_01_optim_states.pt"), rank(1, Some(3)));
        assert_eq!(grid("bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt"), rank(0, Some(12)));
        assert_eq!(grid("mp_rank_02_model_states.pt"), rank(2, None));
        for name in ["mp_rank__model_states.pt", "mp_rank_+1_model_states.pt", "model_states.pt", "mp_rank_00_model_states.txt"] {
            assert_eq!(grid(name), None, "{name}");
        }
        for name in [
            "layer_00-model_states.pt",
            "layer_00-model_00-model_states.pt",
            "layer_0_expert_3_mp_rank_00_model_states.pt",
            "expp_rank_1_mp_rank_00_optim_states.pt",
        ] {
            assert!(is_state_file(name) && tag_files([name].into_iter(), "").other.is_some(), "{name}");
        }
    }
}
