//! Verbs that only look, beyond the first four.

use clap::Args;

use super::{JsonArg, ViewArgs};

/// Check structure, sizes, coverage and every checksum; each finding with key, file and offset
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when sound, 1 when something is damaged or missing, 2 when it could not be checked.")]
pub(crate) struct VerifyArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// Check structure, sizes and coverage only; read no data
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Compare two checkpoints of any format and sharding
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when the same, 1 when different, 2 when they could not be compared.")]
pub(crate) struct DiffArgs {
    /// The first checkpoint
    pub(crate) first: String,
    /// The second checkpoint
    pub(crate) second: String,
    /// Treat elements as equal when |a − b| ≤ T + T·|b|
    #[arg(long, value_name = "T", conflicts_with_all = ["absolute", "relative"])]
    pub(crate) tolerance: Option<f64>,
    /// Absolute tolerance: |a − b| ≤ T
    #[arg(long, alias = "atol", value_name = "T")]
    pub(crate) absolute: Option<f64>,
    /// Relative tolerance: |a − b| ≤ T·|b|
    #[arg(long, alias = "rtol", value_name = "T")]
    pub(crate) relative: Option<f64>,
    /// Compare keys, dtypes and shapes only; read no tensors
    #[arg(long)]
    pub(crate) shapes_only: bool,
    /// Only keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// Skip keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Rename keys of the first before comparing (repeatable)
    #[arg(long, value_name = "REGEX=TEMPLATE")]
    pub(crate) rename: Vec<String>,
    /// List every difference
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// Print the newest complete checkpoint in a folder of steps
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when there is one, 1 when there is none.")]
pub(crate) struct LatestArgs {
    /// The folder that holds a folder for each step
    pub(crate) folder: String,
    /// Read all data and verify checksums before treating a checkpoint as complete
    #[arg(long)]
    pub(crate) deep: bool,
    /// List every step and its state
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
    /// A second checkpoint to compare with
    pub(crate) other: Option<String>,
    /// Verify all data for the health shown, not only metadata
    #[arg(long)]
    pub(crate) verify: bool,
    /// When comparing: tolerance for equal elements
    #[arg(long, value_name = "T", requires = "other")]
    pub(crate) tolerance: Option<f64>,
    /// When comparing: only keys, dtypes and shapes
    #[arg(long, requires = "other")]
    pub(crate) shapes_only: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
}

/// Write a self-contained HTML page about a checkpoint, or about two and their differences
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

/// Serve the report on loopback, loading tensors on demand
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// The port; 0 picks a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Stop when standard input closes
    #[arg(long)]
    pub(crate) until_stdin_ends: bool,
}
