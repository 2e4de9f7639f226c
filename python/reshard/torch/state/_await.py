"""Optimizer state dicts with slots that wait for a checkpoint: which are listed, and which count when the dict is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._errors import StateError
from ._known import Slot, is_known, slots_to_come
from ._memory import SlotMemory, leaves_in, memory_of
from ._options import is_group_value
from ._template import OptimizerStateDict, Slots

Path = tuple[str, ...]


def add_slots_to_come(
    state: OptimizerStateDict, live: Any, optimizers: Sequence[Any], flattened: bool, has_run: Sequence[bool]
) -> list[Path]:
    """Adds the slots that optimizers without any state will have. Gives their places; they are to be passed to
    :func:`wait_for` once the dict is as its caller gets it."""
    owners: dict[int, tuple[Any, Any, Any]] = {}
    for optimizer, ran in zip(optimizers, has_run):
        if ran:
            continue
        if not is_known(optimizer):
            state.unknown = (*state.unknown, type(optimizer).__qualname__)
            continue
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    owners[id(param)] = (optimizer, group, param)
    added: list[Path] = []
    maker = state.slots
    if not owners or maker is None:
        return added
    for name, parameter in live.parameters.items():
        identity = parameter.identity
        if identity not in owners or live.inner.primary(name) != name:
            continue
        optimizer, group, param = owners[identity]
        made = {slot: _made(maker, name, slot, rule, param) for slot, rule in slots_to_come(optimizer, group).items()}
        if flattened:
            state.update({f"state.{name}.{slot}": leaf for slot, leaf in made.items()})
            added.extend((f"state.{name}.{slot}",) for slot in made)
        elif made:
            state["state"][name] = made
            added.extend(("state", name, slot) for slot in made)
    return added


def _made(maker: Slots, name: str, slot: str, rule: Slot, param: torch.Tensor) -> Any:
    layout = maker.layouts[name]
    if rule.as_parameter:
        leaf = maker.make(name, slot, layout.dtype, layout.shape)
        if rule.value:
            for tensor in memory_of(leaf):
                tensor.fill_(complex(rule.value, rule.value) if tensor.is_complex() else rule.value)
        return leaf
    double = torch.get_default_dtype() == torch.float64 and not rule.single
    dtype = torch.float64 if double else torch.float32
    device = param.device if rule.on_device and not param.is_meta else torch.device("cpu")
    number = maker.make(None, slot, dtype, ()).to(device)
    return number.fill_(rule.value)


def wait_for(state: Any, places: Sequence[Path]) -> None:
    """The slots at these places wait from now on."""
    for place in places:
        leaf = state
        for key in place:
            leaf = leaf.get(key) if isinstance(leaf, dict) else None
        SlotMemory.wait(leaf)


def without_waiting(given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """An optimizer's state without the slots that still wait. The same object if there are none."""
    nested = "state" in given
    # Of the flattened form, groups are no slots: a learning rate may be a tensor.
    state = given["state"] if nested else {key: value for key, value in given.items() if not is_group_value(key)}
    if not isinstance(state, Mapping) or not any(SlotMemory.waits(leaf) for leaf in leaves_in(state)):
        return given
    some = any(not SlotMemory.waits(leaf) for leaf in leaves_in(state) if _numel(leaf))
    if not nested:
        # The slots of one parameter go together, here as there.
        each: dict[str, dict[Any, Any]] = {}
        for key, value in state.items():
            each.setdefault(str(key).rpartition(".")[0], {})[key] = value
        kept = {key for slots in each.values() for key in _settled(slots, some)}
        return {key: value for key, value in given.items() if key in kept or is_group_value(key)}
    settled = {}
    for name, slots in state.items():
        left = _settled(slots, some) if isinstance(slots, Mapping) else slots
        if left or not isinstance(slots, Mapping):
            settled[name] = left
    return {**given, "state": settled}


def _settled(slots: Mapping[Any, Any], some: bool = False) -> dict[Any, Any]:
    """The slots of a parameter that do not wait. Where a rank holds nothing of a slot, nothing is ever written into it:
    it is as the others are."""
    held = {key: leaf for key, leaf in slots.items() if _numel(leaf) or not SlotMemory.waits(leaf)}
    here = any(not SlotMemory.waits(leaf) for leaf in held.values()) if held else some
    return {key: leaf for key, leaf in slots.items() if not SlotMemory.waits(leaf) or (here and not _numel(leaf))}


def _numel(leaf: Any) -> int:
    return sum(tensor.numel() for tensor in memory_of(leaf))


def check_loaded(given: Mapping[Any, Any]) -> None:
    """Refuses a dict that PyTorch's own ``load`` has filled although nobody knew which slots belong into it."""
    if not isinstance(given, OptimizerStateDict) or not given.unknown or not given.was_loaded_into():
        return
    classes = ", ".join(sorted(set(given.unknown)))
    raise StateError(
        f"a checkpoint was loaded into the state of {classes} before its first step, by a load that fills only the slots that are "
        "there: none of its slots was restored. Load with reshard.torch.load, or through reshard.torch.StorageReader: both take "
        "the slots from the checkpoint. If there is nothing to restore but the groups, pass dict(optim_state_dict)."
    )
