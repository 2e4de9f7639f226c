//! The options of the six calls, the rules between them, and who receives what they give.

use crate::StateError;

/// How state is read and set; the fields and their defaults are those of PyTorch's class of the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateDictOptions {
    /// Whole tensors instead of this rank's parts.
    pub full_state_dict: bool,
    /// Tensors on the CPU; together with `full_state_dict`, on rank 0 alone.
    pub cpu_offload: bool,
    /// Leave out parameters that are not trained.
    pub ignore_frozen_params: bool,
    /// Keep the names of submodules in keys when only submodules are asked for.
    pub keep_submodule_prefixes: bool,
    /// Missing and unexpected keys are an error; otherwise they are only reported.
    pub strict: bool,
    /// Rank 0 alone has the whole tensors and sends them to all others, one at a time.
    pub broadcast_from_rank0: bool,
    /// Optimizer state as `state.{name}.{slot}` and `param_groups.{name}.{key}`.
    pub flatten_optimizer_state_dict: bool,
    /// Name of the method that gives a module's name modifiers.
    pub dsd_fqn_modifiers: String,
    /// Ranks that receive a full state dict, where that is neither all ranks nor rank 0 by `cpu_offload`.
    pub full_state_dict_ranks: Option<Vec<u64>>,
}

impl Default for StateDictOptions {
    fn default() -> StateDictOptions {
        StateDictOptions {
            full_state_dict: false,
            cpu_offload: false,
            ignore_frozen_params: false,
            keep_submodule_prefixes: true,
            strict: true,
            broadcast_from_rank0: false,
            flatten_optimizer_state_dict: false,
            dsd_fqn_modifiers: "_fqn_modifiers".to_owned(),
            full_state_dict_ranks: None,
        }
    }
}

/// Who receives the tensors of a state dict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recipients {
    /// Every rank keeps its own parts; nothing moves.
    Own,
    /// Every rank receives whole tensors.
    All,
    /// These ranks receive whole tensors; the others receive nothing.
    Ranks(Vec<u64>),
}

impl Recipients {
    /// Whether this rank receives whole tensors.
    pub fn includes(&self, rank: u64) -> bool {
        match self {
            Recipients::Own => false,
            Recipients::All => true,
            Recipients::Ranks(ranks) => ranks.contains(&rank),
        }
    }
}

impl StateDictOptions {
    /// Checks the rules between the options.
    pub fn check(&self) -> Result<(), StateError> {
        let broken = |reason: &str| Err(StateError::InvalidOptions { reason: reason.to_owned() });
        if self.broadcast_from_rank0 && !self.full_state_dict {
            return broken("full_state_dict must be set when broadcast_from_rank0 is set");
        }
        match &self.full_state_dict_ranks {
            Some(_) if !self.full_state_dict => {
                return broken("full_state_dict must be set when full_state_dict_ranks is given");
            }
            Some(ranks) if ranks.is_empty() => {
                return broken("full_state_dict_ranks names no rank");
            }
            _ => {}
        }
        if self.dsd_fqn_modifiers.is_empty() {
            return broken("dsd_fqn_modifiers must name a method");
        }
        Ok(())
    }

    /// Who receives what a get call gives.
    pub fn recipients(&self) -> Recipients {
        match (&self.full_state_dict_ranks, self.full_state_dict, self.cpu_offload) {
            (_, false, _) => Recipients::Own,
            (Some(ranks), ..) => Recipients::Ranks(ranks.clone()),
            // What all ranks put into host memory would fill the memory of every host that runs several ranks.
            (None, true, true) => Recipients::Ranks(vec![0]),
            (None, true, false) => Recipients::All,
        }
    }

    /// Checks that what is to be set is there at all, by the rules for when it may be empty.
    pub fn check_given(&self, model: Option<usize>, optimizer: Option<usize>, submodules: bool) -> Result<(), StateError> {
        let elsewhere = self.broadcast_from_rank0 || (self.full_state_dict && self.cpu_offload);
        if model == Some(0) && !submodules && !self.ignore_frozen_params && self.strict && !elsewhere {
            return Err(StateError::Empty { what: "model" });
        }
        if optimizer == Some(0) && !elsewhere {
            return Err(StateError::Empty { what: "optimizer" });
        }
        Ok(())
    }
}
