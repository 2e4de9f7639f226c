"""Optimizer state dicts on their way to a load: they take their structure from the checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ... import _reshard
from ._memory import SlotMemory
from ._options import GROUP_VALUES, is_group_value
from ._template import SLOT_KEYS, VALUE_KEYS, Entry, OptimizerStateDict, _at

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))

#: From a wanted key to the checkpoint's; None leaves a key alone.
Rename = Callable[[str], str | None]


def entries_below(entries: Iterable[_reshard.Entry], prefix: Sequence[Any]) -> list[Entry]:
    """The entries of a checkpoint below a place, by their paths from there on."""
    text = tuple(map(str, prefix))
    below: list[Entry] = []
    for entry in entries:
        path = entry.path
        if len(path) > len(text) and tuple(map(str, path[: len(text)])) == text:
            below.append(Entry(path[len(text) :], entry.dtype_code, entry.shape))
    return below


def key_types_of(checkpoint: Any, prefix: Sequence[Any], entries: Sequence[Entry]) -> Any:
    """What a checkpoint notes of the keys of an optimizer's nested state that are not text."""
    # The flattened form keeps its note on slots, for whoever takes it apart.
    nested = any(len(path) > 1 and path[0] in ("state", "param_groups") for path, _, _ in entries)
    note = SLOT_KEYS if nested else VALUE_KEYS
    return checkpoint.value(".".join((*map(str, prefix), note))) if any(path == (note,) for path, _, _ in entries) else None


def _foreign(checkpoint: Any, prefix: Sequence[Any], entries: Sequence[Entry], names: Sequence[str]) -> set[str]:
    """Which of these names are parameters in the checkpoint: a group lists them. The others are state that belongs to no
    parameter."""
    listed: set[str] = set()
    for path, _, _ in entries:
        if len(path) == 1 and is_group_value(path[0]):
            listed.add(str(path[0]).removeprefix(GROUP_VALUES).rpartition(".")[0])
        elif len(path) == 3 and path[0] == "param_groups" and path[2] == "params":
            listed.update(map(str, checkpoint.value(".".join(map(str, (*prefix, *path))))))
    return listed.intersection(names)


def _from_checkpoint(
    state: Any, checkpoint: Any, rename: Rename | None = None
) -> Iterator[tuple[tuple[Any, ...], OptimizerStateDict, dict[Any, Any]]]:
    """Every optimizer state dict inside of a state, its place, and its structure in the checkpoint."""
    found: list[tuple[tuple[Any, ...], OptimizerStateDict]] = []
    _find(state, (), found)
    entries = checkpoint.entries() if found else ()
    for prefix, template in found:
        if rename is not None and template.slots is not None:
            below = _renamed(prefix, template, entries, rename)
            if below:
                yield prefix, template, template.slots.tree(below, template)
            continue
        below = entries_below(entries, prefix)
        if below and template.slots is not None:
            types = key_types_of(checkpoint, prefix, below)
            foreign = functools.partial(_foreign, checkpoint, prefix, below)
            yield prefix, template, template.slots.tree(below, template, foreign=foreign, key_types=types)


def _renamed(
    prefix: tuple[Any, ...],
    template: OptimizerStateDict,
    entries: Sequence[_reshard.Entry],
    rename: Rename,
) -> list[Entry]:
    """What a checkpoint has of an optimizer under other keys.

    Names are known in one direction only, from what is wanted to what is stored. So everything is tried that could be wanted:
    every slot that anything in the checkpoint has, of every parameter; every field, of every group.
    """
    assert template.slots is not None
    stored = {entry.key: entry for entry in entries}
    slots: dict[tuple[Any, ...], None] = {}
    fields: dict[tuple[Any, ...], None] = {}
    for entry in entries:
        path = entry.path
        for index, part in enumerate(path):
            for word, tails in (("state", slots), ("param_groups", fields)):
                if part == word and len(path) > index + 2:
                    tails[tuple(path[index + 2 :])] = None
                elif isinstance(part, str) and part.startswith(f"{word}."):
                    tails[(part.rsplit(".", 1)[1],)] = None
    names = list(template.slots.layouts)
    groups = template.get("param_groups")
    if "state" in template or isinstance(groups, list):
        wanted: list[tuple[Any, ...]] = [("state", name, *slot) for name in names for slot in slots]
        wanted += [("param_groups", index, *field) for index in range(len(groups or ())) for field in fields]
    else:
        wanted = [(".".join(("state", name, *map(str, slot))),) for name in names for slot in slots]
        wanted += [(".".join(("param_groups", name, *map(str, field))),) for name in names for field in fields]
    below: list[Entry] = []
    template.names = {}
    for path in wanted:
        key = rename(".".join(map(str, (*prefix, *path))))
        there = _at(template, path)
        if key is None and there is not None and not SlotMemory.waits(there):
            # Left alone, and so as it is.
            below.append(Entry(path, None, ()))
        elif key is not None and key in stored:
            place = stored[key].path
            below.append(Entry(path, stored[key].dtype_code, stored[key].shape))
            if path[0] == "state" and len(place) >= len(path):
                template.names[str(place[1 - len(path)])] = str(path[1])
    return below


def expand(state: Any, checkpoint: Any, rename: Rename | None = None) -> Iterator[OptimizerStateDict]:
    """Gives every optimizer state dict inside of a state that is about to be loaded the structure of the checkpoint.

    `rename` says under which key the checkpoint has a wanted one. Yields each dict as it has it: to be settled when all is
    loaded, and to be given back when that fails.
    """
    for _, template, nested in _from_checkpoint(state, checkpoint, rename):
        if "state" in template or "param_groups" in template:
            nested.setdefault("state", {})
            nested.setdefault("param_groups", [])
        template.take_structure(nested)
        yield template


def lacking(state: Any, checkpoint: Any) -> dict[Any, Any]:
    """What the optimizer state dicts inside of a state lack of a checkpoint, to be loaded and given to :func:`complete`."""
    result: dict[Any, Any] = {}
    for prefix, template, nested in _from_checkpoint(state, checkpoint):
        template.unknown = ()
        missing = _difference(nested, template)
        if missing:
            at = result
            for key in prefix[:-1]:
                at = at.setdefault(key, {})
            if prefix:
                at[prefix[-1]] = missing
            else:
                at.update(missing)
    return result


def _difference(nested: Mapping[Any, Any], template: Mapping[Any, Any]) -> dict[Any, Any]:
    missing: dict[Any, Any] = {}
    for key, value in nested.items():
        if key not in template:
            missing[key] = value
        elif isinstance(value, dict) and isinstance(template[key], Mapping):
            below = _difference(value, template[key])
            if below:
                missing[key] = below
    return missing


def complete(state: Any, loaded: Mapping[Any, Any]) -> None:
    """Puts what was lacking into its place."""
    for key, value in loaded.items():
        there = state[key] if isinstance(state, list) or key in state else None
        if isinstance(there, (dict, list)) and isinstance(value, Mapping):
            complete(there, value)
        else:
            state[key] = value


def _find(value: Any, path: tuple[Any, ...], found: list[tuple[tuple[Any, ...], OptimizerStateDict]]) -> None:
    if isinstance(value, OptimizerStateDict):
        found.append((path, value))
    elif isinstance(value, Mapping):
        for key, below in value.items():
            # Most of what is in a state are tensors, and asking a protocol about each would take a while.
            if type(below) not in _TENSORS and isinstance(below, (Mapping, list)):
                _find(below, (*path, key), found)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            if isinstance(below, (Mapping, list)):
                _find(below, (*path, index), found)
