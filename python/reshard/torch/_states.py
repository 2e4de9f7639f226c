"""Modules and optimizers as leaves of a state: asked for their state by the state-dict calls, and given it back by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ._describe import PLAIN, is_stateful
from .state import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

Give = Callable[[Any], Any]


def owner_of(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> nn.Module | None:
    """The module that has all parameters of an optimizer; None when none has."""
    wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for module in modules:
        if wanted <= {id(param) for param in module.parameters()}:
            return module
    return None


def state_of(value: Any, modules: Iterable[nn.Module], options: StateDictOptions | None = None) -> tuple[Any, Give | None]:
    """The state of one leaf, and what takes it back; None for a leaf that is its own state. The options are those of optimizers."""
    if isinstance(value, nn.Module):
        return get_model_state_dict(value), lambda state: set_model_state_dict(value, state)
    if isinstance(value, torch.optim.Optimizer):
        model = owner_of(value, modules)
        if model is not None:
            state = get_optimizer_state_dict(model, value, options=options)
            return state, lambda state: set_optimizer_state_dict(model, value, state, options=options)
    if is_stateful(value):
        return value.state_dict(), value.load_state_dict
    return value, None


def states_of(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Give]]:
    """A state dict whose top-level objects were asked for their state, and what takes each back. They may talk to other ranks when
    they are asked: all ranks ask them in one order, whatever the order of their dicts."""
    # Nearly all leaves are plain tensors, which are their own state: not even asked.
    objects = {key: value for key, value in state.items() if type(value) not in PLAIN}
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    states = dict(state)
    takers: dict[Any, Give] = {}
    for key in in_one_order(objects):
        states[key], take = state_of(state[key], modules)
        if take is not None:
            takers[key] = take
    return states, takers


def in_one_order(state: Mapping[Any, Any]) -> list[Any]:
    """The keys of a dict in an order that all ranks have in common."""
    return sorted(state, key=str)
