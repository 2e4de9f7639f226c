//! Verbs that only look, beyond the first four.

use clap::{Args, ValueEnum};

use super::{JsonArg, ViewArgs};
use crate::failure::Result;
use crate::limits::Limits;

/// Check structure, sizes, coverage and every checksum; each finding with key, file and offset
#[derive(Debug, Args)]
#[command(after_help = "Exit code: 0 when sound, 1 when something is damaged or missing, 2 when it could not be checked.")]
pub(crate) struct VerifyArgs {
    /// The checkpoint
    pub(crate) path: String,
    /// Check structure, sizes and coverage only; read no data
    #[arg(long, conflicts_with = "numbers")]
    pub(crate) quick: bool,
    /// Look at the numbers as well: NaN, infinities, dead layers, the optimizer's moments (as `reshard stats`)
    #[arg(long)]
    pub(crate) numbers: bool,
    /// Set a limit of a rule about numbers, or turn it off: `large-weight=1e3`, `no-state=off` (repeatable)
    #[arg(long, value_name = "RULE=LIMIT", requires = "numbers")]
    pub(crate) limit: Vec<String>,
    /// List every finding
    #[arg(long)]
    pub(crate) all: bool,
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
    #[arg(long, visible_alias = "atol", value_name = "T")]
    pub(crate) absolute: Option<f64>,
    /// Relative tolerance: |a − b| ≤ T·|b|
    #[arg(long, visible_alias = "rtol", value_name = "T")]
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

/// Show NaN, infinities, zeros, RMS, extremes and percentiles of every tensor, and what is wrong with them
#[derive(Debug, Args)]
#[command(
    after_help = "Exit code: 0 when no rule of severity error is broken, 1 when one is. JSON has percentiles and histograms too."
)]
pub(crate) struct StatsArgs {
    /// The checkpoint
    #[arg(required_unless_present = "rules")]
    pub(crate) path: Option<String>,
    /// Only keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) key: Vec<String>,
    /// Sort tensors, largest first
    #[arg(long, value_enum, default_value_t, value_name = "BY")]
    pub(crate) sort: StatsSort,
    /// Set a limit of a rule, or turn it off: `large-weight=1e3`, `no-state=off` (repeatable)
    #[arg(long, value_name = "RULE=LIMIT")]
    pub(crate) limit: Vec<String>,
    /// List the rules and their limits
    #[arg(long, conflicts_with = "path")]
    pub(crate) rules: bool,
    /// Verify stored checksums while reading
    #[arg(long)]
    pub(crate) verify: bool,
    /// List every tensor and every finding
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
    #[command(flatten)]
    pub(crate) output: JsonArg,
}

/// An order of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum StatsSort {
    /// NaN and infinities first, then as stored
    #[default]
    Bad,
    /// By the share of zeros
    Zeros,
    /// By root mean square
    Rms,
    /// By the largest magnitude
    Absmax,
    /// As stored
    None,
}

/// Show a run's steps side by side: stored metrics, how far weights moved, and since when a tensor is bad
#[derive(Debug, Args)]
#[command(
    after_help = "Exit code: 0 when no tensor of the newest step breaks a rule of severity error (`reshard stats --rules`), 1 when one does."
)]
pub(crate) struct TrendArgs {
    /// The folder that holds a folder for each step
    pub(crate) folder: String,
    /// Only keys matching GLOB (repeatable)
    #[arg(long, value_name = "GLOB")]
    pub(crate) key: Vec<String>,
    /// Read every step: RMS of each tensor and how far it moved since the step before
    #[arg(long)]
    pub(crate) numbers: bool,
    /// Set a limit of a rule, or turn it off: `large-weight=1e3`, `zero-weight=off` (repeatable)
    #[arg(long, value_name = "RULE=LIMIT")]
    pub(crate) limit: Vec<String>,
    /// List every step and every tensor
    #[arg(long)]
    pub(crate) all: bool,
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
    /// Compare all stored checksums for the verdict shown, too
    #[arg(long)]
    pub(crate) verify: bool,
    /// Do not read the tensors: no statistics, histograms and rules of health
    #[arg(long)]
    no_numbers: bool,
    /// Set a limit of a rule about numbers, or turn it off: `large-weight=1e3`, `no-state=off` (repeatable)
    #[arg(long, value_name = "RULE=LIMIT", conflicts_with = "no_numbers")]
    limit: Vec<String>,
    /// Read every tensor for statistics and histograms; so it is without this, too
    #[arg(long, hide = true, conflicts_with = "no_numbers")]
    histograms: bool,
    /// When comparing: tolerance for equal elements
    #[arg(long, value_name = "T", requires = "other")]
    pub(crate) tolerance: Option<f64>,
    /// When comparing: only keys, dtypes and shapes
    #[arg(long, requires = "other")]
    pub(crate) shapes_only: bool,
    #[command(flatten)]
    pub(crate) view: ViewArgs,
}

impl PageArgs {
    /// The limits by which numbers are judged, if they are to be read.
    pub(crate) fn numbers(&self) -> Result<Option<Limits>> {
        let limits = Limits::parse(&self.limit)?;
        Ok((self.histograms || !self.no_numbers).then_some(limits))
    }
}

/// Write a self-contained HTML page about a checkpoint, or about two and their differences
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// The file to write; `-` is stdout
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: String,
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
