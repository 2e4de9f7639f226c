"""Which slots PyTorch's own optimizers have once they have run, and how those begin.

Only for dicts that something other than reshard loads into: that needs to see a place for every slot beforehand. Classes are
matched exactly, since a subclass may keep other state, and nothing here runs an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Slot(NamedTuple):
    """How a slot begins."""

    #: Laid out as its parameter is; otherwise one number.
    as_parameter: bool
    #: The value of every element.
    value: float = 0.0
    #: Whether a number lies where the parameter does, and not on the CPU.
    on_device: bool = False
    #: Whether a number is of single precision whatever the default is.
    single: bool = False


_LIKE = Slot(as_parameter=True)
_Rule = Callable[[Mapping[str, Any]], dict[str, Slot]]


def _number(group: Mapping[str, Any], value: float = 0.0) -> Slot:
    fused = bool(group.get("fused"))
    return Slot(False, value, on_device=bool(group.get("capturable")) or fused, single=fused)


def _adam(group: Mapping[str, Any]) -> dict[str, Slot]:
    slots = {"step": _number(group), "exp_avg": _LIKE, "exp_avg_sq": _LIKE}
    return {**slots, "max_exp_avg_sq": _LIKE} if group.get("amsgrad") else slots


def _sgd(group: Mapping[str, Any]) -> dict[str, Slot]:
    return {"momentum_buffer": _LIKE} if group["momentum"] != 0 else {}


def _rmsprop(group: Mapping[str, Any]) -> dict[str, Slot]:
    slots = {"step": _number(group), "square_avg": _LIKE}
    if group["momentum"] > 0:
        slots["momentum_buffer"] = _LIKE
    if group["centered"]:
        slots["grad_avg"] = _LIKE
    return slots


def _asgd(group: Mapping[str, Any]) -> dict[str, Slot]:
    number = Slot(False, on_device=True)
    return {"step": number, "eta": number._replace(value=float(group["lr"])), "mu": number._replace(value=1.0), "ax": _LIKE}


def _rprop(group: Mapping[str, Any]) -> dict[str, Slot]:
    return {"step": _number(group), "prev": _LIKE, "step_size": Slot(True, float(group["lr"]))}


# Adagrad makes its slots when it is made, LBFGS and Adafactor keep others than their parameters' shapes suggest.
_RULES: dict[type, _Rule] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.ASGD: _asgd,
    torch.optim.Rprop: _rprop,
    torch.optim.Adadelta: lambda group: {"step": _number(group), "square_avg": _LIKE, "acc_delta": _LIKE},
    torch.optim.Adamax: lambda group: {"step": _number(group), "exp_avg": _LIKE, "exp_inf": _LIKE},
    torch.optim.RAdam: lambda group: {"step": _number(group), "exp_avg": _LIKE, "exp_avg_sq": _LIKE},
    torch.optim.NAdam: lambda group: {
        "step": _number(group),
        "mu_product": _number(group, 1.0),
        "exp_avg": _LIKE,
        "exp_avg_sq": _LIKE,
    },
}
if hasattr(torch.optim, "Muon"):
    _RULES[torch.optim.Muon] = lambda group: {"momentum_buffer": _LIKE}


def is_known(optimizer: Any) -> bool:
    """Whether it is known which slots an optimizer will have."""
    return type(optimizer) in _RULES


def slots_to_come(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Slot]:
    """The slots of every parameter of a group that gets a gradient."""
    return _RULES[type(optimizer)](group)
