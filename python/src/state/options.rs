//! The options of the six calls, from the fields of the Python dataclass.

use pyo3::prelude::*;
use reshard::state::{Recipients, StateDictOptions};

/// Reads the fields of a `StateDictOptions`.
pub(super) fn options_of(object: &Bound<'_, PyAny>) -> PyResult<StateDictOptions> {
    let flag = |name: &str| -> PyResult<bool> { object.getattr(name)?.is_truthy() };
    Ok(StateDictOptions {
        full_state_dict: flag("full_state_dict")?,
        cpu_offload: flag("cpu_offload")?,
        ignore_frozen_params: flag("ignore_frozen_params")?,
        keep_submodule_prefixes: flag("keep_submodule_prefixes")?,
        strict: flag("strict")?,
        broadcast_from_rank0: flag("broadcast_from_rank0")?,
        flatten_optimizer_state_dict: flag("flatten_optimizer_state_dict")?,
        dsd_fqn_modifiers: object.getattr("dsd_fqn_modifiers")?.extract()?,
        full_state_dict_ranks: match object.getattr("full_state_dict_ranks") {
            Ok(ranks) => ranks.extract()?,
            Err(_) => None,
        },
    })
}

/// The ranks that receive whole tensors: `None` for all of them.
pub(super) fn recipients_of(ranks: Option<Vec<u64>>) -> Recipients {
    ranks.map_or(Recipients::All, Recipients::Ranks)
}
