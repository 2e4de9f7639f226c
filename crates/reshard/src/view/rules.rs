//! What a view is made of: rules that take tensors by name, change their shape in steps, and give them new names.

use std::collections::BTreeMap;

use reshard_formats::DType;

use super::pattern::Pattern;

/// A position in a text of rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Position {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// One rule.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    /// What it is called in messages.
    pub(super) name: String,
    pub(super) at: Position,
    /// Several when tensors of several names are joined, or one rule is for many.
    pub(super) from: Vec<Pattern>,
    /// None for a rule that drops what it takes.
    pub(super) to: Vec<Pattern>,
    pub(super) steps: Vec<Step>,
    /// Whether it may match nothing.
    pub(super) optional: bool,
}

/// One step, and of which of the rule's tensors; all when `None`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    pub(super) action: Action,
    pub(super) of: Option<Vec<usize>>,
    pub(super) at: Position,
}

/// What a step does.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Action {
    /// All tensors that differ in a capture become one, with a new dimension for it.
    Stack { capture: String, dim: i64 },
    /// The reverse: one tensor for each index of a dimension.
    Unstack { capture: String, dim: i64 },
    /// The tensors of all the rule's names beside each other along a dimension; group by group where there are groups.
    Concat { dim: i64, sizes: Option<Sizes>, groups: u64 },
    /// The reverse: a tensor for each of the new names.
    Split { dim: i64, sizes: Option<Sizes>, groups: u64 },
    /// Two dimensions change places.
    Transpose(i64, i64),
    /// Dimensions in another order.
    Permute(Vec<i64>),
    /// Another shape; −1 is what is left over.
    Reshape { to: Vec<i64>, from: Option<Vec<i64>> },
    /// One dimension as several.
    Unflatten { dim: i64, sizes: Vec<i64> },
    /// Several neighbouring dimensions as one; how they were, for the way back.
    Flatten { start: i64, end: i64, sizes: Option<Vec<i64>> },
    /// Some indices of a dimension.
    Slice { dim: i64, start: u64, stop: Option<u64> },
    /// A longer dimension; how long it was, for the way back.
    Pad { dim: i64, size: u64, value: PadValue, from: Option<u64> },
    /// A shorter dimension.
    Truncate { dim: i64, size: u64 },
    /// Another element type; which it was, for the way back.
    Cast { to: DType, from: Option<DType> },
    /// Codes and their scales become one weight. Which codes, and in which blocks, for the way back.
    Dequantise { to: DType, block: Option<Vec<u64>>, from: Option<DType> },
    /// A weight becomes codes and their scales; which type it was, for the way back.
    Quantise { to: DType, block: Vec<u64>, from: Option<DType> },
    /// A weight and the two factors of a low-rank update become one weight.
    Lora { scale: f64, transposed: bool },
}

/// How a dimension is shared.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Sizes {
    /// In indices.
    Exact(Vec<u64>),
    /// In proportion.
    Ratio(Vec<u64>),
}

/// What new elements are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum PadValue {
    /// This number.
    Number(f64),
    /// What the tensor that is loaded holds there.
    Live,
}

/// What becomes of tensors that no rule takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Rest {
    /// They stay as they are.
    #[default]
    Keep,
    /// They are left out.
    Drop,
    /// They are an error that names them.
    Error,
}

/// What becomes of an optimizer's slot whose shape does not tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotRule {
    /// It is left out.
    Drop,
    /// It is the same for all of a rule's tensors, which is checked, and for all that they become.
    Same,
    /// It goes through the steps as its parameter does.
    Steps,
}

/// Everything a text of rules says.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    pub(super) rules: Vec<Rule>,
    pub(super) rest: Rest,
    /// Slots by name.
    pub(super) slots: BTreeMap<String, SlotRule>,
    /// What stands before parameters' names in keys, besides nothing and the usual words.
    pub(super) prefixes: Vec<String>,
    /// The same for optimizers.
    pub(super) optimizers: Vec<String>,
    /// The type that block-scaled weights have before any rule sees them.
    pub(super) dequantise: Option<DType>,
}

