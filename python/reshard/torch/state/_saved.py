"""Optimizer state dicts on their way to a save: without slots that still wait, and with a note on keys that are not text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import _reshard
from ._await import without_waiting
from ._options import is_group_value
from ._template import SLOT_KEYS, VALUE_KEYS, OptimizerStateDict

_CONTAINERS = (dict, list, OptimizerStateDict)


def saved_form(state: dict[Any, Any]) -> dict[Any, Any]:
    """A state dict as it is saved."""
    return _saved(state)  # type: ignore[no-any-return]


def has_unplaced(state: Any) -> bool:
    """Whether slots are in it that have to be compared between ranks, since nothing says which part they are."""
    if isinstance(state, OptimizerStateDict):
        return bool(state.unplaced)
    below = state.values() if isinstance(state, dict) else state
    return any(type(value) in _CONTAINERS and has_unplaced(value) for value in below)


def _saved(value: Any) -> Any:
    if isinstance(value, OptimizerStateDict):
        return _noted(without_waiting(value))
    items = value.items() if type(value) is dict else enumerate(value)
    changed = {key: new for key, below in items if type(below) in _CONTAINERS and (new := _saved(below)) is not below}
    if not changed:
        return value
    return {**value, **changed} if type(value) is dict else [changed.get(index, below) for index, below in enumerate(value)]


def _noted(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """With a note on the keys of nested slots and of values of groups that flattening would turn into text for good, and on
    values of groups of which it would leave nothing."""
    if "state" not in state:
        return _noted_values(state)
    below = {key: value for key, value in state.items() if key not in ("param_groups", SLOT_KEYS)}
    groups = {"param_groups": state["param_groups"]} if type(state.get("param_groups")) is list else {}
    if not (has_odd_keys(below) or has_odd_keys(groups, values=True)):
        return state
    types = _reshard.key_types(below, groups)
    return state if types is None else {**state, SLOT_KEYS: types}


def _noted_values(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The same for the flattened form, whose slots are noted already."""
    groups = {key: value for key, value in state.items() if is_group_value(key)}
    if not has_odd_keys(list(groups.values()), values=True):
        return state
    types = _reshard.key_types({}, groups)
    return state if types is None else {**state, VALUE_KEYS: types}


def has_odd_keys(tree: Any, values: bool = False) -> bool:
    """Whether keys are no text, or of values whether dicts are empty."""
    if isinstance(tree, dict):
        below = ((type(key), value) for key, value in tree.items())
        return (values and not tree) or any(kind is not str or _is_odd(value, values) for kind, value in below)
    return type(tree) is list and any(_is_odd(value, values) for value in tree)


def _is_odd(value: Any, values: bool) -> bool:
    return type(value) in (dict, list) and has_odd_keys(value, values)
