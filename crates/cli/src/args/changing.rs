//! Verbs that write.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

use super::{JsonArg, ViewArgs};

/// A format to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// A DCP folder
    Dcp,
    /// Safetensors: one file, or several with an index
    Safetensors,
    /// One torch.save file
    #[value(alias = "pt")]
    Torch,
    /// A model's folder as Hugging Face has it: the model alone, files of at most 5 GB with an index
    #[value(name = "huggingface", alias = "hf")]
    HuggingFace,
    /// A universal checkpoint, from which DeepSpeed resumes on any number of ranks
    #[value(name = "deepspeed-universal", alias = "universal")]
    Universal,
    /// A folder of Megatron core (torch_dist, fully_reshardable)
    Megatron,
}

impl FormatArg {
    /// What the engine calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FormatArg::Dcp => "dcp",
            FormatArg::Safetensors => "safetensors",
            FormatArg::Torch => "torch",
            FormatArg::HuggingFace => "huggingface",
            FormatArg::Universal => "deepspeed-universal",
            FormatArg::Megatron => "megatron",
        }
    }
}

/// How records are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompressionArg {
    /// Zstandard, as PyTorch's extension of that name
    Zstd,
}

/// Other names for keys.
#[derive(Debug, Default, Args)]
pub(crate) struct RenameArgs {
    /// Rename keys: replace what REGEX matches with TEMPLATE; `$1` is the first group (repeatable, applied in order)
    #[arg(long, value_name = "REGEX=TEMPLATE")]
    pub(crate) rename: Vec<String>,
    /// Read renames from FILE, one per line; `#` starts a comment
    #[arg(long, value_name = "FILE")]
    pub(crate) rename_file: Option<PathBuf>,
}

/// Which keys, and under which names.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Keys")]
pub(crate) struct KeyArgs {
    /// Only keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// Skip keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Only the model, under the model's own names: what was written loads into it
    #[arg(long, conflicts_with = "optimizer_only")]
    pub(crate) model_only: bool,
    /// Only the optimizer
    #[arg(long)]
    pub(crate) optimizer_only: bool,
    /// Only keys that start with PREFIX, which is removed
    #[arg(long, value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,
    /// Add PREFIX to every key
    #[arg(long, value_name = "PREFIX")]
    pub(crate) add_prefix: Option<String>,
    #[command(flatten)]
    pub(crate) renames: RenameArgs,
}

/// How to write.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Writing")]
pub(crate) struct WriteArgs {
    /// Replace an existing checkpoint; the old one stays until the new one is complete
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Do not verify the source's checksums while reading
    #[arg(long)]
    pub(crate) no_verify: bool,
    /// Do not sync to disk before finishing
    #[arg(long)]
    pub(crate) no_sync: bool,
    /// Skip pickled objects that the target format cannot hold, instead of failing
    #[arg(long)]
    pub(crate) skip_opaque: bool,
}

/// What of a checkpoint is written again, and how.
#[derive(Debug, Default, Args)]
pub(crate) struct RewriteArgs {
    /// Cast floating-point tensors: `bf16`, or `GLOB=fp32` for some (repeatable, the first match wins)
    #[arg(long, value_name = "[GLOB=]DTYPE")]
    pub(crate) cast: Vec<String>,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    #[command(flatten)]
    pub(crate) write: WriteArgs,
}

/// Convert a checkpoint to another format
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The checkpoint
    pub(crate) source: String,
    /// The folder or file to write
    pub(crate) destination: String,
    /// Output format; inferred from the name for .safetensors and .pt
    #[arg(long, value_enum)]
    pub(crate) to: Option<FormatArg>,
    /// DCP, Megatron: shard as if N ranks had saved it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) ranks: usize,
    /// Safetensors, Hugging Face: maximum size of one file, such as 5GB
    #[arg(long, value_name = "SIZE")]
    pub(crate) max_shard_size: Option<String>,
    /// DCP: compress the records of tensors
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) compress: Option<CompressionArg>,
    #[command(flatten)]
    pub(crate) write: RewriteArgs,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Reshard a checkpoint for a device mesh, so that each rank later reads whole files
