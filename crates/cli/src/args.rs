//! What was typed. Each verb's own file says what it means.

mod changing;
mod reading;
mod seeing;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

pub(crate) use changing::{
    CompressionArg, ConvertArgs, EditArgs, FormatArg, KeyArgs, LayoutArgs, MergeArgs, PlanArgs, PruneArgs, RecoverArgs,
    RelayoutArgs, WriteArgs,
};
pub(crate) use reading::{DiffArgs, LatestArgs, PageArgs, ReportArgs, ServeArgs, StatsArgs, StatsSort, TrendArgs, VerifyArgs};

pub(crate) use seeing::{ViewAction, ViewArgs, ViewVerbArgs};

use crate::printer::ColorChoice;
use crate::version;

/// See, check, change and move any checkpoint of distributed training, without PyTorch.
#[derive(Debug, Parser)]
#[command(name = "reshard", version = version::SHORT, long_version = version::LONG, propagate_version = false)]
#[command(max_term_width = 110, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

const AFTER_HELP: &str = "\
A PATH is a DCP folder, a safetensors file or folder, or a .pt file, also on s3://, gs://, az:// or https://.
Exit codes: 0 fine, 1 checked and found bad, 2 could not run. Data goes to stdout, everything else to stderr.";

/// For every verb.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    /// Color output
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN", help_heading = "Global options")]
    pub(crate) color: ColorChoice,
    /// Print only data and errors: no notes, no progress bars
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// Follow symbolic links that lead outside the checkpoint's folder (the Hugging Face cache uses such links)
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) follow_symlinks: bool,
    /// Bytes that keys may take beyond twice what is stored of them, where keys share bytes or tensors are expanded (default:
    /// RESHARD_EXPANDED_LIMIT, or 4GiB)
    #[arg(long, global = true, value_name = "SIZE", help_heading = "Global options", hide_short_help = true)]
    pub(crate) expanded_limit: Option<String>,
    /// Which parameters lie in the flat buffers of Megatron's distributed optimizer (dp_reshardable); a JSON file
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options", hide_short_help = true)]
    pub(crate) parameter_map: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    #[command(visible_alias = "info")]
    Inspect(InspectArgs),
    Ls(LsArgs),
    #[command(visible_alias = "cat")]
    Show(ShowArgs),
    Stats(StatsArgs),
    #[command(visible_alias = "hash")]
    Digest(DigestArgs),
    Verify(VerifyArgs),
    Diff(DiffArgs),
    Trend(TrendArgs),
    Convert(ConvertArgs),
    #[command(visible_alias = "reshard")]
    Relayout(RelayoutArgs),
    Plan(PlanArgs),
    Merge(MergeArgs),
    View(ViewVerbArgs),
    Edit(EditArgs),
    #[command(visible_alias = "repair")]
    Recover(RecoverArgs),
    Latest(LatestArgs),
    Prune(PruneArgs),
    Report(ReportArgs),
    Serve(ServeArgs),
    Demo(DemoArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Print data as JSON.
#[derive(Debug, Args)]
pub(crate) struct JsonArg {
    /// Print JSON (the schema is stable: docs/cli-json.md)
    #[arg(long)]
    pub(crate) json: bool,
}

/// Summarize a checkpoint: contents, sharding, writer, and whether it looks complete
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The checkpoint
    pub(crate) path: String,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// List the keys with dtype, shape, chunks and bytes
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// Only keys matching GLOB: `*` any text, `?` one character, `[ab]`, `{a,b}`
    pub(crate) glob: Option<String>,
    /// Show modules as a tree with totals
    #[arg(long)]
    pub(crate) tree: bool,
    /// Maximum depth of the tree
    #[arg(long, value_name = "LEVELS", requires = "tree")]
    pub(crate) depth: Option<usize>,
    /// Sort keys
    #[arg(long, value_enum, default_value_t, value_name = "BY")]
    pub(crate) sort: SortBy,
    /// List every key on a terminal too
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// An order of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortBy {
    /// By name, numbers by value
    #[default]
    Name,
    /// Largest first
    Size,
    /// As stored
    None,
}

/// Show a tensor's values or statistics and where its chunks lie, or a plain value
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// The key, as `reshard ls` prints it
    pub(crate) key: String,
    /// Only this part, as in Python: `0:4,:`, `-1`, `...,0`
    #[arg(long, value_name = "SLICE", allow_hyphen_values = true)]
    pub(crate) slice: Option<String>,
    /// Skip statistics: read only the values that are printed
    #[arg(long)]
    pub(crate) values_only: bool,
    /// Print every value of the slice
    #[arg(long)]
    pub(crate) all: bool,
    /// List every chunk
    #[arg(long)]
    pub(crate) chunks: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Print dtype, shape and sha256 of every tensor and every plain value as JSON, whatever the format and layout
#[derive(Debug, Args)]
pub(crate) struct DigestArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// Only keys matching GLOB: `*` any text, `?` one character, `[ab]`, `{a,b}`
    pub(crate) glob: Option<String>,
    /// Do not verify stored checksums while reading
    #[arg(long)]
    pub(crate) no_verify: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    /// Print JSON, which a digest always is
    #[arg(long, hide = true)]
    pub(crate) json: bool,
}

/// Train a small model, save it on four ranks, resume it on three, and show that nothing was lost
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Folder for the demo's checkpoint
    #[arg(short, long, value_name = "FOLDER", default_value = "demo-checkpoint")]
    pub(crate) output: std::path::PathBuf,
}

/// Print a shell completion script
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page, or write one page per verb into a folder
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The folder to write into
    pub(crate) folder: Option<std::path::PathBuf>,
}

/// The whole command line, for completions and manuals.
pub fn command() -> clap::Command {
    Cli::command()
}
