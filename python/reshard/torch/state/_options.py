"""The options of the state-dict calls, with the names and defaults that PyTorch gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import InvalidInput

#: How keys of groups' values begin in the flattened form.
GROUP_VALUES = "param_groups."


def is_group_value(key: Any) -> bool:
    """Whether a key of the flattened form is that of a group's value, ``param_groups.{name}.{key}``."""
    return str(key).startswith(GROUP_VALUES)


@dataclass
class StateDictOptions:
    """How state is read and set. Fields and defaults are those of ``torch.distributed.checkpoint.state_dict``.

    Attributes:
        full_state_dict: whole tensors instead of this rank's parts, gathered one tensor at a time.
        cpu_offload: tensors on the CPU; together with ``full_state_dict``, on rank 0 alone (others get an empty dict).
        ignore_frozen_params: leave out parameters that do not require gradients.
        keep_submodule_prefixes: keep submodules' names in keys when only ``submodules`` are asked for.
        strict: missing and unexpected keys are an error when the model's state is set.
        broadcast_from_rank0: rank 0 alone has the full state dict; its tensors are sent to the others one by one.
        flatten_optimizer_state_dict: optimizer state as ``state.{name}.{slot}`` and ``param_groups.{name}.{key}``.
        dsd_fqn_modifiers: the method that tells which attributes a module leaves out of names.
        full_state_dict_ranks: the ranks that receive a full state dict, where that is neither all of them nor rank 0.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"
    full_state_dict_ranks: Sequence[int] | None = None


def options_from(options: Any) -> StateDictOptions:
    """Options of ours, from ours, from PyTorch's own class, or from none; checked."""
    if options is None:
        return StateDictOptions()
    if not isinstance(options, StateDictOptions):
        fields = {name: getattr(options, name) for name in StateDictOptions.__dataclass_fields__ if hasattr(options, name)}
        options = StateDictOptions(**fields)
    assert isinstance(options, StateDictOptions)
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise InvalidInput("full_state_dict must be True when broadcast_from_rank0 is True.")
    if options.full_state_dict_ranks is not None and not options.full_state_dict:
        raise InvalidInput("full_state_dict must be True when full_state_dict_ranks is given")
    return options
