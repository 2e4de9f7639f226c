//! Views: a checkpoint seen through rules.

use clap::{Args, Subcommand};

use super::JsonArg;

/// Rules through which to see the checkpoint.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "View")]
pub(crate) struct ViewArgs {
    /// See the checkpoint through RULES: a file, a recipe (`reshard view list`), the folder of a LoRA adapter, or one rule such
    /// as `{from="a.{x}", to="b.{x}"}` (repeatable, applied in order)
    #[arg(long, value_name = "RULES")]
    pub(crate) view: Vec<String>,
    /// Apply the rules backwards
    #[arg(long, requires = "view")]
    pub(crate) reverse: bool,
    /// Set a parameter of the rules, such as `heads=32` (repeatable)
    #[arg(long, value_name = "NAME=NUMBER", requires = "view")]
    pub(crate) set: Vec<String>,
}

/// Check rules for views, and list the recipes that come with reshard
#[derive(Debug, Args)]
pub(crate) struct ViewVerbArgs {
    #[command(subcommand)]
    pub(crate) action: ViewAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ViewAction {
    /// Show what rules would make of a checkpoint, from metadata alone
    #[command(after_help = "Exit code: 0 when every rule fits, 2 when one does not.")]
    Check {
        /// A file of rules, a recipe, or one rule
        rules: String,
        /// The checkpoint
        path: String,
        /// Apply the rules backwards
        #[arg(long)]
        reverse: bool,
        /// Set a parameter of the rules, such as `heads=32` (repeatable)
        #[arg(long, value_name = "NAME=NUMBER")]
        set: Vec<String>,
        /// List every key that is made
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        output: JsonArg,
    },
    /// List the recipes
    List {
        #[command(flatten)]
        output: JsonArg,
    },
    /// Print a recipe's rules
    Show {
        /// The recipe
        recipe: String,
    },
}
