//! Verbs that write.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};

use super::JsonArg;

/// A format to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// A DCP folder
    Dcp,
    /// Safetensors: one file, or several with an index
    Safetensors,
    /// One torch.save file
    Torch,
}

/// Other names for keys.
#[derive(Debug, Default, Args)]
pub(crate) struct RenameArgs {
    /// Rename keys: what REGEX matches becomes TEMPLATE, `$1` its first group (repeatable, one after the other)
    #[arg(long, value_name = "REGEX=TEMPLATE")]
    pub(crate) rename: Vec<String>,
    /// Renames from a file, one a line; `#` starts a comment
    #[arg(long, value_name = "FILE")]
    pub(crate) rename_file: Option<PathBuf>,
}

/// Which keys, and under which names.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Keys")]
pub(crate) struct KeyArgs {
    /// Only keys that fit (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// No keys that fit (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Only the model
    #[arg(long, conflicts_with = "optimizer_only")]
    pub(crate) model_only: bool,
    /// Only the optimizer
    #[arg(long)]
    pub(crate) optimizer_only: bool,
    /// Only keys that start with this, and without it
    #[arg(long, value_name = "PREFIX")]
    pub(crate) prefix: Option<String>,
    /// Put this before every key
    #[arg(long, value_name = "PREFIX")]
    pub(crate) add_prefix: Option<String>,
    #[command(flatten)]
    pub(crate) renames: RenameArgs,
}

/// How to write.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Writing")]
pub(crate) struct WriteArgs {
    /// Replace what is there; the old stays until the new is complete
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Do not compare the source's checksums on the way
    #[arg(long)]
    pub(crate) no_verify: bool,
    /// Do not wait until everything is on the disk
    #[arg(long)]
    pub(crate) no_sync: bool,
    /// Leave out pickled objects that the target cannot carry, instead of failing
    #[arg(long)]
    pub(crate) skip_opaque: bool,
}

/// What of a checkpoint is written again, and how.
#[derive(Debug, Default, Args)]
pub(crate) struct RewriteArgs {
    /// Cast floating-point tensors: `bf16`, or `GLOB=fp32` for some (repeatable, the first that fits decides)
    #[arg(long, value_name = "[GLOB=]DTYPE")]
    pub(crate) cast: Vec<String>,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    #[command(flatten)]
    pub(crate) write: WriteArgs,
}

/// Turn a checkpoint into another format
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// The checkpoint
    pub(crate) source: String,
    /// The folder or file to write
    pub(crate) destination: String,
    /// The format; told by the name for .safetensors and .pt
    #[arg(long, value_enum)]
    pub(crate) to: Option<FormatArg>,
    /// DCP: as so many ranks would have saved it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) ranks: usize,
    /// Safetensors: a new file before one exceeds this, such as 5GB
    #[arg(long, value_name = "SIZE")]
    pub(crate) max_shard_size: Option<String>,
    #[command(flatten)]
    pub(crate) write: RewriteArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Cut a checkpoint anew for a mesh of ranks, so that a later load reads whole files
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
    pub(crate) output: JsonArg,
}

/// A mesh and how tensors lie on it.
#[derive(Debug, Args)]
pub(crate) struct LayoutArgs {
    /// The mesh of ranks: `dp=4,tp=2`, or `4,2`
    #[arg(long)]
    pub(crate) mesh: String,
    /// How tensors that fit are cut, one placement for each dimension of the mesh: `GLOB=S(0),R` (repeatable, the
    /// first that fits decides; a tensor that none fits is replicated)
    #[arg(long, value_name = "GLOB=PLACEMENTS")]
    pub(crate) rule: Vec<String>,
}

/// What loading a checkpoint on a mesh would read: a dry run from metadata alone
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The checkpoint
    pub(crate) path: String,
    #[command(flatten)]
    pub(crate) layout: LayoutArgs,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    /// List every rank, however many
    #[arg(long)]
    pub(crate) all: bool,
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
    /// A weight for each checkpoint, such as 0.7,0.3; they are divided by their sum
    #[arg(long, value_delimiter = ',', allow_hyphen_values = true)]
    pub(crate) weights: Vec<f64>,
    /// The format; told by the name for .safetensors and .pt, else that of the first
    #[arg(long, value_enum)]
    pub(crate) to: Option<FormatArg>,
    /// DCP: as so many ranks would have saved it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) ranks: usize,
    #[command(flatten)]
    pub(crate) keys: KeyArgs,
    #[command(flatten)]
    pub(crate) write: WriteArgs,
    #[command(flatten)]
    pub(crate) json: JsonArg,
}

/// Drop or rename keys and set plain values in a new DCP checkpoint, whose data files are linked and not copied
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").args(["drop", "rename", "rename_file", "set"]).required(true).multiple(true))]
pub(crate) struct EditArgs {
    /// The DCP checkpoint
    pub(crate) source: String,
    /// The folder to write
    pub(crate) destination: String,
    /// Leave out keys that fit (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) drop: Vec<String>,
    #[command(flatten)]
    pub(crate) renames: RenameArgs,
    /// Set a plain value: JSON, or text as it is (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Rebuild a lost or damaged .metadata from the data files that reshard wrote
#[derive(Debug, Args)]
pub(crate) struct RecoverArgs {
    /// The DCP folder
    pub(crate) path: String,
    /// Only say what would be recovered
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Also replace a .metadata that can be read
    #[arg(long)]
    pub(crate) replace: bool,
    /// Accept a save of which some ranks left no file at all: a rank that had nothing to write leaves none
    #[arg(long)]
    pub(crate) accept_absent_ranks: bool,
    /// Bring back the checkpoint as it was before an edit of which nothing is known any more
    #[arg(long)]
    pub(crate) undo_edits: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Remove steps that no rule keeps, and leftovers of saves that were killed; the newest complete step always stays
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("rule").args(["keep_last", "keep_every", "keep_best", "keep_younger", "leftovers_only"]).required(true).multiple(true))]
pub(crate) struct PruneArgs {
    /// The folder that holds a folder for each step
    pub(crate) folder: String,
    /// Keep the last N complete steps
    #[arg(long, value_name = "N")]
    pub(crate) keep_last: Option<usize>,
    /// Keep steps whose number is a multiple of N
    #[arg(long, value_name = "N")]
    pub(crate) keep_every: Option<u64>,
    /// Keep the best by a number that each checkpoint holds: `metrics.loss:min:3`
    #[arg(long, value_name = "KEY:min|max[:N]")]
    pub(crate) keep_best: Option<String>,
    /// Keep steps younger than this: `12h`, `7d`
    #[arg(long, value_name = "AGE")]
    pub(crate) keep_younger: Option<String>,
    /// Keep all complete steps
    #[arg(long, conflicts_with_all = ["keep_last", "keep_every", "keep_best", "keep_younger"])]
    pub(crate) leftovers_only: bool,
    /// Leftovers changed within this time may belong to a save under way and stay
    #[arg(long, value_name = "AGE", default_value = "1h")]
    pub(crate) grace: String,
    /// Also remove incomplete steps newer than the newest complete one: only when no job saves here
    #[arg(long)]
    pub(crate) abandoned: bool,
    /// Read all data and compare checksums before calling a step complete
    #[arg(long)]
    pub(crate) deep: bool,
    /// Only say what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}
