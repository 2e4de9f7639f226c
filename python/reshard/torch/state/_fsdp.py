"""FSDP's own pair of calls for optimizer state, for flat and for original parameters, without its collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ._as_torch import as_torch_tree
from ._calls import _delivered, _on_cpu
from ._model import LiveModel, check_model
from ._optimizer import Applied, give, plan, read
from ._options import StateDictOptions, options_from


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
        optim_state_dict: its own ``state_dict()``, if there is one at hand.
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
    state, _ = read(live, (optim,), options, optim_state_dict)
    if as_torch and not full:
        as_torch_tree(live, state)
    delivered = _delivered(live, state, options)
    if cpu_offload and full and not rank0_only:
        delivered = _on_cpu(delivered)
    return delivered


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
    *,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """State by names into what this rank's optimizer loads: ``optim.load_state_dict`` takes the result.

    Args:
        model: the root module.
        optim: the optimizer; its own slots are written in place where they fit.
        optim_state_dict: state by names, in views, in full tensors, or as PyTorch gives it.
        is_named_optimizer: the optimizer goes by names (``NamedOptimizer``, ``KeyedOptimizer``).
        load_directly: load it right away.
        group: accepted as in PyTorch.
        options: ``strict=False`` accepts parameters that the given state does not know.
    """
    live = LiveModel(check_model(model))
    loads, _ = plan(live, (optim,), optim_state_dict, options_from(options), is_named_optimizer)
    if load_directly:
        give(live, optim, loads[0])
        return optim.state_dict()
    return Applied(live, optim, loads[0]).state_dict
