//! Verbs that only look, beyond the first four.

use clap::Args;

use super::JsonArg;

/// Check structure, sizes, coverage and every checksum; each finding with key, file and offset
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when sound, 1 when something is damaged or missing, 2 when it could not be checked.")]
pub(crate) struct VerifyArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// Only structure, sizes and coverage: read no data
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Compare two checkpoints, whatever their formats and layouts
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when the same, 1 when different, 2 when they could not be compared.")]
pub(crate) struct DiffArgs {
    /// The first checkpoint
    pub(crate) first: String,
    /// The second checkpoint
    pub(crate) second: String,
    /// Elements this close count as the same: |a − b| ≤ T + T·|b|
    #[arg(long, value_name = "T", conflicts_with_all = ["absolute", "relative"])]
    pub(crate) tolerance: Option<f64>,
    /// Like --tolerance, for the distance alone
    #[arg(long, value_name = "T")]
    pub(crate) absolute: Option<f64>,
    /// Like --tolerance, for the distance as a share of b alone
    #[arg(long, value_name = "T")]
    pub(crate) relative: Option<f64>,
    /// Only keys, dtypes and shapes: read no tensors
    #[arg(long)]
    pub(crate) shapes_only: bool,
    /// Only keys that fit (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// No keys that fit (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Rename keys of the first before comparing (repeatable)
    #[arg(long, value_name = "REGEX=TEMPLATE")]
    pub(crate) rename: Vec<String>,
    /// List every difference, however many
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Print the newest checkpoint of a folder of steps that is complete
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when there is one, 1 when there is none.")]
pub(crate) struct LatestArgs {
    /// The folder that holds a folder for each step
    pub(crate) folder: String,
    /// Read all data and compare checksums before calling a checkpoint complete
    #[arg(long)]
    pub(crate) deep: bool,
    /// List every step and what it is worth
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// What a page is about.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// Another one to compare it with
    pub(crate) other: Option<String>,
    /// Verify everything for the health shown, not only what metadata tells
    #[arg(long)]
    pub(crate) verify: bool,
    /// When comparing: elements this close count as the same
    #[arg(long, value_name = "T", requires = "other")]
    pub(crate) tolerance: Option<f64>,
    /// When comparing: only keys, dtypes and shapes
    #[arg(long, requires = "other")]
    pub(crate) shapes_only: bool,
}

/// Write one self-contained page about a checkpoint, or about two and what differs
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// The file to write; `-` is stdout
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: String,
    /// Read every tensor for statistics and histograms
    #[arg(long)]
    pub(crate) histograms: bool,
}

/// Show the report live on loopback, with tensors loaded when asked for
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// The port; 0 takes any that is free
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Stop when standard input ends, so that whoever started it cannot leave it behind
    #[arg(long)]
    pub(crate) until_stdin_ends: bool,
}
