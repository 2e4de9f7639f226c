"""FSDP's own calls for optimizer state, for flat and for original parameters, without its collectives.

The pair ``optim_state_dict`` and ``optim_state_dict_to_load``, and the older calls that did parts of the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from ... import _reshard
from .._tensor import describe
from ._as_torch import as_torch_tree
from ._calls import _delivered, _on_cpu, _received
from ._errors import InvalidInput, StateIncomplete
from ._model import LiveModel, check_model
from ._optimizer import Applied, give, plan, read
from ._options import StateDictOptions, options_from
from ._stream import Ranks

#: In PyTorch's words, which programs look for.
_MISSING = (
    "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but some ranks are "
    "missing some of those states"
)


@torch.no_grad()
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    group: Any = None,
    *,
    full: bool = False,
    rank0_only: bool = False,
    cpu_offload: bool = False,
    as_torch: bool = False,
) -> dict[str, Any]:
    """An optimizer's state by the names of the parameters, whether FSDP keeps them flat or not.

    Args:
        model: the root module.
        optim: the optimizer.
        optim_state_dict: its own ``state_dict()``, if there is one at hand. Without ``param_groups`` in it the result has none.
        group: accepted as in PyTorch; the process group is that of the model.
        full: whole tensors, gathered one at a time, instead of views of this rank's own slots. The latter takes no
            collective at all.
        rank0_only: with ``full``, on rank 0 alone; others get an empty dict.
        cpu_offload: tensors on the CPU.
        as_torch: slots of flat parameters as ShardedTensor or DTensor, at a collective each.
    """
    ranks = (0,) if full and rank0_only else None
    options = StateDictOptions(
        full_state_dict=full, cpu_offload=cpu_offload and (not full or rank0_only), full_state_dict_ranks=ranks
    )
    live = LiveModel(check_model(model))
    state = read(live, (optim,), options, optim_state_dict)
    if as_torch and not full:
        as_torch_tree(live, state)
    try:
        delivered = _delivered(live, state, options)
    except StateIncomplete as error:
        raise StateIncomplete(f"{_MISSING}: {error.message}", keys=error.keys) from error
    if cpu_offload and full and not rank0_only:
        delivered = _on_cpu(delivered)
    return delivered


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any] | None,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
    *,
    rank0_only: bool | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """State by names into what this rank's optimizer loads: ``optim.load_state_dict`` takes the result.

    Args:
        model: the root module.
        optim: the optimizer; its own slots are written in place where they fit.
        optim_state_dict: state by names, in views, in full tensors, or as PyTorch gives it.
        is_named_optimizer: the optimizer goes by names (``NamedOptimizer``, ``KeyedOptimizer``).
        load_directly: load it right away.
        group: the ranks that rank 0 of them sends to; by default those that hold the model together.
        rank0_only: rank 0 alone has the state, whole; its tensors are sent to the others one by one. By default what FSDP was
            told by ``state_dict_type``.
        options: ``strict=False`` accepts parameters that the given state does not know.
    """
    live = LiveModel(check_model(model))
    given = optim_state_dict or {}
    if _from_rank0(live) if rank0_only is None else rank0_only:
        given = _received(live, (optim,), given, group)
    planned = plan(live, (optim,), given, options_from(options), is_named_optimizer)
    (load,) = planned.loads
    if load_directly:
        give(live, optim, load, planned.blocks)
        return optim.state_dict()
    return Applied(live, optim, load, planned.blocks).state_dict


@torch.no_grad()
def _to_load_of_managed(
    model: nn.Module, optim: Any, given: Mapping[str, Any] | None, group: Any = None, rank0_only: bool = False
) -> dict[str, Any]:
    """What the older calls give: parameters that the given state does not list, and that FSDP does not hold, belong to someone
    else, who adds them. So they are in no group."""
    live = LiveModel(check_model(model))
    given = given or {}
    if rank0_only:
        given = _received(live, (optim,), given, group)
    planned = plan(live, (optim,), given, StateDictOptions(strict=not live.has_flats))
    missing = [live.parameters[name] for name in planned.report.missing]
    if any(parameter.flat is not None for parameter in missing):
        # Which says what is missing.
        planned = plan(live, (optim,), given, StateDictOptions())
    (load,) = planned.loads
    state = Applied(live, optim, load, planned.blocks).state_dict
    others = {parameter.identity for parameter in missing}
    if not others:
        return state
    pairs = [(theirs, zip(theirs["params"], own["params"])) for theirs, own in zip(state["param_groups"], optim.param_groups)]
    groups = [{**theirs, "params": [key for key, param in params if id(param) not in others]} for theirs, params in pairs]
    return {**state, "param_groups": groups}


def _from_rank0(live: LiveModel) -> bool:
    """Whether FSDP was told that rank 0 alone has whole state dicts."""
    root = next((module for module in live.model.modules() if isinstance(module, FSDP)), None)
    if root is None or Ranks(live.process_group()).alone:
        return False
    config = getattr(root, "_optim_state_dict_config", None)
    return bool(getattr(config, "rank0_only", False))


class _Parameters:
    """Stands for an optimizer of which only the parameters are known."""

    state_dict = torch.optim.Optimizer.state_dict

    def __init__(self, model: nn.Module, given: Any) -> None:
        listed: list[Any] = list(given) if given is not None else list(model.parameters())
        if any(not isinstance(entry, (dict, torch.Tensor)) for entry in listed):
            raise InvalidInput("optim_input lists parameters or groups of them, as an optimizer takes them")
        grouped = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        self.param_groups = [{**group, "params": list(group["params"])} for group in grouped]
        self.state: dict[Any, Any] = {}


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn("The `optim_input` argument is deprecated: give the optimizer.", FutureWarning, stacklevel=3)


def _optimizer_or_parameters(model: nn.Module, optim_input: Any, optim: Any) -> Any:
    _warn_of_input(optim_input)
    return optim if optim is not None else _Parameters(check_model(model), optim_input)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """The whole state by names, on the CPU; by default on rank 0 alone. Older than :func:`optim_state_dict`."""
    _warn_of_input(optim_input)
    return optim_state_dict(model, optim, full=True, rank0_only=rank0_only, cpu_offload=True)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    """State by names, every slot as ShardedTensor or DTensor. Older than :func:`optim_state_dict`."""
    return optim_state_dict(model, optim, as_torch=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """What this rank's optimizer loads, from the whole state on every rank. Older than :func:`optim_state_dict_to_load`."""
    optimizer = _optimizer_or_parameters(model, optim_input, optim)
    return _to_load_of_managed(model, optimizer, full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """What this rank's optimizer loads, from a sharded state. Older than :func:`optim_state_dict_to_load`."""
    return _to_load_of_managed(model, optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """What each rank's optimizer loads, from the whole state on rank 0 alone. Older than :func:`optim_state_dict_to_load`."""
    optimizer = _optimizer_or_parameters(model, optim_input, optim)
    return _to_load_of_managed(model, optimizer, full_optim_state_dict, group, rank0_only=True)


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: Any,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """A whole state with names where it has ids, or the other way round; the model is not wrapped.

    Args:
        optim_state_dict: the state.
        optim_state_key_type: ``OptimStateKeyType.PARAM_NAME`` or ``OptimStateKeyType.PARAM_ID``, or either name as text.
        model: the model whose parameters the optimizer has.
        optim_input: the parameters or groups that the optimizer was given, in place of ``optim``.
        optim: the optimizer.
    """
    wanted = getattr(optim_state_key_type, "name", optim_state_key_type)
    if wanted not in ("PARAM_NAME", "PARAM_ID"):
        raise InvalidInput(f"parameters go by PARAM_NAME or by PARAM_ID, not by {optim_state_key_type!r}")
    by_name = wanted == "PARAM_NAME"
    live = LiveModel(check_model(model))
    names: dict[int, str] = {}
    for name, parameter in live.parameters.items():
        if parameter.identity is not None:
            names.setdefault(parameter.identity, name)
    groups = _optimizer_or_parameters(model, optim_input, optim).param_groups
    ids = {names[id(param)]: index for index, param in enumerate(param for group in groups for param in group["params"])}
    mapping: dict[Any, Any] = {index: name for name, index in ids.items()} if by_name else dict(ids)
    # What goes by the wanted kind already stays.
    mapping.update({key: key for key in (ids if by_name else ids.values())})
    return _reshard.rekey_optimizer(dict(optim_state_dict), mapping, describe)
