//! What to write: the one decision, for the library, the Python package and the command.

use crate::checkpoint::Format;
use crate::error::{Error, Result};
use crate::layout_names::{is_safetensors, is_torch};

/// What to make of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Target {
    /// A DCP folder, as so many ranks would have saved it with their tensors cut along the first dimension.
    Dcp {
        /// How many.
        ranks: usize,
    },
    /// Safetensors, what model libraries load.
    Safetensors {
        /// A new file whenever the next tensor would exceed so many bytes; one file when `None`.
        max_shard_size: Option<u64>,
    },
    /// One `torch.save` file with the nested state dict.
    Torch,
    /// A model's folder as Hugging Face's libraries and hub have it: safetensors of at most a size with an index, under the model's own
    /// names. What else lies in the folder (`config.json`, a tokenizer) is left alone.
    HuggingFace {
        /// A new file whenever the next tensor would exceed so many bytes; 5 GB when `None`.
        max_shard_size: Option<u64>,
    },
    /// A universal checkpoint of DeepSpeed, from which it resumes on any number of ranks.
    Universal,
    /// A folder of Megatron core (`torch_dist`), its optimizer's state `fully_reshardable`.
    Megatron {
        /// As so many ranks would have saved it.
        ranks: usize,
    },
}

/// What Hugging Face's libraries split a model at.
pub(super) const HUB_SHARD_SIZE: u64 = 5_000_000_000;

impl Target {
    /// The format.
    pub fn format(self) -> Format {
        match self {
            Target::Dcp { .. } => Format::Dcp,
            Target::Safetensors { .. } => Format::Safetensors,
            Target::Torch => Format::Torch,
            Target::HuggingFace { .. } => Format::Safetensors,
            Target::Universal => Format::Universal,
            Target::Megatron { .. } => Format::Megatron,
        }
    }

    /// The names by which formats are asked for.
    pub const NAMES: [&str; 6] = ["dcp", "safetensors", "torch", "huggingface", "deepspeed-universal", "megatron"];

    /// What to write: the format that is asked for by its name, or that the destination's name tells, or that of the source
    /// (`like`), where such a one is written; what other programs alone write is written as DCP.
    ///
    /// ```
    /// use reshard::convert::Target;
    ///
    /// assert_eq!(Target::choose(None, "s3://bucket/model.pt", None, None, None)?, Target::Torch);
    /// assert_eq!(Target::choose(Some("dcp"), "out", None, Some(4), None)?, Target::Dcp { ranks: 4 });
    /// assert!(Target::choose(None, "out", None, None, None).is_err());
    /// # Ok::<(), reshard::Error>(())
    /// ```
    pub fn choose(
        asked: Option<&str>,
        destination: &str,
        like: Option<Format>,
        ranks: Option<usize>,
        max_shard_size: Option<u64>,
    ) -> Result<Target> {
        let named = || match destination.trim_end_matches('/') {
            name if is_safetensors(name) => Some("safetensors"),
            name if is_torch(name) => Some("torch"),
            _ => None,
        };
        let like = || match like? {
            Format::Safetensors => Some("safetensors"),
            Format::Torch => Some("torch"),
            _ => Some("dcp"),
        };
        let Some(name) = asked.or_else(named).or_else(like) else {
            return Err(Error::UnknownTarget { destination: destination.to_owned() });
        };
        if ranks == Some(0) {
            return Err(Error::invalid("a checkpoint is saved by at least one rank"));
        }
        let target = match name {
            "dcp" => Target::Dcp { ranks: ranks.unwrap_or(1) },
            "safetensors" => Target::Safetensors { max_shard_size },
            "torch" => Target::Torch,
            "huggingface" => Target::HuggingFace { max_shard_size },
            "deepspeed-universal" => Target::Universal,
            "megatron" => Target::Megatron { ranks: ranks.unwrap_or(1) },
            other => {
                return Err(Error::invalid(format!("unknown format {other:?}; formats: {}", Target::NAMES.join(", "))));
            }
        };
        let (sharded, ranked) = match target {
            Target::Dcp { .. } | Target::Megatron { .. } => (false, true),
            Target::Safetensors { .. } | Target::HuggingFace { .. } => (true, false),
            Target::Torch | Target::Universal => (false, false),
        };
        let refused = |what: &str, only: &str| Err(Error::invalid(format!("{what} is for {only} alone, not for {name}")));
        match () {
            () if !sharded && max_shard_size.is_some() => refused("a maximum shard size", "safetensors"),
            () if !ranked && ranks.is_some_and(|ranks| ranks > 1) => refused("a number of ranks", "DCP"),
            () => Ok(target),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_tells_the_format() {
        let to = |name: &str, like| Target::choose(None, name, like, None, None).ok();
        assert_eq!(to("a/model.safetensors", None), Some(Target::Safetensors { max_shard_size: None }));
        assert_eq!(to("s3://b/model.pt", Some(Format::Dcp)), Some(Target::Torch));
        assert_eq!(to("folder", None), None);
        // A format that only other programs write becomes DCP, wherever it is asked.
        for like in [Format::Dcp, Format::DeepSpeed, Format::Megatron, Format::Lightning] {
            assert_eq!(to("folder", Some(like)), Some(Target::Dcp { ranks: 1 }), "{like:?}");
        }
    }

    #[test]
    fn what_only_some_formats_have_is_refused_for_others() {
        assert!(Target::choose(Some("torch"), "x", None, Some(4), None).is_err());
        assert!(Target::choose(Some("dcp"), "x", None, Some(4), Some(1)).is_err());
        assert!(Target::choose(Some("dcp"), "x", None, Some(0), None).is_err());
        assert!(Target::choose(Some("zip"), "x", None, None, None).unwrap_err().to_string().contains("huggingface"));
        for name in Target::NAMES {
            assert!(Target::choose(Some(name), "x", None, Some(1), None).is_ok(), "{name}");
        }
    }
}