#[derive(Debug, Args)]
pub(crate) struct RelayoutArgs {
    /// The checkpoint
    pub(crate) source: String,
    /// The DCP folder to write
    pub(crate) destination: String,
    #[command(flatten)]
    pub(crate) layout: LayoutArgs,
    #[command(flatten)]
    pub(crate) write: RewriteArgs,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// A mesh and how tensors lie on it.
#[derive(Debug, Args)]
pub(crate) struct LayoutArgs {
    /// The device mesh: `dp=4,tp=2`, or `4,2`
    #[arg(long)]
    pub(crate) mesh: String,
    /// Placements of tensors matching GLOB, one per mesh dimension: `GLOB=S(0),R` (repeatable, the first match wins;
    /// a tensor that matches no rule is replicated; without rules a mesh of one dimension means `*=S(0)`, as FSDP does)
    #[arg(long, value_name = "GLOB=PLACEMENTS")]
    pub(crate) rule: Vec<String>,
}

/// Estimate what loading a checkpoint on a device mesh would read, from metadata alone
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The checkpoint
    pub(crate) path: String,
    #[command(flatten)]
    pub(crate) layout: LayoutArgs,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    /// List every rank
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Average checkpoints of the same model into a new one
#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// The checkpoints
    #[arg(required = true, num_args = 2..)]
    pub(crate) sources: Vec<String>,
    /// The folder or file to write
    #[arg(short, long, value_name = "PATH")]
    pub(crate) output: String,
    /// One weight per checkpoint, such as 0.7,0.3; normalized by their sum
    #[arg(long, value_delimiter = ',', allow_hyphen_values = true)]
    pub(crate) weights: Vec<f64>,
    /// Output format; inferred from the name for .safetensors and .pt, else that of the first checkpoint
    #[arg(long, value_enum)]
    pub(crate) to: Option<FormatArg>,
    /// DCP: shard as if N ranks had saved it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) ranks: usize,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    #[command(flatten)]
    pub(crate) write: WriteArgs,
    #[command(flatten)]
    pub(crate) json: JsonArg,
}

/// Drop or rename keys and set plain values in a new DCP checkpoint; data files of DCP are linked, not copied
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").args(["drop", "rename", "rename_file", "set"]).required(true).multiple(true))]
pub(crate) struct EditArgs {
    /// The checkpoint
    pub(crate) source: String,
    /// The folder to write
    pub(crate) destination: String,
    /// Drop keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) drop: Vec<String>,
    #[command(flatten)]
    pub(crate) renames: RenameArgs,
    /// Set a plain value: JSON, or text as it is (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Skip pickled objects that a DCP checkpoint cannot hold, instead of failing
    #[arg(long)]
    pub(crate) skip_opaque: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Rebuild a lost or damaged .metadata from the data files that reshard wrote
#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    /// The DCP folder
    pub(crate) path: String,
    /// Show what would be recovered without writing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Replace a .metadata that is readable, too
    #[arg(long)]
    pub(crate) replace: bool,
    /// Accept a save for which some ranks left no file: a rank with nothing to write leaves none
    #[arg(long)]
    pub(crate) accept_absent_ranks: bool,
    /// Restore the checkpoint as it was before an edit whose record is lost
    #[arg(long)]
    pub(crate) undo_edits: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Remove steps that no rule keeps, and leftovers of interrupted saves; the newest complete step always stays
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("rule").args(["keep_last", "keep_every", "keep_best", "keep_younger", "budget", "leftovers_only"]).required(true).multiple(true))]
pub(crate) struct PruneArgs {
    /// The folder that holds a folder for each step
    pub(crate) folder: String,
    /// Keep the last N complete steps
    #[arg(long, value_name = "N")]
    pub(crate) keep_last: Option<usize>,
    /// Keep steps whose number is a multiple of N
    #[arg(long, value_name = "N")]
    pub(crate) keep_every: Option<u64>,
    /// Keep the best N by a metric stored in each checkpoint: `metrics.loss:min:3`
    #[arg(long, value_name = "KEY:min|max[:N]")]
    pub(crate) keep_best: Option<String>,
    /// Keep steps younger than this: `12h`, `7d`
    #[arg(long, value_name = "AGE")]
    pub(crate) keep_younger: Option<String>,
    /// Keep no more than this in all steps together: `500GB`; the oldest go first, those of --keep-best last
    #[arg(long, value_name = "SIZE")]
    pub(crate) budget: Option<String>,
    /// Before a complete step goes, read the newest ones whole until one is sound, and keep that one
    #[arg(long)]
    pub(crate) fallback: bool,
    /// Keep all complete steps
    #[arg(long, conflicts_with_all = ["keep_last", "keep_every", "keep_best", "keep_younger", "budget"])]
    pub(crate) leftovers_only: bool,
    /// Keep leftovers newer than this; they may belong to a save in progress
    #[arg(long, value_name = "AGE", default_value = "1h")]
    pub(crate) grace: String,
    /// Also remove incomplete steps newer than the newest complete one; only when no job is saving here
    #[arg(long)]
    pub(crate) abandoned: bool,
    /// Read all data and verify checksums before treating a step as complete
    #[arg(long)]
    pub(crate) deep: bool,
    /// Show what would be removed without removing it
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}
