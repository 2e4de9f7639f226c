"""State of models and optimizers by names that depend on no wrapper, no rank and no parameter id.

Changing the import from ``torch.distributed.checkpoint.state_dict`` is the whole migration::

    from reshard.torch import StateDictOptions, get_state_dict, set_state_dict
"""

from __future__ import annotations

from ._calls import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from ._errors import StateError, StateMismatch
from ._fsdp import (
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from ._options import StateDictOptions
from ._sharded_load import load_sharded_optimizer_state_dict
from ._template import OptimizerStateDict

__all__ = [
    "OptimizerStateDict",
    "StateDictOptions",
    "StateError",
    "StateMismatch",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load_sharded_optimizer_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]
