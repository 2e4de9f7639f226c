"""Optimizer state dicts under PyTorch's planners. Those see a flattened state: what waits for a checkpoint looks like a slot, and
neither types of keys nor empty dicts are left. Storage asks here what is meant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from ._await import without_waiting
from ._errors import InvalidInput
from ._memory import SlotMemory, leaves_in
from ._options import is_group_value
from ._saved import has_odd_keys
from ._template import OptimizerStateDict, _shape, dicts_in_use


class StoredEntries(dict):  # type: ignore[type-arg]
    """What a checkpoint has, for a planner that plans a load. A slot that waits and that the checkpoint lacks is no missing key: it
    is there, and nothing of it is stored."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and _waiting_at(key) is not None)

    def __missing__(self, key: Any) -> Any:
        leaf = _waiting_at(key) if isinstance(key, str) else None
        if leaf is None:
            raise KeyError(key)
        return TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), torch.Size(_shape(leaf)), [])

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def _waiting_at(key: str) -> Any:
    """The slot that waits for what a planner calls so, whatever its dict lies below."""
    for state in dicts_in_use():
        below = key
        while below:
            leaf = _slot_at(state["state"], below) if "state" in state else state.get(below)
            if leaf is not None and SlotMemory.waits(leaf):
                return leaf
            below = below.partition(".")[2]
    return None


def _slot_at(slots: Mapping[Any, Any], key: str) -> Any:
    """A slot by the name of its parameter, which may have points in it, and its own."""
    name, _, slot = key.rpartition(".")
    of = slots.get(name.removeprefix("state.")) if name.startswith("state.") else None
    return of.get(slot) if isinstance(of, Mapping) else None


def waiting_keys(planned: Any) -> frozenset[str]:
    """Of a flattened state that is saved, the slots that wait for a checkpoint: an optimizer that has not run does not have them."""
    if not isinstance(planned, Mapping):
        return frozenset()
    slots = {key: leaf for key, leaf in planned.items() if SlotMemory.is_known(leaf)}
    return frozenset(slots.keys() - without_waiting(slots).keys())


def check_values(planned: Any) -> None:
    """Refuses groups whose values a planner has flattened to something else."""
    if not isinstance(planned, Mapping):
        return
    leaves = {id(leaf) for leaf in planned.values()}
    for state in dicts_in_use():
        groups = _values_of_groups(state)
        odd = _odd_values(groups)
        # The dict that is saved is known by what the planner left as it was.
        known: list[Any] = [value for key, value in groups.items() if isinstance(value, (list, tuple)) and key not in odd]
        known += [leaf for leaf in leaves_in(state.get("state", {})) if isinstance(leaf, torch.Tensor)]
        if odd and known and all(id(value) in leaves for value in known):
            raise _not_kept(odd)


def to_stage(state: Any) -> Any:
    """A state as stagers are to copy it: their copies tell neither which slots wait, nor whose values a planner will flatten."""
    if isinstance(state, OptimizerStateDict):
        odd = _odd_values(_values_of_groups(state))
        if odd:
            raise _not_kept(odd)
        return dict(without_waiting(state))
    if type(state) in (dict, OrderedDict):
        return {key: to_stage(value) for key, value in state.items()}
    return [to_stage(value) for value in state] if type(state) is list else state


def _values_of_groups(state: OptimizerStateDict) -> dict[str, Any]:
    lists = state.get("param_groups")
    if isinstance(lists, list):
        return {f"param_groups.{index}.{key}": value for index, group in enumerate(lists) for key, value in group.items()}
    return {key: value for key, value in state.items() if is_group_value(key)}


def _odd_values(groups: Mapping[str, Any]) -> list[str]:
    return [key for key, value in groups.items() if type(value) in (dict, list) and has_odd_keys(value, values=True)]


def _not_kept(odd: list[str]) -> InvalidInput:
    return InvalidInput(
        f"{len(odd)} values of parameter groups have keys that are not text, or empty dicts, which PyTorch's planner does "
        f"not keep: {', '.join(map(repr, odd[:5]))}",
        keys=odd,
        hint="save with reshard.torch.save, or with reshard.torch.checkpoint in place of torch.distributed.checkpoint",
    )


class OwnKeys:
    """Keys of groups' values that are not text: a planner loads them under their text."""

    def __init__(self, state: Any) -> None:
        self._odd = [
            (tree, key) for tree in _dicts_of_groups(state) for key in tree if type(key) is not str and str(key) not in tree
        ]

    def restore(self) -> None:
        """Puts what was loaded where it belongs."""
        for tree, key in self._odd:
            if str(key) in tree:
                tree[key] = tree.pop(str(key))


def _dicts_of_groups(state: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(state, OptimizerStateDict):
        if "param_groups" in state:
            yield from _dicts_in(state["param_groups"])
        else:
            yield from _dicts_in([value for key, value in state.items() if is_group_value(key)])
    elif isinstance(state, (Mapping, list)):
        for value in _below(state):
            yield from _dicts_of_groups(value)


def _dicts_in(tree: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, (dict, list)):
        for value in _below(tree):
            yield from _dicts_in(value)


def _below(tree: Any) -> Iterable[Any]:
    return tree.values() if isinstance(tree, Mapping) else tree
