"""Slots that an optimizer's own ``state_dict()`` nests in dicts, one level up: what belongs to a parameter is placed as its
parameter is, however deep it lies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..._errors import ReshardError

#: Between the steps of a way through nested dicts. No text that a person writes has it.
STEP = "\x1f"


def unnested(slots: Mapping[Any, Any]) -> dict[Any, Any]:
    """Slots with dicts below them taken apart, each leaf under the way to it. Dicts whose keys are not text stay: those have
    types to keep."""
    flat: dict[Any, Any] = {}
    for key, value in slots.items():
        if isinstance(value, Mapping) and value and isinstance(key, str) and all(type(below) is str for below in value):
            flat.update({f"{key}{STEP}{below}": leaf for below, leaf in unnested(value).items()})
        else:
            flat[key] = value
    return flat


def unnested_state(state: Any, of: Callable[[Any], bool]) -> Any:
    """A state with the slots of some parameters taken apart."""
    if not isinstance(state, Mapping) or not any(
        isinstance(v, Mapping) for s in state.values() if isinstance(s, Mapping) for v in s.values()
    ):
        return state
    return {key: unnested(slots) if isinstance(slots, Mapping) and of(key) else slots for key, slots in state.items()}


def nested(slots: Mapping[Any, Any]) -> dict[Any, Any]:
    """The other way round."""
    tree: dict[Any, Any] = {}
    for key, value in slots.items():
        steps = key.split(STEP) if isinstance(key, str) and STEP in key else [key]
        at = tree
        for step in steps[:-1]:
            at = at.setdefault(step, {})
        at[steps[-1]] = value
    return tree


def below(tree: Any, key: Any) -> Any:
    """What lies at the end of a way."""
    for step in key.split(STEP) if isinstance(key, str) else (key,):
        tree = tree.get(step) if isinstance(tree, Mapping) else None
    return tree


def shown(key: Any) -> str:
    """A way as a person reads it."""
    return str(key).replace(STEP, ".")


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What is raised below names slots as a person reads them."""
    try:
        yield
    except ReshardError as error:
        if STEP in error.message:
            error.message = shown(error.message)
            error.keys = [shown(key) for key in error.keys]
        raise
