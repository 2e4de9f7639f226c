"""Content that each rank has of its own, when another number of ranks loads it than saved it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from .. import _reshard
from .._errors import Mismatch
from ._leaf import PerRank

_Path = tuple[Any, ...]


def resized(
    state: Mapping[Any, Any], checkpoint: Any, rank: int, size: int, read: Callable[[dict[str, Any]], None]
) -> tuple[list[str], list[Callable[[], None]]]:
    """What becomes of the :class:`PerRank` leaves that another number of ranks saved, by their policies.

    Returns:
        the prefixes of keys that are not to be loaded, and what to do when the rest has been.
    """
    skipped: list[str] = []
    later: list[Callable[[], None]] = []
    found = list(_per_rank(state, ()))
    entries = checkpoint.entries() if found else ()
    for path, leaf in found:
        saved = _saved(entries, path)
        if not saved or set(saved) == set(range(size)):
            continue
        name = ".".join(map(str, path))
        if leaf.on_resize == "error":
            raise Mismatch(
                f"{name!r} is content of each rank; {len(saved)} ranks saved it, and {size} load it",
                keys=[name],
                hint='PerRank(value, on_resize="drop") leaves the value as it is, and a function makes this rank\'s out of all',
            )
        skipped.append(name)
        if callable(leaf.on_resize):
            later.append(lambda leaf=leaf, saved=saved, path=path: _give(leaf, saved, path, rank, size, read))  # type: ignore[misc]
    return skipped, later


def _per_rank(state: Any, path: _Path) -> Iterator[tuple[_Path, PerRank]]:
    if isinstance(state, PerRank):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            if isinstance(value, (PerRank, Mapping, list)):
                yield from _per_rank(value, (*path, key))
    elif isinstance(state, list):
        for index, value in enumerate(state):
            if isinstance(value, (PerRank, Mapping, list)):
                yield from _per_rank(value, (*path, index))


def _saved(entries: Iterable[_reshard.Entry], path: _Path) -> dict[int, list[_reshard.Entry]]:
    """The checkpoint's entries of a leaf, by the rank that saved them."""
    text = tuple(map(str, path))
    found: dict[int, list[_reshard.Entry]] = {}
    for entry in entries:
        where = entry.path
        last = str(where[-1])
        if len(where) > len(text) and last.startswith("rank_") and last[5:].isdecimal():
            if tuple(map(str, where[: len(text)])) == text:
                found.setdefault(int(last[5:]), []).append(entry)
    return found


def _give(leaf: PerRank, saved: dict[int, list[_reshard.Entry]], path: _Path, rank: int, size: int, read: Any) -> None:
    wanted = {
        entry.key: None if entry.dtype is None else torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
        for entries in saved.values()
        for entry in entries
    }
    read(wanted)
    values = {}
    for number, entries in saved.items():
        below = [(entry.key, entry.path[len(path) : -1], wanted[entry.key]) for entry in entries]
        whole = len(below) == 1 and not below[0][1]
        values[number] = below[0][2] if whole else _reshard.unflatten(below)
    leaf.value = leaf.on_resize(values, rank, size)  # type: ignore[operator]
