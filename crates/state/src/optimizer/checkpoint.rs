//! Which slots an optimizer will have, from a checkpoint's keys and the shapes of the parameters: an optimizer that has no state
//! yet is no obstacle.

use indexmap::{IndexMap, IndexSet};
use reshard_formats::{KeyPath, PathSegment};
use reshard_layout::Dims;

use super::state::STATE;
use crate::dotted;

/// An entry of a checkpoint below an optimizer.
#[derive(Clone, Copy, Debug)]
pub struct StoredSlot<'a> {
    /// Its path below the optimizer.
    pub path: &'a KeyPath,
    /// The shape of a tensor; None for anything else.
    pub shape: Option<&'a [u64]>,
}

/// What becomes of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedSlot {
    /// The parameter that a tensor is a slot of.
    pub param: Option<String>,
    /// Whether it is laid out as the parameter is; otherwise it is whole.
    pub by_parameter: bool,
}

/// What an optimizer's slots are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotPlan {
    /// One for each entry.
    pub slots: Vec<PlannedSlot>,
    /// Names that are no parameters of the model.
    pub unknown_params: Vec<String>,
}

/// Plans the slots of a checkpoint for parameters of these shapes. A slot of another shape than its parameter's is whole, and so
/// is a tensor without dimensions, even where the parameter has none either.
pub fn plan_slots<'a>(params: &IndexMap<String, Dims>, entries: impl IntoIterator<Item = StoredSlot<'a>>) -> SlotPlan {
    let known: IndexSet<&str> = params.keys().map(String::as_str).collect();
    let mut unknown: IndexSet<String> = IndexSet::new();
    let mut plan = SlotPlan::default();
    for entry in entries {
        let param = entry.shape.and_then(|_| owner(entry.path, &known));
        if let Some(name) = param.as_ref().filter(|name| !known.contains(name.as_str())) {
            unknown.insert(name.clone());
        }
        let own = param.as_ref().and_then(|name| params.get(name));
        let by_parameter = entry.shape.is_some_and(|shape| !shape.is_empty() && own.is_some_and(|own| own.as_slice() == shape));
        plan.slots.push(PlannedSlot { param, by_parameter });
    }
    plan.unknown_params = unknown.into_iter().collect();
    plan
}

/// The parameter that a path below the optimizer belongs to: `state`, name, slot; or all of it in one
/// segment, where the optimizer was saved flattened.
fn owner(path: &[PathSegment], known: &IndexSet<&str>) -> Option<String> {
    match path {
        [PathSegment::Key(state), name, slot @ ..] if state == STATE && !slot.is_empty() => {
            Some(dotted(std::slice::from_ref(name)))
        }
        [PathSegment::Key(flat)] => {
            let rest = flat.strip_prefix("state.")?;
            let splits = || rest.rmatch_indices('.').map(|(dot, _)| &rest[..dot]);
            // Without a known name the slot is taken to be the last segment.
            let name = splits().find(|name| known.contains(name)).or_else(|| splits().next())?;
            Some(name.to_owned())
        }
        _ => None,
    }
}
