//! Which of an optimizer's slots are laid out as their parameter is, and which are one number beside it.
//!
//! A slot of several elements is told by its shape. One of a single element is both where its parameter has one, too, or is not in
//! the checkpoint: then other parameters tell, whose slots of that name differ from them or do not, and then the names that
//! PyTorch's optimizers have.

use std::collections::HashMap;

use super::family::{Families, Family, FamilyKind};
use super::rules::Rules;
use crate::checkpoint::{Catalog, CatalogKind};

/// What PyTorch's optimizers keep as one number, whatever the parameter.
const NUMBERS: &[&str] = &["step", "mu_product", "eta", "mu"];
/// What they keep for each element.
const ELEMENTWISE: &[&str] = &[
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "prev",
    "step_size",
    "ax",
];

/// How a slot is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// As its parameter.
    AsParameter,
    /// One number.
    Number,
}

/// The shapes of a checkpoint's parameters and of their slots.
#[derive(Debug, Default)]
pub(super) struct Slots<'c> {
    parameters: HashMap<&'c str, &'c [u64]>,
    /// The slots of several elements, of parameters that are not there, by what they begin with.
    larger: HashMap<String, Vec<(String, &'c [u64])>>,
    /// Whether parameters of several elements have slots like themselves, and whether of one number, by the slot.
    told: HashMap<String, (bool, bool)>,
}

/// What the keys of all of an optimizer's slots begin with, wherever the slot stands.
fn root(family: &Family) -> String {
    let leading = match &family.kind {
        FamilyKind::Slot(slot) if family.after.is_empty() => family.before.strip_suffix(&format!("{slot}.")),
        _ => None,
    };
    leading.unwrap_or(&family.before).to_owned()
}

fn is_one(shape: &[u64]) -> bool {
    shape.iter().all(|size| *size == 1)
}

impl<'c> Slots<'c> {
    pub(super) fn new(catalog: &'c Catalog, families: &Families, rules: &Rules) -> Slots<'c> {
        let mut found = Slots::default();
        let mut slots = Vec::new();
        for (key, entry) in &catalog.entries {
            let CatalogKind::Tensor(tensor) = &entry.kind else { continue };
            for (family, name) in families.of(key) {
                match family.kind {
                    FamilyKind::Parameter => {
                        found.parameters.entry(name).or_insert(&tensor.shape);
                    }
                    // What becomes of these is said.
                    FamilyKind::Slot(ref slot) if rules.slots.contains_key(slot) => {}
                    FamilyKind::Slot(ref slot) => slots.push((root(&family), name, slot.clone(), &tensor.shape[..])),
                    FamilyKind::Setting => {}
                }
            }
        }
        for (root, name, slot, shape) in &slots {
            if !is_one(shape) && !found.parameters.contains_key(name) {
                found.larger.entry(format!("{root}{name}")).or_default().push((slot.clone(), *shape));
            }
        }
        for (root, name, slot, shape) in slots {
            let Ok(Some(parameter)) = found.parameter(&root, name) else { continue };
            let (like, number) = (shape == parameter, is_one(shape));
            if !is_one(parameter) {
                let told = found.told.entry(format!("{root}{slot}")).or_default();
                *told = (told.0 | like, told.1 | number);
            }
        }
        found
    }

    /// The shape of a parameter: its own, or that of those of its slots that have several elements.
    fn parameter(&self, root: &str, name: &str) -> Result<Option<&[u64]>, String> {
        if let Some(shape) = self.parameters.get(name) {
            return Ok(Some(*shape));
        }
        let Some(((first, shape), others)) = self.larger.get(&format!("{root}{name}")).and_then(|slots| slots.split_first())
        else {
            return Ok(None);
        };
        match others.iter().find(|(_, other)| other != shape) {
            None => Ok(Some(*shape)),
            Some((other, differing)) => Err(format!(
                "the slots of {name:?} have several shapes, {first:?} {shape:?} and {other:?} {differing:?}, and the parameter is not \
                 in the checkpoint: say what becomes of one of them, [slots] {other} = \"drop\", \"same\" or \"steps\""
            )),
        }
    }

    /// How the slot of a parameter is laid out, by its shape; or why that cannot be told.
    pub(super) fn kind(&self, family: &Family, slot: &str, name: &str, own: &[u64]) -> Result<Kind, String> {
        let root = root(family);
        let parameter = self.parameter(&root, name)?;
        let say = |what: String, words: &str| Err(format!("{what}: say what becomes of it, [slots] {slot} = {words}"));
        let kind = match parameter {
            Some(parameter) if is_one(own) && !is_one(parameter) => Kind::Number,
            _ if !is_one(own) => Kind::AsParameter,
            _ => match self.told.get(&format!("{root}{slot}")) {
                Some((true, false)) => Kind::AsParameter,
                Some((false, true)) => Kind::Number,
                _ if NUMBERS.contains(&slot) => Kind::Number,
                _ if ELEMENTWISE.contains(&slot) => Kind::AsParameter,
                _ => {
                    let what = "has one element, and nothing tells whether it has one for each of its parameter";
                    return say(format!("{:?} {what}", family.key(name)), "\"drop\", \"same\" or \"steps\"");
                }
            },
        };
        match parameter {
            Some(parameter) if kind == Kind::AsParameter && own != parameter => {
                let what = format!("{:?} has shape {own:?}, its parameter {parameter:?}", family.key(name));
                say(what, "\"drop\" or \"same\"")
            }
            _ => Ok(kind),
        }
    }
}