impl Action {
    /// As it is written in a file.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Action::Stack { .. } => "stack",
            Action::Unstack { .. } => "unstack",
            Action::Concat { .. } => "concat",
            Action::Split { .. } => "split",
            Action::Transpose(..) => "transpose",
            Action::Permute(_) => "permute",
            Action::Reshape { .. } => "reshape",
            Action::Unflatten { .. } => "unflatten",
            Action::Flatten { .. } => "flatten",
            Action::Slice { .. } => "slice",
            Action::Pad { .. } => "pad",
            Action::Truncate { .. } => "truncate",
            Action::Cast { .. } => "cast",
            Action::Dequantise { .. } => "dequantise",
            Action::Quantise { .. } => "quantise",
            Action::Lora { .. } => "lora",
        }
    }

    /// What undoes it, or why nothing does.
    fn reversed(&self) -> Result<Action, String> {
        Ok(match self.clone() {
            Action::Stack { capture, dim } => Action::Unstack { capture, dim },
            Action::Unstack { capture, dim } => Action::Stack { capture, dim },
            Action::Concat { dim, sizes: Some(sizes), groups } => Action::Split { dim, sizes: Some(sizes), groups },
            Action::Concat { .. } => return Err("concat says neither sizes nor ratio, by which it could be split".to_owned()),
            Action::Split { dim, sizes, groups } => Action::Concat { dim, sizes, groups },
            Action::Transpose(a, b) => Action::Transpose(a, b),
            Action::Permute(order) => {
                let ndim = order.len() as i64;
                let mut back = vec![0; order.len()];
                for (to, from) in order.iter().enumerate() {
                    let from = if *from < 0 { from.saturating_add(ndim) } else { *from };
                    match usize::try_from(from).ok().and_then(|from| back.get_mut(from)) {
                        Some(slot) => *slot = to as i64,
                        None => return Err(format!("permute names the dimension {from}, of {ndim}")),
                    }
                }
                Action::Permute(back)
            }
            Action::Reshape { to, from: Some(from) } => Action::Reshape { to: from, from: Some(to) },
            Action::Reshape { .. } => return Err("reshape does not say from which shape".to_owned()),
            Action::Unflatten { dim, sizes } => {
                let end = dim.saturating_add(sizes.len() as i64 - 1);
                if dim < 0 {
                    return Err("unflatten counts its dimension from the end".to_owned());
                }
                Action::Flatten { start: dim, end, sizes: Some(sizes) }
            }
            Action::Flatten { start, sizes: Some(sizes), .. } => Action::Unflatten { dim: start, sizes },
            Action::Flatten { .. } => return Err("flatten does not say the sizes of the dimensions that it joins".to_owned()),
            Action::Pad { dim, from: Some(from), .. } => Action::Truncate { dim, size: from },
            Action::Pad { .. } => return Err("pad does not say from which size".to_owned()),
            Action::Cast { to, from: Some(from) } => Action::Cast { to: from, from: Some(to) },
            Action::Cast { .. } => return Err("cast does not say from which dtype".to_owned()),
            Action::Dequantise { to, block: Some(block), from: Some(from) } => {
                Action::Quantise { to: from, block, from: Some(to) }
            }
            Action::Dequantise { .. } => return Err("dequantise does not say from which dtype, and in which block".to_owned()),
            Action::Quantise { to, block, from: Some(from) } => {
                Action::Dequantise { to: from, block: Some(block), from: Some(to) }
            }
            Action::Quantise { .. } => return Err("quantise does not say from which dtype".to_owned()),
            Action::Lora { .. } => return Err("lora adds an update to its weight, which nothing takes apart".to_owned()),
            Action::Slice { .. } => return Err("slice leaves elements out, which nothing brings back".to_owned()),
            Action::Truncate { .. } => return Err("truncate leaves elements out, which nothing brings back".to_owned()),
        })
    }
}

impl Rule {
    /// A rule for messages: its name and where it stands.
    pub(super) fn describe(&self) -> String {
        match self.at.line {
            0 => format!("rule {:?}", self.name),
            line => format!("rule {:?} (line {line})", self.name),
        }
    }

    /// The rule that undoes it, or why there is none.
    fn reversed(&self) -> Result<Rule, String> {
        if self.to.is_empty() {
            return Err(format!("{} drops what it takes, which nothing brings back", self.describe()));
        }
        let undo = |step: &Step| -> Result<Step, String> {
            Ok(Step { action: step.action.reversed()?, of: step.of.clone(), at: step.at })
        };
        let steps = self.steps.iter().rev().map(undo).collect::<Result<_, _>>();
        let steps = steps.map_err(|why| format!("{} cannot be reversed: {why}", self.describe()))?;
        Ok(Rule { from: self.to.clone(), to: self.from.clone(), steps, ..self.clone() })
    }
}

impl Rules {
    /// The rules that undo these, or why there are none.
    pub(super) fn reversed(&self) -> Result<Rules, String> {
        // What may be absent anyway need not be brought back.
        let kept = self.rules.iter().filter(|rule| !(rule.optional && rule.to.is_empty()));
        let rules = kept.map(Rule::reversed).collect::<Result<_, _>>()?;
        Ok(Rules { rules, ..self.clone() })
    }
}
